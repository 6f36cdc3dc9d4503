"""An engine: several devices driven as one. Windows onto their states: windows.py; what keeps those: committer.py."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from .. import bindings, settings
from ..bindings import HYPER, PARAM, TILE_STATE, TO_AND_FRO, TORN
from ..devices.spec import DeviceSpec
from ..errors import CSDError, CSDRuntimeError, CSDTornError
from ..signals import defer_signals
from ..store.file import Mode
from ..store.format import Contents, Record
from ..store.layout import SUM_ELEMS, Extent, extents_of, plan_extent
from ..store.sections import FP32, elem_bytes
from .committer import Committer
from .decoded import Decoded
from .on_accelerator import OnAccelerator
from .open_devices import OpenDevices
from .trace import Span, Trace
from .windows import Windows


class Engine:
    """Owns `specs`' devices from now to `close()`. States are fp32, or codes of that; who extends it names them.

    Raises what `StoreFile` raises when a directory cannot be had; then nothing is left open.
    """

    def __init__(
        self,
        specs: Sequence[DeviceSpec],
        *,
        mode: Mode = "new",
        tile_elems: int | None = None,
        shadow: bool = True,
        in_place: bool = True,
        kernels: Collection[str] = (),
    ) -> None:
        self.mode = mode
        self.devices: OpenDevices = OpenDevices(specs, mode=mode, in_place=in_place, kernels=kernels)
        self.tile_elems = tile_elems
        self.slots = 2 if shadow else 1
        self.extents: list[Extent] = []
        self.pid: int = os.getpid()
        self.lock: threading.RLock = threading.RLock()  # held through a step, by whoever looks at the state, by close()
        self.steps: list[np.ndarray[Any, Any]] = []  # per extent: `step` of each parameter, fp32
        self.residuals: dict[int, torch.Tensor] = {}  # by parameter, over all extents: see keep_residual()
        self.step: int = 0  # whole steps of this engine
        self.record: Record = Record()  # of the last step
        self.stepping: bool = False
        self.lent: object = None  # memory that a step which begins in backward uses: of host or of gradients
        self.guessed: bool = False  # nobody has asked yet for the step under way, which began in backward: see overlap/
        self.landing: threading.Event | None = None  # set when a thread has made the step whole that is under way
        self.rank: np.ndarray[Any, Any] | None = None  # of each tile (int64): in this order they flow; None: to and fro
        self._torn = False  # a step in place was cut short
        self.recovered: Sequence[Contents] = ()  # what a store that is resumed says of itself, on each device
        self.windows: Windows = Windows(self)
        self.decoded: Decoded = Decoded(self)
        self.committer: Committer = Committer(self)
        self.handle: Any = None  # of the native engine, from the first extent on
        self.accelerator: OnAccelerator | None = None  # whose parameters have no element on the devices here
        self._trace: Trace | None = None
        self.served: dict[str, float] = {}  # of an owner: what `csd-optim top` is told of its trainers
        self.model_spans: list[Span] | None = [] if settings.trace() else None  # forward and backward, to be traced
        self.near_spans: list[Span] | None = [] if settings.trace() else None  # updates on the accelerator, likewise
        self._began = self._ended = 0.0  # the step to be traced: when
        self._undone = False  # the same

    # ---- layout ------------------------------------------------------------

    def fills_by_step(self, params: Sequence[int]) -> bool:
        """Can the next step make the state of these parameters, which joined since the last, from what they are?"""
        if not (self.devices.reaches_params and params and all(self.devices.stores)):
            return False
        return bool(self.windows.loose[self.tiles_of_params(params)].all()) and not self.committer.uncommitted

    @property
    def specs(self) -> list[DeviceSpec]:
        """What the user has named, the accelerator first."""
        if not self.accelerator:
            return self.devices.specs
        return [self.accelerator.spec, *([] if self.accelerator.alone else self.devices.specs)]

    @property
    def copies(self) -> int:
        """Of states that a step changes: so many it needs at the same time, to be undone."""
        near = self.accelerator
        return 1 if self.devices.resident or (near and near.copies) else self.slots

    @property
    def n_params(self) -> int:
        return sum(len(e.numels) for e in self.extents)

    @property
    def n_tiles(self) -> int:
        return sum(e.n_tiles for e in self.extents)

    def name_device(self, device: int, tile: int = -1) -> str:
        """What messages call a device. `tile`: one that is damaged there, or -1."""
        damaged = self.committer.name_tile(device, tile) if tile >= 0 else ""
        return f"{self.devices.name(device)}: {damaged}" if damaged else self.devices.name(device)

    def extend(
        self,
        numels: Sequence[int],
        sections: Sequence[str],
        *,
        codec: str = FP32,
        param_dtype: torch.dtype | None = None,
        is_copied: bool = False,
    ) -> Extent:
        """Makes room for parameters of these sizes; their states read as zero. CSDOSError: a disk is full.

        `sections`: names of the states of each, the fp32 master being the first.
        `codec`: "8bit" keeps codes of them, which have no windows; all parameters are of `param_dtype` then.
        `is_copied`: the accelerator will have copies of them, see near_copies.py.
        To be followed by `describe()`, and to be filled within `writing()`; codes by a step.
        """
        self.check_open()
        self.committer.before_extend()
        self.windows.synced &= codec != FP32  # codes have no windows to write to
        self._tune(numels, sections, codec, param_dtype)
        plan = partial(
            plan_extent,
            numels,
            len(self.devices.specs),
            first_param=self.n_params,
            first_tile=self.n_tiles,
            sections=sections,
            codec=codec,
            param_dtype=param_dtype,
            slots=self.slots,
            tile_elems=self.tile_elems,
            sum_elems=SUM_ELEMS,
            mapped=0 if self.devices.resident else bindings.mappings(),
        )
        extent = plan(shares=self.devices.shares)
        placement = self.devices.placement if extent.n_tiles else None  # empty parameters are nowhere
        if placement:
            shares = placement.shares(extent, is_copied=is_copied)
            extent = placement.divide(plan(shares=shares), is_copied=is_copied)
            if self.handle is None:  # what joins first may have so few tiles that not every device gets one
                self.devices.share_memory([share * extent.n_tiles * extent.slot_bytes for share in shares])
        # Everything that can be refused comes first; a store that was extended in vain is shrunk again.
        with self.devices.room_for(extent) as offsets:
            self._add(extent, offsets, None)
        if placement:
            placement.take(extent, is_copied=is_copied)
            placement.announce()
            self.devices.shares = extent.shares
        if extent.n_tiles and not any(e.n_tiles for e in self.extents[:-1]):
            self.devices.announce(extent)
        return extent

    def _tune(
        self, numels: Sequence[int], sections: Sequence[str], codec: str, param_dtype: torch.dtype | None
    ) -> None:
        """Has drives tried out, before the first states are to be there."""
        if not any(e.n_tiles for e in self.extents) and self.devices.placement is None:
            nbytes = self.slots * elem_bytes(sections, codec, param_dtype) * sum(numels)
            self.devices.tune(int(nbytes), new=True)
            if self.devices.placement:
                self.devices.placement.beside = self.accelerator

    def part_on_accelerator(self, numels: Sequence[int], sections: Sequence[str], param_bytes: float) -> float | None:
        """How much of such parameters `auto` wants on the accelerator; None: there is no `auto`. Raises as extend().

        `param_bytes`: of an element of them, on average.
        """
        if self.accelerator is None or not self.accelerator.spec.is_placed or not sum(numels):
            return None
        self._tune(numels, sections, FP32, None)
        assert self.devices.placement
        extent = plan_extent(numels, len(self.devices.specs), sections=sections, slots=self.slots)
        return self.devices.placement.part_beside(extent, param_bytes)

    def _add(
        self, extent: Extent, offsets: list[int], tiles: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None
    ) -> None:
        """`offsets`: where it begins in each store (bytes). `tiles`: None if they are new; else as of tiles_of()."""
        if self.handle is None:
            self._create()
        states, sums = tiles or (None, None)
        buffers = bindings.engine_extend(
            self.handle,
            extent.tile_elems,
            extent.n_tiles,
            len(extent.sections),
            offsets,
            extent.pieces,
            self.name_device,
            extent.slots,
            states,
            extent.devices,
            extent.sum_elems,
            sums,
            mappings=extent.n_tiles if any(self.devices.stores) else 1,
            codec=extent.codec,
            param_dtype=extent.param_dtype,
        )
        self.extents.append(extent)
        self.steps.append(np.zeros(len(extent.numels), np.float32))
        self.windows.add(extent, buffers, new=tiles is None)
        self.committer.after_extend(extent, offsets)

    def _create(self) -> None:
        self.handle = bindings.engine_create(self.devices.configs(), self.name_device)
        if path := settings.trace():
            near = [str(self.accelerator.spec)] if self.accelerator else []
            self._trace = Trace(path, [*map(str, self.devices.specs), *near])
            bindings.engine_events(self.handle)  # from now on they are kept

    def adopt_commit(self, found: Sequence[Contents], order: Sequence[int]) -> None:
        """Goes on from what the stores have, of a commit of theirs. `order`: which of them is device 0, 1 ..."""
        self.recovered = recovered = [found[d] for d in order]
        self.devices.adopt_commit(recovered, order)
        first = recovered[0]
        self.step, self.record = first.superblock.step, first.record
        extents = extents_of(recovered)
        self.slots = extents[0].slots if extents else self.slots
        if self.mode == "resume":
            self.devices.tune(sum(e.slots * e.slot_bytes * e.n_tiles for e in extents), new=False)
        self.devices.share_memory([sum(e.slot_bytes * e.tiles_of(d) for e in extents) for d in range(len(recovered))])
        row = [0] * len(recovered)
        for e, extent in enumerate(extents):
            states = np.zeros(extent.n_tiles, TILE_STATE)
            sums = np.zeros((extent.n_tiles, extent.chunks, len(extent.slot)), np.uint32)
            for d, contents in enumerate(recovered):
                here, tiles = extent.devices == d, extent.tiles_of(d)
                states[here], sums[here] = contents.tiles[row[d] : row[d] + tiles], contents.sums[e]
                row[d] += tiles
            self._add(extent, [c.manifest["extents"][e]["file_offset"] for c in recovered], (states, sums))
            self.steps[-1][:] = first.steps[extent.first_param : extent.first_param + len(extent.numels)]
            self.devices.shares = extent.shares

    @property
    def coded(self) -> np.ndarray[Any, Any]:
        """Which tiles keep codes of their states: bool, one per tile."""
        return np.repeat([e.codec != FP32 for e in self.extents], [e.n_tiles for e in self.extents])

    def extent_with(self, param: int) -> Extent:
        return next(e for e in reversed(self.extents) if e.first_param <= param)

    def extent_of(self, tile: int) -> Extent:
        return next(e for e in self.extents if tile < e.first_tile + e.n_tiles)

    def device_of(self, tile: int) -> int:
        extent = self.extent_of(tile)
        return int(extent.devices[tile - extent.first_tile])

    def elems_of(self, tile: int) -> int:
        return self.extent_of(tile).tile_elems

    def tiles_of(self, extent: Extent) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """What is known of the tiles of an extent: TILE_STATE of each, checksums (uint32: tiles, chunks, sections)."""
        n, first = extent.n_tiles, extent.first_tile
        return bindings.engine_tiles(self.handle, first, n, extent.chunks, len(extent.slot))

    def pieces_of(self, tile: int) -> np.ndarray[Any, Any]:
        """The parts of parameters in a tile, dtype PIECE."""
        extent = self.extent_of(tile)
        return extent.pieces_in(tile - extent.first_tile)

    def tiles_with(self, has_grad: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Tiles with a parameter of the mask (bool, one per parameter), in the order in which they flow next."""
        tiles = [e.pieces["tile"][has_grad[e.pieces["param"]]] + np.uint32(e.first_tile) for e in self.extents]
        return self.flowing(np.unique(np.concatenate(tiles)))

    def tiles_of_params(self, params: Sequence[int]) -> np.ndarray[Any, Any]:
        """The same for these parameters, counted over all extents."""
        mask = np.zeros(self.n_params, bool)
        mask[params] = True
        return self.tiles_with(mask)

    @property
    def descending(self) -> bool:
        """Does the next step go from the last tile to the first?"""
        return self.step % 2 == 1

    def flowing(self, tiles: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Ascending tiles in the order in which the next step takes them.

        Steps go to and fro: one begins with what the one before wrote last, which is still in memory. That follows from
        the step's number alone, so that all processes do the same, and whoever resumes. With a `rank` they take the
        lowest first; tiles that have none, as they are new, come last.
        """
        if self.rank is not None:
            new = np.full(self.n_tiles - len(self.rank), np.iinfo(np.int64).max)
            return tiles[np.argsort(np.append(self.rank, new)[tiles], kind="stable")]
        return tiles[::-1].copy() if self.descending else tiles

    # ---- a step ------------------------------------------------------------

    def begin(
        self,
        params: np.ndarray[Any, Any],
        hypers: np.ndarray[Any, Any],
        tiles: np.ndarray[Any, Any],
        record: Record | None = None,
        *,
        order: int = TO_AND_FRO,
    ) -> np.ndarray[Any, Any]:
        """Begins a step over `tiles`, or more; returns all of them, to be pushed. `record`: for its commit.

        `order`: TO_AND_FRO, SAME_ORDER or AS_PUSHED of bindings.py, see csd_order.
        """
        self.check_open()
        self.check_whole()
        tiles = self.committer.before_step(tiles, record)
        self.windows.before_step(tiles)
        self._begin(params, hypers, tiles, order)
        self.stepping = True
        return tiles

    def _begin(
        self,
        params: np.ndarray[Any, Any],
        hypers: np.ndarray[Any, Any],
        tiles: np.ndarray[Any, Any],
        order: int = TO_AND_FRO,
    ) -> None:
        self._trace_step()
        self._began, self._ended, self._undone = time.perf_counter(), 0.0, False
        self.decoded.tell(params)
        bindings.engine_begin(self.handle, params, hypers, tiles, self.name_device, order=order)

    def _trace_step(self) -> None:
        """What the last step did is known when its last states are where they belong."""
        if self._trace and self._began:
            bindings.engine_wait_writes(self.handle, self.name_device)
            events = bindings.engine_events(self.handle)
            name = "undone" if self._undone else f"step {self.step}"
            end = self._ended or time.perf_counter()
            self._trace.step(name, self._began, end, events, self.model_spans or [], self.near_spans or [])
            self._began = 0.0

    def push(self, tile: int, grad: int = 0, param: int = 0, entries: int = 0, n_entries: int = 0) -> None:
        bindings.engine_push(self.handle, tile, grad, param, entries, n_entries, self.name_device)

    def give(self, tile: int, states: int) -> None:
        """Goes before the push of a tile with parameters whose master is GIVEN: their states as they will be.

        `states`: address of all sections of the tile, one after another, read until its parameters are there.
        """
        bindings.engine_give(self.handle, tile, states, self.name_device)

    def read(self, tile: int, states: int) -> None:
        """Copies the states of a tile to an address, as they are now: all sections, one after another.

        Not within a step. Raises CSDOSError, CSDStoreError if the tile is damaged.
        """
        bindings.engine_read(self.handle, tile, states, self.name_device)

    def push_grads(self, tile: int, grads: Sequence[int]) -> None:
        """The same of gradients that begin at `grads`, one for each of `pieces_of(tile)`; 0: it has none after all.

        Read until the tile has its parameters, or the step is over. Raises CSDValueError for tiles with Top-K.
        """
        bindings.engine_push_grads(self.handle, tile, grads, self.name_device)

    def drop_grads(self, params: Sequence[int]) -> None:
        """These parameters have no gradient after all, and keep every bit. Before any of their tiles is pushed."""
        bindings.engine_drop_grads(self.handle, np.array(params, np.uint32), self.name_device)

    def pull(self) -> int:
        return bindings.engine_pull(self.handle, self.name_device)

    def params_ready(self, tiles: np.ndarray[Any, Any], *, wait: bool) -> bool:
        """Do these tiles (uint32), all of them pushed, have their new parameters? `wait`: until they have."""
        return bindings.engine_params_ready(self.handle, tiles, wait, self.name_device)

    def hold_bytes(self, tile: int) -> int:
        """Of the memory for push_early(), in the step that is under way; 0: the tile is not part of it."""
        return bindings.engine_hold_bytes(self.handle, tile)

    def push_early(self, tile: int, grads: Sequence[int], hold: int) -> None:
        """Pushes a tile while the step is a guess: nothing changes before release(); finish(keep=False) undoes it.

        `grads`: of each of `pieces_of(tile)`, where its parameter's dense gradient begins; 0: it has none. Read until
        unchanged() returns, or the step is over. `hold`: memory of hold_bytes(), until the tile has its parameters.
        Raises CSDValueError for tiles in memory or with one slot, new ones, and those with Top-K.
        """
        bindings.engine_push_early(self.handle, tile, grads, hold, self.name_device)

    def unchanged(self, params: np.ndarray[Any, Any]) -> bool:
        """Did the tiles that were pushed early read what is there now? `params`: all rows, with their addresses now."""
        return bindings.engine_unchanged(self.handle, params, self.name_device)

    def release(self, params: np.ndarray[Any, Any], order: np.ndarray[Any, Any]) -> None:
        """The guess was right: what was pushed early goes to its parameters, and the other tiles may be pushed.

        `params`: rows as to begin(), but for the addresses of gradients and parameters. `order`: tiles (uint32) in the
        order in which they are wanted; others follow.
        """
        bindings.engine_release(self.handle, params, order, self.name_device)
        self.guessed = False

    def begin_without_tiles(self) -> None:
        """Begins a step all of which is on the accelerator. To be followed by end_without_tiles()."""
        self.check_open()
        self.check_whole()
        self._trace_step()
        self._began, self._ended, self._undone = time.perf_counter(), 0.0, False

    def end_without_tiles(self) -> None:
        self._ended = time.perf_counter()
        self.step += 1

    def tear(self) -> None:
        """A step that cannot be undone has changed states in place, and has not come to its end."""
        self._torn = True

    def finish(self, keep: bool = True) -> None:
        """The step is whole; or undone, with `keep` False or an exception. To be followed by `commit()`."""
        try:
            bindings.engine_finish(self.handle, keep, self.name_device)
        except CSDTornError:
            self._torn = True
            raise
        finally:
            self.stepping, self.guessed, self._ended = False, False, time.perf_counter()
            self._undone = not keep
        if keep:
            self.step += 1
            self.windows.after_step()
            self.committer.after_step()
        elif self.devices.resident:  # it changed them in place
            self.decoded.forget_unwritten()

    def take_back(self, params: np.ndarray[Any, Any]) -> None:
        """Undoes the last step, which was finished, and may be committed on this rank: other ranks could not make it.

        `params`: those that took part in it. Nothing may have changed states since but who wrote to windows. Raises
        CSDValueError if it began with such writes, or a tile has one slot. undone() is as after finish().
        """
        self.committer.before_taking_back()
        self.windows.note_written()
        self.forget_copies()
        bindings.engine_take_back(self.handle, self.name_device)
        self._undone = True
        self.step -= 1
        for extent, steps in zip(self.extents, self.steps, strict=True):
            here = params[(params >= extent.first_param) & (params < extent.first_param + len(steps))]
            steps[here - extent.first_param] -= 1
        self.windows.after_taking_back()
        self.committer.after_taking_back()

    def forget_copies(self, params: Sequence[int] | None = None) -> None:
        """States of these parameters, None: of all, are no longer what copies on the accelerator have."""
        if self.accelerator and self.accelerator.copies:
            self.accelerator.copies.forget(params)

    def copy_to_next_slots(self, tiles: np.ndarray[Any, Any]) -> None:
        """Reads tiles, or takes what somebody wrote to their windows, and waits until that is in their next slots."""
        if not len(tiles):
            return
        self._begin(np.zeros(self.n_params, PARAM), np.zeros(0, HYPER), tiles)
        for tile in tiles.tolist():
            self.push(tile)
        bindings.engine_finish(self.handle, True, self.name_device)
        self._ended = time.perf_counter()
        self.wait_writes()

    def undone(self) -> list[tuple[int, int]]:
        """Tiles whose parameters the last undone step had already written: of how many elements, from the first on."""
        return bindings.engine_undone(self.handle)

    def remap(self) -> None:
        """Waits until every state is on its device and the windows show it. Raises CSDOSError if one will not go."""
        self.check_open()
        if self.handle is not None:
            self.windows.show(open=not self.durable)

    def wait_writes(self) -> None:
        """Waits until every state is on its device. Raises CSDOSError if one will not go."""
        if self.handle is not None:
            bindings.engine_wait_writes(self.handle, self.name_device)

    @contextlib.contextmanager
    def writing(self, params: Sequence[int]) -> Iterator[None]:
        """What is written to the windows of these parameters within is on the devices at the end. Raises CSDOSError.

        Where states are durable it is committed there, and what is committed before stays as it is until then.
        """
        self.forget_copies(params)
        with self.committer.writing(params):
            yield

    # ---- commits: where states are durable; elsewhere nothing happens ------------------

    @property
    def durable(self) -> bool:
        """Is there a device whose states outlive the process?"""
        return self.committer.durable

    @property
    def committed_step(self) -> int:
        """The last step that is durable."""
        return self.committer.committed_step

    def describe(self, manifest: dict[str, Any]) -> None:
        """Says what the parameters are; stores carry it from the next commit on."""
        self.committer.describe(manifest)

    def commit(self, record: Record | None = None) -> None:
        """Makes the state durable as it is, in the background; `steps` and `record` with it (None: that of before).

        `wait()` waits for that; a round of ranks counts with `confirm()` only. Raises CSDOSError if the commit before
        had failed and fails again.
        """
        self.committer.commit(record)

    def confirm(self) -> None:
        """Goes before whatever changes states: returns when all ranks have the last round. It counts then.

        All ranks call it. Raises on all of them if one does not have the round: there CSDOSError, elsewhere
        CSDRankError; nothing has been touched, and the next call tries again.
        """
        self.committer.confirm()

    def wait(self) -> None:
        """Returns when the last step is durable. Raises CSDOSError. Of ranks, all call it, and it raises on all."""
        self.committer.wait()

    def all_ranks_or_none(self) -> contextlib.AbstractContextManager[object]:
        """What fails within raises on all ranks, where ranks commit together; all call it then."""
        return self.committer.all_ranks_or_none()

    def loading(self, record: Record | None = None) -> contextlib.AbstractContextManager[None]:
        """What is loaded within is durable at the end, with `record`: as a whole, or not at all.

        Ranks make it a round; all of them call it, and it raises on all.
        """
        return self.committer.loading(record)

    # ---- residuals -------------------------------------------------------------

    def keep_residual(self, param: int, residual: torch.Tensor) -> None:
        """From now on this is the residual of a parameter (counted over all extents): not while a step is under way.

        1-D bfloat16, dense, as many elements as the parameter has, in the order of its state, anywhere.
        Where states are durable, each commit carries it as it is then. Who writes to it past torch counts that, by
        torch.autograd.graph.increment_version. Raises CSDOSError if a disk is full; then nothing has changed.
        """
        self.committer.before_keeping(param, residual)
        self.residuals[param] = residual

    def drop_residual(self, param: int) -> None:
        """The parameter has a residual no more."""
        if self.residuals.pop(param, None) is not None:
            self.committer.after_dropping(param)

    def adopt_residuals(self, residuals: dict[int, torch.Tensor]) -> None:
        """Those of the commit that was taken up, by parameter."""
        self.residuals = residuals
        self.committer.adopt_residuals(residuals)

    # ---- what is known of it -------------------------------------------------

    @property
    def step_span(self) -> tuple[float, float]:
        """When the last step began, and when all its tiles had been updated: of time.perf_counter()."""
        return self._began, self._ended

    def stats(self) -> list[dict[str, Any]]:
        """Counts of the last step, one dict per device; see `csd_stats`. Totals are those since the store was made.

        Waits for the last step's commit if that writes residuals. Raises CSDOSError.
        """
        self.committer.before_counting()
        return self.counted()

    def counted(self) -> list[dict[str, Any]]:
        """The same without waiting: a commit may be writing residuals."""
        return self.devices.counted(self.handle, self.committer.residual_bytes) if self.handle else []

    def written_bytes(self) -> list[int]:
        """To each device since its store was made, as far as is known: a commit may be writing residuals."""
        return [int(counts["total_write_bytes"]) for counts in self.counted()] or self.devices.written_before

    def all_steps(self) -> np.ndarray[Any, Any]:
        """A copy of `step` of each parameter, over all extents, fp32."""
        return np.concatenate([np.zeros(0, np.float32), *self.steps])

    @property
    def idle(self) -> bool:
        """Nothing goes on in the background that close() would wait for."""
        return self.committer.idle and (self.landing is None or self.landing.is_set())

    @property
    def closed(self) -> bool:
        return not self.devices.stores

    def close(self) -> None:
        """Drains and lets go of the devices. Raises CSDOSError if the last states could not be written.

        Ctrl-C, and every other signal that Python code handles, comes when that is done; while a snapshot is being
        made, at once: the optimizer is then as it was.

        A forked child has neither the threads nor the devices: there, nothing happens.
        """
        if self.pid != os.getpid():
            return
        self.committer.end_copies()  # which may take long, and be interrupted: nothing has been given up yet
        if self.landing:
            self.landing.wait()
        with defer_signals(), self.lock:  # interrupted, it would go on to let go of what a commit still uses
            if self.closed:
                return
            if self.guessed:
                self.finish(keep=False)
            if self.stepping:  # the same thread, say in a signal handler
                raise CSDRuntimeError("a step is under way: close() when it has returned")
            try:
                self.committer.before_close()
                self.wait_writes()
                self._trace_step()
            finally:
                self.abandon()

    def abandon(self) -> None:
        """Lets go of the devices as they are: nothing is made durable any more, and no error is told."""
        if self._trace:
            self._trace.close()
        self.committer.close()
        if self.accelerator and self.accelerator.copies:
            self.accelerator.copies.close()
        handle, self.handle = self.handle, None
        if handle is not None:
            with contextlib.suppress(CSDError):  # whoever waited for the last states has raised it
                bindings.engine_close(handle, self.name_device)
        self.devices.close()

    @property
    def broken(self) -> bool:
        """No step and no commit is possible any more: see check_whole()."""
        return self._torn or bool(self.windows.lost)

    def check_whole(self) -> None:
        """Raises CSDTornError, CSDLostError if the states are not those of a step any more."""
        if self._torn:
            raise CSDTornError(errno.EIO, f"an earlier step was cut short. {TORN}")
        self.windows.check()

    def check_open(self) -> None:
        if self.closed:
            raise CSDRuntimeError("this optimizer is closed")
        if self.pid != os.getpid():
            raise CSDRuntimeError(
                f"this optimizer belongs to process {self.pid}; a forked process has neither its threads nor "
                "its devices. Construct the optimizer after forking."
            )
