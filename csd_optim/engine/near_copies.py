"""Copies on the accelerator of states that named directories have: beside these, `gpu:` is where steps update them.

The directories have all states, as always. Of some of them there is a copy on the parameter's accelerator, and which of
the two counts when:

between steps         what is in the directory: `state` shows it, commits have it. A copy that is `known` is the same;
                      another one is read from there by the step that needs it
in a step             the copy: it is updated, goes to the host, and is written to the tile's next slot, with nothing
                      read (csd_master GIVEN)
after an undone step  what is in the directory: what the step has updated here is not known any more
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..accelerator import recorded, wait_for

if TYPE_CHECKING:
    from .engine import Engine


@dataclass
class NearCopy:
    """Of the states of one parameter."""

    states: list[torch.Tensor]  # 1-D fp32, the master first, as the tiles have them
    is_known: bool = False  # it is what is in the directory

    @property
    def device(self) -> torch.device:
        return self.states[0].device


class NearCopies:
    """Of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = weakref.proxy(engine)  # it owns this, and goes with its last user
        self.of: dict[int, NearCopy] = {}  # by parameter, counted over all extents

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for copy in self.of.values() for state in copy.states)

    def forget(self, params: Iterable[int] | None = None) -> None:
        """What is in the directory is another state now, or will be. None: of all parameters."""
        for param in self.of if params is None else params:
            if param in self.of:
                self.of[param].is_known = False

    def close(self) -> None:
        """Nobody updates them any more: their memory is free again."""
        for copy in self.of.values():
            copy.states.clear()

    def load(self, params: Collection[int]) -> None:
        """Reads these that are not known. Not within a step. Raises CSDOSError, CSDStoreError: a tile is damaged."""
        missing = {param: copy for param in params if not (copy := self.of[param]).is_known}
        if not missing:
            return
        engine = self._engine
        largest = max(e.tile_elems * len(e.sections) for e in engine.extents)
        # While one is copied to the accelerator, the next is read.
        buffers = [torch.empty(largest, dtype=torch.float32, device="cpu", pin_memory=True) for _ in range(2)]
        leaving: list[list[torch.Event]] = [[], []]
        try:
            for i, tile in enumerate(engine.tiles_of_params([*missing]).tolist()):
                buffer, events = buffers[i % 2], leaving[i % 2]
                while events:
                    wait_for(events.pop())
                engine.read(tile, buffer.data_ptr())
                elems, devices = engine.elems_of(tile), set()
                for param, _, first, in_tile, n in engine.pieces_of(tile).tolist():
                    if param not in missing:
                        continue
                    for s, state in enumerate(missing[param].states):
                        state[first : first + n].copy_(buffer[s * elems + in_tile :][:n], non_blocking=True)
                    devices.add(missing[param].device)
                events += [recorded(torch.accelerator.current_stream(device)) for device in devices]
        finally:
            for event in (*leaving[0], *leaving[1]):
                wait_for(event)
        for copy in missing.values():
            copy.is_known = True
