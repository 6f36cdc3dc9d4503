"""The processes that train together. torch.distributed carries everything between them.

Every method of `Ranks` that talks to the others is a collective: all ranks call it, in the same order.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .errors import CSDRankError, CSDValueError


class Ranks:
    """The ranks of a process group, more than one; `rank` is this process's among them."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        # Where what is sent has to lie: nccl knows GPUs only.
        types = [device.type for device in group._device_types]
        self.device = torch.device("cpu" if "cpu" in types else types[0])

    @property
    def is_world(self) -> bool:
        """Are these all ranks that there are?"""
        return self.group is dist.group.WORLD

    def gather(self, *values: int) -> list[tuple[int, ...]]:
        """Everybody's values (64 bits each, as many on every rank), by rank."""
        own = torch.tensor(values, dtype=torch.int64, device=self.device)
        out = own.new_empty(self.size * len(values))
        self.all_gather(out, own)
        return [tuple(row) for row in out.view(self.size, -1).tolist()]

    def all_gather(self, out: torch.Tensor, own: torch.Tensor, *, async_op: bool = False) -> Any:
        """Concatenates everybody's `own` (1-D, the same size and dtype on every rank) in `out`."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.12
        return gather(out, own, group=self.group, async_op=async_op)

    def gather_objects(self, value: Any) -> list[Any]:
        """Everybody's plain values, by rank."""
        out = [None] * self.size
        dist.all_gather_object(out, value, group=self.group)
        return out

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is done within counts only if no rank raises anything: see agree()."""
        failure = None
        try:
            yield
        except BaseException as e:
            failure = e
        self.agree(failure)

    def agree(self, failure: BaseException | None = None) -> None:
        """Raises on all ranks if one of them failed: there `failure`, elsewhere CSDRankError, which tells of it."""
        if not any(failed for (failed,) in self.gather(failure is not None)):
            return
        said = self.gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        raise CSDRankError("; ".join(f"rank {r}: {text}" for r, text in enumerate(said) if text))


def ranks_of(group: Any) -> Ranks | None:
    """Of a process group, or of all ranks there are (`group` None); None if this process is alone.

    Raises CSDValueError if it is no process group that this process belongs to.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise CSDValueError("Invalid process_group: call torch.distributed.init_process_group() first")
        return None
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise CSDValueError(f"Invalid process_group: {group!r}; it is a group that this rank belongs to, or None")
    return Ranks(group) if dist.get_world_size(group) > 1 else None


def fill_in(device: str) -> str:
    """`device` with {rank}, {local_rank} and {world_size} filled in; a process on its own is rank 0 of 1."""
    alone = not (dist.is_available() and dist.is_initialized())
    rank = 0 if alone else dist.get_rank()
    values = {
        "{rank}": rank,
        "{local_rank}": 0 if alone else int(os.environ.get("LOCAL_RANK", rank)),
        "{world_size}": 1 if alone else dist.get_world_size(),
    }
    return re.sub("|".join(map(re.escape, values)), lambda found: str(values[found[0]]), device)


def all_equal(rows: Sequence[Any]) -> bool:
    return all(row == rows[0] for row in rows)
