"""Reads whole stores: tile by tile, residual by residual, with direct I/O, verifying every checksum."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..bindings import IO_DEPTH, crc32c, decode, isa_used
from ..errors import CSDOSError, CSDStoreError
from ..files import opened, read_into
from .direct import open_direct
from .format import PAGE, RESIDUAL_BYTES, Contents
from .layout import round_up
from .sections import FP32, GROUP, PARAM_DTYPES, Section, sections_of, size_of

CHUNK = 4 << 20  # minimum bytes of a residual per read or write
Tick = Callable[[int], None]  # progress callback: takes the number of bytes just done


class Tile(NamedTuple):
    contents: Contents
    extent: int
    number: int  # in its extent, over all devices
    offset: int  # byte of the store at which its current slot begins
    sections: tuple[Section, ...]
    elems: int
    summed: bool  # the tile has checksums
    sum_elems: int  # elements of a section per checksum; the last checksum covers the rest
    sums: np.ndarray[Any, Any]  # uint32, shape (chunks, sections)

    @property
    def size(self) -> int:
        return size_of(self.sections)

    @property
    def states(self) -> list[str]:
        """The names of the tile's states."""
        names: list[str] = self.contents.manifest["extents"][self.extent]["sections"]
        return names

    @property
    def codes_of(self) -> torch.dtype | None:
        """The dtype of the tile's parameters if the tile holds codes; None for fp32 states."""
        return PARAM_DTYPES.get(self.contents.manifest["extents"][self.extent].get("param_dtype", ""))

    @property
    def codec(self) -> str:
        return str(self.contents.manifest["extents"][self.extent].get("codec", FP32))

    def chunk(self, number: int) -> tuple[int, int]:
        """Return the range [from, to) of elements of each section that checksum `number` covers."""
        return number * self.sum_elems, min((number + 1) * self.sum_elems, self.elems)

    def decode(self, data: memoryview, first: int, states: Sequence[torch.Tensor | None]) -> None:
        """Decode states from element `first` on into fp32 tensors of equal length, on the CPU.

        `states`: None to skip a state. `data`: the tile's slot, of codes. `first`: the beginning of a group.
        """
        dtype = self.codes_of
        assert dtype
        end = first + round_up(next(s.numel() for s in states if s is not None), GROUP)
        parts = [(section.at(first), section.at(end)) for section in self.sections]
        codes = [torch.frombuffer(data, dtype=torch.uint8, offset=at, count=to - at) for at, to in parts]
        decode(isa_used(), codes, dtype, states, self.codec)


class Residual(NamedTuple):
    contents: Contents
    row: int  # of the parameter
    offset: int  # in the store
    size: int  # bytes
    crc: int

    @property
    def name(self) -> str:
        return str(self.contents.manifest["params"][self.row]["name"])


@dataclass(frozen=True)
class Damage:
    """A damaged section of a tile, or a damaged residual: the content differs from what was written."""

    path: str
    number: int  # of the tile in its extent, over all devices; for a residual, the row of its parameter
    what: str
    params: list[str]  # affected parameters: "elements 0 to 4095 of layer.weight"

    def __str__(self) -> str:
        where = f"{self.path}: {self.what} is damaged"
        return f"{where}: {', '.join(self.params)}" if self.params else f"{where}; no parameter lies there"


def params_in_tile(
    manifest: dict[str, Any], extent: int, tile: int, first: int = 0, last: int | None = None
) -> list[str]:
    """Return the parameters in a tile, each with the range of its elements (fp32 values: a complex number has two).

    `first`, `last`: only elements [first, last) of the tile.
    """
    elems = manifest["extents"][extent]["tile_elems"]
    first, last = tile * elems + first, tile * elems + (elems if last is None else last)
    return [
        f"elements {max(first - p['start'], 0)} to {min(last - p['start'], p['numel']) - 1} of {p['name']}"
        for p in manifest["params"]
        if p["extent"] == extent and p["start"] < last and first < p["start"] + p["numel"]
    ]


def tiles_of(recovered: Iterable[Contents]) -> list[Tile]:
    """Return all tiles, without freed ones, in the order of the flat space, where devices alternate."""
    found = []
    for contents in recovered:
        extent_number = {id(extent): e for e, extent in enumerate(contents.manifest["extents"])}
        summed, sums = contents.tiles["summed"].tolist(), chain.from_iterable(contents.sums)
        tiles = zip(contents.slots(), contents.are_freed(), summed, sums, strict=True)
        for (extent, number, offset), is_freed, checked, crc in tiles:
            if is_freed:
                continue
            place = (contents, extent_number[id(extent)], number, offset)
            elems = extent["tile_elems"]
            sum_elems = min(extent.get("sum_elems", elems), elems)
            found.append(Tile(*place, sections_of(extent), elems, checked == 1, sum_elems, crc))
    return sorted(found, key=lambda t: (t.extent, t.number))


def residuals_of(recovered: Iterable[Contents]) -> list[Residual]:
    return [
        Residual(contents, row, offset, RESIDUAL_BYTES * contents.manifest["params"][row]["numel"], crc)
        for contents in recovered
        for row, offset, crc in contents.residual_places()
    ]


def total_bytes(recovered: Iterable[Contents], takes: Callable[[Tile | Residual], bool] = lambda _: True) -> int:
    """Return the bytes that each_tile() reads."""
    recovered = list(recovered)
    return sum(t.size for t in tiles_of(recovered) if takes(t)) + sum(
        r.size for r in residuals_of(recovered) if takes(r)
    )


def stored_bytes(contents: Contents, *, decoded: bool = False) -> int:
    """Return the bytes of a copy of a store, which has only current slots and spaces, and no holes.

    `decoded`: for all states as fp32.
    """
    with opened(Path(contents.path)) as fd:
        stored = [t for t in tiles_of([contents]) if not _is_hole(fd, t.offset, t.size)]
    tiles = sum(4 * t.elems * len(t.states) if decoded else t.size for t in stored)
    return tiles + sum(r.size for r in residuals_of([contents]))


def _raise_damage(damage: list[Damage]) -> None:
    raise CSDStoreError(str(damage[0]))


def each_tile(
    recovered: Sequence[Contents],
    use: Callable[[Tile, memoryview | None], None],
    use_residual: Callable[[Residual, int, memoryview], None] = lambda *_: None,
    *,
    damaged: Callable[[list[Damage]], None] = _raise_damage,
    gate: Callable[[], None] = lambda: None,
    tick: Tick = lambda _: None,
    takes: Callable[[Tile | Residual], bool] = lambda _: True,
) -> None:
    """Read and verify every tile, and pass it to `use`, on a pool of threads. Data is None for a hole (all zeros).

    Residuals are passed to `use_residual` in parts, each with the byte at which it begins; damage is found only after
    the last part. `gate` is called before each read. `damaged` is called if a checksum does not match, for tiles
    instead of `use`; by default it raises CSDStoreError. Only tiles and residuals for which `takes` returns True are
    read. Raises CSDOSError.
    """
    tiles = [t for t in tiles_of(recovered) if takes(t)]
    residuals = [r for r in residuals_of(recovered) if r.size and takes(r)]
    sizes = [*(t.size for t in tiles), *(min(round_up(r.size, PAGE), CHUNK) for r in residuals)]
    largest = max(sizes, default=0)
    free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
    for _ in range(IO_DEPTH if largest else 0):
        free.put(mmap.mmap(-1, largest))  # pages, for O_DIRECT

    def read_tile(tile: Tile) -> None:
        gate()
        buffer = free.get()
        try:
            with memoryview(buffer)[: tile.size] as view:
                hole, damage = _read(fds[tile.contents.path], tile, view)
                if damage:
                    damaged(damage)
                else:
                    use(tile, None if hole else view)
        finally:
            free.put(buffer)
        tick(tile.size)

    def read_residual(residual: Residual) -> None:
        path, crc, done = residual.contents.path, 0, 0
        buffer = free.get()
        try:
            while done < residual.size:
                gate()
                pages = memoryview(buffer)[: round_up(residual.size - done, PAGE)]
                part = pages[: residual.size - done]
                if _read_part(fds[path], pages, residual.offset + done, path) < len(part):
                    break  # the file ends
                crc = crc32c(part, crc)
                use_residual(residual, done, part)
                done += len(part)
                tick(len(part))
        finally:
            free.put(buffer)
        if done < residual.size or crc != residual.crc:
            damaged([Damage(path, residual.row, "residual", [residual.name])])

    with contextlib.ExitStack() as stack:
        fds = {c.path: stack.enter_context(_opened_direct(Path(c.path))) for c in recovered}
        pool = stack.enter_context(ThreadPoolExecutor(IO_DEPTH, thread_name_prefix="csd_optim"))
        futures = []
        try:
            for call in (*(partial(read_tile, t) for t in tiles), *(partial(read_residual, r) for r in residuals)):
                try:
                    futures.append(pool.submit(call))
                except RuntimeError:  # at interpreter shutdown no more threads start
                    call()
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:  # no effect on those that are running
                future.cancel()
            raise


def find_damage(
    recovered: Sequence[Contents],
    use_residual: Callable[[Residual, int, memoryview], None] = lambda *_: None,
    tick: Tick = lambda _: None,
    *,
    use: Callable[[Tile, memoryview | None], None] = lambda *_: None,
) -> list[Damage]:
    """Return all damage in these stores, sorted. `use`, `use_residual`: as in each_tile()."""
    found: list[Damage] = []
    each_tile(recovered, use, use_residual, damaged=found.extend, tick=tick)
    return sorted(found, key=lambda d: (d.path, d.number))


def _read(fd: int, tile: Tile, view: memoryview) -> tuple[bool, list[Damage]]:
    """Read a tile into `view`. Returns (whether the tile is an unread hole, its damage). Raises CSDOSError."""
    if hole := _is_hole(fd, tile.offset, tile.size):
        n = tile.size
    else:
        n = _read_part(fd, view, tile.offset, tile.contents.path)

    def whole(section: int, chunk: int) -> bool:
        first, last = map(tile.sections[section].at, tile.chunk(chunk))
        if n < last or not tile.summed:
            return n >= last
        crc = _sum_of_zeros(last - first) if hole else crc32c(view[first:last])
        return crc == int(tile.sums[chunk, section])

    damage = []
    for k, section in enumerate(tile.sections):
        if bad := [chunk for chunk in range(len(tile.sums)) if not whole(k, chunk)]:
            first, last = tile.chunk(bad[0])[0], tile.chunk(bad[-1])[1]
            params = params_in_tile(tile.contents.manifest, tile.extent, tile.number, first, last)
            what = f"{section.name} of tile {tile.number}"
            damage.append(Damage(tile.contents.path, tile.number, what, params))
    return hole, damage


def _read_part(fd: int, view: memoryview, offset: int, path: str) -> int:
    """Read whole pages from a store; return the number of bytes, fewer only at the end of the file.

    Raises CSDOSError.
    """
    try:
        return read_into(fd, view, offset, PAGE)
    except OSError as e:
        raise CSDOSError(e.errno, f"cannot read {path}: {e.strerror}") from e


@contextlib.contextmanager
def _opened_direct(file: Path) -> Iterator[int]:
    """Open a file for reading, with direct I/O if the file system has it. Raises CSDOSError."""
    try:
        fd = open_direct(file, os.O_RDONLY)
        if fd is None:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise CSDOSError(e.errno, f"cannot read {file}: {e.strerror}") from e
    try:
        yield fd
    finally:
        os.close(fd)


def _is_hole(fd: int, offset: int, size: int) -> bool:
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) >= offset + size
    except OSError as e:
        # ENXIO: no data up to the end of the file, if the file is that long. EINVAL: not supported by this file system.
        return e.errno == errno.ENXIO and os.fstat(fd).st_size >= offset + size


@lru_cache
def _sum_of_zeros(size: int) -> int:
    return crc32c(bytes(size))
