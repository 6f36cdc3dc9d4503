"""Reshard: makes the stores of M ranks from the stores of N ranks, element by element, without an optimizer.

One process makes the stores of all new ranks: see making.py.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import CSDStoreExistsError, CSDValueError
from .files import Progress, no_progress
from .making import lay_out, make_stores, old_stores
from .parts import Division
from .snapshot import Paths
from .targets import commits_at, is_complete, specs_of_ranks

SHARDINGS = ("none", "ddp", "fsdp2", "hsdp:RxS")


def reshard(
    old: Paths,
    to: Sequence[str],
    ranks: int,
    *,
    sharding: str | None = None,
    tile_elems: int | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Make the stores of `ranks` ranks, which resume where the stores in `old` ended. Returns a description.

    `old`: the directories of all devices of all ranks, or of a single process. `to`: the new directories, with {rank};
    several, or several separated by commas, are the devices of a rank. `sharding`: "none" gives each rank all states
    (sharded=False); "ddp" and "fsdp2", which are the same, give each rank its rows; "hsdp:RxS" divides among R replicas
    of S shards, where rank r * S + s is replica r of shard s. None: rows if the old ranks have parts, or if there is a
    single one.

    If an earlier call was stopped, the same call begins again; if it had finished, the call does nothing. Raises
    CSDValueError, CSDStoreError, CSDStoreExistsError, CSDBusyError, CSDOSError.
    """
    if ranks < 1:
        raise CSDValueError(f"Invalid ranks: {ranks}")
    division = _division(sharding, ranks)
    specs = specs_of_ranks(to, ranks)
    with old_stores(old) as source:
        origin = source.origin
        found = {
            "devices": [[str(spec) for spec in of_rank] for of_rank in specs],
            "step": source.step,
            "params": sum(p.whole.part(0, p.whole.rows).numel for p in source.params),
            "ranks": ranks,
            "of_ranks": source.size,
            "user_states_differ": source.size != ranks and len({*source.user_states}) > 1,
        }
        places = {Path(contents.path).resolve().parent for contents in source.source.stores}
        present = [commits_at(of_rank, places) for of_rank in specs]
        for rank, commits in enumerate(present):
            for c in filter(None, commits):
                if c.superblock.sequence > 1 or c.origin != origin or (c.rank, c.world_size) != (rank, ranks):
                    raise CSDStoreExistsError(
                        errno.EEXIST,
                        f"{c.path} holds a store of step {c.superblock.step}, and nothing is overwritten; name "
                        "another directory",
                    )
        ids = {commits[0].superblock.store_id if is_complete(commits) else None for commits in present}
        if len(ids) == 1 and None not in ids:
            return {**found, "made_before": True}
        keeps = sharding is None and source.size > 1

        def rows_for(rank: int, p: dict[str, Any], was_divided: bool) -> tuple[int, int] | None:
            if division is None or ranks == 1 or not p["shape"] or (keeps and not was_divided):
                return None
            return division.rows_of(p["shape"][0], rank)

        new = [lay_out(source, s, rank, ranks, partial(rows_for, rank), tile_elems) for rank, s in enumerate(specs)]
        make_stores(source, new, None, ranks, progress)
        return {**found, "made_before": False}


def _division(sharding: str | None, ranks: int) -> Division | None:
    """Return how new ranks divide parameters; None if not at all. Raises CSDValueError."""
    if sharding == "none":
        return None
    if sharding in (None, "ddp", "fsdp2"):
        return Division(ranks)
    mesh = re.fullmatch(r"hsdp:([1-9]\d*)x([1-9]\d*)", sharding)
    if not mesh:
        raise CSDValueError(f"Invalid sharding: {sharding!r} is not one of {', '.join(SHARDINGS)}")
    replicas, shards = map(int, mesh.groups())
    if replicas * shards != ranks:
        raise CSDValueError(f"Invalid sharding: {sharding!r} is a mesh of {replicas * shards} ranks, not of {ranks}")
    return Division(shards, replicas)
