"""The rules of Top-K in torch operations: which values of a part are sent, and what remains.

    values = rounded(grad, residual, scale, dtype)    gradient plus residual, in the 16 bits in which it is sent
    sent = select(values, topk_count(ratio, n))       which of the values are the largest
    feed_back(grad, residual, scale, values, sent, first, step)    when the step is complete

For parameters that `gpu:` updates nothing is sent: DenseTopK writes the values densely. All arithmetic is fp32, and
each operation is a separate one of torch's, so that no compiler fuses two and rounds only once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..bindings import topk_count
from .selection import TopK, inverse_of

PART_BYTES = 23  # temporary memory per element of a part


@dataclass
class DenseTopK:
    """What Top-K sends of one parameter's gradient, dense: zeros stand for the rest."""

    topk: TopK
    parts: Sequence[tuple[int, int]]  # first element and length of each

    @property
    def residual(self) -> torch.Tensor | None:
        """The residual, if send() changes it."""
        return self.topk.residual if self.topk.ratio < 1 else None

    def send(self, grad: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Return the gradient with zeros for what is not sent, in `to` (int16, at least as long); update the residual.

        `grad`: 1-D, on the parameter's device.
        """
        sent, how = to[: len(grad)].view(self.topk.dtype), self.topk
        nothing = torch.zeros((), dtype=how.dtype, device="cpu")
        for first, n in self.parts:
            here = slice(first, first + n)
            residual = None if how.residual is None else how.residual[here]
            values = rounded(grad[here], residual, how.scale, how.dtype)
            is_sent = select(values, topk_count(how.ratio, n))
            torch.where(is_sent, values, nothing, out=sent[here])
            if residual is not None and how.ratio < 1:
                feed_back(grad[here], residual, how.scale, values, is_sent, first, how.step)
        return sent


def sent_buffer(parameters: Sequence[DenseTopK], device: torch.device) -> torch.Tensor:
    """Return room for what one of these parameters sends, int16.

    Also has the allocator keep room for the selection, so that a step does not run out of memory in the midst of it.
    """
    numels = [sum(n for _, n in dense.parts) for dense in parameters]
    if numels:
        largest = max(n for dense in parameters for _, n in dense.parts)
        torch.empty(PART_BYTES * largest, dtype=torch.uint8, device=device)
    return torch.empty(max(numels, default=0), dtype=torch.int16, device=device)


def rounded(grad: torch.Tensor, residual: torch.Tensor | None, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Return gradient plus residual as they would be sent: new, 1-D, `dtype` (float16 or bfloat16), on their device.

    `grad`: 1-D, float32, float16 or bfloat16. `residual`: 1-D bfloat16 of the same length, or None. Rounded to nearest
    even; finite values stay finite (they saturate at the largest one), inf stays inf, and all nans become the same one.
    """
    exact = _with_residual(grad, residual, scale)
    values = exact.to(dtype)
    return torch.where(exact.isinf(), values, values.nan_to_num(nan=math.nan))


def select(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return the mask (bool) of the `k` nonzero values of largest magnitude in each row.

    `values`: 16 bits, any shape; rows lie along the last dimension. Inf and nan are the largest. Ties go to the first,
    so the answer is unique. The host does not wait for an accelerator here.
    """
    magnitudes = values.view(torch.int16) & 0x7FFF  # integers in the order of the absolute values
    if k >= values.shape[-1]:
        return magnitudes != 0
    least = torch.topk(magnitudes, k, dim=-1, sorted=False).values.amin(-1, keepdim=True).clamp_(min=1)
    above, equal = magnitudes > least, magnitudes == least
    equal &= equal.cumsum(-1, dtype=torch.int32) <= k - above.sum(-1, keepdim=True)
    return above.logical_or_(equal)


def feed_back(
    grad: torch.Tensor,
    residual: torch.Tensor,
    scale: float,
    values: torch.Tensor,
    sent: torch.Tensor,
    first: int,
    step: int,
) -> None:
    """Update `residual` in place: gradient plus residual, minus the sent elements of `values`.

    `grad`, `residual`, `scale`: as passed to rounded(). `values`: its result. `sent`: the result of select().
    `first`: where the part begins in its parameter. `step`: the parameter's step, from 1. If the scale has no inverse,
    this is a no-op, because rounded() ignores the residual then, too.
    """
    if not inverse_of(scale):
        return
    unsent = _with_residual(grad, residual, scale)
    unsent -= torch.where(sent, values, torch.zeros((), dtype=values.dtype, device="cpu"))
    unsent *= scale
    is_nan = unsent.isnan()
    # Stochastic rounding: bf16 is the upper half of fp32. Adding 16 random bits carries into it with a probability that
    # is the lower half's share of bf16's last place.
    bits = unsent.view(torch.int32)
    bits += _random_bits(len(grad), first, step, grad.device)
    residual.view(torch.int16).copy_(bits >> 16)
    residual.masked_fill_(is_nan, math.nan)


def _random_bits(n: int, first: int, step: int, device: torch.device) -> torch.Tensor:
    """Return 16 random bits for each element of a part, int32: a hash of element and step, Wellons' "lowbias32"."""
    hashed = torch.arange(n, dtype=torch.int32, device=device)
    hashed += _int32(first + step * 0x9E3779B9)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        hashed ^= (hashed >> shift) & (1 << 32 - shift) - 1  # a logical shift: >> on int32 repeats the sign bit
        hashed *= _int32(factor)
    return (hashed ^ hashed >> 16) & 0xFFFF


def _int32(bits: int) -> int:
    """Return the signed 32-bit integer whose bits are the lower 32 of `bits`."""
    return (bits + (1 << 31)) % (1 << 32) - (1 << 31)


def _with_residual(grad: torch.Tensor, residual: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Return gradient plus residual, in fp32 and the gradient's units; the gradient itself if there is no residual."""
    inverse = inverse_of(scale)
    if residual is None or not inverse:
        return grad
    return residual.float().mul_(inverse).add_(grad)
