"""States that a trainer writes: for its next step, or in a bracket after which all of them are committed."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from ...errors import CSDError, CSDRankError
from ...store.layout import Extent
from ...store.sections import FP32
from ..messages import CHUNK, array, refuse
from ..requests import Write
from .ownership import Ownership


class StateWrites:
    """The writes of one session."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._brackets = contextlib.ExitStack()  # of writing() and loading()
        self._bracketed = False  # `_brackets` is open
        self.is_broken: bool = False  # the session must end, and the next session reopens the store
        # By row and section: states written for the next step, and the number of elements that have arrived.
        self._edits: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}

    def end(self) -> None:
        """Undo what the session has left unfinished."""
        try:
            self._brackets.__exit__(CSDRankError, CSDRankError("the session has ended"), None)
        except CSDError:
            self._ownership.in_doubt = True

    def _extent(self, row: int) -> tuple[Extent, int]:
        """Return the extent of a parameter, and the parameter's number in it. Raises CSDRankError."""
        tiles = self._ownership.engine.tiles
        if not 0 <= row < tiles.n_params:
            refuse(f"parameter {row}")
        extent = tiles.extent_with(row)
        return extent, row - extent.first_param

    def write(self, request: Write, data: memoryview) -> None:
        """Set elements of a state. Raises CSDRankError."""
        row, section, first = request.row, request.section, request.first
        extent, i = self._extent(row)
        values = torch.from_numpy(array(data, np.dtype("<f4"), "a state").astype(np.float32))
        if section >= len(extent.sections) or not 0 < len(values) <= min(CHUNK, extent.numels[i] - first):
            refuse(f"{len(values)} values of state {section}")
        state = self._state_within(row, section) if self._bracketed else self._edit(row, section, first, len(values))
        state[first : first + len(values)] = values

    def _state_within(self, row: int, section: int) -> torch.Tensor:
        """Return the tensor of a state, for writes within writing() or loading()."""
        engine, (extent, i) = self._ownership.engine, self._extent(row)
        if extent.codec == FP32:
            window: torch.Tensor = engine.windows.window(extent, i, section, torch.float32)
            return window
        state: torch.Tensor = engine.decoded.state(row, extent.sections[section])
        return state

    def _edit(self, row: int, section: int, first: int, n: int) -> torch.Tensor:
        """Return the tensor of a state for the next step, for a write to elements [first, first + n)."""
        extent, i = self._extent(row)
        state, written = self._edits.get((row, section)) or (torch.empty(extent.numels[i], dtype=torch.float32), 0)
        if first == 0:
            written = 0
        if first != written:
            refuse("a state in pieces that do not follow one another")
        self._edits[row, section] = state, first + n
        return state

    def enter_edits(self, table: np.ndarray[Any, Any]) -> list[torch.Tensor]:
        """Let a step begin with the states written since the last step. Returns their tensors, to be kept alive."""
        edits, self._edits = self._edits, {}
        for (row, section), (state, written) in edits.items():
            if written != len(state):
                refuse("a state that was not written to its end")
            table["edited"][row, section] = state.data_ptr()
        return [state for state, _ in edits.values()]

    def open_bracket(self, *contexts: AbstractContextManager[Any]) -> None:
        """Enter contexts that the session may never leave: until then its writes are in memory only."""
        if self._bracketed:
            refuse("states are being written already")
        self._bracketed = self._ownership.in_doubt = True
        for context in contexts:
            self._brackets.enter_context(context)

    def close_bracket(self) -> None:
        """Leave the contexts, and so commit what was written. Raises CSDError."""
        if not self._bracketed:
            refuse("no states are being written")
        brackets, self._brackets, self._bracketed = self._brackets, contextlib.ExitStack(), False
        try:
            brackets.close()
        except BaseException:  # perhaps only some states are written
            self.is_broken = True
            raise
        self._ownership.in_doubt = False
