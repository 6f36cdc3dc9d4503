"""Top-K: from every part of a gradient, only the elements of largest magnitude are sent, as index and value.

A *part* is one parameter's elements in one tile; a tile has about a million elements at most. This is the torch half:
it selects on the gradient's own device, an accelerator or the CPU, and only the selected elements leave that device.
The engine selects from gradients that it can read in place; both give the same bits.

    values = rounded(grad, residual, scale, dtype)    see dense.py, as for select() and feed_back()
    sent = select(values, topk_count(ratio, n))
    lists = [listed(values, sent, k, tile_first, tile_elems)]
    entries = pack(lists, rows, tile_elems)
    feed_back(grad, residual, scale, values, sent, first, step)    when the step is complete

Several tiles may be processed at once, as the rows of a matrix. The host never waits for an accelerator in between, if
that has nonzero_static(): the number of entries is itself part of the packed data.

*Error feedback*: the unsent elements, and the rounding error of those sent, stay in the *residual* (bf16, one value per
element) and are added to the next step's gradient, so that gradients are delayed but not lost. The residual is in the
units after the scale (1/loss scale, clipping, -1 to maximize) that the device applies, so the loss scale may change. It
is rounded stochastically: otherwise small gradients would be rounded away each time they are added to a large residual.

The entries' format is that of native/include/csd_kernel.h. All arithmetic is fp32, and each operation is a separate one
of torch's, so that no compiler fuses two and rounds only once.

Temporary memory, per element of a part: 11 bytes in rounded() and select(), 20 in feed_back(). Per element that is
sent: 80 in listed() and pack().
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

# See native/include/csd_kernel.h.
BLOCK_BITS = 16  # a block is 2**16 elements of a tile; an entry has an index into its block
WORD_ENTRIES = 16  # a block is padded to whole words

CLEAR_SIGN = (1 << 63) - 1  # clears the sign bit: makes the filler -1, also with offsets added, an index past all tiles


@dataclass
class TopK:
    """How one parameter's gradient is compressed in this step."""

    ratio: float  # share of each part's elements, see bindings.topk_count(); 1.0 sends all that are not zero
    dtype: torch.dtype  # of the values that are sent: float16 or bfloat16
    residual: torch.Tensor | None  # 1-D bf16, like the flat gradient and on its device; None: no error feedback
    scale: float  # the fp32 factor by which the device multiplies the gradient
    step: int  # the parameter's step, from 1


def listed(
    values: torch.Tensor, sent: torch.Tensor, k: int, tile_first: int, tile_elems: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """List the selected elements of a parameter's parts in some tiles: indices (int64, ascending) and values (int16).

    `values`, `sent`: as in select(), of shape (rows, elements), one row per tile. `tile_first`: where the part begins
    in its tile. Indices count over all rows; each row begins at a multiple of whole blocks. Both lists have `k`
    elements per row, whatever the values are, so that the host need not wait for their number: if fewer are selected,
    fillers come last, with indices past all tiles.
    """
    row, column = _nonzero(sent, k * len(values)).unbind(1)
    elements = torch.add(column, row, alpha=_blocks(tile_elems) << BLOCK_BITS)
    if tile_first:
        elements += tile_first
    return elements.bitwise_and_(CLEAR_SIGN), values.view(torch.int16)[row, column]  # index -1 reads the last value


def _nonzero(sent: torch.Tensor, size: int) -> torch.Tensor:
    """Return the indices of the true elements, as `size` rows; if fewer are true, the last rows are -1."""
    try:
        return sent.nonzero_static(size=size, fill_value=-1)
    except NotImplementedError:  # this accelerator has no nonzero_static(): the host waits for the number of elements
        found = sent.nonzero()
        return torch.cat([found, found.new_full((size - len(found), sent.dim()), -1)])


def pack(lists: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: int, tile_elems: int) -> torch.Tensor:
    """Pack the entries of some tiles in the format in which they are sent, one row per tile: 2-D int32 (uint32 bits).

    `lists`: one result of listed() for each part of these tiles, on the device that is to do the work. All rows have
    the length of the longest possible one; the last element of a row is the number of its words that are used.
    """
    elements, values = lists[0]
    if len(lists) > 1:
        elements, order = torch.cat([e for e, _ in lists]).sort()
        values = torch.cat([v for _, v in lists])[order]
    blocks, device = rows * _blocks(tile_elems), elements.device
    length = len(elements) // rows + WORD_ENTRIES * _blocks(tile_elems) + 1
    edges = torch.arange(0, blocks + 1 << BLOCK_BITS, 1 << BLOCK_BITS, device=device)
    # Position of the first entry of each block, and the end of the last block.
    firsts = torch.searchsorted(elements, edges, out_int32=True)
    counts = firsts.diff()
    sizes = (counts + WORD_ENTRIES).bitwise_and_(-WORD_ENTRIES)  # one word for the count, then the entries, padded
    ends = sizes.view(rows, -1).cumsum(1, dtype=torch.int32)
    starts = ends - sizes.view(rows, -1)
    starts += torch.arange(0, rows * length, length, dtype=torch.int32, device=device)[:, None]
    starts = starts.view(-1)
    # Fillers, whose indices are past all tiles, go behind all rows, and are cut off below.
    packed = torch.zeros(rows * length + len(elements), dtype=torch.int32, device=device)
    packed[starts] = counts
    shifts = torch.cat([starts - firsts[:-1], rows * length - 1 - firsts[-1:]])
    positions = shifts[(elements >> BLOCK_BITS).clamp_(max=blocks)]
    positions += torch.arange(1, len(elements) + 1, dtype=torch.int32, device=device)
    packed[positions] = (elements & (1 << BLOCK_BITS) - 1).int().bitwise_or_(values.int() << 16)
    packed = packed[: rows * length].view(rows, length)
    packed[:, -1] = ends[:, -1]
    return packed


def _blocks(tile_elems: int) -> int:
    return -(-tile_elems >> BLOCK_BITS)


def inverse_of(scale: float) -> float:
    """Return 1 / scale in fp32; 0 if `scale` or its inverse is not a finite nonzero number."""
    if scale == 1.0:  # the usual one, without NumPy's switch of the mode, which takes microseconds
        return 1.0
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / np.float32(scale)
    return float(inverse) if np.isfinite(inverse) else 0.0
