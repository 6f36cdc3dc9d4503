"""Makes the stores of one rank without an optimizer: layout, elements in any order, then a commit."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..bindings import crc32c
from ..devices.spec import DeviceSpec, shares_of
from ..distributed.ranks import RanksElsewhere
from ..engine.commit.commits import NO_REGION
from ..engine.commit.manifests import Manifests
from ..engine.commit.residuals import Residuals, Room
from ..errors import CSDStoreError
from ..files import read_into, write
from ..store.file import Staged, StoreFile
from ..store.format import CLEAN, PAGE, RESIDUAL_BYTES, TILE_STATE, Record, Superblock, pack_table, pack_tiles
from ..store.layout import Extent, plan_extent, round_up
from ..store.reader import CHUNK, Tick, Tile
from ..store.sections import FP32, GROUPED
from .regroup import Regroup

# The sections of an extent, its codec and parameters' dtype.
ExtentKind = tuple[tuple[str, ...], str, torch.dtype | None]


class NewStores:
    """The stores of one rank on its devices, until `close()`. Existing stores must be empty, or are overwritten.

    Add extents and residuals; allocate(); fill(); then stage(), and publish() each copy.
    """

    def __init__(self, specs: Sequence[DeviceSpec], rank: int, size: int, tile_elems: int | None) -> None:
        self.specs = specs
        self._tile_elems = tile_elems
        self._shares = shares_of(specs)
        self._extents: list[Extent] = []
        self._offsets: list[list[int]] = []  # per extent and device
        self._numbers: list[np.ndarray[Any, Any]] = []  # per extent: the number of each tile on its device
        self._residual_numels: dict[int, int] = {}  # by row
        self._regroups: list[tuple[int, int, Regroup]] = []  # (extent, first element of the part there, Regroup)
        self._residuals = Residuals(len(specs))
        self._manifests = Manifests(len(specs), RanksElsewhere(rank, size) if size > 1 else None)
        self._stores: list[StoreFile] = []
        self._staged: list[Staged] = []

    # ---- layout ----------------------------------------------------------------------

    def add(self, numels: Sequence[int], kind: ExtentKind) -> Extent:
        """Lay out an extent of parameters of one kind; nothing is written yet."""
        sections, codec, dtype = kind
        extent = plan_extent(
            numels,
            len(self.specs),
            first_param=sum(len(before.numels) for before in self._extents),
            first_tile=sum(before.n_tiles for before in self._extents),
            sections=sections,
            codec=codec,
            param_dtype=dtype,
            tile_elems=self._tile_elems,
            shares=self._shares,
            mapped=sum(e.n_tiles * len(e.sections) for e in self._extents if e.codec == FP32),
        )
        self._extents.append(extent)
        numbers = np.zeros(extent.n_tiles, np.int64)
        for device in range(len(self.specs)):
            here = extent.devices == device
            numbers[here] = np.arange(here.sum())
        self._numbers.append(numbers)
        return extent

    def add_residual(self, row: int, numel: int) -> None:
        """Give a parameter a residual, initially zero."""
        self._residual_numels[row] = numel

    def add_regroup(self, e: int, start: int, numel: int) -> Regroup:
        """Return a Regroup for a part whose codes have other groups here."""
        extent = self._extents[e]
        assert extent.param_dtype
        regroup = Regroup(numel, extent.sections, extent.codec, extent.param_dtype)
        self._regroups.append((e, start, regroup))
        return regroup

    def bytes_on(self, device: int) -> int:
        """Return a lower bound of the bytes of extents and residuals on a device."""
        residuals = sum(2 * round_up(RESIDUAL_BYTES * n, PAGE) for n in self._residual_numels.values())
        decoded = sum(regroup.nbytes for *_, regroup in self._regroups) if device == 0 else 0
        return sum(e.device_bytes(device) for e in self._extents) + residuals // len(self.specs) + decoded

    def open(self) -> None:
        """Open and lock the stores. Raises CSDStoreExistsError, CSDBusyError, CSDOSError."""
        for spec in self.specs:
            self._stores.append(StoreFile(spec.directory, durable=True, mode="resume"))

    def allocate(self, described: dict[str, Any]) -> None:
        """Replace the devices' files by empty ones, and allocate these. Raises CSDOSError if a disk is full.

        `described`: see Manifests.describe().
        """
        for extent in self._extents:
            offsets = [store.allocate(extent.device_bytes(d)) for d, store in enumerate(self._stores)]
            self._offsets.append(offsets)
            self._manifests.add(extent, offsets)
        for row, numel in self._residual_numels.items():
            self._residuals.make_room(row, numel, self._stores)
        for *_, regroup in self._regroups:
            regroup.allocate(self._stores[0])
        self._manifests.describe(described)

    # ---- content ---------------------------------------------------------------------

    def fill(
        self, e: int, flat: int, n: int, tile: Tile, data: memoryview, first: int, *, regrouped: bool = False
    ) -> None:
        """Copy elements [first, first + n) of an old tile to extent `e`, from element `flat` on. On any thread.

        `data`: the old tile's slot. With codes, `first` and `flat` must begin groups; not so with `regrouped`, which
        leaves out the sections that depend on groups.
        """
        extent = self._extents[e]
        while n:
            number, at = divmod(flat, extent.tile_elems)
            count = min(n, extent.tile_elems - at)
            store, slot = self._slot(e, number)
            for old, new in zip(tile.sections, extent.slot, strict=True):
                if regrouped and old.name in GROUPED:
                    continue
                begin = old.at(first)
                part = data[begin : begin + old.bytes_of(count)]
                with store.wrapping_errors("write"):
                    write(store.fd, part, slot + new.at(at))
            flat, first, n = flat + count, first + count, n - count

    def _fill_regrouped(self, e: int, start: int, regroup: Regroup) -> None:
        extent, first = self._extents[e], 0
        while first < regroup.numel:
            number, at = divmod(start + first, extent.tile_elems)
            n = min(regroup.numel - first, extent.tile_elems - at)
            store, slot = self._slot(e, number)
            sections = {section.name: section for section in extent.slot}
            for name, codes in regroup.codes(first, n):
                with store.wrapping_errors("write"):
                    write(store.fd, codes, slot + sections[name].at(at))
            first += n

    def fill_residual(self, row: int, first: int, data: memoryview) -> None:
        """Write a residual from element `first` on."""
        room = self._rooms[row]
        store = self._stores[room.device]
        with store.wrapping_errors("write"):
            write(store.fd, data, room.base + RESIDUAL_BYTES * first)

    def _slot(self, e: int, number: int) -> tuple[StoreFile, int]:
        """Return the store of a tile, and the byte at which its slot 0 begins."""
        extent, device = self._extents[e], int(self._extents[e].devices[number])
        offset = self._offsets[e][device] + extent.slots * extent.slot_bytes * int(self._numbers[e][number])
        return self._stores[device], offset

    @property
    def _rooms(self) -> dict[int, Room]:
        return self._residuals.rooms

    # ---- the commit ------------------------------------------------------------------

    @property
    def content_bytes(self) -> int:
        """The number of bytes that stage() reads."""
        tiles = sum(extent.n_tiles * extent.slot_bytes for extent in self._extents)
        return tiles + sum(RESIDUAL_BYTES * n for n in self._residual_numels.values())

    def stage(self, block: Superblock, steps: Sequence[float], record: Record, tick: Tick) -> None:
        """Flush everything, take checksums, and prepare the first commit. Raises CSDOSError.

        `block`: with the store id, step and round. `steps`: by row.
        """
        for e, start, regroup in self._regroups:
            self._fill_regrouped(e, start, regroup)
        for store in self._stores:
            store.sync()
        with mmap.mmap(-1, max([CHUNK, *(extent.slot_bytes for extent in self._extents)])) as buffer:
            sums = [self._sums(e, buffer, tick) for e in range(len(self._extents))]
            spaces = {row: self._sum_of_residual(row, buffer, tick) for row in sorted(self._rooms)}
        for d, store in enumerate(self._stores):
            store.forget_cached()  # training needs the memory
            tables, written = [], 0
            for extent, entry, of_extent in zip(self._extents, self._manifests.extents_on[d], sums, strict=True):
                states = np.zeros(extent.tiles_of(d), TILE_STATE)
                states["summed"] = 1
                tables.append(pack_tiles(entry, states, of_extent[extent.devices == d]))
                written += len(states) * extent.slot_bytes
            of_device = [(0, crc) for row, crc in spaces.items() if self._rooms[row].device == d]
            written += sum(room.room for room in self._rooms.values() if room.device == d)
            table = pack_table(tables, np.array(steps), replace(record, written_bytes=written), of_device)
            own = replace(
                block,
                device=d,
                devices=len(self.specs),
                sequence=1,
                flags=CLEAN,
                manifest=NO_REGION,
                table=NO_REGION,
                version=self._manifests.version(self._rooms),
            )
            self._staged.append(store.stage(own, self._manifests.pack(d, self._rooms), table))

    def publish(self, copy: int) -> None:
        """Write one copy of the commit to every store. Write copy 1 once all stores of all ranks have copy 0."""
        for store, staged in zip(self._stores, self._staged, strict=True):
            store.publish(staged, copy)

    def _sums(self, e: int, buffer: mmap.mmap, tick: Tick) -> np.ndarray[Any, Any]:
        """Return the checksums of an extent's tiles: uint32, shape (tiles, chunks, sections)."""
        extent = self._extents[e]
        each = extent.sum_elems or extent.tile_elems
        sums = np.zeros((extent.n_tiles, extent.chunks, len(extent.slot)), np.uint32)
        with memoryview(buffer)[: extent.slot_bytes] as slot:
            for number in range(extent.n_tiles):
                self._read(*self._slot(e, number), slot)
                for chunk in range(extent.chunks):
                    first, last = chunk * each, min((chunk + 1) * each, extent.tile_elems)
                    sums[number, chunk] = [crc32c(slot[s.at(first) : s.at(last)]) for s in extent.slot]
                tick(len(slot))
        return sums

    def _sum_of_residual(self, row: int, buffer: mmap.mmap, tick: Tick) -> int:
        room, left, crc, done = self._rooms[row], RESIDUAL_BYTES * self._residual_numels[row], 0, 0
        while left:
            with memoryview(buffer)[: min(left, CHUNK)] as part:
                self._read(self._stores[room.device], room.base + done, part)
                crc = crc32c(part, crc)
                left, done = left - len(part), done + len(part)
                tick(len(part))
        return crc

    def _read(self, store: StoreFile, offset: int, view: memoryview) -> None:
        with store.wrapping_errors("read"):
            n = read_into(store.fd, view, offset)
        if n < len(view):
            raise CSDStoreError(f"{store.path} was cut off while it was made")

    def close(self) -> None:
        """Close the stores, and remove stores without a commit."""
        with ExitStack() as stack:
            for store in self._stores:
                stack.callback(store.close)
            self._stores = []
