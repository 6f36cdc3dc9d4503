"""resume_from: before resuming, each rank makes its own stores from those of any number of ranks; see making.py."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..devices.spec import DeviceSpec
from ..distributed.ranks import Ranks, all_ranks_or_none
from ..distributed.sharding import UNSHARDED
from ..engine.open_engine import agree_on_devices
from ..errors import CSDOSError, CSDStoreError, CSDValueError, CSDWarning, users_stacklevel
from ..params.groups import Groups, members, name_of
from ..params.manifest import codec_difference, describe_param, first_difference, rule_difference
from ..params.state_map import StateMap
from ..store.format import FILE_NAME, Contents
from ..store.user_state import stored_user_state
from .files import no_progress
from .making import Old, lay_out, make_stores, old_stores
from .parts import block_of, ranks_that_cover
from .snapshot import Paths, directories
from .targets import commits_at, is_complete

RowsOfParams = dict[tuple[int, int], tuple[int, int]]  # by group and position: the first row and the number of rows


def make_own_stores(
    paths: Paths,
    specs: Sequence[DeviceSpec],
    groups: Groups,
    state_map: StateMap,
    ranks: Ranks | None,
    tile_elems: int | None,
    make_way: Callable[[], None],
) -> list[dict[str, Any]]:
    """Make this rank's stores from the old ones, unless they exist, for a resume to continue from.

    With `ranks` a collective, which raises on all ranks or on none. `paths`: see reshard(); every rank must see all.
    `specs`: this rank's devices. `make_way`: as in open_engine(). Returns each old rank's `user_state`; an empty list
    if the new stores have made steps since. Remains of a stopped attempt are replaced.

    Raises CSDStoreError unless the old stores belong to all ranks of a run of this model, or if there are other stores
    at the devices; CSDValueError, CSDStoreExistsError, CSDBusyError, CSDOSError.
    """
    others = [s for s in specs if not s.kind.on_accelerator]
    durable, in_memory = any(s.durable for s in specs), all(s.kind.in_memory for s in others)
    agree_on_devices(ranks, "resume", durable=durable, in_memory=in_memory, from_others=True)
    make_way()
    rank, size = (ranks.rank, ranks.size) if ranks else (0, 1)
    with ExitStack() as stack:
        with all_ranks_or_none(ranks) as votes:
            _check_places(others or specs)
            places = _places_left(paths)
            own = commits_at(others, places)
            old, user_states = None, []
            if is_complete(own) and own[0].origin and not places:
                text = f"there are no stores in {paths} any more; going on with those that were made from them"
                warnings.warn(text, CSDWarning, users_stacklevel())
            else:
                old = stack.enter_context(old_stores(paths))
                _check_origins(own, old, rank, size)
                user_states = [stored_user_state(packed, old.path) for packed in old.user_states]
            id_ = own[0].superblock.store_id if is_complete(own) else None
            votes.mine = id_, any(c.superblock.sequence > 1 for c in own if c), old and old.origin
        ids, gone_on, origins = zip(*votes.all, strict=True)
        if any(origin != origins[0] for origin in origins):
            raise CSDStoreError(f"the ranks do not see the same old stores: {[*origins]}")
        if old is None:
            return []
        if not any(gone_on) and (None in ids or len({*ids}) > 1):
            blocks = _own_blocks(old, groups, state_map, ranks)

            def rows_for(p: dict[str, Any], _: bool) -> tuple[int, int] | None:
                return blocks.get((p["group"], p["position"]))

            with all_ranks_or_none(ranks):
                new = lay_out(old, others, rank, size, rows_for, tile_elems)
            make_stores(old, [new], ranks, size, no_progress)
        elif any(c.superblock.step != old.step for c in own if c):
            return []
        if size != old.size and len({*old.user_states}) > 1:
            warnings.warn(
                f"user_state differs between the {old.size} old ranks: this rank has that of old rank "
                f"{rank if rank < old.size else 0}; resumed_user_states has all of them",
                CSDWarning,
                users_stacklevel(),
            )
        return user_states


def _check_places(specs: Sequence[DeviceSpec]) -> None:
    for spec in specs:
        if not spec.durable or spec.directory is None:
            how = f"name its drive, as in {spec}?nvme=/mnt/nvme0" if spec.kind.on_card else "name a directory"
            raise CSDValueError(f"resume_from makes a store on each device, and cannot on '{spec}': {how}")


def _places_left(paths: Paths) -> set[Path]:
    """Return the directories of the old stores that still exist."""
    found = set()
    for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
        with contextlib.suppress(CSDOSError):  # the path does not exist
            found |= {place.resolve() for place in directories(path) if (place / FILE_NAME).exists()}
    return found


def _check_origins(own: Sequence[Contents | None], old: Old, rank: int, size: int) -> None:
    """Raise CSDStoreError unless stores at the new devices were made for this rank from the present `old` stores."""
    for c in filter(None, own):
        origin, wanted = c.origin, old.origin
        if origin is None:
            what = f"was not made from {old.path}"
        elif origin["store_id"] != wanted["store_id"]:
            what = f"was made from other stores than {old.path}"
        elif origin != wanted:
            what = f"was made from {old.path} at step {origin['step']}, which has gone on since, to step {old.step}"
        elif (c.rank, c.world_size) != (rank, size):
            what = f"was made from {old.path} for rank {c.rank} of {c.world_size}, and this is rank {rank} of {size}"
        else:
            continue
        raise CSDStoreError(
            f"{c.path} holds a store of step {c.superblock.step} that {what}. To go on with it, leave resume_from "
            "out; to begin from the old stores, name other directories as devices"
        )


def _own_blocks(old: Old, groups: Groups, state_map: StateMap, ranks: Ranks | None) -> RowsOfParams:
    """Return this rank's rows of each divided parameter. Checks that all ranks' rows make up the whole: a collective.

    Raises CSDStoreError if the old stores are of another model, or if a part does not consist of rows.
    """
    rank, size = (ranks.rank, ranks.size) if ranks else (0, 1)
    contents, blocks = old.source.contents, {}
    with all_ranks_or_none(ranks) as votes:
        rows = {}
        for k, i, p in members(groups):
            entry = {"name": name_of(groups, k, i), **describe_param(p, state_map.part_of(p))}
            if "of" in entry:
                if entry["of"] is None:
                    raise CSDStoreError(f"{entry['name']} is a shard of FSDP1 here, and which one only FSDP1 knows")
                blocks[k, i] = block_of(entry, "this model", rank, size)
                rows[k, i] = entry["of"]["shape"][0] if entry["of"]["shape"] else 1
        if difference := rule_difference(contents, groups, state_map.rule_of):
            raise CSDStoreError(f"{old.path} cannot be resumed: {difference}")
        if difference := first_difference(contents.manifest, groups, lambda _: UNSHARDED):
            raise CSDStoreError(f"{old.path} is the store of another model: {difference}")
        if difference := codec_difference(contents.manifest, groups, state_map.codec_of):
            raise CSDStoreError(f"{old.path} cannot be resumed: {difference}")
        votes.mine = blocks
    with all_ranks_or_none(ranks):
        for place, n in rows.items():
            if ranks_that_cover({r: found.get(place, (0, n)) for r, found in enumerate(votes.all)}, n) is None:
                name = name_of(groups, *place)
                raise CSDStoreError(f"the rows of {name} on these ranks overlap, or do not make up all {n}")
    return blocks
