"""The on-disk format of a store: pack and unpack, read and check. docs/store-format.md describes each byte.

    superblock 0 | superblock 1 | extents, residuals, spaces for two manifests and two tables, in order of allocation

The manifest says what the store holds (names, shapes, dtypes, places). The table says where its state is at a step: the
current slot and the checksums of every tile, the step counters, the current space and the checksum of every residual,
the hyperparameters, and user_state. Superblock, manifest and table exist twice. A copy is whole only if all its three
parts are. A commit writes copy 0 on all devices, and then copy 1. So one copy is whole at any time, and both copies are
between commits.

Both copies are of the last step, instead of alternating between the last two steps. A crash leaves a whole copy either
way. But this way any of the six parts may also be lost at rest, to an unreadable sector, and the other copy serves.
With alternation the last step would be lost with the newer copy, and everything would be lost if the next step had
begun, since it overwrites the states of the older copy. The price is a second small write and flush, concurrent with
the next forward.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..bindings import crc32c
from ..errors import CSDStoreError
from ..files import opened, read
from . import sections
from .check import (
    MAX_REGION_BYTES,
    MAX_SIZE,
    MAX_TILES,
    check_extent,
    check_origin,
    check_param,
    check_record,
    check_rules,
    require,
)
from .sections import EIGHT_BIT, GROUP, sections_of, size_of

FILE_NAME = "csd_optim.store"
MAGIC = b"CSDOPTIM"
# Formats 1 to 3 imply features: 2 has residuals, 3 unequal shares of the devices and perhaps residuals. From format 4
# on the manifest names the features that a reader has to support, and a reader refuses the store if it lacks a named
# feature. A store without newer features is written in the older format.
VERSION = NAMED_FEATURES = 4
CODEC = "codec"  # extents[].codec and .param_dtype: tiles hold codes of the states; otherwise fp32
CODECS = "codecs"  # extents[].codec has other values than "8bit"
CHUNK_SUMS = "chunk_sums"  # extents[].sum_elems: number of elements of a section per checksum; otherwise all
DIVIDED = "divided"  # divided: the whole model of an optimizer rank's parameters, see joined.py
ORIGIN = "origin"  # origin: the stores from which this store was made; see Contents.origin
RESIDUALS = "residuals"  # params[].residual
RULE = "rule"  # rule: the update rule, which defines the sections; otherwise AdamW
RULES = "rules"  # params[].rule, waiting[].rule: where a parameter's rule is not the store's; also in record.groups
SHARES = "shares"  # extents[].shares
TILE_NUMBERS = "tile_numbers"  # extents[].tile_numbers: the tiles of this device, which otherwise follow from shares
FREED = "freed"  # extents[].freed: tiles that were given back; their space may be in use again
FEATURES = frozenset({CHUNK_SUMS, CODEC, CODECS, DIVIDED, FREED, ORIGIN, RESIDUALS, RULE, RULES, SHARES, TILE_NUMBERS})
ENDIAN = 0x01020304
PAGE = sections.PAGE
CLEAN = 1  # flag: the store was closed properly, and nothing was written since
UNDER_WAY = 2  # flag of stores with one slot per tile: a step has begun, and may have written some tiles

_REGION = struct.Struct("<QQQI")
# magic, version, endianness, store id, device index, devices, sequence, step, flags; then the regions of manifest and
# table and the round, then zeros up to the checksum of all this in the last 4 bytes.
_SUPERBLOCK = struct.Struct("<8sII16sIIQQI")
_ROUND = struct.Struct("<Q")
TILE_STATE = np.dtype([("slot", "<u4"), ("summed", "<u4")])
RESIDUAL_BYTES = 2  # per element: bfloat16
RESIDUAL_ENTRY = np.dtype([("space", "<u4"), ("crc", "<u4")])


class Region(NamedTuple):
    """The place of a manifest or table: two adjacent spaces of `room` bytes from `base` on, one for each copy."""

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
    round: int = 0  # number of commits that the ranks have made together, including this one; 0: a single process

    def pack(self) -> bytes:
        head = _SUPERBLOCK.pack(
            MAGIC, self.version, ENDIAN, self.store_id, self.device, self.devices, self.sequence, self.step, self.flags
        )
        regions = _REGION.pack(*self.manifest) + _REGION.pack(*self.table)
        body = (head + regions + _ROUND.pack(self.round)).ljust(PAGE - 4, b"\0")
        return body + struct.pack("<I", crc32c(body))

    @classmethod
    def unpack(cls, block: bytes, path: str) -> Superblock | None:
        """Return the superblock in a block; None if it is not valid. Raises CSDStoreError for an unknown format."""
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
    """The part of a commit besides the states; the same on all devices except for `written_bytes`."""

    groups: list[dict[str, Any]] = field(default_factory=list)  # hyperparameters that the step used
    given: list[dict[str, Any]] = field(default_factory=list)  # hyperparameters when the groups were created
    user_state: bytes = b""  # in the format of torch.save; empty: none
    seconds: float = 0.0  # duration of training so far, summed from step to step
    written_bytes: int = 0  # bytes of states and residuals written to this device since the store was created

    def head(self) -> bytes:
        """Return the packed record up to `user_state`, which may be large."""
        data = json.dumps({k: v for k, v in vars(self).items() if k != "user_state"}).encode()
        return struct.pack("<I", len(data)) + data

    @classmethod
    def unpack(cls, data: bytes) -> Record:
        end = 4 + struct.unpack_from("<I", data)[0]
        return cls(**_json(data[4:end]), user_state=data[end:])


def _json(data: bytes) -> Any:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        require(len(found := dict(pairs)) == len(pairs), "JSON with a key twice")
        return found

    return json.loads(data, object_pairs_hook=without_duplicates)


def features_of(
    extents: Sequence[dict[str, Any]], *, residuals: bool, rule: bool, rules: bool, origin: bool, divided: bool
) -> set[str]:
    """Return the features that readers of a store with these extents must support.

    `rule`, `origin`, `divided`: the manifest has such an entry. `rules`: see has_rules().
    """
    uses = {
        CHUNK_SUMS: any("sum_elems" in e for e in extents),
        CODEC: any("codec" in e for e in extents),
        CODECS: _has_other_codecs(extents),
        DIVIDED: divided,
        FREED: any("freed" in e for e in extents),
        ORIGIN: origin,
        RESIDUALS: residuals,
        RULE: rule,
        RULES: rules,
        SHARES: any("shares" in e for e in extents),
        TILE_NUMBERS: any("tile_numbers" in e for e in extents),
    }
    return {feature for feature, used in uses.items() if used}


def _has_other_codecs(extents: Sequence[dict[str, Any]]) -> bool:
    return any(e.get("codec", EIGHT_BIT) != EIGHT_BIT for e in extents)


def has_rules(manifest: dict[str, Any]) -> bool:
    """Return whether some parameter has another rule than the store's."""
    return any("rule" in p for p in (*manifest["params"], *manifest.get("waiting", ())))


def version_of(features: set[str]) -> int:
    """Return the oldest format that has these features."""
    if features - {RESIDUALS, SHARES}:
        return NAMED_FEATURES
    return 3 if SHARES in features else 2 if RESIDUALS in features else 1


def sums_shape(extent: dict[str, Any]) -> tuple[int, int]:
    """Return the shape of a tile's checksums: (chunks, sections)."""
    chunks = math.ceil(extent["tile_elems"] / extent.get("sum_elems", extent["tile_elems"]))
    return chunks, len(sections_of(extent))


def tile_entry(extent: dict[str, Any]) -> np.dtype[Any]:
    """Return the dtype of a tile's table entry: its state, and the checksums of each chunk, one per section."""
    chunks, sections = sums_shape(extent)
    # Formats up to 3 have one chunk, and always room for a fourth section.
    return np.dtype([("state", TILE_STATE), ("sums", "<u4", (chunks, sections if "sum_elems" in extent else 4))])


def pack_tiles(extent: dict[str, Any], states: np.ndarray[Any, Any], sums: np.ndarray[Any, Any]) -> bytes:
    """Return the table entries of an extent's tiles.

    `states`: TILE_STATE; `sums`: uint32, of shape (tiles, chunks, sections).
    """
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
    """Return the packed table.

    `tiles`: of each extent, by pack_tiles(); `steps`: by row; `residuals`: RESIDUAL_ENTRY each.
    """
    tail = steps.astype("<f8").tobytes(), np.array([*residuals], RESIDUAL_ENTRY).tobytes()
    return b"".join((*tiles, *tail, record.head(), record.user_state))


def devices_of(shares: Sequence[float], n: int) -> np.ndarray[Any, Any]:
    """Return the devices (uint32) of the first `n` tiles of an extent.

    Each tile goes to the device whose load, including this tile, is the least relative to its share; ties go to the
    first device. So the devices finish all tiles, and any number of first tiles, as early as possible. With equal
    shares tile i is on device i mod the number of devices.
    """
    load = np.arange(1, n + 1) / np.array(shares, np.float64)[:, None]
    order = np.argsort(load, axis=None, kind="stable")[:n]
    return (order // max(n, 1)).astype(np.uint32)


def all_tiles(manifest: dict[str, Any]) -> list[int]:
    """Return the number of tiles of each extent, over all devices."""
    ends = [0] * len(manifest["extents"])
    for p in manifest["params"]:
        ends[p["extent"]] = p["start"] + p["numel"]
    return [-(-end // e["tile_elems"]) for end, e in zip(ends, manifest["extents"], strict=True)]


def tiles_on(extent: dict[str, Any], n: int, device: int, devices: int) -> Sequence[int]:
    """Return the numbers of the tiles, of an extent's `n`, on a device. `extent`: from the device's manifest."""
    if "tile_numbers" in extent:
        listed: list[int] = extent["tile_numbers"]
        return listed
    if "shares" not in extent:
        return range(device, n, devices)
    found: list[int] = np.flatnonzero(devices_of(extent["shares"], n) == device).tolist()
    return found


def areas_of(extent: dict[str, Any]) -> list[tuple[int, int]]:
    """Return (begin, end) of the areas of an extent's tiles on this device, without freed tiles, in order.

    Empty if the extent has no tiles here: its offset may lie in another extent then.
    """
    begin, size = extent["file_offset"], extent["slots"] * size_of(sections_of(extent))
    ends = [-1, *extent.get("freed", ()), extent["tiles"]]
    return [(begin + size * (a + 1), begin + size * b) for a, b in pairwise(ends) if a + 1 < b]


def rows_with_residual(manifest: dict[str, Any], device: int) -> list[int]:
    """Return the rows of the parameters whose residuals are on a device."""
    return [row for row, p in enumerate(manifest["params"]) if p.get("residual", {}).get("device") == device]


@dataclass(frozen=True)
class Contents:
    """The description of a store at one commit: everything except the states and residuals."""

    path: str
    copy: int  # 0 or 1: which copy was read
    superblock: Superblock
    manifest: dict[str, Any]
    tiles: np.ndarray[Any, Any]  # dtype TILE_STATE: the tiles of this device, extent by extent
    sums: list[np.ndarray[Any, Any]]  # per extent: uint32, shape (tiles, chunks, sections)
    steps: np.ndarray[Any, Any]
    residuals: np.ndarray[Any, Any]  # dtype RESIDUAL_ENTRY: residuals on this device, in the order of the parameters
    record: Record

    @property
    def rank(self) -> int:
        """The rank of the process that owns the store."""
        return int(self.manifest.get("rank", 0))

    @property
    def world_size(self) -> int:
        """The number of processes that train together."""
        return int(self.manifest.get("world_size", 1))

    @property
    def origin(self) -> dict[str, Any] | None:
        """The commit of other stores from which this store was made (reshard, resume_from), or None."""
        origin: dict[str, Any] | None = self.manifest.get("origin")
        return origin

    def slots(self) -> Iterator[tuple[dict[str, Any], int, int]]:
        """Yield (extent, number in it over all devices, offset of the current slot), in the order of `tiles`."""
        entries = iter(self.tiles["slot"].tolist())
        here = self.superblock.device, self.superblock.devices
        for extent, n in zip(self.manifest["extents"], all_tiles(self.manifest), strict=True):
            size = size_of(sections_of(extent))
            for j, number in enumerate(tiles_on(extent, n, *here)):
                yield extent, number, extent["file_offset"] + (extent["slots"] * j + next(entries)) * size

    def are_freed(self) -> Iterator[bool]:
        """Yield whether each tile was freed, in the order of `tiles`."""
        for extent in self.manifest["extents"]:
            freed = {*extent.get("freed", ())}
            yield from (j in freed for j in range(extent["tiles"]))

    def are_named(self) -> np.ndarray[Any, Any]:
        """Return which tiles were not freed: bool, in the order of `tiles`."""
        return ~np.fromiter(self.are_freed(), bool, len(self.tiles))

    def residual_places(self) -> Iterator[tuple[int, int, int]]:
        """Yield (row of the parameter, offset, checksum) of each residual in this store."""
        rows = rows_with_residual(self.manifest, self.superblock.device)
        for row, (space, crc) in zip(rows, self.residuals.tolist(), strict=True):
            place = self.manifest["params"][row]["residual"]
            yield row, place["base"] + space * place["room"], crc

    @property
    def end(self) -> int:
        """The byte at which the file's last area ends."""
        return max(end for _, end in self._areas())

    def unused(self) -> list[tuple[int, int]]:
        """Return the parts of the file before `end` that were given back: (offset, size), ascending."""
        if not any(p["group"] < 0 for p in self.manifest["params"]):
            return []
        areas = sorted(self._areas())  # without overlaps
        gaps = ((end, begin - end) for (_, end), (begin, _) in pairwise(areas))
        return [(offset, size) for offset, size in gaps if size]

    def _areas(self) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of each area of the file."""
        yield 0, 2 * PAGE
        for region in (self.superblock.manifest, self.superblock.table):
            yield region.base, region.offset(2)
        for row in rows_with_residual(self.manifest, self.superblock.device):
            place = self.manifest["params"][row]["residual"]
            yield place["base"], place["base"] + 2 * place["room"]
        for extent in self.manifest["extents"]:
            yield from areas_of(extent)


def checked_manifest(manifest: dict[str, Any], block: Superblock, size: int) -> dict[str, Any]:
    """Return the manifest if all its values have valid types and ranges, and all areas lie in a file of `size` bytes.

    Raises CSDStoreError if not. Checksums detect damage; these checks detect files that csd_optim never wrote.
    """
    require(type(manifest) is dict, "the manifest is no object")
    features = manifest.get("features", [])
    require(type(features) is list and all(type(f) is str for f in features), "features are no names")
    if unknown := {*features} - FEATURES:
        raise CSDStoreError(f"it has {', '.join(sorted(unknown))}, which this csd_optim does not know: upgrade it")
    rule = manifest.get("rule")
    require((rule is not None) == (RULE in features), "it names a rule, but its features lack 'rule', or the reverse")
    require(rule is None or (type(rule) is str and rule.isidentifier()), f"the rule {rule!r}")
    require(("origin" in manifest) == (ORIGIN in features), "it has an origin, but not as a feature, or the reverse")
    require((DIVIDED in manifest) == (DIVIDED in features), "it is divided, but not as a feature, or the reverse")
    if "origin" in manifest:
        check_origin(manifest["origin"])
    require(block.device < block.devices <= 1 << 16, f"it is device {block.device} of {block.devices}")
    require(max(block.sequence, block.step, block.round) < 1 << 53, "its sequence, step or round is too large")
    rank, world_size = manifest.get("rank", 0), manifest.get("world_size", 1)
    require(type(rank) is int and type(world_size) is int and 0 <= rank < world_size, "rank and world_size")
    for key in ("params", "waiting", "extents"):
        require(type(manifest[key]) is list, f"{key} is no list")
    areas = [(0, 2 * PAGE, "the superblocks")]
    for e, extent in enumerate(manifest["extents"]):
        check_extent(extent, block.devices, RULES if rule is None and RULES in features else rule)
        areas += [(*area, f"extent {e}") for area in areas_of(extent)]
    require(
        any("freed" in e for e in manifest["extents"]) == (FREED in features), "tiles were freed, but not as feature"
    )
    has_codes = any("codec" in e for e in manifest["extents"])
    require(has_codes == (CODEC in features), "extents have codes, but its features lack 'codec', or the reverse")
    others = _has_other_codecs(manifest["extents"])
    require(others == (CODECS in features), "extents have codecs, but not as a feature, or the reverse")
    require(type(manifest["tiles"]) is int, "tiles is no number")
    require(manifest["tiles"] == sum(e["tiles"] for e in manifest["extents"]), "tiles is not the sum of the extents'")
    last, end = 0, 0  # the current extent, and the first free element there
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
            valid = p["start"] % GROUP == 0 and (dtype == codes_of or p["group"] < 0)
            require(valid, f"parameter {p['name']} is {dtype} and lies from {p['start']} on in codes of {codes_of}")
    present: dict[int, list[dict[str, Any]]] = {}  # by extent: parameters that have not left
    for p in manifest["params"]:
        if p["group"] >= 0:
            present.setdefault(p["extent"], []).append(p)
    for e, n in enumerate(all_tiles(manifest)):
        extent = manifest["extents"][e]
        require("shares" not in extent or n * block.devices <= MAX_TILES, f"extent {e} has {n} tiles")
        numbers = tiles_on(extent, n, block.device, block.devices)
        here = len(numbers)
        require(here == 0 or numbers[-1] < n, f"extent {e} has {n} tiles, and not number {max(numbers, default=0)}")
        require(extent["tiles"] == here, f"{extent['tiles']} tiles of extent {e} are here, not {here}")
        freed = {numbers[j] for j in extent.get("freed", ())}
        for p in present.get(e, ()) if freed else ():
            tiles = range(p["start"] // extent["tile_elems"], -(-(p["start"] + p["numel"]) // extent["tile_elems"]))
            require(freed.isdisjoint(tiles), f"parameter {p['name']} lies in a tile that was freed")
    for p in manifest["waiting"]:
        check_param(p, block.devices, is_waiting=True)
    require(has_rules(manifest) == (RULES in features), "parameters have rules, but not as a feature, or the reverse")
    if RULES in features:
        check_rules(manifest, [e["sections"] for e in manifest["extents"]])
    for _, end, what in areas:  # not manifest and table: if one copy is cut off, the other is used
        require(end <= size, f"{what} ends beyond the end of the file")
    for what, region in (("the manifest", block.manifest), ("the table", block.table)):
        require(region.base % PAGE == 0 and region.room % PAGE == 0, f"{what} is not on whole pages")
        require(region.size <= region.room, f"{what} is larger than its room")
        require(region.offset(2) <= MAX_SIZE, f"{what} ends beyond any file")
        areas.append((region.base, region.offset(2), what))
    for (_, end, what), (begin, _, other) in zip(areas := sorted(areas), areas[1:], strict=False):
        require(end <= begin, f"{what} and {other} overlap")
    return manifest


def read_region(fd: int, region: Region, copy: int, what: str, path: str) -> bytes:
    """Read one copy of a manifest or table. Raises CSDStoreError if the copy is not whole."""
    if region.size > MAX_REGION_BYTES or region.offset(copy) + region.size > os.fstat(fd).st_size:
        raise CSDStoreError(f"{path}: the {what} is damaged: the file ends before it does")
    data = read(fd, region.size, region.offset(copy))
    if len(data) != region.size or crc32c(data) != region.crc:
        raise CSDStoreError(f"{path}: the {what} is damaged")
    return data


def superblocks(fd: int, path: str) -> list[tuple[int, Superblock]]:
    """Return the valid superblocks, each with its copy's number: the newest first, and copy 1 first among equals."""
    found = [(copy, Superblock.unpack(read(fd, PAGE, copy * PAGE), path)) for copy in range(2)]
    return sorted(((copy, s) for copy, s in found if s), key=lambda pair: (-pair[1].sequence, -pair[0]))


def unpack(path: str, copy: int, block: Superblock, manifest: bytes, table: bytes, size: int | None) -> Contents:
    """Return the contents from superblock, manifest and table. Raises CSDStoreError if they are not plausible.

    `size`: bytes of the file; None: skip the plausibility checks, because this process has written the store.
    """
    try:
        description = _json(manifest) if size is None else checked_manifest(_json(manifest), block, size)
        at, states, sums = 0, [np.zeros(0, TILE_STATE)], []
        for extent in description["extents"]:
            entries = np.frombuffer(table, tile_entry(extent), extent["tiles"], offset=at)
            require((entries["state"]["slot"] < extent["slots"]).all(), "a tile is in a slot that does not exist")
            states.append(entries["state"])
            sums.append(np.ascontiguousarray(entries["sums"][..., : sums_shape(extent)[1]], np.uint32))
            at += entries.nbytes
        steps = np.frombuffer(table, "<f8", len(description["params"]), offset=at)
        require(bool(((steps >= 0) & (steps < 2**53)).all()), "a parameter has an impossible step count")
        at += steps.nbytes
        residuals = np.frombuffer(table, RESIDUAL_ENTRY, len(rows_with_residual(description, block.device)), offset=at)
        require((residuals["space"] < 2).all(), "a residual is in a space that does not exist")
        record = Record.unpack(table[at + residuals.nbytes :])
        if size is not None:
            check_record(vars(record), description.get("rule"))
    except CSDStoreError as e:
        raise CSDStoreError(f"{path}: {e}") from None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, MemoryError, struct.error) as e:
        raise CSDStoreError(f"{path}: manifest and slot table do not belong together ({e!r})") from e
    return Contents(path, copy, block, description, np.concatenate(states), sums, steps, residuals, record)


def read_commits(fd: int, path: str) -> list[Contents]:
    """Return the whole commits, the newest first, without checks of tiles. Raises CSDStoreError if there is none."""
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
    """Return the file of a store. `path`: the file or its directory."""
    return path / FILE_NAME if path.is_dir() else path


def read_contents(path: Path) -> Contents:
    """Return the newest commit of a store, read without changing or locking it.

    `path` is the store's directory or the file. Raises FileNotFoundError, CSDStoreError.
    """
    file = store_file(path)
    with opened(file) as fd:
        try:
            return read_commits(fd, str(file))[0]
        except CSDStoreError:
            return read_commits(fd, str(file))[0]  # the owner may have written a newer table meanwhile
