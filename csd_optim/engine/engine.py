"""The engine: drives several devices as one. windows.py maps their states; committer.py makes these durable."""

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
from ..store.layout import SLOTS, SUM_ELEMS, Extent, extents_of, plan_extent
from ..store.sections import FP32, elem_bytes
from .committer import Committer
from .decoded import Decoded
from .on_accelerator import OnAccelerator
from .open_devices import OpenDevices
from .trace import Span, Trace
from .windows import Windows


class Engine:
    """The devices of `specs`, owned until `close()`, and the states on them: fp32 or 8-bit codes, as extend() is told.

    Raises what `StoreFile` raises when a directory cannot be used; then nothing is left open.
    """

    def __init__(
        self,
        specs: Sequence[DeviceSpec],
        *,
        mode: Mode = "new",
        tile_elems: int | None = None,
        in_place: bool = True,
        kernels: Collection[str] = (),
    ) -> None:
        self.mode = mode
        self.devices: OpenDevices = OpenDevices(specs, mode=mode, in_place=in_place, kernels=kernels)
        self.tile_elems = tile_elems
        self.extents: list[Extent] = []
        self.pid: int = os.getpid()
        self.lock: threading.RLock = threading.RLock()  # held during a step, while the state is read, and in close()
        self.steps: list[np.ndarray[Any, Any]] = []  # per extent: the `step` count of each parameter, fp32
        self.residuals: dict[int, torch.Tensor] = {}  # by parameter, numbered over all extents: see keep_residual()
        self.step: int = 0  # number of completed steps
        self.record: Record = Record()  # of the last step
        self.stepping: bool = False
        self.is_speculative: bool = False  # the step in flight has begun before step(): see overlap/
        self._kept_alive: object = None  # memory that it uses
        self.completed_event: threading.Event | None = None  # set when a thread has completed the step
        self.tile_rank: np.ndarray[Any, Any] | None = None  # int64 per tile: steps go by rising rank; None: to and fro
        self.torn: bool = False  # a step that writes in place was cut short
        self.recovered: Sequence[Contents] = ()  # per device: what the resumed store contains
        self.windows: Windows = Windows(self)
        self.decoded: Decoded = Decoded(self)
        self.committer: Committer = Committer(self)
        self.handle: Any = None  # the native engine; created with the first extent
        self.accelerator: OnAccelerator | None = None  # its states are not on `devices` unless it has copies
        self._trace: Trace | None = None
        self.served: dict[str, float] = {}  # on an owner: what reports tell `csd-optim top` about its trainers
        self.model_spans: list[Span] | None = [] if settings.trace() else None  # forward and backward, for the trace
        self.near_spans: list[Span] | None = [] if settings.trace() else None  # updates on the accelerator, likewise
        self._began = self._ended = 0.0  # when the step that is traced next began and ended
        self._undone = False  # whether that step was undone

    # ---- layout ------------------------------------------------------------

    def next_step_fills(self, params: Sequence[int]) -> bool:
        """Return whether the next step can initialise the state of these newly joined parameters from their values."""
        if not (self.devices.reaches_params and params and all(self.devices.stores)):
            return False
        return bool(self.windows.loose[self.tiles_of_params(params)].all()) and not self.committer.uncommitted

    @property
    def specs(self) -> list[DeviceSpec]:
        """The devices that the user named, the accelerator first."""
        if not self.accelerator:
            return self.devices.specs
        return [self.accelerator.spec, *([] if self.accelerator.alone else self.devices.specs)]

    @property
    def copies(self) -> int:
        """How many copies of the states a step needs at the same time, so that it can be undone."""
        near = self.accelerator
        return 1 if self.devices.resident or (near and near.copies) else SLOTS

    @property
    def n_params(self) -> int:
        return sum(len(e.numels) for e in self.extents)

    @property
    def n_tiles(self) -> int:
        return sum(e.n_tiles for e in self.extents)

    def name_device(self, device: int, tile: int = -1) -> str:
        """Return the name of a device for messages. `tile`: a damaged tile on it, to be named too, or -1."""
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
        """Allocate the states of parameters with these sizes; they read as zero. Raises CSDOSError: a disk is full.

        `sections`: names of each parameter's states, the fp32 master first.
        `codec`: "8bit" stores codes, which have no windows; all parameters then have `param_dtype`.
        `is_copied`: the accelerator will hold copies of the states, see near_copies.py.
        Call `describe()` next, then fill the states within `writing()`; a step fills codes.
        """
        self.check_open()
        self.committer.before_extend()
        self.windows.synced &= codec != FP32  # codes have no windows that could be written
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
            tile_elems=self.tile_elems,
            sum_elems=SUM_ELEMS,
            mapped=0 if self.devices.resident else bindings.mappings(),
        )
        extent = plan(shares=self.devices.shares)
        placement = self.devices.placement if extent.n_tiles else None  # empty parameters need no device
        if placement:
            shares = placement.shares(extent, is_copied=is_copied)
            extent = placement.divide(plan(shares=shares), is_copied=is_copied)
            if self.handle is None:  # the first extent may have too few tiles for every device to get one
                self.devices.share_memory([share * extent.n_tiles * extent.slot_bytes for share in shares])
        # Every check comes first; if adding the extent fails all the same, room_for() shrinks the stores again.
        with self.devices.room_for(extent) as offsets:
            self._add(extent, offsets, None)
        if placement:
            placement.record(extent, is_copied=is_copied)
            placement.log_summary()
            self.devices.shares = extent.shares
        if extent.n_tiles and not any(e.n_tiles for e in self.extents[:-1]):
            self.devices.log_scratch(extent)
        return extent

    def _tune(
        self, numels: Sequence[int], sections: Sequence[str], codec: str, param_dtype: torch.dtype | None
    ) -> None:
        """Measure the drives before the first states are allocated on them."""
        if not any(e.n_tiles for e in self.extents) and self.devices.placement is None:
            nbytes = SLOTS * elem_bytes(sections, codec, param_dtype) * sum(numels)
            self.devices.tune(int(nbytes), new=True)
            if self.devices.placement:
                self.devices.placement.accelerator = self.accelerator

    def accelerator_fraction(self, numels: Sequence[int], sections: Sequence[str], param_bytes: float) -> float | None:
        """Return the fraction of these parameters that `auto` wants on the accelerator; None: there is no `auto`.

        `param_bytes`: average bytes per element of the parameters. Raises what extend() raises.
        """
        if self.accelerator is None or not self.accelerator.spec.is_placed or not sum(numels):
            return None
        self._tune(numels, sections, FP32, None)
        assert self.devices.placement
        extent = plan_extent(numels, len(self.devices.specs), sections=sections)
        return self.devices.placement.accelerator_fraction(extent, param_bytes)

    def _add(
        self, extent: Extent, offsets: list[int], tiles: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None
    ) -> None:
        """Add an extent to the native engine, the windows and the committer.

        `offsets`: where the extent begins in each store (bytes). `tiles`: None for a new extent, else as tiles_of().
        """
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
            bindings.engine_events(self.handle)  # the first call makes the native engine record events

    def adopt_commit(self, found: Sequence[Contents], order: Sequence[int]) -> None:
        """Continue from the commit `found` in the stores. `order`: the index of the store that is device 0, 1 ..."""
        self.recovered = recovered = [found[d] for d in order]
        self.devices.adopt_commit(recovered, order)
        first = recovered[0]
        self.step, self.record = first.superblock.step, first.record
        extents = extents_of(recovered)
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
    def is_coded(self) -> np.ndarray[Any, Any]:
        """Which tiles store codes: bool, one per tile."""
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
        """Return the TILE_STATE of each tile of an extent, and the checksums, uint32 (tiles, chunks, sections)."""
        n, first = extent.n_tiles, extent.first_tile
        return bindings.engine_tiles(self.handle, first, n, extent.chunks, len(extent.slot))

    def pieces_of(self, tile: int) -> np.ndarray[Any, Any]:
        """Return the parts of parameters in a tile, dtype PIECE."""
        extent = self.extent_of(tile)
        return extent.pieces_in(tile - extent.first_tile)

    def tiles_with(self, has_grad: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the tiles of the parameters in a mask (bool, one per parameter), in the order of the next step."""
        tiles = [e.pieces["tile"][has_grad[e.pieces["param"]]] + np.uint32(e.first_tile) for e in self.extents]
        return self.in_step_order(np.unique(np.concatenate(tiles)))

    def tiles_of_params(self, params: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return the tiles of these parameters (numbered over all extents), in the order of the next step."""
        mask = np.zeros(self.n_params, bool)
        mask[params] = True
        return self.tiles_with(mask)

    @property
    def descending(self) -> bool:
        """Whether the next step goes from the last tile to the first."""
        return self.step % 2 == 1

    def in_step_order(self, tiles: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return `tiles`, given in ascending order, in the order in which the next step takes them.

        Steps alternate their direction: each begins with the tiles that the previous step wrote last, which are still
        in memory. The direction follows from the step's number alone, so that all processes agree on it, also after a
        resume. With a `tile_rank`, the lowest goes first; new tiles, which have no rank yet, come last.
        """
        if self.tile_rank is not None:
            new = np.full(self.n_tiles - len(self.tile_rank), np.iinfo(np.int64).max)
            return tiles[np.argsort(np.append(self.tile_rank, new)[tiles], kind="stable")]
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
        is_speculative: bool = False,
        kept_alive: object = None,
    ) -> np.ndarray[Any, Any]:
        """Begin a step over `tiles`; return all tiles to be pushed, with those that the committer adds.

        `record`: for the step's commit. `order`: TO_AND_FRO, SAME_ORDER or AS_PUSHED of bindings.py, see csd_order.
        `is_speculative`: it begins before step(), and close() undoes it. `kept_alive`: memory that it uses.
        """
        self.check_open()
        self.check_whole()
        tiles = self.committer.before_step(tiles, record)
        self.windows.before_step(tiles)
        self._begin(params, hypers, tiles, order)
        self.stepping, self.is_speculative, self._kept_alive = True, is_speculative, kept_alive
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
        self.decoded.enter_in_table(params)
        bindings.engine_begin(self.handle, params, hypers, tiles, self.name_device, order=order)

    def _trace_step(self) -> None:
        """Write the last step to the trace, once all its states are written and so all its events are known."""
        if self._trace and self._began:
            bindings.engine_wait_writes(self.handle, self.name_device)
            events = bindings.engine_events(self.handle)
            name = "undone" if self._undone else f"step {self.step}"
            end = self._ended or time.perf_counter()
            self._trace.step(name, self._began, end, events, self.model_spans or [], self.near_spans or [])
            self._began = 0.0

    def push(
        self,
        tile: int,
        *,
        images: tuple[int, int] = (0, 0),
        entries: tuple[int, int] = (0, 0),
        grads: Sequence[int] | None = None,
        hold: int = 0,
        states: int = 0,
    ) -> None:
        """Push a tile, whose gradients are where the step's table says; see csd_push. Raises what a step raises.

        `images`: addresses of its gradients and parameters. `entries`: address of the Top-K entries in it, and how many
        words these have.
        `grads`: for each of `pieces_of(tile)` the address where its parameter's gradient begins; 0: it has none after
        all. They are read until the tile's parameters are ready or the step ends. Not for tiles with Top-K.
        `hold`: address of hold_bytes() bytes, in use until the tile's parameters are ready. It pushes the tile early:
        nothing changes before release(), finish(keep=False) undoes it, and `grads` are read until unchanged() returns.
        Not for tiles in memory, with one slot, new, or with Top-K.
        `states`: address of all sections of the tile, one after another, as they are after the step; for parameters
        whose master is GIVEN. They are read until the tile's parameters are ready.
        """
        how: dict[str, Any] = {"images": images, "entries": entries, "grads": grads, "hold": hold, "states": states}
        bindings.engine_push(self.handle, tile, self.name_device, **how)

    def read(self, tile: int, states: int) -> None:
        """Copy the current states of a tile to the address `states`: all sections, one after another.

        Not during a step. Raises CSDOSError, or CSDStoreError if the tile is damaged.
        """
        extent = self.extent_of(tile)
        bindings.engine_read(self.handle, tile, len(extent.sections), extent.tile_elems, states, self.name_device)

    def read_masters(self, tile: int, elems: int) -> torch.Tensor:
        """Return the first `elems` masters of a tile with fp32 states, 1-D. Damage behind these is not noticed.

        Not during a step. Raises CSDOSError, or CSDStoreError if they are damaged.
        """
        masters = torch.empty(self.elems_of(tile), dtype=torch.float32, device="cpu")
        bindings.engine_read(self.handle, tile, 1, elems, masters.data_ptr(), self.name_device)
        return masters[:elems]

    def drop_grads(self, params: Sequence[int]) -> None:
        """Leave these parameters unchanged, as they have no gradient. Call it before any of their tiles is pushed."""
        bindings.engine_drop_grads(self.handle, np.array(params, np.uint32), self.name_device)

    def pull(self) -> int:
        return bindings.engine_pull(self.handle, self.name_device)

    def params_ready(self, tiles: np.ndarray[Any, Any], *, wait: bool) -> bool:
        """Return whether these pushed tiles (uint32) have their new parameters. `wait`: block until they have."""
        return bindings.engine_params_ready(self.handle, tiles, wait, self.name_device)

    def hold_bytes(self, tile: int) -> int:
        """Return how many bytes a tile of the step in flight needs to be pushed early; 0: it has no such tile."""
        return bindings.engine_hold_bytes(self.handle, tile)

    def unchanged(self, params: np.ndarray[Any, Any]) -> bool:
        """Return whether the tiles pushed early read what is in memory now. `params`: all rows, current addresses."""
        return bindings.engine_unchanged(self.handle, params, self.name_device)

    def release(self, params: np.ndarray[Any, Any], order: np.ndarray[Any, Any]) -> None:
        """Confirm a speculative step: write the parameters of tiles pushed early, and let other tiles be pushed.

        `params`: the rows passed to begin(), with current addresses of gradients and parameters. `order`: tiles
        (uint32) in the order in which their parameters are needed; the other tiles follow.
        """
        bindings.engine_release(self.handle, params, order, self.name_device)
        self.is_speculative = False

    def begin_without_tiles(self) -> None:
        """Begin a step that updates only states on the accelerator. Call end_without_tiles() at its end."""
        self.check_open()
        self.check_whole()
        self._trace_step()
        self._began, self._ended, self._undone = time.perf_counter(), 0.0, False

    def end_without_tiles(self, keep: bool = True) -> None:
        """End it. `keep`: it is complete; else it was undone."""
        self._note_end(is_undone=not keep)
        self.step += keep

    def _note_end(self, *, is_undone: bool) -> None:
        self.stepping, self.is_speculative, self._kept_alive = False, False, None
        self._ended, self._undone = time.perf_counter(), is_undone

    def mark_torn(self) -> None:
        """Mark the states as torn: a step that cannot be undone changed states in place, and did not complete."""
        self.torn = True

    def finish(self, keep: bool = True) -> None:
        """Complete the step. With `keep` False, or if this raises CSDError, it is undone. Call `commit()` next."""
        try:
            bindings.engine_finish(self.handle, keep, self.name_device)
        except CSDError as e:
            self.torn |= isinstance(e, CSDTornError)
            self._note_end(is_undone=True)
            raise
        self._note_end(is_undone=not keep)
        if keep:
            self.step += 1
            self.windows.after_step()
            self.committer.after_step()
        elif self.devices.resident:  # the step changed the states in place
            self.decoded.forget_unwritten()

    def undo_last(self, params: np.ndarray[Any, Any]) -> None:
        """Undo the last finished step, even if this rank has committed it, because another rank failed to.

        `params`: the parameters that took part in the step. Since then, nothing but writes to windows may have changed
        states. Raises CSDValueError if the step began with such writes, or a tile has one slot. Afterwards undone()
        answers as after finish().
        """
        self.committer.before_undo()
        self.windows.note_written()
        self.forget_copies()
        bindings.engine_take_back(self.handle, self.name_device)
        self._undone = True
        self.step -= 1
        for extent, steps in zip(self.extents, self.steps, strict=True):
            here = params[(params >= extent.first_param) & (params < extent.first_param + len(steps))]
            steps[here - extent.first_param] -= 1
        self.windows.after_undo()
        self.committer.after_undo()

    def forget_copies(self, params: Sequence[int] | None = None) -> None:
        """Invalidate the accelerator's copies of the states of these parameters; None: of all."""
        if self.accelerator and self.accelerator.copies:
            self.accelerator.copies.forget(params)

    def copy_to_next_slots(self, tiles: np.ndarray[Any, Any]) -> None:
        """Copy tiles, with what was written to their windows, to their other slots, and wait for the writes."""
        if not len(tiles):
            return
        self._begin(np.zeros(self.n_params, PARAM), np.zeros(0, HYPER), tiles)
        for tile in tiles.tolist():
            self.push(tile)
        bindings.engine_finish(self.handle, True, self.name_device)
        self._ended = time.perf_counter()
        self.wait_writes()

    def undone(self) -> list[tuple[int, int]]:
        """Return the tiles whose parameters the last undone step had already written.

        With each tile comes how many of its elements were written, from its first one on.
        """
        return bindings.engine_undone(self.handle)

    def remap(self) -> None:
        """Wait until all states are written, then remap the windows. Raises CSDOSError if a write keeps failing."""
        self.check_open()
        if self.handle is not None:
            self.windows.show(open=not self.durable)

    def wait_writes(self) -> None:
        """Wait until all states are written to their devices. Raises CSDOSError if a write keeps failing."""
        if self.handle is not None:
            bindings.engine_wait_writes(self.handle, self.name_device)

    @contextlib.contextmanager
    def writing(self, params: Sequence[int]) -> Iterator[None]:
        """Allow writes to the windows of these parameters inside; on exit, the writes are on the devices.

        Where states are durable, the exit also commits them; the previous commit stays intact until then. Raises
        CSDOSError.
        """
        self.forget_copies(params)
        with self.committer.writing(params):
            yield

    # ---- commits: no-ops unless states are durable -------------------------------------

    @property
    def durable(self) -> bool:
        """Whether the states on some device outlive the process."""
        return self.committer.durable

    @property
    def committed_step(self) -> int:
        """The last step that is durable."""
        return self.committer.committed_step

    def describe(self, manifest: dict[str, Any]) -> None:
        """Set the description of the parameters, which the stores contain from the next commit on."""
        self.committer.describe(manifest)

    def commit(self, record: Record | None = None) -> None:
        """Start committing the current state, `steps` and `record` (None: the previous record) in the background.

        `wait()` waits for the commit; a round, the joint commit of several ranks, only counts after `confirm()`.
        Raises CSDOSError if the previous commit failed and its retry fails too.
        """
        self.committer.commit(record)

    def confirm(self) -> None:
        """Wait until all ranks have the last round, which counts from then on. Call it before changing states.

        All ranks call it. If one of them does not have the round, raises on all: CSDOSError on that rank, CSDRankError
        elsewhere. Nothing has been touched then, and the next call tries again.
        """
        self.committer.confirm()

    def wait(self) -> None:
        """Wait until the last step is durable. Raises CSDOSError. All ranks call it, and it raises on all."""
        self.committer.wait()

    def all_ranks_or_none(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that raises on all ranks if its body fails on one. All ranks enter it."""
        return self.committer.all_ranks_or_none()

    def loading(self, record: Record | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context: what is loaded inside becomes durable at its end, with `record`, entirely or not at all.

        Several ranks commit it as a round: all of them enter the context, and it raises on all.
        """
        return self.committer.loading(record)

    # ---- residuals -------------------------------------------------------------

    def keep_residual(self, param: int, residual: torch.Tensor) -> None:
        """Register the residual of a parameter (numbered over all extents). Not while a step is in flight.

        `residual`: 1-D bfloat16, contiguous, as many elements as the parameter, in the order of its state, on any
        device. Where states are durable, each commit contains its current value. Code that writes to it without torch
        must call torch.autograd.graph.increment_version. Raises CSDOSError if a disk is full; nothing changes then.
        """
        self.committer.before_keep_residual(param, residual)
        self.residuals[param] = residual

    def drop_residual(self, param: int) -> None:
        """Remove the residual of a parameter, if it has one."""
        if self.residuals.pop(param, None) is not None:
            self.committer.after_drop_residual(param)

    def adopt_residuals(self, residuals: dict[int, torch.Tensor]) -> None:
        """Register the residuals of the commit that was resumed, by parameter."""
        self.residuals = residuals
        self.committer.adopt_residuals(residuals)

    # ---- statistics and the end ----------------------------------------------

    @property
    def step_span(self) -> tuple[float, float]:
        """When the last step began, and when all its tiles had been updated: times of time.perf_counter()."""
        return self._began, self._ended

    def stats(self) -> list[dict[str, Any]]:
        """Return the counts of the last step, one dict per device; see `csd_stats`. Totals cover the store's lifetime.

        Waits for the last step's commit if it writes residuals. Raises CSDOSError.
        """
        self.committer.before_stats()
        return self.current_stats()

    def current_stats(self) -> list[dict[str, Any]]:
        """Return the same counts without waiting: a commit may still be writing residuals, which then count partly."""
        return self.devices.current_stats(self.handle, self.committer.residual_bytes) if self.handle else []

    def written_bytes(self) -> list[int]:
        """Return the bytes written to each device since its store was created; a commit may be adding to them."""
        return [int(counts["total_write_bytes"]) for counts in self.current_stats()] or self.devices.written_before

    def all_steps(self) -> np.ndarray[Any, Any]:
        """Return a copy of the `step` counts of all parameters, fp32."""
        return np.concatenate([np.zeros(0, np.float32), *self.steps])

    @property
    def idle(self) -> bool:
        """Whether no background work is in flight that close() would wait for."""
        return self.committer.idle and (self.completed_event is None or self.completed_event.is_set())

    @property
    def closed(self) -> bool:
        return not self.devices.stores

    def close(self) -> None:
        """Complete all writes and close the devices. Raises CSDOSError if the last states could not be written.

        Ctrl-C, and every other signal that Python code handles, is deferred until that is done. Only while this waits
        for a snapshot, a signal interrupts it at once, and the optimizer stays open and unchanged.

        A no-op in a forked child, which has neither the threads nor the devices.
        """
        if self.pid != os.getpid():
            return
        self.committer.end_copies()  # this may take long and may be interrupted: nothing has been closed yet
        if self.completed_event:
            self.completed_event.wait()
        with defer_signals(), self.lock:  # an interrupt would run abandon() while a commit still uses the devices
            if self.closed:
                return
            if self.is_speculative:
                self.finish(keep=False)
            if self.stepping:  # close() is called on the thread that steps, for example by a signal handler
                raise CSDRuntimeError("a step is under way: close() when it has returned")
            try:
                self.committer.before_close()
                self.wait_writes()
                self._trace_step()
            finally:
                self.abandon()

    def abandon(self) -> None:
        """Close the devices as they are: commit nothing, and suppress the native engine's errors."""
        if self._trace:
            self._trace.close()
        self.committer.close()
        if self.accelerator and self.accelerator.copies:
            self.accelerator.copies.close()
        handle, self.handle = self.handle, None
        if handle is not None:
            with contextlib.suppress(CSDError):  # whoever waited for the last writes has already raised it
                bindings.engine_close(handle, self.name_device)
        self.devices.close()

    @property
    def broken(self) -> bool:
        """Whether steps and commits are impossible from now on: see check_whole()."""
        return self.torn or bool(self.windows.lost)

    def check_whole(self) -> None:
        """Raise CSDTornError or CSDLostError if the states are no longer those of one whole step."""
        if self.torn:
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
