"""Overlap with several ranks: a step that fails on one rank is undone on all of them when they meet next.

A rank whose step failed must not raise alone, because the others would wait for it in their next collective. It goes on
with the parameters it has, as do the ranks whose step is complete. They meet in the next call that is a collective.
"""

from __future__ import annotations

import contextlib

from ..distributed.ranks import Ranks
from ..engine.engine import Engine
from ..errors import CSDError, CSDRuntimeError
from ..params.groups import Groups, members, name_of
from ..params.state_map import StateMap
from ..signals import defer_signals
from ..step.live import LiveStep


def check_ranks(groups: Groups, state_map: StateMap, *, backward: bool) -> None:
    """Raise CSDRuntimeError if overlap() does not support these options with several ranks.

    `backward`: steps begin in backward.
    """
    if backward:
        raise CSDRuntimeError(
            "overlap() with backward=True or free_gradients=True works in a single process only: with several ranks "
            "call overlap(model), which hides the step behind the next forward"
        )
    for k, i, p in members(groups):
        if p.requires_grad and state_map.part(p).replicas:
            raise CSDRuntimeError(
                f"overlap() cannot hide the exchange of {name_of(groups, k, i)}, whose updates the ranks share: use "
                "fully_shard (FSDP2, on a mesh without replicas), or construct the optimizer with sharded=False, "
                "where each rank updates all that it holds"
            )


class Together:
    """The outcome of the last step on this rank, until the ranks have told each other theirs."""

    def __init__(self, ranks: Ranks, engine: Engine) -> None:
        self._ranks, self._engine = ranks, engine
        # A step that has ended here but was not agreed on yet, and the exception that made it fail here, if any.
        self._unagreed: tuple[LiveStep, BaseException | None] | None = None

    def all_can(self, can: bool) -> bool:
        """Return whether all ranks can launch their step. A collective."""
        return all(there for (there,) in self._ranks.gather(can))

    def note_outcome(self, live: LiveStep, failure: BaseException | None) -> None:
        """Note that a launched step has ended here: it is complete, or `failure` made it undo its states."""
        live.spec.sources = {}  # frees gradients, which are no longer needed
        self._unagreed = live, failure

    def raise_failure(self) -> None:
        """Raise the failure of the last step here, as long as the ranks have not met.

        Called before parameters are saved, since they may not be those of a complete step.
        """
        if self._unagreed and (failure := self._unagreed[1]):
            raise failure

    def agree(self) -> None:
        """Agree on the last step, a collective. If the step failed on any rank, it is undone on all of them.

        Then this raises on all ranks: the failure where it happened, CSDRankError elsewhere.
        """
        if self._unagreed is None:
            return
        live, failure = self._unagreed
        with defer_signals():
            try:
                self._ranks.agree(failure)
            except BaseException:
                if not self._ranks.lost:  # with a rank lost, it is unknown whether the others have the step
                    self._take_back(live)
                raise
            self._finalize()

    def leave(self) -> None:
        """End the meetings of this rank: a step that failed here is undone here."""
        if self._unagreed and self._unagreed[1] and not self._engine.closed:
            with contextlib.suppress(CSDError):
                self._take_back(self._unagreed[0])
        self._finalize()

    def _finalize(self) -> None:
        """Free what was kept to undo the last step, which is final now."""
        if self._unagreed:
            self._unagreed[0].keep()
        self._unagreed = None

    def _take_back(self, live: LiveStep) -> None:
        self._unagreed = None
        live.take_back()
