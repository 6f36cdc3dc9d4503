"""The engine of durable stores: what is committed stays as it is until the next commit, whatever happens."""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, get_args

import numpy as np
import torch

from .. import bindings
from ..bindings import HYPER, PARAM, TILE_STATE
from ..devices.spec import DeviceSpec
from ..distributed.ranks import Ranks, all_ranks_or_none
from ..errors import (
    CSDError,
    CSDLostError,
    CSDOSError,
    CSDRuntimeError,
    CSDStoreError,
    CSDValueError,
    CSDWarning,
    users_stacklevel,
)
from ..store.file import Mode, Staged, StoreFile
from ..store.format import (
    CLEAN,
    NAMED_FEATURES,
    RESIDUAL_BYTES,
    RESIDUAL_ENTRY,
    UNDER_WAY,
    Contents,
    Record,
    Region,
    Superblock,
    features_of,
    pack_table,
    pack_tiles,
    read_commits,
    tile_entry,
    version_of,
)
from ..store.layout import Extent, extents_of
from ..store.reader import Residual, find_damage, lying_in, residuals_of
from .commit import Background, Commit, InParallel
from .engine import SECTIONS, Engine
from .proof import way_out
from .residuals import Residuals


def open_engine(
    specs: Sequence[DeviceSpec],
    *,
    mode: Mode = "new",
    tile_elems: int | None = None,
    shadow: bool = True,
    ranks: Ranks | None = None,
) -> Engine:
    """The engine for these devices, of one of `ranks`: then a collective, and raises on all of them or on none.

    Raises what the engine raises, CSDValueError if the ranks do not want the same.
    """
    durable = any(s.durable for s in specs)
    in_memory = all(s.backend == "ram" for s in specs)
    said = ranks.gather(durable, get_args(Mode).index(mode), in_memory) if ranks else [(durable, 0, in_memory)]
    if len({(d, m) for d, m, _ in said}) > 1:
        raise CSDValueError(
            "Invalid devices, resume or overwrite: directories keep the state on all ranks or on none, and all ranks "
            "resume or none"
        )
    with all_ranks_or_none(ranks):
        if mode in ("resume", "read") and (temporary := [str(s) for s in specs if not s.durable]):
            raise CSDStoreError(f"cannot resume on {temporary[0]}: only a directory keeps its state")
    if durable:
        return DurableEngine(specs, mode=mode, tile_elems=tile_elems, shadow=shadow, ranks=ranks)
    engine = None
    try:
        with all_ranks_or_none(ranks):
            # In memory nothing fails; but a step that fails on another rank's disk has to be undone there, too.
            in_place = all(in_memory for _, _, in_memory in said)
            engine = Engine(specs, mode=mode, tile_elems=tile_elems, shadow=shadow, in_place=in_place)
    except BaseException:
        if engine:
            engine.close()
        raise
    return engine


@dataclass(frozen=True)
class Pin:
    """Somebody copies what a commit holds: it is not to be overwritten meanwhile."""

    sequence: float  # of the commit; what follows a later one writes over it
    done: Future[Any]
    wanted: threading.Event = field(default_factory=threading.Event)  # somebody waits for it


class DurableEngine(Engine):
    """An engine of which at least one device has a store with a name.

    Each step is committed (see commit.py), and what a commit holds is not touched before the next one: a step reads
    the slots that it names and writes the others; windows are private, and what somebody writes to them goes to the
    device with the next step. Of residuals a commit writes what has changed, where the commit before has nothing.

    Ranks commit their steps together: a *round*. Each writes copy 0 beside the next forward; with `confirm()`, which
    goes before whatever writes over the round before, they tell each other that all have it, and then it counts.
    Nothing else is said, and nothing in the background: whoever dies, and whenever, all ranks have one round in common.
    Between two rounds a rank may commit by itself (what somebody wrote to its windows); that belongs to the first.

    With mode "resume" or "read" an existing store is taken up: `recovered` is then what it says of itself at the last
    step that all devices have. Raises CSDStoreError when the stores do not belong together.
    """

    durable = True

    def __init__(
        self,
        specs: Sequence[DeviceSpec],
        *,
        mode: Mode = "new",
        tile_elems: int | None = None,
        shadow: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks
        self.store_id = secrets.token_bytes(16)
        self.pins: list[Pin] = []
        self._commits = Background(len(specs))
        self._sequence = 0
        self._manifest: dict[str, Any] = {}
        self._described = True  # the stores carry it
        self._changed = False  # since the store was last closed in order
        self._uncommitted = False  # current slots of committed tiles changed since the last commit began
        self._extents_on: list[list[dict[str, Any]]] = [[] for _ in specs]  # per device: as the manifest has them
        self._tiles_bytes = [0] * len(specs)  # per device: what the table has of its tiles
        self._open = np.zeros(0, bool)  # per tile: what is written to its windows goes to the device
        self._loose = np.zeros(0, bool)  # per tile: its slot is part of no commit
        self._empty = np.zeros(0, bool)  # per tile: it is to have states, and nobody has written any
        self._in_step = np.zeros(0, np.uint32)  # tiles of the step under way
        self._edited = np.zeros(0, bool)  # per tile: somebody wrote to its windows, and no step has begun with that
        self._reseeded = np.zeros(0, bool)  # per tile: a step did, which is not whole yet
        self._handed_out: list[tuple[int, torch.Tensor]] = []  # parameter and window, of all that were handed out
        self._seen: list[int] = []  # their versions when the native engine was last told of what was written to them
        self._committed_steps = np.zeros(0, np.float32)
        self._kept = Residuals(len(specs))
        self._mode = mode
        self._round = 0  # the last that this rank has begun to commit
        self._round_step = 0  # and the step that it has
        self._loaded_record: Record | None = None  # to be committed with what is being loaded
        self._loading = False  # what is loaded makes a round, whatever its step
        self._lost = ""  # why what was written through windows will never be committed
        self._unconfirmed: tuple[Commit, Callable[[], None]] | None = None  # of a round, and what tells that it counts
        try:
            with self.all_ranks_or_none():
                super().__init__(specs, mode=mode, tile_elems=tile_elems, shadow=shadow)
            if mode in ("resume", "read"):
                self._recover()
            if ranks and not self.recovered:
                self.store_id = ranks.gather_objects(self.store_id)[0]
        except BaseException:
            if self._handle is not None:
                with contextlib.suppress(CSDError):  # what it was closed for says more
                    bindings.engine_close(self._handle, self.name_device)
                self._handle = None
            self._close_stores()
            raise

    # ---- layout ------------------------------------------------------------

    def name_device(self, device: int, tile: int = -1) -> str:
        name = super().name_device(device)
        if tile >= 0 and self._manifest:
            extent = self._extent_of(tile)
            manifest = self._described_on(device)
            name += ": " + ", ".join(lying_in(manifest, self.extents.index(extent), tile - extent.first_tile))
        return name

    def extend(self, numels: Sequence[int], sections: int) -> Extent:
        self.check_open()
        if self._uncommitted:  # what joins is no part of the step before
            self.commit()
        self._commits.wait()  # it may still be allocating
        extent = super().extend(numels, sections)
        self._changed = True
        return extent

    def _add(
        self,
        extent: Extent,
        offsets: list[int],
        states: np.ndarray[Any, Any] | None = None,
        sums: np.ndarray[Any, Any] | None = None,
    ) -> None:
        super()._add(extent, offsets, states, sums)
        new = np.full(extent.n_tiles, states is None)
        self._open, self._loose = np.append(self._open, new), np.append(self._loose, new)
        self._edited = np.append(self._edited, np.zeros(extent.n_tiles, bool))
        self._reseeded = np.append(self._reseeded, np.zeros(extent.n_tiles, bool))
        new[np.setdiff1d(np.arange(extent.n_tiles), extent.pieces["tile"])] = False
        self._empty = np.append(self._empty, new)
        for device, offset in enumerate(offsets):
            about: dict[str, Any] = {
                "tile_elems": extent.tile_elems,
                "tiles": extent.tiles_of(device),
                "slots": extent.slots,
                "sections": list(SECTIONS[: extent.sections]),
                "file_offset": offset,
                **({"shares": [*extent.shares]} if extent.shares else {}),
                **({"sum_elems": extent.sum_elems} if extent.sum_elems else {}),
            }
            self._extents_on[device].append(about)
            self._tiles_bytes[device] += tile_entry(about).itemsize * about["tiles"]

    def window(self, extent: Extent, param: int, section: int, dtype: torch.dtype) -> torch.Tensor:
        window = super().window(extent, param, section, dtype)
        self._handed_out.append((extent.first_param + param, window))
        self._seen.append(window._version)
        return window

    def watch(self, param: int, shown: torch.Tensor) -> None:
        self._handed_out.append((param, shown))
        self._seen.append(shown._version)

    def hold(self, keeper: object) -> None:
        """Keeps `keeper` alive as long as somebody has a window."""
        for window in chain.from_iterable(self._windows):
            weakref.finalize(window, id, keeper).atexit = False

    def describe(self, manifest: dict[str, Any]) -> None:
        self._manifest, self._described, self._changed = manifest, False, True

    # ---- residuals ---------------------------------------------------------

    def keep_residual(self, param: int, residual: torch.Tensor) -> None:
        self.check_open()
        if self.residuals.get(param) is residual:
            return
        extent = next(e for e in reversed(self.extents) if e.first_param <= param)
        numel = extent.numels[param - extent.first_param]
        if residual.dtype is not torch.bfloat16 or residual.shape != (numel,) or not residual.is_contiguous():
            raise CSDValueError(f"residual is {tuple(residual.shape)} {residual.dtype}, not dense ({numel},) bfloat16")
        self._commits.wait()  # it may still be allocating
        self._kept.make_room(param, numel, self._stores)
        self._kept.replaced(param)
        self._described &= param in self.residuals
        self._changed = True
        super().keep_residual(param, residual)

    def drop_residual(self, param: int) -> None:
        if param in self.residuals:
            super().drop_residual(param)
            self._described, self._changed = False, True

    # ---- a step ------------------------------------------------------------

    def fills_by_step(self, params: Sequence[int]) -> bool:
        if not super().fills_by_step(params):
            return False
        return bool(self._loose[self._tiles_of(params)].all()) and not self._uncommitted

    def _before_step(self, tiles: np.ndarray[Any, Any], record: Record | None) -> np.ndarray[Any, Any]:
        """Adds the tiles that somebody wrote to.

        Raises CSDOSError if the step before cannot be committed; nothing has been touched then.
        """
        if self._uncommitted:
            self.commit()
        self._commits.wait()  # this step writes where the one before the last committed one lies
        self._make_way()
        self._reserve(record or self.record)
        if len(written := self._note_written()):
            tiles = self.flowing(np.sort(np.concatenate([tiles, np.setdiff1d(written, tiles)])))
        if self.slots == 1 and not self._loose[tiles].all():
            self._announce_step()
        self._changed = True
        self._kept.before_step = [*self._kept.written_bytes]
        self._in_step = tiles
        return tiles

    def finish(self, keep: bool = True) -> None:
        """The step is whole; or undone, with `keep` False or an exception. To be followed by `commit()`."""
        super().finish(keep)
        self._uncommitted |= keep
        if keep:
            self._edited[:] = self._reseeded[:] = False
            self._empty[self._in_step] = False

    def drain(self) -> None:
        self.check_open()
        if self._handle is not None:
            self._show(open=False)

    def _show(self, *, open: bool) -> None:
        bindings.engine_drain(self._handle, self.name_device, open=open)
        self._open[:] = open

    # ---- writing to windows --------------------------------------------------

    @contextlib.contextmanager
    def writing(self, params: Sequence[int]) -> Iterator[None]:
        """What is written to the windows of these parameters within is on the devices at the end, and committed there.

        What is committed before stays as it is until then: these tiles move to their other slots first. The commit of
        tiles that are new is that of the next step; while ranks are loading, that of `loading()`. Raises CSDOSError.
        """
        self._open_windows(params)
        try:
            yield
            self.sync()
            if self._uncommitted:
                self._note_written()
                self.drain()
                if not self._loading:
                    self.commit(background=False)
        except BaseException:
            with contextlib.suppress(CSDError):
                self.drain()  # others' windows were opened, too, and theirs are committed
            raise

    @contextlib.contextmanager
    def reseeding(self) -> Iterator[None]:
        """What is written to windows within belongs to the step that follows: no commit has it before that is whole.

        Who goes on from the step before sets the parameters again.
        """
        self._note_written()
        before = self._edited.copy()
        try:
            yield
        finally:
            self._note_written()
            self._reseeded |= self._edited & ~before

    def sync(self) -> None:
        """As of Engine. Raises CSDLostError, as everything does from then on.

        Sums of what was written through windows are those of the page cache: they cannot show what a failed flush lost.
        """
        try:
            super().sync()
        except CSDOSError as e:
            step = self.committed_step
            what = f"what was written to the state after step {step}" if step else "the state before the first step"
            said = f"{what} is lost: a flush failed ({e.strerror}). {way_out(step, self.slots == 1)}"
            self._lost = self._lost or said
            raise CSDLostError(e.errno, self._lost) from e
        self._empty[:] = False  # whoever fills places fills all that there are

    def check_whole(self) -> None:
        super().check_whole()
        if self._lost:
            raise CSDLostError(errno.EIO, self._lost)

    def _open_windows(self, params: Sequence[int]) -> None:
        self.check_open()
        if self._handle is None:
            return
        tiles = self._tiles_of(params)
        self.check_whole()
        self._commits.wait()  # it closes windows that are still open
        if self._open[tiles].all():
            return
        self._make_way()
        self._changed = True
        edited = self._note_written()
        if self.slots == 1:
            self._announce_step()
        # In place, too: the blocks may be a snapshot's as well (a reflink), and whoever writes takes new ones. On a
        # full disk that is an error here; for who writes through a window it would be SIGBUS.
        tiles = np.union1d(tiles, edited)
        self._pass_through(tiles[~self._loose[tiles]])
        self._uncommitted = True
        self._show(open=True)

    def _tiles_of(self, params: Sequence[int]) -> np.ndarray[Any, Any]:
        mask = np.zeros(self.n_params, bool)
        mask[params] = True
        return self.tiles_with(mask)

    def _pass_through(self, tiles: np.ndarray[Any, Any]) -> None:
        """Reads tiles and writes them as they are to their next slots; what somebody wrote to windows with them."""
        if not len(tiles):
            return
        self._make_way()
        self._begin(np.zeros(self.n_params, PARAM), np.zeros(0, HYPER), tiles)
        for tile in tiles.tolist():
            self.push(tile)
        bindings.engine_finish(self._handle, True, self.name_device)
        self._ended = time.perf_counter()
        bindings.engine_settle(self._handle, self.name_device)
        self._edited[tiles] = False
        self._loose[tiles] = True
        self._uncommitted = True

    def _note_written(self) -> np.ndarray[Any, Any]:
        """Tells the native engine which tiles were written through their windows since this was last called.

        Returns them, and those before them of which no step has taken account since.
        """
        versions = self._versions()
        if versions == self._seen:  # as nearly always
            return np.flatnonzero(self._edited).astype(np.uint32)
        written = np.zeros(self.n_params, bool)
        written[[param for (param, _), a, b in zip(self._handed_out, versions, self._seen, strict=True) if a != b]] = (
            True
        )
        tiles = self.tiles_with(written)
        bindings.engine_edited(self._handle, tiles)
        self._seen = versions
        self._edited[tiles[~self._open[tiles]]] = True
        self._reseeded[tiles] = False
        return np.union1d(tiles, np.flatnonzero(self._edited)).astype(np.uint32)

    def _versions(self) -> list[int]:
        return [window._version for _, window in self._handed_out]

    # ---- commits -------------------------------------------------------------

    @property
    def _makes_round(self) -> bool:
        """Is the next commit one that the ranks make together?"""
        return self.ranks is not None and (self._loading or self.step != self._round_step)

    def all_ranks_or_none(self) -> contextlib.AbstractContextManager[None]:
        return all_ranks_or_none(self.ranks)

    def commit(self, record: Record | None = None, *, clean: bool = False, background: bool = True) -> None:
        """Makes the state durable as it is; `steps` and `record` with it, which None leaves as it is.

        In the background, which `wait()` waits for, or before it returns; a round counts with `confirm()` only.
        Raises CSDOSError if the commit before had failed and fails again.
        """
        self.check_whole()
        self._commits.wait()
        if self._unconfirmed:
            raise CSDRuntimeError("confirm() goes before whatever follows a round")
        residuals = sorted(self.residuals)
        if changed := self._kept.changed(self.residuals):
            self._make_way()
            for cuda in {r.device for r in changed.values() if r.is_cuda}:
                torch.cuda.synchronize(cuda)  # what writes to them may be under way
        spaces = {param: self._kept.committed[param] for param in residuals if param not in changed}
        self._sequence += 1
        self.record = record = record or self._loaded_record or self.record
        sequence, step, flags, n = self._sequence, self.step, CLEAN * clean, len(self.specs)
        makes_round = self._makes_round
        round_ = self._round + makes_round
        durable = {d: store for d, store in enumerate(self._stores) if store and store.durable}
        self._committed_steps = steps = self._all_steps()
        extents_on = {d: [*self._extents_on[d]] for d in durable}
        version = version_of(features_of(self._extents_on[0], residuals=bool(residuals)))
        manifests = {}
        if not self._described:
            manifests = {d: json.dumps(self._described_on(d)).encode() for d in durable}

        def stage(in_parallel: InParallel) -> list[Staged]:
            self.check_whole()
            if self._open.any():
                self.sync()  # before their sums are taken: what these say is on the disk then
                self.drain()  # what is committed is not to be written to
            elif self._handle is not None:
                bindings.engine_settle(self._handle, self.name_device)
            tiles = [self.tiles_of(extent) for extent in self.extents]
            if changed:
                for written in in_parallel([partial(self._kept.write, d, s, changed) for d, s in durable.items()]):
                    spaces.update(written)
            nothing = Region(0, 0, 0, 0)
            total = [int(device["total_write_bytes"]) for device in self._counted()] or self._before
            staged = []
            for d, store in durable.items():
                record_of = replace(record, written_bytes=total[d])
                here = [spaces[param] for param in residuals if self._kept.rooms[param].device == d]
                parts = [
                    pack_tiles(about, states[extent.devices == d], sums[extent.devices == d])
                    for extent, about, (states, sums) in zip(self.extents, extents_on[d], tiles, strict=True)
                ]
                table = pack_table(parts, steps, record_of, here)
                block = Superblock(self.store_id, d, n, sequence, step, flags, nothing, nothing, version, round_)
                staged.append(store.stage(block, manifests.get(d), table))
            return staged

        def done() -> None:
            self.committed_step = step
            self._kept.committed = spaces

        commit = Commit([*durable.values()], stage)

        def alone(in_parallel: InParallel) -> None:
            commit.prepare(in_parallel)
            commit.complete(in_parallel)
            done()

        if makes_round:
            self._unconfirmed = commit, done
        self._round, self._round_step, self._loading = round_, step, False
        self._described, self._uncommitted = True, False
        self._kept.seen(self.residuals)
        self._loose[:] = False
        run = self._commits.start if background else self._commits.run
        run(f"step {step}", commit.prepare if makes_round else alone)

    def confirm(self) -> None:
        """Returns when all ranks have the last round: it counts, and what was before it may be written over.

        All ranks call it. Raises on all of them if one does not have the round: there CSDOSError, elsewhere
        CSDRankError; nothing has been touched, and the next call tries again.
        """
        if self.ranks is None:
            return self.check_whole()
        with self.all_ranks_or_none():
            self.check_whole()
            if self._makes_round:  # its commit did not even begin
                self.commit()
            self._commits.wait()
        if self._unconfirmed:
            (commit, done), self._unconfirmed = self._unconfirmed, None
            done()
            self._commits.start(f"step {self.committed_step}", commit.complete)

    @contextlib.contextmanager
    def loading(self, record: Record | None = None) -> Iterator[None]:
        """What is loaded within is durable at the end; ranks make it a round. All ranks call it, and it raises on all.

        `record` is committed with that, and not without it.

        The step is what the rank says that is farthest: its parameters may have made more steps than others.
        """
        self.confirm()
        self._loading, self._loaded_record = self.ranks is not None, record
        try:
            with self.all_ranks_or_none():
                yield
            said = self.ranks.gather(self.step, self.n_params) if self.ranks else [(self.step, self.n_params)]
            self.step = max((step for step, n in said if n), default=self.step)
            if any(n for _, n in said):
                with self.all_ranks_or_none():
                    self.flush()
                self.wait()
            self._loading = False  # if there was nothing to commit
        finally:
            self._loaded_record = None

    def wait(self) -> None:
        """Returns when the last step is durable. Raises CSDOSError. Of ranks, all call it, and it raises on all."""
        self.confirm()
        with self.all_ranks_or_none():
            self._commits.wait()

    def flush(self, *, clean: bool = False) -> None:
        """Commits everything, also what somebody wrote to windows since the last step, and waits. Raises CSDOSError.

        `clean`: the store is closed next.
        """
        self._commits.wait()
        self._changed = True
        edited = self._note_written()
        edited = edited[~(self._open | self._reseeded)[edited]]
        if self.slots == 1 and len(edited):
            self._announce_step()
        self._pass_through(edited)
        self.commit(clean=clean and self.synced, background=False)

    def committed(self) -> list[Contents]:
        """What the stores hold of the last commit, when it has come to its end."""
        return [read_commits(store.fd, str(store.path))[0] for store in self._stores if store]

    def _make_way(self) -> None:
        """Waits until nobody copies what is to be written over now."""
        for pin in self.pins:
            if self._sequence > pin.sequence:
                pin.wanted.set()
                wait([pin.done])
        self.pins = [pin for pin in self.pins if not pin.done.done()]

    def _reserve(self, record: Record) -> None:
        """Takes the room that the next commit needs, while a full disk is only the caller's business."""
        spare = 64  # `written_bytes` may have some digits more
        rest = 8 * self.n_params + len(record.head()) + len(record.user_state) + spare
        rest += RESIDUAL_ENTRY.itemsize * len(self.residuals)
        for d, store in enumerate(self._stores):
            if store and store.durable:
                store.reserve("table", self._tiles_bytes[d] + rest)
                if not self._described:
                    store.reserve("manifest", len(json.dumps(self._described_on(d))))

    def _described_on(self, device: int) -> dict[str, Any]:
        extents = self._extents_on[device]
        params = [
            {**p, "residual": self._kept.rooms[row]._asdict()} if row in self.residuals else p
            for row, p in enumerate(self._manifest["params"])
        ]
        ranks = {"rank": self.ranks.rank, "world_size": self.ranks.size} if self.ranks else {}
        tiles = sum(e["tiles"] for e in extents)
        manifest = {**self._manifest, **ranks, "params": params, "extents": extents, "tiles": tiles}
        features = features_of(extents, residuals=bool(self.residuals))
        return {**manifest, "features": sorted(features)} if version_of(features) >= NAMED_FEATURES else manifest

    def _announce_step(self) -> None:
        """Before a step writes in place: whoever finds this, and not the commit after it, finds a mix of two steps."""
        self._sequence += 1
        for store in self._stores:
            if store and store.durable:
                store.mark(self._sequence, UNDER_WAY)

    # ---- resume ----------------------------------------------------------------

    def _recover(self) -> None:
        """Finds the last step that all devices have, on all ranks, and the places of the states."""
        with self.all_ranks_or_none():
            commits = common_commits([s for s in self._stores if s])
            if commits and self._mode == "resume" and not self.ranks and commits[0][0].world_size > 1:
                raise CSDStoreError(other_world_size(commits[0][0], 1))
        if self.ranks:
            chosen = last_round(self.ranks.gather_objects(RanksStore.of(commits)))
            commits = [recovered for recovered in commits if recovered[0].superblock.round == chosen]
        if commits:
            with self.all_ranks_or_none():
                self._go_on_from(commits[0])

    def _go_on_from(self, recovered: list[Contents]) -> None:
        stores = [s for s in self._stores if s]
        self.recovered = recovered
        # The order of the devices is that of the store.
        order = sorted(range(len(stores)), key=lambda d: self.recovered[d].superblock.device)
        self.specs, self.recovered = [self.specs[d] for d in order], [self.recovered[d] for d in order]
        self._stores = [stores[d] for d in order]
        first, n = self.recovered[0], len(self.specs)
        block, manifest = first.superblock, first.manifest
        self.store_id, self._sequence, self._round = block.store_id, block.sequence, block.round
        self.step = self.committed_step = self._round_step = block.step
        self.record = first.record
        self._before = [c.record.written_bytes for c in self.recovered]
        self.slots = manifest["extents"][0]["slots"] if manifest["extents"] else self.slots
        self._manifest = {k: v for k, v in manifest.items() if k not in ("extents", "tiles", "features")}
        self._manifest["params"] = [{k: v for k, v in p.items() if k != "residual"} for p in manifest["params"]]
        row = [0] * n
        for d, contents in zip(order, self.recovered, strict=True):
            stores[d].adopt_commit(contents)
        self._kept.adopt_commit(self.recovered)
        extents = extents_of(self.recovered)
        if self._mode == "resume":
            self.tune(sum(e.slots * e.slot_bytes * e.n_tiles for e in extents), new=False)
        for e, extent in enumerate(extents):
            states = np.zeros(extent.n_tiles, TILE_STATE)
            sums = np.zeros((extent.n_tiles, extent.chunks, extent.sections), np.uint32)
            for d, contents in enumerate(self.recovered):
                here, tiles = extent.devices == d, extent.tiles_of(d)
                states[here], sums[here] = contents.tiles[row[d] : row[d] + tiles], contents.sums[e]
                row[d] += tiles
            self._add(extent, [c.manifest["extents"][e]["file_offset"] for c in self.recovered], states, sums)
            self.steps[-1][:] = first.steps[extent.first_param : extent.first_param + len(extent.numels)]
            self.shares = extent.shares
        self._committed_steps = self._all_steps()

    def _all_steps(self) -> np.ndarray[Any, Any]:
        return np.concatenate([np.zeros(0, np.float32), *self.steps])

    @property
    def _steps_changed(self) -> bool:
        """Since the last commit? Parameters that joined since have made none."""
        now, then = self._all_steps(), self._committed_steps
        return not np.array_equal(now[: len(then)], then) or bool(now[len(then) :].any())

    @property
    def _failed_to_join(self) -> bool:
        """The step failed in which parameters joined: the last commit, which is without them, is the one to go on from.

        A script that is started again adds them in that step again.
        """
        marked = any(s.current.flags & UNDER_WAY for s in self._stores if s and s.current)
        joined = not self._described or self.n_params > len(self._committed_steps)
        return joined and 0 < self.step == self.committed_step and not marked

    def check(self) -> None:
        """Reads all states that were taken up; residuals into memory, unless the store is only looked at.

        Raises CSDStoreError, naming tile and parameters, if one is damaged.
        """
        residuals = {
            r.row: torch.empty(r.size // RESIDUAL_BYTES, dtype=torch.bfloat16, device="cpu")
            for r in (residuals_of(self.recovered) if self._mode == "resume" else ())
        }

        def take(residual: Residual, first: int, data: memoryview) -> None:
            if residuals:
                into = residuals[residual.row].view(torch.uint8).numpy()
                into[first : first + len(data)] = np.frombuffer(data, np.uint8)

        damage = find_damage(self.recovered, take)
        if damage:
            more = f" (and {len(damage) - 1} more: `csd-optim verify` lists them)" if len(damage) > 1 else ""
            raise CSDStoreError(f"{damage[0]}{more}. Go back to a snapshot or a checkpoint")
        self.residuals = residuals
        self._kept.seen(residuals)

    def discard_newer(self) -> None:
        """Forgets what some of the devices have and others have not, before something new is written."""
        # What was found came from the disks themselves: see StoreFile. So each always has a whole copy of it.
        for store, commit in zip(self._stores, self.recovered, strict=True):
            assert store is not None
            store.discard_newer(commit)

    def _end_copies(self) -> None:
        for pin in (pins := [*self.pins]):
            pin.wanted.set()
        wait([pin.done for pin in pins])

    def _before_close(self) -> None:
        self._end_copies()  # one may have begun since
        if not self.steps and not self._round:
            return
        self._note_written()
        edited = (self._edited & ~self._reseeded).any() or self._kept.changed(self.residuals) or self._steps_changed
        # The other ranks may lack this round, or be gone: what all of them have is not to be written over.
        unconfirmed = self._unconfirmed or self._makes_round
        if unconfirmed and edited:
            warnings.warn(
                f"what was written to `state` after step {self.step} is lost: the ranks have not agreed on that "
                "step yet. Call synchronize() on all of them first, then close() keeps it",
                CSDWarning,
                users_stacklevel(),
            )
        self._commits.wait()
        broken = self._torn or self._lost  # of which somebody has been told
        # A step failed in which parameters joined: what it was to begin with has no state yet.
        if self._empty.any() or (self._failed_to_join and not edited):
            return
        if (self._changed or edited) and self._manifest and not (unconfirmed or broken) and self._mode != "read":
            self.flush(clean=True)

    def stats(self) -> list[dict[str, Any]]:
        """Waits for the last step's commit if that writes residuals. Raises CSDOSError."""
        if self.residuals:
            self._commits.wait()
        return self._counted()

    def _counted(self) -> list[dict[str, Any]]:
        counts = super().stats()
        for count, written, before in zip(counts, self._kept.written_bytes, self._kept.before_step, strict=False):
            count["write_bytes"] += written - before
            count["total_write_bytes"] += written
        return counts

    @property
    def idle(self) -> bool:
        return self._commits.idle and not self.pins

    def _end_background(self) -> None:
        self._commits.close()

    def _close_stores(self) -> None:
        self._commits.close()
        super()._close_stores()


def common_commit(stores: Sequence[StoreFile]) -> list[Contents]:
    """The newest of common_commits(), or nothing."""
    return next(iter(common_commits(stores)), [])


def common_commits(stores: Sequence[StoreFile]) -> list[list[Contents]]:
    """What each store holds of the commits that all of them have, the newest first; empty if none of them has any.

    Raises CSDStoreError when one is missing, when they are not the devices of one optimizer, or have no step in common.
    """
    # Killed before all of them had a first commit: then there is nothing to go on from.
    if not all(s.recovered for s in stores) and all(c.superblock.sequence == 1 for s in stores for c in s.recovered):
        return []
    for store in stores:
        if not store.recovered:
            raise CSDStoreError(f"{store.path} holds no store, but {next(s.path for s in stores if s.recovered)} does")
    newest = [s.recovered[0].superblock for s in stores]
    first = newest[0]
    for store, block in zip(stores, newest, strict=True):
        if block.store_id != first.store_id:
            raise CSDStoreError(f"{store.path} belongs to another optimizer than {stores[0].path}")
        if (rank := store.recovered[0].rank) != stores[0].recovered[0].rank:
            raise CSDStoreError(
                f"{store.path} is rank {rank}'s, {stores[0].path} is rank {stores[0].recovered[0].rank}'s"
            )
    if len(stores) != first.devices or sorted(b.device for b in newest) != list(range(first.devices)):
        raise CSDStoreError(
            f"{stores[0].path} is device {first.device} of {first.devices}; "
            f"name all {first.devices} of them, each once, not {len(stores)}"
        )
    # Marks of a step in place that not all devices have: it had written nothing, and what they mark is whole.
    known = [{c.superblock.sequence: c for c in reversed(s.recovered)} for s in stores]
    for commits in known:
        for c in [c for c in commits.values() if c.superblock.flags & UNDER_WAY]:
            before = replace(c.superblock, sequence=c.superblock.sequence - 1, flags=0)
            commits.setdefault(before.sequence, replace(c, superblock=before))
    common = sorted(set.intersection(*map(set, known)), reverse=True)
    if not common:
        steps = ", ".join(f"{s.path}: {[c.superblock.step for c in s.recovered]}" for s in stores)
        raise CSDStoreError(f"the devices have no step in common ({steps}); go back to a snapshot or a checkpoint")
    found: list[list[Contents]] = []
    for sequence in common:
        recovered = [commits[sequence] for commits in known]
        if any(c.superblock.flags & UNDER_WAY for c in recovered):  # and what was before it is not there any more
            if found:
                break
            raise CSDStoreError(
                f"{recovered[0].path}: a step after step {recovered[0].superblock.step} was cut short, and with "
                "shadow=False that leaves a mix of two steps; go back to a snapshot or a checkpoint"
            )
        found.append(recovered)
    return found


@dataclass(frozen=True)
class RanksStore:
    """What a rank tells the others of its stores. Steps by round, the newest first."""

    path: str
    store_id: bytes
    rank: int
    world_size: int
    is_first: bool  # commit
    steps: dict[int, int]

    @classmethod
    def of(cls, commits: list[list[Contents]]) -> RanksStore | None:
        """`commits`: of a rank, as of common_commits()."""
        if not commits:
            return None
        newest = commits[0][0]
        block = newest.superblock
        steps = {c[0].superblock.round: c[0].superblock.step for c in commits}
        where = newest.path, block.store_id, newest.rank, newest.world_size
        return cls(*where, is_first=block.sequence == 1, steps=steps)


def last_round(stores: Sequence[RanksStore | None]) -> int | None:
    """The last round that all ranks have, given the store of each; None if there is none yet.

    Raises CSDStoreError when they have none in common, or a store is missing, of another rank, of another run or of
    another number of ranks.
    """
    size, there = len(stores), {rank: store for rank, store in enumerate(stores) if store}
    for rank, store in there.items():
        if store.world_size != size:
            raise CSDStoreError(other_world_size(store, size))
        if store.rank != rank:
            raise CSDStoreError(f"rank {rank}: {store.path} is the store of rank {store.rank}")
    if len(there) < size:
        if all(store.is_first for store in there.values()):  # killed before all of them had it
            return None
        without = ", ".join(str(rank) for rank in range(size) if rank not in there)
        raise CSDStoreError(f"no store on rank {without}, but rank {min(there)} has {there[min(there)].path}")
    for rank, store in there.items():
        if store.store_id != there[0].store_id:
            raise CSDStoreError(f"rank {rank}: {store.path} is of another run than rank 0's {there[0].path}")
    common = set.intersection(*(set(store.steps) for store in there.values()))
    if not common:
        steps_of = ", ".join(f"rank {rank}: {[*store.steps.values()]}" for rank, store in there.items())
        raise CSDStoreError(f"the ranks have no step in common ({steps_of}); go back to a snapshot or a checkpoint")
    return max(common)


def other_world_size(store: RanksStore | Contents, size: int) -> str:
    alone, n = "a process on its own", store.world_size
    was, now = (
        (f"rank {store.rank} of {n}" if n > 1 else alone),
        (f"these are {size} ranks" if size > 1 else f"this is {alone}"),
    )
    return (
        f"{store.path} is the store of {was}, and {now}: the states are divided otherwise. To go on from it, start as "
        "many as before; to change their number, put them together with `csd-optim export` and the stores of all, or "
        "save with torch.distributed.checkpoint there, and load that here (docs/distributed.md)"
    )
