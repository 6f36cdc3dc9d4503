"""A gradient that the engine cannot read in place, on its way to the devices, and the parameter that comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..accelerator import is_on_accelerator
from ..compression.selection import TopK


@dataclass
class GradSource:
    """Gradient and parameter of one step as flat arrays, in the memory order of the parameter's states."""

    grad: torch.Tensor  # 1-D, any device
    param: torch.Tensor  # 1-D, same device, written in place
    grad_dtype: torch.dtype  # on the link
    images_only: bool = False  # devices cannot access this process's memory
    # The tiles' images contain the parameter, too, as the device may read its master there.
    param_is_read: bool = False
    # If `param` is a copy: (the strided parameter, the copy), for copy_back().
    param_and_copy: tuple[torch.Tensor, torch.Tensor] | None = None
    topk: TopK | None = None  # None: dense
    copy_event: Any = None  # event after the last queued copy to a parameter on an accelerator
    first: int = 0  # index of the parameter's element to which grad[0] belongs
    is_dropped: bool = False  # there is no gradient after all: the parameter stays bitwise unchanged

    @property
    def is_far(self) -> bool:
        """Whether the engine cannot access the parameter, as on an accelerator: its tiles travel as images."""
        return self.images_only or is_on_accelerator(self.param)

    def release(self) -> None:
        """Release the gradient's memory, once the gradient has been used."""
        self.grad = torch.empty(0, dtype=self.grad.dtype, device="cpu")

    def copy_back(self) -> None:
        """Copy the new values from `param` to the parameter, if `param` is a copy."""
        if self.param_and_copy:
            self.param_and_copy[0].copy_(self.param_and_copy[1])
