"""Top-K on the host, where the step selects for the engine: what is sent, as which entries, and what is owed then.

Oracle: the same rules in NumPy, on the bits, with a stable sort. Everything is compared bit for bit.
"""

import contextlib
import math

import numpy as np
import pytest
import torch
from support.gradients import any_bits, kinds, residual_of
from support.topk_oracle import BLOCK, assert_selects, assert_spreads, bits_of, part

from csd_optim import CSDValueError, bindings
from csd_optim.bindings import topk_count, topk_entries
from csd_optim.compression.selection import HostSelection, table_of

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HALVES = [torch.float16, torch.bfloat16]
SCALES = [1.0, 2.0**-16, 0.37, -1.0, -3.0, 1e30, 1e-30]
NO_INVERSE = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40]  # the last: 1 / 1e-40 is inf in fp32
SPECIAL = [
    *(0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-39, 6e-8, 2.9e-8, 3e-8, 6e-5, 65504.0, 65519.99, 65520.0, -1e5, 3.4e38),
    *(-3.3895e38, -3.4e38, math.inf, -math.inf, math.nan, -math.nan, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11),
]


@contextlib.contextmanager
def by(isa):
    used = bindings.isa_used()
    bindings.isa_use(isa)
    try:
        yield
    finally:
        bindings.isa_use(used)


def entries_of(elems, *parts):
    """Return the words of the entries of one tile, without their number at the end."""
    row = HostSelection({0: (elems, [*parts])}).rows[0]
    assert row.dtype is torch.int32
    assert len(row) == row[-1] + 1
    return row[:-1]


def unpack(words, tile_elems):
    """Read entries as csd_kernel.h describes them, and assert every rule there. Returns {index: bits}."""
    words, at, found = words.numpy().view(np.uint32).tolist(), 0, {}
    for first in range(0, tile_elems, BLOCK):
        n, last = words[at], -1
        for entry in words[at + 1 : at + 1 + n]:
            assert last < entry & 0xFFFF < tile_elems - first
            last = entry & 0xFFFF
            found[first + last] = entry >> 16
        end = at + -(-(1 + n) // 16) * 16
        assert not any(words[at + 1 + n : end])
        at = end
    assert at == len(words)
    return found


def sent_of(grad, dtype, ratio, **kwargs):
    """Return the values of a part alone in its tile, dense, 16 bits; zero where nothing is sent."""
    dense = np.zeros(len(grad), np.uint16)
    for index, bits in unpack(entries_of(len(grad), part(grad, dtype, ratio, **kwargs)), len(grad)).items():
        dense[index] = bits
    return torch.from_numpy(dense.view(np.int16)).view(dtype)


def test_count_rounds_to_even_and_is_at_least_one():
    sizes = (1, 49, 50, 51, 150, 151, 250, 65536, 1 << 20)
    assert [topk_count(0.01, n) for n in sizes] == [1, 1, 1, 1, 2, 2, 2, 655, 10486]
    assert [topk_count(0.5, n) for n in (1, 3, 5, 7)] == [1, 2, 2, 4]
    assert [topk_count(1.0, n) for n in (1, 17, 65537)] == [1, 17, 65537]


# ---- against the oracle --------------------------------------------------------------


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES + NO_INVERSE)
def test_rounding(grad_dtype, dtype, scale):
    """Every value is sent, with each residual."""
    tiles = {}
    for grad in (torch.tensor(SPECIAL).to(grad_dtype), any_bits(1 << 17, grad_dtype), torch.randn(1001).to(grad_dtype)):
        n = len(grad)
        for residual in (None, residual_of(torch.randn(n), scale), any_bits(n, torch.bfloat16, seed=1)):
            tiles[len(tiles)] = n, [part(grad, dtype, 1 - 1e-9, residual, scale=scale)]
    for isa in bindings.isas():
        with by(isa):
            assert_selects(HostSelection, tiles, torch.clone, any_nan=True)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 4096, 32767, 65535, 65536, 65537, 299_993])
def test_every_kind_of_gradient(n, grad_dtype, dtype):
    """Parts that end beside a block, with gradients that mislead the sample of the selection."""
    tiles = {}
    for i, (name, grad) in enumerate(kinds(n, grad_dtype)):
        scale, ratio = SCALES[i % len(SCALES)], (0.0001, 0.01, 0.1, 0.499, 1.0)[i % 5]
        residual = any_bits(n, torch.bfloat16, seed=1) if name == "any bits" else residual_of(torch.randn(n), scale)
        place = {"first": [2**32 - 3, 2**31 - 99][i % 2], "step": [2**24 - 1, 7][i % 2], "tile_first": i}
        tiles[2 * i] = n + i, [part(grad, dtype, ratio, residual, scale=scale, **place)]
        tiles[2 * i + 1] = n, [part(grad, dtype, 0.1)]
    for isa in bindings.isas():
        with by(isa):
            assert_selects(HostSelection, tiles, torch.clone, any_nan=True)


@pytest.mark.parametrize("seed", range(40))
def test_anything(seed):
    """Random sizes, numbers of distinct values, zeros, runs of large values."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 1 << 17))
    values = rng.standard_normal(n) * rng.choice([1, 30, 1e-6])
    if rng.random() < 0.5:
        values = np.round(values, int(rng.integers(0, 3)))
    values[rng.random(n) < rng.choice([0, 0.3, 0.999])] = 0
    for _ in range(rng.integers(0, 4)):
        first, stride = int(rng.integers(n)), int(rng.choice([1, 2, 61, 64]))
        values[first : first + int(rng.integers(1, n + 1)) : stride] *= 1000
    grad, ratio = torch.from_numpy(values).float(), float(rng.integers(1, n + 1)) / n
    assert_selects(HostSelection, {0: (n, [part(grad, HALVES[seed % 2], ratio)])})


def test_parts_of_a_tile():
    """Parts with any values, one after another and with others between them, in a tile of two blocks."""
    tiles = {}
    for tile in range(3):
        parts = []
        for i, (first, n) in enumerate([(0, 500), (1_000, 59_000), (60_000, 9_000)]):
            grad, residual = torch.randn(n) * (torch.rand(n) < 0.5), torch.randn(n).bfloat16()
            ratio, owed = [0.01, 1.0, 0.5][(i + tile) % 3], [residual, None][(i + tile) % 2]
            parts.append(part(grad, HALVES[i % 2], ratio, owed, scale=0.37, tile_first=first, first=first))
        tiles[tile] = 70_000, parts
    assert_selects(HostSelection, tiles, torch.clone)
    assert_spreads(HostSelection, tiles, torch.clone)


@pytest.mark.parametrize("wrong", [(60, 50, 100), (0, 49, 100), (0, 50, 99)], ids=["order", "overlap", "beyond"])
def test_parts_that_do_not_fit_their_tile(wrong):
    first, second, elems = wrong
    parts = [part(torch.ones(50), torch.float16, 0.1, tile_first=at) for at in (first, second)]
    with pytest.raises(CSDValueError, match="parts"):
        topk_entries(table_of(parts), elems)


def test_a_part_that_is_none():
    table = table_of([part(torch.ones(50), torch.float16, 0.1)])
    for name, value in (("k", 51), ("k", 0), ("dtype", 0), ("grad_dtype", 3)):
        bad = table.copy()
        bad[name] = value
        with pytest.raises(CSDValueError, match="no such dtype"):
            topk_entries(bad, 50)


# ---- without the oracle ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_every_16_bit_gradient(dtype):
    grad = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    numbers = ~grad.isnan() & (grad != 0)
    assert torch.equal(sent_of(grad, dtype, 1.0)[numbers].view(torch.int16), grad[numbers].view(torch.int16))
    assert sent_of(grad, dtype, 1.0)[grad.isnan()].isnan().all()


def test_what_is_finite_stays_finite():
    grad = torch.tensor([65504.0, 65520.0, -1e30, math.inf, -math.inf])
    assert sent_of(grad, torch.float16, 1.0).tolist() == [65504.0, 65504.0, -65504.0, math.inf, -math.inf]
    largest = torch.finfo(torch.bfloat16).max
    grad = torch.tensor([3.4e38, -3.4e38, math.inf])
    assert sent_of(grad, torch.bfloat16, 1.0).tolist() == [largest, -largest, math.inf]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tile_elems", [1024, 65536, 66560, 1 << 20])
def test_entries(tile_elems, dtype):
    """Any number of entries in a block, at its borders and elsewhere."""
    rng = np.random.default_rng(tile_elems)
    borders = [e for e in (0, 65535, 65536, 131071, tile_elems - 1) if e < tile_elems]
    counts = [0, 1, 14, 15, 16, 17, 31, 32, tile_elems // 3]
    for elements in [
        *(np.sort(rng.choice(tile_elems, n, replace=False)) for n in counts),
        np.arange(min(tile_elems, 70_000)),
        np.arange(tile_elems - 15, tile_elems),
        np.unique(borders),
    ]:
        grad = torch.zeros(tile_elems, dtype=dtype)
        grad[elements] = torch.rand(len(elements)).to(dtype) + 1
        words = entries_of(tile_elems, part(grad, dtype, 1.0))
        expected = dict(zip(elements.tolist(), bits_of(grad[elements]).tolist(), strict=True))
        assert unpack(words, tile_elems) == expected


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_nothing_is_lost(grad_dtype, dtype):
    """Sent values plus residual equal the sum of the gradients, except for the residual's rounding in each step."""
    n, steps = 40_001, 50
    residual = torch.zeros(n, dtype=torch.bfloat16)
    given, sent_so_far, allowed = (torch.zeros(n, dtype=torch.float64) for _ in range(3))
    for step in range(1, steps + 1):
        scale = [2.0**-16, 0.37, -1.0, 1.0][step % 4]
        grad = (torch.randn(n) / abs(scale)).to(torch.float32 if abs(scale) < 1e-3 else grad_dtype)
        selection = HostSelection({0: (n, [part(grad, dtype, 0.02, residual, scale=scale, step=step)])})
        sent = unpack(selection.rows[0][:-1], n)
        where = torch.tensor([*sent])
        values = torch.from_numpy(np.array([*sent.values()], np.uint16).view(np.int16)).view(dtype)
        selection.feed_back()
        exact_scale = float(np.float32(scale))
        given += grad.double() * exact_scale
        sent_so_far[where] += values.double() * exact_scale
        # Allowed error: the last place of bf16, and a few last places of the fp32 sums before it.
        allowed += residual.double().abs() * 2.0**-7 + (grad.double() * exact_scale).abs() * 2.0**-21
    lost = given - sent_so_far - residual.double()
    assert lost.abs().sub(allowed).max() <= 0
    assert lost.abs().mean() < 0.15 * allowed.mean()  # stochastic errors do not add up
    assert (sent_so_far != 0).float().mean() > 0.6  # although each step sent only 2 %


def test_small_gradients_add_up():
    """Each is less than half a unit in the last place of the residual to which it is added."""
    n, steps, each = 4096, 1000, 1e-3
    grad, residual = torch.full((n,), each), torch.ones(n, dtype=torch.bfloat16)
    grad[0] = 1e3  # the only one that is sent
    for step in range(1, steps + 1):
        HostSelection({0: (n, [part(grad, torch.bfloat16, 1e-9, residual, step=step)])}).feed_back()
    owed = residual[1:].double()
    assert owed.mean() == pytest.approx(1 + steps * each, rel=2e-3)
    assert 0 < owed.std() < 0.15


def test_where_all_is_sent_only_the_rounding_is_owed():
    grad = torch.randn(1001)
    residual = torch.zeros(1001, dtype=torch.bfloat16)
    HostSelection({0: (1001, [part(grad, torch.bfloat16, 1 - 1e-9, residual)])}).feed_back()
    assert (residual.float().abs() <= grad.abs() * 2.0**-8).all()
    assert residual.count_nonzero() > 900


def test_one_percent_costs_what_it_should():
    """Bytes on the link per parameter, from the gradient to the entries."""
    n = 1 << 20
    assert 0.04 <= 4 * len(entries_of(n, part(torch.randn(n), torch.bfloat16, 0.01))) / n <= 0.042
