"""Rounds: commits of a step that several ranks make together.

Each rank writes copy 0 during the next forward. Before anything overwrites the previous round, the ranks tell each
other that all have copy 0; from then on the round counts. They do so when they agree on the next step
(step/agreement.py), in `confirm()` or, if the step goes on behind the program, in a vote in the background
(overlap/together.py). They exchange nothing else: whichever rank dies, at any
time, all ranks have one round in common. Between two rounds a rank may commit alone (what was written to its windows);
such a commit belongs to the earlier round.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import CSDRankError
from .commit import Commit


def check_rounds(numbers: Iterable[int]) -> None:
    """Raise CSDRankError unless all ranks have the same round.

    If the link to an optimizer rank is lost as a step ends, or as states are loaded, one rank alone may lack that
    round. Then the others must not give up the round before it.
    """
    if len(rounds := {*numbers}) > 1:
        raise CSDRankError(
            f"the optimizer ranks have not all made the last step, as a link was lost when it ended (rounds "
            f"{sorted(rounds)}): start all trainers again with resume=True"
        )


class Rounds:
    """Which round this rank is in. A rank without others has none."""

    def __init__(self, *, has_ranks: bool) -> None:
        self._has_ranks = has_ranks
        self.number: int = 0  # of the last round that this rank has begun to commit
        self.step: int = 0  # the step of that round, or of the rank's last commit
        self.unconfirmed: Commit | None = None  # the last round's commit, until confirm()
        self.is_forced: bool = False  # the next commit is a round, even if the step is that of the last round
        self.withdrawn: bool = False  # a round was undone whose copy 0 may be on the disk

    def next_is_one(self, step: int) -> bool:
        """Return whether a commit of this step is a round."""
        return self._has_ranks and (self.is_forced or step != self.step)

    def begin(self, round: Commit | None, step: int) -> None:
        """Note that a commit of this step begins: a `round`, or None."""
        if round:
            self.unconfirmed, self.number = round, self.number + 1
        self.step, self.is_forced, self.withdrawn = step, False, False

    def confirm(self) -> Commit | None:
        """Note that all ranks have the unconfirmed round, and return its commit; None: there is none."""
        commit, self.unconfirmed = self.unconfirmed, None
        return commit

    def withdraw(self, step: int) -> Commit | None:
        """Withdraw the unconfirmed round, as its step was undone; `step` is the one before. Returns its commit, if any.

        Copy 0 may contain that round. No resume continues from it, because not all ranks have it. But the next round
        gets the same number, so confirm() commits once more before that, which overwrites the withdrawn one.
        """
        if commit := self.confirm():
            self.withdrawn = True
            self.number, self.step = self.number - 1, step
        return commit
