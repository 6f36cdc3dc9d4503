"""The windows: tensors that are memory-mapped onto states, and when writes to them take effect."""

from __future__ import annotations

import contextlib
import errno
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import bindings
from ..errors import CSDLostError, CSDOSError
from ..store.layout import Extent
from .proof import loss_remedy

if TYPE_CHECKING:
    from .engine import Engine


class Windows:
    """The windows of one engine: a tensor per parameter and section, fp32, mapped onto the states on the device.

    A step moves a tile to its other slot. The tile's windows follow at the next `show()`, which reading
    `optimizer.state` calls. Without durable states, windows are always open: writes go straight to the device. With
    durable states, committed slots must not change, so windows are private mappings except within `writing()`:

    ========  ======================================  ============================================================
    tile is   when                                    writes to its windows take effect
    ========  ======================================  ============================================================
    open      it is new and not yet committed,        at once, on the device. They are durable with the commit
              or within `writing()`                   at the end of writing(); of a new tile, with the step's commit
    shown     a commit closed it (`open=False`), or   with the next step, which starts from them, or with an earlier
              `state` was read                        flush(); in memory until then. An undone step keeps them
    reseeded  as shown, but written in `reseeding()`  with the step that follows, and in no commit before that
    stale     a step moved it since it was shown      never: the next show() drops them. Read `state` again
    ========  ======================================  ============================================================

    torch's version counters of all tensors that were handed out tell what was written: see `note_written()`. A tile is
    *loose* while its current slot is part of no commit, so that it may be overwritten in place. A tile is *empty* from
    its allocation until states are written to it.

    Only `window()` and `show()` depend on windows being mappings of a slot in the device's memory or file. Tiles of
    codes have no windows and are never open: decoded.py shows their states and collects what is written to them. What
    the table says of tiles that are not open also holds for them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = weakref.proxy(engine)  # weak, as the engine owns this: no cycle to be collected
        self.synced: bool = True  # writes to open windows have been flushed to the devices
        self.lost: str = ""  # if such writes are lost for good: the error message that says why
        self._buffers: list[list[Any]] = []  # per extent and section: a buffer that unmaps itself
        self._handed_out: list[tuple[int, torch.Tensor]] = []  # parameter and window, for all windows handed out
        self._known_versions: list[int] = []  # versions of these windows at the last note_written()
        self._decoded_versions: dict[int, list[int]] = {}  # versions of the written decoded states, likewise
        self._in_step = np.zeros(0, np.uint32)  # tiles of the last step that began
        # Per tile:
        self.open: np.ndarray[Any, Any] = np.zeros(0, bool)  # writes to its windows go to the device
        self.loose: np.ndarray[Any, Any] = np.zeros(0, bool)  # its current slot is part of no commit
        self.empty: np.ndarray[Any, Any] = np.zeros(0, bool)  # it has parameters, but no states were written yet
        self._edited = np.zeros(0, bool)  # its windows were written, and no completed step has started from that
        self._reseeded = np.zeros(0, bool)  # edited in reseeding(), for a step that has not completed yet

    def add(self, extent: Extent, buffers: list[Any], *, new: bool) -> None:
        """Add the windows of an extent, which is `new` or in a store. `buffers`: see bindings.engine_extend()."""
        self._buffers.append(buffers)
        all_false, is_new = np.zeros(extent.n_tiles, bool), np.full(extent.n_tiles, new)
        self.open, self.loose = np.append(self.open, is_new if buffers else all_false), np.append(self.loose, is_new)
        has_params = np.isin(np.arange(extent.n_tiles), extent.pieces["tile"])
        self.empty = np.append(self.empty, is_new & has_params)
        self._edited, self._reseeded = np.append(self._edited, all_false), np.append(self._reseeded, all_false)

    # ---- handed out ----------------------------------------------------------

    def window(self, extent: Extent, param: int, section: int, dtype: torch.dtype) -> torch.Tensor:
        """Return one state of one parameter: 1-D, fp32, or complex64 over the same bytes.

        `param`: numbered within the extent. Reading the tensor reads the device; for writes see the table above.
        """
        n, start = extent.numels[param], extent.starts[param]
        if n == 0:
            window = torch.empty(0, dtype=dtype, device="cpu")
        else:
            buffer = self._buffers[self._engine.extents.index(extent)][section]
            count = n // 2 if dtype.is_complex else n
            window = torch.frombuffer(buffer, dtype=dtype, count=count, offset=4 * start)
        self.watch(extent.first_param + param, window)
        return window

    def watch(self, param: int, tensor: torch.Tensor) -> None:
        """Watch the version counter of a tensor through which the user may write to a parameter's windows."""
        if self._engine.durable:
            self._handed_out.append((param, tensor))
            self._known_versions.append(tensor._version)

    def keep_alive(self, keeper: object) -> None:
        """Keep `keeper` alive as long as any window is alive."""
        for buffer in chain.from_iterable(self._buffers):
            weakref.finalize(buffer, id, keeper).atexit = False

    # ---- writes to windows -----------------------------------------------------

    def show(self, *, open: bool) -> None:
        """Wait until all states are written, and map their current slots. Raises CSDOSError if a write keeps failing.

        `open`: writes to the windows go to the device from now on.
        """
        bindings.engine_remap(self._engine.handle, self._engine.name_device, open=open)
        self.open[:] = open

    def sync(self) -> None:
        """Flush writes to open windows; only the flush reports an I/O error of such a write.

        Raises CSDOSError. With durable states raises CSDLostError, now and in all later operations: the checksums of
        these writes are taken from the page cache, and so cannot reveal what a failed flush has lost.
        """
        self.synced = False
        try:
            self._engine.devices.sync()
        except CSDOSError as e:
            if not self._engine.durable:
                raise
            step = self._engine.committed_step
            what = f"what was written to the state after step {step}" if step else "the state before the first step"
            message = f"{what} is lost: a flush failed ({e.strerror}). {loss_remedy(step)}"
            self.lost = self.lost or message
            raise CSDLostError(e.errno, self.lost) from e
        self.synced = True
        self.empty[:] = False  # the caller has filled all empty tiles

    def check(self) -> None:
        """Raise CSDLostError if a write to a window is lost."""
        if self.lost:
            raise CSDLostError(errno.EIO, self.lost)

    def note_written(self) -> np.ndarray[Any, Any]:
        """Tell the native engine which tiles were written through their windows since the last call.

        Returns these tiles and those written earlier that no step has started from yet: ascending, uint32.
        """
        versions, decoded = self._versions(), self._engine.decoded.versions()
        if versions == self._known_versions and not decoded:  # the usual case
            return np.flatnonzero(self._edited).astype(np.uint32)
        windows = zip(self._handed_out, versions, self._known_versions, strict=True)
        changed = [param for (param, _), now, then in windows if now != then]
        self._engine.forget_copies(changed)
        mapped = self._engine.tiles_of_params(changed)
        bindings.engine_edited(self._engine.handle, mapped)
        self._known_versions = versions
        tiles = np.union1d(mapped, self._engine.tiles_of_params([*decoded]))
        self._edited[tiles[~self.open[tiles]]] = True
        since_last = self._engine.tiles_of_params([p for p in decoded if decoded[p] != self._decoded_versions.get(p)])
        self._reseeded[np.union1d(mapped, since_last)] = False
        self._decoded_versions = decoded
        return np.union1d(tiles, np.flatnonzero(self._edited)).astype(np.uint32)

    @property
    def written(self) -> bool:
        """Whether states were written that no step has started from yet. Without side effects."""
        return bool(self._edited.any() or self._engine.decoded.versions()) or self._versions() != self._known_versions

    def _versions(self) -> list[int]:
        return [window._version for _, window in self._handed_out]

    @contextlib.contextmanager
    def reseeding(self) -> Iterator[None]:
        """Make writes to windows inside part of the next step, and of no commit before it completes.

        A resume from the step before writes them again, from the parameters.
        """
        self.note_written()
        before = self._edited.copy()
        try:
            yield
        finally:
            self.note_written()
            self._reseeded |= self._edited & ~before

    def to_flush(self) -> np.ndarray[Any, Any]:
        """Return the written tiles that a commit without a step must include (not reseeded ones): ascending, uint32."""
        edited = self.note_written()
        flushed: np.ndarray[Any, Any] = edited[~(self.open | self._reseeded)[edited]]
        return flushed

    @property
    def edited(self) -> bool:
        """Whether writes known to note_written() would be lost if no step and no flush followed."""
        return bool((self._edited & ~self._reseeded).any())

    def move_to_next_slots(self, tiles: np.ndarray[Any, Any]) -> None:
        """Copy tiles to their other slots, with what was written to their windows."""
        self._engine.copy_to_next_slots(tiles)
        self._engine.decoded.forget(tiles)
        self._edited[tiles] = False
        self.loose[tiles] = True

    def write_decoded(self) -> None:
        """Encode what was written to decoded states and write it to the devices, without a step."""
        self.note_written()
        tiles = self._engine.tiles_of_params([*self._engine.decoded.written()])
        if len(tiles):
            self.move_to_next_slots(np.sort(tiles))

    def before_step(self, tiles: np.ndarray[Any, Any]) -> None:
        """Note that a step over these tiles begins."""
        self._in_step = tiles

    def after_step(self) -> None:
        """Note that the step has completed: it started from everything that had been written."""
        self._edited[:] = self._reseeded[:] = False
        self._engine.decoded.forget()
        self.empty[self._in_step] = False

    def after_undo(self) -> None:
        """Note that a completed step was undone, and with it everything written to its tiles since."""
        self._engine.decoded.discard(self._in_step)
        self._edited[self._in_step] = False

    def before_commit(self) -> None:
        """Note that a commit begins, which includes the current slots of all tiles."""
        self.loose[:] = False
