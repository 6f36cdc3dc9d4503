"""Resumes an engine from its stores: at the last step that all devices of all ranks have committed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..distributed.ranks import all_ranks_or_none
from ..errors import CSDStoreError
from ..store.format import RESIDUAL_BYTES
from ..store.reader import Residual, Tick, Tile, find_damage, residuals_of
from ..store.recovery import RanksStore, check_slots, common_commits, last_round, other_world_size
from .durable import DurableCommitter
from .engine import Engine


def recover(engine: Engine, committer: DurableCommitter) -> None:
    """Resume from the last step that all devices of all ranks have, if there is one, and set `engine.recovered`.

    A collective of the ranks; raises CSDStoreError on all of them if the stores do not belong together.
    """
    ranks, stores = committer.ranks, [store for store in engine.devices.stores if store]
    with all_ranks_or_none(ranks):
        commits = common_commits(stores)
        if commits and engine.states.mode == "resume" and not ranks and commits[0][0].world_size > 1:
            raise CSDStoreError(other_world_size(commits[0][0], 1))
        if commits and engine.states.mode == "resume":
            check_slots(commits[0])
    if ranks:
        chosen = last_round(ranks.gather_objects(RanksStore.of(commits)))
        commits = [recovered for recovered in commits if recovered[0].superblock.round == chosen]
    if commits:
        with all_ranks_or_none(ranks):
            newest = commits[0]
            # The stores determine the order of the devices, not the order in which the user names them.
            order = sorted(range(len(newest)), key=lambda d: newest[d].superblock.device)
            committer.adopt_commit([newest[d] for d in order])
            engine.adopt_commit(newest, order)


def check_recovered(
    engine: Engine, use: Callable[[Tile, memoryview | None], None] = lambda *_: None, tick: Tick = lambda _: None
) -> None:
    """Read and verify all states of the resumed commit; load residuals into memory, unless the mode is "read".

    `use`, `tick`: see each_tile(); `use` is called for intact tiles only. Raises CSDStoreError, naming tile and
    parameters, if a tile is damaged.
    """
    residuals = {
        r.row: torch.empty(r.size // RESIDUAL_BYTES, dtype=torch.bfloat16, device="cpu")
        for r in (residuals_of(engine.recovered) if engine.states.mode == "resume" else ())
    }

    def load(residual: Residual, first: int, data: memoryview) -> None:
        if residuals:
            target = residuals[residual.row].view(torch.uint8).numpy()
            target[first : first + len(data)] = np.frombuffer(data, np.uint8)

    damage = find_damage(engine.recovered, load, use=use, tick=tick)
    if damage:
        more = f" (and {len(damage) - 1} more: `csd-optim verify` lists them)" if len(damage) > 1 else ""
        raise CSDStoreError(f"{damage[0]}{more}. Go back to a snapshot or a checkpoint")
    engine.committer.adopt_residuals(residuals)


def discard_newer(engine: Engine) -> None:
    """Discard commits that only some devices have; call it before anything new is written. Raises CSDOSError."""
    # recover() read the commit from the disks, not the page cache (see StoreFile), so each has a whole copy of it.
    for store, commit in zip(engine.devices.stores, engine.recovered, strict=True):
        assert store is not None
        store.discard_newer(commit)
