"""Commits of an engine with durable stores, alone or in rounds: their content, beginning and end."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ... import commit_trace
from ...accelerator import is_on_accelerator, record_event
from ...distributed.ranks import Ranks, RanksElsewhere, all_ranks_or_none
from ...errors import CSDRuntimeError
from ...store.file import StoreFile
from ...store.format import CLEAN, RESIDUAL_ENTRY, Contents, Record, Region, Superblock
from ...store.reader import Tick
from ..ahead import Ahead, Event, after
from ..committer import Committer
from ..open_devices import OpenDevices
from ..parts import Space
from ..states import States
from .commit import Background, Commit, CommitJob, InParallel, Pins, Replaced
from .manifests import Manifests
from .recovered import Use, read_recovered
from .reports import Reports
from .residuals import Residuals, Room, check_residual
from .rounds import Rounds

NO_REGION = Region(0, 0, 0, 0)


class Commits(Committer):
    """The commits of states on devices, at least one of which is durable: in a directory that the user named.

    See commit.py for what a commit does. Several ranks commit a step together: see rounds.py. DurableCommitter decides
    when to commit, and what must not be overwritten before.
    """

    committed_steps: np.ndarray[Any, Any]

    def __init__(self, states: States, devices: OpenDevices, ranks: Ranks | RanksElsewhere | None) -> None:
        """`devices`: the devices of `states`, with their stores."""
        super().__init__(states)
        states.make_durable()
        self.devices: OpenDevices = devices
        n_devices = len(devices.specs)
        self.ranks = ranks
        self.store_id: bytes = secrets.token_bytes(16)
        self.pins: Pins = Pins()  # of copies of the last commit, such as snapshots
        self.background: Background = Background(n_devices)
        self.residuals: Residuals = Residuals(n_devices)
        self.manifests: Manifests = Manifests(n_devices, ranks)
        devices.name_tile = self.manifests.params_in_tile
        self._reports = Reports()
        self.sequence: int = 0  # number of the last commit
        self._changed = False  # something has changed since the store was last closed cleanly
        self.rounds: Rounds = Rounds(has_ranks=ranks is not None)
        self._last: Commit | None = None  # the commit that began last
        self._freed: set[Space] = set()  # space of parameters that have left; the last commit may still name it
        self._recovered: Sequence[Contents] = ()  # by device: the commit that was resumed
        self._due_record: Record | None = None  # for the next commit if it gets none, such as a load's

    def adopt_commit(self, recovered: Sequence[Contents]) -> None:
        """Continue from the commit found in the stores, given by device; the engine adopts the commit next."""
        commit_trace.note("adopts a commit", committer=self, recovered=recovered)
        block = recovered[0].superblock
        self.store_id, self.sequence, self.states.committed_step = block.store_id, block.sequence, block.step
        self.rounds.adopt(block.round, block.step)
        self.committed_steps = recovered[0].steps
        self.manifests.adopt(recovered[0].manifest)
        self.residuals.adopt_commit(recovered)
        self._recovered = recovered

    def check_recovered(self, use: Use = lambda *_: None, tick: Tick = lambda _: None) -> None:
        """As Committer.check_recovered(); with mode "read" without residuals. `use`, `tick`: see each_tile()."""
        self.adopt_residuals(read_recovered(self._recovered, use, tick, load=self.states.mode == "resume"))

    def discard_newer(self) -> None:
        # recover() has read the commit from the disks, not the page cache (see StoreFile), so every disk has a whole
        # copy.
        for store, commit in zip(self.devices.stores, self._recovered, strict=True):
            assert store is not None
            store.discard_newer(commit)

    # ---- residuals and statistics ----------------------------------------------------

    def describe(self, manifest: dict[str, Any]) -> None:
        self.manifests.describe(manifest)
        self._changed = True

    def keep_residual(self, param: int, residual: torch.Tensor) -> None:
        states = self.states
        states.devices.check_open()
        if states.residuals.get(param) is residual:
            return
        extent = states.tiles.extent_with(param)
        check_residual(residual, numel := extent.numels[param - extent.first_param])
        self.background.wait()  # the commit may still be allocating space
        self.residuals.make_room(param, numel, self.devices.stores)
        self.residuals.mark_replaced(param)
        self.manifests.written &= param in states.residuals
        self._changed = True
        super().keep_residual(param, residual)

    def drop_residual(self, param: int) -> None:
        if param in self.states.residuals:
            super().drop_residual(param)
            self.manifests.written, self._changed = False, True

    def free(self, params: Sequence[int], tiles: np.ndarray[Any, Any]) -> None:
        spaces = {*self.states.spaces_of(tiles), *self.residuals.free(params)}
        commit_trace.note("parameters leave", committer=self, spaces=spaces)
        self._freed |= spaces
        self.note_freed(tiles)
        self.manifests.written, self._changed = False, True

    def note_freed(self, tiles: np.ndarray[Any, Any]) -> None:
        for extent, device, numbers in self.states.tiles.by_place(tiles):
            self.manifests.free(extent, device, numbers.tolist())

    def adopt_residuals(self, residuals: dict[int, torch.Tensor]) -> None:
        super().adopt_residuals(residuals)
        self.residuals.mark_committed(residuals)

    def stats(self) -> list[dict[str, Any]]:
        if self.states.residuals:
            self.background.wait()
        return self.states.stats(self.residuals.bytes_on)

    def reserve(self, record: Record | None) -> None:
        record = record or self.states.record
        spare = 64  # `written_bytes` may get more digits
        size = 8 * self.states.tiles.n_params + len(record.head()) + len(record.user_state) + spare
        size += RESIDUAL_ENTRY.itemsize * len(self.states.residuals)
        for d, store in self._stores.items():
            store.reserve("table", self.manifests.tiles_bytes[d] + size)
            if not self.manifests.written:
                store.reserve("manifest", len(self.manifests.pack(d, self._rooms)))

    # ---- commits ---------------------------------------------------------------------

    @property
    def _stores(self) -> dict[int, StoreFile]:
        """The durable stores, by device."""
        return {d: store for d, store in enumerate(self.devices.stores) if store and store.durable}

    @property
    def _rooms(self) -> dict[int, Room]:
        """Where the current residuals are stored, by parameter."""
        return {param: self.residuals.rooms[param] for param in self.states.residuals}

    @property
    def _makes_round(self) -> bool:
        """Whether the next commit is a round."""
        return self.rounds.next_is_one(self.states.step, is_load=self.ahead is Ahead.LOADED)

    def commit(self, record: Record | None = None, *, clean: bool = False, background: bool = True) -> None:
        """As Committer.commit(), in the `background` or before returning. `clean`: the store closes next."""
        states, self._due_record = self.states, record or self._due_record  # kept for the next commit if this one fails
        states.check_whole()
        after(self.ahead, Event.COMMIT)  # raises if a commit is not possible now
        self.background.wait()
        self._check_confirmed()
        replaced = self._replaced_by_a_commit()
        states.go_to(record=self._due_record)
        self._due_record = None
        makes_round = self._makes_round
        commit = Commit(self._job(clean=clean, round=self.rounds.next_number(is_round=makes_round)), replaced)
        commit_trace.note("commit begins", committer=self, commit=commit, is_round=makes_round)
        self._last = commit
        self.rounds.begin(commit, is_round=makes_round)
        self.note(Event.COMMIT)
        self.manifests.written = True
        self.committed_steps = commit.job.steps
        self.residuals.mark_committed(states.residuals)
        states.truth.commit_begins()
        run = self.background.start if background else self.background.run
        run(f"step {states.step}", partial(self._prepare if makes_round else self._commit_alone, commit))

    def _check_confirmed(self) -> None:
        """Raise CSDRuntimeError if the last round is not confirmed: a resume may need the round before it."""
        if self.rounds.unconfirmed:
            raise CSDRuntimeError("the last round is not confirmed: call confirm() on all ranks first")

    def _replaced_by_a_commit(self) -> Replaced:
        """Return what the beginning of the next commit will replace."""
        return Replaced(
            self.states.record,
            self.rounds.number,
            self.rounds.step,
            self.committed_steps,
            self.residuals.committed_versions,
            self.states.truth.loose.copy(),
            self.manifests.written,
        )

    def _job(self, *, clean: bool, round: int) -> CommitJob:
        """Return what the next commit contains, as of now."""
        states, stores, rooms = self.states, self._stores, self._rooms
        if changed := self.residuals.changed(states.residuals):
            self.pins.wait_before(self.sequence)
        if self._freed:  # space is given back after this commit: no copy of the last one may still read it
            self.pins.wait_before(self.sequence + 1)
        accelerators = {r.device for r in changed.values() if is_on_accelerator(r)}
        self.sequence += 1
        header = self.store_id, 0, len(states.devices.specs), self.sequence, states.step, CLEAN * clean
        return CommitJob(
            states,
            self.residuals,
            stores,
            self.devices.written_before,
            superblock=Superblock(*header, NO_REGION, NO_REGION, self.manifests.version(rooms), round),
            manifests={} if self.manifests.written else {d: self.manifests.pack(d, rooms) for d in stores},
            extents_on={d: [*self.manifests.extents_on[d]] for d in stores},
            steps=states.all_steps(),
            record=states.record,
            new_residuals=changed,
            # After the kernels that write to them.
            ready_events={d: record_event(torch.accelerator.current_stream(d)) for d in accelerators},
            spaces={param: self.residuals.committed[param] for param in rooms if param not in changed},
            freed=frozenset(self._freed),
        )

    def _prepare(self, commit: Commit, in_parallel: InParallel) -> None:
        self.states.watcher.before_commit(commit.job.step)
        commit.prepare(in_parallel)
        if commit.job.step and self.states.native.is_open:
            self._reports.report(
                self.states,
                self._stores,
                self.states.stats(self.residuals.bytes_on),
                store_id=self.store_id.hex(),
                training_seconds=commit.job.record.seconds,
                ranks=self.ranks,
            )

    def _commit_alone(self, commit: Commit, in_parallel: InParallel) -> None:
        self._prepare(commit, in_parallel)
        self._complete(commit, in_parallel)
        self._mark_recoverable(commit)

    def _complete(self, commit: Commit, in_parallel: InParallel) -> None:
        """Complete a commit, and give back space that is no longer named by any commit."""
        commit.complete(in_parallel)
        if freed := commit.job.freed:
            self.devices.give_back(sorted(freed))
            self._freed.difference_update(freed)

    def _mark_recoverable(self, commit: Commit) -> None:
        """Note that from now on a resume after a crash continues from this commit."""
        self.states.committed_step, self.residuals.committed = commit.job.step, commit.job.spaces
        self.states.watcher.after_commit(commit.job.step)
        self.background.on_progress()

    def _withdraw(self, commit: Commit) -> None:
        """End the last commit as invalid, and restore everything that its beginning has replaced.

        Copy 0 may be on the disk, with a manifest: the next commit then has to write the manifest again.
        """
        commit_trace.note("withdraws", committer=self, commit=commit)
        self.background.discard()
        states, replaced = self.states, commit.replaced
        self.rounds.withdraw(replaced.round, replaced.step)
        states.go_to(record=replaced.record)
        self.committed_steps = replaced.committed_steps
        self.residuals.committed_versions = replaced.residual_versions
        self.manifests.written &= replaced.manifests_written
        states.truth.loose[: len(replaced.loose)] |= replaced.loose

    # ---- rounds ----------------------------------------------------------------------

    def all_ranks_or_none(self) -> contextlib.AbstractContextManager[object]:
        return all_ranks_or_none(self.ranks)

    def confirm(self) -> None:
        self.exchange_ballots(self.ranks)

    def own_round(self) -> int:
        self.states.check_whole()
        if self.ranks:
            if self._makes_round:  # no commit has begun yet
                self.commit()
            self.background.wait_for_step()
        return self.rounds.number

    def await_round(self) -> int | None:
        committed = self.background.succeeds() and not self._makes_round and self.rounds.unconfirmed
        return self.rounds.number if committed else None

    @property
    def highest_round(self) -> int:
        return self.rounds.highest

    @property
    def is_confirmed(self) -> bool:
        return not (self.rounds.unconfirmed or self._makes_round)

    def note_confirmed(self, *, highest: int = 0) -> None:
        if commit := self.rounds.confirm():
            commit_trace.note("confirms", committer=self, commit=commit)
            self._mark_recoverable(commit)
            complete = partial(self._complete, commit)
            self.background.start(f"step {self.states.committed_step}", complete, holds_steps=False)
        self.rounds.highest = max(self.rounds.highest, highest)

    def wait(self) -> None:
        self.confirm()
        with self.all_ranks_or_none():
            self.background.wait()

    # ---- the end ---------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return self.background.idle and not self.pins

    def close(self) -> None:
        self.background.close()
        self._reports.close()
