"""Rounds: commits of a step that several ranks make together.

Each rank writes copy 0 during the next forward. Before anything overwrites the previous round, the ranks tell each
other that all have copy 0; from then on the round is valid. This happens when ranks agree on the next step
(step/agreement.py), in `confirm()` or, if the step runs in the background, in a vote there (overlap/together.py).
Nothing else is exchanged: whichever rank dies, at any time, all ranks have one round in common. Between two rounds a
rank may commit alone, after writes to its windows; such a commit belongs to the earlier round.
"""

from __future__ import annotations

from .commit import Commit


class Rounds:
    """The round of this rank. A single rank has no rounds.

    Numbers of rounds only go up: a round takes the number after the highest that any rank has used, which ranks tell
    each other when they confirm a round. So the number of a withdrawn round is never used again, and copies of such a
    round that are still on some disks are never taken for another round.
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
        """Note that a commit begins, with the number from next_number()."""
        self.number, self.step = commit.job.superblock.round, commit.job.step
        if is_round:
            self.unconfirmed, self.highest = commit, self.number

    def confirm(self) -> Commit | None:
        """Note that all ranks have the unconfirmed round, and return its commit; None if there is no such round."""
        commit, self.unconfirmed = self.unconfirmed, None
        return commit

    def withdraw(self, number: int, step: int) -> None:
        """Withdraw the last commit. `number`, `step`: round and step of the commit before it.

        The withdrawn commit may be in copy 0. If it is a round, no resume continues from it: either some rank lacks it,
        or all ranks replace it before anything is overwritten, see DurableCommitter.loading().
        """
        self.unconfirmed, self.number, self.step = None, number, step
