"""What this machine and its disks are, and how fast: facts from /proc and /sys, short measurements on scratch space.

A figure such as "70 million parameters per second" says little on its own; beside the rate that the same disk or the
same memory reaches with nothing to compute, measured in the same run, it does.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import mmap
import os
import platform
import shutil
import statistics
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from .. import bindings
from ..bindings import DTYPE_CODES, HYPER, IO_DEPTH, PARAM, TILE_STATE, DeviceConfig
from ..devices.smartssd import find as find_card
from ..devices.spec import ANY_NODE, DEFAULT_BLOCK, DEFAULT_BUFFERS, UNPACED, DeviceSpec
from ..devices.xclbin import find_kernels
from ..errors import CSDOSError, CSDWarning
from ..store.file import StoreFile
from ..store.layout import TILE_ELEMS, plan_extent

log = logging.getLogger("csd_optim")

TUNE_BYTES = 4 << 30  # of states on each device: a step then takes seconds, and what it gains is worth half of one
UNEQUAL = 1.5  # times as fast: what two short measurements of equal drives do not differ by
HUGE_PAGE = 2 << 20  # bytes; a transparent huge page on x86-64, and on arm64 with 4 KiB base pages
CARD_BYTES, LEAST_CARD_BYTES = 1 << 30, 48 << 20  # of scratch space on a card's drive
ENGINE_ELEMS, ENGINE_STEPS = 1 << 24, 5  # 200 MB of states, 67 MB of gradients and parameters in 16 bits
HYPERS = np.array(
    [(bindings.RULES["adamw"], (1.0, 0.9, 0.1, 0.999, 0.001, 1e-3, 1.0, 1e-8, 1.0))], HYPER
)  # of some step
Kind = Literal["read", "write", "mixed"]


# ---- facts ---------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Processor, cores and memory (bytes) that this process may use, versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = _text("/proc/self/cgroup").rpartition("::")[2]
    limit = _text(f"/sys/fs/cgroup{group.rstrip('/')}/memory.max")
    model = next((v for k, v in _fields("/proc/cpuinfo") if k in ("model name", "Model")), "")
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": min(memory, int(limit)) if limit.isdigit() else memory,
        "huge_pages": _text("/sys/kernel/mm/transparent_hugepage/enabled").partition("[")[2].partition("]")[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def updater() -> dict[str, Any]:
    """Instruction set and threads of the CPU updater."""
    return {"isa": bindings.isa_used(), "isas": bindings.isas(), "threads": bindings.threads_used()}


def available_memory() -> int:
    """Bytes that can be had without swapping."""
    text = dict(_fields("/proc/meminfo")).get("MemAvailable", "")
    return int(text.split()[0]) << 10 if text else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def storage(directory: Path) -> dict[str, Any]:
    """File system, drive and space (bytes) behind an existing directory; "" for what the system does not say."""
    where = directory.resolve()
    # Fields of a line: id, parent, major:minor, root, mount point, options ... - type, source, options. The kernel
    # writes a blank in a path as \040; later lines mount over earlier ones.
    mounts = [line.partition(" - ") for line in _text("/proc/self/mountinfo").splitlines()]
    points = [(Path(left.split()[4].replace("\\040", " ")), right.split()) for left, _, right in mounts]
    mount, (kind, source, *_) = max(
        (p for p in points if where.is_relative_to(p[0])), key=lambda p: len(p[0].parts), default=(Path("/"), ["", ""])
    )
    number = where.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if not (block / "queue").exists():
        block = block.parent  # a partition; its disk is one level up
    is_disk = (block / "queue").exists()  # tmpfs, overlay and network file systems have none
    space = shutil.disk_usage(where)
    return {
        "filesystem": kind,
        "mounted_at": str(mount),
        "source": source,
        "disk": block.name if is_disk else "",
        "model": _text(block / "device/model") if is_disk else "",
        "free_bytes": space.free,
        "total_bytes": space.total,
    }


def numa_node(device: int, sysfs: Path = Path("/sys")) -> int | None:
    """The NUMA node of the drives below a file system (`st_dev` of a file).

    None where the machine has one node only, the system does not say (network file systems, btrfs), or they disagree.
    """
    if _text(sysfs / "devices/system/node/online") in ("", "0"):
        return None
    nodes = set()
    below = [(sysfs / f"dev/block/{os.major(device)}:{os.minor(device)}").resolve()]
    while below:
        block = below.pop()
        if slaves := [*block.glob("slaves/*")]:  # of LVM, of a RAID
            below += [slave.resolve() for slave in slaves]
            continue
        # A partition's disk is one directory up; its controller, which knows, further on.
        said = next((text for at in (block, *block.parents) if (text := _text(at / "numa_node"))), "-1")
        nodes.add(int(said))
    return nodes.pop() if len(nodes) == 1 and min(nodes) >= 0 else None


def _text(path: str | Path) -> str:
    """A small system file's text, "" where there is none."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _fields(path: str) -> Iterator[tuple[str, str]]:
    """The `key : value` lines of a system file."""
    for line in _text(path).splitlines():
        key, _, value = line.partition(":")
        yield key.strip(), value.strip()


# ---- a disk --------------------------------------------------------------------


class Scratch:
    """A nameless file of `size` bytes in `directory`, gone with the process, however that ends.

    Its bytes read as unwritten until `fill()`. Raises CSDOSError: no such directory, not allowed, no room.
    """

    def __init__(self, directory: Path, size: int, block: int) -> None:
        self.block = block
        self.blocks = max(2, size // block)
        self._store = StoreFile(directory, durable=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CSDWarning)  # `direct` says it
                self.first = self._store.allocate(self.blocks * block)
        except BaseException:
            self._store.close()
            raise
        self.fd = self._store.io_fd
        self.direct = self._store.direct
        self.file_system = os.fstat(self.fd).st_dev

    def requests(self, kind: Kind) -> Iterator[tuple[bool, int]]:
        """One pass over the file: (is it a write?, offset). `mixed` reads one half and writes the other, in turns."""
        if kind != "mixed":
            for i in range(self.blocks):
                yield kind == "write", self.first + i * self.block
            return
        half = self.blocks // 2
        for i in range(half):
            yield False, self.first + i * self.block
            yield True, self.first + (half + i) * self.block

    def fill(self, seconds: float = 60) -> None:
        """Writes every block once: space that is only reserved is neither read from the disk nor written as fast.

        After `seconds` what is not written by then is left out of the measurements.
        """
        [done], _ = _transfer([self], "write", seconds)
        self.blocks = max(2, done // self.block)

    def cut(self, block: int) -> None:
        """From now on, requests are of `block` bytes."""
        self.blocks = max(2, self.blocks * self.block // block)
        self.block = block

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Tuned:
    """How a drive wants to be spoken to."""

    block_bytes: int  # of a request
    depth: int  # requests in flight on its file system
    bytes_per_second: float  # that it then reads and writes, the other drives beside it


# What is tried, from the fewest bytes in flight to the most.
SETTINGS = ((512 << 10, IO_DEPTH), (1 << 20, IO_DEPTH), (1 << 20, 2 * IO_DEPTH), (4 << 20, IO_DEPTH))
TUNE_ROUNDS, TUNE_SECONDS = 2, 0.04  # each setting has so many turns, each so long
TUNE_FILE = 128 << 20  # bytes
CLOSE = 0.95  # of the best rate: a smaller setting that reaches that is preferred


def tune(directories: Sequence[Path]) -> list[Tuned]:
    """Tries out the drives behind directories, all at the same time, in about half a second, on nameless files.

    Two directories on one file system have the same rate. Raises CSDOSError.
    """
    tried: list[dict[tuple[int, int], float]] = [{} for _ in directories]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(Scratch(d, TUNE_FILE, SETTINGS[-1][0])) for d in directories]
        buffer = _huge_buffer(SETTINGS[-1][0])
        moved, _ = _transfer(files, "write", 2 * TUNE_SECONDS, endless=buffer)
        for file, n in zip(files, moved, strict=True):
            file.blocks = max(2, min(file.blocks, n // file.block))
        for _ in range(TUNE_ROUNDS):
            for block, depth in SETTINGS:
                for file in files:
                    file.cut(block)
                moved, took = _transfer(files, "mixed", TUNE_SECONDS, depth, endless=buffer)
                for rates, n in zip(tried, moved, strict=True):  # the best: others may have been in the way
                    rates[block, depth] = max(rates.get((block, depth), 0.0), n / took)
    chosen = []
    for rates in tried:
        block, depth = next(s for s in SETTINGS if rates[s] >= CLOSE * max(rates.values()))
        chosen.append(Tuned(block, depth, rates[block, depth]))
    return chosen


def tune_devices(
    specs: Sequence[DeviceSpec], stores: Sequence[StoreFile | None], nbytes: int, *, new: bool
) -> tuple[list[DeviceSpec], tuple[float, ...] | None]:
    """Tries out how drives want to be spoken to; how fast they are decides on shares, where a store is `new`.

    Returns the specs, with what was found in them, and shares; None: nothing was found to say about these.

    Only where `nbytes` of states, over all devices, make it worth the half second, and only what nobody has said.
    """
    tried = {
        d: store.path if store.path.is_dir() else store.path.parent
        for d, (spec, store) in enumerate(zip(specs, stores, strict=True))
        if store and spec.backend == "file" and spec.pace == UNPACED
    }
    shares_open = new and len(tried) == len(specs) > 1 and all(s.share is None for s in specs)
    said = all(specs[d].chosen == {"block", "depth"} for d in tried) and not shares_open
    if not tried or said or nbytes < TUNE_BYTES * len(specs) or os.environ.get("CSD_OPTIM_PROBE") == "0":
        return [*specs], None
    try:
        found = dict(zip(tried, tune(list(tried.values())), strict=True))
    except CSDOSError as e:
        log.info("drives were not tried out: %s", e)
        return [*specs], None
    tuned_specs, shares = [*specs], None
    rates = [tuned.bytes_per_second for tuned in found.values()]
    if shares_open and max(rates) > UNEQUAL * min(rates):
        shares = tuple(round(rate / max(rates), 2) or 0.01 for rate in rates)
    for d, tuned in found.items():
        spec = specs[d]
        block = spec.block_bytes if "block" in spec.chosen else tuned.block_bytes
        depth = spec.depth if "depth" in spec.chosen else tuned.depth
        tuned_specs[d] = replace(spec, block_bytes=block, depth=depth)
        share = f", share {shares[d]:g}" if shares else ""
        log.info(
            "device %d (%s) moved %.2f GB/s when tried out; from now on in requests of %d KiB, %d at once%s",
            *(d, tried[d], tuned.bytes_per_second / 1e9, block >> 10, depth, share),
        )
    return tuned_specs, shares


def node_of(spec: DeviceSpec, store: StoreFile) -> int | None:
    """From which node a device's buffers are to come, and whose CPUs are to update its tiles; None: any."""
    if spec.numa is not None:
        return None if spec.numa == ANY_NODE else spec.numa
    return numa_node(os.fstat(store.fd).st_dev)


def rate(files: Sequence[Scratch], kind: Kind, seconds: float = 60, depth: int = IO_DEPTH) -> float:
    """Bytes per second (read plus written) of one pass over all files at once, or of as much as `seconds` allow.

    The requests are the engine's: as large, as many in flight for each file system (or `depth`), buffers on huge pages.
    """
    moved, took = _transfer(files, kind, seconds, depth)
    return sum(moved) / took


def _transfer(
    files: Sequence[Scratch], kind: Kind, seconds: float, depth: int = IO_DEPTH, *, endless: memoryview | None = None
) -> tuple[list[int], float]:
    """Moves bytes, in one pass, or until the time is over; returns how many of each file, and the seconds.

    `endless`: memory that all requests share, what is in it does not matter. Else each thread makes its own.
    """
    stop = threading.Event()
    errors: list[OSError] = []
    moved: list[Counter[Scratch]] = []  # by each thread
    threads = []
    for _, group in itertools.groupby(sorted(files, key=lambda f: f.file_system), key=lambda f: f.file_system):
        queue = _Queue(list(group), kind, endless is not None)
        for _ in range(depth):
            buffer = endless or _huge_buffer(queue.block)  # made before the clock starts
            threads.append(threading.Thread(target=_serve, args=(queue, buffer, stop, moved, errors), daemon=True))
    start = time.perf_counter()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, start + seconds - time.perf_counter()))
    finally:
        stop.set()  # out of time, or interrupted: what is in flight is finished, nothing else begun
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise CSDOSError(errors[0].errno, f"measuring a {kind} rate: {errors[0].strerror}")
    return [sum(by[file] for by in moved) for file in files], time.perf_counter() - start


class _Queue:
    """The requests of several files on one file system, in turns, for several threads."""

    def __init__(self, files: list[Scratch], kind: Kind, endless: bool) -> None:
        self.block = max(f.block for f in files)
        turns = itertools.zip_longest(*([(f, *r) for r in f.requests(kind)] for f in files))
        once = [r for turn in turns for r in turn if r is not None]
        self._requests = itertools.cycle(once) if endless else iter(once)
        self._lock = threading.Lock()

    def next(self) -> tuple[Scratch, bool, int] | None:
        with self._lock:
            return next(self._requests, None)


def _serve(
    queue: _Queue, buffer: memoryview, stop: threading.Event, moved: list[Counter[Scratch]], errors: list[OSError]
) -> None:
    """One thread: one request at a time until there are no more."""
    done: Counter[Scratch] = Counter()
    try:
        while not stop.is_set() and (request := queue.next()):
            file, is_write, offset = request
            left = buffer[: file.block]
            while left:  # a transfer cut short goes on where it stopped
                n = os.pwritev(file.fd, [left], offset) if is_write else os.preadv(file.fd, [left], offset)
                if n == 0:
                    raise OSError(0, "end of file")
                left, offset = left[n:], offset + n
                done[file] += n
    except OSError as e:
        errors.append(e)
        stop.set()
    moved.append(done)


def _huge_buffer(nbytes: int) -> memoryview:
    """`nbytes` of random bytes on huge pages: there are disks that are quicker to store zeros."""
    array = _huge_array(nbytes)
    array[:] = np.frombuffer(np.random.default_rng(0).bytes(nbytes), np.uint8)
    return array.data


def _huge_array(nbytes: int) -> np.ndarray[Any, Any]:
    # Private: Python's default is shared memory, which gets no huge pages.
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them refuses the advice
        mapping.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(mapping, np.uint8)
    first = -raw.ctypes.data % HUGE_PAGE
    return raw[first : first + nbytes]


# ---- a card --------------------------------------------------------------------


def card_rates(spec: DeviceSpec, free: int) -> dict[str, float]:
    """Bytes per second between card, drive and host, parameters per second of its kernel; see `csd_card_rates`.

    `spec`: with a directory, of which `free` bytes are free. Raises CSDUnavailableError, CSDOSError.
    """
    assert spec.directory is not None
    size = min(CARD_BYTES, free // 4)
    if size < LEAST_CARD_BYTES:
        raise CSDOSError(errno.ENOSPC, f"{spec.directory}: {free / 1e6:.0f} MB are free, measuring takes 200 MB")
    name = find_card(spec.card).name
    card = bindings.card_open(name, find_kernels(spec.xclbin), spec.timeout)
    try:
        with Scratch(spec.directory, size, spec.block_bytes) as scratch:
            config = DeviceConfig("xrt", scratch.fd, spec.buffers, spec.block_bytes, card, spec.p2p)
            return bindings.card_measure(
                config, scratch.first, scratch.blocks * scratch.block, lambda *_: f"card {name}"
            )
    finally:
        bindings.card_close(card, name)


# ---- memory, updater, engine -------------------------------------------------------


class Memory:
    """Some memory on huge pages, to be read and written back in place."""

    def __init__(self, nbytes: int) -> None:
        self._values = torch.from_numpy(_huge_array(nbytes).view(np.float32))
        self._values.fill_(1.0)  # touches every page: faults are not bandwidth

    def rate(self, threads: int) -> float:
        """Bytes per second of one pass; a byte counts twice, once read and once written."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            start = time.perf_counter()
            self._values.neg_()  # one bit of each value: nothing to compute
            return 2 * self._values.nbytes / (time.perf_counter() - start)
        finally:
            torch.set_num_threads(before)


class Updater:
    """The updater alone, on states of `elems` parameters in memory."""

    def __init__(self, elems: int, dtype: torch.dtype) -> None:
        threads = bindings.threads_used()
        self._isa = bindings.isa_used()
        self._hyper = HYPERS
        states = [torch.zeros(elems) for _ in range(3)]
        tensors = [torch.zeros(elems, dtype=dtype), *states, torch.zeros(elems, dtype=dtype)]
        tensors[0].fill_(1e-3)
        self._parts = list(zip(*(t.tensor_split(threads) for t in tensors), strict=True))
        self.elems = elems

    def rate(self) -> float:
        """Parameters per second of one update of all of them, on the engine's number of threads."""
        start = time.perf_counter()
        threads = [threading.Thread(target=self._update, args=part, daemon=True) for part in self._parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.elems / (time.perf_counter() - start)

    def _update(
        self, grad: torch.Tensor, master: torch.Tensor, m: torch.Tensor, v: torch.Tensor, param: torch.Tensor
    ) -> None:
        bindings.update(self._hyper, self._isa, grad, (master, m, v), param)


class AtOnce:
    """The engine on a device that completes at once: /dev/zero takes what is written, and nothing needs to be read.

    Every tile stays in its buffer, one beside the other in memory; there it is verified, updated and summed, by the
    engine's own threads, as on any drive. So this is how fast the engine is when drives are not the limit. Not `kept`:
    every step reads, and gets zeros, which are right until the first update.

    `grad`, `param`: `elems` elements of `dtype`; `hyper`: one element of HYPER; all may be changed between steps.
    """

    def __init__(
        self,
        elems: int,
        dtype: torch.dtype,
        *,
        kept: bool = True,
        tile_elems: int = TILE_ELEMS,
        block_bytes: int = DEFAULT_BLOCK,
    ) -> None:
        self.elems = elems
        self.grad, self.param = torch.full((elems,), 1e-3, dtype=dtype), torch.zeros(elems, dtype=dtype)
        self.hyper = HYPERS.copy()
        self._table, code = np.zeros(1, PARAM), DTYPE_CODES[dtype]
        self._table[0] = (self.grad.data_ptr(), self.param.data_ptr(), code, code, 0, bindings.IN_SECTION, *[0] * 4)
        extent = plan_extent([elems], 1, tile_elems=tile_elems)
        self.tiles = np.arange(extent.n_tiles, dtype=np.uint32)
        # As of a store that is there already, whose sums nobody knows: its windows are not looked at.
        states, sums = np.zeros(extent.n_tiles, TILE_STATE), np.zeros((extent.n_tiles, extent.chunks, 3), np.uint32)
        self._fd = os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC)
        cache = extent.n_tiles * extent.slot_bytes if kept else -1
        config = DeviceConfig("file", self._fd, DEFAULT_BUFFERS, block_bytes, cache_bytes=cache)
        self._engine = None
        try:
            self._engine = bindings.engine_create([config], self._name)
            self._windows = bindings.engine_extend(
                self._engine, extent.tile_elems, extent.n_tiles, 3, [0], extent.pieces, self._name,
                states=states, sum_elems=extent.sum_elems, sums=sums,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def step(self, *, update: bool = True) -> None:
        """One step, until the last state is written. Not `update`: tiles pass through, verified."""
        table = self._table if update else np.zeros(1, PARAM)
        bindings.engine_begin(self._engine, table, self.hyper, self.tiles, self._name)
        for tile in self.tiles.tolist():
            bindings.engine_push(self._engine, tile, 0, 0, 0, 0, self._name)
        bindings.engine_finish(self._engine, True, self._name)
        bindings.engine_wait_writes(self._engine, self._name)

    def close(self) -> None:
        try:
            if self._engine is not None:
                bindings.engine_close(self._engine, self._name)
        finally:
            self._engine = None
            os.close(self._fd)

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _name(*_: int) -> str:
        return "/dev/zero"


def engine_rate(dtype: torch.dtype) -> float:
    """Parameters per second that the engine's threads verify, update and sum: the best of a few steps, without drives.

    `dtype`: of parameters and gradients. Measured once per process and number of update threads, in a fraction of a
    second. Raises CSDMemoryError.
    """
    return _engine_rate(dtype, bindings.threads_used())


@functools.cache
def _engine_rate(dtype: torch.dtype, threads: int) -> float:
    seconds = []
    with AtOnce(ENGINE_ELEMS, dtype) as engine:
        for _ in range(2 + ENGINE_STEPS):  # the first one reads, the second is the first to verify
            start = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - start)
    return ENGINE_ELEMS / min(seconds[2:])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
