"""Reshard: makes the stores of M ranks from those of N, element by element, without an optimizer or other processes.

Old stores are only read. Everything that can be known is checked first. Then all new stores are filled, and none has a
commit until all are complete, flushed and summed. Their manifests have an `origin`, by which a resume knows that a
missing store among them is an error and no beginning, and a second attempt recognises what the first one has left.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from ..errors import CSDStoreError, CSDValueError
from ..store.format import Contents, Record
from ..store.layout import extents_of
from ..store.reader import Residual, Tick, Tile, each_tile, total_bytes
from ..store.sections import FP32
from .consolidate import Consolidated, consolidated_stores
from .files import Progress, no_progress
from .new_stores import NewStores
from .old_params import OldParam, is_divided, old_params
from .parts import Rows, Whole, stride_of
from .snapshot import Paths
from .targets import are_made, check_room, specs_of_ranks

SHARDINGS = ("none", "ddp", "fsdp2")


@dataclass(frozen=True)
class _NewRank:
    """A new rank: its stores, and for each parameter its part, the extent that it is in, and where it begins there."""

    stores: NewStores
    parts: list[Rows]
    extents: list[int]
    starts: list[int]
    described: dict[str, Any]  # the manifest, but for extents and rank


def reshard(
    old: Paths,
    to: Sequence[str],
    ranks: int,
    *,
    sharding: str | None = None,
    tile_elems: int | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Make the stores of `ranks` ranks, which resume where those in `old` have ended. Returns a description of them.

    `old`: the directories of all devices of all ranks, or of a process on its own. `to`: the new directories, with
    {rank}; several, or several separated by commas, are the devices of a rank. `sharding`: "none" gives each rank all
    states (sharded=False), "ddp" and "fsdp2" its rows, which are the same ones; None: as the old ranks have them, and
    from a process on its own, rows.

    If an earlier call was stopped, the same call begins again; if that had made everything, it does nothing. Raises
    CSDValueError, CSDStoreError, CSDStoreExistsError, CSDBusyError, CSDOSError.
    """
    if sharding not in (None, *SHARDINGS):
        raise CSDValueError(f"Invalid sharding: {sharding!r} is not one of {', '.join(SHARDINGS)}")
    if ranks < 1:
        raise CSDValueError(f"Invalid ranks: {ranks}")
    specs = specs_of_ranks(to, ranks)
    with consolidated_stores(old) as source, ExitStack() as stack:
        params = sorted(old_params(source), key=lambda p: (p.extent, p.kind[0], str(p.kind[1:])))
        block, size = source.contents.superblock, len(source.ranks)
        origin = {
            "store_id": block.store_id.hex(),
            "round": block.round,
            "step": block.step,
            "world_size": size,
            "sequences": [recovered[0].superblock.sequence for recovered, _ in source.ranks],
        }
        found = {
            "devices": [[str(spec) for spec in of_rank] for of_rank in specs],
            "step": block.step,
            "params": sum(p.whole.of_rank(0, 1, divided=False).numel for p in params),
            "ranks": ranks,
            "of_ranks": size,
            "user_states_differ": size != ranks and len({_user_state(source, rank) for rank in range(size)}) > 1,
        }
        if are_made(specs, source.stores, origin):
            return {**found, "made_before": True}
        new = []
        for rank, of_rank in enumerate(specs):
            stores = NewStores(of_rank, rank, ranks, tile_elems)
            stack.callback(stores.close)
            new.append(_laid_out(stores, params, source, rank, ranks, sharding, origin))
        _check_codes(params, new)
        check_room([(s, r.stores.bytes_on(d)) for r in new for d, s in enumerate(r.stores.specs)])
        for r in new:
            r.stores.open()
        for r in new:
            r.stores.allocate(r.described)
        read = [recovered for rank, (recovered, _) in enumerate(source.ranks) if any(rank in p.sources for p in params)]
        total = sum(map(total_bytes, read)) + sum(r.stores.content_bytes for r in new)
        first = replace(block, store_id=secrets.token_bytes(16), round=1 if ranks > 1 else 0)
        with progress("resharding", total) as tick:
            for rank, (recovered, _) in enumerate(source.ranks):
                _copy(recovered, rank, params, new, tick)
            for rank, r in enumerate(new):
                r.stores.stage(first, [p.step for p in params], _record(source, rank), tick)
        for copy in range(2):
            for r in new:
                r.stores.publish(copy)
        return {**found, "made_before": False}


def _user_state(source: Consolidated, rank: int) -> bytes:
    return source.ranks[rank][0][0].record.user_state


def _record(source: Consolidated, rank: int) -> Record:
    """Return the record of a new rank: its `user_state` is that of the same old rank, or else of rank 0."""
    same = rank if rank < len(source.ranks) else 0
    return replace(source.contents.record, user_state=_user_state(source, same))


# ---- the layout of a new rank ------------------------------------------------------


def _divides(was_divided: bool, old_size: int, sharding: str | None) -> bool:
    """Return whether new ranks divide a parameter."""
    return sharding != "none" if sharding or old_size == 1 else was_divided


def _laid_out(
    stores: NewStores,
    params: Sequence[OldParam],
    source: Consolidated,
    rank: int,
    size: int,
    sharding: str | None,
    origin: dict[str, Any],
) -> _NewRank:
    """Lay out the extents and residuals of a new rank."""
    old_size = len(source.ranks)
    divided = [size > 1 and _divides(p.is_divided, old_size, sharding) for p in params]
    parts = [p.whole.of_rank(rank, size, divided=d) for p, d in zip(params, divided, strict=True)]
    extents: list[int] = []
    starts: list[int] = []
    described: list[dict[str, Any]] = []
    kinds = [(p.extent, p.kind) for p in params]
    for e, kind in enumerate(dict.fromkeys(kinds)):
        members = [i for i, other in enumerate(kinds) if other == kind]  # adjacent, as the parameters are sorted
        extent = stores.add([parts[i].numel for i in members], kind[1])
        for i, start in zip(members, extent.starts, strict=True):
            about = _part_entry(params[i].entry, rank, size, divided=divided[i])
            stride = stride_of(about["shape"], params[i].whole.order)
            place = {"extent": e, "start": start, "numel": parts[i].numel}
            described.append({**about, "stride": stride, **place})
            extents.append(e)
            starts.append(start)
            if params[i].has_residual:
                stores.add_residual(i, parts[i].numel)
    first = source.ranks[0][0][0].manifest
    placed = {(p.entry["group"], p.entry["position"]) for p in params}
    waiting = []
    for p in first["waiting"]:
        if (p["group"], p["position"]) not in placed:
            whole = {**p, "shape": p["of"]["shape"]} if "of" in p else p
            apart = size > 1 and p["shape"] is not None and _divides(is_divided(p, old_size), old_size, sharding)
            waiting.append(_part_entry(whole, rank, size, divided=apart))
    rule = {"rule": first["rule"]} if "rule" in first else {}
    about = {"origin": origin, **rule, "params": described, "waiting": waiting}
    return _NewRank(stores, parts, extents, starts, about)


def _part_entry(p: dict[str, Any], rank: int, size: int, *, divided: bool) -> dict[str, Any]:
    """Return the manifest's entry for a rank's part of a parameter, without its place. `p`: the whole's entry."""
    entry = {key: p[key] for key in ("name", "group", "position", "shape", "dtype")}
    if divided and p["shape"]:
        shape = p["shape"]
        part = Whole(shape, [*range(len(shape))], 1).of_rank(rank, size, divided=True)
        entry["shape"] = [part.rows, *shape[1:]]
        entry["of"] = {"shape": shape, "first": [part.first, *[0] * (len(shape) - 1)]}
    return entry


def _check_codes(params: Sequence[OldParam], new: Sequence[_NewRank]) -> None:
    """Raise CSDStoreError if codes cannot be copied, as groups of 64 elements begin elsewhere in the new parts."""
    for i, p in enumerate(params):
        if p.kind[1] != FP32 and not all(part.keeps_groups(r.parts[i]) for _, part in p.sources.values() for r in new):
            raise CSDStoreError(
                f"the {p.kind[1]} states of {p.name} would have to be encoded anew, since the parts of "
                f"{len(new)} ranks do not begin with groups of the old ones, which reshard does not do: use "
                "csd-optim export and import, or torch.distributed.checkpoint"
            )


# ---- the copy ------------------------------------------------------------------------


def _copy(
    recovered: list[Contents], rank: int, params: Sequence[OldParam], new: Sequence[_NewRank], tick: Tick
) -> None:
    """Copy what an old rank has of the parameters to all new ranks."""
    wanted = {p.sources[rank][0]: i for i, p in enumerate(params) if rank in p.sources}  # by row of the old rank
    if not wanted:
        return
    extents = extents_of(recovered)

    def copy_tile(tile: Tile, data: memoryview | None) -> None:
        if data is None:  # zeros, and so are the new stores
            return
        for row, _, first, at, n in extents[tile.extent].pieces_in(tile.number).tolist():
            if (i := wanted.get(row)) is None:
                continue
            part = params[i].sources[rank][1]
            for r in new:
                for here, there, count in part.shared(r.parts[i], first, n):
                    r.stores.fill(r.extents[i], r.starts[i] + there, count, tile, data, at + here - first)

    def copy_residual(residual: Residual, begin: int, data: memoryview) -> None:
        if (i := wanted.get(residual.row)) is None:
            return
        part, values = params[i].sources[rank][1], data.cast("H")
        first = begin // values.itemsize
        for r in new:
            for here, there, count in part.shared(r.parts[i], first, len(values)):
                r.stores.fill_residual(i, there, values[here - first : here - first + count].cast("B"))

    each_tile(recovered, copy_tile, copy_residual, tick=tick)
