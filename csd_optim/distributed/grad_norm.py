"""The global norm of all gradients, on whatever devices and ranks they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .ranks import Ranks, device_of

# Of each gradient: this process's part, or None; and the process groups over which to add up the parts' squares, in
# order: see Partition.groups().
Parts = Iterable[tuple[torch.Tensor | None, tuple[Any, ...]]]


def norm_of(grads: Parts) -> float:
    """Return the fp32 2-norm of all gradients as one vector. A collective of their process groups."""
    norms = _by_groups(grads)
    totals = [_over_groups(groups, _combine(of_groups)) for groups, of_groups in norms.items()]
    return float(_combine(totals))


@dataclass
class OwnNorm:
    """One rank's share of the norm of all gradients."""

    whole: torch.Tensor | None  # the norm of gradients that every rank has; None if there are none
    square: float  # the sum of squares of this rank's parts of divided gradients
    sharers: list[int]  # the ranks with parts of divided gradients; empty if there are none

    def total(self, squares: Sequence[float]) -> float:
        """Return the norm of all gradients. `squares`: by rank; the sum does not depend on their order."""
        totals = [] if self.whole is None else [self.whole]
        if self.sharers:
            square = _sum([squares[rank] for rank in self.sharers])
            totals.append(torch.tensor(math.sqrt(square), dtype=torch.float64, device="cpu"))
        return float(_combine(totals))


def own_norm(grads: Parts, ranks: Ranks) -> OwnNorm | None:
    """Return this rank's share of norm_of(); None unless all divided gradients are divided among the same ranks."""
    norms = _by_groups(grads)
    whole = norms.pop((), None)
    sharers = [_sharers(groups, ranks) for groups in norms]
    if any(s is None or s != sharers[0] for s in sharers):
        return None
    square = float(_combine([norm for of_groups in norms.values() for norm in of_groups])) ** 2
    return OwnNorm(None if whole is None else _combine(whole), square, (sharers and sharers[0]) or [])


def _sharers(groups: tuple[Any, ...], ranks: Ranks) -> list[int] | None:
    """Return the ranks over which a sum through all `groups` goes; None if unknown."""
    everybody = dist.get_process_group_ranks(ranks.group)
    members = {rank for group in groups for rank in dist.get_process_group_ranks(group)}
    if not members.issubset(everybody):
        return None
    if len(groups) == 1:
        return [everybody.index(rank) for rank in sorted(members)]
    return [*range(ranks.size)] if math.prod(map(dist.get_world_size, groups)) == ranks.size else None


def _sum(values: list[float]) -> float:
    """Return the sum, rounded once."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _by_groups(grads: Parts) -> dict[tuple[Any, ...], list[torch.Tensor]]:
    norms: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for g, groups in grads:
        of_groups = norms.setdefault(groups, [])
        if g is not None:
            of_groups.append(torch.linalg.vector_norm(g, dtype=torch.complex64 if g.is_complex() else torch.float32))
    return norms


def _combine(norms: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of the concatenation of vectors with these norms."""
    total: torch.Tensor = torch.zeros((), device="cpu")
    if norms:
        total = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    return total


def _over_groups(groups: tuple[Any, ...], norm: torch.Tensor) -> torch.Tensor:
    for group in groups:
        square = norm.to(device_of(group), torch.float64).square()
        dist.all_reduce(square, group=group)
        norm = torch.sqrt(square)
    return norm
