"""The durable committer: a commit stays intact on the devices until the next one is complete, whatever happens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ... import commit_trace
from ...errors import CSDError
from ...store.format import Record
from ...store.layout import Extent
from ..ahead import Ahead, Event
from ..committer import NOT_AGREED
from ..load import Load
from ..parts import Outcome
from .commit import Commit
from .commits import Commits


class DurableCommitter(Commits):
    """The committer of an engine with at least one durable store.

    Commits each step. What a commit names stays untouched until the next commit: a step reads the slots that the commit
    names, and writes the other slots; windows are private mappings (see truth.py). A commit writes the residuals that
    have changed, to space that the previous commit does not use.
    """

    # ---- called by the engine --------------------------------------------------------

    def before_joining_or_leaving(self) -> None:
        if self.ahead.is_uncommitted:  # the last step's commit has that step's parameters only
            self.commit()
        self.background.wait()  # the commit may still be allocating space or reading tiles
        self._changed = True

    def after_extend(self, extent: Extent, offsets: list[int]) -> None:
        self.manifests.add(extent, offsets)
        for store in self._stores.values() if self.ranks else ():
            store.stay()  # from the next step on, other ranks may have a commit

    def before_step(self, tiles: np.ndarray[Any, Any], record: Record | None) -> np.ndarray[Any, Any]:
        """Do as Committer.before_step().

        Raises CSDOSError if the previous step cannot be committed; nothing has been touched then.
        """
        if self.ahead.is_uncommitted:
            self.commit()
        # This step overwrites the slots of the commit before the last one. Once all ranks have copy 0 of a round, no
        # resume needs these slots, so copy 1 of the round may be written during the step.
        self.background.wait_for_step()
        self.pins.wait_before(self.sequence)
        self.reserve(record)
        commit_trace.note("step begins", committer=self, tiles=tiles)
        written = super().before_step(tiles, record)
        self._changed = True
        self.residuals.before_step = [*self.residuals.written_bytes]
        return written

    def after_step(self, outcome: Outcome | None) -> None:
        self.note(Event.WRITTEN)

    def before_undo(self) -> None:
        if self.rounds.unconfirmed:
            self.background.discard()

    def after_undo(self) -> None:
        self._due_record = None
        if self.rounds.unconfirmed:
            self._withdraw(self.rounds.unconfirmed)
        self.note(Event.UNDONE)

    def end_copies(self) -> None:
        self.pins.end()

    # ---- loads -----------------------------------------------------------------------

    @contextlib.contextmanager
    def loading(self, record: Record | None = None) -> Iterator[Load]:
        """As Committer.loading().

        A load is complete when all devices of all ranks have copy 0 of its commit, which ranks know only once they have
        told each other. If the commit has failed on some rank, all ranks go back, and replace copy 0 by another commit
        before they overwrite anything named in it.
        """
        self.confirm()
        load = before = None
        try:
            with self.all_ranks_or_none():
                self._commit_pending()
                load, before = self._begin_load(), self._last
                yield load
            if self.meet_at_highest_step(self.ranks):
                with self.all_ranks_or_none():
                    self._due_record = record
                    self.note(Event.LOADED)
                    self.flush()
        except BaseException:
            if load:
                self._undo_load(load, self._last if self._last is not before else None)
            raise
        self._end_load(load)
        self.wait()

    def _commit_pending(self) -> None:
        """Commit what cannot be restored after a failed load: a step without a commit, and writes to windows."""
        edited = self.states.truth.to_flush()
        if self.states.truth.empty.any():  # the step in which they joined has failed: not to be committed
            if len(edited):
                self.warn_of_loss("if this load fails. Call step()")
        elif self.ahead.is_uncommitted or not self.states.unmapped[edited].all():
            self.flush()

    def _undo_load(self, load: Load, commit: Commit | None = None) -> None:
        """Put back what was loaded. `commit`: the load's, if it has begun.

        In a single process a load is complete, and is not undone, once all devices have copy 0: the next call retries
        the rest.
        """
        if commit and commit.prepared.is_set and self.ranks is None:
            return self._end_load(load)
        commit_trace.note("load fails", committer=self)
        self._due_record = None
        if commit:
            self._withdraw(commit)
            self.note(Event.WITHDRAWN)
        self._go_back(load)
        if commit:
            with contextlib.suppress(CSDError):  # the next step tries again before it overwrites anything
                self.commit(background=False)

    def _go_back(self, load: Load) -> None:
        commit_trace.note("tiles go back", committer=self)
        super()._undo_load(load)

    # ---- writes between steps --------------------------------------------------------

    def flush(self, *, clean: bool = False) -> None:
        """Commit everything, including writes to windows since the last step, and wait. Raises CSDOSError.

        `clean`: the store is closed next.
        """
        states = self.states
        self.background.wait()
        self._changed = True
        edited = states.truth.to_flush()
        if len(edited):
            if states.truth.loose[edited].any():
                self._commit_pending_step()
            self.pins.wait_before(self.sequence)
            self._move(edited)
        self.commit(clean=clean and states.synced, background=False)

    @contextlib.contextmanager
    def writing(self, params: Sequence[int]) -> Iterator[None]:
        """See Engine.writing(). The previous commit stays intact: the tiles move to their other slots first.

        New tiles are committed with the next step, and within `loading()` everything is committed at its end.
        """
        states = self.states
        self._open_windows(params)
        try:
            yield
            new = states.truth.empty.copy()
            states.sync()
            self._write_decoded(new)
            if self.ahead is not Ahead.NOTHING:
                states.truth.note_written()
                states.remap()
                if not self.load:
                    self.commit(background=False)
        except BaseException:
            with contextlib.suppress(CSDError):
                states.remap()  # this also opened the windows of other parameters, whose tiles are committed
            raise

    def _open_windows(self, params: Sequence[int]) -> None:
        states, truth = self.states, self.states.truth
        states.devices.check_open()
        if not states.tiles.extents:
            return
        states.check_whole()
        self._check_confirmed()
        self.background.wait()  # the commit closes windows that are still open
        if self.load:
            self.pins.wait_before(self.sequence)
            self._changed = True
            self._move(self.load.before_writes(params))
            return states.show(open=True)
        tiles, unmapped = states.tiles.of(params), states.unmapped
        if unmapped.any():
            self._commit_pending_step()
        tiles = tiles[~unmapped[tiles]]
        if truth.open[tiles].all():
            return
        self.pins.wait_before(self.sequence)
        self._changed = True
        edited = truth.note_written()
        edited = edited[~unmapped[edited]]  # _write_decoded() moves unmapped tiles, and only once
        tiles = np.union1d(tiles, edited)
        self._move(tiles[~truth.loose[tiles]])
        states.show(open=True)

    def _move(self, tiles: np.ndarray[Any, Any]) -> None:
        """Move tiles to their other slots: see States.move_to_next_slots()."""
        self._note_move(tiles)
        self.states.move_to_next_slots(tiles)

    def _note_move(self, tiles: np.ndarray[Any, Any]) -> None:
        """Call before tiles move to their other slots. Raises CSDOSError if the slots cannot be overwritten."""
        if self.ahead is Ahead.WITHDRAWN:
            self.commit(background=False)
        commit_trace.note("tiles move", committer=self, tiles=tiles)
        self.note(Event.WRITTEN)

    def _commit_pending_step(self) -> None:
        """Commit the last step if its commit failed. Until then the commit before it needs the tiles' other slots."""
        if self.ahead.is_uncommitted and not self._makes_round:
            self.commit(background=False)

    def _write_decoded(self, new: np.ndarray[Any, Any]) -> None:
        """As States.write_decoded(). Does nothing inside loading(), whose flush writes everything at once.

        `new`: tiles that had no states before; bool, one per tile.
        """
        edited = self.states.truth.decoded_to_write()
        if self.load or not len(edited):
            return
        if not new[edited].all():
            self.pins.wait_before(self.sequence)
            self._note_move(edited)
        self.states.write_decoded()

    # ---- the end ---------------------------------------------------------------------

    def before_close(self) -> None:
        self.end_copies()  # a copy may have begun since close() waited
        states, truth = self.states, self.states.truth
        if not states.tiles.extents and not self.rounds.number:
            return
        truth.note_written()
        edited = truth.would_be_lost or self.residuals.changed(states.residuals) or self.steps_changed
        # Other ranks may lack the last round, or be gone: the round before it must not be overwritten.
        unconfirmed = self.rounds.unconfirmed or self._makes_round
        # Tiles of parameters whose first step failed: no states yet.
        stateless = truth.empty.any()
        reason = ""
        if unconfirmed and edited:
            reason = NOT_AGREED
        elif stateless and states.step and truth.would_be_lost:
            reason = "the step failed in which parameters joined. Call step() again first"
        if reason:
            self.warn_of_loss(reason)
        self.background.wait()
        if stateless or (self._failed_to_join and not edited):
            return
        # If the engine is broken, an earlier call has raised that already.
        can_commit = self.manifests and states.mode != "read" and not (unconfirmed or states.broken)
        if can_commit and (self._changed or edited):
            self.flush(clean=True)
            self._changed = False

    @property
    def _failed_to_join(self) -> bool:
        """Whether the step failed in which parameters joined: a resume must then find the commit without them.

        A restarted script adds the parameters in that step again.
        """
        joined = not self.manifests.written or self.states.tiles.n_params > len(self.committed_steps)
        return joined and 0 < self.states.step == self.states.committed_step
