"""The windows: tensors that are mapped onto states, and when what is written to them counts."""

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
from .proof import way_out

if TYPE_CHECKING:
    from .engine import Engine


class Windows:
    """Onto the states of one engine: a tensor per parameter and section, fp32, over what the device has.

    A step moves a tile to its other slot, and its windows follow when they are shown again: by `show()`, which reading
    `optimizer.state` calls. Where nothing is committed they are always open. Where states are durable, what a commit
    holds must stay as it is, and windows are private but for as long as somebody is said to write:

    ========  ======================================  ============================================================
    tile is   when                                    what somebody writes to its windows counts
    ========  ======================================  ============================================================
    open      it is new, and was in no commit yet;    at once: it is on the device, and durable with the commit
              or within `writing()`                   that ends writing(), of a new tile with that of the step
    shown     a commit closed it (`open=False`), or   with the next step, which begins with it, or with a flush()
              `state` was read                        before that; until then in memory. An undone step leaves it
    reseeded  the same, if written in `reseeding()`   with the step that follows, and with no commit before that
    stale     a step moved it since it was shown      never: the next show() drops it. Read `state` again
    ========  ======================================  ============================================================

    What was written is known by the versions that torch counts, of every tensor that was handed out: see
    `note_written()`. Besides, a tile is *loose* while its current slot is part of no commit, and may be written where
    it lies; and *empty* as long as it is to have states, and nobody has written any.

    That a window is the device's own memory of a slot, or its file, is known to `window()`, whose buffers are these
    mappings, and to `show()`. Tiles of codes have no windows and are never open: what is shown of them, and written to
    that, see decoded.py. What the table says of those that are not open is true of them, too.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = weakref.proxy(engine)  # it owns this, and goes with its last user, not with a collection
        self.synced: bool = True  # what was written to open windows is on the devices
        self.lost: str = ""  # why what was written to them will never be committed
        self._buffers: list[list[Any]] = []  # per extent, per section: one that unmaps itself
        self._handed_out: list[tuple[int, torch.Tensor]] = []  # parameter and window, of all that were handed out
        self._seen: list[int] = []  # their versions when the native engine was last told of what was written to them
        self._decoded_seen: dict[int, list[int]] = {}  # versions of what was written to decoded states, likewise
        self._in_step = np.zeros(0, np.uint32)  # tiles of the last step that began
        # Per tile:
        self.open: np.ndarray[Any, Any] = np.zeros(0, bool)  # what is written to its windows goes to the device
        self.loose: np.ndarray[Any, Any] = np.zeros(0, bool)  # its slot is part of no commit
        self.empty: np.ndarray[Any, Any] = np.zeros(0, bool)  # it is to have states, and nobody has written any
        self._edited = np.zeros(0, bool)  # somebody wrote to its windows, and no step has begun with that
        self._reseeded = np.zeros(0, bool)  # a step did, which is not whole yet

    def add(self, extent: Extent, buffers: list[Any], *, new: bool) -> None:
        """Those onto an extent: one that is `new`, or a store's. `buffers`: as of bindings.engine_extend()."""
        self._buffers.append(buffers)
        none, fresh = np.zeros(extent.n_tiles, bool), np.full(extent.n_tiles, new)
        self.open, self.loose = np.append(self.open, fresh if buffers else none), np.append(self.loose, fresh)
        taken = np.isin(np.arange(extent.n_tiles), extent.pieces["tile"])
        self.empty = np.append(self.empty, fresh & taken)
        self._edited, self._reseeded = np.append(self._edited, none), np.append(self._reseeded, none)

    # ---- handed out ----------------------------------------------------------

    def window(self, extent: Extent, param: int, section: int, dtype: torch.dtype) -> torch.Tensor:
        """One state of one parameter (`param` counts within the extent): 1-D, fp32 (or complex64 over the same bytes).

        The tensor is the state: reading it reads the device; what writing it does, the table above says.
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

    def watch(self, param: int, shown: torch.Tensor) -> None:
        """Somebody may write to a parameter's windows through this tensor, which counts that by itself."""
        if self._engine.durable:
            self._handed_out.append((param, shown))
            self._seen.append(shown._version)

    def hold(self, keeper: object) -> None:
        """Keeps `keeper` alive as long as somebody has a window."""
        for buffer in chain.from_iterable(self._buffers):
            weakref.finalize(buffer, id, keeper).atexit = False

    # ---- what is written to them -----------------------------------------------

    def show(self, *, open: bool) -> None:
        """Waits until every state is on its device, and shows them. Raises CSDOSError if one will not go."""
        bindings.engine_remap(self._engine.handle, self._engine.name_device, open=open)
        self.open[:] = open

    def sync(self) -> None:
        """Makes sure that what was written to open windows got there: the system reports such errors only here.

        Raises CSDOSError. Where states are durable CSDLostError, as everything does from then on: sums of what was
        written through windows are those of the page cache, and cannot show what a failed flush lost.
        """
        self.synced = False
        try:
            self._engine.devices.sync()
        except CSDOSError as e:
            if not self._engine.durable:
                raise
            step = self._engine.committed_step
            what = f"what was written to the state after step {step}" if step else "the state before the first step"
            said = f"{what} is lost: a flush failed ({e.strerror}). {way_out(step, self._engine.slots == 1)}"
            self.lost = self.lost or said
            raise CSDLostError(e.errno, self.lost) from e
        self.synced = True
        self.empty[:] = False  # whoever fills places fills all that there are

    def check(self) -> None:
        """Raises CSDLostError if something that was written to them is lost."""
        if self.lost:
            raise CSDLostError(errno.EIO, self.lost)

    def note_written(self) -> np.ndarray[Any, Any]:
        """Tells the native engine which tiles were written through their windows since this was last called.

        Returns them, and those before them of which no step has taken account since. Ascending, uint32.
        """
        versions, decoded = self._versions(), self._engine.decoded.versions()
        if versions == self._seen and not decoded:  # as nearly always
            return np.flatnonzero(self._edited).astype(np.uint32)
        all_of_them = zip(self._handed_out, versions, self._seen, strict=True)
        changed = [param for (param, _), now, then in all_of_them if now != then]
        self._engine.forget_copies(changed)
        mapped = self._engine.tiles_of_params(changed)
        bindings.engine_edited(self._engine.handle, mapped)
        self._seen = versions
        tiles = np.union1d(mapped, self._engine.tiles_of_params([*decoded]))
        self._edited[tiles[~self.open[tiles]]] = True
        since = self._engine.tiles_of_params([p for p in decoded if decoded[p] != self._decoded_seen.get(p)])
        self._reseeded[np.union1d(mapped, since)] = False
        self._decoded_seen = decoded
        return np.union1d(tiles, np.flatnonzero(self._edited)).astype(np.uint32)

    @property
    def written(self) -> bool:
        """Has somebody written to states, and no step has taken account of it? Changes nothing."""
        return bool(self._edited.any() or self._engine.decoded.versions()) or self._versions() != self._seen

    def _versions(self) -> list[int]:
        return [window._version for _, window in self._handed_out]

    @contextlib.contextmanager
    def reseeding(self) -> Iterator[None]:
        """What is written to windows within belongs to the step that follows: no commit has it before that is whole.

        Who goes on from the step before sets the parameters again.
        """
        self.note_written()
        before = self._edited.copy()
        try:
            yield
        finally:
            self.note_written()
            self._reseeded |= self._edited & ~before

    def to_flush(self) -> np.ndarray[Any, Any]:
        """Tiles of which a commit without a step has to take what somebody wrote: not reseeded. Ascending, uint32."""
        edited = self.note_written()
        flushed: np.ndarray[Any, Any] = edited[~(self.open | self._reseeded)[edited]]
        return flushed

    @property
    def edited(self) -> bool:
        """Is there something that would be lost if no step and no flush followed? As far as note_written() knows."""
        return bool((self._edited & ~self._reseeded).any())

    def pass_through(self, tiles: np.ndarray[Any, Any]) -> None:
        """Reads tiles and writes them as they are to their next slots; what somebody wrote to windows with them."""
        self._engine.copy_to_next_slots(tiles)
        self._engine.decoded.forget(tiles)
        self._edited[tiles] = False
        self.loose[tiles] = True

    def write_decoded(self) -> None:
        """What somebody wrote to states that are kept as codes goes to the devices, with no step."""
        self.note_written()
        tiles = self._engine.tiles_of_params([*self._engine.decoded.written()])
        if len(tiles):
            self.pass_through(np.sort(tiles))

    def before_step(self, tiles: np.ndarray[Any, Any]) -> None:
        """A step over these tiles begins."""
        self._in_step = tiles

    def after_step(self) -> None:
        """It is whole; it began with what had been written to them."""
        self._edited[:] = self._reseeded[:] = False
        self._engine.decoded.forget()
        self.empty[self._in_step] = False

    def after_taking_back(self) -> None:
        """It is undone although it was whole, and with it what has been written to its tiles since."""
        self._engine.decoded.discard(self._in_step)
        self._edited[self._in_step] = False

    def before_commit(self) -> None:
        """Every slot is part of the commit that begins."""
        self.loose[:] = False
