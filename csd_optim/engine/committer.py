"""The committer: decides what becomes of completed steps.

The one here keeps nothing; commit/durable.py makes steps durable.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..distributed.ranks import Ranks, RanksElsewhere, all_ranks_or_none
from ..errors import CSDError, CSDRankError, CSDWarning, users_stacklevel
from ..store.format import Record
from ..store.layout import Extent
from .ahead import Ahead, Event, after
from .load import Load
from .parts import Ending, Outcome
from .states import States

NOT_AGREED = "the ranks have not agreed on that step yet. Call synchronize() on all of them first"


class Ballot(NamedTuple):
    """What a rank tells the other ranks about the last round, as integers for a collective."""

    round: int  # number of the last round, if this rank has made it; LACKING: it has not, or only confirm() can tell
    highest: int  # the highest known number of a round, even of an undone step's
    watch_failed: int  # see Watcher.has_failed


LACKING = -1
NO_BALLOT = Ballot(LACKING, 0, 0)  # of a rank that cannot make the round, or whose last step has failed


class Committer:
    """An engine's committer, called before and after everything that changes states. This one makes nothing durable."""

    def __init__(self, states: States) -> None:
        self.states: States = states
        self.ahead: Ahead = Ahead.NOTHING  # why the states differ from the last commit that has begun
        self.load: Load | None = None  # within loading()
        self.committed_steps: np.ndarray[Any, Any] = np.zeros(0, np.float32)  # the parameters' `step` in it

    def note(self, event: Event) -> None:
        """Note what has happened to the states. Raises CSDRuntimeError if the event must not happen now."""
        self.ahead = after(self.ahead, event)

    # ---- commits: no-ops unless states are durable -------------------------------

    def describe(self, manifest: dict[str, Any]) -> None:
        """Set the description of the parameters, which the stores contain from the next commit on."""

    def commit(self, record: Record | None = None) -> None:
        """Start committing the current state, `steps` and `record` (None: the previous record) in the background.

        `wait()` waits for the commit; a round, the joint commit of several ranks, only counts after `confirm()`.
        Raises CSDOSError if the previous commit failed and its retry fails too.
        """
        self.states.watcher.no_commit(self.states.step)

    def confirm(self) -> None:
        """Wait until all ranks have made the last round, which is valid from then on. Call this before changing states.

        A collective. If a rank cannot make the round, raises CSDOSError there, and CSDRankError on the other ranks.
        Nothing has been touched then, and the next call tries again.
        """

    def exchange_ballots(self, ranks: Ranks | RanksElsewhere | None) -> None:
        """Do as confirm(), and do so even if nothing is durable. A collective of `ranks`."""
        with all_ranks_or_none(ranks) as votes:
            votes.mine = self.ballot(retry=True)
        if ranks and ranks.meet_here:
            self.count([Ballot(*ballot) for ballot in votes.all])

    def ballot(self, *, retry: bool) -> Ballot:
        """Wait until this rank has made the last round, and return what it tells the others; then call count().

        `retry`: try again what has failed, and raise CSDOSError if it fails again; nothing has been touched then.
        Otherwise any thread may call this, and needs no lock.
        """
        round = self.own_round() if retry else self.await_round()
        return Ballot(LACKING if round is None else round, self.highest_round, self.states.watcher.has_failed)

    def count(self, ballots: Sequence[Ballot]) -> bool:
        """Return whether all ranks have made the last round, and note it. `ballots`: of all ranks.

        Raises CSDRankError if their rounds differ.
        """
        if any(ballot.round == LACKING for ballot in ballots):
            return False
        check_rounds(ballot.round for ballot in ballots)
        if any(ballot.watch_failed for ballot in ballots):
            self.states.watcher.give_up()
        self.note_confirmed(highest=max(ballot.highest for ballot in ballots))
        return True

    def own_round(self) -> int:
        """Return the number of the last round once this rank has made it. Raises what ballot() raises."""
        self.states.watcher.join()
        return 0

    def await_round(self) -> int | None:
        """Return the number of the last round once this rank has made it; None if only confirm() can tell."""
        self.states.watcher.join()
        return 0

    @property
    def highest_round(self) -> int:
        """The highest known number of a round, even of an undone step's: the next round gets the following number."""
        return 0

    def note_confirmed(self, *, highest: int = 0) -> None:
        """Note that all ranks have made the last round. `highest`: the largest highest_round of all ranks, if known."""
        self.states.watcher.after_commit(self.states.step)

    @property
    def is_confirmed(self) -> bool:
        """Whether all ranks have made the last round, so that a step may overwrite the round before it."""
        return not self.states.watcher.awaits_vote

    def wait(self) -> None:
        """Wait until the last step is durable. Raises CSDOSError, on all ranks. A collective."""

    def all_ranks_or_none(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that raises on all ranks if its body fails on one. A collective."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def loading(self, record: Record | None = None) -> Iterator[Load]:
        """Make everything loaded inside durable at the end, with `record`, or nothing.

        If this raises before Load.stands is set, the states are as before, or `half_loaded`. Several ranks commit the
        load as a round: all enter the context, and it raises on all.
        """
        self.states.truth.note_written()
        self.states.write_decoded()  # earlier writes are no part of the load
        load = self._begin_load()
        try:
            yield load
        except BaseException:
            self._undo_load(load)
            raise
        self._end_load(load)

    def _begin_load(self) -> Load:
        was_written = self.ahead is Ahead.WRITTEN
        self.note(Event.LOAD)
        self.load = Load(self.states, was_written=was_written)
        return self.load

    def _undo_load(self, load: Load) -> None:
        """Put back what was loaded. If that fails, the states are half loaded, and the next step raises."""
        self._leave_load()
        if load.was_written and self.ahead is Ahead.NOTHING:
            self.note(Event.WRITTEN)
        with contextlib.suppress(CSDError):
            load.put_back()

    def _end_load(self, load: Load) -> None:
        self._leave_load()
        load.complete()

    def _leave_load(self) -> None:
        self.load = None
        if self.ahead in (Ahead.LOADING, Ahead.LOADED):
            self.note(Event.UNLOADED)

    @contextlib.contextmanager
    def writing(self, params: Sequence[int]) -> Iterator[None]:
        """Allow writes to the windows of these parameters inside: see Engine.writing()."""
        if self.load:
            self.states.move_to_next_slots(self.load.before_writes(params))
        self.states.remap()
        yield
        self.states.sync()
        self.states.write_decoded()

    # ---- residuals ---------------------------------------------------------------

    def keep_residual(self, param: int, residual: torch.Tensor) -> None:
        """Register the residual of a parameter (numbered over all extents). Not while a step is in flight.

        `residual`: 1-D bfloat16, contiguous, as many elements as the parameter, in the order of its state, on any
        device. Where states are durable, each commit contains the residual's current value. Code that writes to a
        residual without torch must call torch.autograd.graph.increment_version. Raises CSDOSError if a disk is full;
        nothing changes then.
        """
        self.states.residuals[param] = residual

    def drop_residual(self, param: int) -> None:
        """Remove the residual of a parameter, if it has one."""
        self.states.residuals.pop(param, None)

    def adopt_residuals(self, residuals: dict[int, torch.Tensor]) -> None:
        """Register the residuals of the commit that was resumed, by parameter."""
        self.states.residuals.update(residuals)

    # ---- a resume ----------------------------------------------------------------

    def check_recovered(self) -> None:
        """Verify all states of the commit that was resumed, and adopt its residuals. Raises CSDStoreError."""

    def discard_newer(self) -> None:
        """Discard commits that only some devices have. Call this before anything new is written. Raises CSDOSError."""

    # ---- parameters that have left -----------------------------------------------

    def free(self, params: Sequence[int], tiles: np.ndarray[Any, Any]) -> None:
        """Give back the disk space of `params`, which have left, and `tiles`, once no commit on disk can name it."""
        self.states.devices.give_back(self.states.spaces_of(tiles))

    def note_freed(self, tiles: np.ndarray[Any, Any]) -> None:
        """Let commits say from now on that these tiles (uint32, ascending) were freed."""

    # ---- snapshots ---------------------------------------------------------------

    def begin_save(self, path: Path) -> Future[Path] | None:
        """Begin to copy the stores to `path` on the stores' machine.

        None: stores are on this one, and the caller copies.
        """
        return None

    # ---- called by the engine ----------------------------------------------------

    def before_joining_or_leaving(self) -> None:
        """Prepare for parameters to join, although the last step was without them, or to leave after it.

        Raises CSDOSError if the last step cannot be committed; nothing has been touched then.
        """

    def after_extend(self, extent: Extent, offsets: list[int]) -> None:
        """Note that an extent was added. `offsets`: of its beginning in each device's store, in bytes."""

    def before_step(self, tiles: np.ndarray[Any, Any], record: Record | None) -> np.ndarray[Any, Any]:
        """Prepare for a step over `tiles`.

        Returns the written tiles, which the step must contain, too: uint32, ascending.

        Raises CSDOSError if the step must not begin.
        """
        return self.states.truth.note_written()

    def reserve(self, record: Record | None) -> None:
        """Allocate space for the commit of the step in flight, so that a full disk fails now and not in the commit.

        `record`: to be committed, if not before_step()'s. Raises CSDOSError.
        """

    def before_finish(self, record: Record | None, steps: np.ndarray[Any, Any]) -> Ending:
        """Prepare for the step under way to complete, and return what Engine.finish() passes on.

        `record`: as in commit(), which is called next. `steps`: the `step` counts of all parameters after the step,
        fp32.
        """
        return Ending(self.states.step + 1, record or self.states.record, steps, self.highest_round + 1)

    def after_step(self, outcome: Outcome | None) -> None:
        """Note that a step has completed. `outcome`: of NativeEngine.finish()."""

    def before_undo(self) -> None:
        """Prepare for a completed step to be undone: stop its commit."""

    def after_undo(self) -> None:
        """Note that a completed step was undone."""

    def stats(self) -> list[dict[str, Any]]:
        """Return the counts of the last step, one dict per device; see `csd_stats`. Totals cover the store's lifetime.

        Waits for the last step's commit if it writes residuals. Raises CSDOSError.
        """
        return self.states.stats(lambda _: (0, 0))

    @property
    def idle(self) -> bool:
        """Whether close() would have no background work to wait for."""
        return True

    @property
    def steps_changed(self) -> bool:
        """Whether a `step` count differs from the last commit's (0 for parameters that joined since)."""
        steps, committed = self.states.all_steps(), self.committed_steps
        return not np.array_equal(steps[: len(committed)], committed) or bool(steps[len(committed) :].any())

    def meet_at_highest_step(self, ranks: Ranks | RanksElsewhere | None) -> bool:
        """Continue from the highest step of all ranks, as parameters on other ranks may have made more steps.

        Returns whether any rank has parameters; True if only ranks elsewhere know. A collective.
        """
        own = self.states.step, self.states.tiles.n_params
        of_ranks = ranks.gather(*own) if ranks else [own]
        self.states.go_to(max((step for step, n in of_ranks if n), default=self.states.step))
        return any(n for _, n in of_ranks) or bool(ranks and not ranks.meet_here)

    def warn_of_loss(self, reason: str) -> None:
        """Warn that the engine is closed without what was written to states since the last step."""
        message = f"what was written to `state` after step {self.states.step} is lost: {reason}, then close() keeps it"
        warnings.warn(message, CSDWarning, users_stacklevel())

    def end_copies(self) -> None:
        """Ask copies of the last commit, such as snapshots, to hurry, and wait until all have finished."""

    def before_close(self) -> None:
        """Prepare for the engine to close: this is the last chance to commit. Raises CSDOSError."""

    def close(self) -> None:
        """Stop background work; wait until no other thread uses the engine."""


def check_rounds(numbers: Iterable[int]) -> None:
    """Raise CSDRankError unless all ranks have the same round.

    If the link to an optimizer rank is lost at the end of a step, or during a load, one rank may lack the round. The
    other ranks must then keep the round before it.
    """
    if len(rounds := {*numbers}) > 1:
        raise CSDRankError(
            f"the optimizer ranks have not all made the last step, as a link was lost when it ended (rounds "
            f"{sorted(rounds)}): start all trainers again with resume=True"
        )
