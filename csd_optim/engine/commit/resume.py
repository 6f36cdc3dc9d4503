"""Resumes an engine from its stores: at the last step that all devices of all ranks have committed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...bindings import TILE_STATE
from ...distributed.ranks import all_ranks_or_none
from ...errors import CSDStoreError
from ...store.joined import joined_commit
from ...store.layout import extents_of
from ...store.recovery import RanksStore, check_slots, common_commits, last_round, other_world_size
from ..engine import Engine
from ..open_devices import OpenDevices
from .durable import DurableCommitter


def recover(
    engine: Engine, committer: DurableCommitter, choose: Callable[[RanksStore], int | None] | None = None
) -> None:
    """Resume from the last step that all devices of all ranks have, if any, and set `engine.recovered`.

    A collective; raises CSDStoreError on all ranks if the stores do not belong together. `choose`: given if ranks meet
    elsewhere; takes this rank's store, and returns the last round that all ranks have.
    """
    ranks, stores = committer.ranks, [store for store in committer.devices.stores if store]
    with all_ranks_or_none(ranks):
        joined = joined_commit(stores) if engine.states.mode == "read" else []
        commits = [joined] if joined else common_commits(stores)
        if commits and engine.states.mode == "resume" and not ranks and commits[0][0].world_size > 1:
            raise CSDStoreError(other_world_size(commits[0][0], 1))
        if commits and engine.states.mode == "resume":
            check_slots(commits[0])
    if ranks:
        own = RanksStore.of(stores, commits)
        chosen = choose(own) if choose else last_round(ranks.gather_objects(own))
        commits = [recovered for recovered in commits if recovered[0].superblock.round == chosen]
    if commits:
        with all_ranks_or_none(ranks):
            newest = commits[0]
            # The stores determine the order of the devices, whatever the order of their names.
            order = sorted(range(len(newest)), key=lambda d: newest[d].superblock.device)
            engine.recovered = [newest[d] for d in order]
            committer.adopt_commit(engine.recovered)
            committer.devices.adopt_commit(engine.recovered, order)
            _adopt_extents(engine, committer.devices)


def _adopt_extents(engine: Engine, devices: OpenDevices) -> None:
    """Continue from the states in `engine.recovered`."""
    states, recovered = engine.states, engine.recovered
    first = recovered[0]
    extents = extents_of(recovered)
    if states.mode == "resume":
        devices.tune(sum(e.slots * e.slot_bytes * e.n_tiles for e in extents), new=False)
    devices.share_memory([sum(e.slot_bytes * e.tiles_of(d) for e in extents) for d in range(len(recovered))])
    row = [0] * len(recovered)
    for e, extent in enumerate(extents):
        slots = np.zeros(extent.n_tiles, TILE_STATE)
        sums = np.zeros((extent.n_tiles, extent.chunks, len(extent.slot)), np.uint32)
        for d, contents in enumerate(recovered):
            here, tiles = extent.devices == d, extent.tiles_of(d)
            slots[here], sums[here] = contents.tiles[row[d] : row[d] + tiles], contents.sums[e]
            row[d] += tiles
        offsets = [c.manifest["extents"][e]["file_offset"] for c in recovered]
        states.add(extent, offsets, (slots, sums))
        engine.committer.after_extend(extent, offsets)
        devices.shares = extent.shares
        for d, contents in enumerate(recovered):
            if numbers := contents.manifest["extents"][e].get("freed"):
                freed = (extent.first_tile + np.flatnonzero(extent.devices == d)[numbers]).astype(np.uint32)
                states.free_tiles(freed)
                engine.committer.note_freed(freed)
    states.go_to(first.superblock.step, first.record, first.steps)
