"""Each mistake that can be made in the update kernels has a test that finds it."""

import signal
from typing import NamedTuple

import pytest
import torch
from support import code_cases, emulated
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
    codes: bool = False  # of the kernel for 8-bit states


def in_update(old, new, **others):
    return Mutant("update", old, new, **others)


def in_codes(old, new, **others):
    return Mutant("codes", old, new, codes=True, **others)


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
    "a constant is missing": Mutant("numbers", "c < 9", "c < 8"),
    "masters stay": in_update("store(section[s], row.state[s]", "if (s) store(section[s], row.state[s]"),
    "what is beyond the end is loaded": in_gpu("(uint64_t)j < left ? from[j] : T(0)", "from[j]"),
    "what is beyond the end is stored": in_gpu("if ((uint64_t)j < left) to[j]", "to[j]"),
    "fp16 is written as bf16": Mutant("values", "dtype == CSD_F16 ? f32_to_f16", "dtype != CSD_F16 ? f32_to_f16"),
    "codes: a block goes on beyond the parameter": in_codes(
        "begin + kBlockElems < padded ? begin + kBlockElems : padded", "begin + kBlockElems"
    ),
    "codes: the last group stays out": in_codes("(row.n + kGroup - 1) / kGroup", "row.n / kGroup"),
    "codes: rows from 16 on are not found": in_codes("half = 16", "half = 8"),
    "codes: rows that do not exist are found": in_codes("r + half < a.rows && ", ""),
    "codes: gradients are taken to be aligned": in_codes(
        "is_multiple(row.grad, kFour * bytes_of(row.grad_dtype)) &&", ""
    ),
    "codes: parameters are taken to be aligned": in_codes(
        "is_multiple(row.param, kFour * bytes_of(row.param_dtype))", "true"
    ),
    "codes: threads of a group end early": in_codes(
        "const bool is_here = i < end", "if (i >= row.n) break; bool is_here = true"
    ),
    "codes: the largest of 8 threads": in_codes(
        "int mask = kLanesOfGroup / 2; mask; mask /= 2) own = max",
        "int mask = kLanesOfGroup / 4; mask; mask /= 2) own = max",
    ),
    "codes: the exponent is the old one": in_codes(
        "exponent_of((uint32_t)largest_in_group(largest))",
        "exponent ? exponent : exponent_of((uint32_t)largest_in_group(largest))",
    ),
    "codes: unused elements are in use": in_codes("in_use ? value_of(state[0]) : 0", "value_of(state[0])"),
    "codes: infinities are the largest": in_codes("bits < 0x7f800000 ? bits : 0", "bits"),
    "codes: the peak's exponent is the old one": in_codes(
        "peak_exponent = exponent_of(", "peak_exponent = peak_exponent ? peak_exponent : exponent_of(", rule="amsgrad"
    ),
    "codes: peaks are rounded at random": in_codes(
        "peak_exponent, round_to_nearest_bits().root", "peak_exponent, rounding.root", rule="amsgrad"
    ),
    "codes: every element has the same random bits": in_codes("row.key + (uint32_t)i + j", "row.key"),
    "codes: random bits begin anew in each parameter": in_codes("row.key + (uint32_t)i + j", "(uint32_t)i + j"),
    "codes: what was set keeps its correction": in_codes(
        "if (narrow[j] != stored[j]) correction[j] = 0", "if (false) correction[j] = 0"
    ),
    "codes: what was set in place keeps its correction": in_codes("check != row.checks[group]", "false"),
    "codes: checksums are those of the old parameters": in_codes("row.checks[group] = check;", ";"),
    "codes: all threads have the weights of the first": in_codes("(kFour * lane + j) / 2 + 1", "j / 2 + 1"),
    "codes: one thread's sum": in_codes("return sum_in_group(sum)", "return sum"),
    "codes: masters of copies stay": in_codes("if (is_wide && row.section) store(", "if (false) store("),
    "codes: parameters of copies stay": in_codes("if (!is_wide && row.section) store(", "if (false) store("),
    "codes: gradients are not rounded": in_codes("row.link_dtype != row.grad_dtype", "false"),
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
        if mutant.codes:
            found = code_cases.differing(library, WAYS[mutant.way], (row.name, row.updated))
        else:
            cases = [*edge_rows(row, range(2)), *random_rows(row, torch.Generator().manual_seed(1), SIZES)]
            found = differing(library, WAYS[mutant.way], row, cases)
        raise SystemExit(DIFFERS if found[0] else 0)


def exit_code(*arguments):
    child = process(compare, *arguments)
    child.join(60)
    return child.exitcode


@pytest.mark.parametrize("way", WAYS)
def test_without_a_mistake(way, tmp_path):
    same = Mutant("numbers", "c < 9", "c < 9", way=way)
    assert exit_code(same, tmp_path) == 0
    assert exit_code(same._replace(codes=True), tmp_path) == 0


@pytest.mark.parametrize("what", MUTANTS)
def test_mutant(what, tmp_path):
    code = exit_code(MUTANTS[what], tmp_path)
    assert code == DIFFERS or -code in CRASHES
