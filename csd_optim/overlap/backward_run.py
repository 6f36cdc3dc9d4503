"""A step that runs in one backward: what it has taken there, and whether that backward has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch

from ..errors import CSDRuntimeError, CSDTypeError
from ..params.param_state import ParamState
from ..step.live import LiveStep
from .lent import LentGradients


class Taken(NamedTuple):
    """A parameter whose gradient the step has taken."""

    param_state: ParamState
    version: int  # of the parameter, right after that


@dataclass(eq=False)
class BackwardRun:
    """A step under way, from the first gradient of one backward until step() completes the step or it is undone.

    The backward has ended if the event `ended` is set. autograd tells only the callback `end`: it calls this at the end
    of the backward, and drops it uncalled after an exception.
    """

    task: int  # torch's number of the backward
    live: LiveStep
    lent: LentGradients
    awaited: dict[int, ParamState]  # by id of the parameter: all that may take part
    constants: list[dict[str, Any]]  # the groups' hyperparameters when the step began
    end: Callable[[], object | None] = lambda: None  # a weak reference to the callback
    ended: threading.Event = field(default_factory=threading.Event)
    has_succeeded: bool = False  # the backward has ended without an exception
    taken: dict[int, Taken] = field(default_factory=dict)  # by id: parameters whose gradients were taken

    def take(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        """Take a gradient of `p`, and put a placeholder there. Raises CSDTypeError, CSDRuntimeError and CSDOSError."""
        param_state = self.awaited.get(id(p))
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
        self.taken[id(p)] = Taken(param_state, param_state.version_now)
        p.grad = TakenGradient(p)
        self.lent.take(param_state.index, grad.detach().resolve_neg().contiguous())

    @property
    def is_cleared(self) -> bool:
        """Whether all its gradients were set to None, as model.zero_grad() does."""
        return all(taken.param_state.param.grad is None for taken in self.taken.values())

    def clear_placeholders(self) -> None:
        for param_state, _ in self.taken.values():
            if isinstance(param_state.param.grad, TakenGradient):
                param_state.param.grad = None


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
