"""Ranks that have run out of data (torch.distributed.algorithms.Join) go on to update their share of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook

from .manifest import Groups, members, plain, put_back
from .parts import held_alike
from .ranks import Ranks


class StepHook(JoinHook):
    """`step` takes one of the steps that the others take."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step = step

    def main_hook(self) -> None:
        self.step()


def borrow(ranks: Ranks, leader: int, groups: Groups, scale: float | None, *, joined: bool) -> float | None:
    """Gives ranks that have `joined` the gradients and hyperparameters of `leader`, a rank that has not; a collective.

    `scale`: of the gradients (a GradScaler's), or None. Returns the leader's.
    """
    params = [p for _, _, p in members(groups) if held_alike(p)]
    with_own = [k for k, p in enumerate(params) if p.grad is not None]
    own = with_own, [plain(group) for group in groups], scale
    with_grad, hypers, scale = ranks.gather_objects(own)[leader]
    if joined:
        for group, kept in zip(groups, hypers, strict=True):
            put_back(group, kept)
    for k, p in enumerate(params):
        if k not in with_grad:
            if joined:
                p.grad = None
            continue
        if joined and p.grad is None:
            p.grad = torch.empty_like(p)
        assert p.grad is not None
        ranks.broadcast(p.grad, leader)
    return scale
