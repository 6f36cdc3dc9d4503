"""A load of states, and how all its changes are undone if it does not become complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..grad_modes import no_autograd
from .states import States


class Load:
    """Everything that a load may change in an engine's states, and that loading() restores if it raises.

    A tile is moved to its other slot before its states are written, so the old slot keeps the states from before the
    load. Where there is no other slot (`ram:`, accelerators) the old states are lost: if the load does not become
    complete, such parameters are `half_loaded` (see States).
    """

    def __init__(self, states: States, *, was_written: bool) -> None:
        """`was_written`: states have writes that are in no commit yet."""
        self.stands: bool = False  # the load is complete: errors after that do not undo it
        self.was_written: bool = was_written
        self._states = states
        self._moves: list[np.ndarray[Any, Any]] = []  # see States.moves
        states.moves = self._moves
        self._step, self._record, self._half_loaded = states.step, states.record, states.half_loaded
        self._synced = states.synced
        self._counts = states.all_steps()
        self._truth = states.truth.saved()
        self._residuals = {param: (r, r.to("cpu", copy=True)) for param, r in states.residuals.items()}
        self._params: set[int] = set()  # parameters whose states are written
        self._lost: set[int] = set()  # parameters whose states before the load are lost

    def before_writes(self, params: Sequence[int]) -> np.ndarray[Any, Any]:
        """Note that states of these parameters are written next; return the tiles to be moved first: ascending, uint32.

        States that are read on demand are not moved now: writes to them stay in memory until a flush.
        """
        states = self._states
        self._params.update(params)
        if states.devices.accelerator:  # parameters with states there have no elements here
            self._lost.update(param for param in params if not len(states.tiles.of([param])))
        tiles = states.tiles.of(params)
        tiles = tiles[~(states.unmapped | states.truth.empty)[tiles]]
        single = states.has_one_slot[tiles]
        self._lost.update(states.tiles.params_in(tiles[single]))
        return np.setdiff1d(tiles[~single], np.concatenate([tiles[:0], *self._moves]))

    def complete(self) -> None:
        """Note that the load is complete: parameters of earlier, incomplete loads are whole if it wrote them, too."""
        self.stands, self._states.moves = True, None
        self._states.half_loaded = self._states.half_loaded - self._params

    def put_back(self) -> None:
        """Restore everything. Raises CSDError if that is impossible: then all states are half loaded."""
        states = self._states
        states.moves, states.half_loaded = None, {*range(states.tiles.n_params)}
        tiles, counts = np.unique(np.concatenate([np.zeros(0, np.uint32), *self._moves]), return_counts=True)
        back = (counts == 1) & ~states.has_one_slot[tiles]  # a tile that moved twice has overwritten its old slot
        self._lost.update(states.tiles.params_in(tiles[~back]))
        if states.native.is_open:
            states.native.go_back(tiles[back])
        states.truth.put_back(self._truth)
        counts = np.append(self._counts, states.all_steps()[len(self._counts) :])  # there may be new extents
        states.go_to(self._step, self._record, counts)
        states.synced = self._synced
        states.residuals = {param: r for param, (r, _) in self._residuals.items()}
        with no_autograd():
            for r, values in self._residuals.values():
                r.copy_(values)
        states.remap()
        states.half_loaded = self._half_loaded | self._lost
