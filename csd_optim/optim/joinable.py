"""The optimizer in torch.distributed.algorithms.Join: a rank without data takes steps for the others."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook

from ..distributed.ranks import Ranks
from ..params.groups import hyperparameters_of, restore_hyperparameters
from ..step.joining import StepHook


class JoinableSteps(Joinable):
    """The part of CSDOptimizer that Join calls."""

    param_groups: list[dict[str, Any]]
    _ranks: Ranks | None
    _joined: bool  # this rank has no more data and takes part in a step of the other ranks

    def step(self) -> Any:
        raise NotImplementedError

    def join_hook(self, **_: Any) -> JoinHook:
        """Let ranks that have run out of data go on updating their share, with ``Join([ddp, optimizer])``."""
        return StepHook(self._step_of_others)

    @property
    def join_device(self) -> torch.device:
        return self._ranks.device if self._ranks else torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self._ranks.group if self._ranks else torch.distributed.group.WORLD

    def _step_of_others(self) -> None:
        kept = [hyperparameters_of(group) for group in self.param_groups]
        self._joined = True
        try:
            self.step()
        finally:
            self._joined = False
            for group, own in zip(self.param_groups, kept, strict=True):
                restore_hyperparameters(group, own)
