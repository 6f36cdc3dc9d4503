"""The FPGA's kernels for fp32 states in C-simulation: tiles, segments and entries; runs whose every output is checked.

Every run checks states, parameters and report, the elements that must keep every bit, the memory around and between the
outputs, and each port separately. Kernel and CPU treat subnormal numbers as zero.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from csd_optim._emulator import ffi, lib
from support.comparing import bits

from csd_optim import bindings
from csd_optim.devices import xclbin

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "hls_kernels"
NATIVE = (ROOT / "native" / "include", ROOT / "native" / "src")
LANES = 16  # fp32 values in a word
BLOCK = 1 << 16  # elements that a block of entries covers
TILE = 4096
SIZES = [1, 15, 16, 17, 31, 32, 33, 48, 1023, TILE - 1, TILE]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HALVES = [torch.float16, torch.bfloat16]
# The memory layouts of csd_kernel.h.
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
LEAST_SUM = 64  # the fewest words that a checksum may cover
# Number of a rule → number of sections that it updates.
UPDATED = {bindings.RULES[row.name]: row.updated for row in bindings.RULE_ROWS if not row.of_pass}


def hyper(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.999), eps=1e-8, step=3, grad_scale=1.0, amsgrad=False):
    """Return one element of `HYPER`, as the optimizer computes it."""
    beta1, beta2 = betas
    betas = beta1, 1 - beta1, beta2, 1 - beta2
    folded = lr / (1 - beta1**step), (1 - beta2**step) ** -0.5
    constants = 1 - lr * weight_decay, *betas, *folded, eps, grad_scale
    return np.array((bindings.RULES["amsgrad" if amsgrad else "adamw"], constants), bindings.HYPER)


@dataclass
class Part:
    """A segment. A sparse one has the dense gradient that the update should see, with zeros."""

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
    """Return any tensor as whole words, the last one padded with zeros."""
    data = t.contiguous().view(torch.uint8).numpy().reshape(-1)
    return np.concatenate([data, np.zeros(-len(data) % 64, np.uint8)]).view(np.uint32)


class Memory:
    """Words of the card's memory between guard words, which must not be written."""

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
        """Asserts that nothing has changed outside these slices of 32-bit lanes."""
        lanes = np.ones(len(self.all), bool)
        for span in spans:
            lanes[LANES:-LANES][span] = False
        assert np.array_equal(self.all[lanes], self.before[lanes])


def flushed(t):
    """Return fp32 numbers with subnormal ones replaced by zeros of the same sign."""
    pattern = t.view(torch.int32)
    return torch.where(pattern & 0x7F800000 == 0, pattern & -(1 << 31), pattern).view(torch.float32)


def expect(state, parts, isa):
    """Return the CPU updater's result: (state, parameters)."""
    state, params = state.clone(), []
    for p in parts:
        param = torch.empty(p.elems, dtype=p.param_dtype)
        bindings.update(p.hyper, isa, p.grad, [section[p.span] for section in state], param)
        params.append(param)
    return state, params


def csim(kernel, inputs, grad, entries, segments, outputs, param, report, *numbers):
    """Runs a kernel on addresses; returns None, or why the run cannot complete. Unused sections get null pointers."""
    ports = sum(name.startswith("tile_in") for name in xclbin.KERNELS[kernel].buffers)
    tiles = ([*addresses, *[ffi.NULL] * (ports - len(addresses))] for addresses in (inputs, outputs))
    buffers = [*next(tiles), grad, entries, segments, *next(tiles), param, report]
    why = lib.csd_csim_run(kernel.encode(), ffi.new("void *[]", buffers), ffi.new("uint32_t[]", numbers))
    return None if why == ffi.NULL else ffi.string(why).decode()


def sums_of(rows, sum_words):
    """Return the CRC-32C of each chunk of `sum_words` words of each section: [chunks, 4], zero without a section."""
    chunk = LANES * sum_words
    sums = np.zeros((-(-rows.shape[1] // chunk), 4), np.uint32)
    for c in range(len(sums)):
        for s, row in enumerate(rows):
            sums[c, s] = bindings.crc32c(row[c * chunk : (c + 1) * chunk].tobytes())
    return sums


def simulate(
    state,
    parts,
    *,
    kernel="csd_adamw_update",
    entries=(),
    bad_entries=0,
    in_place=False,
    isa=None,
    exact_nan=False,
    sum_words=LEAST_SUM,
):
    """Runs the kernel on a tile, checks all its outputs, and returns the updated state.

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
    else:  # each port has its own memory, which contains only the port's section
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

    why = csim(
        kernel,
        [m.address() for m in inputs],
        grad.address(),
        buffer.address(),
        table.address(),
        [m.address() for m in outputs],
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
    assert why is None, why

    for m in (grad, table, buffer, *(() if in_place else inputs)):
        m.assert_only_written()
    param.assert_only_written([slice(None)])
    report.assert_only_written([slice(None)])
    for m, span in zip(outputs, sections_at, strict=True):
        m.assert_only_written(sections_at if in_place else [span])

    after = np.stack([m.words[span] for m, span in zip(outputs, sections_at, strict=True)])
    touched = np.zeros(after.shape, bool)
    for p in parts:
        touched[: UPDATED[int(p.hyper["rule"])], p.span] = True
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
    """Asserts that the kernel wrote the expected parameters, by `bits`, each from a new word on, padded with zeros."""
    at = 0
    for p, wanted in zip(parts, expected, strict=True):
        n = len(to_words(wanted))
        got = torch.from_numpy(words[at : at + n].copy()).view(p.param_dtype)
        assert torch.equal(bits(got[: p.elems]), bits(wanted))
        assert not got[p.elems :].view(torch.uint8).any()
        at += n


def reported_sums(report, parts, param, n_words, bad_entries, dtype):
    """Asserts that a report's header is right; returns its checksums, one element of `dtype` per chunk."""
    r = report.words[:LANES].view(REPORT)[0]
    assert (r["version"], r["n_words"], r["bad_entries"]) == (3, n_words, bad_entries)
    assert r["nonfinite"] == sum((~p.grad.isfinite()).sum().item() for p in parts)
    assert r["crc_param"] == bindings.crc32c(param.words.tobytes())
    assert not r["reserved"].any()
    return report.words[LANES:].view(dtype)


def random_state(n_words, sections=3):
    """Return weights and moments like those of a model in training; the second moments are positive."""
    state = 0.1 * torch.randn(sections, LANES * n_words)
    state[2:] = state[2:] ** 2
    return state


def words_for(elems):
    return -(-elems // LANES)


def random_hyper(rng, amsgrad):
    return hyper(
        lr=10 ** rng.uniform(-5, 0),
        weight_decay=rng.choice([0, 0.1]),
        betas=(rng.choice([0, 0.9]), rng.choice([0, 0.95, 0.999])),
        eps=rng.choice([0, 1e-8, 1e-3]),
        step=rng.integers(1, 1000),
        grad_scale=rng.choice([1.0, -1.0, 2.0**-16, 0.37]),
        amsgrad=amsgrad and rng.random() < 0.5,  # in a tile with four sections, parameters may use only three
    )


def random_parts(rng, n_words, sections, sparse=None, hypers=random_hyper):
    """Return segments of awkward lengths, with and without gaps between them."""
    parts, at = [], 0
    while True:
        at += int(rng.choice([0, 0, 1, 5]))
        elems = int(rng.integers(1, 200))
        if at + words_for(elems) > n_words:
            return parts
        grad = torch.from_numpy(rng.standard_normal(elems).astype(np.float32)).to(DTYPES[rng.integers(3)])
        parts.append(Part(at, grad, DTYPES[rng.integers(3)], hypers(rng, sections == 4)))
        if sparse and rng.random() < 0.6:
            kept = torch.from_numpy(rng.random(elems) < rng.choice([0, 0.05, 0.5, 1]))
            grad = grad.to(HALVES[rng.integers(2)])
            parts[-1].grad, parts[-1].sparse = torch.where(kept, grad, torch.zeros_like(grad)), True
        at += words_for(elems)


def special(n, dtype=torch.float32):
    """Return zeros, subnormals, infinities, NaNs with payloads, and huge and tiny numbers among random ones."""
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


def encode(grads, n_words):
    """Return the blocks of entries for a tile's sparse gradients, given as uint16 bits per element."""
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


WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-Wno-unused-label",
]  # test_kernel_sources.py checks pragmas and labels
DRIVEN = ["csd_adamw_update", "csd_lion_update", "csd_adamw_8bit_update"]  # kernels in tests/native/kernels_test.cpp


def driving(kernels):
    """Return the sources of the program that drives kernels."""
    return [*(kernels / f"{kernel}.cpp" for kernel in DRIVEN), ROOT / "tests" / "native" / "kernels_test.cpp"]


def compile_and_run(compiler, directory, headers, *flags):
    program = directory / "kernels_test"
    includes = [f"-I{d}" for d in (*NATIVE, KERNELS, headers)]
    command = [compiler, "-O0", "-ffp-contract=off", "-pthread", *flags, *includes, *WARNINGS]
    subprocess.run([*command, *driving(KERNELS), "-o", program], check=True)
    assert subprocess.run([program], check=True, capture_output=True, text=True).stdout == "kernels: done\n"


def run_natively(directory, in_flight, header, **depths):
    """Builds and runs tests/native/kernels_test.cpp with other stream depths in one of the headers."""
    kernels = directory / "hls_kernels"
    shutil.copytree(KERNELS, kernels, ignore=shutil.ignore_patterns("build"), dirs_exist_ok=True)
    text = (KERNELS / header).read_text()
    for name, depth in depths.items():
        text, found = re.subn(rf"(constexpr int .*\b{name} = )[^,;]*", rf"\g<1>{depth}", text)
        assert found == 1
    (kernels / header).write_text(text)
    includes = [f"-I{d}" for d in (*NATIVE, kernels, kernels / "csim")]
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-pthread", "-w", f"-DCSD_IN_FLIGHT={in_flight}"]
    subprocess.run(["g++", *flags, *includes, *driving(kernels), "-o", directory / "program"], check=True)
    return subprocess.run([directory / "program"], capture_output=True, text=True)
