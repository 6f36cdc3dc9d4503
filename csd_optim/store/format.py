"""What a store looks like on a disk: pack and unpack, read and check. Byte by byte: docs/store-format.md.

    superblock 0 | superblock 1 | extents, residuals, and spaces for two manifests and two tables, as they were made

The manifest says what the store holds (names, shapes, dtypes, places), the table where its state is at a step: the
current slot and the checksums of every tile, the step counters, the current space and the checksum of every residual,
the hyperparameters, what the user added. Superblock, manifest and table exist twice; each copy is whole only if all
three are. A commit writes copy 0, on all devices, and then copy 1: one of them is whole at any time, and at rest both
are.

Both copies are of the last step, not one of it and one of the step before, written by turns. A crash leaves a whole one
either way; but here any one of the six may also be lost at rest, to a sector that cannot be read again, and the other
copy serves. By turns, the last step would be lost with the newer one, and everything if the next step has begun: it
writes where the state of the older one lies. The price is a second small write and flush, beside the next forward.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..bindings import crc32c
from ..errors import CSDStoreError
from . import sections
from .check import MOST, MOST_BYTES, MOST_TILES, check_extent, check_param, check_record, require
from .sections import GROUP, sections_of, size_of
from .transfer import opened, read

FILE_NAME = "csd_optim.store"
MAGIC = b"CSDOPTIM"
# Formats 1 to 3 stand for what a store has: residuals (2), unequal shares of the devices and perhaps residuals (3).
# From format 4 on the manifest names what a reader has to know, and who does not know it says so by its name. A store
# that has nothing but what an older format has keeps that one.
VERSION = NAMED_FEATURES = 4
CODEC = "codec"  # extents[].codec and .param_dtype: its tiles have codes of the states. Without, fp32
CHUNK_SUMS = "chunk_sums"  # extents[].sum_elems: a checksum covers that many elements of a section, not all of them
RESIDUALS = "residuals"  # params[].residual
RULE = "rule"  # rule: which one updates the states, and what their sections are. Without, it is AdamW's
SHARES = "shares"  # extents[].shares
TILE_NUMBERS = "tile_numbers"  # extents[].tile_numbers: which tiles are here, else it follows from the shares
FEATURES = frozenset({CHUNK_SUMS, CODEC, RESIDUALS, RULE, SHARES, TILE_NUMBERS})
ENDIAN = 0x01020304
PAGE = sections.PAGE
CLEAN = 1  # flag: closed in order, nothing written since
UNDER_WAY = 2  # flag: a step in place has begun, and may have written some of its tiles

_REGION = struct.Struct("<QQQI")
# magic, version, endianness, store id, device index, devices, sequence, step, flags; then the regions of manifest and
# table and the round, then zeros up to the checksum of all that in the last 4 bytes.
_SUPERBLOCK = struct.Struct("<8sII16sIIQQI")
_ROUND = struct.Struct("<Q")
TILE_STATE = np.dtype([("slot", "<u4"), ("summed", "<u4")])
RESIDUAL_BYTES = 2  # of an element: bfloat16
RESIDUAL_ENTRY = np.dtype([("space", "<u4"), ("crc", "<u4")])


class Region(NamedTuple):
    """Where a manifest or table is: two spaces of `room` bytes, one after the other from `base` on, one a copy."""

    base: int
    room: int
    size: int
    crc: int

    def offset(self, copy: int) -> int:
        return self.base + copy * self.room


@dataclass(frozen=True)
class Superblock:
    store_id: bytes
    device: int
    devices: int
    sequence: int
    step: int
    flags: int
    manifest: Region
    table: Region
    version: int = VERSION
    round: int = 0  # how many commits the ranks have made together, this one included; 0: of a process on its own

    def pack(self) -> bytes:
        head = _SUPERBLOCK.pack(
            MAGIC, self.version, ENDIAN, self.store_id, self.device, self.devices, self.sequence, self.step, self.flags
        )
        regions = _REGION.pack(*self.manifest) + _REGION.pack(*self.table)
        body = (head + regions + _ROUND.pack(self.round)).ljust(PAGE - 4, b"\0")
        return body + struct.pack("<I", crc32c(body))

    @classmethod
    def unpack(cls, block: bytes, path: str) -> Superblock | None:
        """None if the block is no valid superblock. Raises CSDStoreError for a format we do not know."""
        if len(block) < PAGE or block[:8] != MAGIC:
            return None
        if crc32c(block[: PAGE - 4]) != struct.unpack("<I", block[PAGE - 4 : PAGE])[0]:
            return None
        _, version, endian, *fields = _SUPERBLOCK.unpack_from(block)
        if endian != ENDIAN:
            raise CSDStoreError(f"{path} was written on a machine of the other endianness")
        if not 1 <= version <= VERSION:
            raise CSDStoreError(
                f"{path} has store format {version}; this csd_optim reads formats up to {VERSION}: upgrade it"
            )
        regions = [Region(*_REGION.unpack_from(block, _SUPERBLOCK.size + i * _REGION.size)) for i in range(2)]
        (round_,) = _ROUND.unpack_from(block, _SUPERBLOCK.size + 2 * _REGION.size)
        return replace(cls(*fields, *regions), version=version, round=round_)


@dataclass(frozen=True)
class Record:
    """What a commit carries besides the state itself; the same on all devices but for `written_bytes`."""

    groups: list[dict[str, Any]] = field(default_factory=list)  # hyperparameters, as the step used them
    given: list[dict[str, Any]] = field(default_factory=list)  # and as they were when the groups were made
    user_state: bytes = b""  # as torch.save writes it; empty: none
    seconds: float = 0.0  # that training took so far, from step to step
    written_bytes: int = 0  # of states and residuals, to this device, since the store was made

    def head(self) -> bytes:
        """The packed record up to `user_state`, which may be large."""
        data = json.dumps({k: v for k, v in vars(self).items() if k != "user_state"}).encode()
        return struct.pack("<I", len(data)) + data

    @classmethod
    def unpack(cls, data: bytes) -> Record:
        end = 4 + struct.unpack_from("<I", data)[0]
        return cls(**_json(data[4:end]), user_state=data[end:])


def _json(data: bytes) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        require(len(found := dict(pairs)) == len(pairs), "JSON with a key twice")
        return found

    return json.loads(data, object_pairs_hook=once)


def features_of(extents: Sequence[dict[str, Any]], *, residuals: bool, rule: bool) -> set[str]:
    """What a reader of a store with these extents has to know. `rule`: its manifest names one."""
    has = {
        CHUNK_SUMS: any("sum_elems" in e for e in extents),
        CODEC: any("codec" in e for e in extents),
        RESIDUALS: residuals,
        RULE: rule,
        SHARES: any("shares" in e for e in extents),
        TILE_NUMBERS: any("tile_numbers" in e for e in extents),
    }
    return {feature for feature, there in has.items() if there}


def version_of(features: set[str]) -> int:
    """The oldest format that has them."""
    if features - {RESIDUALS, SHARES}:
        return NAMED_FEATURES
    return 3 if SHARES in features else 2 if RESIDUALS in features else 1


def sums_shape(extent: dict[str, Any]) -> tuple[int, int]:
    """Of the checksums of a tile: chunks, sections."""
    chunks = math.ceil(extent["tile_elems"] / extent.get("sum_elems", extent["tile_elems"]))
    return chunks, len(sections_of(extent))


def tile_entry(extent: dict[str, Any]) -> np.dtype[Any]:
    """What the table has for a tile: its state, and the checksums of each chunk, one per section."""
    chunks, sections = sums_shape(extent)
    # Formats up to 3 have one chunk, and room for a fourth section in any case.
    return np.dtype([("state", TILE_STATE), ("sums", "<u4", (chunks, sections if "sum_elems" in extent else 4))])


def pack_tiles(extent: dict[str, Any], states: np.ndarray[Any, Any], sums: np.ndarray[Any, Any]) -> bytes:
    """The entries of an extent's tiles. `states`: of TILE_STATE; `sums`: uint32, (tiles, chunks, sections)."""
    entries = np.zeros(len(states), tile_entry(extent))
    entries["state"] = states
    entries["sums"][..., : sums.shape[2]] = sums
    return entries.tobytes()


def pack_table(
    tiles: Sequence[bytes],
    steps: np.ndarray[Any, Any],
    record: Record,
    residuals: Sequence[tuple[int, int]] = (),
) -> bytes:
    """`tiles`: of each extent, by pack_tiles(); `steps`: a number per parameter; `residuals`: of RESIDUAL_ENTRY."""
    rest = steps.astype("<f8").tobytes(), np.array([*residuals], RESIDUAL_ENTRY).tobytes()
    return b"".join((*tiles, *rest, record.head(), record.user_state))


def devices_of(shares: Sequence[float], n: int) -> np.ndarray[Any, Any]:
    """The devices (uint32) of the first `n` tiles of an extent.

    Each tile goes to the device that has the least for its share when it has that tile, too, the first of equals: so
    they are through with the first tiles, and with all, as early as can be. Equal shares: tile i on device i mod n.
    """
    load = np.arange(1, n + 1) / np.array(shares, np.float64)[:, None]
    order = np.argsort(load, axis=None, kind="stable")[:n]
    return (order // max(n, 1)).astype(np.uint32)


def all_tiles(manifest: dict[str, Any]) -> list[int]:
    """Of each extent: how many tiles its parameters take, on all devices."""
    ends = [0] * len(manifest["extents"])
    for p in manifest["params"]:
        ends[p["extent"]] = p["start"] + p["numel"]
    return [-(-end // e["tile_elems"]) for end, e in zip(ends, manifest["extents"], strict=True)]


def tiles_on(extent: dict[str, Any], n: int, device: int, devices: int) -> Sequence[int]:
    """Those of the `n` tiles of an extent that are on a device, by their numbers. `extent`: as that device has it."""
    if "tile_numbers" in extent:
        listed: list[int] = extent["tile_numbers"]
        return listed
    if "shares" not in extent:
        return range(device, n, devices)
    found: list[int] = np.flatnonzero(devices_of(extent["shares"], n) == device).tolist()
    return found


def rows_with_residual(manifest: dict[str, Any], device: int) -> list[int]:
    """The parameters whose residuals are on a device."""
    return [row for row, p in enumerate(manifest["params"]) if p.get("residual", {}).get("device") == device]


@dataclass(frozen=True)
class Contents:
    """What a store says of itself at one commit."""

    path: str
    copy: int  # 0 or 1: which one says so
    superblock: Superblock
    manifest: dict[str, Any]
    tiles: np.ndarray[Any, Any]  # of TILE_STATE: those of this device, extent by extent
    sums: list[np.ndarray[Any, Any]]  # of each extent: uint32, of shape (tiles, chunks, sections)
    steps: np.ndarray[Any, Any]
    residuals: np.ndarray[Any, Any]  # of RESIDUAL_ENTRY: those of this device, in the order of the parameters
    record: Record

    @property
    def rank(self) -> int:
        """Of the process whose store it is, among those that train together."""
        return int(self.manifest.get("rank", 0))

    @property
    def world_size(self) -> int:
        """How many processes those are."""
        return int(self.manifest.get("world_size", 1))

    def slots(self) -> Iterator[tuple[dict[str, Any], int, int]]:
        """Of each tile, in the order of `tiles`: its extent, its number there over all devices, its slot's offset."""
        entries = iter(self.tiles["slot"].tolist())
        here = self.superblock.device, self.superblock.devices
        for extent, n in zip(self.manifest["extents"], all_tiles(self.manifest), strict=True):
            size = size_of(sections_of(extent))
            for j, number in enumerate(tiles_on(extent, n, *here)):
                yield extent, number, extent["file_offset"] + (extent["slots"] * j + next(entries)) * size

    def residual_places(self) -> Iterator[tuple[int, int, int]]:
        """Of each residual in this store: the row of its parameter, its offset, its checksum."""
        rows = rows_with_residual(self.manifest, self.superblock.device)
        for row, (space, crc) in zip(rows, self.residuals.tolist(), strict=True):
            place = self.manifest["params"][row]["residual"]
            yield row, place["base"] + space * place["room"], crc

    @property
    def end(self) -> int:
        """Where everything that it names ends: byte of the file."""
        ends = [r.offset(2) for r in (self.superblock.manifest, self.superblock.table)]
        for row in rows_with_residual(self.manifest, self.superblock.device):
            place = self.manifest["params"][row]["residual"]
            ends.append(place["base"] + 2 * place["room"])
        for e in self.manifest["extents"]:
            ends.append(e["file_offset"] + e["slots"] * e["tiles"] * size_of(sections_of(e)))
        return max(ends)


def checked(manifest: dict[str, Any], block: Superblock, size: int) -> dict[str, Any]:
    """A manifest of which everything has the type and the range that it must have, and lies in a file of `size` bytes.

    Raises CSDStoreError. Checksums tell what is damaged; this is for what never was a store of ours.
    """
    require(type(manifest) is dict, "the manifest is no object")
    features = manifest.get("features", [])
    require(type(features) is list and all(type(f) is str for f in features), "features are no names")
    if unknown := {*features} - FEATURES:
        raise CSDStoreError(f"it has {', '.join(sorted(unknown))}, which this csd_optim does not know: upgrade it")
    rule = manifest.get("rule")
    require((rule is not None) == (RULE in features), "the rule has a name where the features say so, and only there")
    require(rule is None or (type(rule) is str and rule.isidentifier()), f"the rule {rule!r}")
    require(block.device < block.devices <= 1 << 16, f"it is device {block.device} of {block.devices}")
    require(max(block.sequence, block.step, block.round) < 1 << 53, "it has made more steps than anybody can")
    rank, world_size = manifest.get("rank", 0), manifest.get("world_size", 1)
    require(type(rank) is int and type(world_size) is int and 0 <= rank < world_size, "rank and world_size")
    for key in ("params", "waiting", "extents"):
        require(type(manifest[key]) is list, f"{key} is no list")
    areas = [(0, 2 * PAGE, "the superblocks")]
    for e, extent in enumerate(manifest["extents"]):
        begin, end = check_extent(extent, block.devices, rule)
        areas.append((begin, end, f"extent {e}"))
    has_codes = any("codec" in e for e in manifest["extents"])
    require(has_codes == (CODEC in features), "extents have codes where the features say codec, and only there")
    require(type(manifest["tiles"]) is int, "tiles is no number")
    require(manifest["tiles"] == sum(e["tiles"] for e in manifest["extents"]), "tiles is not the sum of the extents'")
    last, end = 0, 0  # the extent, and what is taken of it
    for p in manifest["params"]:
        place = check_param(p, block.devices)
        if place and p["residual"]["device"] == block.device:
            areas.append((*place, f"the residual of {p['name']}"))
        require(
            last <= p["extent"] < len(manifest["extents"]), f"parameter {p['name']} is in no extent, or out of order"
        )
        end = end if p["extent"] == last else 0
        require(p["start"] >= end, f"parameter {p['name']} lies where another one does")
        last, end = p["extent"], p["start"] + p["numel"]
        if codes_of := manifest["extents"][last].get("param_dtype"):
            dtype = "float32" if p["dtype"] == "complex64" else p["dtype"]
            right = p["start"] % GROUP == 0 and (dtype == codes_of or p["group"] < 0)
            require(right, f"parameter {p['name']} is {dtype} and lies from {p['start']} on in codes of {codes_of}")
    for e, n in enumerate(all_tiles(manifest)):
        extent = manifest["extents"][e]
        require("shares" not in extent or n * block.devices <= MOST_TILES, f"extent {e} has {n} tiles")
        numbers = tiles_on(extent, n, block.device, block.devices)
        here = len(numbers)
        require(here == 0 or numbers[-1] < n, f"extent {e} has {n} tiles, and not number {max(numbers, default=0)}")
        require(extent["tiles"] == here, f"{extent['tiles']} tiles of extent {e} are here, not {here}")
    for p in manifest["waiting"]:
        check_param(p, block.devices, waits=True)
    for _, end, what in areas:  # of manifest and table, one copy may be cut off: read_region() looks at the other
        require(end <= size, f"{what} ends behind the end of the file")
    for what, region in (("the manifest", block.manifest), ("the table", block.table)):
        require(region.base % PAGE == 0 and region.room % PAGE == 0, f"{what} is not on whole pages")
        require(region.size <= region.room, f"{what} is larger than its room")
        require(region.offset(2) <= MOST, f"{what} ends behind everything")
        areas.append((region.base, region.offset(2), what))
    for (_, end, what), (begin, _, other) in zip(areas := sorted(areas), areas[1:], strict=False):
        require(end <= begin, f"{what} and {other} overlap")
    return manifest


def read_region(fd: int, region: Region, copy: int, what: str, path: str) -> bytes:
    """A manifest or table. Raises CSDStoreError if it is not whole."""
    if region.size > MOST_BYTES or region.offset(copy) + region.size > os.fstat(fd).st_size:
        raise CSDStoreError(f"{path}: the {what} is damaged: the file ends before it does")
    data = read(fd, region.size, region.offset(copy))
    if len(data) != region.size or crc32c(data) != region.crc:
        raise CSDStoreError(f"{path}: the {what} is damaged")
    return data


def superblocks(fd: int, path: str) -> list[tuple[int, Superblock]]:
    """The whole ones with their copy, the newest first."""
    found = [(copy, Superblock.unpack(read(fd, PAGE, copy * PAGE), path)) for copy in range(2)]
    return sorted(((copy, s) for copy, s in found if s), key=lambda pair: -pair[1].sequence)


def unpack(path: str, copy: int, block: Superblock, manifest: bytes, table: bytes, size: int | None) -> Contents:
    """What these say, of a file of `size` bytes. Raises CSDStoreError if it cannot be so. None: it is our own."""
    try:
        about = _json(manifest) if size is None else checked(_json(manifest), block, size)
        at, states, sums = 0, [np.zeros(0, TILE_STATE)], []
        for extent in about["extents"]:
            entries = np.frombuffer(table, tile_entry(extent), extent["tiles"], offset=at)
            require((entries["state"]["slot"] < extent["slots"]).all(), "a tile is in a slot that there is not")
            states.append(entries["state"])
            sums.append(np.ascontiguousarray(entries["sums"][..., : sums_shape(extent)[1]], np.uint32))
            at += entries.nbytes
        steps = np.frombuffer(table, "<f8", len(about["params"]), offset=at)
        require(bool(((steps >= 0) & (steps < 2**53)).all()), "a parameter has made steps that cannot be")
        at += steps.nbytes
        residuals = np.frombuffer(table, RESIDUAL_ENTRY, len(rows_with_residual(about, block.device)), offset=at)
        require((residuals["space"] < 2).all(), "a residual is in a space that there is not")
        record = Record.unpack(table[at + residuals.nbytes :])
        if size is not None:
            check_record(vars(record), about.get("rule"))
    except CSDStoreError as e:
        raise CSDStoreError(f"{path}: {e}") from None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, MemoryError, struct.error) as e:
        raise CSDStoreError(f"{path}: manifest and slot table do not belong together ({e!r})") from e
    return Contents(path, copy, block, about, np.concatenate(states), sums, steps, residuals, record)


def read_commits(fd: int, path: str) -> list[Contents]:
    """The commits that are whole, tiles apart, the newest first. Raises CSDStoreError if there is none."""
    blocks = superblocks(fd, path)
    if not blocks:
        raise CSDStoreError(f"{path} is no csd_optim store, or both of its superblocks are damaged")
    commits: list[Contents] = []
    damage: CSDStoreError | None = None
    for copy, block in blocks:
        if commits and commits[-1].superblock.sequence == block.sequence:
            continue
        try:
            manifest = read_region(fd, block.manifest, copy, "manifest", path)
            table = read_region(fd, block.table, copy, "slot table", path)
            commits.append(unpack(path, copy, block, manifest, table, os.fstat(fd).st_size))
        except CSDStoreError as e:
            damage = damage or e
    if damage and not commits:
        raise damage
    return commits


def store_file(path: Path) -> Path:
    """The store's file, of the file itself or of the directory that holds it."""
    return path / FILE_NAME if path.is_dir() else path


def read_contents(path: Path) -> Contents:
    """The newest commit of a store, read without changing or locking it.

    `path` is the store's directory or the file. Raises FileNotFoundError, CSDStoreError.
    """
    file = store_file(path)
    with opened(file) as fd:
        try:
            return read_commits(fd, str(file))[0]
        except CSDStoreError:
            return read_commits(fd, str(file))[0]  # its owner may have written a newer table while we read the old one
