"""Top-K's kernels against NumPy, bit for bit: which elements are sent, as which entries, and what is owed then."""

import errno
import gc
import os
import signal

import numpy as np
import pytest
import torch
from support import emulated
from support.emulated_kernels import NATIVE, EmulatedProcessor, changed_headers, compiled
from support.forked import process
from support.gradients import any_bits, kinds, residual_of
from support.on_accelerator import DEVICE, DTYPES
from support.topk_oracle import assert_selects, assert_spreads, part

from csd_optim import CSDUnavailableError
from csd_optim.compression.kernel_check import topk_kernels_of
from csd_optim.compression.kernel_selection import CHUNK, DEFINES, SOURCE, KernelSelection, nbytes_of_part
from csd_optim.kernels import device_check
from csd_optim.kernels.device_check import DeviceKernels
from csd_optim.kernels.library import KernelLibrary, library_of

pytestmark = pytest.mark.accelerator

HALVES = [torch.float16, torch.bfloat16]
SCALES = [1.0, 0.37, -(2.0**-16), 1e30, 1e-30, 0.0, -0.0, torch.inf, torch.nan, 1e-40]  # 1 / 1e-40 is inf in fp32
BLOCK = 1 << 16
FOUND = 1  # exit status
CRASHES = [-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGILL]  # see TRAPS of emulated_kernels.py


def on_device(device=DEVICE, shift=0):
    """Return how tensors are put on the accelerator, `shift` elements after an aligned address."""

    def place(t):
        room = torch.full((len(t) + shift + 8,), 7.0, dtype=t.dtype, device=device)
        return room[shift : shift + len(t)].copy_(t)

    return place


def selection_of(library=None):
    library = library or topk_kernels_of(torch.device(DEVICE, 0))
    return lambda tiles: KernelSelection(library, tiles)


def random_tile(rng, elems, *, largest=None):
    """Return parts in random places of a tile, with gradients of every kind."""
    parts, at = [], int(rng.integers(0, elems // 2))
    while at < elems and len(parts) < 40:
        n = int(rng.integers(1, min(largest or elems, elems - at) + 1))
        grad_dtype, dtype = DTYPES[rng.integers(3)], HALVES[rng.integers(2)]
        grad = [g for _, g in kinds(n, grad_dtype)][rng.integers(21)] if n > 1 else torch.ones(1, dtype=grad_dtype)
        scale = float(rng.choice(SCALES))
        residual = [None, any_bits(n, torch.bfloat16), residual_of(torch.randn(n), min(abs(scale), 1e3))][
            rng.integers(3)
        ]
        ratio = float(rng.choice([1e-9, 0.01, 0.1, 0.499, 1.0]))
        where = {"first": int(rng.integers(1 << 33)), "step": int(rng.integers(1, 1 << 20)), "tile_first": at}
        parts.append(part(grad, dtype, ratio, residual, scale=scale, **where))
        at += n + int(rng.integers(0, 3)) * int(rng.integers(0, 1 + elems // 8))
    return elems, parts


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 3, 4, 255, 1025, CHUNK + 5])
def test_every_kind_of_gradient(n, grad_dtype, dtype):
    """Ties, zeros, inf, nan, subnormals, one value only, and every bit pattern, each with several numbers to send."""
    tiles = {}
    for i, (name, grad) in enumerate(kinds(n, grad_dtype)):
        for j in range(4 if n < CHUNK else 1):
            ratio, scale = [0.1, 1e-9, 1.0, 0.499][(i + j) % 4], SCALES[(i + j) % len(SCALES)]
            residual = any_bits(n, torch.bfloat16) if name == "any bits" else residual_of(torch.randn(n), scale % 2.0)
            place = {"scale": scale, "first": 2**32 - 3, "step": 1 + i, "tile_first": 3}
            tiles[len(tiles)] = n + 3, [part(grad, dtype, ratio, residual if (i + j) % 5 else None, **place)]
    assert_selects(selection_of(), tiles, on_device())


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_places_of_parts(shift):
    """Parts within a block and across blocks, several in a tile, in tiles of several blocks, at any address."""
    layouts = [
        (70_000, [(0, 70_000)]),
        (3 * BLOCK, [(100, 5000), (5100, 4096), (20_001, 100_000)]),
        (2 * BLOCK, [(0, BLOCK), (BLOCK, BLOCK)]),
        (BLOCK + 1, [(BLOCK, 1)]),
        (4 * BLOCK, [(BLOCK - 1, 2), (3 * BLOCK + 7, 1000)]),
        (BLOCK, [(7 * i, 5) for i in range(60)]),
    ]
    generator = torch.Generator().manual_seed(shift)
    tiles = {}
    for tile, (elems, places) in enumerate(layouts):
        parts = []
        for i, (first, n) in enumerate(places):
            grad = torch.randn(n, generator=generator).to(DTYPES[(tile + i) % 3])
            residual = None if i % 3 == 2 else torch.randn(n, generator=generator).bfloat16()
            ratio = [0.01, 0.3, 1e-9][(tile + i) % 3]
            parts.append(part(grad, HALVES[tile % 2], ratio, residual, scale=0.37, first=first, tile_first=first))
        tiles[tile] = elems, parts
    assert_selects(selection_of(), tiles, on_device(shift=shift))
    assert_spreads(selection_of(), tiles, on_device(shift=shift))


@pytest.mark.parametrize("seed", range(4))
def test_tiles_of_any_parts(seed):
    rng = np.random.default_rng(seed)
    tiles = {tile: random_tile(rng, int(rng.choice([300, 5000, 70_000])), largest=20_000) for tile in range(6)}
    assert_selects(selection_of(), tiles, on_device(shift=seed % 2))
    assert_spreads(selection_of(), tiles, on_device(shift=seed % 2))


@pytest.mark.soak
def test_ten_million_values():
    rng, n = np.random.default_rng(0), 0
    while n < 10_000_000:
        tiles = {tile: random_tile(rng, 1 << int(rng.integers(12, 19))) for tile in range(8)}
        assert_selects(selection_of(), tiles, on_device(shift=int(rng.integers(3))))
        n += sum(len(p.grad) for _, parts in tiles.values() for p in parts)


def test_five_launches_and_one():
    """However many tiles and parts there are. The host waits for none of them."""
    library = topk_kernels_of(torch.device(DEVICE, 0))
    for tiles, parts in ((1, 1), (1, 50), (30, 3)):
        some = [
            part(torch.randn(20), torch.float16, 0.1, torch.randn(20).bfloat16(), tile_first=20 * i)
            for i in range(parts)
        ]
        before = library.launches
        assert_selects(selection_of(library), dict.fromkeys(range(tiles), (20 * parts, some)), on_device())
        assert library.launches - before == 6


class CompilesNothing:
    launch = None

    def load(self, source, defines):
        raise CSDUnavailableError(errno.ENOEXEC, f"{source} cannot be compiled")


@pytest.mark.usefixtures("emulated_only")
@pytest.mark.one_schedule
@pytest.mark.parametrize("how", ["mutant", "no program"])
def test_kernels_that_are_not_used(how, tmp_path, caplog, monkeypatch):
    """A device is tried at its first use. If it selects anything else, or cannot compile, the host selects."""
    library = changed_kernels(tmp_path, *MUTANTS["large values become inf"])
    if how == "no program":
        library = KernelLibrary(library.device, CompilesNothing())
    monkeypatch.setattr(device_check, "kernels_of", lambda device: DeviceKernels(library, (), "exact"))
    with caplog.at_level("INFO", "csd_optim"):
        assert topk_kernels_of(library.device) is None
        assert topk_kernels_of(library.device) is None  # and it is tried once
    why = {"mutant": "the kernels select others", "no program": "topk.h cannot be compiled"}[how]
    found = [record.getMessage() for record in caplog.records]
    assert found == [f"the kernels for Top-K on emu:0 cannot be used: {why}"]


def test_no_memory_per_element():
    """What a selection takes on the device depends on the number of parts and of entries."""
    n = 1 << 20
    grad, residual = torch.randn(n).to(DEVICE), torch.zeros(n, dtype=torch.bfloat16, device=DEVICE)
    select = selection_of()  # tries the kernels
    torch.accelerator.synchronize()
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    one = part(grad, torch.bfloat16, 0.01, residual)
    selection = select({0: (n, [one])})
    selection.rows = {}
    selection.feed_back()
    assert torch.accelerator.max_memory_allocated() - before <= nbytes_of_part(one.topk, n) <= 0.07 * n
    assert torch.accelerator.memory_allocated() - before <= 0.01 * n


# Without the barriers before `sums` is used again nothing here fails: a fiber gives way only at barriers and shuffles.
MUTANTS = {
    "bins are counted before they are zero": ("bins[b] = 0;\n  __syncthreads();", "bins[b] = 0;"),
    "bins are added up before all are counted": (
        "kLowBins], 1u);\n  }\n  __syncthreads();\n  uint32_t *const high",
        "kLowBins], 1u);\n  }\n  uint32_t *const high",
    ),
    "low bins are counted before they are zero": (
        "bins[threadIdx.x] = 0;\n  __syncthreads();",
        "bins[threadIdx.x] = 0;",
    ),
    "low bins are stored before all are counted": ("}\n  __syncthreads();\n  TopKCounts", "}\n  TopKCounts"),
    "rows are summed before they are there": ("sums[row] = to_here;\n  __syncthreads();", "sums[row] = to_here;"),
    "sums are read before they are there": ("}\n  __syncthreads();\n  return sums[row]", "}\n  return sums[row]"),
    "entries are placed before all parts are divided": (
        "divide_part(a, part);\n  __syncthreads();",
        "divide_part(a, part);",
    ),
    "more than k of the bin are sent": ("(uint32_t)k - above}", "(uint32_t)k}"),
    "everything is sent": ("sums[kSums - 1] <= k)", "true)"),
    "one equal value too many": ("equal < sent.equal", "equal <= sent.equal"),
    "no equal value": ("equal < sent.equal", "false"),
    "equal values of the part, not of the chunk": ("equal == here ? kAll : equal", "rest"),
    "a chunk forgets what the ones before sent": ("if (rest != kAll) rest -= equal;", ""),
    "the last equal values, not the first": ("equal_before = equal + (before", "equal_before = 0 * equal + (before"),
    "zeros are sent": ("if (rest == kAll) low = 1;", "if (rest == kAll) low = 0;"),
    "gradients beyond the end": (
        "load_values(part.grad, part.grad_dtype, i, end,",
        "load_values(part.grad, part.grad_dtype, i, end + 3,",
    ),
    "gradients are taken to be aligned": ("is_multiple((const char *)part.grad + i * bytes, kFour * bytes)", "true"),
    "residuals are taken to be aligned": (
        "end - i, is_multiple(part.residual + i, kFour * 2));\n    }",
        "end - i, true);\n    }",
    ),
    "residuals beyond the end": (
        "store(residual, part.residual + i, end - i,",
        "store(residual, part.residual + i, end - i + 3,",
    ),
    "an index within the part": ("(work.part.tile_first + i + j)", "(i + j)"),
    "padding that is not zero": ("row[at] = 0;", ";"),
    "padding to half a word": ("at % kLanes", "at % (kLanes / 2)"),
    "large values become inf": ("if (is_finite(owed) &&", "if (false &&"),
    "each nan keeps its bits": ("return is_f16 ? 0x7e00 : 0x7fc0;", ";"),
    "a residual without an inverse of the scale": ("&& is_finite(inverse) ?", "?"),
    "a residual that stays": ("!a.places[work.chunk.part].feeds_back ||", ""),
    "a residual rounded to nearest": ("(hash & 0xffffu)", "0x7fffu"),
    "the same random numbers in each step": ("mix_bits(part.seed +", "mix_bits("),
    "inf is rounded at random": ("is_finite(f) ?", "true ?"),
    "dense: values are written before the zeros": ("to[i] = 0;\n  __syncthreads();", "to[i] = 0;"),
    "dense: no zeros": ("to[i] = 0;", ";"),
    "dense: zeros beyond the end": ("i < chunk.n; i += kThreads) to[i]", "i <= chunk.n; i += kThreads) to[i]"),
    "dense: all parts in one place": ("a.dense + where.first + chunk.first", "a.dense + chunk.first"),
    "dense: all chunks in one place": ("a.dense + where.first + chunk.first", "a.dense + where.first"),
    "dense: places within the tile": ("% kBlockElems - begin]", "% kBlockElems]"),
    "dense: places beyond a block": ("chunk.first) % kBlockElems;", "chunk.first);"),
    "dense: one tile's entries for all": ("a.tiles[where.tile].row + sent", "a.tiles[0].row + sent"),
    "dense: one chunk's entries for all": (
        ".row + sent.position;\n  const uint32_t begin",
        ".row + 1;\n  const uint32_t begin",
    ),
    "dense: indices are written": ("= entries[e] >> 16;", "= entries[e];"),
    "equal values before are forgotten at the feedback": ("if (!counts_equal) continue;", "continue;"),
}


def telling_tiles():
    """Return few tiles that show every mistake."""
    generator = torch.Generator().manual_seed(1)
    ties = torch.randint(-3, 4, (2 * CHUNK + 100,), generator=generator).bfloat16()
    noise = torch.randn(CHUNK + 1000, generator=generator)
    owed = torch.randn(len(ties), generator=generator).bfloat16()
    few = torch.where(torch.arange(999) % 10 == 0, noise[:999], 0.0)  # 100 of them
    odd = noise[:500].clone()
    odd[3:9] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e38, 3.4e38, 1e-41])
    nans = torch.arange(0x7C01, 0x7C0B, dtype=torch.int16).view(torch.float16)
    yield 70_000, [part(ties, torch.bfloat16, 0.3, owed, scale=0.37, step=3, tile_first=33)]
    yield 40_000, [part(noise, torch.bfloat16, 0.01, owed[: len(noise)], step=2, tile_first=5)]
    yield (
        70_000,
        [
            part(few, torch.float16, 100 / 999, owed[:999], first=999, tile_first=0),
            part(few, torch.float16, 0.3, owed[:999], tile_first=1000),
            part(few, torch.bfloat16, 1.0, owed[:999], tile_first=2000),
            part(odd, torch.float16, 0.4, owed[:500], scale=1e-40, tile_first=3001),
            part(odd * 1e4, torch.float16, 0.4, owed[:500], step=9, tile_first=4001),
            part(odd, torch.bfloat16, 0.02, tile_first=65_530),
        ],
    )
    yield 300, [part(nans, torch.float16, 0.4)]


def changed_kernels(folder, old, new):
    """Return kernels of the emulated accelerator with `new` in the place of `old`."""
    headers = changed_headers(folder, topk=(old, new))

    class Processor(EmulatedProcessor):
        def load(self, source, defines):
            return self.loaded(compiled(source, defines, headers))

    with emulated.processor(Processor):
        return library_of(torch.device("emu", 0))


def try_mutant(folder, old, new):
    """Exit with FOUND if a mutant of the kernels selects or writes other values, or leaves other residuals."""
    emulated.load()
    library = changed_kernels(folder, old, new)
    library.module(SOURCE, DEFINES)
    for shift in (0, 1, 3):  # each time in other orders of threads
        try:
            assert_selects(selection_of(library), dict(enumerate(telling_tiles())), on_device("emu", shift))
            assert_spreads(selection_of(library), dict(enumerate(telling_tiles())), on_device("emu", shift))
        except AssertionError:
            os._exit(FOUND)
    os._exit(0)


@pytest.mark.usefixtures("emulated_only")
@pytest.mark.one_schedule
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_the_kernels_is_one(name):
    assert (NATIVE / "gpu" / SOURCE).read_text().count(MUTANTS[name][0]) == 1


@pytest.mark.ci
@pytest.mark.usefixtures("emulated_only")
@pytest.mark.one_schedule
@pytest.mark.parametrize("name", ["none", *MUTANTS])
def test_a_mutant_of_the_kernels_is_found(name, tmp_path):
    """In a process of its own, which some of them crash."""
    child = process(try_mutant, tmp_path, *MUTANTS.get(name, ("#pragma once", "#pragma once")))
    child.join(300)
    assert child.exitcode in ([FOUND, *CRASHES] if name in MUTANTS else [0])
