"""What Top-K sends and owes, in NumPy, on the bits and with a stable sort: to compare the engine and kernels with."""

from dataclasses import replace

import numpy as np
import torch

from csd_optim.bindings import topk_count
from csd_optim.compression.selection import Part, TopK

from .code_oracle import hashes

BLOCK, LANES = 1 << 16, 16


def bits_of(t):
    return t.contiguous().view(torch.int16).numpy().view(np.uint16)


def wide(t):
    """Return the exact values as fp32 in NumPy."""
    return t.float().numpy()


def to_bf16(a):
    u = a.view(np.uint32).astype(np.uint64)
    return np.where(np.isnan(a), 0x7FC0, (u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


def to_f16(a):
    return np.where(np.isnan(a), 0x7E00, a.astype(np.float16).view(np.uint16)).astype(np.uint16)


ROUND = {torch.float16: (to_f16, 0x7C00), torch.bfloat16: (to_bf16, 0x7F80)}


def inverse(scale):
    inv = np.float32(1) / np.float32(scale)
    return inv if np.isfinite(inv) and inv != 0 else None


def owed(grad, residual, scale):
    a, inv = wide(grad), inverse(scale)
    return a if residual is None or inv is None else a + wide(residual) * inv


def rounded(grad, residual, scale, dtype):
    """Return the bits of the 16-bit values. Finite ones stay finite, and all nans are one."""
    a = owed(grad, residual, scale)
    convert, inf = ROUND[dtype]
    bits = convert(a)
    return np.where(((bits & 0x7FFF) == inf) & ~np.isinf(a), bits - 1, bits).astype(np.uint16)


def selected(bits, k):
    """Return the indices of the k largest magnitudes, of equal ones the first, never of zeros."""
    magnitudes = (bits & 0x7FFF).astype(np.int16)  # NumPy uses radix sort for 16 bits
    order = np.argsort(-magnitudes, kind="stable")[:k]
    return np.sort(order[magnitudes[order] > 0])


def part(grad, dtype, ratio, residual=None, *, scale=1.0, first=0, step=1, tile_first=0):
    """Return a part of a tile, as a step makes it."""
    return Part(TopK(ratio, dtype, None, scale, step), grad, residual, first, tile_first)


def sent_of(p):
    """Return the indices of the elements that a part sends, and the bits of all its values."""
    bits = rounded(p.grad, p.residual, p.topk.scale, p.topk.dtype)
    return selected(bits, topk_count(p.topk.ratio, len(p.grad))), bits


def row_of(elems, parts):
    """Return the entries of a tile as native/include/csd_kernel.h describes them, and the number of their words."""
    indices, values = [], []
    for p in parts:
        sent, bits = sent_of(p)
        indices.append(sent + p.tile_first)
        values.append(bits[sent])
    indices, values = np.concatenate(indices), np.concatenate(values).astype(np.uint32)
    words = []
    for block in range(-(-elems // BLOCK)):
        here = indices // BLOCK == block
        entries = (indices[here] % BLOCK).astype(np.uint32) | values[here] << np.uint32(16)
        words += [[len(entries)], entries, np.zeros(-(len(entries) + 1) % LANES)]
    row = np.concatenate(words).astype(np.uint32)
    return np.append(row, np.uint32(len(row)))


def residual_after(p):
    """Return the bits of a part's residual when the step is complete; None if it has none."""
    if p.residual is None:
        return None
    if p.topk.ratio >= 1 or inverse(p.topk.scale) is None:
        return bits_of(p.residual).copy()
    sent, bits = sent_of(p)
    a = owed(p.grad, p.residual, p.topk.scale).copy()
    a[sent] -= wide(torch.from_numpy(bits[sent].view(np.int16).copy()).view(p.topk.dtype))
    a *= np.float32(p.topk.scale)
    chances = hashes((p.first + p.topk.step * 0x9E3779B9) % (1 << 32), len(a)) & 0xFFFF
    at_random = (a.view(np.uint32).astype(np.uint64) + chances) >> 16
    return np.where(np.isfinite(a), at_random, to_bf16(a)).astype(np.uint16)


def one_nan(row, parts):
    """Return a row of entries in which all nans are one: its bits are the processor's. Not for parts of two dtypes."""
    dtypes = {p.topk.dtype for p in parts}
    if len(dtypes) > 1:
        return row
    convert, inf = ROUND[dtypes.pop()]
    nan = np.uint32(convert(np.array([np.nan], np.float32))[0])
    is_nan = (row[:-1] >> 16 & 0x7FFF) > inf
    return np.append(np.where(is_nan, row[:-1] & 0xFFFF | nan << np.uint32(16), row[:-1]), row[-1])


def assert_selects(select, tiles, place=lambda t: t, *, any_nan=False):
    """Compare the rows and the residuals of a selection of `tiles` with what they ought to be.

    `place`: puts a tensor where the selection finds it. `any_nan`: a nan may be sent as a nan with other bits.
    """
    with np.errstate(all="ignore"):
        rows = {tile: row_of(elems, parts) for tile, (elems, parts) in tiles.items()}
        residuals = {tile: [residual_after(p) for p in parts] for tile, (_, parts) in tiles.items()}
    there = {tile: (elems, [placed(p, place) for p in parts]) for tile, (elems, parts) in tiles.items()}
    selection = select(there)
    for tile, (elems, parts) in tiles.items():
        row = selection.rows[tile].cpu().numpy().view(np.uint32)
        assert len(row) <= sum(topk_count(p.topk.ratio, len(p.grad)) for p in parts) + LANES * -(-elems // BLOCK) + 1
        row = np.append(row[: row[-1]], row[-1])
        row = one_nan(row, parts) if any_nan else row
        assert np.array_equal(row, rows[tile]), (tile, describe(parts))
    selection.feed_back()
    for tile, (_, parts) in there.items():
        for p, expected in zip(parts, residuals[tile], strict=True):
            if p.residual is not None:
                assert np.array_equal(bits_of(p.residual.cpu()), expected), (tile, describe([p]))


def assert_spreads(select, tiles, place=lambda t: t):
    """Compare what a selection of `tiles` writes densely with what it ought to, as if its parts were of one parameter.

    `place`: see assert_selects(). There is an element between parts, which keeps its value. All nans are equal.
    """
    there, expected, infs = {}, [3], [0x7FFF]
    for tile, (elems, parts) in tiles.items():
        there[tile] = elems, []
        for p in parts:
            there[tile][1].append(replace(placed(p, place), first=len(expected)))
            with np.errstate(all="ignore"):
                sent, bits = sent_of(p)
            dense = np.zeros(len(bits), np.uint16)
            dense[sent] = bits[sent]
            expected += [*dense.tolist(), 3]
            infs += [ROUND[p.topk.dtype][1]] * len(bits) + [0x7FFF]
    to = place(torch.full((len(expected),), 3, dtype=torch.int16))
    select(there).spread(to)
    found, expected, infs = bits_of(to.cpu()), np.array(expected), np.array(infs)
    both_nan = ((found & 0x7FFF) > infs) & ((expected & 0x7FFF) > infs)
    assert np.flatnonzero((found != expected) & ~both_nan).tolist() == [], [
        describe(parts) for _, parts in tiles.values()
    ]


def placed(p, place):
    return replace(p, grad=place(p.grad), residual=None if p.residual is None else place(p.residual))


def describe(parts):
    return [(len(p.grad), p.grad.dtype, p.topk.dtype, p.topk.ratio, p.topk.scale, p.tile_first) for p in parts]
