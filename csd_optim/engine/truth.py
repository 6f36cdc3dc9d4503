"""The truth about each tile: from which copy of the states the next step starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np
import torch

from ..bindings import FROM_PARAM, IN_PARAM, IN_SECTION, NEW, SUPPLIED, UNCOMPARED, UNLESS_SET
from ..store.layout import Extent
from .accelerator_copies import AcceleratorCopies
from .decoded import Decoded
from .parts import NativeEngine
from .tiles import Tiles
from .windows import Windows

Saved = tuple[tuple[np.ndarray[Any, Any], ...], set[int], set[int], dict[int, dict[str, torch.Tensor]]]


class Authority(Enum):
    """The copy of a tile's states that counts, because the next step starts from it."""

    EMPTY = auto()  # nothing written yet: states read as zero, or the next step makes them (csd_master NEW)
    EDITED = auto()  # what the program wrote to its windows or decoded states, in memory
    RESEEDED = auto()  # as EDITED, written from parameters that the program had set
    COMMITTED = auto()  # the slot on the device, named by the last commit or the next
    LOOSE = auto()  # the slot on the device, not needed by any commit, so it may be overwritten in place


class OfParam(Protocol):
    """The attributes of a ParamState from which Truth decides where the master is."""

    index: int
    reachable: bool  # devices can read it

    @property
    def master_source(self) -> int:
        """Where a step finds the master, as far as the parameter itself decides: a csd_master."""

    @property
    def is_coded(self) -> bool:
        """Whether its states are stored as codes."""

    @property
    def is_dirty(self) -> bool:
        """Whether the parameter was written, moved or converted from outside since the last step."""


class Truth:
    """The truth about the tiles of one engine, changed only by the methods here; other files hold the tensors.

    =========  ==================================  ====================================================================
    counts     from … until …                      what the program writes to the tile's states takes effect
    =========  ==================================  ====================================================================
    EMPTY      extend() … filled() or kept()       at once, because the tile is open (codes: as if it were COMMITTED)
    EDITED     note_written() … kept() or moved()  with the next step, or with an earlier flush. A step that is undone
                                                   leaves it so; taken_back() ends it if the tile took part in the step
    RESEEDED   the same, within reseeding()        with the next step, and in no commit before that
    LOOSE      moved(), and when a new tile stops  at once while the tile is open; otherwise it is EDITED then
               being EMPTY … commit_begins()
    COMMITTED  commit_begins() … moved()           the tile is EDITED then
    =========  ==================================  ====================================================================

    A tile is *open* while writes to its windows reach the device: without durable states always; with them if it is
    new, or within `writing()`. A commit closes it. Tiles without windows (decoded.py) are never open. After a step has
    moved a tile to its other slot, its windows show the old slot until remap(); writes to them never count, although
    the tile is then called EDITED, too. Without durable states no tile is ever COMMITTED.

    Besides, a parameter with a copy on the accelerator (AcceleratorCopy) is updated there: the copy is the truth during
    the step, and is loaded first unless known to equal the tile. A parameter whose undo is unfinished is unknown: see
    Steps.undoing.
    """

    def __init__(self, native: NativeEngine, tiles: Tiles, windows: Windows, decoded: Decoded) -> None:
        self._native, self._tiles, self._windows, self._decoded = native, tiles, windows, decoded
        self.copies: AcceleratorCopies | None = None  # set if directories contain the states of an accelerator
        # Per tile, bool:
        self.open: np.ndarray[Any, Any] = np.zeros(0, bool)  # writes to its windows go to the device
        self.loose: np.ndarray[Any, Any] = np.zeros(0, bool)  # the current slot is part of no commit
        self.empty: np.ndarray[Any, Any] = np.zeros(0, bool)  # has parameters, but no states yet
        self._edited = np.zeros(0, bool)  # written, and no completed step has started from the writes
        self._reseeded = np.zeros(0, bool)  # edited in reseeding(), for a step that has not completed yet
        self._decoded_versions: dict[int, list[int]] = {}  # of written decoded states, at the last note_written()
        # Of the step that began last:
        self._in_step = np.zeros(0, np.uint32)  # its tiles
        self._updated: set[int] = set()  # its parameters with a gradient, where 8-bit states need them
        self._getting_section: set[int] = set()  # parameters that stop being their own master section

    # ---- questions ---------------------------------------------------------------

    def authority_of(self, tile: int) -> Authority:
        """Return which copy counts in a tile, as of the last note_written()."""
        if self._edited[tile]:
            return Authority.RESEEDED if self._reseeded[tile] else Authority.EDITED
        if self.empty[tile]:
            return Authority.EMPTY
        return Authority.LOOSE if self.loose[tile] else Authority.COMMITTED

    @property
    def is_written(self) -> bool:
        """Whether states were written from which no step has started yet. Without side effects."""
        return bool(self._edited.any() or self._decoded.versions()) or self._windows.are_written

    @property
    def would_be_lost(self) -> bool:
        """Whether writes known to note_written() would be lost if no step and no flush followed."""
        return bool((self._edited & ~self._reseeded).any())

    def to_flush(self) -> np.ndarray[Any, Any]:
        """Return the written tiles that a commit without a step must include (not reseeded ones): ascending, uint32."""
        edited = self.note_written()
        flushed: np.ndarray[Any, Any] = edited[~(self.open | self._reseeded)[edited]]
        return flushed

    def decoded_to_write(self) -> np.ndarray[Any, Any]:
        """Return the tiles of decoded states that were written: ascending, uint32."""
        return self._tiles.of([*self._decoded.written()])

    # ---- transitions -------------------------------------------------------------

    def free(self, tiles: np.ndarray[Any, Any]) -> None:
        """Note that tiles lost their states: there is nothing to write, and no step contains them."""
        for flags in (self.open, self.loose, self.empty, self._edited, self._reseeded):
            flags[tiles] = False

    def extend(self, extent: Extent, *, new: bool, has_windows: bool) -> None:
        """Add the tiles of an extent, which is `new` or in a store."""
        all_false, is_new = np.zeros(extent.n_tiles, bool), np.full(extent.n_tiles, new)
        has_params = np.isin(np.arange(extent.n_tiles), extent.pieces["tile"])
        self.open, self.loose = np.append(self.open, is_new & has_windows), np.append(self.loose, is_new)
        self.empty = np.append(self.empty, is_new & has_params)
        self._edited, self._reseeded = np.append(self._edited, all_false), np.append(self._reseeded, all_false)

    def note_written(self) -> np.ndarray[Any, Any]:
        """Take note of writes since the last call, and tell the native engine.

        Returns all written tiles from which no step has started yet: ascending, uint32.
        """
        windows, versions = self._windows.versions(), self._decoded.versions()
        changed = self._windows.written_at(windows)
        if not changed and not versions:  # the usual case
            return np.flatnonzero(self._edited).astype(np.uint32)
        self.forget_copies([*changed, *versions])
        mapped = self._tiles.of(changed)
        self._native.edited(mapped)
        tiles = np.union1d(mapped, self._tiles.of([*versions]))
        self._edited[tiles[~self.open[tiles]]] = True
        since_last = self._tiles.of([p for p in versions if versions[p] != self._decoded_versions.get(p)])
        self._reseeded[np.union1d(mapped, since_last)] = False
        self._decoded_versions = versions
        self._windows.note_known(windows)  # last, so that the next call repeats everything if a signal interrupts
        return np.union1d(tiles, np.flatnonzero(self._edited)).astype(np.uint32)

    @contextlib.contextmanager
    def reseeding(self) -> Iterator[None]:
        """Make writes to windows inside part of the next step, and of no commit before its end.

        A resume from an earlier step repeats such writes, from the parameters.
        """
        self.note_written()
        before = self._edited & ~self._reseeded  # written by the program
        try:
            yield
        finally:
            self.note_written()
            self._reseeded |= self._edited & ~before

    def forget_copies(self, params: Sequence[int] | None = None) -> None:
        """Invalidate the accelerator's copies of these parameters' states; None: of all parameters."""
        if self.copies:
            self.copies.forget(params)

    def step_begins(self, tiles: np.ndarray[Any, Any]) -> None:
        """Note that a step begins. Call enter() with its table. `tiles`: the step's, including all edited tiles."""
        self._in_step = tiles

    def kept(self) -> None:
        """Note that the step is complete, so that all earlier writes are in its results."""
        self._edited[:] = self._reseeded[:] = False
        self._decoded_written(self._decoded.in_memory)
        self.empty[self._in_step] = False

    def undone_in_place(self) -> None:
        """Note that the step was undone where states are updated in place. (Elsewhere the truth does not change.)"""
        self._decoded.forget_unwritten()

    def taken_back(self) -> None:
        """Note that a kept step is undone, together with all later writes to its tiles."""
        self._decoded.drop(self._decoded.within(self._in_step, wholly=False))
        self._edited[self._in_step] = False

    def moved(self, tiles: np.ndarray[Any, Any]) -> None:
        """Note that tiles (ascending) were copied to their other slots, including all writes."""
        self._decoded_written(self._decoded.within(tiles, wholly=True))
        self._edited[tiles] = False
        self.loose[tiles] = True

    def filled(self) -> None:
        """Note that all empty tiles have states."""
        self.empty[:] = False

    def commit_begins(self) -> None:
        """Note that a commit begins, which includes the current slots of all tiles."""
        self.loose[:] = False

    def saved(self) -> Saved:
        """Return what put_back() restores. Call note_written() before it, unless writes take effect at once."""
        decoded = self._decoded
        tiles = self.loose.copy(), self.empty.copy(), self._edited.copy(), self._reseeded.copy()
        return tiles, decoded.masters_written.copy(), decoded.rounded.copy(), decoded.saved()

    def put_back(self, saved: Saved) -> None:
        """Note that all tiles have the states from saved() again, without later writes.

        Newer tiles belong to no parameter any more: any content is valid.
        """
        tiles, masters_written, rounded, decoded = saved
        self._decoded.put_back(decoded)
        self._decoded.masters_written, self._decoded.rounded = masters_written, rounded
        self._decoded_versions = self._decoded.versions()
        self._windows.note_known(self._windows.versions())
        self.forget_copies()
        n = len(tiles[0])
        for now, before in zip((self.loose, self.empty, self._edited, self._reseeded), tiles, strict=True):
            now[:n] = before
        self.empty[n:] = False

    def _decoded_written(self, params: Sequence[int] | set[int]) -> None:
        """Drop the decoded states of these parameters, after a step or a flush has rewritten them on the devices."""
        decoded = self._decoded
        masters = {param for param, names in decoded.written().items() if "master" in names}
        decoded.masters_written |= masters.intersection(params)
        decoded.masters_written -= decoded.rounded | self._updated
        updated = filter(decoded.has_section, self._updated)
        decoded.move_own_masters(self._getting_section.intersection(params), [*updated])
        self._getting_section.clear()
        decoded.drop([*params])

    # ---- what a step reads -------------------------------------------------------

    def master_of(self, param: OfParam, *, is_new: bool = False) -> int:
        """Return where a step finds a parameter's master: a csd_master. For codes, enter() may change the answer.

        `is_new`: the parameter has no states yet. Masters in the accelerator's copies are marked later by give(), when
        the step's tiles are known.
        """
        if is_new:
            return int(NEW)
        source, decoded = param.master_source, self._decoded
        if not param.is_coded:
            return int(source)
        if decoded.is_own_master(param.index):
            return int(IN_PARAM)
        if source == IN_SECTION and param.reachable and param.is_dirty:
            # A step compares a reachable parameter in any case. UNLESS_SET makes a written parameter win even over a
            # loaded master, which need not round to the parameter.
            return int(UNLESS_SET)
        if param.reachable and param.index in decoded.masters_written and not param.is_dirty:
            return int(UNCOMPARED)
        return int(source)

    @staticmethod
    def give(table: np.ndarray[Any, Any], params: Sequence[int]) -> None:
        """Mark, in a step's table (dtype PARAM), the parameters whose states the accelerator supplies."""
        table["master"][params] = SUPPLIED
        table["in_image"][params] = 0

    def enter(self, table: np.ndarray[Any, Any]) -> None:
        """Enter written decoded states into the table (dtype PARAM) of a step that begins.

        The step reads these tensors until its end.
        """
        decoded = self._decoded
        written = decoded.written()
        rows, pointers, dtypes = decoded.own_masters()
        if len(rows):
            table["param"][rows], table["param_dtype"][rows], table["master"][rows] = pointers, dtypes, IN_PARAM
        self._getting_section.clear()
        for param, names in written.items():
            if decoded.is_own_master(param) and "master" in names and not table["grad"][param]:
                # A parameter without a gradient must not change. It can stay its own master only if the written master
                # rounds to it.
                if decoded.is_rounded(param):
                    decoded.rounded.add(param)
                else:
                    decoded.rounded.discard(param)
                    self._getting_section.add(param)
                    table["master"][param] = FROM_PARAM
            addresses = decoded.addresses(param, names)
            table["edited"][param, : len(addresses)] = addresses
        matters = decoded.in_memory or decoded.masters_written or decoded.any_in_sections
        self._updated = {*np.flatnonzero(table["grad"]).tolist()} if matters else set()
