"""A gradient that the engine cannot take as it stands, on its way to the devices, and the parameter that returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..accelerator import is_far
from ..compression.selection import TopK


@dataclass
class GradSource:
    """One parameter of this step, seen as a flat array in the order of its state."""

    grad: torch.Tensor  # 1-D, any device
    param: torch.Tensor  # 1-D, same device, written in place
    grad_dtype: torch.dtype  # on the link
    is_read: bool = False  # an image has the parameter as well: its master may be there
    # A strided parameter, and `param` to copy there, by give_back().
    back: tuple[torch.Tensor, torch.Tensor] | None = None
    topk: TopK | None = None  # None: dense
    arrives: Any = None  # event: the last copy to a parameter on an accelerator that was begun
    first: int = 0  # of the parameter's elements: that of which `grad` has the gradient first
    is_dropped: bool = False  # there is no gradient after all: the parameter keeps every bit

    @property
    def is_far(self) -> bool:
        """The engine cannot reach it: its tiles travel as images."""
        return is_far(self.param)

    def let_go(self) -> None:
        """The gradient has been copied, and its memory is free again."""
        self.grad = torch.empty(0, dtype=self.grad.dtype, device="cpu")

    def give_back(self) -> None:
        """Its new values are in `param`."""
        if self.back:
            self.back[0].copy_(self.back[1])
