"""Top-K in torch: which elements are sent, the residual, and how entries are packed.

Oracle: the same rules implemented in NumPy, on the bits, with a stable sort. Everything is compared bit for bit.
"""

import functools
import math

import numpy as np
import pytest
import torch
from support.gradients import any_bits, kinds, residual_of

from csd_optim.bindings import topk_count
from csd_optim.compression.dense import feed_back, rounded, select
from csd_optim.compression.selection import listed, pack

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HALVES = [torch.float16, torch.bfloat16]
SIZES = [1, 2, 15, 16, 17, 65535, 65536, 65537, 299_993]
SCALES = [1.0, 2.0**-16, 0.37, -1.0, -3.0, 1e30, 1e-30]
NO_INVERSE = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40]  # the last: 1 / 1e-40 is inf in fp32
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-45,
    -1e-45,
    1e-39,
    6e-8,
    2.9e-8,
    3e-8,
    6e-5,
    65504.0,
    65519.99,
    65520.0,
    -1e5,
    3.4e38,
]
SPECIAL += [-3.3895e38, -3.4e38, math.inf, -math.inf, math.nan, -math.nan, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11]


# ---- the oracle --------------------------------------------------------------------


def bits_of(t):
    return t.contiguous().view(torch.int16).numpy().view(np.uint16)


def wide(t):
    """The exact values as fp32 in NumPy."""
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


def oracle_owed(grad, residual, scale):
    a, inv = wide(grad), inverse(scale)
    return a if residual is None or inv is None else a + wide(residual) * inv


def oracle_rounded(grad, residual, scale, dtype):
    a = oracle_owed(grad, residual, scale)
    convert, inf = ROUND[dtype]
    bits = convert(a)
    return np.where(((bits & 0x7FFF) == inf) & ~np.isinf(a), bits - 1, bits).astype(np.uint16)


def oracle_select(bits, k):
    magnitudes = (bits & 0x7FFF).astype(np.int16)  # NumPy uses radix sort for 16 bits
    order = np.argsort(-magnitudes, kind="stable")[:k]
    return np.sort(order[magnitudes[order] > 0])


def lowbias32(x):
    """lowbias32 for Python integers; github.com/skeeto/hash-prospector has it in C."""
    x = (x ^ x >> 16) * 0x7FEB352D % (1 << 32)
    x = (x ^ x >> 15) * 0x846CA68B % (1 << 32)
    return x ^ x >> 16


@functools.cache
def chances(first, n, step):
    i = np.arange(first, first + n, dtype=object)  # Python integers, which do not overflow
    return (lowbias32((i + step * 0x9E3779B9) % (1 << 32)) % (1 << 16)).astype(np.uint64)


def oracle_feed_back(grad, residual, scale, sent, bits, dtype, first, step):
    if inverse(scale) is None:
        return bits_of(residual)
    a = oracle_owed(grad, residual, scale).copy()
    a[sent] -= wide(torch.from_numpy(bits[sent].view(np.int16).copy()).view(dtype))
    a *= np.float32(scale)
    at_random = (a.view(np.uint32) + chances(first, len(a), step)) >> 16
    return np.where(np.isfinite(a), at_random, to_bf16(a)).astype(np.uint16)


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


# ---- gradients ---------------------------------------------------------------------


# ---- how many ------------------------------------------------------------------------


def test_count_rounds_to_even_and_is_at_least_one():
    sizes = (1, 49, 50, 51, 150, 151, 250, 65536, 1 << 20)
    assert [topk_count(0.01, n) for n in sizes] == [1, 1, 1, 1, 2, 2, 2, 655, 10486]
    assert [topk_count(0.5, n) for n in (1, 3, 5, 7)] == [1, 2, 2, 4]
    assert [topk_count(1.0, n) for n in (1, 17, 65537)] == [1, 17, 65537]


# ---- rounding ------------------------------------------------------------------------


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES + NO_INVERSE)
def test_rounded(grad_dtype, dtype, scale):
    special = torch.tensor(SPECIAL).to(grad_dtype)
    for grad in (special, any_bits(1 << 17, grad_dtype), torch.randn(1001).to(grad_dtype)):
        before = bits_of(grad).copy()
        residuals = [None, residual_of(torch.randn(len(grad)), scale), any_bits(len(grad), torch.bfloat16, seed=1)]
        for residual in residuals:
            values = rounded(grad, residual, scale, dtype)
            assert values.dtype is dtype
            assert np.array_equal(bits_of(values), oracle_rounded(grad, residual, scale, dtype))
        assert np.array_equal(bits_of(grad), before)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_16_bit_gradient(dtype):
    grad = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    values = rounded(grad, None, 1.0, dtype)
    numbers = ~grad.isnan()
    assert torch.equal(values[numbers].view(torch.int16), grad[numbers].view(torch.int16))
    assert values[~numbers].view(torch.int16).unique().tolist() == [0x7E00 if dtype is torch.float16 else 0x7FC0]


def test_what_is_finite_stays_finite():
    grad = torch.tensor([65504.0, 65520.0, -1e30, math.inf, -math.inf])
    assert rounded(grad, None, 1.0, torch.float16).tolist() == [65504.0, 65504.0, -65504.0, math.inf, -math.inf]
    largest = torch.finfo(torch.bfloat16).max
    grad = torch.tensor([3.4e38, -3.4e38, math.inf])
    assert rounded(grad, None, 1.0, torch.bfloat16).tolist() == [largest, -largest, math.inf]


# ---- selection -------------------------------------------------------------------------


def assert_selects(values, k):
    expected = oracle_select(bits_of(values), k)
    chosen = select(values, k)
    assert (chosen.dtype, chosen.shape) == (torch.bool, values.shape)
    assert np.array_equal(chosen.nonzero().squeeze(1).numpy(), expected)
    assert len(expected) <= k


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("n", SIZES)
def test_select(n, dtype):
    for _, grad in kinds(n, dtype):
        values = rounded(grad, None, 1.0, dtype)
        for ratio in (0.0001, 0.01, 0.1, 0.499, 1.0):
            assert_selects(values, topk_count(ratio, n))


@pytest.mark.parametrize("seed", range(40))
def test_select_of_anything(seed):
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
    assert_selects(rounded(torch.from_numpy(values).float(), None, 1.0, HALVES[seed % 2]), int(rng.integers(1, n + 1)))


@pytest.mark.parametrize("dtype", HALVES)
def test_rows_are_selected_each_by_itself(dtype):
    n = 4099
    values = torch.stack([rounded(grad, None, 1.0, dtype) for _, grad in kinds(n, dtype)])
    for k in (1, 41, n // 2, n):
        assert torch.equal(select(values, k), torch.stack([select(row, k) for row in values]))


# ---- residuals ---------------------------------------------------------------------------


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize(("n", "first", "step"), [(1, 0, 1), (17, 2**32 - 3, 2**24 - 1), (5003, 2**31 - 99, 7)])
def test_feed_back(n, first, step, grad_dtype, dtype):
    for scale in SCALES + NO_INVERSE:
        for name, grad in kinds(n, grad_dtype):
            residual = residual_of(torch.randn(n), scale)
            if name == "any bits":
                residual = any_bits(n, torch.bfloat16, seed=1)
            values = rounded(grad, residual, scale, dtype)
            sent = select(values, topk_count(0.1, n))
            there = sent.nonzero().squeeze(1).numpy(), bits_of(values), dtype, first, step
            expected = oracle_feed_back(grad, residual, scale, *there)
            feed_back(grad, residual, scale, values, sent, first, step)
            assert np.array_equal(bits_of(residual), expected), (scale, name)


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
        values = rounded(grad, residual, scale, dtype)
        sent = select(values, topk_count(0.02, n))
        feed_back(grad, residual, scale, values, sent, 0, step)
        exact_scale = float(np.float32(scale))
        given += grad.double() * exact_scale
        sent_so_far[sent] += values[sent].double() * exact_scale
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
    nothing = grad.bfloat16(), torch.zeros(n, dtype=torch.bool)
    for step in range(1, steps + 1):
        feed_back(grad, residual, 1.0, *nothing, 0, step)
    owed = residual.double()
    assert owed.mean() == pytest.approx(1 + steps * each, rel=2e-3)
    assert 0 < owed.std() < 0.15


def test_where_all_is_sent_only_the_rounding_is_owed():
    grad = torch.randn(1001)
    residual = torch.zeros(1001, dtype=torch.bfloat16)
    values = rounded(grad, residual, 1.0, torch.bfloat16)
    sent = select(values, 1001)
    feed_back(grad, residual, 1.0, values, sent, 0, 1)
    assert (residual.float().abs() <= grad.abs() * 2.0**-8).all()
    assert residual.count_nonzero() > 900


# ---- packing --------------------------------------------------------------------------------


def unpack(packed, tile_elems):
    """Reads entries as native/include/csd_kernel.h describes them, and asserts every rule there."""
    words, at, found = packed.numpy().view(np.uint32).tolist(), 0, {}
    for first in range(0, tile_elems, 65536):
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


def packed(values, sent, k, tile_elems, tile_first=0):
    """The entries of some tiles, one row of `values` per tile, in the form in which they are pushed."""
    rows = pack([listed(values, sent, k, tile_first, tile_elems)], len(values), tile_elems)
    assert rows.dtype is torch.int32
    return [row[: int(row[-1])] for row in rows]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tile_elems", [1024, 65536, 66560, 1 << 20])
def test_pack(tile_elems, dtype):
    rng = np.random.default_rng(tile_elems)
    borders = [e for e in (0, 65535, 65536, 131071, tile_elems - 1) if e < tile_elems]
    counts = [0, 1, 14, 15, 16, 17, 31, 32, tile_elems // 3]
    values = any_bits(tile_elems, dtype)[None]
    for elements in [
        *(np.sort(rng.choice(tile_elems, n, replace=False)) for n in counts),
        np.arange(min(tile_elems, 70_000)),
        np.arange(tile_elems - 15, tile_elems),
        np.unique(borders),
    ]:
        sent = torch.zeros(1, tile_elems, dtype=torch.bool)
        sent[0, elements] = True
        for k in {len(elements), tile_elems // 2}:
            if k < len(elements):
                continue
            [words] = packed(values, sent, k, tile_elems)
            expected = dict(zip(elements.tolist(), bits_of(values[0, elements]).tolist(), strict=True))
            assert unpack(words, tile_elems) == expected


@pytest.mark.parametrize("tile_elems", [1024, 66560, 3 << 16])
def test_rows_are_packed_each_by_itself(tile_elems):
    """Rows from which all elements, none, `k` or fewer are sent."""
    k = tile_elems // 10
    grads = [grad for _, grad in kinds(tile_elems, torch.float16)]
    values = torch.stack([rounded(grad, None, 1.0, torch.float16) for grad in grads])
    sent = select(values, k)
    for row, words in enumerate(packed(values, sent, k, tile_elems)):
        [alone] = packed(values[row : row + 1], sent[row : row + 1], k, tile_elems)
        assert torch.equal(words, alone)
        there = sent[row].nonzero().squeeze(1)
        assert unpack(words, tile_elems) == dict(zip(there.tolist(), bits_of(values[row, there]).tolist(), strict=True))


def test_parts_of_a_tile_are_packed_together():
    """Parts in any order, with any values."""
    tile_elems, parts = 70_000, [(60_000, 9_000), (0, 500), (1_000, 59_000)]
    lists, expected = [], {}
    for i, (first, n) in enumerate(parts):
        values = rounded(torch.randn(n) * (torch.rand(n) < 0.5), None, 1.0, HALVES[i % 2])[None]
        sent = select(values, k := [topk_count(0.01, n), n, n // 2][i])
        lists.append(listed(values, sent, k, first, tile_elems))
        there = sent[0].nonzero().squeeze(1)
        expected |= dict(zip((there + first).tolist(), bits_of(values[0, there]).tolist(), strict=True))
    [row] = pack(lists, 1, tile_elems)
    assert unpack(row[: int(row[-1])], tile_elems) == expected


def test_one_percent_costs_what_it_should():
    """Bytes on the link per parameter, from the gradient to the entries."""
    n = 1 << 20
    values = rounded(torch.randn(n), None, 1.0, torch.bfloat16)[None]
    k = topk_count(0.01, n)
    [row] = pack([listed(values, select(values, k), k, 0, n)], 1, n)
    assert 0.04 <= 4 * len(row) / n <= 0.042
