"""Measures drives on scratch space, briefly: how fast they are, and with which request size and queue depth."""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ... import settings
from ...bindings import IO_DEPTH
from ...devices.backends import ANY_NODE
from ...devices.machine import numa_node
from ...devices.spec import DeviceSpec
from ...errors import CSDOSError, CSDValueError, CSDWarning
from ...files import read_into, write
from ...rates import UNPACED
from ...store.file import StoreFile
from ...threads import start_thread

log: logging.Logger = logging.getLogger("csd_optim")

TUNE_BYTES = 4 << 30  # bytes of states per device from which measuring pays: steps take seconds, measuring 0.5 s
UNEQUAL = 1.5  # ratio of rates from which drives count as unequal; short measurements of equal drives differ by less
HUGE_PAGE = 2 << 20  # bytes; a transparent huge page on x86-64, and on arm64 with 4 KiB base pages
Kind = Literal["read", "write", "mixed"]


class ScratchFile:
    """A nameless file of `size` bytes in `directory`, which disappears with the process, however the process ends.

    Its space is reserved, but unwritten until `fill()`. Raises CSDOSError: no such directory, no permission, no space.
    """

    def __init__(self, directory: Path, size: int, block: int) -> None:
        self.block: int = block
        self.blocks: int = max(2, size // block)
        self._store = StoreFile(directory, durable=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CSDWarning)  # about missing direct I/O: see `direct`
                self.first: int = self._store.allocate(self.blocks * block)
        except BaseException:
            self._store.close()
            raise
        self.fd: int = self._store.io_fd
        self.direct: bool | None = self._store.direct
        self.file_system: int = os.fstat(self.fd).st_dev

    def requests(self, kind: Kind) -> Iterator[tuple[bool, int]]:
        """Yield one pass over the file: (is write, offset). "mixed" reads one half and writes the other in turns."""
        if kind != "mixed":
            for i in range(self.blocks):
                yield kind == "write", self.first + i * self.block
            return
        half = self.blocks // 2
        for i in range(half):
            yield False, self.first + i * self.block
            yield True, self.first + (half + i) * self.block

    def fill(self, seconds: float = 60) -> None:
        """Write every block once: reserved, unwritten space is not read from the disk, and is slower to write.

        Stops after `seconds`; measurements then leave out the unwritten blocks.
        """
        [done], _ = _transfer([self], "write", seconds)
        self.blocks = max(2, done // self.block)

    def set_block(self, block: int) -> None:
        """Set the size of requests to `block` bytes."""
        self.blocks = max(2, self.blocks * self.block // block)
        self.block = block

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Tuned:
    """The best settings for a drive."""

    block_bytes: int  # size of a request
    depth: int  # requests in flight on its file system
    bytes_per_second: float  # measured rate, read plus written, while the other drives are busy too


# The settings (block, depth) to try, from the fewest bytes in flight to the most.
SETTINGS = ((512 << 10, IO_DEPTH), (1 << 20, IO_DEPTH), (1 << 20, 2 * IO_DEPTH), (4 << 20, IO_DEPTH))
TUNE_ROUNDS, TUNE_SECONDS = 2, 0.04  # number of measurements of each setting, and the duration of each
TUNE_FILE = 128 << 20  # bytes
NEAR_BEST = 0.95  # choose the first, smallest setting that reaches this fraction of the best rate


def tune(directories: Sequence[Path]) -> list[Tuned]:
    """Measure the drives behind `directories`, all at the same time, in about half a second, on nameless files.

    Two directories on one file system get the same rate. Raises CSDOSError.
    """
    tried: list[dict[tuple[int, int], float]] = [{} for _ in directories]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(ScratchFile(d, TUNE_FILE, SETTINGS[-1][0])) for d in directories]
        buffer = _huge_buffer(SETTINGS[-1][0])
        moved, _ = _transfer(files, "write", 2 * TUNE_SECONDS, endless=buffer)
        for file, n in zip(files, moved, strict=True):
            file.blocks = max(2, min(file.blocks, n // file.block))
        for _ in range(TUNE_ROUNDS):
            for block, depth in SETTINGS:
                for file in files:
                    file.set_block(block)
                moved, took = _transfer(files, "mixed", TUNE_SECONDS, depth, endless=buffer)
                for rates, n in zip(tried, moved, strict=True):  # keep the best: other programs may use the drive
                    rates[block, depth] = max(rates.get((block, depth), 0.0), n / took)
    chosen = []
    for rates in tried:
        block, depth = next(s for s in SETTINGS if rates[s] >= NEAR_BEST * max(rates.values()))
        chosen.append(Tuned(block, depth, rates[block, depth]))
    return chosen


def tune_devices(
    specs: Sequence[DeviceSpec], stores: Sequence[StoreFile | None], nbytes: int, *, new: bool
) -> tuple[list[DeviceSpec], tuple[float, ...] | None, dict[int, float]]:
    """Measure drives to choose request sizes and queue depths and, for `new` stores, shares in proportion to speed.

    Returns the specs with the chosen settings; the shares, or None to leave them unchanged; and the rates of the
    measured devices in bytes per second.

    Measures only if `nbytes` of states, over all devices, are worth half a second, and sets only what the user left
    open. Always measures if `auto` places a new store by the rates, and then raises CSDValueError or CSDOSError if that
    is impossible.
    """
    tried = {
        d: store.path if store.path.is_dir() else store.path.parent
        for d, (spec, store) in enumerate(zip(specs, stores, strict=True))
        if store and spec.kind.has_file and not spec.kind.on_card and spec.pace == UNPACED
    }
    is_placed = new and any(s.is_placed for s in specs)
    if is_placed and tried and not settings.probes_drives():
        raise CSDValueError(
            "'auto' among devices measures drives, and CSD_OPTIM_PROBE=0 says not to: name shares instead"
        )
    shares_open = new and len(tried) == len(specs) > 1 and all(s.share is None for s in specs) and not is_placed
    all_set = all(specs[d].user_set == {"block", "depth"} for d in tried) and not shares_open
    is_skipped = not settings.probes_drives() or all_set or nbytes < TUNE_BYTES * len(specs)
    if not tried or (is_skipped and not is_placed):
        return [*specs], None, {}
    try:
        found = dict(zip(tried, tune(list(tried.values())), strict=True))
    except CSDOSError as e:
        if is_placed:
            raise
        log.info("drives were not tried out: %s", e)
        return [*specs], None, {}
    tuned_specs, shares = [*specs], None
    rates = [tuned.bytes_per_second for tuned in found.values()]
    if shares_open and max(rates) > UNEQUAL * min(rates):
        shares = tuple(round(rate / max(rates), 2) or 0.01 for rate in rates)
    for d, tuned in found.items():
        spec = specs[d]
        block = spec.block_bytes if "block" in spec.user_set else tuned.block_bytes
        depth = spec.depth if "depth" in spec.user_set else tuned.depth
        tuned_specs[d] = replace(spec, block_bytes=block, depth=depth)
        share = f", share {shares[d]:g}" if shares else ""
        log.info(
            "device %d (%s) moved %.2f GB/s when tried out; from now on in requests of %d KiB, %d at once%s",
            *(d, tried[d], tuned.bytes_per_second / 1e9, block >> 10, depth, share),
        )
    return tuned_specs, shares, {d: tuned.bytes_per_second for d, tuned in found.items()}


def node_of(spec: DeviceSpec, store: StoreFile) -> int | None:
    """Return the NUMA node for a device's buffers, whose CPUs also update its tiles; None: any node."""
    if spec.numa is not None:
        return None if spec.numa == ANY_NODE else spec.numa
    return numa_node(os.fstat(store.fd).st_dev)


def rate(files: Sequence[ScratchFile], kind: Kind, seconds: float = 60, depth: int = IO_DEPTH) -> float:
    """Measure bytes per second (read plus written) in one pass over all files at once, cut short after `seconds`.

    Does I/O like the engine: requests of `block` bytes, the engine's queue depth per file system (or `depth`), buffers
    on huge pages.
    """
    moved, took = _transfer(files, kind, seconds, depth)
    return sum(moved) / took


def _transfer(
    files: Sequence[ScratchFile],
    kind: Kind,
    seconds: float,
    depth: int = IO_DEPTH,
    *,
    endless: memoryview | None = None,
) -> tuple[list[int], float]:
    """Move bytes in one pass, or until `seconds` are over; return the bytes of each file, and the seconds.

    `endless`: repeat passes until `seconds` are over; all requests share this memory, whatever its content. None: one
    pass, and each thread allocates its own buffer.
    """
    stop = threading.Event()
    errors: list[OSError] = []
    moved: list[Counter[ScratchFile]] = []  # bytes per file, one Counter per thread
    threads = []
    for _, group in itertools.groupby(sorted(files, key=lambda f: f.file_system), key=lambda f: f.file_system):
        queue = _Queue(list(group), kind, endless is not None)
        for _ in range(depth):
            buffer = endless or _huge_buffer(queue.block)  # allocated before the clock starts
            threads.append(threading.Thread(target=_serve, args=(queue, buffer, stop, moved, errors), daemon=True))
    start = time.perf_counter()
    try:
        for thread in threads:
            start_thread(thread)
        for thread in threads:
            thread.join(max(0.0, start + seconds - time.perf_counter()))
    finally:
        stop.set()  # out of time, or interrupted: threads finish the requests in flight, and begin no new ones
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise CSDOSError(errors[0].errno, f"measuring a {kind} rate: {errors[0].strerror}")
    return [sum(by[file] for by in moved) for file in files], time.perf_counter() - start


class _Queue:
    """The requests to several files on one file system, taken in turns by several threads."""

    def __init__(self, files: list[ScratchFile], kind: Kind, endless: bool) -> None:
        self.block = max(f.block for f in files)
        turns = itertools.zip_longest(*([(f, *r) for r in f.requests(kind)] for f in files))
        once = [r for turn in turns for r in turn if r is not None]
        self._requests = itertools.cycle(once) if endless else iter(once)
        self._lock = threading.Lock()

    def next(self) -> tuple[ScratchFile, bool, int] | None:
        with self._lock:
            return next(self._requests, None)


def _serve(
    queue: _Queue, buffer: memoryview, stop: threading.Event, moved: list[Counter[ScratchFile]], errors: list[OSError]
) -> None:
    """Serve requests one by one, on each thread, until there are no more."""
    done: Counter[ScratchFile] = Counter()
    try:
        while not stop.is_set() and (request := queue.next()):
            file, is_write, offset = request
            part = buffer[: file.block]
            if is_write:
                write(file.fd, part, offset)
            elif read_into(file.fd, part, offset) < len(part):
                raise OSError(0, "end of file")
            done[file] += len(part)
    except OSError as e:
        errors.append(e)
        stop.set()
    moved.append(done)


def _huge_buffer(nbytes: int) -> memoryview:
    """Return `nbytes` random bytes on huge pages; random, because some disks store zeros faster."""
    array = huge_array(nbytes)
    array[:] = np.frombuffer(np.random.default_rng(0).bytes(nbytes), np.uint8)
    return array.data


def huge_array(nbytes: int) -> np.ndarray[Any, Any]:
    # A private mapping, as shared ones (Python's default) get no huge pages.
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages refuses the advice
        mapping.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(mapping, np.uint8)
    first = -raw.ctypes.data % HUGE_PAGE
    return raw[first : first + nbytes]
