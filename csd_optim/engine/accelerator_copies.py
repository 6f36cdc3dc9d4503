"""Copies of durable states on the accelerator: steps update these if `gpu:` is named beside directories.

The directories always contain all states. Some states also have a copy on their parameter's accelerator. Which of the
two is authoritative:

between steps         the directory: `state` shows it and commits contain it. A copy with `is_known` is identical; any
                      other copy is loaded from the directory by the step that needs it
in a step             the copy: it is updated, copied to the host and written to the tile's other slot, without reading
                      the tile (csd_master SUPPLIED)
after an undone step  the directory: the copies that the step updated are no longer `is_known`
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..accelerator import record_event, wait_for
from ..store.layout import round_up
from ..store.sections import GROUP, Section
from .accelerator_codes import ParamCodes
from .parts import NativeEngine
from .tiles import Tiles


@dataclass
class AcceleratorCopy:
    """The copy of one parameter's states."""

    states: list[torch.Tensor]  # 1-D fp32, the master first, in the order of the tile's sections; or none
    codes: ParamCodes | None = None  # the states, if they are codes
    is_known: bool = False  # the copy equals the states in the directory

    @property
    def sections(self) -> list[torch.Tensor]:
        """The sections of the states in the order of a tile's, 1-D: fp32, or bytes in whole groups of codes."""
        return [*self.codes.sections.values()] if self.codes else self.states

    @property
    def device(self) -> torch.device:
        return self.codes.device if self.codes else self.states[0].device

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes if self.codes else sum(state.nbytes for state in self.states)

    def pieces(self, places: Sequence[Section], first: int, in_tile: int, n: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield, for each section of a piece, its byte in a slot, and its elements here as bytes.

        `places`: the sections of the slot. The piece has elements [first, first + n) of the parameter, and begins at
        element `in_tile` of the tile. Codes have whole groups, whose unused elements are zero in a slot, too.
        """
        n = round_up(n, GROUP) if self.codes else n
        for place, section in zip(places, self.sections, strict=True):
            begin = first * place.group_bytes // GROUP
            yield place.at(in_tile), section.view(torch.uint8)[begin : begin + place.bytes_of(n)]


class AcceleratorCopies:
    """The copies of one engine."""

    def __init__(self, native: NativeEngine, tiles: Tiles) -> None:
        self._native: NativeEngine | None = native  # until it is closed
        self._tiles = tiles
        self.by_param: dict[int, AcceleratorCopy] = {}  # by parameter, numbered over all extents

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self.by_param.values())

    def forget(self, params: Iterable[int] | None = None) -> None:
        """Invalidate copies, as their states in the directory change. None: the copies of all parameters."""
        for param in self.by_param if params is None else params:
            if param in self.by_param:
                self.by_param[param].is_known = False

    def close(self) -> None:
        """Free the memory of all copies."""
        for copy in self.by_param.values():
            copy.states.clear()
            copy.codes = None
        self._native = None  # breaks a reference cycle, by way of the devices

    def load(self, params: Collection[int]) -> None:
        """Load these parameters' invalid copies from the directory. Not during a step.

        Raises CSDOSError, or CSDStoreError if a tile is damaged.
        """
        missing = {param: copy for param in params if not (copy := self.by_param[param]).is_known}
        if not missing:
            return
        assert self._native
        largest = max(e.slot_bytes for e in self._tiles.extents)
        # Two buffers: while one tile is copied to the accelerator, the next is read.
        buffers = [torch.empty(largest, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
        copied: list[list[torch.Event]] = [[], []]
        try:
            for i, tile in enumerate(self._tiles.of([*missing]).tolist()):
                buffer, events = buffers[i % 2], copied[i % 2]
                while events:
                    wait_for(events.pop())
                places, devices = self._tiles.extent_of(tile).slot, set()
                self._native.read(tile, len(places), self._tiles.elems_of(tile), buffer.data_ptr())
                for param, _, first, in_tile, n in self._tiles.pieces_of(tile).tolist():
                    if param not in missing:
                        continue
                    for at, section in missing[param].pieces(places, first, in_tile, n):
                        section.copy_(buffer[at : at + len(section)], non_blocking=True)
                    devices.add(missing[param].device)
                events += [record_event(torch.accelerator.current_stream(device)) for device in devices]
        finally:
            for event in (*copied[0], *copied[1]):
                wait_for(event)
        for copy in missing.values():
            copy.is_known = True
