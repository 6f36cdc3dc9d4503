"""Each mistake that can be made in the update kernels has a test that finds it."""

import signal
from typing import NamedTuple

import pytest
import torch
from support import emulated
from support.emulated_kernels import EmulatedProcessor, changed_headers, compiled
from support.forked import process
from support.rule_cases import ROWS, SIZES, differing, edge_rows, random_rows

from csd_optim.kernels.device_check import EXACT, SOFT, WAYS
from csd_optim.kernels.library import library_of

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.one_schedule,
    pytest.mark.ci,
    pytest.mark.usefixtures("emulated_only"),
]


class Mutant(NamedTuple):
    header: str
    old: str  # occurs exactly once
    new: str
    way: str = EXACT
    rule: str = "adamw"


def in_update(old, new, **others):
    return Mutant("update", old, new, **others)


def in_gpu(old, new):
    return Mutant("gpu", old, new)


def in_soft(old, new, **others):
    return Mutant("soft", old, new, way=SOFT, **others)


MUTANTS = {
    "a block goes on beyond the parameter": in_update(
        "begin + kBlockElems < row.n ? begin + kBlockElems : row.n", "begin + kBlockElems"
    ),
    "the last block stays out": in_update("i < end;", "i + kFour < end;"),
    "threads are too close": in_update("i += kThreads * kFour", "i += kThreads"),
    "blocks are counted from the first row": in_update("(uint64_t)(blockIdx.x - row.first)", "(uint64_t)blockIdx.x"),
    "the first block of a row is the row's before it": in_update(".first <= blockIdx.x", ".first < blockIdx.x"),
    "rows from 32 on are not found": in_update("half = 32", "half = 16"),
    "rows that do not exist are found": in_update("r + half < a.rows && ", ""),
    "gradients are taken to be aligned": in_update("is_multiple(row.grad, kFour * bytes_of(row.grad_dtype)) &&", ""),
    "parameters are taken to be aligned": in_update(
        "is_multiple(row.param, kFour * bytes_of(row.param_dtype))", "true"
    ),
    "states are taken to be aligned": in_update("is_multiple(row.state[s], sizeof(float) * kFour)", "true"),
    "gradients are not rounded": in_update("row.link_dtype != row.grad_dtype", "false"),
    "gradients are counted twice": in_update("bad += nonfinite(grad)", "bad += 2 * nonfinite(grad)"),
    "a constant is missing": in_update("c < 9", "c < 8"),
    "masters stay": in_update("store(section[s], row.state[s]", "if (s) store(section[s], row.state[s]"),
    "what is beyond the end is loaded": in_gpu("(uint64_t)j < left ? from[j] : T(0)", "from[j]"),
    "what is beyond the end is stored": in_gpu("if ((uint64_t)j < left) to[j]", "to[j]"),
    "fp16 is written as bf16": Mutant("values", "dtype == CSD_F16 ? f32_to_f16", "dtype != CSD_F16 ? f32_to_f16"),
    "soft: rounded to a subnormal number first": in_soft("(result) <= kSmallest", "(result) < kSmallest"),
    "soft: what is rounded up is flushed": in_soft("< 0x1p-62f", "<= 0x1p-62f"),
    "soft: operands stay subnormal": in_soft("kSmallest ? zero_like(x.v) : x.v", "kSmallest ? x.v : x.v"),
    "soft: sums stay subnormal": in_soft("return magnitude_of(sum) < kSmallest ? zero_like(sum) : sum", "return sum"),
    "soft: differences are sums": in_soft("float_bits(y.v) ^ 0x80000000u", "float_bits(y.v)"),
    "soft: zero loses its sign": in_soft("float_bits(x) & 0x80000000u", "0"),
    "soft: quotients stay subnormal": in_soft("flushed(a / b, a * 0x1p64f / b)", "a / b"),
}


DIFFERS = 3  # exit code
CRASHES = {signal.SIGSEGV, signal.SIGILL}  # also what a misaligned address leads to: see TRAPS of emulated_kernels.py


def compare(mutant, folder):
    """Compare the kernels of a mutant with the native engine; end with DIFFERS if they differ."""
    headers = changed_headers(folder, **{mutant.header: (mutant.old, mutant.new)})

    class Processor(EmulatedProcessor):
        def load(self, source, defines):
            return self.loaded(compiled(source, defines, headers))

    emulated.load()
    with emulated.processor(Processor):
        library, row = library_of(torch.device("emu", 0)), next(row for row in ROWS if row.name == mutant.rule)
        cases = [*edge_rows(row, range(2)), *random_rows(row, torch.Generator().manual_seed(1), SIZES)]
        raise SystemExit(DIFFERS if differing(library, WAYS[mutant.way], row, cases)[0] else 0)


def exit_code(*arguments):
    child = process(compare, *arguments)
    child.join(60)
    return child.exitcode


@pytest.mark.parametrize("way", WAYS)
def test_without_a_mistake(way, tmp_path):
    assert exit_code(in_update("c < 9", "c < 9", way=way), tmp_path) == 0


@pytest.mark.parametrize("what", MUTANTS)
def test_mutant(what, tmp_path):
    code = exit_code(MUTANTS[what], tmp_path)
    assert code == DIFFERS or -code in CRASHES
