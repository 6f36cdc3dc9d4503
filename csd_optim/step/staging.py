"""Tiles whose gradients the engine cannot read where they lie travel as images: a ring of fixed host buffers.

That is every CUDA tensor, and every gradient pushed in a lower precision than it has. On CUDA the buffers are pinned
and the copies run on side streams, so that several tiles travel while others are updated. Of gradients with Top-K only
the entries travel, selected on the same streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..accelerator import is_far, on, recorded, wait_for
from ..bindings import topk_count
from ..compression.selection import TopK, feed_back, pack, rounded, select
from ..engine.engine import Engine
from ..params.grad_source import GradSource

# Tiles under way per device: one travelling each way while two are updated or wait for their states.
BUFFERS_PER_DEVICE = 4


@dataclass
class SparsePiece:
    """What a parameter with Top-K has in one tile; all tensors 1-D and on its device."""

    topk: TopK
    grad: torch.Tensor
    residual: torch.Tensor | None
    first: int  # in the parameter

    def select(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices (int64, ascending) and values (16 bits) of what is to be sent."""
        values = rounded(self.grad, self.residual, self.topk.scale, self.topk.dtype)
        sent = select(values, topk_count(self.topk.ratio, len(values)))
        return sent, values[sent]

    def feed_back(self) -> None:
        """Selects once more, which costs less than keeping what was sent of all parameters would."""
        assert self.residual is not None
        feed_back(self.grad, self.residual, self.topk.scale, *self.select(), self.first, self.topk.step)


@dataclass
class StagingBuffer:
    grad: torch.Tensor  # uint8, 4 bytes per element of a tile
    param: torch.Tensor
    entries: torch.Tensor  # int32: as many as the fullest tile so far needed
    n_entries: int = 0  # of this tile; 0: nothing in it is sparse
    events: list[Any] = field(default_factory=list)  # the last copies from or to this slot

    def record(self, stream: Any) -> None:
        self.events.append(recorded(stream))

    def wait(self) -> None:
        for event in self.events:
            wait_for(event)
        self.events.clear()


class StagingRing:
    """The buffers and streams; made once per engine and tile size, memory fixed from then on, but that of entries."""

    def __init__(self, tile_elems: int, slots: int, *, pinned: bool) -> None:
        self.tile_elems = tile_elems
        self.pinned = pinned
        image = 4 * tile_elems
        self.slots = [
            StagingBuffer(
                self._buffer(image, torch.uint8), self._buffer(image, torch.uint8), self._buffer(0, torch.int32)
            )
            for _ in range(slots)
        ]
        self._streams: dict[torch.device, Any] = {}
        self._sent: list[SparsePiece] = []  # those that leave something owed

    def _buffer(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(n, dtype=dtype, device="cpu", pin_memory=self.pinned)

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for slot in self.slots for t in (slot.grad, slot.param, slot.entries))

    def run(
        self, engine: Engine, tiles: Iterable[int], sources: dict[int, GradSource], pulled: Callable[[int], None] | None
    ) -> None:
        """Pushes and pulls `tiles` of the step under way. `sources` holds the parameters that have a gradient.

        `pulled` is called with each tile when its parameters can be used. To be followed by feed_back() when the step
        is whole, or by forget().
        """
        self.forget()
        far = {t.device for s in sources.values() for t in (s.grad, s.param) if is_far(t)}
        streams = {d: self._stream(d) for d in far}
        for device, stream in streams.items():
            stream.wait_stream(torch.accelerator.current_stream(device))  # the gradients must be there
        try:
            self._runner(engine, tiles, sources, streams, pulled)
        finally:
            self._join(streams)

    def feed_back(self) -> None:
        """The step is whole: what it did not send is owed, and the residuals say so."""
        try:
            for part in self._sent:
                # On the stream that selects: this comes after the selection, and before that of the next step.
                with on(self._streams.get(part.grad.device)):
                    part.feed_back()
        finally:
            self.forget()
            self._join(self._streams)

    def forget(self) -> None:
        """The step is undone: the residuals stay as they are."""
        self._sent.clear()

    def _runner(
        self,
        engine: Engine,
        tiles: Iterable[int],
        sources: dict[int, GradSource],
        streams: dict[torch.device, Any],
        pulled: Callable[[int], None] | None,
    ) -> None:
        todo: dict[int, deque[int]] = {}
        for tile in tiles:
            todo.setdefault(engine.device_of(tile), deque()).append(tile)
        out_on = dict.fromkeys(todo, 0)
        free, travelling = deque(self.slots), deque[tuple[int, StagingBuffer]]()
        out: dict[int, StagingBuffer] = {}
        while todo or travelling or out:
            while todo and free:
                # The device with the fewest tiles out goes first: a slow one must not hold all slots.
                owner = min(todo, key=lambda d: out_on[d])
                tile, slot = todo[owner].popleft(), free.popleft()
                if not todo[owner]:
                    del todo[owner]
                out_on[owner] += 1
                pieces = engine.pieces_of(tile)
                self._copy(slot, pieces, sources, streams, to_device=False)
                self._compress(slot, pieces, sources, streams, engine.elems_of(tile))
                travelling.append((tile, slot))
            if travelling:
                tile, slot = travelling.popleft()
                slot.wait()
                entries = slot.entries.data_ptr() if slot.n_entries else 0
                engine.push(tile, slot.grad.data_ptr(), slot.param.data_ptr(), entries, slot.n_entries)
                out[tile] = slot
            elif out:
                tile = engine.pull()
                slot = out.pop(tile)
                out_on[engine.device_of(tile)] -= 1
                self._copy(slot, engine.pieces_of(tile), sources, streams, to_device=True)
                free.append(slot)
                if pulled:
                    self._join(streams)
                    pulled(tile)

    @staticmethod
    def _join(streams: dict[torch.device, Any]) -> None:
        """Whoever uses parameters, gradients or residuals next, on the current streams, waits for these."""
        for device, stream in streams.items():
            torch.accelerator.current_stream(device).wait_stream(stream)

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]

    @staticmethod
    def _copy(
        slot: StagingBuffer,
        pieces: np.ndarray[Any, Any],
        sources: dict[int, GradSource],
        streams: dict[torch.device, Any],
        *,
        to_device: bool,
    ) -> None:
        """Copies a tile's dense gradients into the slot, or its parameters out of it."""
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
                if source.is_read:
                    slot.wait()  # copies of the last parameters out of the slot
                    slot.param[4 * tile_first :].view(source.param.dtype)[:n].copy_(source.param[first : first + n])
                if source.topk:
                    continue
                image = slot.grad[4 * tile_first :].view(source.grad_dtype)[:n]
                there, pairs = source.grad, (image, source.grad[first : first + n])
            stream = streams.get(there.device)
            if stream is None:
                pairs[0].copy_(pairs[1])
            else:
                with on(stream):
                    pairs[0].copy_(pairs[1], non_blocking=True)
                used.add(there.device)
        for device in used:
            slot.record(streams[device])

    def _compress(
        self,
        slot: StagingBuffer,
        pieces: np.ndarray[Any, Any],
        sources: dict[int, GradSource],
        streams: dict[torch.device, Any],
        tile_elems: int,
    ) -> None:
        """Selects from a tile's sparse gradients, each on its device, and copies the entries into the slot."""
        slot.n_entries = 0
        parts: list[tuple[int, SparsePiece]] = []
        for param, _, first, tile_first, n in pieces.tolist():
            source = sources.get(param)
            if source and source.topk:
                here, residual = slice(first, first + n), source.topk.residual
                part = SparsePiece(source.topk, source.grad[here], None if residual is None else residual[here], first)
                parts.append((tile_first, part))
        if not parts:
            return
        devices = {part.grad.device for _, part in parts}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")  # where the entries are packed
        elements, values = [], []
        for tile_first, part in parts:
            with on(streams.get(part.grad.device)):
                sent, sent_values = part.select()
                elements.append((sent + tile_first).to(device))
                values.append(sent_values.view(torch.int16).to(device))
                if part.residual is not None and part.topk.ratio < 1:
                    self._sent.append(part)
        stream = streams.get(device)
        with on(stream):
            packed = pack(torch.cat(elements), torch.cat(values), tile_elems)
            slot.n_entries = len(packed)
            if len(slot.entries) < len(packed):
                slot.entries = self._buffer(1 << (len(packed) - 1).bit_length(), torch.int32)  # seldom again
            slot.entries[: len(packed)].copy_(packed, non_blocking=True)
        if stream is not None:
            slot.record(stream)
