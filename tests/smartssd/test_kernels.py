"""The FPGA's kernel in C-simulation: the same bits as the CPU updater, and no stray writes.

Every run checks what support/kernels.py says.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from csd_optim._emulator import ffi
from support.comparing import bits
from support.kernels import (
    BLOCK,
    DTYPES,
    HALVES,
    KERNELS,
    LANES,
    LEAST_SUM,
    SEGMENT,
    SIZES,
    Memory,
    Part,
    compile_and_run,
    csim,
    encode,
    flushed,
    hyper,
    random_parts,
    random_state,
    run_natively,
    simulate,
    simulate_topk,
    sparse_gradients,
    special,
    words_for,
)

from csd_optim import bindings

# ---- Lengths, dtypes, layouts ----------------------------------------------------


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("param_dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_lengths(grad_dtype, param_dtype, amsgrad):
    h = hyper(amsgrad=amsgrad)
    for in_place, n in itertools.product((False, True), SIZES):
        part = Part(0, torch.randn(n).to(grad_dtype), param_dtype, h)
        simulate(random_state(words_for(n), 4 if amsgrad else 3), [part], in_place=in_place)


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
    """The report has a checksum for each chunk of each section: with many chunks or one, and a short last chunk."""
    for n_words in {1, sum_words % (1 << 12) - 1, sum_words % (1 << 12) + 1, 128, 4096, 20_000} - {-1, 0}:
        part = Part(0, torch.randn(LANES * n_words).half(), torch.float16, hyper(amsgrad=sections == 4))
        simulate(random_state(n_words, sections), [part], sum_words=sum_words)


# ---- Special values ----------------------------------------------------------------


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("isa", bindings.isas())
def test_special_values(isa, grad_dtype, amsgrad):
    """Special values in gradients and in every state, compared with each instruction set of this CPU."""
    n = 5003
    for param_dtype, grad_scale in itertools.product(DTYPES, (1.0, -0.3, 1e30, 1e-30)):
        state = torch.stack([special(LANES * words_for(n)) for _ in range(4 if amsgrad else 3)])
        part = Part(0, special(n, grad_dtype), param_dtype, hyper(grad_scale=grad_scale, amsgrad=amsgrad))
        simulate(state, [part], isa=isa)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_gradient_of_16_bits(dtype):
    """With beta1 = 0, exp_avg is the widened gradient, including the payload of a NaN."""
    grad = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    state = torch.zeros(3, len(grad))
    after = simulate(state, [Part(0, grad, torch.float32, hyper(betas=(0.0, 0.9)))], exact_nan=True)
    assert torch.equal(bits(after[1]), bits(flushed(grad.float()) + 0.0))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_rounding_to_16_bits(dtype):
    """Rounds each 16-bit number, the tie above it and the fp32 neighbours of both, as masters that do not change."""
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


@pytest.mark.parametrize("seed", range(60))
def test_dense_and_sparse_segments(seed):
    rng = np.random.default_rng(seed)
    n_words, sections = int(rng.integers(1, 300)), int(rng.integers(3, 5))
    parts = random_parts(rng, n_words, sections, sparse=True)
    simulate_topk(random_state(n_words, sections), parts, in_place=bool(seed % 2))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("ratio", [0.01, 0.3])
def test_several_blocks(dtype, ratio):
    """Several blocks: a short last one and an empty one, with infinite and NaN gradients."""
    n = 3 * BLOCK + 1000
    grad = torch.where(torch.rand(n) < ratio, torch.randn(n), 0.0).to(dtype)
    grad[BLOCK : 2 * BLOCK] = 0
    grad[5], grad[-1] = float("inf"), float("nan")
    simulate_topk(random_state(words_for(n)), [Part(0, grad, dtype, hyper(), sparse=True)])


def test_a_full_block():
    """Every element of the block has an entry, so the count does not fit into 16 bits."""
    grad = torch.randn(BLOCK).bfloat16()
    grad[grad == 0] = 1
    simulate_topk(random_state(BLOCK // LANES), [Part(0, grad, torch.bfloat16, hyper(), sparse=True)])


def test_entries_for_nobody_have_no_effect():
    """Entries in a gap, in a dense segment, after the end of a sparse segment, and after all segments."""
    grad = torch.randn(20).half()
    parts = [Part(1, grad, torch.float16, hyper(), sparse=True), Part(4, grad, torch.float16, hyper())]
    entries = encode(sparse_gradients(parts, 8), 8)
    everywhere = np.full(8 * LANES, 0x3C00, np.uint16)
    everywhere[parts[0].span] = grad.view(torch.int16).numpy().view(np.uint16)
    assert len(encode(everywhere, 8)) > len(entries)
    simulate(random_state(8), parts, entries=encode(everywhere, 8))


def decode(entries, n_words):
    """Decodes entries one by one, as csd_kernel.h defines; returns (gradients as uint16 bits, number of bad ones)."""
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


DAMAGED = {  # entries, words of the tile, number of bad entries
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
    """Whatever the entries contain, the kernel completes, makes no stray writes and applies only the valid entries."""
    rng = np.random.default_rng(seed)
    n_words = int(rng.choice([1, 7, 100, BLOCK // LANES + 3]))
    sound = np.where(rng.random(LANES * n_words) < 0.1, 0x3F80, 0).astype(np.uint16)
    entries = encode(sound, n_words)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(len(entries)))
        damage = rng.integers(5)
        if damage == 0:  # a random word
            entries[at] = rng.integers(1 << 32)
        elif damage == 1:  # a flipped bit
            entries[at] ^= np.uint32(1 << rng.integers(32))
        elif damage == 2:  # a wrong count
            entries[0] = rng.integers(2 * len(entries))
        elif damage == 3:  # cut short
            entries = entries[: at // LANES * LANES]
        else:  # additional words after the end
            entries = np.concatenate([entries, entries[: 2 * LANES]])
        if not len(entries):
            break
    simulate_damaged(entries, n_words, None)


# ---- The simulation itself ---------------------------------------------------------


def test_runs_at_the_same_time():
    """Runs in several threads share nothing, as on a card with several compute units."""
    rng = np.random.default_rng(0)
    tiles = [(random_state(200, 4), random_parts(rng, 200, 4, sparse=True)) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda tile: simulate_topk(*tile), tiles))


def run_segment(grad_words, param_words, misplaced=0):
    """Runs a dense fp32 segment of 200 words with numbers of words that may not match; returns the kernel's error."""
    segments = np.zeros(1, SEGMENT)
    segments[0] = (0, 200 * LANES, 0, 0, hyper(), 0, 0)
    tile, grad, param = Memory(600), Memory(200), Memory(200)
    table, report = Memory(1, segments.view(np.uint32)), Memory(2)
    tiles = [tile.address()] * 3
    inputs = (tiles, grad.address() + misplaced, ffi.NULL, table.address())
    counts = (200, 3, 1, grad_words, 0, param_words, 200)
    return csim("csd_adamw_update", *inputs, tiles, param.address(), report.address(), *counts)


def test_a_run_that_cannot_end_says_where_it_stands():
    for _ in range(20):
        assert run_segment(200, 200) is None
        too_few = run_segment(199, 200)
        # Iterations that it has begun are in its pipeline: 64, with four numbers each.
        assert too_few.startswith("deadlock: read_section waits for room in master_in")
        assert "; update waits for grads, 256 in its pipeline; write_section waits for master_out;" in too_few
        assert too_few.endswith("write_params waits for params; write_report waits for crc_in_0.")
        assert "update waits for room in params, " in run_segment(200, 100)
    assert run_segment(200, 200, misplaced=4) == "an address is not a multiple of 64 bytes"


@pytest.mark.ci
@pytest.mark.parametrize("in_flight", [pytest.param(64, marks=pytest.mark.soak), 200])
def test_streams_that_are_too_shallow_are_found(in_flight, tmp_path):
    """tests/native/kernels_test.cpp finds streams that are too shallow for what stages buffer, and for what is in their
    pipelines, in a region that is wrong on purpose. The kernels also run with pipelines of `in_flight` iterations."""
    compile_and_run("g++", tmp_path, KERNELS / "csim", "-std=c++17", f"-DCSD_IN_FLIGHT={in_flight}")


@pytest.mark.soak
def test_too_few_sums_on_their_way_are_found(tmp_path):
    """Checksums of inputs wait for those of outputs, which wait for everything in the pipelines between. With room for
    only one of them, the kernel would hang on a card, and in a C-simulation with pipelines."""
    without, within = (run_natively(tmp_path, in_flight, "stages.h", kFifoSums=1) for in_flight in (0, 64))
    assert without.stdout == "kernels: done\n"
    assert "deadlock: read_section waits for room in crc_in_0" in within.stderr
