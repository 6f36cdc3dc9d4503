"""How an engine takes up what its stores hold: the last step that all devices have, on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..distributed.ranks import all_ranks_or_none
from ..errors import CSDStoreError
from ..store.format import RESIDUAL_BYTES
from ..store.reader import Residual, Tick, Tile, find_damage, residuals_of
from ..store.recovery import RanksStore, common_commits, last_round, other_world_size
from .durable import DurableCommitter
from .engine import Engine


def recover(engine: Engine, committer: DurableCommitter) -> None:
    """Takes up the last step that all have, if there is one; `engine.recovered` is then what the stores say of it.

    A collective of the ranks; raises CSDStoreError on all of them when the stores do not belong together.
    """
    ranks, stores = committer.ranks, [store for store in engine.devices.stores if store]
    with all_ranks_or_none(ranks):
        commits = common_commits(stores)
        if commits and engine.mode == "resume" and not ranks and commits[0][0].world_size > 1:
            raise CSDStoreError(other_world_size(commits[0][0], 1))
    if ranks:
        chosen = last_round(ranks.gather_objects(RanksStore.of(commits)))
        commits = [recovered for recovered in commits if recovered[0].superblock.round == chosen]
    if commits:
        with all_ranks_or_none(ranks):
            found = commits[0]
            # The order of the devices is that of the store.
            order = sorted(range(len(found)), key=lambda d: found[d].superblock.device)
            committer.adopt_commit([found[d] for d in order])
            engine.adopt_commit(found, order)


def check_recovered(
    engine: Engine, use: Callable[[Tile, memoryview | None], None] = lambda *_: None, tick: Tick = lambda _: None
) -> None:
    """Reads all states that were taken up; residuals into memory, unless the store is only looked at.

    `use`, `tick`: as of each_tile(); `use` of tiles that are whole. Raises CSDStoreError, naming tile and parameters,
    if one is not.
    """
    residuals = {
        r.row: torch.empty(r.size // RESIDUAL_BYTES, dtype=torch.bfloat16, device="cpu")
        for r in (residuals_of(engine.recovered) if engine.mode == "resume" else ())
    }

    def take(residual: Residual, first: int, data: memoryview) -> None:
        if residuals:
            into = residuals[residual.row].view(torch.uint8).numpy()
            into[first : first + len(data)] = np.frombuffer(data, np.uint8)

    damage = find_damage(engine.recovered, take, use=use, tick=tick)
    if damage:
        more = f" (and {len(damage) - 1} more: `csd-optim verify` lists them)" if len(damage) > 1 else ""
        raise CSDStoreError(f"{damage[0]}{more}. Go back to a snapshot or a checkpoint")
    engine.adopt_residuals(residuals)


def discard_newer(engine: Engine) -> None:
    """Forgets what some of the devices have and others have not, before something new is written. Raises CSDOSError."""
    # What was found came from the disks themselves: see StoreFile. So each always has a whole copy of it.
    for store, commit in zip(engine.devices.stores, engine.recovered, strict=True):
        assert store is not None
        store.discard_newer(commit)
