"""Makes new stores from old ones: lays them out, fills in each new rank's rows, and commits all together.

Old stores are only read. All possible checks come first. Then all new stores are filled, and no store has a commit
until all are complete, flushed and summed. Manifests of new stores have an `origin`: from this a resume knows that a
missing store is an error and not a new beginning, and a second attempt recognises the remains of the first.

One process can make the stores of all new ranks, or each rank can make its own.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from ..devices.spec import DeviceSpec
from ..distributed.ranks import Ranks, all_ranks_or_none
from ..store.format import Contents, Record
from ..store.layout import Extent, extents_of
from ..store.reader import Residual, Tick, Tile, each_tile, total_bytes
from ..store.sections import FP32
from .consolidate import Consolidated, consolidated_stores
from .files import Progress
from .new_stores import NewStores
from .old_params import OldParam, is_divided, old_params
from .parts import Rows, stride_of
from .regroup import Regroup
from .snapshot import Paths
from .targets import check_room

# (manifest's entry of a whole parameter, whether old ranks divided it) → (first row, number of rows) of a new rank's
# part; None: not divided.
Divide = Callable[[dict[str, Any], bool], tuple[int, int] | None]


@dataclass(frozen=True)
class Old:
    """The stores of all ranks of a run, or of a single process, and their parameters."""

    source: Consolidated
    params: list[OldParam]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.source.ranks)

    @property
    def path(self) -> str:
        """The path of one store, for messages."""
        return self.source.contents.path

    @property
    def step(self) -> int:
        return self.source.contents.superblock.step

    @property
    def origin(self) -> dict[str, Any]:
        """The `origin` in manifests of new stores."""
        block = self.source.contents.superblock
        return {
            "store_id": block.store_id.hex(),
            "round": block.round,
            "step": block.step,
            "world_size": self.size,
            "sequences": [recovered[0].superblock.sequence for recovered, _ in self.source.ranks],
        }

    @property
    def user_states(self) -> list[bytes]:
        """The packed `user_state` of each rank."""
        return [recovered[0].record.user_state for recovered, _ in self.source.ranks]

    def record(self, rank: int) -> Record:
        """Return the record of a new rank, with the `user_state` of the old rank of that number, or of rank 0."""
        packed = self.user_states
        return replace(self.source.contents.record, user_state=packed[rank if rank < self.size else 0])


@contextlib.contextmanager
def old_stores(paths: Paths) -> Iterator[Old]:
    """Open stores at the last step that all ranks have, locked for reading; see old_params().

    Raises CSDBusyError, CSDStoreError, CSDOSError.
    """
    with consolidated_stores(paths) as source:
        yield Old(source, sorted(old_params(source), key=lambda p: (p.extent, p.kind[0], str(p.kind[1:]))))


@dataclass(frozen=True)
class NewRank:
    """A new rank: its stores, and by parameter its part, the part's extent, and the first element there."""

    rank: int
    stores: NewStores
    parts: list[Rows]
    extents: list[int]
    starts: list[int]
    regroups: dict[int, Regroup]  # by parameter whose codes cannot be copied unchanged
    described: dict[str, Any]  # the manifest without extents and rank


def lay_out(
    old: Old, specs: Sequence[DeviceSpec], rank: int, size: int, rows_for: Divide, tile_elems: int | None
) -> NewRank:
    """Lay out the extents and residuals of new rank `rank` of `size`. Nothing is written or opened."""
    stores = NewStores(specs, rank, size, tile_elems)
    blocks = [rows_for(p.entry, p.is_divided) for p in old.params]
    parts = [p.whole.part(*block or (0, p.whole.rows)) for p, block in zip(old.params, blocks, strict=True)]
    extents: list[int] = []
    starts: list[int] = []
    regroups: dict[int, Regroup] = {}
    described: list[dict[str, Any]] = []
    kinds = [(p.extent, p.kind) for p in old.params]
    for e, kind in enumerate(dict.fromkeys(kinds)):
        members = [i for i, other in enumerate(kinds) if other == kind]  # adjacent, as the parameters are sorted
        extent = stores.add([parts[i].numel for i in members], kind[1])
        for i, start in zip(members, extent.starts, strict=True):
            about = _part_entry(old.params[i].entry, blocks[i])
            stride = stride_of(about["shape"], old.params[i].whole.order)
            described.append({**about, "stride": stride, "extent": e, "start": start, "numel": parts[i].numel})
            extents.append(e)
            starts.append(start)
            if kind[1][1] != FP32 and not all(p.keeps_groups(parts[i]) for _, p in old.params[i].sources.values()):
                regroups[i] = stores.add_regroup(e, start, parts[i].numel)
            if old.params[i].has_residual:
                stores.add_residual(i, parts[i].numel)
    manifest = old.source.ranks[0][0][0].manifest
    rule = {"rule": manifest["rule"]} if "rule" in manifest else {}
    about = {"origin": old.origin, **rule, "params": described, "waiting": _waiting(old, rows_for)}
    return NewRank(rank, stores, parts, extents, starts, regroups, about)


def _waiting(old: Old, rows_for: Divide) -> list[dict[str, Any]]:
    """Return the manifest's entries of the parameters without states."""
    with_states = {(p.entry["group"], p.entry["position"]) for p in old.params}
    by_place: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
    for rank, (recovered, _) in enumerate(old.source.ranks):
        for p in recovered[0].manifest["waiting"]:
            by_place.setdefault((p["group"], p["position"]), {})[rank] = p
    found = []
    for place, entries in by_place.items():
        if place not in with_states:
            p = entries[min(entries)]
            whole = {**p, "shape": p["of"]["shape"]} if "of" in p else p
            block = rows_for(whole, is_divided(entries)) if whole["shape"] else None
            found.append(_part_entry(whole, block))
    return found


def _part_entry(p: dict[str, Any], block: tuple[int, int] | None) -> dict[str, Any]:
    """Return the manifest's entry of a part of a parameter, without its place.

    `p`: the entry of the whole parameter.
    """
    entry: dict[str, Any] = {key: p[key] for key in ("name", "group", "position", "shape", "dtype", "rule") if key in p}
    if block and p["shape"]:
        first, rows = block
        shape = p["shape"]
        entry["shape"] = [rows, *shape[1:]]
        entry["of"] = {"shape": shape, "first": [first, *[0] * (len(shape) - 1)]}
    return entry


def make_stores(old: Old, new: Sequence[NewRank], ranks: Ranks | None, size: int, progress: Progress) -> None:
    """Make the stores of new ranks, which are some or all of `size`.

    With `ranks` a collective: each rank makes its own stores; all succeed or none. Raises CSDStoreError,
    CSDStoreExistsError, CSDBusyError, CSDOSError. If stopped, some new stores may have a commit; the same call then
    makes all again.
    """
    with ExitStack() as stack:
        with all_ranks_or_none(ranks):
            check_room([(s, r.stores.bytes_on(d)) for r in new for d, s in enumerate(r.stores.specs)])
        with all_ranks_or_none(ranks):
            for r in new:
                stack.callback(r.stores.close)
                r.stores.open()
            for r in new:
                r.stores.allocate(r.described)
        store_id = secrets.token_bytes(16)
        if ranks:
            store_id = ranks.gather_objects(store_id)[0]
        block = replace(old.source.contents.superblock, store_id=store_id, round=1 if size > 1 else 0)
        with all_ranks_or_none(ranks):
            copies = [_Copy(recovered, k, old.params, new) for k, (recovered, _) in enumerate(old.source.ranks)]
            total = sum(copy.size for copy in copies) + sum(r.stores.content_bytes for r in new)
            with progress("resharding", total) as tick:
                for copy in copies:
                    copy.run(tick)
                for r in new:
                    r.stores.stage(block, [p.step for p in old.params], old.record(r.rank), tick)
        for number in range(2):
            with all_ranks_or_none(ranks):
                for r in new:
                    r.stores.publish(number)


class _Copy:
    """The copy of an old rank's parts to new ranks. Reads only tiles with rows of these new ranks."""

    def __init__(
        self, recovered: list[Contents], rank: int, params: Sequence[OldParam], new: Sequence[NewRank]
    ) -> None:
        self._recovered, self._new = recovered, new
        self._parts = {}  # by row of the old rank: number of the parameter, and the old rank's part
        for i, p in enumerate(params):
            if rank in p.sources:
                row, part = p.sources[rank]
                self._parts[row] = i, part
        self._extents: list[Extent] = extents_of(recovered)
        self.size: int = total_bytes(recovered, self._takes)

    def run(self, tick: Tick) -> None:
        each_tile(self._recovered, self._copy_tile, self._copy_residual, tick=tick, takes=self._takes)

    def _takes(self, what: Tile | Residual) -> bool:
        """Return whether some new rank has a row of this tile or residual."""
        if isinstance(what, Residual):
            pieces = [(what.row, 0, self._parts[what.row][1].numel)] if what.row in self._parts else []
        else:
            pieces = [(row, first, n) for row, first, _, n in self._pieces(what)]
        return any(any(self._runs(*piece)) for piece in pieces)

    def _pieces(self, tile: Tile) -> Iterator[tuple[int, int, int, int]]:
        """Yield the wanted pieces of a tile: row, first element, its index in the tile, number of elements."""
        for row, _, first, at, n in self._extents[tile.extent].pieces_in(tile.number).tolist():
            if row in self._parts:
                yield row, first, at, n

    def _runs(self, row: int, first: int, n: int) -> Iterator[tuple[NewRank, int, int, int, int]]:
        """Yield the destinations of elements: new rank, parameter, first element here and there, number of elements."""
        i, part = self._parts[row]
        for r in self._new:
            for here, there, count in part.shared(r.parts[i], first, n):
                yield r, i, here, there, count

    def _copy_tile(self, tile: Tile, data: memoryview | None) -> None:
        if data is None:  # zeros, as in the new stores
            return
        for row, first, at, n in self._pieces(tile):
            for r, i, here, there, count in self._runs(row, first, n):
                to, begin, regroup = r.starts[i] + there, at + here - first, r.regroups.get(i)
                r.stores.fill(r.extents[i], to, count, tile, data, begin, regrouped=regroup is not None)
                if regroup:
                    regroup.collect(tile, data, begin, there, count)

    def _copy_residual(self, residual: Residual, begin: int, data: memoryview) -> None:
        if residual.row in self._parts:
            values = data.cast("H")
            first = begin // values.itemsize
            for r, i, here, there, count in self._runs(residual.row, first, len(values)):
                r.stores.fill_residual(i, there, values[here - first : here - first + count].cast("B"))
