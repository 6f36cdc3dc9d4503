"""The memory order of tensors, and views and copies in a given order."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def numel(p: torch.Tensor) -> int:
    """Return the number of real values in a tensor; a complex number counts as two."""
    return p.numel() * (2 if p.is_complex() else 1)


def same_order(stride: Sequence[int], wanted: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether two strides put the elements of a tensor in the same order in memory."""
    return 0 in shape or all(a == b or n == 1 for a, b, n in zip(stride, wanted, shape, strict=True))


def ordered(t: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return `t` itself if its memory has the order of `stride`, else a copy in that order."""
    if same_order(t.stride(), stride, t.shape):
        return t
    return torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device).copy_(t)


def flat(t: torch.Tensor) -> torch.Tensor:
    """Return a 1-D fp32/fp16/bf16 view of a dense tensor in its memory order; a complex number becomes a pair."""
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.as_strided((t.numel(),), (1,))
