"""The durable committer: a commit stays intact on the devices until the next one is complete, whatever happens."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..accelerator import is_on_accelerator, record_event
from ..distributed.ranks import Ranks, RanksElsewhere, all_ranks_or_none
from ..errors import CSDError, CSDRuntimeError
from ..store.file import StoreFile
from ..store.format import CLEAN, RESIDUAL_ENTRY, Contents, Record, Region, Superblock
from ..store.layout import Extent
from ..store.reader import Tick
from .commit import Background, Commit, CommitJob, InParallel, Pins, Replaced
from .committer import NOT_AGREED, Committer
from .manifests import Manifests
from .open_devices import OpenDevices
from .recovered import Use, read_recovered
from .reports import Reports
from .residuals import Residuals, Room, check_residual
from .rounds import Rounds
from .states import States

NO_REGION = Region(0, 0, 0, 0)


class DurableCommitter(Committer):
    """The committer of an engine with at least one durable store, that is, one in a directory that the user named.

    It commits each step (see commit.py). What a commit names stays untouched until the next commit: a step reads the
    slots that the commit names and writes the other ones; windows are private mappings (see truth.py). A commit
    writes the residuals that have changed, to space that the previous commit does not use.

    Several ranks commit a step together: see rounds.py.
    """

    uncommitted: bool
    committed_steps: np.ndarray[Any, Any]

    def __init__(self, states: States, devices: OpenDevices, ranks: Ranks | RanksElsewhere | None) -> None:
        """`devices`: those of the states, with their stores."""
        super().__init__(states)
        states.make_durable()
        self.devices: OpenDevices = devices
        n_devices = len(devices.specs)
        self.ranks = ranks
        self.store_id: bytes = secrets.token_bytes(16)
        self.pins: Pins = Pins()  # of those who copy the last commit, such as snapshots
        self.background: Background = Background(n_devices)
        self._residuals = Residuals(n_devices)
        self._manifests = Manifests(n_devices, ranks)
        devices.name_tile = self._manifests.params_in_tile
        self._reports = Reports()
        self._sequence = 0  # number of the last commit
        self._changed = False  # something has changed since the store was last closed cleanly
        self.rounds: Rounds = Rounds(has_ranks=ranks is not None)
        self._recovered: Sequence[Contents] = ()  # that of the resume, by device
        self._within_loading = False  # inside loading()
        self._due_record: Record | None = None  # the next commit's, if that names none: of what is being loaded, say

    def adopt_commit(self, recovered: Sequence[Contents]) -> None:
        """Continue from the commit found in the stores, given by device; the engine adopts the commit next."""
        block = recovered[0].superblock
        self.store_id, self._sequence, self.rounds.number = block.store_id, block.sequence, block.round
        self.states.committed_step = self.rounds.step = block.step
        self.committed_steps = recovered[0].steps
        self._manifests.adopt(recovered[0].manifest)
        self._residuals.adopt_commit(recovered)
        self._recovered = recovered

    def check_recovered(self, use: Use = lambda *_: None, tick: Tick = lambda _: None) -> None:
        """Do as Committer.check_recovered(); with mode "read" without residuals. `use`, `tick`: see each_tile()."""
        self.adopt_residuals(read_recovered(self._recovered, use, tick, load=self.states.mode == "resume"))

    def discard_newer(self) -> None:
        # recover() read the commit from the disks, not the page cache (see StoreFile), so each has a whole copy of it.
        for store, commit in zip(self.devices.stores, self._recovered, strict=True):
            assert store is not None
            store.discard_newer(commit)

    # ---- called by the engine --------------------------------------------------

    def describe(self, manifest: dict[str, Any]) -> None:
        self._manifests.describe(manifest)
        self._changed = True

    def before_extend(self) -> None:
        if self.uncommitted:  # the parameters that join must not be part of the last step's commit
            self.commit()
        self.background.wait()  # the commit may still be allocating space
        self._changed = True

    def after_extend(self, extent: Extent, offsets: list[int]) -> None:
        self._manifests.add(extent, offsets)

    def keep_residual(self, param: int, residual: torch.Tensor) -> None:
        states = self.states
        states.devices.check_open()
        if states.residuals.get(param) is residual:
            return
        extent = states.tiles.extent_with(param)
        check_residual(residual, numel := extent.numels[param - extent.first_param])
        self.background.wait()  # the commit may still be allocating space
        self._residuals.make_room(param, numel, self.devices.stores)
        self._residuals.mark_replaced(param)
        self._manifests.written &= param in states.residuals
        self._changed = True
        super().keep_residual(param, residual)

    def drop_residual(self, param: int) -> None:
        if param in self.states.residuals:
            super().drop_residual(param)
            self._manifests.written, self._changed = False, True

    def adopt_residuals(self, residuals: dict[int, torch.Tensor]) -> None:
        super().adopt_residuals(residuals)
        self._residuals.mark_committed(residuals)

    def stats(self) -> list[dict[str, Any]]:
        if self.states.residuals:
            self.background.wait()
        return self.states.stats(self._residuals.bytes_on)

    def before_step(self, tiles: np.ndarray[Any, Any], record: Record | None) -> np.ndarray[Any, Any]:
        """Do as Committer.before_step().

        Raises CSDOSError if the previous step cannot be committed; nothing has been touched then.
        """
        if self.uncommitted:
            self.commit()
        self.background.wait()  # this step overwrites the slots of the commit before the last one
        self.pins.wait_before(self._sequence)
        self.reserve(record)
        written = super().before_step(tiles, record)
        self._changed = True
        self._residuals.before_step = [*self._residuals.written_bytes]
        return written

    def after_step(self) -> None:
        self.uncommitted = True

    def before_undo(self) -> None:
        if self.rounds.unconfirmed:
            self.background.discard()

    def after_undo(self) -> None:
        self._due_record = None
        if commit := self.rounds.withdraw(self.states.step):
            self._put_back(commit.replaced)
        self.uncommitted = True

    def _put_back(self, replaced: Replaced) -> None:
        """Put back everything that a commit has replaced as it began, since that commit is withdrawn.

        Its copy 0 may be on the disk, with its manifest: then the next commit has to write the manifest again.
        """
        states = self.states
        states.record, self.committed_steps = replaced.record, replaced.committed_steps
        self._residuals.committed_versions = replaced.residual_versions
        self._manifests.written &= replaced.manifests_written
        states.truth.loose[: len(replaced.loose)] |= replaced.loose

    def reserve(self, record: Record | None) -> None:
        record = record or self.states.record
        spare = 64  # `written_bytes` may have some digits more
        size = 8 * self.states.tiles.n_params + len(record.head()) + len(record.user_state) + spare
        size += RESIDUAL_ENTRY.itemsize * len(self.states.residuals)
        for d, store in self._stores.items():
            store.reserve("table", self._manifests.tiles_bytes[d] + size)
            if not self._manifests.written:
                store.reserve("manifest", len(self._manifests.pack(d, self._rooms)))

    def end_copies(self) -> None:
        self.pins.end()

    # ---- commits -------------------------------------------------------------------

    @property
    def _stores(self) -> dict[int, StoreFile]:
        """The durable stores, by device."""
        return {d: store for d, store in enumerate(self.devices.stores) if store and store.durable}

    @property
    def _rooms(self) -> dict[int, Room]:
        """Where the current residuals are stored, by parameter."""
        return {param: self._residuals.rooms[param] for param in self.states.residuals}

    @property
    def _makes_round(self) -> bool:
        """Whether the next commit is a round."""
        return self.rounds.next_is_one(self.states.step)

    def all_ranks_or_none(self) -> contextlib.AbstractContextManager[object]:
        return all_ranks_or_none(self.ranks)

    def commit(self, record: Record | None = None, *, clean: bool = False, background: bool = True) -> None:
        """Commit as Committer.commit(), in the `background` or before returning. `clean`: the store closes next."""
        states, self._due_record = self.states, record or self._due_record  # of the next one, too, if this one fails
        states.check_whole()
        self.background.wait()
        if self.rounds.unconfirmed:
            raise CSDRuntimeError("the last round is not confirmed: call confirm() before the next commit")
        replaced = self._replaced_by_a_commit()
        states.record, self._due_record = self._due_record or states.record, None
        makes_round = self._makes_round
        commit = Commit(self._job(clean=clean, round=self.rounds.number + makes_round), replaced)
        self.rounds.begin(commit if makes_round else None, states.step)
        self._manifests.written, self.uncommitted = True, False
        self.committed_steps = commit.job.steps
        self._residuals.mark_committed(states.residuals)
        states.truth.commit_begins()
        run = self.background.start if background else self.background.run
        run(f"step {states.step}", partial(self._prepare if makes_round else self._commit_alone, commit))

    def _replaced_by_a_commit(self) -> Replaced:
        """Return what the next commit will replace as it begins."""
        return Replaced(
            self.states.record,
            self.committed_steps,
            self._residuals.committed_versions,
            self.states.truth.loose.copy(),
            self._manifests.written,
        )

    def _job(self, *, clean: bool, round: int) -> CommitJob:
        """Return what the next commit contains, as of now."""
        states, stores, rooms = self.states, self._stores, self._rooms
        if changed := self._residuals.changed(states.residuals):
            self.pins.wait_before(self._sequence)
        accelerators = {r.device for r in changed.values() if is_on_accelerator(r)}
        self._sequence += 1
        header = self.store_id, 0, len(states.devices.specs), self._sequence, states.step, CLEAN * clean
        return CommitJob(
            states,
            self._residuals,
            stores,
            self.devices.written_before,
            superblock=Superblock(*header, NO_REGION, NO_REGION, self._manifests.version(rooms), round),
            manifests={} if self._manifests.written else {d: self._manifests.pack(d, rooms) for d in stores},
            extents_on={d: [*self._manifests.extents_on[d]] for d in stores},
            steps=states.all_steps(),
            record=states.record,
            new_residuals=changed,
            # After the kernels that write to them.
            ready_events={d: record_event(torch.accelerator.current_stream(d)) for d in accelerators},
            spaces={param: self._residuals.committed[param] for param in rooms if param not in changed},
        )

    def _prepare(self, commit: Commit, in_parallel: InParallel) -> None:
        self.states.watcher.before_commit(commit.job.step)
        commit.prepare(in_parallel)
        if commit.job.step and self.states.native.is_open:
            self._reports.report(
                self.states,
                self._stores,
                self.states.stats(self._residuals.bytes_on),
                store_id=self.store_id.hex(),
                training_seconds=commit.job.record.seconds,
                ranks=self.ranks,
            )

    def _commit_alone(self, commit: Commit, in_parallel: InParallel) -> None:
        self._prepare(commit, in_parallel)
        commit.complete(in_parallel)
        self._mark_recoverable(commit)

    def _mark_recoverable(self, commit: Commit, *, has_failed: bool = False) -> None:
        """Note that a resume after a crash continues from this commit from now on."""
        self.states.committed_step, self._residuals.committed = commit.job.step, commit.job.spaces
        self.states.watcher.after_commit(commit.job.step, has_failed=has_failed)
        self.background.on_progress()

    def confirm(self) -> None:
        with all_ranks_or_none(self.ranks) as said:
            self.own_round()
            said.own = self.states.watcher.has_failed
        if self.ranks and self.ranks.meet_here:
            self.note_confirmed(has_failed=any(said.by_ranks))

    def own_round(self) -> int:
        self.states.check_whole()
        if self.ranks:
            if self._makes_round or self.rounds.withdrawn:  # no commit has begun yet, or a withdrawn round is left
                self.commit()
            self.background.wait()
        return self.rounds.number

    def await_round(self) -> int | None:
        committed = self.background.succeeds() and not self._makes_round and self.rounds.unconfirmed
        return self.rounds.number if committed else None

    @property
    def is_confirmed(self) -> bool:
        return not (self.rounds.unconfirmed or self.rounds.withdrawn or self._makes_round)

    def note_confirmed(self, *, has_failed: bool = False) -> None:
        if commit := self.rounds.confirm():
            self._mark_recoverable(commit, has_failed=has_failed)
            self.background.start(f"step {self.states.committed_step}", commit.complete)

    @contextlib.contextmanager
    def loading(self, record: Record | None = None) -> Iterator[None]:
        self.confirm()
        states = self.states
        if states.unmapped.any():
            self._commit_pending_step()
        self.rounds.is_forced, self._due_record, self._within_loading = True, record, True
        try:
            with self.all_ranks_or_none():
                yield
            if self.meet_at_highest_step(self.ranks):
                with self.all_ranks_or_none():
                    self.flush()
                self.wait()
            self.rounds.is_forced = False  # still set if there was nothing to commit
        finally:
            self._due_record, self._within_loading = None, False

    def wait(self) -> None:
        self.confirm()
        with self.all_ranks_or_none():
            self.background.wait()

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
            self.pins.wait_before(self._sequence)
            states.move_to_next_slots(edited)
            self.uncommitted = True
        self.commit(clean=clean and states.synced, background=False)

    # ---- writing to windows ----------------------------------------------------------

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
            if self.uncommitted:
                states.truth.note_written()
                states.remap()
                if not self._within_loading:
                    self.commit(background=False)
        except BaseException:
            with contextlib.suppress(CSDError):
                states.remap()  # the windows of other parameters, whose tiles are committed, were opened too
            raise

    def _open_windows(self, params: Sequence[int]) -> None:
        states, truth = self.states, self.states.truth
        states.devices.check_open()
        if not states.tiles.extents:
            return
        tiles = states.tiles.of(params)
        states.check_whole()
        self.background.wait()  # the commit closes windows that are still open
        unmapped = states.unmapped
        if unmapped.any():
            self._commit_pending_step()
        tiles = tiles[~unmapped[tiles]]
        if truth.open[tiles].all():
            return
        self.pins.wait_before(self._sequence)
        self._changed = True
        edited = truth.note_written()
        edited = edited[~unmapped[edited]]  # _write_decoded() moves the others, and only once
        tiles = np.union1d(tiles, edited)
        states.move_to_next_slots(tiles[~truth.loose[tiles]])
        self.uncommitted = True
        states.show(open=True)

    def _commit_pending_step(self) -> None:
        """Commit the last step if its commit failed. Until then the last commit has the other slots of its tiles."""
        if self.uncommitted and not (self._within_loading or self._makes_round):
            self.commit(background=False)

    def _write_decoded(self, new: np.ndarray[Any, Any]) -> None:
        """Do as States.write_decoded(). Does nothing inside loading(), whose flush does it once for all.

        `new`: tiles that had no states before; bool, one per tile.
        """
        edited = self.states.truth.decoded_to_write()
        if self._within_loading or not len(edited):
            return
        if not new[edited].all():
            self.pins.wait_before(self._sequence)
            self.uncommitted = True
        self.states.write_decoded()

    # ---- the end -------------------------------------------------------------------

    def before_close(self) -> None:
        self.end_copies()  # a copy may have begun since close() waited for them
        states, truth = self.states, self.states.truth
        if not states.tiles.extents and not self.rounds.number:
            return
        truth.note_written()
        edited = truth.would_be_lost or self._residuals.changed(states.residuals) or self.steps_changed
        # Other ranks may lack this round, or be gone: the last round that all ranks have must not be overwritten.
        unconfirmed = self.rounds.unconfirmed or self._makes_round
        # A step failed in which parameters joined: these have no state yet.
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
        can_commit = self._manifests and states.mode != "read" and not (unconfirmed or states.broken)
        if can_commit and (self._changed or edited):
            self.flush(clean=True)

    @property
    def _failed_to_join(self) -> bool:
        """Whether the step failed in which parameters joined, so that a resume must find the last commit, without them.

        A script that is restarted adds the parameters in that step again.
        """
        joined = not self._manifests.written or self.states.tiles.n_params > len(self.committed_steps)
        return joined and 0 < self.states.step == self.states.committed_step

    @property
    def idle(self) -> bool:
        return self.background.idle and not self.pins

    def close(self) -> None:
        self.background.close()
        self._reports.close()
