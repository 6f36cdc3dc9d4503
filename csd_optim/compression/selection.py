"""Top-K: of every part of a gradient only the elements with the largest magnitude travel, as index and value.

A *part* is what one parameter has in one tile, at most a tile of about a million elements. This is the torch half: it
selects where the gradient is, on an accelerator or on the CPU, and only what was selected leaves the device. What the
engine selects of gradients that it can read where they lie is the same, bit for bit.

    values = rounded(grad, residual, scale, dtype)    what there is to send, in the 16 bits in which it travels
    sent = select(values, topk_count(ratio, n))       which of it is the largest
    lists = [listed(values, sent, k, tile_first, tile_elems)]
    entries = pack(lists, rows, tile_elems)
    feed_back(grad, residual, scale, values, sent, first, step)    when the step is whole

Several tiles may be done at once, as the rows of a matrix. Nothing waits for an accelerator in between, if it has
nonzero_static(): how many entries there are is among what travels.

*Error feedback*: what is not sent, and what rounding takes from what is, stays in the *residual* (bf16, one per
element) and is added to the next step's gradient, so that nothing is lost but time. It is in true units, those after
the scale (1/loss scale, clipping, -1 to maximize) that the device applies: the loss scale may change. It is rounded at
random, for a small gradient that is added to a large residual again and again would else be lost each time.

The entries' format is that of native/include/csd_kernel.h. All arithmetic is fp32, each operation one of torch's by
itself, so that no compiler joins two and rounds once.

Temporary memory, per element of a part: 11 bytes in rounded() and select(), 20 in feed_back(). Per element that is
sent: 80 in listed() and pack().
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

# See native/include/csd_kernel.h.
BLOCK_BITS = 16  # a block is so many bits' worth of elements of a tile; an index into it is what an entry has
WORD_ENTRIES = 16  # a block is padded to whole words

NOWHERE = (1 << 63) - 1  # all bits but the sign: makes -1, and what was added to it, an element behind all others


@dataclass
class TopK:
    """How one parameter's gradient is compressed in this step."""

    ratio: float  # of the elements of each part, see bindings.topk_count(); 1.0 sends all that are not zero
    dtype: torch.dtype  # of the values that travel: float16 or bfloat16
    residual: torch.Tensor | None  # 1-D bf16, like the flat gradient and on its device; None: what is not sent is lost
    scale: float  # the fp32 by which the device multiplies the gradient
    step: int  # of the parameter, from 1


def rounded(grad: torch.Tensor, residual: torch.Tensor | None, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Gradient and residual as they would travel: 1-D, `dtype` (float16, bfloat16), a new tensor on their device.

    `grad`: 1-D, float32, float16 or bfloat16. `residual`: 1-D bfloat16 of the same length, or None. Rounded to nearest
    even; what is finite stays finite, the largest there is if need be; inf stays, and there is one nan.
    """
    exact = _owed(grad, residual, scale)
    values = exact.to(dtype)
    return torch.where(exact.isinf(), values, values.nan_to_num(nan=math.nan))


def select(values: torch.Tensor, k: int) -> torch.Tensor:
    """Which (bool) are the `k` values of largest magnitude of each row, of those that are not zero.

    `values`: 16 bits, any shape; its last dimension are the rows. Inf and nan are the largest. Among equal ones the
    first are taken: there is one answer. Nothing here waits for an accelerator.
    """
    magnitudes = values.view(torch.int16) & 0x7FFF  # in the order of the absolute values
    if k >= values.shape[-1]:
        return magnitudes != 0
    least = torch.topk(magnitudes, k, dim=-1, sorted=False).values.amin(-1, keepdim=True).clamp_(min=1)
    above, equal = magnitudes > least, magnitudes == least
    equal &= equal.cumsum(-1, dtype=torch.int32) <= k - above.sum(-1, keepdim=True)
    return above.logical_or_(equal)


def listed(
    values: torch.Tensor, sent: torch.Tensor, k: int, tile_first: int, tile_elems: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is sent of a parameter's parts in some tiles, a row each: elements (int64, ascending) and values (int16).

    `values`, `sent`: as select() has them, (rows, elements). `tile_first`: where the part begins in its tile. Elements
    are counted over all rows, each from a multiple of whole blocks on. There are `k` for each row, whatever the values
    are, so that nobody has to wait for their number: those that there are not come last, and are behind all tiles.
    """
    row, column = _nonzero(sent, k * len(values)).unbind(1)
    elements = torch.add(column, row, alpha=_blocks(tile_elems) << BLOCK_BITS)
    if tile_first:
        elements += tile_first
    return elements.bitwise_and_(NOWHERE), values.view(torch.int16)[row, column]  # -1 is the last one, for torch


def _nonzero(sent: torch.Tensor, size: int) -> torch.Tensor:
    """Indices of what is true, `size` rows: those that there are not come last, and are -1."""
    try:
        return sent.nonzero_static(size=size, fill_value=-1)
    except NotImplementedError:  # by the accelerator: the host waits for their number
        there = sent.nonzero()
        return torch.cat([there, there.new_full((size - len(there), sent.dim()), -1)])


def pack(lists: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: int, tile_elems: int) -> torch.Tensor:
    """The entries of some tiles as they travel, a row each: 2-D int32 (the bits of uint32).

    `lists`: of each part of these tiles, as listed() has it, and on the device where this is to be done. All rows are
    as long as the longest could be; the last element of each says how many of its words are entries.
    """
    elements, values = lists[0]
    if len(lists) > 1:
        elements, order = torch.cat([e for e, _ in lists]).sort()
        values = torch.cat([v for _, v in lists])[order]
    blocks, device = rows * _blocks(tile_elems), elements.device
    length = len(elements) // rows + WORD_ENTRIES * _blocks(tile_elems) + 1
    edges = torch.arange(0, blocks + 1 << BLOCK_BITS, 1 << BLOCK_BITS, device=device)
    # The first entry of each block, and the end of the last.
    firsts = torch.searchsorted(elements, edges, out_int32=True)
    counts = firsts.diff()
    sizes = (counts + WORD_ENTRIES).bitwise_and_(-WORD_ENTRIES)  # the count itself, the entries, padding
    ends = sizes.view(rows, -1).cumsum(1, dtype=torch.int32)
    starts = ends - sizes.view(rows, -1)
    starts += torch.arange(0, rows * length, length, dtype=torch.int32, device=device)[:, None]
    starts = starts.view(-1)
    # What is behind all tiles goes behind all rows.
    packed = torch.zeros(rows * length + len(elements), dtype=torch.int32, device=device)
    packed[starts] = counts
    shifts = torch.cat([starts - firsts[:-1], rows * length - 1 - firsts[-1:]])
    at = shifts[(elements >> BLOCK_BITS).clamp_(max=blocks)]
    at += torch.arange(1, len(elements) + 1, dtype=torch.int32, device=device)
    packed[at] = (elements & (1 << BLOCK_BITS) - 1).int().bitwise_or_(values.int() << 16)
    packed = packed[: rows * length].view(rows, length)
    packed[:, -1] = ends[:, -1]
    return packed


def _blocks(tile_elems: int) -> int:
    return -(-tile_elems >> BLOCK_BITS)


def feed_back(
    grad: torch.Tensor,
    residual: torch.Tensor,
    scale: float,
    values: torch.Tensor,
    sent: torch.Tensor,
    first: int,
    step: int,
) -> None:
    """Leaves in `residual` what a part's gradient and residual had and `values`, of those that are `sent`, had not.

    `grad`, `residual`, `scale`: as rounded() had them. `values`: what it returned. `sent`: what select() said of them.
    `first`: where the part begins in its parameter. `step`: of the parameter, from 1. Where the scale has no inverse
    nothing happens: there, rounded() does not look at the residual either.
    """
    if not inverse_of(scale):
        return
    owed = _owed(grad, residual, scale)
    owed -= torch.where(sent, values, torch.zeros((), dtype=values.dtype, device="cpu"))
    owed *= scale
    is_nan = owed.isnan()
    # bf16 is the upper half of fp32: the lower one, as a share of its last place, is the probability of a carry.
    bits = owed.view(torch.int32)
    bits += _chance(len(grad), first, step, grad.device)
    residual.view(torch.int16).copy_(bits >> 16)
    residual.masked_fill_(is_nan, math.nan)


def _chance(n: int, first: int, step: int, device: torch.device) -> torch.Tensor:
    """16 random bits for each element of a part, int32: a hash of element and step, Wellons' "lowbias32"."""
    hashed = torch.arange(n, dtype=torch.int32, device=device)
    hashed += _int32(first + step * 0x9E3779B9)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        hashed ^= (hashed >> shift) & (1 << 32 - shift) - 1  # without the sign, which >> repeats
        hashed *= _int32(factor)
    return (hashed ^ hashed >> 16) & 0xFFFF


def _int32(bits: int) -> int:
    """The int of 32 bits that has the lower 32 of these."""
    return (bits + (1 << 31)) % (1 << 32) - (1 << 31)


def inverse_of(scale: float) -> float:
    """1 / scale in fp32; 0 where that, or the scale, is no finite number other than zero."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / np.float32(scale)
    return float(inverse) if np.isfinite(inverse) else 0.0


def _owed(grad: torch.Tensor, residual: torch.Tensor | None, scale: float) -> torch.Tensor:
    """The gradient itself, or in fp32 its sum with the residual, in the gradient's units."""
    inverse = inverse_of(scale)
    if residual is None or not inverse:
        return grad
    return residual.float().mul_(inverse).add_(grad)
