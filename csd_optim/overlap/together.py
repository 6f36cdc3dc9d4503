"""Overlap where ranks train together: a step that fails on one of them is undone on all, when they meet next.

A rank whose step failed must not raise there alone, for the others would wait for it in their next collective. It goes
on with the parameters that there are, and so do those whose step is whole; in what all of them call next, they meet.
"""

from __future__ import annotations

import contextlib

import torch

from ..distributed.ranks import Ranks
from ..engine.engine import Engine
from ..errors import CSDError, CSDRuntimeError
from ..params.groups import Groups, members, name_of
from ..params.state_map import StateMap
from ..signals import defer_signals
from ..step.prepare import PreparedStep
from ..step.run import StepRunner


def check_ranks(groups: Groups, state_map: StateMap, *, backward: bool) -> None:
    """Raises CSDRuntimeError if overlap() cannot do what it is asked for where ranks train together.

    `backward`: the step is to begin in backward.
    """
    if backward:
        raise CSDRuntimeError(
            "overlap() with backward=True or free_gradients=True works in a single process only: with several ranks "
            "call overlap(model), which hides the step behind the next forward"
        )
    for k, i, p in members(groups):
        if p.requires_grad and state_map.part(p).replicas:
            raise CSDRuntimeError(
                f"overlap() cannot hide that ranks share the updates of {name_of(groups, k, i)}, and send each other "
                "what they have updated: use fully_shard (FSDP2, on a mesh without replicas), or construct the "
                "optimizer with sharded=False, where each rank updates all that it holds"
            )


class Together:
    """What the ranks have still to tell each other of the last step."""

    def __init__(self, ranks: Ranks, engine: Engine, runner: StepRunner) -> None:
        self._ranks, self._engine, self._runner = ranks, engine, runner
        # A step that is over here, about which they have not met, and what made it fail here.
        self._unmet: tuple[PreparedStep, BaseException | None] | None = None

    def all_can(self, can: bool) -> bool:
        """Can all ranks launch their step? A collective."""
        return all(there for (there,) in self._ranks.gather(can))

    def is_over(self, step: PreparedStep, failure: BaseException | None) -> None:
        """A launched step is whole here; or its states are undone, because of `failure`."""
        step.prepared = {}  # gradients, which nobody needs any more
        self._unmet = step, failure

    def reveal(self) -> None:
        """Raises what made the last step fail here, until they have met: for who would keep what there is."""
        if self._unmet and (failure := self._unmet[1]):
            raise failure

    def meet(self) -> None:
        """A collective. If the last step has failed on some rank, it is undone on all.

        Then it raises on all of them: there what made it fail, elsewhere CSDRankError.
        """
        if self._unmet is None:
            return
        step, failure = self._unmet
        with defer_signals():
            try:
                self._ranks.agree(failure)
            except BaseException:
                if not self._ranks.lost:  # else nobody knows what the others have
                    self._take_back(step)
                raise
            self._is_met()

    def leave(self) -> None:
        """This rank meets the others no more: what failed here is undone here."""
        if self._unmet and self._unmet[1] and not self._engine.closed:
            with contextlib.suppress(CSDError):
                self._take_back(self._unmet[0])
        self._is_met()

    def _is_met(self) -> None:
        """The last step is not undone any more."""
        if self._unmet and (near := self._unmet[0].near):
            near.end()
        self._unmet = None

    def _take_back(self, step: PreparedStep) -> None:
        self._unmet = None
        with torch.no_grad(), self._engine.lock:
            self._runner.take_back(self._engine, step)
