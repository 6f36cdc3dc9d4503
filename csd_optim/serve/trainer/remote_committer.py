"""The committer of a trainer whose states are with owners. Owners commit each step as they complete it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from ...distributed.ranks import Ranks, all_ranks_or_none
from ...engine.ahead import Event
from ...engine.committer import NOT_AGREED, Committer, check_rounds
from ...engine.load import Load
from ...engine.parts import Ending, Outcome
from ...engine.states import States
from ...errors import CSDError, CSDRankError, CSDTornError, CSDValueError
from ...store.format import Record
from ..messages import pack_counts
from ..tile_image import view
from .divided_manifest import part_manifest
from .remote_native import parts_of
from .shares import Share


class RemoteCommitter(Committer):
    """See Committer. The record travels with the message that completes a step, so commit() has little to do.

    Several owners of one trainer commit in rounds, like several trainers.
    """

    committed_steps: np.ndarray[Any, Any]

    def __init__(self, states: States, shares: Sequence[Share], ranks: Ranks | None) -> None:
        super().__init__(states)
        states.make_durable()
        self._shares, self._ranks = shares, ranks
        self._has_rounds = ranks is not None or len(shares) > 1
        self._outcome: Outcome | None = None  # of the last step, until commit()
        # Of the last commit: its step; and the record, the committed steps and the round before it.
        self._replaced = 0, Record(), self.committed_steps, 0
        self._unconfirmed = False  # the ranks have not confirmed the last commit
        self._all_told = True  # all owners know that the last commit is confirmed
        self._awaited: int | None = None  # the step whose commit has begun, but is not known to be durable
        self._round = 0  # the last round reported to other ranks
        self._highest = 0  # see highest_round; owners use the numbers chosen here

    # ---- commits -----------------------------------------------------------------

    def describe(self, manifest: dict[str, Any]) -> None:
        for share in self._shares:
            if share.pending:  # has new parameters, to be described once all owners have room
                continue
            about = manifest if share.is_whole else part_manifest(manifest, share, self.states.tiles)
            share.link.request("describe", manifest=about)

    def before_step(self, tiles: np.ndarray[Any, Any], record: Record | None) -> np.ndarray[Any, Any]:
        if not self.is_confirmed and self._ranks is None:
            self.own_round()
        self._check_not_pending()
        for share in self._shares:
            share.native.record_bytes = _bytes_of(record or self.states.record)
        return super().before_step(tiles, record)

    def _check_not_pending(self) -> None:
        for share in self._shares:
            share.check_not_pending()

    def reserve(self, record: Record | None) -> None:
        size = _bytes_of(record or self.states.record)
        for share in self._shares:
            if size > share.native.record_bytes:
                share.link.request("reserve", record_bytes=size)
                share.native.record_bytes = size

    def before_finish(self, record: Record | None, steps: np.ndarray[Any, Any]) -> Ending:
        ending = super().before_finish(record, steps)
        self._highest = ending.round
        self.states.watcher.step_completes(ending.step)
        return ending

    def after_step(self, outcome: Outcome | None) -> None:
        self._outcome = outcome

    def commit(self, record: Record | None = None) -> None:
        record = record or self.states.record
        if self._replaced[0] != self.states.step:  # else a retry
            self._replaced = self.states.step, self.states.record, self.committed_steps, self._round
        self.states.go_to(record=record)
        self._unconfirmed = self._has_rounds
        self.committed_steps = steps = self.states.all_steps()
        self._check_not_pending()
        to_send, failure = [*self._shares], None
        outcome = self._outcome
        if outcome and outcome.record is record:
            failure = outcome.commit_failure
            to_send = [share for share in to_send if share.native.owner_step != self.states.step]  # without tiles in it
        else:
            self._highest += 1
            self.states.watcher.before_commit(self.states.step)
        head, user_state = parts_of(record)
        for share in to_send:
            counts = pack_counts(share.counts(steps))
            fields = {"step": self.states.step, "round": self._highest, "record": head}
            answer = share.link.request("commit", counts, user_state, **fields)
            share.native.owner_step = self.states.step
            share.link.note_committed(answer.fields)
        self._outcome = None
        if failure:
            raise failure
        self._await_commit()

    def _await_commit(self) -> None:
        """Let the watcher know once the owner's commit of the last step is durable."""
        with self._shares[0].link.changed:
            self._awaited = self.states.step
            self.note_committed()

    def note_committed(self) -> None:
        """Take note of the links' news of commits. On any thread that holds the links' `changed`."""
        self.states.committed_step = min(share.link.committed_step for share in self._shares)
        # With several ranks or owners, all must have the commit: see note_confirmed().
        at_rest = all(share.link.commits_at_rest for share in self._shares)
        if not self._has_rounds and self._awaited == self.states.committed_step and at_rest:
            step, self._awaited = self._awaited, None
            self.states.watcher.after_commit(step)

    def all_ranks_or_none(self) -> contextlib.AbstractContextManager[object]:
        return all_ranks_or_none(self._ranks)

    def discard_newer(self) -> None:
        for share in self._shares:
            share.link.request("discard_newer")

    def confirm(self) -> None:
        self.exchange_ballots(self._ranks)

    def own_round(self) -> int:
        if not self._has_rounds:
            self._shares[0].link.attach()
        elif not any(share.native.is_stepping for share in self._shares):  # a guess: all have the last round
            self._round = self._round_of_owners()
            if self._ranks is None:  # no other rank has to confirm
                self.note_confirmed()
        return self._round

    def _round_of_owners(self) -> int:
        """Wait until all owners have made the last round, and return its number. Raises CSDError."""
        rounds: list[int] = [share.link.request("confirm").fields.round for share in self._shares]
        check_rounds(rounds)
        self._highest = max(self._highest, rounds[0])
        return rounds[0]

    def await_round(self) -> int | None:
        if self._any_lost:  # attaching again changes states, which only confirm() may do
            return None
        try:
            self._round = self._round_of_owners()
        except CSDError:
            return None
        return self._round

    @property
    def _any_lost(self) -> bool:
        return any(share.link.is_lost for share in self._shares)

    @property
    def is_confirmed(self) -> bool:
        return self._all_told and not self._unconfirmed

    @property
    def highest_round(self) -> int:
        return self._highest

    def note_confirmed(self, *, highest: int = 0) -> None:
        self._highest = max(self._highest, highest)
        if self._unconfirmed:
            self.states.watcher.after_commit(self.states.step)
        self._unconfirmed = False
        # If a link is lost now, the next request raises, in a context that tells the other ranks.
        self._all_told = True
        for share in self._shares:
            try:
                share.link.note_committed(share.link.request("confirmed").fields)
            except CSDError:
                self._all_told = False

    def wait(self) -> None:
        if self._has_rounds:
            self.confirm()
        with self.all_ranks_or_none():
            self._request("wait")

    def _request(self, op: str) -> None:
        """Send a request to all owners, and take note of the progress of their commits."""
        for share in self._shares:
            share.link.note_committed(share.link.request(op).fields)

    @property
    def idle(self) -> bool:
        return all(share.link.commits_at_rest for share in self._shares) or self._any_lost

    # ---- states written between steps ----------------------------------------------

    @contextlib.contextmanager
    def writing(self, params: Sequence[int]) -> Iterator[None]:
        self.states.remap()
        yield
        self.states.truth.note_written()
        if not self.load:
            self._flush()
        self.states.truth.filled()

    def _flush(self) -> None:
        """Send all written states, and return when they are durable. Raises CSDError.

        Several owners of a single trainer commit the states as a round, so that all have them or none.
        """
        if len(self._shares) > 1 and self._ranks is None:
            self.confirm()
            try:
                self._load(None)
            except BaseException:
                self._give_up()
                raise
            self.confirm()
        else:
            self._write(brackets=True)

    def _write(self, *, brackets: bool) -> None:
        """Send all written states. `brackets`: return when they are durable."""
        decoded = self.states.decoded
        written = decoded.written()
        rows = sorted(written)
        if not rows:
            return
        self._check_not_pending()
        try:
            for share in self._shares if brackets else ():
                share.link.request("writing", rows=share.rows_of(rows))
            for share in self._shares:
                for there in share.rows_of(rows):
                    row, first, n = share.parts[there].tolist()
                    for section, address in enumerate(decoded.addresses(row, written[row])):
                        if address:
                            share.native.write(there, section, view(address + 4 * first, 4 * n))
            if brackets:
                self._end_writing("written")
        except BaseException:
            self._give_up()
            raise
        self.states.truth.moved(self.states.tiles.of(rows))

    def _end_writing(self, op: str, **fields: Any) -> None:
        """End a bracket of writes, which owners then commit. `op`: "written" or "loaded"."""
        self.committed_steps = self.states.all_steps()
        for share in self._shares:
            answer = share.link.request(op, pack_counts(share.counts(self.committed_steps)), **fields)
            if op == "loaded":
                share.native.owner_step = self.states.step
            share.link.note_committed(answer.fields)

    def _give_up(self) -> None:
        """End the sessions because only some states were written: owners go back to their last commits."""
        for share in self._shares:
            share.link.lose(CSDRankError("states were not written as a whole"))

    @contextlib.contextmanager
    def loading(self, record: Record | None = None) -> Iterator[Load]:
        self.confirm()
        load = None
        try:
            with self.all_ranks_or_none():
                self.states.truth.note_written()
                if self.states.truth.would_be_lost:
                    self._flush()  # earlier writes are no part of the load
                load = self._begin_load()
                yield load
            if self.meet_at_highest_step(self._ranks):
                with self.all_ranks_or_none():
                    self.note(Event.LOADED)
                    self._load(record)
                self.wait()
        except BaseException:
            self._give_up()
            if load:
                self._undo_load(load)
            raise
        self._end_load(load)

    def _load(self, record: Record | None) -> None:
        """Have all written states, and `record`, committed at once."""
        self._check_not_pending()
        self.states.truth.note_written()
        rows = sorted(self.states.decoded.written())
        self.states.go_to(record=record)
        head, user_state = parts_of(self.states.record)
        for share in self._shares:
            share.link.request("loading", user_state, rows=share.rows_of(rows), record=head)
        self._write(brackets=False)
        self._highest += 1
        self._end_writing("loaded", step=self.states.step, round=self._highest)

    def free(self, params: Sequence[int], tiles: np.ndarray[Any, Any]) -> None:
        for share in self._shares:
            if rows := share.rows_of(params):
                share.link.request("free", rows=rows)

    # ---- undo ----------------------------------------------------------------------

    def before_undo(self) -> None:
        for share in self._shares:
            if share.native.owner_step == self.states.step:
                share.native.take_back_last()

    def after_undo(self) -> None:
        self._outcome = None
        undone, record, committed_steps, round = self._replaced
        if undone == self.states.step + 1:  # the owners have withdrawn the commit
            self.states.go_to(record=record)
            self.committed_steps, self._round, self._unconfirmed = committed_steps, round, False

    # ---- snapshots -----------------------------------------------------------------

    def begin_save(self, path: Path) -> Future[Path] | None:
        """Have the owner make a snapshot at `path` on its machine, and wait. The returned future is done."""
        if not path.is_absolute():
            raise CSDValueError(f"Invalid path: {str(path)!r}; on the optimizer ranks' machine it must be absolute")
        self.states.truth.note_written()
        if self.states.truth.would_be_lost:
            self._flush()
        for share in self._shares:
            share.link.request("save", path=str(path))
        done: Future[Path] = Future()
        try:
            for share in self._shares:
                share.link.request("saved")
            done.set_result(path / f"rank-{self._ranks.rank}" if self._ranks else path)
        except CSDError as e:
            done.set_exception(e)
        return done

    # ---- statistics ----------------------------------------------------------------

    def stats(self) -> list[dict[str, Any]]:
        return self.states.stats(lambda _: (0, 0))

    # ---- the end -------------------------------------------------------------------

    def before_close(self) -> None:
        """Have the program's writes since the last step committed, and end the session."""
        if self._any_lost or self.states.broken:
            return
        truth = self.states.truth
        truth.note_written()
        if self._ranks is None and self._unconfirmed:
            with contextlib.suppress(CSDError):
                self.own_round()
        if self.states.rolled_back:
            pass  # the writes belong to a step that the owner has lost
        elif (truth.would_be_lost or self.steps_changed) and self._unconfirmed:
            self.warn_of_loss(NOT_AGREED)
        elif not truth.empty.any():
            if truth.would_be_lost:
                self._flush()
            elif self.steps_changed:
                self.commit()
        with contextlib.suppress(CSDTornError):
            self._request("close")


def _bytes_of(record: Record) -> int:
    """Return the size of a record in bytes. Called before a step: raises CSDValueError if the record cannot be sent."""
    try:
        head = json.dumps(parts_of(record)[0], allow_nan=False)  # as in Record.head(), after the length
    except (TypeError, ValueError) as e:
        raise CSDValueError(f"hyperparameters of some group cannot be kept by optimizer ranks: {e}") from None
    return 4 + len(head) + len(record.user_state)
