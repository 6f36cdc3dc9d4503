"""Whether the states are newer than the last commit, and why: a state machine with one value."""

from __future__ import annotations

from enum import Enum, auto

from ..errors import CSDRuntimeError


class Ahead(Enum):
    """Why the states differ from the commit that began last.

    =========  ==========================================================  ========================================
    value      the states are                                              tiles may be (truth.Authority)
    =========  ==========================================================  ========================================
    NOTHING    those of that commit                                        COMMITTED; new ones EMPTY or LOOSE
    WRITTEN    newer, by a step or by what the program wrote to them       the same; moved ones LOOSE
    LOADING    being loaded, within loading(): nothing is committed, and   the same; open ones show what is loaded
               no step begins
    LOADED     a whole load, which the next commit contains: a round, if   LOOSE where something was loaded
               there are several ranks
    WITHDRAWN  those before a load that was undone. Its commit may be on   COMMITTED; their other slots may be named
               the disk: another one must be there before tiles move       by that commit
    =========  ==========================================================  ========================================

    EDITED and RESEEDED are possible with every value: these are writes that no tile on a device has yet.
    """

    NOTHING = auto()
    WRITTEN = auto()
    LOADING = auto()
    LOADED = auto()
    WITHDRAWN = auto()

    @property
    def is_uncommitted(self) -> bool:
        """Whether a commit has to begin before the next step does."""
        return self in (Ahead.WRITTEN, Ahead.WITHDRAWN)


class Event(Enum):
    """What changes the value of Ahead. The strings are for messages."""

    WRITTEN = "a step, or a write to states"
    COMMIT = "a commit"
    UNDONE = "the undo of a step"  # back to the last commit
    WITHDRAWN = "the undo of a load whose commit had begun"
    LOAD = "loading()"
    LOADED = "the end of loading()"
    UNLOADED = "the end of loading() with nothing loaded"


_USUAL = {Event.WRITTEN: Ahead.WRITTEN, Event.COMMIT: Ahead.NOTHING, Event.UNDONE: Ahead.NOTHING}
TRANSITIONS: dict[Ahead, dict[Event, Ahead]] = {
    Ahead.NOTHING: {**_USUAL, Event.LOAD: Ahead.LOADING, Event.WITHDRAWN: Ahead.WITHDRAWN},
    Ahead.WRITTEN: {**_USUAL, Event.LOAD: Ahead.LOADING},
    Ahead.LOADING: {Event.WRITTEN: Ahead.LOADING, Event.LOADED: Ahead.LOADED, Event.UNLOADED: Ahead.NOTHING},
    Ahead.LOADED: {Event.WRITTEN: Ahead.LOADED, Event.COMMIT: Ahead.NOTHING, Event.UNLOADED: Ahead.NOTHING},
    Ahead.WITHDRAWN: {Event.COMMIT: Ahead.NOTHING},
}


def after(ahead: Ahead, event: Event) -> Ahead:
    """Return the value after an event. Raises CSDRuntimeError if the event must not happen with the present value."""
    if event not in TRANSITIONS[ahead]:
        within = "within loading()" if ahead is Ahead.LOADING else f"while states are {ahead.name}"
        raise CSDRuntimeError(f"{event.value} is not possible {within}")
    return TRANSITIONS[ahead][event]
