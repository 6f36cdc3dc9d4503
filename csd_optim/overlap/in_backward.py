"""Steps that run in backward: each gradient goes to the devices as soon as it is final, and is freed after its use."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ..accelerator import is_accelerator, is_on_accelerator
from ..bindings import AS_PUSHED
from ..engine.pieces import Pieces
from ..errors import CSDError, CSDRuntimeError, CSDTypeError, CSDValueError
from ..params.grad_source import GradSource
from ..params.groups import Groups, hyperparameters_of, members, name_of
from ..params.param_state import ParamState
from ..params.strides import flat
from ..signals import defer_signals
from ..step.live import Countdown, LiveStep, Phase
from ..step.spec import GradOptions
from ..step.staging import NOTHING, Flow
from ..step.steps import Steps
from ..store.format import Record
from .mode import ConcurrentMode
from .taken import TakenGradient

_CHANGED = (
    "with overlap(free_gradients=True) backward has changed parameters already: they and the states cannot be read "
    "until step() completes these updates, or zero_grad() undoes them"
)
_AGAIN = (
    "a second backward before step(), or a checkpoint with use_reentrant=True, which runs several: with "
    "overlap(free_gradients=True) a step uses the gradients of one backward, and the step is undone. Gradients cannot "
    "be accumulated; use checkpoints with use_reentrant=False"
)

POLL_SECONDS = 0.1  # between two looks whether a backward is gone that has not told


class Lent(NamedTuple):
    """Gradients that the engine reads until these tiles have their parameters."""

    tiles: np.ndarray[Any, Any]  # uint32
    grads: list[torch.Tensor]
    nbytes: int


class Part(NamedTuple):
    """A contiguous gradient, or a contiguous part of one that begins at element `first` of the parameter."""

    grad: torch.Tensor
    first: int

    @property
    def address(self) -> int:
        """The address at which the whole gradient would begin."""
        return self.grad.data_ptr() - self.first * self.grad.element_size()


class Taken(NamedTuple):
    """A parameter whose gradient the step has taken."""

    param_state: ParamState
    version: int  # of the parameter, right after that


class StepsInBackward(ConcurrentMode):
    """The steps of one optimizer and one model: each is under way from the first gradient of a backward until step().

    In between its parameters change, and reading one that may have changed raises CSDRuntimeError. Anything that such a
    step cannot support raises CSDRuntimeError, too, and undoes the step: parameters and states are those before that
    backward.
    """

    def __init__(self, steps: Steps, model: torch.nn.Module, max_lent_bytes: int) -> None:
        """`max_lent_bytes`: bytes of gradients that may be in flight; backward waits while there are more."""
        super().__init__(steps, model)
        self._finalizer = steps.call_at_end(self._give_up)
        self._max_lent_bytes = max_lent_bytes
        self._waited, self._early_elems = 0.0, 0  # of the last step: seconds waited, elements pushed in backward
        self._aborted_task = -1  # number of a backward whose step was undone before the backward ended
        self._reset()
        self._hooks += [
            p.register_post_accumulate_grad_hook(self._on_grad)  # type: ignore[no-untyped-call]
            for p in self._trainable_params()
        ]

    def _reset(self) -> None:
        """Reset all state: no step is under way."""
        self.active: bool = False
        self._live: LiveStep | None = None
        self._task, self._is_backward_done = -1, False  # torch's number of the backward; whether it has ended
        self._no_backward = threading.Event()  # set if no backward is under way: it has ended or failed
        self._no_backward.set()
        self._backward_end: Callable[[], _BackwardEnd | None] = lambda: None  # a weak reference
        self._constants: list[dict[str, Any]] = []  # the groups' hyperparameters
        self._awaited: dict[int, ParamState] = {}  # by id of the parameter: all that may take part
        self._taken: dict[int, Taken] = {}  # likewise: those whose gradients the step has taken
        self._pieces: Pieces | None = None
        self._countdown = Countdown(np.zeros(0, np.int64), ())  # of gradients
        self._parts: dict[int, dict[int, Part]] = {}  # by tile that lacks gradients, then by row: those it has
        self._lent: deque[Lent] = deque()
        self._lent_bytes = 0  # of the gradients in _lent, and of those to be copied to images
        self._images: frozenset[int] = frozenset()  # tiles that travel through staging buffers, as for an accelerator
        self._flow: Flow | None = None  # of the tiles in _images
        self._to_copy: dict[int, int] = {}  # by tile of _images that is in flight: bytes of its gradients

    def end(self) -> None:
        try:
            self.abandon()
        finally:
            self._finalizer.detach()
            super().end()

    def close(self) -> None:
        self.end()

    def _give_up(self) -> None:
        """Abandon the step of an optimizer that was dropped."""
        with contextlib.suppress(CSDError):
            self.abandon()

    # ---- in backward -----------------------------------------------------------

    def _on_grad(self, p: torch.Tensor) -> None:
        """Take a final gradient, as a hook. Raises what a step raises, and CSDRuntimeError; then the step is undone."""
        optimizer = self._steps.arguments  # which is not dropped meanwhile
        if optimizer is None or p.grad is None:
            return
        with self._engine.lock, torch.no_grad():  # several threads may run backward
            task = torch._C._current_graph_task_id()
            if task == self._aborted_task:  # the step of this backward was undone already
                raise CSDRuntimeError(_AGAIN)
            try:
                if self._live and task != self._task:
                    raise CSDRuntimeError(_AGAIN)
                if self._live is None:
                    self._begin(task)
                self._take(p, p.grad)
                self._free_gradients()
            except BaseException:  # Ctrl-C, too
                self.abandon()
                raise

    def _begin(self, task: int) -> None:
        engine = self._engine
        with defer_signals():
            engine.check_open()
            check_can_free(self._steps)
            live = self._steps.prepare_without_gradients()
            step, spec = live.step, live.spec
            moved = any(s.param_and_copy or s.grad_dtype is not s.param.dtype for s in spec.sources.values())
            if moved or spec.table["topk"].any():
                raise CSDRuntimeError(
                    "overlap(free_gradients=True): a parameter has moved in memory, or has a residual of Top-K"
                )
            self._awaited = {id(b.param): b for b in spec.plan.param_states}
            self._constants = [hyperparameters_of(group) for group in self._steps.groups]
            self._pieces, missing = Pieces(engine), np.zeros(engine.n_tiles, np.int64)
            has_grad = spec.table["grad"][self._pieces.all["param"]] != 0
            np.add.at(missing, self._pieces.all["tile"][has_grad], 1)
            self._waited, self._early_elems = 0.0, 0
            self._live, self._task, self.active = live, task, True
            no_backward = threading.Event()
            end = _BackwardEnd(self, task, no_backward)
            # In this order: a reader on another thread that finds the event takes `end` for gone without the other one.
            self._backward_end, self._no_backward = weakref.ref(end), no_backward
            live.begin(Phase.OPEN, order=AS_PUSHED, kept_alive=self._lent)
            if step.ring:
                step.ring.begin(spec.sources, step.given)
                self._images, self._flow = frozenset(step.images), Flow(step.ring, engine, on_copied=self._note_copied)
            if step.given and step.near:
                step.given.set_updates(step.near, NOTHING)
            self._countdown = Countdown(missing, live.tiles.tolist())
            torch.autograd.Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]

    def _take(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        param_state = self._awaited.get(id(p))
        if param_state is None:
            raise CSDRuntimeError("a parameter got a gradient that required none when this backward began")
        dtype = param_state.local.dtype
        if grad.dtype is not dtype or grad.layout is not torch.strided:
            raise CSDTypeError(
                f"the gradient of {param_state.name} is {grad.dtype}, {grad.layout}; overlap(free_gradients=True) "
                f"takes dense ones of the parameter's dtype, {dtype}"
            )
        was_synced = not param_state.is_dirty
        # The parameter may change from now on: make torch refuse a backward through graphs that saved it.
        torch.autograd.graph.increment_version([p])
        if was_synced:
            param_state.mark_synced()
        self._taken[id(p)] = Taken(param_state, param_state.version_now)
        p.grad = TakenGradient(p)
        grad = grad.detach().resolve_neg().contiguous()
        near = self._live.step.near if self._live else None
        if near and param_state.index in near.rows:
            near.launch_one(param_state.index, grad, timed=self._engine.near_spans is not None)
            self._hand_over(param_state.index, None)
        else:
            self._hand_over(param_state.index, grad)

    def _hand_over(self, row: int, grad: torch.Tensor | None) -> None:
        """Push the tiles that lack no other gradient. For each other tile a copy of its part is kept, not the whole.

        `grad` None: the accelerator has used it already.
        """
        assert self._pieces is not None
        pieces = self._pieces.of(row)
        self._countdown.arrive(pieces["tile"].tolist())
        complete: dict[int, dict[int, Part]] = {}
        for _, tile, first, _, n in pieces.tolist():
            lacks = self._countdown.lacks(tile)
            parts = self._parts.pop(tile, {})
            if grad is not None:
                copies = lacks and n < grad.numel()
                parts[row] = Part(flat(grad)[first : first + n].clone(), first) if copies else Part(grad, 0)
            (self._parts if lacks else complete)[tile] = parts
        if self._live and (ring := self._live.step.ring) and grad is not None and is_on_accelerator(grad):
            ring.wait_for_current(grad.device)
        for tile, parts in complete.items():
            self._push(tile, parts)
        read = [tile for tile in complete if tile not in self._images]
        if grad is not None and read:
            others = [part.grad for tile in read for other, part in complete[tile].items() if other != row]
            lent = [grad, *others]
            self._lent.append(Lent(np.array(read, np.uint32), lent, sum(part.nbytes for part in lent)))
            self._lent_bytes += self._lent[-1].nbytes

    def _push(self, tile: int, parts: dict[int, Part]) -> None:
        """Push a tile with the gradients `parts`, by row; its other parameters have no gradient."""
        pieces = self._engine.pieces_of(tile)
        if tile in self._images:
            assert self._flow
            self._flow.add(tile, self._sources_of(pieces["param"].tolist(), parts))
            nbytes = [n * parts[row].grad.element_size() for row, _, _, _, n in pieces.tolist() if row in parts]
            self._to_copy[tile] = sum(nbytes)
            self._lent_bytes += self._to_copy[tile]
        else:
            self._engine.push_grads(
                tile, [parts[row].address if row in parts else 0 for row in pieces["param"].tolist()]
            )
        self._countdown.note_pushed(tile)

    def _sources_of(self, rows: list[int], parts: dict[int, Part]) -> dict[int, GradSource]:
        """Return the gradient sources, by row, of a tile that travels through a staging buffer."""
        assert self._live
        prepared, sources = self._live.spec.sources, {}
        for row in rows:
            if row in parts:
                part = parts[row]
                sources[row] = dataclasses.replace(prepared[row], grad=flat(part.grad), first=part.first)
            elif row in prepared:
                sources[row] = dataclasses.replace(prepared[row], is_dropped=True)
        return sources

    def _note_copied(self, tile: int, sources: Mapping[int, GradSource]) -> None:
        for source in sources.values():
            source.release()
        self._lent_bytes -= self._to_copy.pop(tile)

    def _free_gradients(self) -> None:
        """Free gradients that were used or copied; wait while more than `max_lent_bytes` are in flight.

        Raises CSDOSError.
        """
        began, made_progress = time.perf_counter(), True
        while made_progress:
            wait = self._lent_bytes > self._max_lent_bytes
            made_progress = self._flow is not None and self._flow.advance(wait=wait)
            if not made_progress and self._lent and self._engine.params_ready(self._lent[0].tiles, wait=wait):
                self._lent_bytes -= self._lent.popleft().nbytes
                made_progress = True
        self._waited += time.perf_counter() - began

    def note_backward_ended(self, task: int, *, succeeded: bool) -> None:
        """Note that a backward has ended (`succeeded`) or failed; undo the step of one that failed."""
        if task == self._task and not self._is_backward_done:
            self._is_backward_done = succeeded
            if not succeeded:
                self.abandon()

    # ---- what is asked of a step under way -----------------------------------------

    def wait(self, params: Iterable[torch.Tensor]) -> None:
        """Prepare to read these parameters: see Arrivals. Raises CSDRuntimeError if one may have changed."""
        if self._engine.closed:  # a new optimizer may have the parameters
            return
        self._steps.finish_undo()
        if any(id(p) in self._taken for p in params):
            self.settle()

    def settle(self) -> None:
        """Return when no step is under way. Undoes one whose gradients were cleared, and which step() cannot take.

        Raises CSDRuntimeError if step() can still take it.
        """
        self._wait_for_failure()
        if self._engine.closed:
            return
        with self._engine.lock:
            self._steps.finish_undo()
            if self._live is None:
                return
            if not self._is_backward_done or not self._gradients_cleared():
                raise CSDRuntimeError(_CHANGED)
            self.abandon()

    def _wait_for_failure(self) -> None:
        """Wait until backward has ended. If it failed, a thread of autograd undoes the step, perhaps a bit later."""
        if torch._C._current_graph_task_id() >= 0:  # in a backward
            return
        no_backward, end, task = self._no_backward, self._backward_end, self._task
        while not no_backward.wait(POLL_SECONDS):
            if end() is None:  # a signal has interrupted its __del__, which could not tell
                self.note_backward_ended(task, succeeded=False)
                no_backward.set()
        # abandon() replaces `_no_backward` by a set one before it undoes the step under this lock.
        with self._engine.lock:
            pass

    def drain(self, *, collective: bool) -> None:
        self.settle()

    def clear_gradients(self, *, set_to_none: bool) -> bool:
        self.abandon() if set_to_none else self.settle()
        return False

    def _gradients_cleared(self) -> bool:
        """Return whether all gradients were set to None, as model.zero_grad() does."""
        return all(taken.param_state.param.grad is None for taken in self._taken.values())

    def abandon(self) -> None:
        """Undo the step: parameters and states are those before backward; gradients that were taken are lost.

        Raises what LiveStep.undo() raises.
        """
        with defer_signals(), self._engine.lock, torch.no_grad():
            live, taken, flow = self._live, self._taken, self._flow
            if live is None:
                return
            lent, parts = self._lent, self._parts  # the engine reads these gradients until the step is undone
            if not self._is_backward_done:
                self._aborted_task = self._task
            self._reset()
            self.active, self._taken = True, taken  # so that a read on another thread waits in settle()
            try:
                with contextlib.ExitStack() as last:
                    last.callback(live.undo)  # also if the accelerator fails
                    if flow and live.step.ring:
                        live.step.ring.join()  # what is being copied to parameters arrives before they are restored
            finally:
                self._clear_placeholders(taken)
                lent.clear()
                parts.clear()
                self.active, self._taken = self._steps.undoing is not None, {}

    @staticmethod
    def _clear_placeholders(taken: dict[int, Taken]) -> None:
        for param_state, _ in taken.values():
            if isinstance(param_state.param.grad, TakenGradient):
                param_state.param.grad = None

    # ---- in step() -------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        return self._live is not None

    def before_step(self, *, skips: bool, scaled: bool) -> None:
        """Undo the step, and raise CSDRuntimeError, if step() cannot take it: see _mismatch()."""
        if self._spans:
            self._spans.append_spans()
        self._wait_for_failure()
        if self._live and self._is_backward_done and self._gradients_cleared():
            self.abandon()
        if why := self._mismatch(scaled=scaled):
            self.abandon()
            raise CSDRuntimeError(f"overlap(free_gradients=True) cannot take this step, and it is undone: {why}")

    def _mismatch(self, *, scaled: bool) -> str:
        """Return why step() cannot take the step under way; "" if it can."""
        groups = self._steps.groups
        has_grad = [
            (name_of(groups, k, i), p)
            for k, group in enumerate(groups)
            for i, p in enumerate(list.__iter__(group["params"]))
            if p.grad is not None
        ]
        if self._live is None:
            old = [name for name, p in has_grad if isinstance(p.grad, TakenGradient)]
            return f"an earlier step has used the gradient of {old[0]}: call zero_grad() between steps" if old else ""
        if not self._is_backward_done:
            return "backward is still going on"
        if scaled:
            return "a GradScaler scales gradients, which are used in backward already"
        for name, p in has_grad:
            if id(p) not in self._taken or not isinstance(p.grad, TakenGradient):
                return (
                    f"{name} has a gradient that this backward has not made, or that was set since: call zero_grad() "
                    "between steps, and overlap() again when parameters were added, or require gradients now"
                )
        if len(has_grad) < len(self._taken):
            return "some gradients were set to None after backward"
        if any(b.version_now != version for b, version in self._taken.values()):
            return "parameters were written between backward and step()"
        if self._constants != [hyperparameters_of(group) for group in groups]:
            return "a learning rate, or another hyperparameter, was changed between backward and step()"
        return ""

    def end_step(self, record: Record | None) -> None:
        """Complete the step with the tiles that were not pushed in backward; undo it if that fails."""
        live, engine = self._live, self._engine
        assert live is not None
        step, spec = live.step, live.spec
        self._early_elems = sum(map(engine.elems_of, self._countdown.pushed))
        fired = {taken.param_state.index for taken in self._taken.values()}
        without = [b.index for b in spec.plan.param_states if b.index not in fired]
        try:
            live.request(record, without)
            for tile in self._countdown.left:
                self._push(tile, self._parts.get(tile, {}))
            if self._flow and step.ring:
                while self._flow.advance(wait=True):
                    pass
                step.ring.join()
            took_part = [b for b in spec.plan.param_states if b.index in fired]
            spec.plan = dataclasses.replace(spec.plan, params=[b.param for b in took_part], param_states=took_part)
            live.land()
        except BaseException:
            self.abandon()
            raise
        live.mark_synced()
        engine.tile_rank = self._countdown.rank()  # the next backward makes gradients in the same order
        self._reset()

    def note_undo(self) -> None:
        self.active |= self._steps.undoing is not None

    def stats(self) -> dict[str, Any]:
        return {"waited": self._waited, "early_params": self._early_elems, "redone": {}}


class _BackwardEnd:
    """A callback queued in a backward. Autograd calls it at the end; after an exception it drops it uncalled."""

    def __init__(self, steps: StepsInBackward, task: int, no_backward: threading.Event) -> None:
        self._steps, self._task, self._no_backward = steps, task, no_backward

    def __call__(self) -> None:
        self._steps.note_backward_ended(self._task, succeeded=True)
        self._no_backward.set()

    def __del__(self) -> None:
        try:
            with contextlib.suppress(CSDError):  # if parameters cannot be restored, their next reader says why
                self._steps.note_backward_ended(self._task, succeeded=False)
        finally:  # otherwise a reader of a parameter would wait forever
            self._no_backward.set()


def check_can_free(steps: Steps) -> None:
    """Raise CSDValueError if gradients cannot be freed in backward."""
    if why := _cannot_free(steps.groups, steps.options):
        raise CSDValueError(f"overlap(free_gradients=True) is not possible: {why}")


def _cannot_free(groups: Groups, options: GradOptions) -> str:
    if options.max_grad_norm is not None:
        return "max_grad_norm is set, and the norm of all gradients is known only when backward is over"
    if options.topk is not None or any(group.get("topk") is not None for group in groups):
        return "gradients are compressed (topk)"
    for k, i, p in members(groups):
        name = name_of(groups, k, i)
        if not p.requires_grad:
            continue
        if p.is_meta or (is_on_accelerator(p) and not is_accelerator(p.device)):
            return f"{name} is on {p.device}: gradients are taken from host memory, or this process's accelerator"
        if not p.is_contiguous() or p.is_complex():
            return f"{name} is complex, or not contiguous"
        if options.grad_dtype not in (None, p.dtype):
            return f"grad_dtype is {options.grad_dtype}, and {name} {p.dtype}: gradients would be copied"
    return ""
