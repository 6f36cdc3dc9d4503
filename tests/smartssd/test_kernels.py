"""The FPGA's kernel in C-simulation: bit for bit what the CPU updater computes, and nothing written astray.

Every run checks all of it: states, parameters and report, the elements that must keep every bit, the memory around and
between what is written, and each port for itself. Subnormal numbers are zero to both.
"""

import itertools
import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from csd_optim._emulator import ffi, lib
from support.comparing import bits

from csd_optim import bindings
from csd_optim.devices.xclbin import INSTALLED

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "hls_kernels"
NATIVE = (ROOT / "native" / "include", ROOT / "native" / "src")

LANES = 16  # fp32 values in a word
BLOCK = 1 << 16  # elements that a block of entries covers
TILE = 4096
SIZES = [1, 15, 16, 17, 31, 32, 33, 48, 1023, TILE - 1, TILE]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HALVES = [torch.float16, torch.bfloat16]

# The images of csd_kernel.h.
SEGMENT = np.dtype(
    [
        *((name, "u4") for name in ("first_word", "elems", "grad_dtype", "param_dtype")),
        ("hyper", bindings.HYPER),
        *((name, "u4") for name in ("sparse", "key")),
    ]
)
REPORT = np.dtype(
    [
        *((name, "u4") for name in ("version", "n_words", "nonfinite", "bad_entries", "crc_param")),
        ("reserved", "u4", 11),
    ]
)
SUMS = np.dtype([("in", "u4", 4), ("out", "u4", 4), ("reserved", "u4", 8)])
LEAST_SUM = 64  # words that a checksum covers


def hyper(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.999), eps=1e-8, step=3, grad_scale=1.0, amsgrad=False):
    """One `HYPER`, as the optimizer computes it."""
    beta1, beta2 = betas
    betas = beta1, 1 - beta1, beta2, 1 - beta2
    folded = lr / (1 - beta1**step), (1 - beta2**step) ** -0.5
    constants = 1 - lr * weight_decay, *betas, *folded, eps, grad_scale
    return np.array((bindings.RULES["amsgrad" if amsgrad else "adamw"], constants), bindings.HYPER)


@dataclass
class Part:
    """A segment. A sparse one has its gradient as the update is to see it, with its zeros."""

    first_word: int
    grad: torch.Tensor
    param_dtype: torch.dtype
    hyper: np.ndarray
    sparse: bool = False

    @property
    def elems(self):
        return self.grad.numel()

    @property
    def span(self):
        return slice(LANES * self.first_word, LANES * self.first_word + self.elems)


def to_words(t):
    """Any tensor as whole words, the last one filled up with zeros."""
    data = t.contiguous().view(torch.uint8).numpy().reshape(-1)
    return np.concatenate([data, np.zeros(-len(data) % 64, np.uint8)]).view(np.uint32)


class Memory:
    """Words of the card's memory between guards, which nobody may write to."""

    GUARD = 0x5AFE5AFE

    def __init__(self, n_words, content=None):
        raw = np.empty(LANES * (n_words + 3), np.uint32)
        start = -raw.ctypes.data % 64 // 4
        self.all = raw[start : start + LANES * (n_words + 2)]
        self.all[:] = self.GUARD
        self.words = self.all[LANES:-LANES]
        if content is not None:
            self.words[:] = content
        self.before = self.all.copy()

    def address(self):
        return ffi.cast("void *", self.words.ctypes.data)

    def assert_only_written(self, spans=()):
        """Outside of these slices of 32-bit lanes nothing has changed."""
        lanes = np.ones(len(self.all), bool)
        for span in spans:
            lanes[LANES:-LANES][span] = False
        assert np.array_equal(self.all[lanes], self.before[lanes])


def flushed(t):
    """fp32 with zeros for subnormal numbers, of their sign."""
    pattern = t.view(torch.int32)
    return torch.where(pattern & 0x7F800000 == 0, pattern & -(1 << 31), pattern).view(torch.float32)


def expect(state, parts, isa):
    """What the CPU makes of it: (state, parameters)."""
    state, params = state.clone(), []
    for p in parts:
        param = torch.empty(p.elems, dtype=p.param_dtype)
        bindings.update(p.hyper, isa, p.grad, [section[p.span] for section in state], param)
        params.append(param)
    return state, params


def sums_of(rows, sum_words):
    """CRC-32C of each `sum_words` words of each section: [chunks, 4], zero where there is no section."""
    chunk = LANES * sum_words
    sums = np.zeros((-(-rows.shape[1] // chunk), 4), np.uint32)
    for c in range(len(sums)):
        for s, row in enumerate(rows):
            sums[c, s] = bindings.crc32c(row[c * chunk : (c + 1) * chunk].tobytes())
    return sums


def simulate(
    state, parts, *, entries=(), bad_entries=0, in_place=False, isa=None, exact_nan=False, sum_words=LEAST_SUM
):
    """Runs the kernel on a tile, checks everything that comes out and returns it.

    `state` is [sections, 16 * n_words] fp32.
    """
    sections, n_words = len(state), state.shape[1] // LANES
    lanes = n_words * LANES
    sections_at = [slice(s * lanes, (s + 1) * lanes) for s in range(sections)]
    tile = state.view(torch.int32).numpy().view(np.uint32)

    segments = np.zeros(len(parts), SEGMENT)
    for i, p in enumerate(parts):
        dtypes = bindings.DTYPE_CODES[p.grad.dtype], bindings.DTYPE_CODES[p.param_dtype]
        segments[i] = (p.first_word, p.elems, *dtypes, p.hyper, p.sparse, 0)
    expected_state, expected_params = expect(state, parts, isa or bindings.isas()[-1])

    if in_place:
        memory = Memory(sections * n_words, tile.reshape(-1))
        inputs = outputs = [memory] * sections
    else:  # each port has a memory of its own, which holds nothing but its section
        inputs, outputs = ([Memory(sections * n_words) for _ in range(sections)] for _ in range(2))
        for m, span, content in zip(inputs, sections_at, tile, strict=True):
            m.words[span] = content
            m.before = m.all.copy()
    grad_words = [to_words(p.grad) for p in parts if not p.sparse]
    grad_words = np.concatenate([np.empty(0, np.uint32), *grad_words])
    param_words = np.concatenate([np.empty(0, np.uint32), *(to_words(p) for p in expected_params)])
    grad, param = Memory(len(grad_words) // LANES, grad_words), Memory(len(param_words) // LANES)
    table, report = Memory(len(parts), segments.view(np.uint32)), Memory(1 + -(-n_words // sum_words))
    buffer = Memory(len(entries) // LANES, entries)

    def ports(memories):
        return [m.address() for m in memories] + [ffi.NULL] * (4 - sections)

    why = lib.csd_csim_update(
        *ports(inputs),
        grad.address(),
        buffer.address(),
        table.address(),
        *ports(outputs),
        param.address(),
        report.address(),
        n_words,
        sections,
        len(parts),
        len(grad_words) // LANES,
        len(entries) // LANES,
        len(param_words) // LANES,
        sum_words,
    )
    assert why == ffi.NULL, ffi.string(why).decode()

    for m in (grad, table, buffer, *(() if in_place else inputs)):
        m.assert_only_written()
    param.assert_only_written([slice(None)])
    report.assert_only_written([slice(None)])
    for m, span in zip(outputs, sections_at, strict=True):
        m.assert_only_written(sections_at if in_place else [span])

    after = np.stack([m.words[span] for m, span in zip(outputs, sections_at, strict=True)])
    touched = np.zeros(after.shape, bool)
    for p in parts:
        touched[: 4 if p.hyper["rule"] == bindings.RULES["amsgrad"] else 3, p.span] = True
    assert np.array_equal(after[~touched], tile[~touched])
    state_after = torch.from_numpy(after.view(np.float32))
    raw = (lambda t: t.view(torch.int32)) if exact_nan else bits
    assert torch.equal(raw(state_after), raw(expected_state))

    assert_params(param.words, parts, expected_params, bits)
    sums = reported_sums(report, parts, param, n_words, bad_entries, SUMS)
    assert np.array_equal(sums["in"], sums_of(tile, sum_words))
    assert np.array_equal(sums["out"], sums_of(after, sum_words))
    assert not sums["reserved"].any()
    return state_after


def assert_params(words, parts, expected, bits):
    """What the kernel wrote of the parameters, each from a word on, and zeros after it; the same `bits`."""
    at = 0
    for p, wanted in zip(parts, expected, strict=True):
        n = len(to_words(wanted))
        got = torch.from_numpy(words[at : at + n].copy()).view(p.param_dtype)
        assert torch.equal(bits(got[: p.elems]), bits(wanted))
        assert not got[p.elems :].view(torch.uint8).any()
        at += n


def reported_sums(report, parts, param, n_words, bad_entries, dtype):
    """The sums of a report, one of this dtype for each chunk, when its header is right."""
    r = report.words[:LANES].view(REPORT)[0]
    assert (r["version"], r["n_words"], r["bad_entries"]) == (3, n_words, bad_entries)
    assert r["nonfinite"] == sum((~p.grad.isfinite()).sum().item() for p in parts)
    assert r["crc_param"] == bindings.crc32c(param.words.tobytes())
    assert not r["reserved"].any()
    return report.words[LANES:].view(dtype)


def random_state(n_words, sections=3):
    """Weights and moments of a model in training; the second moments are positive."""
    state = 0.1 * torch.randn(sections, LANES * n_words)
    state[2:] = state[2:] ** 2
    return state


def words_for(elems):
    return -(-elems // LANES)


# ---- Lengths, dtypes, layouts ----------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("param_dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_lengths(grad_dtype, param_dtype, amsgrad):
    h = hyper(amsgrad=amsgrad)
    for in_place, n in itertools.product((False, True), SIZES):
        part = Part(0, torch.randn(n).to(grad_dtype), param_dtype, h)
        simulate(random_state(words_for(n), 4 if amsgrad else 3), [part], in_place=in_place)


def random_hyper(rng, amsgrad):
    return hyper(
        lr=10 ** rng.uniform(-5, 0),
        weight_decay=rng.choice([0, 0.1]),
        betas=(rng.choice([0, 0.9]), rng.choice([0, 0.95, 0.999])),
        eps=rng.choice([0, 1e-8, 1e-3]),
        step=rng.integers(1, 1000),
        grad_scale=rng.choice([1.0, -1.0, 2.0**-16, 0.37]),
        amsgrad=amsgrad and rng.random() < 0.5,  # a tile with four sections may hold parameters that use three
    )


def random_parts(rng, n_words, sections, sparse=None):
    """Segments with and without gaps between them, of awkward lengths."""
    parts, at = [], 0
    while True:
        at += int(rng.choice([0, 0, 1, 5]))
        elems = int(rng.integers(1, 200))
        if at + words_for(elems) > n_words:
            return parts
        grad = torch.from_numpy(rng.standard_normal(elems).astype(np.float32)).to(DTYPES[rng.integers(3)])
        parts.append(Part(at, grad, DTYPES[rng.integers(3)], random_hyper(rng, sections == 4)))
        if sparse and rng.random() < 0.6:
            kept = torch.from_numpy(rng.random(elems) < rng.choice([0, 0.05, 0.5, 1]))
            grad = grad.to(HALVES[rng.integers(2)])
            parts[-1].grad, parts[-1].sparse = torch.where(kept, grad, torch.zeros_like(grad)), True
        at += words_for(elems)


@pytest.mark.parametrize("seed", range(40))
def test_many_segments_in_a_tile(seed):
    rng = np.random.default_rng(seed)
    n_words, sections = int(rng.integers(1, 300)), int(rng.integers(3, 5))
    parts = random_parts(rng, n_words, sections)
    simulate(random_state(n_words, sections), parts, in_place=bool(seed % 2))


@pytest.mark.parametrize("sections", [1, 2, 3, 4])
@pytest.mark.parametrize("in_place", [False, True])
def test_no_segments(sections, in_place):
    state = random_state(100, sections)
    state[0, :3] = torch.tensor([float("nan"), -0.0, 1e-45])
    simulate(state, [], in_place=in_place)
    simulate(state, [], in_place=in_place, entries=np.zeros(LANES, np.uint32))
    simulate(state[:, :0], [], in_place=in_place)


def test_a_tile_of_several_bursts_and_blocks():
    n = 3 * BLOCK + 5
    part = Part(1, torch.randn(n).half(), torch.float16, hyper())
    simulate(random_state(words_for(n) + 7), [part])


@pytest.mark.parametrize("sections", [3, 4])
@pytest.mark.parametrize("sum_words", [LEAST_SUM, 65, 100, 8192, 1 << 31])
def test_sums(sum_words, sections):
    """One of each chunk of each section, the last chunk as long as it happens to be; many of them, and a single one."""
    for n_words in {1, sum_words % (1 << 12) - 1, sum_words % (1 << 12) + 1, 128, 4096, 20_000} - {-1, 0}:
        part = Part(0, torch.randn(LANES * n_words).half(), torch.float16, hyper(amsgrad=sections == 4))
        simulate(random_state(n_words, sections), [part], sum_words=sum_words)


# ---- Special values ----------------------------------------------------------------


def special(n, dtype=torch.float32):
    """Zeros, subnormals, infinities, nan with payloads, the huge and the tiny, of both signs, among random numbers."""
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal / 8
    x = torch.randn(n, dtype=torch.float64)
    x[1::5] *= 10 ** torch.empty(len(x[1::5]), dtype=torch.float64).uniform_(-45, 38)
    values = [0.0, float("inf"), info.max, info.smallest_normal, subnormal, 1e20, 1e-20, 1.0]
    values = torch.tensor([*values, *(-v for v in values)], dtype=torch.float64)
    x[0::3] = values[torch.randint(len(values), (len(x[0::3]),))]
    x = x.to(dtype)
    pattern = x.view(torch.int32 if dtype == torch.float32 else torch.int16)
    quiet_and_signalling = {
        torch.float32: [0x7FC00000, 0x7FC12345, 0x7F800001, 0x7FBFFFFF],
        torch.float16: [0x7E00, 0x7E15, 0x7C01, 0x7DFF],
        torch.bfloat16: [0x7FC0, 0x7FD5, 0x7F81, 0x7FBF],
    }[dtype]
    for k, nan in enumerate(quiet_and_signalling):
        pattern[k::43] = nan
    return x


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("isa", bindings.isas())
def test_special_values(isa, grad_dtype, amsgrad):
    """In gradients and in every state, against each instruction set of this CPU."""
    n = 5003
    for param_dtype, grad_scale in itertools.product(DTYPES, (1.0, -0.3, 1e30, 1e-30)):
        state = torch.stack([special(LANES * words_for(n)) for _ in range(4 if amsgrad else 3)])
        part = Part(0, special(n, grad_dtype), param_dtype, hyper(grad_scale=grad_scale, amsgrad=amsgrad))
        simulate(state, [part], isa=isa)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_gradient_of_16_bits(dtype):
    """With beta1 = 0, exp_avg is the gradient as it was widened, to the payload of a nan."""
    grad = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    state = torch.zeros(3, len(grad))
    after = simulate(state, [Part(0, grad, torch.float32, hyper(betas=(0.0, 0.9)))], exact_nan=True)
    assert torch.equal(bits(after[1]), bits(flushed(grad.float()) + 0.0))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_rounding_to_16_bits(dtype):
    """Each number of 16 bits, the tie above it and the fp32 numbers beside both, as masters that stay as they are."""
    exact = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float().view(torch.int32)
    tie = 1 << (12 if dtype == torch.float16 else 15)
    masters = torch.cat([exact + d for d in (0, 1, tie - 1, tie, tie + 1)]).view(torch.float32)
    state = torch.stack([masters, torch.zeros_like(masters), torch.ones_like(masters)])
    still = hyper(lr=0.0)
    after = simulate(state, [Part(0, torch.zeros(len(masters), dtype=dtype), dtype, still)])
    assert torch.equal(bits(after[0]), bits(flushed(masters)))


def test_nonfinite_gradients_are_counted_before_they_are_scaled():
    grad = torch.full((20,), 1e30)
    grad[3], grad[17] = float("inf"), float("nan")
    simulate(random_state(2), [Part(0, grad, torch.float16, hyper(grad_scale=1e30))])
    simulate(random_state(2), [Part(0, grad, torch.float16, hyper(grad_scale=0.0))])


# ---- Top-K ----------------------------------------------------------------------


def encode(grads, n_words):
    """Blocks of entries for the sparse gradients of a tile: uint16 bits by element."""
    blocks = []
    for first in range(0, LANES * n_words, BLOCK):
        block = grads[first : first + BLOCK]
        index = np.flatnonzero(block).astype(np.uint32)
        entries = np.concatenate([[len(index)], index | block[index].astype(np.uint32) << 16]).astype(np.uint32)
        blocks.append(np.concatenate([entries, np.zeros(-len(entries) % LANES, np.uint32)]))
    return np.concatenate(blocks)


def sparse_gradients(parts, n_words):
    grads = np.zeros(LANES * n_words, np.uint16)
    for p in parts:
        if p.sparse:
            grads[p.span] = p.grad.view(torch.int16).numpy().view(np.uint16)
    return grads


def simulate_topk(state, parts, **kwargs):
    n_words = state.shape[1] // LANES
    return simulate(state, parts, entries=encode(sparse_gradients(parts, n_words), n_words), **kwargs)


@pytest.mark.parametrize("seed", range(60))
def test_dense_and_sparse_segments(seed):
    rng = np.random.default_rng(seed)
    n_words, sections = int(rng.integers(1, 300)), int(rng.integers(3, 5))
    parts = random_parts(rng, n_words, sections, sparse=True)
    simulate_topk(random_state(n_words, sections), parts, in_place=bool(seed % 2))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("ratio", [0.01, 0.3])
def test_several_blocks(dtype, ratio):
    """The last one short, one of them empty, and gradients that are not finite."""
    n = 3 * BLOCK + 1000
    grad = torch.where(torch.rand(n) < ratio, torch.randn(n), 0.0).to(dtype)
    grad[BLOCK : 2 * BLOCK] = 0
    grad[5], grad[-1] = float("inf"), float("nan")
    simulate_topk(random_state(words_for(n)), [Part(0, grad, dtype, hyper(), sparse=True)])


def test_a_full_block():
    """Every element has an entry, and the count does not fit into 16 bits."""
    grad = torch.randn(BLOCK).bfloat16()
    grad[grad == 0] = 1
    simulate_topk(random_state(BLOCK // LANES), [Part(0, grad, torch.bfloat16, hyper(), sparse=True)])


def test_entries_for_nobody_have_no_effect():
    """In a gap, in a dense segment, in the lanes after the end of a sparse one, and after all."""
    grad = torch.randn(20).half()
    parts = [Part(1, grad, torch.float16, hyper(), sparse=True), Part(4, grad, torch.float16, hyper())]
    entries = encode(sparse_gradients(parts, 8), 8)
    everywhere = np.full(8 * LANES, 0x3C00, np.uint16)
    everywhere[parts[0].span] = grad.view(torch.int16).numpy().view(np.uint16)
    assert len(encode(everywhere, 8)) > len(entries)
    simulate(random_state(8), parts, entries=encode(everywhere, 8))


def decode(entries, n_words):
    """What csd_kernel.h says of a buffer of entries, one at a time: (gradients as uint16 bits, how many are bad)."""
    grads, bad, at, lost = np.zeros(LANES * n_words, np.uint16), 0, 0, False
    for first in range(0, LANES * n_words if len(entries) else 0, BLOCK):
        lost = lost or at == len(entries) or at + 1 + int(entries[at]) > len(entries)
        if lost:
            continue
        count, least = int(entries[at]), 0
        for entry in entries[at + 1 : at + 1 + count].tolist():
            index = entry & 0xFFFF
            if index < least or index >= min(BLOCK, LANES * n_words - first):
                bad += 1
            else:
                grads[first + index], least = entry >> 16, index + 1
        at += -(-(1 + count) // LANES) * LANES
    return grads, bad + (lost or at != len(entries))


def simulate_damaged(entries, n_words, bad):
    entries = np.asarray(entries, np.uint32)
    grads, expected = decode(entries, n_words)
    assert bad in (None, expected)
    grad = torch.from_numpy(grads.view(np.int16)).view(torch.bfloat16)
    part = Part(0, grad, torch.bfloat16, hyper(), sparse=True)
    simulate(random_state(n_words), [part], entries=entries, bad_entries=expected)


def entry(index, value=0x3F80):
    return value << 16 | index


def block(*entries, count=None):
    words = [len(entries) if count is None else count, *entries]
    return words + [0] * (-len(words) % LANES)


DAMAGED = {  # entries, words of the tile, how many entries are bad
    "sound": (block(entry(3), entry(9)), 4, 0),
    "the last element": (block(entry(63)), 4, 0),
    "beyond the tile": (block(entry(3), entry(64), entry(65535)), 4, 2),
    "descending": (block(entry(9), entry(3), entry(10)), 4, 1),
    "twice": (block(entry(9), entry(9, 0x4000), entry(10)), 4, 1),
    "below the largest, above the last": (block(entry(5), entry(40), entry(7), entry(8), entry(41)), 4, 2),
    "after one beyond the tile": (block(entry(500), entry(3)), 4, 1),
    "a count beyond the words": (block(entry(3), count=16), 4, 1),
    "a count beyond all bounds": (block(entry(3), count=0xFFFFFFFF), 4, 1),
    "a count into the padding": (block(entry(3), count=15), 4, 14),
    "no words": ([], 4, 0),
    "words after the end": (block(entry(3)) + block(entry(4)) + block(), 4, 1),
    "one block of two": (block(entry(3)), BLOCK // LANES + 1, 1),
    "the second lost": (block(entry(3)) + block(entry(3), count=99), BLOCK // LANES + 1, 1),
    "the first lost": (block(entry(3), count=99) + block(entry(3)), BLOCK // LANES + 1, 1),
    "beyond a short last block": (block(entry(16)) + block(entry(15), entry(16)), BLOCK // LANES + 1, 1),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_entries(case):
    simulate_damaged(*DAMAGED[case])


@pytest.mark.parametrize("seed", range(60))
def test_randomly_damaged_entries(seed):
    """Whatever memory holds: the kernel comes to its end, writes nowhere else and takes what the rules let through."""
    rng = np.random.default_rng(seed)
    n_words = int(rng.choice([1, 7, 100, BLOCK // LANES + 3]))
    sound = np.where(rng.random(LANES * n_words) < 0.1, 0x3F80, 0).astype(np.uint16)
    entries = encode(sound, n_words)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(len(entries)))
        damage = rng.integers(5)
        if damage == 0:  # anything
            entries[at] = rng.integers(1 << 32)
        elif damage == 1:  # a bit
            entries[at] ^= np.uint32(1 << rng.integers(32))
        elif damage == 2:  # a count
            entries[0] = rng.integers(2 * len(entries))
        elif damage == 3:  # cut short
            entries = entries[: at // LANES * LANES]
        else:  # words after the end
            entries = np.concatenate([entries, entries[: 2 * LANES]])
        if not len(entries):
            break
    simulate_damaged(entries, n_words, None)


# ---- The simulation itself ---------------------------------------------------------


def test_runs_at_the_same_time():
    """As on a card with several compute units: nothing is shared."""
    rng = np.random.default_rng(0)
    tiles = [(random_state(200, 4), random_parts(rng, 200, 4, sparse=True)) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda tile: simulate_topk(*tile), tiles))


def run_segment(grad_words, param_words, misplaced=0):
    """One dense fp32 segment of 200 words, and numbers of words that may not fit it: what the kernel says."""
    segments = np.zeros(1, SEGMENT)
    segments[0] = (0, 200 * LANES, 0, 0, hyper(), 0, 0)
    tile, grad, param = Memory(600), Memory(200), Memory(200)
    table, report = Memory(1, segments.view(np.uint32)), Memory(2)
    ports = [*[tile.address()] * 3, ffi.NULL]
    inputs = (grad.address() + misplaced, ffi.NULL, table.address())
    counts = (200, 3, 1, grad_words, 0, param_words, 200)
    why = lib.csd_csim_update(*ports, *inputs, *ports, param.address(), report.address(), *counts)
    return None if why == ffi.NULL else ffi.string(why).decode()


def test_a_run_that_cannot_end_says_where_it_stands():
    for _ in range(20):
        assert run_segment(200, 200) is None
        too_few = run_segment(199, 200)
        # What it has begun stands in its pipeline: 64 iterations of four numbers each.
        assert too_few.startswith("deadlock: read_section waits for room in master_in")
        assert "; update waits for grads, 256 in its pipeline; write_section waits for master_out;" in too_few
        assert too_few.endswith("write_params waits for params; write_report waits for crc_in_0.")
        assert "update waits for room in params, " in run_segment(200, 100)
    assert run_segment(200, 200, misplaced=4) == "an address is not a multiple of 64 bytes"


def compile_and_run(compiler, directory, headers, *flags):
    program = directory / "kernels_test"
    sources = [*KERNELS.glob("*.cpp"), ROOT / "tests" / "native" / "kernels_test.cpp"]
    includes = [f"-I{d}" for d in (*NATIVE, KERNELS, headers)]
    command = [compiler, "-O1", "-ffp-contract=off", "-pthread", *flags, *includes, *WARNINGS, *sources, "-o", program]
    subprocess.run(command, check=True)
    assert subprocess.run([program], check=True, capture_output=True, text=True).stdout == "kernels: done\n"


@pytest.mark.parametrize("in_flight", [pytest.param(64, marks=pytest.mark.soak), 200])
def test_streams_that_are_too_shallow_are_found(in_flight, tmp_path):
    """For what stages hold themselves, and for what stands in their pipelines: in tests/native/kernels_test.cpp, in a
    region that is wrong on purpose. The kernel gets by with pipelines of as many iterations, and of far more."""
    compile_and_run("g++", tmp_path, KERNELS / "csim", "-std=c++17", f"-DCSD_IN_FLIGHT={in_flight}")


def run_natively(directory, in_flight, header, **depths):
    """tests/native/kernels_test.cpp with other depths of streams in one of the headers."""
    kernels = directory / "hls_kernels"
    shutil.copytree(KERNELS, kernels, ignore=shutil.ignore_patterns("build"), dirs_exist_ok=True)
    text = (KERNELS / header).read_text()
    for name, depth in depths.items():
        text, found = re.subn(rf"(constexpr int .*\b{name} = )[^,;]*", rf"\g<1>{depth}", text)
        assert found == 1
    (kernels / header).write_text(text)
    includes = [f"-I{d}" for d in (*NATIVE, kernels, kernels / "csim")]
    sources = [*kernels.glob("*.cpp"), ROOT / "tests" / "native" / "kernels_test.cpp"]
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-pthread", "-w", f"-DCSD_IN_FLIGHT={in_flight}"]
    subprocess.run(["g++", *flags, *includes, *sources, "-o", directory / "program"], check=True)
    return subprocess.run([directory / "program"], capture_output=True, text=True)


@pytest.mark.soak
def test_too_few_sums_on_their_way_are_found(tmp_path):
    """The sums of what is read wait for those of what is written, and these for all that stands in pipelines between:
    were there room for one of them only, the kernel would hang on a card and in C-simulation with pipelines."""
    without, within = (run_natively(tmp_path, in_flight, "stages.h", kFifoSums=1) for in_flight in (0, 64))
    assert without.stdout == "kernels: done\n"
    assert "deadlock: read_section waits for room in crc_in_0" in within.stderr


# ---- As Vitis reads it -------------------------------------------------------------

WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-label"]  # pragmas: the test below


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_compiles_as_vitis_would(compiler, tmp_path):
    """C++14 with GNU's extensions, against what Vitis declares; stages are calls, each after those it reads from."""
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    compile_and_run(compiler, tmp_path, KERNELS / "vitis_check", "-std=gnu++14", "-faligned-new", "-DSEQUENTIAL")


DIRECTIVES = [  # of UG1399; a compiler ignores what it does not know
    r"INTERFACE m_axi port = \w+ bundle = gmem\d max_(\w+)_burst_length = \d+ num_(read|write)_outstanding = \d+",
    r"INTERFACE (s_axilite|ap_ctrl_chain) port = \w+ bundle = control",
    r"DATAFLOW",
    r"PIPELINE II = \d( style = (stp|flp|frp))?",
    r"UNROLL",
    r"INLINE( off)?",
    r"LOOP_TRIPCOUNT min = \d+ max = \d+",
    r"ALLOCATION operation instances = \w+ limit = \d+",
]


def test_directives_are_ones_that_there_are():
    for path in (*KERNELS.glob("*.cpp"), KERNELS / "stages.h", KERNELS / "codes.h", KERNELS / "word.h"):
        for directive in re.findall(r"^\s*#pragma (.*)$", path.read_text(), re.M):
            known = any(re.fullmatch(f"HLS {d}", directive) for d in DIRECTIVES)
            assert known or (path.suffix == ".h" and directive == "once"), directive


def test_each_stage_stays_a_module_of_its_own():
    """A function that is not told otherwise is inlined if it is small, and is no process of the dataflow then."""
    stages = "".join((KERNELS / name).read_text() for name in ("stages.h", "codes.h"))
    for top, inner, n in (
        ("csd_adamw_update", {"store"}, 9),
        ("csd_adamw_8bit_update", {"store", "store_ratios", "store_roots", "read_section", "write_section"}, 18),
    ):
        names = set(re.findall(r"CSD_STAGE\((\w+)", (KERNELS / f"{top}.cpp").read_text())) | inner
        assert len(names) == n
        for name in names:
            assert re.search(rf"^inline \w+ {name}\([^)]*\) {{\n#pragma HLS INLINE off$", stages, re.M), name


LANES_OF = {  # stage → (header, what it does with a lane)
    "update": (
        "stages.h",
        """
#include "adamw.h"
#include "float16.h"
extern "C" void lane(float (*e)[4], const csd_hyper *h, const uint16_t *grad, uint16_t *param) {
  AdamW(*h).update(*e, f16_to_f32(*grad));
  *param = f32_to_f16((*e)[0]);
}
""",
    ),
    "update_codes": (
        "codes.h",
        """
#include "adamw.h"
#include "codec.h"
extern "C" void lane(const csd_hyper *h, const uint16_t *grad, const uint32_t *code, float *out) {
  const float u = decode_root(code[0], code[1]), p = decode_root(code[2], code[3]);
  const float master = code[4] ? decode_master(code[5], code[6], code[7]) : bits_float(code[5]);
  float e[4] = {master, decode_exp_avg(code[8], u, code[0]), u * u, p * p};
  AdamW(*h).update(e, f16_to_f32(*grad));
  out[0] = e[0], out[1] = e[1], out[2] = sqrtf(e[2]), out[3] = sqrtf(e[3]);
}
""",
    ),
    "encode": (
        "codes.h",
        """
#include "codec.h"
extern "C" void lane(const float *in, const uint32_t *group, uint32_t *code) {
  const Chance chance = chance_of(mix_bits(group[0]));
  code[0] = encode_root(in[0], group[1], chance.root);
  code[1] = encode_ratio(in[1], decode_root(code[0], group[1]), code[0], chance.ratio);
  code[2] = encode_root(in[2], group[2], nearest().root);
  const SplitMaster split = encode_master(in[3], chance, group[3]);
  code[3] = split.param, code[4] = split.correction;
}
""",
    ),
}
INSTRUCTIONS = {"mul": "imull", "fmul": "mulss", "fadd": "addss", "fsub": "subss", "fdiv": "divss", "fsqrt": "sqrtss"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="counts instructions of x86-64")
@pytest.mark.parametrize("stage", LANES_OF)
def test_operators_are_limited_to_what_the_arithmetic_needs(stage, tmp_path):
    """Each one serves two lanes; counted in what a compiler makes of a lane."""
    header, lane = LANES_OF[stage]
    (tmp_path / "lane.cpp").write_text(lane)
    flags = ["-std=gnu++14", "-O1", "-ffp-contract=off", "-fno-math-errno", "-mno-avx", "-S", "-o", "-"]
    command = ["g++", *flags, f"-I{ROOT / 'native' / 'include'}", tmp_path / "lane.cpp"]
    code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    text = (KERNELS / header).read_text()
    (body,) = re.findall(rf"^inline void {stage}\(.*?^}}", text, re.M | re.S)
    limits = dict(re.findall(r"ALLOCATION operation instances = (\w+) limit = (\d+)", body))
    per_lane = {op: len(re.findall(rf"\b{instruction}\b", code)) for op, instruction in INSTRUCTIONS.items()}
    assert limits == {op: str(n * LANES // 2) for op, n in per_lane.items() if n}


LISTENS = """
proc heard {args} { puts $args }
foreach name {open_project set_top add_files open_solution set_part create_clock} {
    interp alias {} $name {} heard $name
}
proc csynth_design {} {
    file mkdir csynth/solution/syn/report
    set report [open csynth/solution/syn/report/csynth.rpt w]
    puts $report "the report"
    close $report
}
source [lindex $argv 0]
"""


def test_csynth_script(tmp_path):
    """Under a Tcl that knows Vitis' commands by name: what it is told is there, and the report is printed."""
    if not shutil.which("tclsh"):
        pytest.skip("tclsh is not installed")
    (tmp_path / "listens.tcl").write_text(LISTENS)
    shutil.copytree(KERNELS, tmp_path / "hls_kernels", ignore=shutil.ignore_patterns("build"))
    script = tmp_path / "hls_kernels" / "csynth.tcl"
    command = ["tclsh", tmp_path / "listens.tcl", script]
    environment = {**os.environ, "KERNEL": "", "PART": "", "FREQUENCY": "250"}
    heard = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.splitlines()
    assert heard[-1] == ""
    assert heard[-2] == "the report"
    told = dict(line.split(" ", 1) for line in heard[:-2])
    assert told["set_top"] == "csd_adamw_update"
    assert told["set_part"] == "xcku5p-ffvb676-2-e"
    assert told["create_clock"] == "-period 250MHz"
    source, _, flags = told["add_files"].partition(" -cflags ")
    assert Path(source).name == "csd_adamw_update.cpp"
    assert Path(source).is_file()
    assert flags.startswith("{-std=gnu++14 ")
    assert script.parent.joinpath("build", "csynth").is_dir()


# ---- What is built for the card ----------------------------------------------------


def kernel_sources():
    """Kernel → (its arguments, {port: bundle}), from the sources."""
    kernels = {}
    for path in sorted(KERNELS.glob("*.cpp")):
        text = path.read_text()
        name, arguments = re.search(r"^void (\w+)\(([^)]*)\)", text, re.M).groups()
        ports = re.findall(r"#pragma HLS INTERFACE m_axi port = (\w+) bundle = (\w+)", text)
        control = re.findall(r"#pragma HLS INTERFACE s_axilite port = (\w+) bundle = control", text)
        arguments = [(a.split()[-1].lstrip("*"), "*" in a) for a in arguments.split(",")]
        assert path.stem == name
        assert sorted(port for port, _ in ports) == sorted(a for a, pointer in arguments if pointer)
        assert control == [*(a for a, _ in arguments), "return"]
        kernels[name] = ([a for a, _ in arguments], dict(ports))
    return kernels


def test_arguments_are_those_of_the_contract():
    contract = (ROOT / "native" / "include" / "csd_kernel.h").read_text()
    described = {}
    for name, arguments in re.findall(r"^//   (csd_adamw\w*_update)\(([^)]*)\)", contract, re.M):
        arguments = re.sub(r"//|\s", "", arguments).split(",")
        described[name] = [
            f"{a.split('_0..')[0]}_{k}" if ".." in a else a
            for a in arguments
            for k in range(int(a[-1]) + 1 if ".." in a else 1)
        ]
    assert described == {name: arguments for name, (arguments, _) in kernel_sources().items()}


def test_reads_and_writes_do_not_wait_for_each_other():
    """A bundle has one reader and one writer: its two channels are all there is to share."""
    for _, ports in kernel_sources().values():
        outputs = {p for p in ports if p.startswith("tile_out") or p in ("param", "report")}
        for group in (outputs, ports.keys() - outputs):
            bundles = [ports[p] for p in group]
            assert len(set(bundles)) == len(bundles)


def test_every_port_is_connected_to_the_bank():
    lines = [line.partition("#")[0].strip() for line in (KERNELS / "connectivity.cfg").read_text().splitlines()]
    lines = [line for line in lines if line]
    expected, masters = ["[connectivity]"], 0
    for name, (arguments, ports) in kernel_sources().items():
        expected += [f"nk={name}:1:{name}_1", *(f"sp={name}_1.{a}:bank0" for a in arguments if a in ports)]
        masters += len(set(ports.values()))
    assert masters <= 15  # as many as a bank takes (UG1393)
    assert sorted(lines) == sorted(expected)
    assert lines[0] == "[connectivity]"


def dry_run(*arguments):
    """The commands that make would run: those of v++, as lists of words, and the others."""
    make = ["make", "--no-print-directory", "-n", "-C", KERNELS, "BUILD=nowhere", *arguments]
    lines = subprocess.run(make, check=True, capture_output=True, text=True).stdout.splitlines()
    commands = [line.split() for line in lines]
    return [c for c in commands if c[0] == "v++"], [c for c in commands if c[0] != "v++"]


@pytest.mark.parametrize("target", ["hw", "hw_emu", "sw_emu"])
def test_makefile(target):
    commands, _ = dry_run(f"TARGET={target}", "FREQUENCY=250")
    *all_compiles, link = commands
    platform = "xilinx_u2_gen3x4_xdma_gc_2_202110_1"
    for command in commands:
        assert command[command.index("--target") + 1] == target
        assert command[command.index("--platform") + 1] == platform
        assert "unsafe" not in " ".join(command)
    for name, compiles in zip(sorted(kernel_sources()), sorted(all_compiles, key=lambda c: c[-1]), strict=True):
        assert compiles[1] == "--compile"
        assert compiles[compiles.index("--kernel") + 1] == name
        assert compiles[compiles.index("--hls.clock") + 1] == f"250000000:{name}"
        assert compiles[-3:] == ["-o", f"nowhere/{name}.xo", f"{name}.cpp"]
        for include in (word[2:] for word in compiles if word.startswith("-I")):
            assert (KERNELS / include).is_dir()
            assert not (KERNELS / include / "hls_stream.h").exists()  # Vitis' own is wanted there
    assert link[1] == "--link"
    assert link[link.index("--kernel_frequency") + 1] == "250"
    assert link[link.index("--config") + 1] == "connectivity.cfg"
    objects = [f"nowhere/{name}.xo" for name in kernel_sources()]
    assert link[link.index("-o") + 1] == "nowhere/csd_optim.xclbin"
    assert sorted(link[link.index("-o") + 2 :]) == sorted(objects)


def test_installs_where_the_kernels_are_looked_for():
    *_, command = dry_run("install")[1]
    assert command == ["install", "-D", "-m", "644", "nowhere/csd_optim.xclbin", INSTALLED]


def test_csynth_is_told_part_and_frequency():
    (command,) = dry_run("csynth", "FREQUENCY=250", "HLS=vitis-run --mode hls --tcl")[1]
    asked = "KERNEL=csd_adamw_update PART=xcku5p-ffvb676-2-e FREQUENCY=250 vitis-run --mode hls --tcl csynth.tcl"
    assert " ".join(command) == asked
    (command,) = dry_run("csynth", "KERNEL=csd_adamw_8bit_update")[1]
    assert command[0] == "KERNEL=csd_adamw_8bit_update"


def test_an_unknown_target_is_refused():
    make = ["make", "-n", "-C", KERNELS, "TARGET=gpu"]
    result = subprocess.run(make, capture_output=True, text=True)
    assert result.returncode != 0
    assert "TARGET is gpu; it is hw, hw_emu or sw_emu" in result.stderr
