"""Support of torch.distributed.algorithms.Join: ranks without data go on updating their shares of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook

from ..distributed.ranks import Ranks
from ..distributed.sharding import is_replicated
from ..errors import CSDRankError
from ..params.groups import Groups, hyperparameters_of, members, restore_hyperparameters


class StepHook(JoinHook):
    """Join's hook for a rank without data. `step` takes one step together with the other ranks."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step = step

    def main_hook(self) -> None:
        self.step()


def copy_from_leader(ranks: Ranks, leader: int, groups: Groups, scale: float | None, *, joined: bool) -> float | None:
    """Copy gradients and hyperparameters of `leader`, which has data, to ranks that have `joined`; a collective.

    `scale`: of the gradients (a GradScaler's), or None. Returns the leader's scale. Raises CSDRankError, on all ranks,
    if ranks that have not joined have gradients of different parameters.
    """
    params = [p for _, _, p in members(groups) if is_replicated(p)]
    own_with_grad = [k for k, p in enumerate(params) if p.grad is not None]
    answers = ranks.gather_objects((joined, own_with_grad, [hyperparameters_of(group) for group in groups], scale))
    _, with_grad, hypers, scale = answers[leader]
    if any(theirs != with_grad for has_joined, theirs, *_ in answers if not has_joined):
        raise CSDRankError("ranks that have data have gradients of different parameters")
    if joined:
        for group, kept in zip(groups, hypers, strict=True):
            restore_hyperparameters(group, kept)
    for k, p in enumerate(params):
        if k not in with_grad:
            if joined:
                p.grad = None
            continue
        if joined and p.grad is None:
            p.grad = torch.empty_like(p)
        assert p.grad is not None
        # Ranks with data have the same gradient already, except where csd_optim.push reduces it: there each keeps its
        # own.
        is_mine = joined or ranks.rank == leader
        ranks.broadcast(p.grad if is_mine else torch.empty_like(p.grad), leader)
    return scale
