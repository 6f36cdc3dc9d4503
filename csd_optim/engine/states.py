"""The states on an engine's devices between steps: places, valid copies and step counts."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..bindings import HYPER, PARAM, TO_AND_FRO, TORN, ExtentConfig, Native
from ..errors import CSDError, CSDLostError, CSDOSError, CSDTornError
from ..store.existing import Mode
from ..store.format import Record
from ..store.layout import SLOTS, Extent
from .accelerator_codes import AcceleratorCodes
from .decoded import Decoded
from .parts import Devices, NativeEngine, Space
from .tiles import Tiles
from .timeline import Timeline
from .truth import Truth
from .watcher import Watcher
from .windows import Windows

Sums = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


class States:
    """The states of one engine, as the engine and its committer share them.

    `native`: not opened yet; None: bindings.Native. `mode`: see StoreFile.
    """

    def __init__(self, devices: Devices, native: NativeEngine | None = None, *, mode: Mode = "new") -> None:
        self.devices: Devices = devices
        self.mode: Mode = mode
        self.native: NativeEngine = native or Native(devices.name)  # opened with the first extent
        self.tiles: Tiles = Tiles()
        self.windows: Windows = Windows(self.tiles)
        self.decoded: Decoded = Decoded(devices, self.native, self.tiles)
        self.accelerator_codes: AcceleratorCodes = AcceleratorCodes(devices.check_open)
        self.truth: Truth = Truth(self.native, self.tiles, self.windows, self.decoded)
        self.timeline: Timeline = Timeline(self.native)
        self.watcher: Watcher = Watcher()
        self._step = 0
        self.committed_step: int = 0  # the last durable step
        self.steps: list[np.ndarray[Any, Any]] = []  # per extent: the `step` count of each parameter, fp32
        self.offsets: list[list[int]] = []  # per extent: its offset in each store, in bytes
        self.gone: np.ndarray[Any, Any] = np.zeros(0, bool)  # by parameter: has left, so that its states are invalid
        self.freed: np.ndarray[Any, Any] = np.zeros(0, bool)  # by tile: all its parameters have left
        self._record = Record()
        self.residuals: dict[int, torch.Tensor] = {}  # by parameter, numbered over all extents
        self.durable: bool = False  # commits name slots, which must not change: see make_durable()
        self.rolled_back: bool = False  # states went back to an earlier step, and all parameters must follow
        self.torn: bool = False  # a step that writes in place was cut short
        self.synced: bool = True  # writes to open windows have been flushed to the devices
        # Parameters with states of an incomplete load that could not be undone, until they are loaded again.
        self.half_loaded: set[int] = set()
        self.moves: list[np.ndarray[Any, Any]] | None = None  # tiles moved by the load under way
        self.lost: str = ""  # if such writes are lost for good: the error message

    def make_durable(self) -> None:
        """Let windows be private mappings, except while open. Call this before any window is handed out."""
        self.durable = self.windows.are_watched = self.decoded.durable = True

    def add(self, extent: Extent, offsets: list[int], of_store: Sums | None = None) -> None:
        """Add an extent. `offsets`: in each store, in bytes. `of_store`: see slots_of(); None for new states."""
        if not self.native.is_open:
            self.native.open(self.devices.configs())
            self.timeline.open(self.devices.all_names)
        states, sums = of_store or (None, None)
        buffers = self.native.extend(
            ExtentConfig(
                extent.tile_elems,
                extent.n_tiles,
                len(extent.sections),
                offsets,
                extent.pieces,
                slots=extent.slots,
                states=states,
                devices=extent.devices,
                sum_elems=extent.sum_elems,
                sums=sums,
                mappings=self.devices.mappings_of(extent),
                codec=extent.codec,
                param_dtype=extent.param_dtype,
            )
        )
        self.tiles.add(extent)
        self.steps.append(np.zeros(len(extent.numels), np.float32))
        self.offsets.append(offsets)
        self.gone = np.append(self.gone, np.zeros(len(extent.numels), bool))
        self.freed = np.append(self.freed, np.zeros(extent.n_tiles, bool))
        self.windows.add(buffers)
        has_windows = bool(buffers) and not self.devices.states_on_demand
        self.truth.extend(extent, new=of_store is None, has_windows=has_windows)

    def free(self, params: Sequence[int]) -> np.ndarray[Any, Any]:
        """Forget the states of parameters that have left, and free their memory. Between steps.

        Returns the tiles without parameters from now on: uint32, ascending.
        """
        self.gone[params] = True
        self.decoded.forget(params)
        of_any = self.tiles.of(params)
        of_any = of_any[~self.freed[of_any]].tolist()
        freed = np.array([tile for tile in of_any if self.gone[self.tiles.pieces_of(tile)["param"]].all()], np.uint32)
        self.free_tiles(freed)
        return freed

    def free_tiles(self, tiles: np.ndarray[Any, Any]) -> None:
        """Free the memory of these tiles (uint32, ascending), which no longer have states."""
        if len(tiles):
            self.native.free_tiles(tiles)
            self.truth.free(tiles)
            self.freed[tiles] = True
            for e, _, _ in self.tiles.by_place(tiles):
                extent = self.tiles.extents[e]
                if self.freed[extent.first_tile : extent.first_tile + extent.n_tiles].all():
                    self.windows.drop(e)

    def spaces_of(self, tiles: np.ndarray[Any, Any]) -> Iterator[Space]:
        """Yield the places of these tiles' slots, one space for adjacent tiles. `tiles`: uint32, ascending."""
        for e, device, numbers in self.tiles.by_place(tiles):
            size = self.tiles.extents[e].slots * self.tiles.extents[e].slot_bytes
            for run in np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1):
                yield Space(device, self.offsets[e][device] + int(run[0]) * size, len(run) * size)

    def slots_of(self, extent: Extent) -> Sums:
        """Return the TILE_STATE of each tile of an extent, and the checksums, uint32 (tiles, chunks, sections)."""
        return self.native.tiles(extent.first_tile, extent.n_tiles, extent.chunks, len(extent.slot))

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return self._step

    @property
    def record(self) -> Record:
        """The record of the last step."""
        return self._record

    def go_to(
        self, step: int | None = None, record: Record | None = None, counts: np.ndarray[Any, Any] | None = None
    ) -> None:
        """Set the number of completed steps, the record and the `step` counts; None leaves them as they are.

        `counts`: see set_counts(). Only these two methods write them. What is on the devices does not change.
        """
        if step is not None:
            self._step = step
        self._record = record or self._record
        if counts is not None:
            self.set_counts(counts)

    def set_counts(self, counts: np.ndarray[Any, Any]) -> None:
        """Set the `step` count of each parameter: fp32, 1-D. The tensors in `state` share their memory."""
        for extent, own in zip(self.tiles.extents, self.steps, strict=False):  # an interrupt may have ended add()
            own[:] = counts[extent.first_param : extent.first_param + len(own)]

    def all_steps(self) -> np.ndarray[Any, Any]:
        """Return a copy of the `step` counts of all parameters, fp32."""
        return np.concatenate([np.zeros(0, np.float32), *self.steps])

    @property
    def unmapped(self) -> np.ndarray[Any, Any]:
        """Which tiles have no windows, as states are read on demand: bool, one per tile."""
        return np.ones(len(self.tiles), bool) if self.devices.states_on_demand else self.tiles.coded

    @property
    def has_one_slot(self) -> np.ndarray[Any, Any]:
        """Which tiles have a single slot, so that no step or load can move them: bool, one per tile."""
        single = [np.full(e.n_tiles, self.devices.resident or e.slots < SLOTS) for e in self.tiles.extents]
        return np.concatenate([np.zeros(0, bool), *single])

    # ---- are they whole? ---------------------------------------------------------

    @property
    def broken(self) -> bool:
        """Whether steps and commits are impossible, for good or until a load: see check_whole()."""
        return self.torn or bool(self.lost or self.half_loaded)

    def check_whole(self) -> None:
        """Raise CSDTornError or CSDLostError if the states are a mix of several steps, or lost."""
        if self.torn:
            raise CSDTornError(errno.EIO, f"an earlier step was cut short. {TORN}")
        if self.lost:
            raise CSDLostError(errno.EIO, self.lost)
        if self.half_loaded:
            raise CSDTornError(
                errno.EIO,
                f"a load failed, and {len(self.half_loaded)} parameters have some of the states that it wrote: their "
                "devices keep one copy of states. Load them again, or a checkpoint of all",
            )

    # ---- reads and writes between steps ------------------------------------------

    def read_masters(self, tile: int, elems: int) -> torch.Tensor:
        """Return the first `elems` masters of a tile with fp32 states, 1-D. Not during a step.

        Raises CSDOSError, or CSDStoreError if these masters are damaged; other damage is not noticed.
        """
        masters = torch.empty(self.tiles.elems_of(tile), dtype=torch.float32, device="cpu")
        self.native.read(tile, 1, elems, masters.data_ptr())
        return masters[:elems]

    def remap(self) -> None:
        """Wait until all states are written, then show them in the windows. Raises CSDOSError if a write keeps failing.

        Writes to windows reach the devices if states are not durable. Raises CSDRuntimeError if the devices are closed
        or belong to another process.
        """
        self.devices.check_open()
        if self.native.is_open and self.devices.states_on_demand:
            self.native.wait_writes()
        elif self.native.is_open:
            self.show(open=not self.durable)

    def show(self, *, open: bool) -> None:
        """As remap(), if there are windows. `open`: from now on writes to windows go to the devices."""
        if not self.devices.states_on_demand:
            self.native.remap(open=open)
            self.truth.open[:] = open

    def sync(self) -> None:
        """Flush writes to open windows; only the flush reports an I/O error of such a write.

        Raises CSDOSError. With durable states raises CSDLostError, now and in all later operations: the checksums of
        these writes are taken from the page cache, and cannot reveal a loss by the failed flush. A load is undone.
        """
        self.synced = False
        try:
            self.devices.sync()
        except CSDOSError as e:
            if not self.durable or self.moves is not None:
                raise
            step = self.committed_step
            what = f"what was written to the state after step {step}" if step else "the state before the first step"
            message = f"{what} is lost: a flush failed ({e.strerror}). {loss_remedy(step)}"
            self.lost = self.lost or message
            raise CSDLostError(e.errno, self.lost) from e
        self.synced = True
        self.truth.filled()  # by the caller

    def begin(
        self,
        params: np.ndarray[Any, Any],
        hypers: np.ndarray[Any, Any],
        tiles: np.ndarray[Any, Any],
        order: int = TO_AND_FRO,
    ) -> None:
        """Begin a step on the devices. See Native.begin()."""
        self.timeline.begin(self.step)
        n = self.tiles.n_params
        self.truth.enter(params[:n])
        if len(params) > n:  # each pass takes the states that it updates from its own row
            params["edited"][n:] = params["edited"][:n]
        self.native.begin(params, hypers, tiles, order=order)

    def move_to_next_slots(self, tiles: np.ndarray[Any, Any]) -> None:
        """Copy tiles to their other slots, including writes to states, and wait for the copies."""
        self.watcher.tiles_written(tiles)
        if len(tiles):
            self.begin(np.zeros(self.tiles.n_params, PARAM), np.zeros(0, HYPER), tiles)
            try:
                for tile in tiles.tolist():
                    self.native.push(tile)
            except BaseException:
                with contextlib.suppress(CSDError):
                    self.native.finish(False)
                raise
            self.native.finish(True)
            self.timeline.end()
        # Now the tiles are in their other slots, even if a write fails: wait_writes() tries again.
        self.truth.moved(tiles)
        if self.moves is not None:
            self.moves.append(tiles)
        if len(tiles):
            self.native.wait_writes()

    def write_decoded(self) -> None:
        """Bring writes to states that are read on demand to the devices, without a step."""
        self.truth.note_written()
        tiles = self.truth.decoded_to_write()
        if len(tiles):
            self.move_to_next_slots(tiles)

    # ---- statistics --------------------------------------------------------------

    def stats(self, residual_bytes: Callable[[int], tuple[int, int]]) -> list[dict[str, Any]]:
        """Return the counts of the last step, one dict per device; see `csd_stats`. Totals cover the store's lifetime.

        `residual_bytes`: bytes of residuals written to a device, by the last step with its commit and in total. During
        a commit, bytes written so far.
        """
        return self.devices.current_stats(self.native, residual_bytes) if self.native.is_open else []


def loss_remedy(committed_step: int) -> str:
    """Return the end of an error message about lost data: what remains, and what the user can do."""
    if committed_step:
        left = f"The store is as it was at step {committed_step}"
        then = f"go on from step {committed_step} with resume=True"
    else:
        left = "Nothing was committed before"
        then = "begin anew"
    return (
        f"{left}; the parameters in memory are newer, and training cannot go on with them, as their states are lost. "
        f"close() this optimizer and {then}, when you trust the drive (its SMART values and the kernel's log say more)"
    )
