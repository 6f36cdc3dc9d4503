"""Steps that run in backward: each final gradient goes to the devices at once, and is freed after its use."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from ..accelerator import is_accelerator, is_on_accelerator
from ..errors import CSDError, CSDRuntimeError, CSDTypeError, CSDValueError
from ..grad_modes import no_autograd
from ..params.groups import Groups, hyperparameters_of, members, name_of
from ..params.param_state import ParamState
from ..signals import defer_signals
from ..step.live import LiveStep
from ..step.spec import GradOptions
from ..step.steps import Steps
from ..step.travel import Travel
from ..store.format import Record
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


class Taken(NamedTuple):
    """A parameter whose gradient the step has taken."""

    param_state: ParamState
    version: int  # of the parameter, right after that


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
        self._reset()
        self._hooks += [
            p.register_post_accumulate_grad_hook(self._on_grad)  # type: ignore[no-untyped-call]
            for p in self._trainable_params()
        ]

    def _reset(self) -> None:
        """Reset all state: no step is under way."""
        self.active: bool = False
        self._live: LiveStep | None = None
        self._task, self._is_backward_done = -1, False  # torch's number of the backward; the backward has ended
        self._no_backward = threading.Event()  # set while no backward is under way
        self._no_backward.set()
        self._backward_end: Callable[[], _BackwardEnd | None] = lambda: None  # a weak reference
        self._constants: list[dict[str, Any]] = []  # the groups' hyperparameters
        self._awaited: dict[int, ParamState] = {}  # by id of the parameter: all that may take part
        self._taken: dict[int, Taken] = {}  # by id: parameters whose gradients were taken
        self._lent: LentGradients | None = None

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
        if self._live is None and not self._may_begin():
            return
        task = torch._C._current_graph_task_id()
        try:
            with defer_signals(), self._engine.lock, no_autograd():  # several threads may run backward
                if not self._engine.closed:  # by a signal handler, just now
                    self._take_final(p, task)
        except BaseException:  # of a signal handler, too
            if task == self._task:  # else another backward has begun since
                self.undo()
            raise

    def _take_final(self, p: torch.Tensor, task: int) -> None:
        if task == self._aborted_task:  # the step of this backward was undone already
            raise CSDRuntimeError(_AGAIN)
        try:
            if self._live and task != self._task:
                raise CSDRuntimeError(_AGAIN)
            if self._live is None:
                self._begin(task)
            if p.grad is not None:
                self._take(p, p.grad)
            self._waited += self._lent.free_used() if self._lent else 0.0
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

    def _begin(self, task: int) -> None:
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
        self._awaited = {id(state.param): state for state in spec.plan.param_states}
        self._constants = [hyperparameters_of(group) for group in self._steps.groups]
        self._lent = lent = LentGradients(live, self._max_lent_bytes)
        self._waited, self._early_elems = 0.0, 0
        self._live, self._task, self.active = live, task, True
        no_backward = threading.Event()
        end = _BackwardEnd(self, task, no_backward)
        # In this order: a reader on another thread that finds the event without `_backward_end` takes `end` for gone.
        self._backward_end, self._no_backward = weakref.ref(end), no_backward
        lent.begin()
        torch.autograd.Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]

    def _take(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        param_state = self._awaited.get(id(p))
        if param_state is None:
            raise CSDRuntimeError("a parameter got a gradient that required none when this backward began")
        if not param_state.part.is_here(grad):
            raise CSDRuntimeError(
                f"overlap(free_gradients=True): the gradient of {param_state.name} is a DTensor with other placements "
                "than its parameter, and ranks would have to exchange parts of it in backward"
            )
        grad = param_state.part.of(grad)
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
        assert self._lent
        self._lent.take(param_state.index, grad.detach().resolve_neg().contiguous())

    def note_backward_ended(self, task: int, *, succeeded: bool) -> None:
        """Note that a backward has ended (`succeeded`) or failed; undo the step of a failed backward."""
        if task == self._task and not self._is_backward_done:
            self._is_backward_done = succeeded
            if not succeeded:
                self.undo()

    # ---- what is asked of a step under way -----------------------------------------

    def wait(self, params: Iterable[torch.Tensor]) -> None:
        """Prepare to read these parameters: see Arrivals. Raises CSDRuntimeError if one may have changed."""
        if self._engine.closed:  # a new optimizer may have the parameters
            return
        self._steps.finish_undo()
        if any(id(p) in self._taken for p in params):
            self.settle()

    def settle(self) -> None:
        """Return when no step is under way. Undoes a step whose gradients were cleared, as step() cannot take it.

        Raises CSDRuntimeError if step() can still take the step, and in a child that was forked during a step.
        """
        if self._live and self._engine.pid != os.getpid():
            raise CSDRuntimeError(_CHANGED_BY_PARENT.format(self._engine.pid))
        self._wait_for_failure()
        if self._engine.closed:
            return
        with self._engine.lock:
            self._steps.finish_undo()
            if self._live is None:
                return
            if not self._is_backward_done or not self._gradients_cleared():
                raise CSDRuntimeError(_CHANGED)
            self.undo()

    def _wait_for_failure(self) -> None:
        """Wait until backward has ended. If it failed, a thread of autograd undoes the step, perhaps a bit later."""
        if torch._C._current_graph_task_id() >= 0:  # in a backward
            return
        no_backward, end, task = self._no_backward, self._backward_end, self._task
        while not no_backward.wait(POLL_SECONDS):
            if end() is None:  # a signal has interrupted its __del__ before the notice
                self.note_backward_ended(task, succeeded=False)
                no_backward.set()
        # undo() replaces `_no_backward` by a set event before it undoes the step under this lock.
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

    def _gradients_cleared(self) -> bool:
        """Return whether all gradients were set to None, as model.zero_grad() does."""
        return all(taken.param_state.param.grad is None for taken in self._taken.values())

    def undo(self) -> None:
        """Undo the step: parameters and states are as before backward; gradients that were taken are lost.

        Raises what LiveStep.undo() raises.
        """
        with defer_signals(), self._engine.lock, no_autograd():
            live, taken, lent = self._live, self._taken, self._lent
            if live is None or lent is None:
                return
            if not self._is_backward_done:
                self._aborted_task = self._task
            self._reset()
            self.active, self._taken = True, taken  # so that a read on another thread waits in settle()
            try:
                with contextlib.ExitStack() as last:
                    last.callback(live.undo)  # even if the accelerator fails
                    lent.join()  # copies to parameters arrive before the old values
            finally:
                self._clear_placeholders(taken)
                lent.clear()
                self.active, self._taken = self._steps.undoing is not None, {}

    @staticmethod
    def _clear_placeholders(taken: dict[int, Taken]) -> None:
        for param_state, _ in taken.values():
            if isinstance(param_state.param.grad, TakenGradient):
                param_state.param.grad = None

    # ---- in step() -------------------------------------------------------------

    @property
    def under_way(self) -> Travel | None:
        return self._live.travel if self._live else None

    def before_step(self, *, scaled: bool) -> CSDError | None:
        """Undo the step, and return CSDRuntimeError, if step() cannot take it: see _mismatch()."""
        if self._spans:
            self._spans.append_spans()
        if self.together:
            self.together.agree()
        self._wait_for_failure()
        failure, self._failure, self._is_taken = self._failure, None, False
        if self._live and self._is_backward_done and self._gradients_cleared():
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
        if any(state.version_now != version for state, version in self._taken.values()):
            return "parameters were written between backward and step()"
        if self._constants != [hyperparameters_of(group) for group in groups]:
            return "a learning rate, or another hyperparameter, was changed between backward and step()"
        return ""

    def end_step(self, record: Record | None, *, all_can_undo: bool) -> None:
        """Complete the step with the tiles that were not pushed in backward; undo it if that fails."""
        live, lent = self._live, self._lent
        assert live
        assert lent
        spec, self._early_elems = live.spec, lent.pushed_elems
        fired = {taken.param_state.index for taken in self._taken.values()}
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
        self._reset()

    def note_undo(self) -> None:
        if self.together and not self._is_taken:  # skipped, or not possible on some rank: so on all ranks
            self.undo()
        self.active |= self._steps.undoing is not None

    def stats(self) -> dict[str, Any]:
        return {"waited": self._waited, "early_params": self._early_elems, "redone": {}}


class TakenGradient(torch.Tensor):
    """The placeholder in `p.grad` for a gradient that a step has used and freed in backward.

    A tensor with the shape, dtype and device of its parameter, and no values. All operations raise CSDRuntimeError,
    even autograd's accumulation of another gradient.
    """

    @staticmethod
    def __new__(cls, p: torch.Tensor) -> TakenGradient:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, p.shape, dtype=p.dtype, device=p.device
        )

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "__set__"):  # shape, dtype, layout, grad
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        _refuse(getattr(func, "__name__", func))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        _refuse(func)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<a gradient of shape {tuple(self.shape)}, {self.dtype}, that a step has taken>"


def _refuse(operation: object) -> NoReturn:
    raise CSDRuntimeError(
        f"{operation} on a gradient that a step has taken already: with overlap(free_gradients=True) each gradient is "
        "used and freed as soon as backward has made it. No clipping, no GradScaler, no accumulation, one backward "
        "between zero_grad() and step(), and zero_grad() must set to None; see docs/overlap.md"
    )


class _BackwardEnd:
    """A callback queued in a backward. Autograd calls it at the end, or drops it uncalled after an exception."""

    def __init__(self, steps: StepsInBackward, task: int, no_backward: threading.Event) -> None:
        self._steps, self._task, self._no_backward = steps, task, no_backward

    def __call__(self) -> None:
        with defer_signals():
            self._steps.note_backward_ended(self._task, succeeded=True)
            self._no_backward.set()

    def __del__(self) -> None:
        try:
            with contextlib.suppress(CSDError):  # if parameters cannot be restored, their next reader raises
                self._steps.note_backward_ended(self._task, succeeded=False)
        finally:  # otherwise a reader of a parameter would wait forever
            self._no_backward.set()


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
