"""State of one optimizer that outlives a step, such as the count of steps and an unfinished undo."""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ..distributed.ranks import Ranks
from ..engine.engine import Engine
from ..errors import CSDError, CSDTornError
from ..grad_modes import no_autograd
from ..params.state_map import StateMap
from ..signals import defer_signals
from ..store.format import Record
from .accelerator_updates import NO_UPDATES, AcceleratorUpdates
from .undo import Rollback, Undo


class StepHistory:
    """State that outlives a step: counts, an unfinished undo."""

    engine: Engine  # set when it is open

    def __init__(self, state_map: StateMap, ranks: Ranks | None) -> None:
        self.state_map: StateMap = state_map
        self.ranks: Ranks | None = ranks
        self.steps_taken: int = 0  # number of steps taken, equal on all ranks
        self.has_updated: bool = False  # whether the last step has updated anything
        self.accelerated: AcceleratorUpdates = NO_UPDATES  # the last step's updates on the accelerator
        self.in_flight: bool = False  # states of the last step may still be in transit
        self.undoing: Undo | Rollback | None = None  # an undo that has not restored all parameters yet
        self._forward_guard: RemovableHandle | None = None  # set together with `undoing`

    def commit(self, record: Record | None) -> None:
        """Begin to commit a complete step. Raises CSDOSError.

        With several ranks nothing is raised here: Committer.confirm() then commits again, and raises on all ranks.
        """
        with contextlib.suppress(CSDError) if self.ranks else contextlib.nullcontext():
            self.engine.committer.commit(record)

    def undo(self, undo: Undo) -> None:
        """Undo a step. Raises what finish_undo() raises."""
        self.undoing = undo  # even if interrupted, the undo is finished before parameters are read
        self.in_flight = True  # the windows may show states of the undone step
        self.finish_undo(collective=True)

    def finish_undo(self, *, collective: bool = False) -> None:
        """Return when all parameters are restored, if a step is being undone. `collective`: all ranks call this.

        Raises what Undo.finish() raises.
        """
        engine: Engine | None = getattr(self, "engine", None)
        if engine and engine.states.rolled_back and not engine.closed:
            self.undoing = Rollback(engine, self.state_map)  # of all parameters, so it replaces another undo
        if (undoing := self.undoing) is None:
            return
        if undoing.engine.pid != os.getpid():
            undoing.engine.check_open()  # raises in a forked process, where the lock may never be released
        with defer_signals(), undoing.engine.lock, no_autograd():
            if self.undoing is not undoing:  # another thread was faster
                return
            if undoing.is_collective and not collective:
                raise CSDTornError(
                    errno.EIO,
                    "a step failed, and parameters are a mix of two steps until all ranks call step()",
                )
            try:
                undoing.finish()
            finally:
                # Torn states have no old values: each step says so. A collective undo ends on all ranks, or on none.
                if undoing.is_done or (undoing.engine.states.torn and not undoing.is_collective):
                    self.undoing = None
                    if self._forward_guard:
                        self._forward_guard.remove()
                        self._forward_guard = None
                elif not self._forward_guard:
                    self._guard_forwards(undoing)

    def why_undo_fails(self) -> CSDError | None:
        """Finish the undo of an earlier step. Returns the error if that fails, else None. A collective."""
        try:
            self.finish_undo(collective=True)
        except CSDError as e:
            return e
        return None

    def _guard_forwards(self, undoing: Undo | Rollback) -> None:
        """Finish the undo before the forward of any module with unknown parameters: gradients would be of a mix."""
        weak, unknown = weakref.ref(self), {id(state.param) for state in undoing.unknown}

        def before_forward(module: torch.nn.Module, _: Any) -> None:
            history = weak()
            if history is None or undoing.engine.closed:  # close() has warned; another optimizer may have them now
                hook.remove()
            elif any(id(p) in unknown for p in module.parameters()):
                history.finish_undo()

        self._forward_guard = hook = register_module_forward_pre_hook(before_forward)
