"""Top-K: of every part of a gradient only the elements with the largest magnitude travel, as index and value.

A *part* is what one parameter has in one tile, at most a tile of about a million elements. This is the torch half: it
selects where the gradient is, on CUDA as well as on the CPU, and only what was selected leaves the device. What the
engine selects of gradients that it can read where they lie is the same, bit for bit.

    values = rounded(grad, residual, scale, dtype)    what there is to send, in the 16 bits in which it travels
    sent = select(values, topk_count(ratio, len(grad)))    where the largest of it are
    entries = pack(tile_first + sent, values[sent], tile_elems)
    feed_back(grad, residual, scale, sent, values[sent], first, step)    when the step is whole

*Error feedback*: what is not sent, and what rounding takes from what is, stays in the *residual* (bf16, one per
element) and is added to the next step's gradient, so that nothing is lost but time. It is in true units, those after
the scale (1/loss scale, clipping, -1 to maximize) that the device applies: the loss scale may change. It is rounded at
random, for a small gradient that is added to a large residual again and again would else be lost each time.

The entries' format is that of native/include/csd_kernel.h. All arithmetic is fp32, each operation one of torch's by
itself, so that no compiler joins two and rounds once.

Temporary memory, per element of a part: 11 bytes in rounded(), 17 in feed_back(), 3 in select() (19 where all are
equal). Per element that is sent: 9 in feed_back(), 30 in pack().
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

# See native/include/csd_kernel.h.
BLOCK_BITS = 16  # a block is so many bits' worth of elements of a tile; an index into it is what an entry has
WORD_ENTRIES = 16  # a block is padded to whole words

# The filter looks at one value of so many. A prime, so that in a matrix of any usual width it meets all columns.
SAMPLE_STRIDE = 61
# Below, the exact method alone is as fast (measured on the CPU).
SAMPLE_FROM = 1 << 15


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
    """Indices (1-D int64, ascending) of the `k` values of largest magnitude, of those that are not zero.

    `values`: 1-D, 16 bits; inf and nan are the largest. Among equal ones the first are taken: there is one answer, that
    of select_exact(). A threshold guessed from a sample leaves a few candidates for the exact method; where it leaves
    too few, that gets all. On CUDA that is about 20 kernels, of which 3 see all values, and 2 points at which the
    host waits.
    """
    magnitudes = _magnitudes(values)
    if len(values) < SAMPLE_FROM or k >= len(values):
        return _largest(magnitudes, k)
    # So many of the sample are expected among the k largest, and 4 standard deviations more.
    expected = k / SAMPLE_STRIDE
    sample = magnitudes[::SAMPLE_STRIDE]
    threshold = _kth_largest(sample, min(len(sample), math.ceil(expected + 4 * math.sqrt(expected) + 4)))
    candidates = (magnitudes >= threshold).nonzero().squeeze(1)
    if len(candidates) < k and threshold > 1:
        return _largest(magnitudes, k)  # the sample happened to see large ones only
    return candidates[_largest(magnitudes[candidates], k)]


def select_exact(values: torch.Tensor, k: int) -> torch.Tensor:
    """The same without a filter."""
    return _largest(_magnitudes(values), k)


def pack(elements: torch.Tensor, values: torch.Tensor, tile_elems: int) -> torch.Tensor:
    """The entries of one tile as they travel: 1-D int32 (the bits of uint32), on the device of the arguments.

    `elements`: 1-D int, ascending, each below `tile_elems`: indices into the tile. `values`: theirs, 16 bits each.
    """
    n_blocks = -(-tile_elems >> BLOCK_BITS)
    edges = torch.arange(n_blocks + 1, dtype=elements.dtype, device=elements.device) << BLOCK_BITS
    firsts = torch.searchsorted(elements, edges)  # the first entry of each block, and the end of the last
    counts = firsts.diff()
    sizes = (counts + WORD_ENTRIES) // WORD_ENTRIES * WORD_ENTRIES  # the count itself, the entries, padding
    ends = sizes.cumsum(0)
    starts = ends - sizes
    packed = torch.zeros(int(ends[-1]), dtype=torch.int32, device=elements.device)
    packed[starts] = counts.int()
    state_map = torch.arange(len(elements), device=elements.device) + (starts + 1 - firsts[:-1])[elements >> BLOCK_BITS]
    packed[state_map] = (elements & (1 << BLOCK_BITS) - 1).int() | values.view(torch.int16).int() << 16
    return packed


def feed_back(
    grad: torch.Tensor,
    residual: torch.Tensor,
    scale: float,
    sent: torch.Tensor,
    values: torch.Tensor,
    first: int,
    step: int,
) -> None:
    """Leaves in `residual` what a part's gradient and residual had and `values`, sent of its elements `sent`, had not.

    `grad`, `residual`, `scale`: as rounded() had them. `sent`: 1-D int, each index once. `values`: 1-D, 16 bits.
    `first`: where the part begins in its parameter. `step`: of the parameter, from 1. Where the scale has no inverse
    nothing happens: there, rounded() does not look at the residual either.
    """
    if not inverse_of(scale):
        return
    owed = _owed(grad, residual, scale)
    owed[sent] -= values
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


def _magnitudes(values: torch.Tensor) -> torch.Tensor:
    """In the order of the absolute values: int16, 0 to 0x7fff."""
    return values.view(torch.int16) & 0x7FFF


def _kth_largest(magnitudes: torch.Tensor, k: int) -> torch.Tensor:
    """0-D int16, at least 1."""
    return torch.topk(magnitudes, k, sorted=False).values.min().clamp_(min=1)


def _largest(magnitudes: torch.Tensor, k: int) -> torch.Tensor:
    if k >= len(magnitudes):
        return magnitudes.nonzero().squeeze(1)
    least = _kth_largest(magnitudes, k)
    above, equal = magnitudes > least, magnitudes == least
    equal &= equal.cumsum(0, dtype=torch.int32) <= k - above.sum()
    return (above | equal).nonzero().squeeze(1)
