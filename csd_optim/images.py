"""Tiles whose gradients the engine cannot read where they lie travel as images: a ring of fixed host buffers.

That is every CUDA tensor, and every gradient pushed in a lower precision than it has. On CUDA the buffers are pinned
and the copies run on side streams, so that several tiles travel while others are updated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .engine import Engine

# Tiles under way per device: one travelling each way while two are updated or wait for their states.
SLOTS_PER_DEVICE = 4


@dataclass
class Source:
    """One parameter of this step, seen as a flat array in the order of its state."""

    grad: torch.Tensor  # 1-D, any device
    param: torch.Tensor  # 1-D, same device, written in place
    grad_dtype: torch.dtype  # on the link
    is_master: bool = False  # the parameter is its own master: the device needs it as well
    back: tuple[torch.Tensor, torch.Tensor] | None = (
        None  # after the step: a strided parameter, and `param` to copy there
    )


@dataclass
class Slot:
    grad: torch.Tensor  # uint8, 4 bytes per element of a tile
    param: torch.Tensor
    events: list[Any] = field(default_factory=list)  # the last copies from or to this slot

    def wait(self) -> None:
        for event in self.events:
            event.synchronize()
        self.events.clear()


class ImageRing:
    """The buffers and streams; made once per engine and tile size, memory fixed from then on."""

    def __init__(self, tile_elems: int, slots: int, *, pinned: bool) -> None:
        def buffer() -> torch.Tensor:
            return torch.empty(4 * tile_elems, dtype=torch.uint8, device="cpu", pin_memory=pinned)

        self.slots = [Slot(buffer(), buffer()) for _ in range(slots)]
        self.tile_elems = tile_elems
        self.pinned = pinned
        self._streams: dict[torch.device, Any] = {}

    @property
    def bytes(self) -> int:
        return 8 * self.tile_elems * len(self.slots)

    def run(self, engine: Engine, tiles: Iterable[int], sources: dict[int, Source]) -> None:
        """Pushes and pulls `tiles` of the step under way. `sources` holds the parameters that have a gradient."""
        cuda = {s.grad.device for s in sources.values()} | {s.param.device for s in sources.values()}
        streams = {d: self._stream(d) for d in cuda if d.type == "cuda"}
        for device, stream in streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))  # the gradients must be there
        todo: dict[int, deque[int]] = {}
        for tile in tiles:
            todo.setdefault(engine.device_of(tile), deque()).append(tile)
        out_on = dict.fromkeys(todo, 0)
        free, travelling = deque(self.slots), deque[tuple[int, Slot]]()
        out: dict[int, Slot] = {}
        while todo or travelling or out:
            while todo and free:
                # The device with the fewest tiles out goes first: a slow one must not hold all slots.
                owner = min(todo, key=lambda d: out_on[d])
                tile, slot = todo[owner].popleft(), free.popleft()
                if not todo[owner]:
                    del todo[owner]
                out_on[owner] += 1
                self._copy(slot, engine.pieces_of(tile), sources, streams, to_device=False)
                travelling.append((tile, slot))
            if travelling:
                tile, slot = travelling.popleft()
                slot.wait()
                engine.push(tile, slot.grad.data_ptr(), slot.param.data_ptr())
                out[tile] = slot
            elif out:
                tile = engine.pull()
                slot = out.pop(tile)
                out_on[engine.device_of(tile)] -= 1
                self._copy(slot, engine.pieces_of(tile), sources, streams, to_device=True)
                free.append(slot)
        for device, stream in streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)  # whoever uses the parameters next

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    @staticmethod
    def _copy(
        slot: Slot,
        pieces: np.ndarray[Any, Any],
        sources: dict[int, Source],
        streams: dict[torch.device, Any],
        *,
        to_device: bool,
    ) -> None:
        """Copies a tile's gradients into the slot, or its parameters out of it."""
        used = set()
        for piece in pieces.tolist():
            param, _, first, tile_first, n = piece
            source = sources.get(param)
            if source is None:
                continue
            if to_device:
                image = slot.param[4 * tile_first :].view(source.param.dtype)[:n]
                there, pairs = source.param, (source.param[first : first + n], image)
            else:
                image = slot.grad[4 * tile_first :].view(source.grad_dtype)[:n]
                there, pairs = source.grad, (image, source.grad[first : first + n])
                if source.is_master:
                    slot.wait()  # copies of the last parameters out of the slot
                    slot.param[4 * tile_first :].view(source.param.dtype)[:n].copy_(source.param[first : first + n])
            stream = streams.get(there.device)
            if stream is None:
                pairs[0].copy_(pairs[1])
            else:
                with torch.cuda.stream(stream):
                    pairs[0].copy_(pairs[1], non_blocking=True)
                used.add(there.device)
        for device in used:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(streams[device])
            slot.events.append(event)
