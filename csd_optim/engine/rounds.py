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
    """Which round this rank is in. A rank without others has none.

    Numbers of rounds only go up: the next one takes the number after the highest that any rank has used, which the
    ranks tell each other as they confirm a round. So a round that was withdrawn has its number for itself, and copies
    of it that are still on some disks are never taken for another round.
    """

    def __init__(self, *, has_ranks: bool) -> None:
        self._has_ranks = has_ranks
        self.number: int = 0  # of the round that the last commit belongs to
        self.highest: int = 0  # the highest number that any rank is known to have used
        self.step: int = 0  # the step of the last commit
        self.unconfirmed: Commit | None = None  # the last round's commit, until confirm()

    def adopt(self, number: int, step: int) -> None:
        """Continue from a commit."""
        self.number = self.highest = number
        self.step = step

    def next_is_one(self, step: int, *, is_load: bool) -> bool:
        """Return whether a commit of this step, or of a load, is a round."""
        return self._has_ranks and (is_load or step != self.step)

    def next_number(self, *, is_round: bool) -> int:
        """Return the number for the next commit."""
        return self.highest + 1 if is_round else self.number

    def begin(self, commit: Commit, *, is_round: bool) -> None:
        """Note that a commit begins, which has next_number()."""
        self.number, self.step = commit.job.superblock.round, commit.job.step
        if is_round:
            self.unconfirmed, self.highest = commit, self.number

    def confirm(self) -> Commit | None:
        """Note that all ranks have the unconfirmed round, and return its commit; None: there is none."""
        commit, self.unconfirmed = self.unconfirmed, None
        return commit

    def withdraw(self, number: int, step: int) -> None:
        """Withdraw the last commit; the one before was of this step, and belongs to round `number`.

        Copy 0 may contain it. If it is a round, no resume continues from it, because not all ranks have it, or because
        they have replaced it before anything is overwritten: see DurableCommitter.loading().
        """
        self.unconfirmed, self.number, self.step = None, number, step
