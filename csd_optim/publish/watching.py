"""Makes steps record changes of published tensors, by watches in the table of each step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..bindings import NEW, PASS_2, UNCOMPARED, UNLESS_SET, Watch
from ..engine.engine import Engine
from ..params.param_state import ParamState
from ..params.strides import same_order
from .recording import Recording
from .tracked import Tracked

Array = np.ndarray[Any, Any]


class Watching:
    """Makes steps record their changes. For the methods see Watcher.

    Updates in this process record changes themselves. Other devices return new parameters in images, which are compared
    with the old parameters.
    """

    def __init__(
        self, engine: Engine, recording: Recording, tracked: Sequence[Tracked], model: torch.nn.Module
    ) -> None:
        self._engine, self._recording, self._tracked, self._model = engine, recording, tracked, model
        self._compares = not engine.devices.records_changes
        self._watched: dict[int, Tracked] = {}  # by the engine's index of the parameter
        self._planned: list[Tracked] = []  # watched tensors that the next step may update
        self._recorded: list[Tracked] = []  # those of the step under way, if it updates anything here
        self._arriving: dict[int, Watch] = {}  # by row of the step's table: tensors that are compared
        self.in_step: set[Tracked] = set()  # tensors updated by the last step
        self.is_recording: bool = False  # from begin() to keep() or undo()
        self._sums: list[int] = []  # checksums of all tensors before the last step
        self._is_whole = False  # the step records all elements

    def enter(self, table: Array, params: Sequence[ParamState]) -> None:
        now = dict(self._model.named_parameters(remove_duplicate=False))
        for tracked in self._tracked:
            tracked.adopt(now)
            tracked.is_copied_late = False
        tracked_of = {id(t.param): (i, t) for i, t in enumerate(self._tracked)}
        self._planned = []
        for state in params:
            if id(state.param) not in tracked_of:
                continue
            number, tracked = tracked_of[id(state.param)]
            if not _can_watch(state, tracked):
                in_order = same_order(state.local.stride(), state.stride, state.local.shape)
                tracked.is_copied_late = not (in_order or state.part.replicas)  # ranks exchange it before the end
                continue
            if self._watched.get(state.index) is not tracked or tracked.watch is None:
                checked = state.is_coded or tracked.is_fp32 or self._compares
                tiles = self._engine.tiles
                tracked.watch = self._recording.watch(number, tracked.first, tiles, state.index, checked=checked)
                tracked.row, tracked.checked, tracked.whole = state.index, checked, True
                self._watched[state.index] = tracked
            # A program may write to the master itself. Where `checked`, the bits before the step suffice to notice
            # that.
            tracked.see_master(None if tracked.checked else state.windows.get("master"))
            self._planned.append(tracked)
            table["watch"][state.index] = tracked.watch.address

    def begin(self, *, anew: bool, is_whole: bool) -> None:
        """Begin a step. `anew`: drop all earlier records. `is_whole`: the step records all elements."""
        self.is_recording, self._recorded = True, []
        self._recording.begin(anew=anew)
        self._sums = [tracked.checksum for tracked in self._tracked]
        self._is_whole = is_whole

    def step_begins(self, table: Array, written: Array) -> None:
        self.tiles_written(written)
        self._recorded = self._planned
        for tracked in self._planned:
            assert tracked.watch is not None
            tracked.see_master(tracked.master)
            row = table[tracked.row]
            # If a parameter is known to be set from outside, record all elements.
            is_set = tracked.checked and row["master"] in (UNLESS_SET, UNCOMPARED)
            tracked.whole |= bool(is_set or row["master"] == NEW or row["edited"].any())
            tracked.watch.begin(whole=tracked.whole or self._is_whole)
        if self._compares:
            watches = {t.watch.address: t.watch for t in self._planned if t.watch}
            rows = np.flatnonzero(table["watch"]).tolist()
            self._arriving = {row: watches[int(table["watch"][row])] for row in rows}

    def compares(self, row: int) -> bool:
        return self._compares and row % self._engine.tiles.n_params in self._watched

    def param_arrives(self, tile: int, piece: Array, before: torch.Tensor, after: torch.Tensor) -> None:
        if watch := self._arriving.get(int(piece["param"][0])):
            watch.note(tile & ~PASS_2, piece, after.dtype, before.data_ptr(), after.data_ptr())

    def keep(self) -> None:
        """Keep the step's records. Raises CSDOSError, CSDRuntimeError if they are incomplete."""
        self.is_recording = False
        self.in_step.clear()
        for tracked in self._recorded:
            if tracked.watch and tracked.watch.updated:
                tracked.update(is_whole=tracked.whole or self._is_whole)
                self.in_step.add(tracked)
        self._recording.check()

    def undo(self) -> None:
        """Drop what the step under way has recorded."""
        self.is_recording = False
        self._recording.undo()

    def drop(self) -> None:
        """Drop all records, unless a step under way adds to them. Their space is given back now, or else later."""
        if not self.is_recording:
            with contextlib.suppress(OSError):
                self._recording.clear()

    def take_back(self) -> None:
        """Drop the records of the last, kept step."""
        self._recording.undo()
        for tracked, checksum in zip(self._tracked, self._sums, strict=True):
            tracked.checksum = checksum
        for tracked in self.in_step:
            tracked.whole = True  # later records would differ from another base

    def params_written(self, params: Sequence[int]) -> None:
        for row in params:
            if row in self._watched:
                self._watched[row].whole = True

    def tiles_written(self, tiles: Array) -> None:
        for tile in tiles.tolist():
            self.params_written(self._engine.tiles.pieces_of(tile)["param"].tolist())


def _can_watch(state: ParamState, tracked: Tracked) -> bool:
    """Whether changes of a parameter can be recorded: its elements are in row-major order."""
    in_order = torch.empty_strided(state.own_master.shape, state.stride, device="meta").is_contiguous()
    return in_order and 0 < state.numel == tracked.numel and not state.param.is_complex()
