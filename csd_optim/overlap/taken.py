"""The placeholder in `p.grad` for a gradient that a step has used and freed in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ..errors import CSDRuntimeError


class TakenGradient(torch.Tensor):
    """A tensor with the shape, dtype and device of its parameter, and no values. All operations raise CSDRuntimeError.

    That includes autograd's accumulation of another gradient.
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
        refuse(getattr(func, "__name__", func))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        refuse(func)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<a gradient of shape {tuple(self.shape)}, {self.dtype}, that a step has taken>"


def refuse(operation: object) -> NoReturn:
    raise CSDRuntimeError(
        f"{operation} on a gradient that a step has taken already: with overlap(free_gradients=True) each gradient is "
        "used and freed as soon as backward has made it. No clipping, no GradScaler, no accumulation, one backward "
        "between zero_grad() and step(), and zero_grad() must set to None; see docs/overlap.md"
    )
