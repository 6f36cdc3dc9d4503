"""The durable committer: a commit stays intact on the devices until the next one is complete, whatever happens."""

from __future__ import annotations

import contextlib
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

import numpy as np
import torch

from ..accelerator import is_on_accelerator, record_event
from ..distributed.ranks import Ranks, all_ranks_or_none
from ..errors import CSDError, CSDRuntimeError, CSDValueError, CSDWarning, users_stacklevel
from ..store.file import StoreFile
from ..store.format import CLEAN, RESIDUAL_ENTRY, Contents, Record, Region, Superblock, read_commits
from ..store.layout import Extent
from .commit import Background, Commit, CommitJob, InParallel, Pin
from .committer import Committer
from .engine import Engine
from .manifests import Manifests
from .reports import Reports
from .residuals import Residuals, Room

NO_REGION = Region(0, 0, 0, 0)


class DurableCommitter(Committer):
    """The committer of an engine with at least one durable store, that is, one in a directory that the user named.

    It commits each step (see commit.py). What a commit names stays untouched until the next commit: a step reads the
    slots that the commit names and writes the other ones; windows are private mappings (see windows.py). A commit
    writes the residuals that have changed, to space that the previous commit does not use.

    Several ranks commit a step together, as a *round*. Each rank writes copy 0 during the next forward. In `confirm()`,
    which comes before anything overwrites the previous round, the ranks tell each other that all have copy 0; from then
    on the round counts. They exchange nothing else, and nothing in the background: whichever rank dies, at any time,
    all ranks have one round in common. Between two rounds a rank may commit alone (what was written to its windows);
    such a commit belongs to the earlier round.
    """

    durable = True
    committed_step: int
    uncommitted: bool

    def __init__(self, engine: Engine, ranks: Ranks | None) -> None:
        super().__init__(engine)
        n_devices = len(engine.devices.specs)
        self.ranks = ranks
        self.store_id: bytes = secrets.token_bytes(16)
        self.pins: list[Pin] = []
        self._background = Background(n_devices)
        self._residuals = Residuals(n_devices)
        self._manifests = Manifests(n_devices, ranks)
        self._reports = Reports()
        self._sequence = 0  # number of the last commit
        self._changed = False  # something has changed since the store was last closed cleanly
        self._committed_steps = np.zeros(0, np.float32)  # `step` of each parameter in the last commit
        self._round = 0  # the last round that this rank has begun to commit
        self._round_step = 0  # the step of that round
        self._unconfirmed: Commit | None = None  # the last round's commit, until confirm()
        self._record_before = engine.record  # the record of the round before the unconfirmed one
        self._round_withdrawn = False  # a round was undone whose copy 0 may be on the disk
        self._within_loading = False  # inside loading()
        self._force_round = False  # the next commit is a round, even if the step is that of the last round
        self._loaded_record: Record | None = None  # to be committed with the states that are being loaded

    def adopt_commit(self, recovered: Sequence[Contents]) -> None:
        """Continue from the commit found in the stores, given by device; the engine adopts the commit next."""
        block = recovered[0].superblock
        self.store_id, self._sequence, self._round = block.store_id, block.sequence, block.round
        self.committed_step = self._round_step = block.step
        self._committed_steps = recovered[0].steps
        self._manifests.adopt(recovered[0].manifest)
        self._residuals.adopt_commit(recovered)

    # ---- called by the engine --------------------------------------------------

    def name_tile(self, device: int, tile: int) -> str:
        if not self._manifests:
            return ""
        extent = self._engine.extent_of(tile)
        return self._manifests.params_in_tile(device, self._engine.extents.index(extent), tile - extent.first_tile)

    def describe(self, manifest: dict[str, Any]) -> None:
        self._manifests.describe(manifest)
        self._changed = True

    def before_extend(self) -> None:
        if self.uncommitted:  # the parameters that join must not be part of the last step's commit
            self.commit()
        self._background.wait()  # the commit may still be allocating space
        self._changed = True

    def after_extend(self, extent: Extent, offsets: list[int]) -> None:
        self._manifests.add(extent, offsets)

    def before_keep_residual(self, param: int, residual: torch.Tensor) -> None:
        engine = self._engine
        engine.check_open()
        if engine.residuals.get(param) is residual:
            return
        extent = engine.extent_with(param)
        numel = extent.numels[param - extent.first_param]
        if residual.dtype is not torch.bfloat16 or residual.shape != (numel,) or not residual.is_contiguous():
            raise CSDValueError(f"residual is {tuple(residual.shape)} {residual.dtype}, not dense ({numel},) bfloat16")
        self._background.wait()  # the commit may still be allocating space
        self._residuals.make_room(param, numel, engine.devices.stores)
        self._residuals.mark_replaced(param)
        self._manifests.written &= param in engine.residuals
        self._changed = True

    def after_drop_residual(self, param: int) -> None:
        self._manifests.written, self._changed = False, True

    def adopt_residuals(self, residuals: Mapping[int, torch.Tensor]) -> None:
        self._residuals.mark_committed(residuals)

    def before_stats(self) -> None:
        if self._engine.residuals:
            self._background.wait()

    def residual_bytes(self, device: int) -> tuple[int, int]:
        written = self._residuals.written_bytes[device]
        return written - self._residuals.before_step[device], written

    def before_step(self, tiles: np.ndarray[Any, Any], record: Record | None) -> np.ndarray[Any, Any]:
        """Add the tiles whose windows were written.

        Raises CSDOSError if the previous step cannot be committed; nothing has been touched then.
        """
        if self.uncommitted:
            self.commit()
        self._background.wait()  # this step overwrites the slots of the commit before the last one
        self.wait_for_pins()
        self.reserve(record)
        tiles = super().before_step(tiles, record)
        self._changed = True
        self._residuals.before_step = [*self._residuals.written_bytes]
        return tiles

    def after_step(self) -> None:
        self.uncommitted = True

    def before_undo(self) -> None:
        if self._unconfirmed:
            self._background.discard()

    def after_undo(self) -> None:
        """Withdraw the round of the undone step.

        Copy 0 may contain that round. No resume continues from it, because not all ranks have it. But the next round
        gets the same number, so confirm() commits once more before that, which overwrites the withdrawn one.
        """
        if self._unconfirmed:
            self._engine.record = self._record_before
            self._unconfirmed, self._round, self._round_step = None, self._round - 1, self._engine.step
        self.uncommitted = self._round_withdrawn = True

    def reserve(self, record: Record | None) -> None:
        record = record or self._engine.record
        spare = 64  # `written_bytes` may have some digits more
        size = 8 * self._engine.n_params + len(record.head()) + len(record.user_state) + spare
        size += RESIDUAL_ENTRY.itemsize * len(self._engine.residuals)
        for d, store in self._stores.items():
            store.reserve("table", self._manifests.tiles_bytes[d] + size)
            if not self._manifests.written:
                store.reserve("manifest", len(self._manifests.pack(d, self._rooms)))

    # ---- copies of the last commit, such as snapshots ----------------------------

    def wait_for_pins(self) -> None:
        """Wait until nobody copies the slots that will be overwritten next."""
        for pin in self.pins:
            if self._sequence > pin.sequence:
                pin.hurry.set()
                wait([pin.done])
        self.pins = [pin for pin in self.pins if not pin.done.done()]

    def end_copies(self) -> None:
        for pin in (pins := [*self.pins]):
            pin.hurry.set()
        wait([pin.done for pin in pins])

    # ---- commits -------------------------------------------------------------------

    @property
    def _stores(self) -> dict[int, StoreFile]:
        """The durable stores, by device."""
        return {d: store for d, store in enumerate(self._engine.devices.stores) if store and store.durable}

    @property
    def _rooms(self) -> dict[int, Room]:
        """Where the current residuals are stored, by parameter."""
        return {param: self._residuals.rooms[param] for param in self._engine.residuals}

    @property
    def _makes_round(self) -> bool:
        """Whether the next commit is a round."""
        return self.ranks is not None and (self._force_round or self._engine.step != self._round_step)

    def all_ranks_or_none(self) -> contextlib.AbstractContextManager[object]:
        return all_ranks_or_none(self.ranks)

    def commit(self, record: Record | None = None, *, clean: bool = False, background: bool = True) -> None:
        """Commit as Engine.commit() does, in the `background` or before returning. `clean`: the store closes next."""
        engine = self._engine
        engine.check_whole()
        self._background.wait()
        if self._unconfirmed:
            raise CSDRuntimeError("the last round is not confirmed: call confirm() before the next commit")
        self._record_before = engine.record
        engine.record = record or self._loaded_record or engine.record
        makes_round = self._makes_round
        commit = Commit(self._job(clean=clean, round=self._round + makes_round))
        if makes_round:
            self._unconfirmed = commit
        self._round, self._round_step, self._force_round = self._round + makes_round, engine.step, False
        self._manifests.written, self.uncommitted, self._round_withdrawn = True, False, False
        self._committed_steps = commit.job.steps
        self._residuals.mark_committed(engine.residuals)
        engine.windows.before_commit()
        run = self._background.start if background else self._background.run
        run(f"step {engine.step}", partial(self._prepare if makes_round else self._commit_alone, commit))

    def _job(self, *, clean: bool, round: int) -> CommitJob:
        """Return what the next commit contains, as of now."""
        engine, stores, rooms = self._engine, self._stores, self._rooms
        if changed := self._residuals.changed(engine.residuals):
            self.wait_for_pins()
        accelerators = {r.device for r in changed.values() if is_on_accelerator(r)}
        self._sequence += 1
        header = self.store_id, 0, len(engine.devices.specs), self._sequence, engine.step, CLEAN * clean
        return CommitJob(
            engine,
            self._residuals,
            stores,
            superblock=Superblock(*header, NO_REGION, NO_REGION, self._manifests.version(rooms), round),
            manifests={} if self._manifests.written else {d: self._manifests.pack(d, rooms) for d in stores},
            extents_on={d: [*self._manifests.extents_on[d]] for d in stores},
            steps=engine.all_steps(),
            record=engine.record,
            new_residuals=changed,
            # After the kernels that write to them.
            ready_events={d: record_event(torch.accelerator.current_stream(d)) for d in accelerators},
            spaces={param: self._residuals.committed[param] for param in rooms if param not in changed},
        )

    def _prepare(self, commit: Commit, in_parallel: InParallel) -> None:
        commit.prepare(in_parallel)
        if commit.job.step:
            self._reports.report(
                self._engine,
                self._stores,
                self._engine.current_stats(),
                store_id=self.store_id.hex(),
                training_seconds=commit.job.record.seconds,
                rank=self.ranks.rank if self.ranks else 0,
                world_size=self.ranks.size if self.ranks else 1,
            )

    def _commit_alone(self, commit: Commit, in_parallel: InParallel) -> None:
        self._prepare(commit, in_parallel)
        commit.complete(in_parallel)
        self._mark_recoverable(commit)

    def _mark_recoverable(self, commit: Commit) -> None:
        """Note that a resume after a crash continues from this commit from now on."""
        self.committed_step, self._residuals.committed = commit.job.step, commit.job.spaces

    def confirm(self) -> None:
        if self.ranks is None:
            return self._engine.check_whole()
        with self.all_ranks_or_none():
            self._engine.check_whole()
            if self._makes_round or self._round_withdrawn:  # no commit has begun yet, or a withdrawn round is left
                self.commit()
            self._background.wait()
        if self._unconfirmed:
            commit, self._unconfirmed = self._unconfirmed, None
            self._mark_recoverable(commit)
            self._background.start(f"step {self.committed_step}", commit.complete)

    @contextlib.contextmanager
    def loading(self, record: Record | None = None) -> Iterator[None]:
        self.confirm()
        engine = self._engine
        if engine.is_coded.any():
            self._commit_pending_step()
        self._force_round, self._loaded_record, self._within_loading = self.ranks is not None, record, True
        try:
            with self.all_ranks_or_none():
                yield
            own = engine.step, engine.n_params
            of_ranks = self.ranks.gather(*own) if self.ranks else [own]
            # Continue from the highest step of all ranks: parameters on one rank may have made more steps than others.
            engine.step = max((step for step, n in of_ranks if n), default=engine.step)
            if any(n for _, n in of_ranks):
                with self.all_ranks_or_none():
                    self.flush()
                self.wait()
            self._force_round = False  # still set if there was nothing to commit
        finally:
            self._loaded_record, self._within_loading = None, False

    def wait(self) -> None:
        self.confirm()
        with self.all_ranks_or_none():
            self._background.wait()

    def flush(self, *, clean: bool = False) -> None:
        """Commit everything, including writes to windows since the last step, and wait. Raises CSDOSError.

        `clean`: the store is closed next.
        """
        windows = self._engine.windows
        self._background.wait()
        self._changed = True
        edited = windows.to_flush()
        if len(edited):
            if windows.loose[edited].any():
                self._commit_pending_step()
            self.wait_for_pins()
            windows.move_to_next_slots(edited)
            self.uncommitted = True
        self.commit(clean=clean and windows.synced, background=False)

    def read_committed(self) -> list[Contents]:
        """Return the contents of the last commit as read from the stores. Call it after the commit has completed.

        Raises CSDOSError.
        """
        contents = []
        for store in filter(None, self._engine.devices.stores):
            with store.wrapping_errors("read"):
                contents.append(read_commits(store.fd, str(store.path))[0])
        return contents

    # ---- writing to windows ----------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, params: Sequence[int]) -> Iterator[None]:
        """See Engine.writing(). The previous commit stays intact: the tiles move to their other slots first.

        New tiles are committed with the next step, and within `loading()` everything is committed at its end.
        """
        engine = self._engine
        self._open_windows(params)
        try:
            yield
            new = engine.windows.empty.copy()
            engine.windows.sync()
            self._write_decoded(new)
            if self.uncommitted:
                engine.windows.note_written()
                engine.remap()
                if not self._within_loading:
                    self.commit(background=False)
        except BaseException:
            with contextlib.suppress(CSDError):
                engine.remap()  # the windows of other parameters, whose tiles are committed, were opened too
            raise

    def _open_windows(self, params: Sequence[int]) -> None:
        engine, windows = self._engine, self._engine.windows
        engine.check_open()
        if not engine.extents:
            return
        tiles = engine.tiles_of_params(params)
        engine.check_whole()
        self._background.wait()  # the commit closes windows that are still open
        coded = engine.is_coded
        if coded.any():
            self._commit_pending_step()
        tiles = tiles[~coded[tiles]]
        if windows.open[tiles].all():
            return
        self.wait_for_pins()
        self._changed = True
        edited = windows.note_written()
        edited = edited[~coded[edited]]  # codes have no windows: _write_decoded() moves their tiles, and only once
        tiles = np.union1d(tiles, edited)
        windows.move_to_next_slots(tiles[~windows.loose[tiles]])
        self.uncommitted = True
        windows.show(open=True)

    def _commit_pending_step(self) -> None:
        """Commit the last step if its commit failed. Until then the last commit has the other slots of its tiles."""
        if self.uncommitted and not (self._within_loading or self._makes_round):
            self.commit(background=False)

    def _write_decoded(self, new: np.ndarray[Any, Any]) -> None:
        """Encode what was written to decoded states. Does nothing inside loading(), whose flush does it once for all.

        `new`: tiles that had no states before; bool, one per tile.
        """
        engine = self._engine
        edited = engine.tiles_of_params([*engine.decoded.written()])
        if self._within_loading or not len(edited):
            return
        if not new[edited].all():
            self.wait_for_pins()
            self.uncommitted = True
        engine.windows.write_decoded()

    # ---- the end -------------------------------------------------------------------

    def before_close(self) -> None:
        self.end_copies()  # a copy may have begun since close() waited for them
        engine = self._engine
        if not engine.extents and not self._round:
            return
        engine.windows.note_written()
        edited = engine.windows.edited or self._residuals.changed(engine.residuals) or self._steps_changed
        # Other ranks may lack this round, or be gone: the last round that all ranks have must not be overwritten.
        unconfirmed = self._unconfirmed or self._makes_round
        # A step failed in which parameters joined: these have no state yet.
        stateless = engine.windows.empty.any()
        reason = ""
        if unconfirmed and edited:
            reason = "the ranks have not agreed on that step yet. Call synchronize() on all of them first"
        elif stateless and engine.step and engine.windows.edited:
            reason = "the step failed in which parameters joined. Call step() again first"
        if reason:
            message = f"what was written to `state` after step {engine.step} is lost: {reason}, then close() keeps it"
            warnings.warn(message, CSDWarning, users_stacklevel())
        self._background.wait()
        if stateless or (self._failed_to_join and not edited):
            return
        # If the engine is broken, an earlier call has raised that already.
        can_commit = self._manifests and engine.mode != "read" and not (unconfirmed or engine.broken)
        if can_commit and (self._changed or edited):
            self.flush(clean=True)

    @property
    def _steps_changed(self) -> bool:
        """Whether a `step` count differs from the last commit's, which is 0 for parameters that joined since."""
        steps, committed = self._engine.all_steps(), self._committed_steps
        return not np.array_equal(steps[: len(committed)], committed) or bool(steps[len(committed) :].any())

    @property
    def _failed_to_join(self) -> bool:
        """Whether the step failed in which parameters joined, so that a resume must find the last commit, without them.

        A script that is restarted adds the parameters in that step again.
        """
        joined = not self._manifests.written or self._engine.n_params > len(self._committed_steps)
        return joined and 0 < self._engine.step == self.committed_step

    @property
    def idle(self) -> bool:
        return self._background.idle and not self.pins

    def close(self) -> None:
        self._background.close()
        self._reports.close()
