"""The version in the making: from the step whose weights it gets until readers see it.

.. code-block:: text

               step is kept      share is written         all have step and share        rank 0 names it
    UNDER_WAY ─────────────> DUE ────────────────> WRITTEN ─────────────────────> CONFIRMED ──────────> NAMED
        │                     │                       │                               │
        └─────────────────────┴───────────────────────┴───────────────────────────────┴──> GIVEN_UP

A version without a share of some rank is given up: by that rank at once, and by all ranks in the vote that confirms the
step. Its number is not used again, and the next version is a full one. A version whose step is undone is forgotten,
and the next one gets its number.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple


class VersionPhase(Enum):
    """How far a version has got on this rank."""

    UNDER_WAY = auto()
    DUE = auto()
    WRITTEN = auto()
    CONFIRMED = auto()
    NAMED = auto()
    GIVEN_UP = auto()


_BEFORE = {
    VersionPhase.DUE: (VersionPhase.UNDER_WAY,),
    VersionPhase.WRITTEN: (VersionPhase.DUE,),
    VersionPhase.CONFIRMED: (VersionPhase.WRITTEN,),
    VersionPhase.NAMED: (VersionPhase.CONFIRMED,),
    VersionPhase.GIVEN_UP: tuple(phase for phase in VersionPhase if phase is not VersionPhase.NAMED),
}


@dataclass
class PendingVersion:
    """A version in the making, and its phase on this rank."""

    run: str
    number: int
    step: int
    base: int | None  # number of the base version; None: a full version
    last_full: int  # number of the last full version: perhaps this one
    phase: VersionPhase = VersionPhase.UNDER_WAY

    def enter(self, phase: VersionPhase) -> None:
        """Go to the next phase."""
        assert self.phase in _BEFORE.get(phase, ()), f"a version cannot become {phase.name}: it is {self.phase.name}"
        self.phase = phase


class NextVersion(NamedTuple):
    """What all ranks know of the next version."""

    run: str
    number: int
    base: int  # number of the base version; 0: the next version is a full one
    last_full: int  # number of the last full version

    def begin(self, step: int, full_every: int) -> PendingVersion:
        """Return the version of a step that begins. `full_every`: versions per full version."""
        if not self.base or self.number - self.last_full >= full_every:
            return PendingVersion(self.run, self.number, step, None, self.number)
        return PendingVersion(self.run, self.number, step, self.base, self.last_full)

    def after(self, version: PendingVersion) -> NextVersion:
        """Return what follows this version, which is confirmed or given up."""
        if version.phase is VersionPhase.GIVEN_UP:
            return self._replace(number=version.number + 1)
        return NextVersion(version.run, version.number + 1, version.number, version.last_full)
