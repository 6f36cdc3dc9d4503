"""Autograd's modes around csd_optim's own work, and tensors that were made in torch.inference_mode().

Torch does not count what is written to such a tensor, and refuses to write to it outside that mode. So csd_optim makes
none, whatever mode its caller is in; but gradients and parameters may be such tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def no_autograd() -> Iterator[None]:
    """Do as torch.no_grad(), and leave torch.inference_mode(). Also a decorator."""
    leaves = torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()
    with leaves, torch.no_grad():  # in this order: leaving inference mode enables gradients
        yield


def version_of(t: torch.Tensor) -> int:
    """Return torch's count of writes to a tensor; 0 if it was made in inference mode, however often it was written."""
    count: int = 0 if t.is_inference() else t._version
    return count


def writable(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory that can be written within no_autograd().

    If torch counts the writes to `t`, writes to the result count, too.
    """
    if not t.is_inference():
        return t.detach()
    alias = torch.empty(0, dtype=t.dtype, device=t.device)
    return alias.set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())
