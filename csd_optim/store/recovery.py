"""Recovery from several stores: finds the last commit on all devices, and the last round on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import CSDStoreError
from .file import StoreFile
from .format import UNDER_WAY, Contents
from .layout import SLOTS

AGAIN = (
    ": csd-optim reshard, or resume_from, was stopped before all new stores were there. Run it again; the old stores "
    "are unchanged"
)

LOST = (
    ". If its drive is not mounted, mount it; if it is lost, go back to a snapshot or a checkpoint, or begin anew with "
    "overwrite=True"
)


def _is_first(newest: Contents) -> bool:
    """Return whether the newest commit of a store may be a first one that other stores never got.

    In that case nothing was reported as durable, and a new training may begin. (Copy 1 is only written when all stores
    have copy 0. A commit with an origin is excluded: its states exist in the old stores.)
    """
    return newest.superblock.sequence == 1 and newest.copy == 0 and not newest.origin


def common_commit(stores: Sequence[StoreFile]) -> list[Contents]:
    """Return the newest of common_commits(), or an empty list."""
    return next(iter(common_commits(stores)), [])


def common_commits(stores: Sequence[StoreFile]) -> list[list[Contents]]:
    """Return the commits that all stores have, the newest first, each as the contents of all stores.

    Returns an empty list if there is no commit, or only a first commit that some store lacks. Raises CSDStoreError if a
    store is missing, if the stores are not the devices of one optimizer, or if they have no step in common.
    """
    found = [s.recovered[0] for s in stores if s.recovered]
    if not found:
        return []
    if len(found) < len(stores):
        empty = next((s for s in stores if s.was_missing), next(s for s in stores if not s.recovered))
        if all(map(_is_first, found)) and not empty.was_missing:
            return []
        where = f", of rank {found[0].rank}," if found[0].world_size > 1 else ""
        resharded = any(c.origin and c.superblock.sequence == 1 for c in found)
        advice = AGAIN if resharded else LOST if empty.was_missing else ""
        raise CSDStoreError(f"{empty.path} holds no store, but {found[0].path}{where} does{advice}")
    newest = [s.recovered[0].superblock for s in stores]
    first = newest[0]
    for store, block in zip(stores, newest, strict=True):
        if block.store_id != first.store_id:
            raise CSDStoreError(f"{store.path} belongs to another optimizer than {stores[0].path}")
        if (rank := store.recovered[0].rank) != stores[0].recovered[0].rank:
            raise CSDStoreError(
                f"{store.path} is rank {rank}'s, {stores[0].path} is rank {stores[0].recovered[0].rank}'s"
            )
    if len(stores) != first.devices or sorted(b.device for b in newest) != list(range(first.devices)):
        raise CSDStoreError(
            f"{stores[0].path} is device {first.device} of {first.devices}; "
            f"name all {first.devices} of them, each once, not {len(stores)}"
        )
    # A step in place is marked on all devices before it writes anything. If only some devices have the mark, the
    # previous commit is still whole on all.
    known = [{c.superblock.sequence: c for c in reversed(s.recovered)} for s in stores]
    for commits in known:
        for c in [c for c in commits.values() if c.superblock.flags & UNDER_WAY]:
            before = replace(c.superblock, sequence=c.superblock.sequence - 1, flags=0)
            commits.setdefault(before.sequence, replace(c, superblock=before))
    common = sorted(set.intersection(*map(set, known)), reverse=True)
    if not common:
        steps = ", ".join(f"{s.path}: {[c.superblock.step for c in s.recovered]}" for s in stores)
        raise CSDStoreError(f"the devices have no step in common ({steps}); go back to a snapshot or a checkpoint")
    chosen: list[list[Contents]] = []
    for sequence in common:
        recovered = [commits[sequence] for commits in known]
        if any(c.superblock.flags & UNDER_WAY for c in recovered):  # the previous commit is overwritten
            if chosen:
                break
            raise CSDStoreError(
                f"{recovered[0].path}: a step after step {recovered[0].superblock.step} was cut short, and with "
                "one slot per tile (shadow=False) that leaves a mix of two steps; go back to a snapshot or a checkpoint"
            )
        chosen.append(recovered)
    return chosen


def check_slots(recovered: Sequence[Contents]) -> None:
    """Raise CSDStoreError for read-only stores, with one slot per tile: a step would overwrite the only copy."""
    if any(extent["slots"] < SLOTS for contents in recovered for extent in contents.manifest["extents"]):
        first = recovered[0]
        places = ",".join(str(Path(contents.path).parent) for contents in recovered)
        how = f"csd-optim import {places} DIRECTORY ..., and resume that"
        if first.world_size > 1:
            how = "csd-optim export the stores of all ranks, csd-optim import that, and resume it"
        raise CSDStoreError(
            f"{first.path} was made with shadow=False and can only be read: a step cannot be undone there. Make a new "
            f"store of it: {how}. It takes twice the space; fp32 states of AdamW take no more as --state-dtype 8bit"
        )


@dataclass(frozen=True)
class RanksStore:
    """A summary of one rank's stores, for the other ranks."""

    path: str
    store_id: bytes
    rank: int
    world_size: int
    is_first: bool  # the newest commit may be a first one that other ranks never got
    steps: dict[int, int]  # by round, the newest first; empty without a commit
    is_missing: bool = False  # even the file of some store is missing
    is_resharded: bool = False  # the newest commit is the first of a store made from others; for messages

    @classmethod
    def of(cls, stores: Sequence[StoreFile], commits: list[list[Contents]]) -> RanksStore:
        """Return the summary of a rank's stores. `commits`: from common_commits()."""
        if not commits:
            missing = next((store for store in stores if store.was_missing), None)
            path = str((missing or stores[0]).path)
            return cls(path, b"", 0, 1, is_first=True, steps={}, is_missing=missing is not None)
        newest = commits[0][0]
        block = newest.superblock
        steps = {c[0].superblock.round: c[0].superblock.step for c in commits}
        is_resharded = block.sequence == 1 and newest.origin is not None
        where = newest.path, block.store_id, newest.rank, newest.world_size
        is_first = all(map(_is_first, commits[0]))
        return cls(*where, is_first, steps, is_resharded=is_resharded)


def last_round(stores: Sequence[RanksStore]) -> int | None:
    """Return the last round that all ranks have; None if there is none yet. `stores`: by rank.

    Raises CSDStoreError if the ranks have no round in common, or if a store is missing, or belongs to another rank,
    another run or another number of ranks.
    """
    size, present = len(stores), {rank: store for rank, store in enumerate(stores) if store.steps}
    for rank, store in present.items():
        if store.world_size != size:
            raise CSDStoreError(other_world_size(store, size))
        if store.rank != rank:
            raise CSDStoreError(f"rank {rank}: {store.path} is the store of rank {store.rank}")
    if len(present) < size:
        absent = [store for store in stores if not store.steps]
        missing = [store.path for store in absent if store.is_missing]
        if not present or (all(store.is_first for store in present.values()) and not missing):
            return None  # killed before all ranks had the first commit
        without = ", ".join(str(rank) for rank in range(size) if rank not in present)
        advice = AGAIN if any(store.is_resharded for store in present.values()) else ""
        if missing and not advice:
            advice = f": {missing[0]} is not there{LOST}"
        raise CSDStoreError(
            f"no store on rank {without}, but rank {min(present)} has {present[min(present)].path}{advice}"
        )
    for rank, store in present.items():
        if store.store_id != present[0].store_id:
            raise CSDStoreError(f"rank {rank}: {store.path} is of another run than rank 0's {present[0].path}")
    common = set.intersection(*(set(store.steps) for store in present.values()))
    if not common:
        steps_of = ", ".join(f"rank {rank}: {[*store.steps.values()]}" for rank, store in present.items())
        raise CSDStoreError(f"the ranks have no step in common ({steps_of}); go back to a snapshot or a checkpoint")
    return max(common)


def stores_by_rank(stores: Sequence[StoreFile]) -> list[list[StoreFile]]:
    """Return the stores of each rank that has stores, in the order of ranks."""
    found: dict[int, list[StoreFile]] = {}
    for store in stores:
        found.setdefault(store.recovered[0].rank if store.recovered else 0, []).append(store)
    return [own for _, own in sorted(found.items())]


def last_commits(by_rank: Sequence[Sequence[StoreFile]]) -> list[list[Contents]]:
    """Return, by rank and device, the contents of the stores at the last round that all ranks have.

    Raises CSDStoreError as last_round() does, or if a rank has no stores here.
    """
    commits = [common_commits(stores) for stores in by_rank]
    if empty := next((stores[0] for stores, own in zip(by_rank, commits, strict=True) if not own), None):
        raise CSDStoreError(f"{empty.path} holds no step yet")
    newest = [own[0][0] for own in commits]
    first = newest[0]
    if [contents.rank for contents in newest] != [*range(first.world_size)]:
        present = ", ".join(str(contents.rank) for contents in newest)
        raise CSDStoreError(f"these are stores of ranks {present} of {first.world_size}: name those of all, or of one")
    chosen = last_round([RanksStore.of(stores, own) for stores, own in zip(by_rank, commits, strict=True)])
    return [
        sorted(recovered, key=lambda c: c.superblock.device)
        for own in commits
        for recovered in own
        if recovered[0].superblock.round == chosen
    ]


def other_world_size(store: RanksStore | Contents, size: int) -> str:
    """Return the error message for a store of another number of ranks than `size`."""
    alone, n = "a process on its own", store.world_size
    was, now = (
        (f"rank {store.rank} of {n}" if n > 1 else alone),
        (f"these are {size} ranks" if size > 1 else f"this is {alone}"),
    )
    return (
        f"{store.path} is the store of {was}, and {now}: the states are divided otherwise. To continue from it, start "
        "as many processes as before. To change their number, make new stores of theirs with `resume_from` or "
        "`csd-optim reshard`, or save with torch.distributed.checkpoint there, and load that here (docs/distributed.md)"
    )
