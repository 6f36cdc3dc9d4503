"""The FPGA's kernel for codes in C-simulation: the same bits as the CPU updater, and no stray writes.

Every run checks what support/coded_kernels.py says.
"""

import itertools

import numpy as np
import pytest
import torch
from support.coded_kernels import (
    GROUP,
    GROUP_WORDS,
    PAGE,
    PAGE_WORDS,
    KeyedPart,
    Tile,
    random_coded_parts,
    random_tile,
    simulate_codes,
)
from support.kernels import DTYPES, encode, hyper, run_natively, sparse_gradients, special

from csd_optim import bindings

# ---- Lengths, dtypes, layouts ----------------------------------------------------


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("param_dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_lengths(grad_dtype, param_dtype, amsgrad):
    rng = np.random.default_rng(0)
    for in_place, n in itertools.product((False, True), [1, 15, 16, 17, 33, 63, 64, 65, 127, 1000, PAGE - 1, PAGE]):
        part = KeyedPart(0, torch.randn(n).to(grad_dtype), param_dtype, hyper(amsgrad=amsgrad), key=n)
        tile = random_tile(rng, PAGE_WORDS, param_dtype, amsgrad)
        tile.clear_tails([part])
        simulate_codes(tile, [part], in_place=in_place)


@pytest.mark.parametrize("anything", [False, True])
@pytest.mark.parametrize("seed", range(24))
def test_many_segments_in_a_tile(seed, anything):
    """Dense and sparse segments, over codes of a model and over random bytes."""
    rng = np.random.default_rng(seed)
    dtype, amsgrad = DTYPES[seed % 3], bool(seed // 3 % 2)
    tile = random_tile(rng, PAGE_WORDS * int(rng.integers(1, 4)), dtype, amsgrad, anything)
    parts = random_coded_parts(rng, tile, sparse=seed > 10)
    tile.clear_tails(parts)
    entries = encode(sparse_gradients(parts, tile.n_words), tile.n_words) if seed > 10 else ()
    simulate_codes(tile, parts, in_place=bool(seed % 2), entries=entries)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_segments(dtype, amsgrad):
    rng = np.random.default_rng(0)
    for pages in 1, 3:
        simulate_codes(random_tile(rng, pages * PAGE_WORDS, dtype, amsgrad, anything=True), [], in_place=pages == 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pages", [1, 2, 63, 65])
def test_sums(pages, dtype):
    """The report has a checksum for each chunk of each section, also for a short last chunk and pages of exponents."""
    rng = np.random.default_rng(0)
    part = KeyedPart(0, torch.randn(pages * PAGE).half(), dtype, hyper(amsgrad=pages != 2))
    for sum_words in {PAGE_WORDS, 2 * PAGE_WORDS, 16 * PAGE_WORDS, 1 << 30}:
        simulate_codes(random_tile(rng, pages * PAGE_WORDS, dtype, amsgrad=pages != 2), [part], sum_words=sum_words)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("isa", bindings.isas())
def test_special_values(isa, grad_dtype, amsgrad):
    """Special values in gradients and codes, compared with each instruction set of this CPU."""
    rng = np.random.default_rng(1)
    for dtype, grad_scale in itertools.product(DTYPES, (1.0, -0.3, 1e30, 1e-30)):
        grad = special(2 * PAGE - 100, grad_dtype)
        part = KeyedPart(0, grad, dtype, hyper(grad_scale=grad_scale, amsgrad=amsgrad), key=7)
        tile = random_tile(rng, 2 * PAGE_WORDS, dtype, amsgrad, anything=grad_scale < 0)
        tile.clear_tails([part])
        simulate_codes(tile, [part], isa=isa)


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_from_nothing(dtype):
    """Steps that start from a new tile, whose bytes are all zero."""
    rng = np.random.default_rng(2)
    tile = Tile(PAGE_WORDS, dtype, False)
    for step in range(1, 6):
        grad = torch.from_numpy(rng.standard_normal(PAGE - 3).astype(np.float32))
        tile = simulate_codes(tile, [KeyedPart(0, grad, dtype, hyper(step=step), key=step * 0x9E3779B9 % (1 << 32))])
    assert tile.codes()[-1].all()


# ---- The simulation itself -----------------------------------------------------------


LEAST = {"kFifoGroups": GROUP_WORDS, "kFifoPages": GROUP}  # the least depths that suffice


@pytest.mark.soak
def test_the_least_depths_do(tmp_path):
    assert run_natively(tmp_path, 64, "codes.h", **LEAST).stdout == "kernels: done\n"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("stream", "stage", "waits_for"),
    [("kFifoGroups", "update_codes", "masters"), ("kFifoPages", "read_ratios", "corrections_in")],
)
def test_streams_that_are_too_shallow_are_found(stream, stage, waits_for, tmp_path):
    """The streams must hold a group between update and encoding, and a page of one section while another is read."""
    says = run_natively(tmp_path, 64, "codes.h", **{stream: LEAST[stream] // 2}).stderr
    assert "deadlock: " in says
    assert f"{stage} waits for room in {waits_for}" in says
