"""The layout of states: parameters → flat space → tiles → devices.

Parameters that join at the same time lie one after another in an *extent* of the flat space, each aligned to `ALIGN`
elements (with codes, to a group of elements, so that no group spans two parameters). The extent is cut into equal
tiles, tile `i` on device `i mod n`: every device owns the same number of tiles (one more or less), and any region of
the model keeps all devices busy. Devices of unequal speed get unequal shares, interleaved as evenly (see devices_of()).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..bindings import MIN_GRAIN, PIECE
from ..errors import CSDStoreError, CSDValueError
from .format import Contents, devices_of
from .sections import FP32, GROUP, PARAM_DTYPES, SECTIONS, Section, codec_supports, size_of, slot_of

SLOTS = 2  # per tile, so that a step can be undone; stores of earlier versions may have one slot
STORE_BYTES = 24  # bytes of a store per parameter element: three fp32 states in two slots
MEMORY_STATE_BYTES = 12  # bytes of `ram:` per parameter element: one slot
# One 512-bit vector of fp32, the natural alignment of the updater and of an FPGA's port.
ALIGN = 16
# Tiles are a multiple of this many elements, so that each section of each slot can be mapped separately.
GRAIN = max(MIN_GRAIN, mmap.PAGESIZE // 4)
CODES_GRAIN = max(4096, GRAIN)  # for codes, which take a byte per element
# Elements of each section per checksum: few enough to be verified, updated and summed within the L2 cache. Three
# sections take 768 KiB, four 1 MiB; 32 Ki to 128 Ki elements measured the same with an L2 cache of 2 MiB.
SUM_ELEMS = 1 << 16
# 1 Mi elements, 12 MiB of state: from 1.5 MiB up the size made no measurable difference, and memory grows with it.
TILE_ELEMS = 1 << 20
# A small model is cut finer, so that reads, updates and writes of one device still overlap.
TILES_PER_DEVICE = 8
# Even finer, by up to this factor, if a device has a small share.
MAX_REFINEMENT = 8
# Each section of a tile in a file is a separate mapping. Linux allows a process 65530 of them (vm.max_map_count), so
# models beyond 14 G parameters have larger tiles.
MAX_MAPPINGS = 40_000
# Fractions of the remaining mappings. SMALL_PART: for tiles smaller than the largest, of an extent that joins later.
# LARGE_PART: for any extent, so that a large extent leaves some for later ones.
SMALL_PART, LARGE_PART = 1 / 128, 0.7


def max_mappings() -> int:
    """Return the maximum number of mappings for this process's extents: 7/8 of the system's limit."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text()) * 7 // 8
    except (OSError, ValueError):
        return 65530 * 7 // 8


class ExtentRequest(NamedTuple):
    """The request for an extent whose tiles are not laid out yet: see plan_extent()."""

    numels: Sequence[int]  # fp32 values of each parameter
    sections: Sequence[str]
    codec: str
    param_dtype: torch.dtype | None
    first_param: int
    first_tile: int
    tile_elems: int | None


@dataclass(frozen=True, eq=False)
class Extent:
    """The parameters that joined together, and their layout."""

    first_param: int  # index of the first parameter, over all extents
    first_tile: int  # index of the first tile, over all extents
    tile_elems: int
    n_tiles: int
    sections: tuple[str, ...]  # names of the states, the first is the master
    codec: str  # the encoding of the states in a slot: see sections.py
    param_dtype: torch.dtype | None  # with codes, the dtype of all parameters
    slots: int  # per tile: SLOTS; 1 in stores made with `shadow=False`, which are only read
    starts: tuple[int, ...]  # element of the extent at which each parameter starts
    numels: tuple[int, ...]
    pieces: np.ndarray[Any, Any]  # dtype PIECE, sorted by tile
    first_piece: np.ndarray[Any, Any]  # (n_tiles + 1,): the pieces of tile i are [first_piece[i], first_piece[i + 1])
    shares: tuple[float, ...] | None  # of the devices; None: equal
    devices: np.ndarray[Any, Any]  # uint32: the device of each tile
    numbered: bool  # the manifest lists the tiles of a device; older stores without such a list keep their format
    sum_elems: int | None  # elements of a section that a checksum covers; None: all of them (formats up to 3)

    def tiles_of(self, device: int) -> int:
        """Return the number of tiles on a device."""
        return int((self.devices == device).sum())

    def pieces_in(self, tile: int) -> np.ndarray[Any, Any]:
        """Return the parts of parameters in a tile, dtype PIECE."""
        first, last = self.first_piece[tile : tile + 2].tolist()
        return self.pieces[first:last]

    @property
    def chunks(self) -> int:
        """The number of checksums per section of a tile."""
        return math.ceil(self.tile_elems / (self.sum_elems or self.tile_elems))

    @property
    def slot(self) -> tuple[Section, ...]:
        """The sections in a slot of a tile."""
        return slot_of(self.tile_elems, self.sections, self.codec, self.param_dtype)

    @property
    def slot_bytes(self) -> int:
        return size_of(self.slot)

    def device_bytes(self, device: int) -> int:
        return self.slots * self.slot_bytes * self.tiles_of(device)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def plan_extent(
    numels: Sequence[int],
    n_devices: int,
    *,
    first_param: int = 0,
    first_tile: int = 0,
    sections: Sequence[str] = SECTIONS[:3],
    codec: str = FP32,
    param_dtype: torch.dtype | None = None,
    slots: int = SLOTS,
    tile_elems: int | None = None,
    shares: Sequence[float] | None = None,
    sum_elems: int | None = SUM_ELEMS,
    devices: np.ndarray[Any, Any] | None = None,
    numbered: bool | None = None,
    mapped: int = 0,
) -> Extent:
    """Lay `numels` out over `n_devices` in proportion to `shares` (positive numbers; None: equal shares).

    `tile_elems` is rounded up to `GRAIN`; None: chosen here. `sum_elems`, `devices`, `numbered`: see Extent; devices
    None: according to the shares; numbered None: true if `sum_elems` is not None. `mapped`: the number of mappings of
    the process's other extents (bindings.mappings()). If few are left, tiles become larger, up to one per device; codes
    are not mapped. Raises CSDValueError for a codec that is unknown or does not fit these states.
    """
    if not codec_supports(codec, sections, param_dtype):
        raise CSDValueError(f"Invalid codec: {codec!r} for {', '.join(sections)} of {param_dtype} parameters")
    align, grain, windows = (ALIGN, GRAIN, len(sections)) if codec == FP32 else (GROUP, CODES_GRAIN, 0)
    starts, end = [], 0
    for n in numels:
        starts.append(end)
        end += round_up(n, align)
    if tile_elems is None:
        # The same number of tiles for every device, so that no device waits for another.
        one_each, mappings_left = n_devices * windows, max_mappings() - mapped
        max_windows = max(one_each, min(MAX_MAPPINGS, int(LARGE_PART * mappings_left)))
        largest = max(TILE_ELEMS, math.ceil(end * windows / max_windows))
        refinement = min(MAX_REFINEMENT, sum(shares) / n_devices / min(shares)) if shares else 1
        rounds = math.ceil(TILES_PER_DEVICE * refinement)
        if mapped and windows:
            rounds = max(1, min(rounds, int(SMALL_PART * mappings_left) // one_each))
        rounds = max(rounds, math.ceil(end / (n_devices * largest)))
        tile_elems = math.ceil(end / (n_devices * rounds))
    tile_elems = max(grain, round_up(tile_elems, grain))
    n_tiles = math.ceil(end / tile_elems)
    rows = [
        (first_param + i, tile, max(tile * tile_elems, start) - start, max(start - tile * tile_elems, 0), elems)
        for i, (start, n) in enumerate(zip(starts, numels, strict=True))
        for tile in range(start // tile_elems, math.ceil((start + n) / tile_elems))
        if (elems := min((tile + 1) * tile_elems, start + n) - max(tile * tile_elems, start)) > 0
    ]
    pieces = np.array(rows, PIECE)
    return Extent(
        first_param=first_param,
        first_tile=first_tile,
        tile_elems=tile_elems,
        n_tiles=n_tiles,
        sections=tuple(sections),
        codec=codec,
        param_dtype=param_dtype,
        slots=slots,
        starts=tuple(starts),
        numels=tuple(numels),
        pieces=pieces,
        first_piece=np.searchsorted(pieces["tile"], np.arange(n_tiles + 1)),
        shares=tuple(shares) if shares else None,
        devices=devices_of(shares or [1.0] * n_devices, n_tiles) if devices is None else devices,
        numbered=sum_elems is not None if numbered is None else numbered,
        sum_elems=sum_elems,
    )


def _numbered_devices(recovered: Sequence[Contents], e: int) -> np.ndarray[Any, Any] | None:
    """Return the device (uint32) of each tile of an extent; None if manifests list no tiles. Raises CSDStoreError."""
    extents = [c.manifest["extents"][e] for c in recovered]
    if not any("tile_numbers" in extent for extent in extents):
        return None
    numbers = np.concatenate([np.array(extent.get("tile_numbers", []), np.int64) for extent in extents])
    if not np.array_equal(np.sort(numbers), np.arange(len(numbers))):
        raise CSDStoreError(f"{recovered[0].path}: the devices do not have each tile of extent {e} once")
    devices = np.empty(len(numbers), np.uint32)
    devices[numbers] = np.repeat(np.arange(len(extents)), [extent["tiles"] for extent in extents])
    return devices


def extents_of(recovered: Sequence[Contents]) -> list[Extent]:
    """Return the extents of a store, rebuilt from its devices' manifests, in device order. Raises CSDStoreError."""
    first, n = recovered[0], len(recovered)
    extents: list[Extent] = []
    for e, described in enumerate(first.manifest["extents"]):
        members = [p for p in first.manifest["params"] if p["extent"] == e]
        extent = plan_extent(
            [p["numel"] for p in members],
            n,
            first_param=sum(len(before.numels) for before in extents),
            first_tile=sum(before.n_tiles for before in extents),
            sections=described["sections"],
            codec=described.get("codec", FP32),
            param_dtype=PARAM_DTYPES.get(described.get("param_dtype", "")),
            slots=described["slots"],
            tile_elems=described["tile_elems"],
            shares=described.get("shares"),
            sum_elems=described.get("sum_elems"),
            devices=_numbered_devices(recovered, e),
            numbered="tile_numbers" in described,
        )
        tiles = [c.manifest["extents"][e]["tiles"] for c in recovered]
        consistent = len(extent.devices) == extent.n_tiles and [p["start"] for p in members] == [*extent.starts]
        if not consistent or tiles != [extent.tiles_of(d) for d in range(n)]:
            raise CSDStoreError(f"{first.path}: the manifest contradicts itself")
        extents.append(extent)
    return extents
