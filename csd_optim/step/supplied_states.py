"""Supplied states: states that a step updates on the accelerator, and copies into tiles for the devices to store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ..accelerator import on
from ..engine.accelerator_copies import AcceleratorCopy
from ..engine.engine import Engine
from ..engine.truth import Truth
from ..params.param_state import ParamState
from .accelerator_updates import NO_UPDATES, AcceleratorUpdate, AcceleratorUpdates
from .spec import StepSpec


class SuppliedStates:
    """The supplied states of one step. `copies`: by row of the step's table, in the order in which tiles need them.

    Some have no gradient and no new states: if a tile gets all its states from the accelerator, the device need not
    read it.
    """

    def __init__(self, copies: Mapping[int, AcceleratorCopy] = MappingProxyType({})) -> None:
        self.copies: Mapping[int, AcceleratorCopy] = copies
        self.updated: frozenset[int] = frozenset()  # rows with a gradient
        self.tiles: np.ndarray[Any, Any] = np.zeros(0, np.uint32)  # uint32: tiles with supplied states
        self.nbytes: int = 0  # copied to tiles so far
        self.accelerated: AcceleratorUpdates = NO_UPDATES  # the updates that produce the states

    @property
    def devices(self) -> set[torch.device]:
        return {copy.device for copy in self.copies.values()}

    def slot_bytes(self, engine: Engine) -> int:
        """The largest number of bytes of a tile with supplied states."""
        extents = {e for e, _, _ in engine.tiles.by_place(self.tiles)}
        return max((engine.tiles.extents[e].slot_bytes for e in extents), default=0)

    def in_order(self, updates: Sequence[AcceleratorUpdate]) -> list[AcceleratorUpdate]:
        """Return `updates` in the order in which tiles need them."""
        order = {row: k for k, row in enumerate(self.copies)}
        return sorted(updates, key=lambda u: order[u.param_state.index])

    def devices_of(self, engine: Engine, tile: int) -> set[torch.device]:
        """Return the accelerators that give states to a tile."""
        rows = engine.tiles.pieces_of(tile)["param"].tolist()
        return {self.copies[row].device for row in rows if row in self.copies}

    def fill(self, states: torch.Tensor, engine: Engine, tile: int, streams: Mapping[torch.device, Any]) -> bool:
        """Begin to copy a tile's supplied states, on `streams`. Returns False if the tile has none.

        `states`: destination, uint8, in the layout of a slot.
        """
        places, has_given = engine.tiles.extent_of(tile).slot, False
        for row, _, first, in_tile, n in engine.tiles.pieces_of(tile).tolist():
            if (copy := self.copies.get(row)) is None:
                continue
            has_given, stream = True, streams[copy.device]
            if row in self.updated:
                stream.wait_event(self.accelerated.event(row))
            with on(stream):
                for at, section in copy.pieces(places, first, in_tile, n):
                    states[at : at + len(section)].copy_(section, non_blocking=True)
                    self.nbytes += len(section)
        return has_given

    def mark(self, table: np.ndarray[Any, Any]) -> None:
        """Mark the rows as supplied in a step's table (dtype PARAM)."""
        Truth.give(table, [*self.copies])

    def keep(self) -> None:
        """Note, when the step is complete, that the devices have the same states as the copies."""
        for row in self.updated:
            self.copies[row].is_known = True


NO_SUPPLIED = SuppliedStates()


def supplied_states(engine: Engine, spec: StepSpec, tiles: np.ndarray[Any, Any]) -> SuppliedStates:
    """Return the states that the accelerator supplies in a step with these tiles (uint32).

    Marks the states in the step's table, and loads copies on the accelerator that are out of date. Raises CSDOSError or
    CSDStoreError if a copy cannot be loaded; nothing has changed then.
    """
    copies = engine.truth.copies
    if copies is None:
        return NO_SUPPLIED
    edited = engine.truth.note_written()  # tiles whose copies on the accelerator are out of date now
    with_grad = [state for state in spec.plan.param_states if state.accelerator_copy and state.numel]
    # The devices update a parameter that was moved off the accelerator, like any other; and one with codes if the
    # program has set it or its states, as they know which of the two counts.
    set_outside = {state.index for state in spec.written if state.is_coded}
    set_outside.update(engine.decoded.written(), engine.decoded.masters_written)
    updated = {s.index: s for s in with_grad if _is_on_copy_device(s) and s.index not in set_outside}
    copies.forget([state.index for state in with_grad if state.index not in updated])
    if not updated:
        return NO_SUPPLIED
    copies.load([row for row, state in updated.items() if not state.is_new])
    # Rows without a gradient in the same tiles are supplied, too, so that devices need not read the tile. But if the
    # program has written to their tiles, the devices have to read these.
    rows_edited: set[int] = set()
    for tile in np.setdiff1d(edited, tiles).tolist():
        rows_edited.update(engine.tiles.pieces_of(tile)["param"].tolist())
    rows: dict[int, None] = {}
    for tile in tiles.tolist():
        here = engine.tiles.pieces_of(tile)["param"].tolist()
        if any(row in updated for row in here):
            of_tile = [row for row in here if row in copies.by_param]
            rows.update(
                dict.fromkeys(
                    row
                    for row in of_tile
                    if row in updated
                    or (copies.by_param[row].is_known and not spec.table["grad"][row] and row not in rows_edited)
                )
            )
    supplied = SuppliedStates({row: copies.by_param[row] for row in rows})
    supplied.updated = frozenset(updated)
    supplied.tiles = np.intersect1d(tiles, engine.tiles.of([*rows]))
    supplied.mark(spec.table)
    return supplied


def _is_on_copy_device(state: ParamState) -> bool:
    assert state.accelerator_copy
    return state.local.device == state.accelerator_copy.device
