"""The committer of a trainer whose states are with an owner, which commits each step that it completes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from ..distributed.ranks import Ranks, all_ranks_or_none
from ..engine.committer import NOT_AGREED, Committer
from ..engine.rounds import check_rounds
from ..engine.states import States
from ..errors import CSDError, CSDRankError, CSDTornError, CSDValueError
from ..store.format import Record
from .link import Link
from .messages import pack_counts
from .remote_native import RemoteNative
from .tile_image import view


def parts_of(record: Record) -> tuple[dict[str, Any], bytes]:
    """Return a record as it travels: JSON, and `user_state`."""
    return {"groups": record.groups, "given": record.given, "seconds": record.seconds}, record.user_state


class RemoteCommitter(Committer):
    """See Committer. The record of a step leaves with the message that completes it, so commit() has little to do."""

    uncommitted = False
    committed_steps: np.ndarray[Any, Any]

    def __init__(self, states: States, native: RemoteNative, link: Link, ranks: Ranks | None) -> None:
        super().__init__(states)
        states.make_durable()
        self._native, self._link, self._ranks = native, link, ranks
        self._sent: Record | None = None  # the record that went with the last step
        self._within_loading = False
        self._unconfirmed = False  # the ranks have not met since the last commit
        self._awaited: int | None = None  # the step whose commit has begun, and is not known to be durable
        self._round = 0  # the last one that this rank has told the others

    # ---- commits -----------------------------------------------------------------

    def describe(self, manifest: dict[str, Any]) -> None:
        self._link.request("describe", manifest=manifest)

    def before_step(self, tiles: np.ndarray[Any, Any], record: Record | None) -> np.ndarray[Any, Any]:
        self._native.record_bytes = _bytes_of(record or self.states.record)
        return super().before_step(tiles, record)

    def reserve(self, record: Record | None) -> None:
        if (size := _bytes_of(record or self.states.record)) > self._native.record_bytes:
            self._link.request("reserve", record_bytes=size)
            self._native.record_bytes = size

    def before_finish(self, record: Record | None, steps: np.ndarray[Any, Any]) -> None:
        self._sent = record or self.states.record
        self._native.ending = *parts_of(self._sent), steps
        self.states.watcher.step_completes(self.states.step + 1)

    def commit(self, record: Record | None = None) -> None:
        record = record or self.states.record
        self.states.record, self._unconfirmed = record, self._ranks is not None
        self.committed_steps = self.states.all_steps()
        if record is self._sent:
            self._sent = None
            failure, self._native.commit_failure = self._native.commit_failure, None
            if failure:
                raise failure
            self._await_commit()
            return
        head, user_state = parts_of(record)
        counts = pack_counts(self.states.all_steps())
        self.states.watcher.before_commit(self.states.step)
        answer = self._link.request("commit", counts, user_state, step=self.states.step, record=head)
        self._link.note_committed(answer.fields)
        self._await_commit()

    def _await_commit(self) -> None:
        """Have the watcher told once the owner's commit of the last step is durable."""
        with self._link.changed:
            self._awaited = self.states.step
            self.note_committed()

    def note_committed(self) -> None:
        """Take note of what the link knows of commits. On any thread, which holds the link's `changed`."""
        self.states.committed_step = self._link.committed_step
        # Of several ranks, all must have it: see note_confirmed().
        if self._ranks is None and self._awaited == self._link.committed_step and self._link.commits_at_rest:
            step, self._awaited = self._awaited, None
            self.states.watcher.after_commit(step, has_failed=self.states.watcher.has_failed)

    def all_ranks_or_none(self) -> contextlib.AbstractContextManager[object]:
        return all_ranks_or_none(self._ranks)

    def discard_newer(self) -> None:
        self._link.request("discard_newer")

    def confirm(self) -> None:
        with all_ranks_or_none(self._ranks) as exchanged:
            exchanged.own = self.own_round(), self.states.watcher.has_failed
        if self._ranks:
            check_rounds(round for round, _ in exchanged.by_ranks)
            self.note_confirmed(has_failed=any(failed for _, failed in exchanged.by_ranks))

    def own_round(self) -> int:
        if self._ranks is None:
            self._link.attach()
        elif not self._native.is_stepping:  # a guess has begun only after all have that round
            self._round = self._link.request("confirm").fields.integer("round", 0)
        return self._round

    def await_round(self) -> int | None:
        if self._link.is_lost:  # to attach again changes states, which only confirm() may do
            return None
        try:
            self._round = self._link.request("confirm").fields.integer("round", 0)
        except CSDError:
            return None
        return self._round

    @property
    def is_confirmed(self) -> bool:
        return not self._unconfirmed

    def note_confirmed(self, *, has_failed: bool = False) -> None:
        if self._unconfirmed:
            self.states.watcher.after_commit(self.states.step, has_failed=has_failed)
        self._unconfirmed = False
        # If it is lost now, the next request finds out, within a context in which the other ranks learn of it.
        with contextlib.suppress(CSDError):
            self._link.note_committed(self._link.request("confirmed").fields)

    def wait(self) -> None:
        if self._ranks:
            self.confirm()
        with self.all_ranks_or_none():
            self._link.note_committed(self._link.request("wait").fields)

    @property
    def idle(self) -> bool:
        return self._link.commits_at_rest or self._link.is_lost

    # ---- states written between steps ----------------------------------------------

    @contextlib.contextmanager
    def writing(self, params: Sequence[int]) -> Iterator[None]:
        self.states.remap()
        yield
        self.states.truth.note_written()
        if not self._within_loading:
            self._write(brackets=True)
        self.states.truth.filled()

    def _write(self, *, brackets: bool) -> None:
        """Send everything that was written to states; with `brackets` it is durable when this returns."""
        decoded = self.states.decoded
        written = decoded.written()
        rows = sorted(written)
        if not rows:
            return
        if brackets:
            self._link.request("writing", rows=rows)
        try:
            for row in rows:
                extent = self.states.tiles.extent_with(row)
                nbytes = 4 * extent.numels[row - extent.first_param]
                for section, address in enumerate(decoded.addresses(row, written[row])):
                    if address:
                        self._native.write(row, section, view(address, nbytes))
            if brackets:
                self.committed_steps = self.states.all_steps()
                answer = self._link.request("written", pack_counts(self.committed_steps))
                self._link.note_committed(answer.fields)
        except BaseException:
            self._give_up()
            raise
        self.states.truth.moved(self.states.tiles.of(rows))

    def _give_up(self) -> None:
        """End a session in which only some states were written: the owner goes back to what it had committed."""
        self._link.lose(CSDRankError("states were not written as a whole"))

    @contextlib.contextmanager
    def loading(self, record: Record | None = None) -> Iterator[None]:
        self.confirm()
        self._within_loading = True
        step, before, counts = self.states.step, self.states.record, self.states.all_steps()
        try:
            with self.all_ranks_or_none():
                yield
            if self.meet_at_highest_step(self._ranks):
                with self.all_ranks_or_none():
                    self._load(record)
                self.wait()
        except BaseException:
            self._give_up()
            self.states.step, self.states.record = step, before
            for extent, own in zip(self.states.tiles.extents, self.states.steps, strict=True):
                here = counts[extent.first_param : extent.first_param + len(own)]
                own[: len(here)] = here
            raise
        finally:
            self._within_loading = False

    def _load(self, record: Record | None) -> None:
        """Have everything that was written to states, and `record`, committed at once."""
        self.states.truth.note_written()
        rows = sorted(self.states.decoded.written())
        self.states.record = record or self.states.record
        head, user_state = parts_of(self.states.record)
        self._link.request("loading", user_state, rows=rows, record=head)
        self._write(brackets=False)
        self.committed_steps = self.states.all_steps()
        answer = self._link.request("loaded", pack_counts(self.committed_steps), step=self.states.step)
        self._link.note_committed(answer.fields)

    # ---- undo ----------------------------------------------------------------------

    def after_undo(self) -> None:
        self._sent = None

    # ---- snapshots -----------------------------------------------------------------

    def begin_save(self, path: Path) -> Future[Path] | None:
        """Have the owner make a snapshot at `path` on its machine, and wait for it. The future is done."""
        if not path.is_absolute():
            raise CSDValueError(f"Invalid path: {str(path)!r}; on the optimizer ranks' machine it must be absolute")
        self.states.truth.note_written()
        if self.states.truth.would_be_lost:
            self._write(brackets=True)
        self._link.request("save", path=str(path))
        done: Future[Path] = Future()
        try:
            self._link.request("saved")
            done.set_result(path / f"rank-{self._ranks.rank}" if self._ranks else path)
        except CSDError as e:
            done.set_exception(e)
        return done

    # ---- statistics ----------------------------------------------------------------

    def stats(self) -> list[dict[str, Any]]:
        return self.states.stats(lambda _: (0, 0))

    # ---- the end -------------------------------------------------------------------

    def before_close(self) -> None:
        """Have what the program wrote to states since the last step committed, and end the session."""
        if self._link.is_lost or self.states.broken:
            return
        truth = self.states.truth
        truth.note_written()
        if self.states.rolled_back:
            pass  # what was written belongs to a step that the owner has lost
        elif (truth.would_be_lost or self.steps_changed) and self._unconfirmed:
            self.warn_of_loss(NOT_AGREED)
        elif not truth.empty.any():
            if truth.would_be_lost:
                self._write(brackets=True)
            elif self.steps_changed:
                self.commit()
        with contextlib.suppress(CSDTornError):
            self._link.note_committed(self._link.request("close").fields)


def _bytes_of(record: Record) -> int:
    """Return the size of a record. Raises CSDValueError if it cannot be sent, before a step begins."""
    try:
        head = json.dumps(parts_of(record)[0], allow_nan=False)  # as Record.head() has it, after its length
    except (TypeError, ValueError) as e:
        raise CSDValueError(f"hyperparameters of some group cannot be kept by optimizer ranks: {e}") from None
    return 4 + len(head) + len(record.user_state)
