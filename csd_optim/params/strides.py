"""How a tensor lies in memory, and views that follow it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def numel(p: torch.Tensor) -> int:
    """How many numbers it has; a complex one counts two."""
    return p.numel() * (2 if p.is_complex() else 1)


def same_order(stride: Sequence[int], wanted: Sequence[int], shape: Sequence[int]) -> bool:
    """Do two strides put the elements of a tensor in the same order in memory?"""
    return 0 in shape or all(a == b or n == 1 for a, b, n in zip(stride, wanted, shape, strict=True))


def ordered(t: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """`t` itself if its memory has the order of `stride`, else a copy that has it."""
    if same_order(t.stride(), stride, t.shape):
        return t
    return torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device).copy_(t)


def flat(t: torch.Tensor) -> torch.Tensor:
    """A dense tensor as 1-D fp32/fp16/bf16, in the order of its memory; complex as pairs."""
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.as_strided((t.numel(),), (1,))
