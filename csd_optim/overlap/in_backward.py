"""Steps that run in backward: each final gradient goes to the devices at once, and is freed after its use."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ..accelerator import is_accelerator, is_on_accelerator
from ..errors import CSDError, CSDRuntimeError, CSDValueError
from ..grad_modes import no_autograd
from ..params.groups import Groups, hyperparameters_of, members, name_of
from ..signals import defer_signals
from ..step.spec import GradOptions
from ..step.steps import Steps
from ..step.travel import Travel
from ..store.format import Record
from .backward_run import BackwardRun, TakenGradient
from .lent import LentGradients
from .mode import ConcurrentMode
from .together import Together

_CHANGED = (
    "with overlap(free_gradients=True) backward has changed parameters already: they and the states cannot be read, as "
    "another forward or GradScaler does, until step() completes these updates, or zero_grad() undoes them"
)
_CHANGED_BY_PARENT = (
    "process {} forked this one between backward and step(), when overlap(free_gradients=True) had changed some "
    "parameters already, and the others will not arrive here. Fork before backward or after step(); likewise, iterate "
    "then over a DataLoader whose workers use the model"
)
_AGAIN = (
    "a second backward before step(), or a checkpoint with use_reentrant=True, which runs several: with "
    "overlap(free_gradients=True) a step uses the gradients of one backward, and the step is undone. Gradients cannot "
    "be accumulated; use checkpoints with use_reentrant=False"
)

POLL_SECONDS = 0.1  # how often to check for a backward that has ended without notice


class StepsInBackward(ConcurrentMode):
    """The steps of one optimizer and one model: each is under way from the first gradient of a backward until step().

    In between parameters change, and reading a parameter that may have changed raises CSDRuntimeError. Anything that
    such a step cannot support raises CSDRuntimeError, too, and undoes the step: parameters and states are as before
    that backward.
    """

    def __init__(self, steps: Steps, model: torch.nn.Module, max_lent_bytes: int) -> None:
        """`max_lent_bytes`: bytes of gradients that may be in flight; backward waits while more are."""
        super().__init__(steps, model)
        self.together: Together | None = Together(steps.ranks, steps.engine, {}) if steps.ranks else None
        self._failure: CSDError | None = None  # of the last backward here; with several ranks step() raises it
        self._is_taken = False  # the ranks have agreed on the step that step() takes
        self._finalizer = steps.call_at_end(self._undo_quietly)
        self._max_lent_bytes = max_lent_bytes
        self._waited, self._early_elems = 0.0, 0  # of the last step: seconds waited, elements pushed in backward
        self._aborted_task = -1  # number of a backward whose step was undone before the backward ended
        self._run: BackwardRun | None = None  # the step under way
        self._undone: BackwardRun | None = None  # a step while it is being undone
        self._hooks += [
            p.register_post_accumulate_grad_hook(self._on_grad)  # type: ignore[no-untyped-call]
            for p in self._trainable_params()
        ]

    @property
    def kind(self) -> int:
        return -self.together.kind if self.together else -1

    def close(self) -> None:
        try:
            self.undo()
        finally:
            self._finalizer.detach()
            if self.together:
                self.together.leave()
            super().close()

    def _undo_quietly(self) -> None:
        """Undo the step of an optimizer that was dropped."""
        with contextlib.suppress(CSDError):
            self.undo()

    # ---- in backward -----------------------------------------------------------

    def _on_grad(self, p: torch.Tensor) -> None:
        """Take a final gradient, as a hook. Raises what a step raises, and CSDRuntimeError; then the step is undone.

        With several ranks step() raises instead, on all ranks, because the others wait for this rank's backward.
        Signals wait until the gradient is taken; exceptions of their handlers come out of here.
        """
        optimizer = self._steps.arguments  # keeps the optimizer alive meanwhile
        if optimizer is None or p.grad is None or self._failure:
            return
        if self._run is None and not self._may_begin():
            return
        task = torch._C._current_graph_task_id()
        try:
            with defer_signals(), self._engine.lock, no_autograd():  # several threads may run backward
                if not self._engine.closed:  # by a signal handler, just now
                    self._take_final(p, task)
        except BaseException:  # of a signal handler, too
            if (run := self._run) and task == run.task:  # else another backward has begun since
                self.undo()
            raise

    def _take_final(self, p: torch.Tensor, task: int) -> None:
        if task == self._aborted_task:  # the step of this backward was undone already
            raise CSDRuntimeError(_AGAIN)
        try:
            if self._run and task != self._run.task:
                raise CSDRuntimeError(_AGAIN)
            run = self._run or self._begin(task)
            if p.grad is not None:
                run.take(p, p.grad)
            self._waited += run.lent.free_used()
        except BaseException as failure:
            self.undo()
            if not (self.together and isinstance(failure, CSDError)):
                raise
            self._failure = failure

    def _may_begin(self) -> bool:
        """Return whether a step may begin: the last one is durable on all ranks, so its predecessor may be overwritten.

        Waits for the ranks' vote. If this returns False, no gradient is taken in backward: step() takes them as usual,
        or raises on all ranks. The first step of several ranks always runs that way, because ranks compare parameters
        in it.
        """
        if not self.together:
            return True
        if vote := self.together.vote:
            vote.wait()
        return self._steps.plan is not None and self.together.has_met and self._engine.committer.is_confirmed

    def _begin(self, task: int) -> BackwardRun:
        engine = self._engine
        engine.check_open()
        check_can_free(self._steps)
        live = self._steps.prepare_without_gradients()
        spec = live.spec
        moved = any(s.param_and_copy or s.grad_dtype is not s.param.dtype for s in spec.sources.values())
        if moved or spec.table["topk"].any():
            raise CSDRuntimeError(
                "overlap(free_gradients=True): a parameter has moved in memory, or has a residual of Top-K"
            )
        awaited = {id(state.param): state for state in spec.plan.param_states}
        constants = [hyperparameters_of(group) for group in self._steps.groups]
        run = BackwardRun(task, live, LentGradients(live, self._max_lent_bytes), awaited, constants)
        end = _BackwardEnd(self, run)
        run.end = weakref.ref(end)
        self._waited, self._early_elems = 0.0, 0
        self._run, self.active = run, True
        run.lent.begin()
        torch.autograd.Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]
        return run

    def note_backward_ended(self, run: BackwardRun, *, succeeded: bool) -> None:
        """Note that the backward of a step has ended (`succeeded`) or failed; undo the step of a failed backward."""
        if run is self._run and not run.has_succeeded:
            run.has_succeeded = succeeded
            if not succeeded:
                self.undo()

    # ---- what is asked of a step under way -----------------------------------------

    def wait(self, params: Iterable[torch.Tensor]) -> None:
        """Prepare to read these parameters: see Arrivals. Raises CSDRuntimeError if one may have changed."""
        if self._engine.closed:  # a new optimizer may have the parameters
            return
        self._steps.finish_undo()
        run = self._run or self._undone
        if run and any(id(p) in run.taken for p in params):
            self.settle()

    def settle(self) -> None:
        """Return when no step is under way. Undoes a step whose gradients were cleared, as step() cannot take it.

        Raises CSDRuntimeError if step() can still take the step, and in a child that was forked during a step.
        """
        if self._run and self._engine.pid != os.getpid():
            raise CSDRuntimeError(_CHANGED_BY_PARENT.format(self._engine.pid))
        self._wait_for_failure()
        if self._engine.closed:
            return
        with self._engine.lock:
            self._steps.finish_undo()
            run = self._run
            if run is None:
                return
            if not run.has_succeeded or not run.is_cleared:
                raise CSDRuntimeError(_CHANGED)
            self.undo()

    def _wait_for_failure(self) -> None:
        """Wait until backward has ended. If it failed, a thread of autograd undoes the step, perhaps a bit later."""
        if torch._C._current_graph_task_id() >= 0:  # in a backward
            return
        run = self._run
        while run and not run.ended.wait(POLL_SECONDS):
            if run.end() is None:  # a signal has interrupted its __del__ before the notice
                self.note_backward_ended(run, succeeded=False)
                run.ended.set()
        # undo() takes `_run` away before it undoes the step under this lock.
        with self._engine.lock:
            pass

    def drain(self, *, collective: bool) -> CSDError | None:
        failure = None
        try:
            self.settle()
        except CSDError as e:  # not on ranks where backward has failed
            failure = e
        if collective and self.together:  # else the vote would be taken for that on a later commit
            self.together.agree()
        return failure

    def clear_gradients(self, *, set_to_none: bool) -> bool:
        self._failure = None
        self.undo() if set_to_none else self.settle()
        return False

    def undo(self) -> None:
        """Undo the step: parameters and states are as before backward; gradients that were taken are lost.

        Raises what LiveStep.undo() raises.
        """
        with defer_signals(), self._engine.lock, no_autograd():
            run = self._run
            if run is None:
                return
            if not run.has_succeeded:
                self._aborted_task = run.task
            self._undone = run  # so that a read on another thread waits in settle()
            self._run, lent = None, run.lent
            try:
                with contextlib.ExitStack() as last:
                    last.callback(run.live.undo)  # even if the accelerator fails
                    lent.join()  # copies to parameters arrive before the old values
            finally:
                run.clear_placeholders()
                lent.clear()
                self.active, self._undone = self._steps.undoing is not None, None

    # ---- in step() -------------------------------------------------------------

    @property
    def under_way(self) -> Travel | None:
        return run.live.travel if (run := self._run) else None

    def before_step(self, *, scaled: bool) -> CSDError | None:
        """Undo the step, and return CSDRuntimeError, if step() cannot take it: see _mismatch()."""
        if self._spans:
            self._spans.append_spans()
        if self.together:
            self.together.agree()
        self._wait_for_failure()
        failure, self._failure, self._is_taken = self._failure, None, False
        if (run := self._run) and run.has_succeeded and run.is_cleared:
            self.undo()
        if failure or not (why := self._mismatch(scaled=scaled)):
            return failure
        self.undo()
        return CSDRuntimeError(f"overlap(free_gradients=True) cannot take this step, and it is undone: {why}")

    def launch(self, travel: Travel | None, record: Record | None, *, all_can: bool) -> bool:
        self._get_ready()
        return False

    def _get_ready(self) -> None:
        """Get ready to vote on the step that all ranks are about to take."""
        self._is_taken = True
        if self.together:
            self.together.get_ready()

    def wait_for_unguarded(self) -> None:
        """Start a vote in the background on the commit of the step, which is complete on all ranks."""
        if self.together and self._is_taken:
            self.together.completed()

    def _mismatch(self, *, scaled: bool) -> str:
        """Return why step() cannot take the step under way; "" if it can."""
        groups, run = self._steps.groups, self._run
        has_grad = [
            (name_of(groups, k, i), p)
            for k, group in enumerate(groups)
            for i, p in enumerate(list.__iter__(group["params"]))
            if p.grad is not None
        ]
        if run is None:
            old = [name for name, p in has_grad if isinstance(p.grad, TakenGradient)]
            return f"an earlier step has used the gradient of {old[0]}: call zero_grad() between steps" if old else ""
        if not run.has_succeeded:
            return "backward is still going on"
        if scaled:
            return "a GradScaler scales gradients, which are used in backward already"
        for name, p in has_grad:
            if id(p) not in run.taken or not isinstance(p.grad, TakenGradient):
                return (
                    f"{name} has a gradient that this backward has not made, or that was set since: call zero_grad() "
                    "between steps, and overlap() again when parameters were added, or require gradients now"
                )
        if len(has_grad) < len(run.taken):
            return "some gradients were set to None after backward"
        if any(state.version_now != version for state, version in run.taken.values()):
            return "parameters were written between backward and step()"
        if run.constants != [hyperparameters_of(group) for group in groups]:
            return "a learning rate, or another hyperparameter, was changed between backward and step()"
        return ""

    def end_step(self, record: Record | None, *, all_can_undo: bool) -> None:
        """Complete the step with the tiles that were not pushed in backward; undo it if that fails."""
        run = self._run
        assert run
        live, lent = run.live, run.lent
        spec, self._early_elems = live.spec, lent.pushed_elems
        fired = {taken.param_state.index for taken in run.taken.values()}
        without = [state.index for state in spec.plan.param_states if state.index not in fired]
        self._get_ready()

        def push_rest() -> None:
            live.request(record, without)
            lent.push_rest()
            took_part = [state for state in spec.plan.param_states if state.index in fired]
            params = [state.param for state in took_part]
            spec.plan = dataclasses.replace(spec.plan, params=params, param_states=took_part)

        try:
            # Backward makes the last gradients first.
            live.run(descending=True, all_can_undo=all_can_undo, pushed=push_rest)
        except BaseException:
            self.undo()
            raise
        self._engine.tile_rank = lent.rank()  # the next backward makes gradients in the same order
        lent.clear()
        self._run, self.active = None, False

    def note_undo(self) -> None:
        if self.together and not self._is_taken:  # skipped, or not possible on some rank: so on all ranks
            self.undo()
        self.active: bool = self.active or self._steps.undoing is not None

    def stats(self) -> dict[str, Any]:
        return {"waited": self._waited, "early_params": self._early_elems, "redone": {}}


class _BackwardEnd:
    """A callback queued in a backward. Autograd calls it at the end, or drops it uncalled after an exception."""

    def __init__(self, steps: StepsInBackward, run: BackwardRun) -> None:
        # Autograd keeps the callback until the backward ends, and an undo need not keep the step so long. Who waits for
        # the end of a backward has its run.
        self._steps, self._run = steps, weakref.ref(run)

    def __call__(self) -> None:
        with defer_signals():
            if run := self._run():
                self._steps.note_backward_ended(run, succeeded=True)
                run.ended.set()

    def __del__(self) -> None:
        run = self._run()
        if run and not run.ended.is_set():  # else go: Python swallows what a signal's handler raises in here
            try:
                with contextlib.suppress(CSDError):  # if parameters cannot be restored, their next reader raises
                    self._steps.note_backward_ended(run, succeeded=False)
            finally:  # otherwise a reader of a parameter would wait forever
                run.ended.set()


def check_can_free(steps: Steps) -> None:
    """Raise CSDValueError if gradients cannot be freed in backward."""
    if any(steps.state_map.rule_of(group).orthogonal for group in steps.groups):
        raise CSDValueError("overlap(free_gradients=True) is not possible: muon needs the gradients of a whole matrix")
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
