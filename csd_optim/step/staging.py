"""Tiles whose gradients the engine cannot read where they lie travel as images: a ring of fixed host buffers.

That is every tensor on an accelerator, and every gradient pushed in a lower precision than it has. For an accelerator
the buffers are pinned, and the copies run on two side streams, one each way, so that several tiles travel while others
are updated. Of gradients with Top-K only the entries travel, selected on the stream that brings them (see sparse.py).
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..accelerator import is_far, on, recorded, wait_for
from ..engine.engine import Engine
from ..params.grad_source import GradSource
from .given_states import GivenStates
from .sparse import SparseTiles

# Tiles under way per device: one travelling each way while two are updated or wait for their states.
BUFFERS_PER_DEVICE = 4

Streams = dict[torch.device, Any]
NOTHING: Iterator[None] = iter(())


@dataclass
class StagingBuffer:
    grad: torch.Tensor  # uint8, 4 bytes per element of a tile
    param: torch.Tensor
    entries: torch.Tensor  # int32: as many as the fullest tile so far needed
    n_entries: int = 0  # words that a tile's entries may take, and one that says how many they do; 0: there are none
    states: torch.Tensor | None = None  # fp32: of a tile, all its sections; where some come from an accelerator
    has_states: bool = False
    under_way: list[Any] = field(default_factory=list)  # events: the last copies from or to this buffer

    def arrived(self) -> bool:
        return all(event.query() for event in self.under_way)

    def wait(self) -> None:
        for event in self.under_way:
            wait_for(event)
        self.under_way.clear()

    def words(self) -> tuple[int, int]:
        """Address and number of the entries that have arrived."""
        if not self.n_entries:
            return 0, 0
        return self.entries.data_ptr(), int(self.entries[self.n_entries - 1])


class StagingRing:
    """The buffers and streams; made once per engine and tile size, memory fixed from then on, but that of entries."""

    def __init__(self, tile_elems: int, slots: int, *, pinned: bool) -> None:
        self.tile_elems = tile_elems
        self.pinned = pinned
        image = 4 * tile_elems
        self.slots: list[StagingBuffer] = [
            StagingBuffer(
                self._buffer(image, torch.uint8), self._buffer(image, torch.uint8), self._buffer(0, torch.int32)
            )
            for _ in range(slots)
        ]
        self._streams: dict[torch.device, tuple[Any, ...]] = {}  # to the host, and back
        self._beside: dict[torch.device, Any] = {}  # made when first needed
        self._far: set[torch.device] = set()  # of the step under way
        self._sparse = SparseTiles()
        self._given: GivenStates | None = None  # of the step under way

    def make_room_for_states(self, sections: int) -> None:
        """Of tiles with so many sections: see GivenStates."""
        for slot in self.slots:
            if slot.states is None or len(slot.states) < sections * self.tile_elems:
                slot.states = self._buffer(sections * self.tile_elems, torch.float32)

    def _buffer(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(n, dtype=dtype, device="cpu", pin_memory=self.pinned)

    @property
    def bytes(self) -> int:
        of_slots = [t for slot in self.slots for t in (slot.grad, slot.param, slot.entries, slot.states)]
        return sum(t.nbytes for t in of_slots if t is not None)

    def begin(self, sources: Mapping[int, GradSource], given: GivenStates | None = None) -> None:
        """Goes before run(), on the thread whose current streams make gradients and read parameters.

        `sources` holds the parameters that have a gradient, `given` those whose states come from the accelerator.
        """
        self.forget()
        self._given = given
        self._far = {t.device for s in sources.values() for t in (s.grad, s.param) if is_far(t)}
        self._far |= given.devices if given else set()
        for device in self._far:
            if device not in self._streams:
                self._streams[device] = torch.Stream(device), torch.Stream(device)
        for device in self._far:  # gradients must be there, and nobody may read the old parameters any more
            self.follow(device)

    def run(
        self,
        engine: Engine,
        tiles: Iterable[int],
        sources: Mapping[int, GradSource],
        pulled: Callable[[int], None] | None,
        held: Mapping[int, StagingBuffer] | None = None,
        meanwhile: Iterator[None] = NOTHING,
    ) -> None:
        """Pushes and pulls `tiles` of the step under way. `sources`: as of begin().

        `pulled` is called with each tile when its parameters can be used, on the current streams. `held`: tiles that
        were pushed before, from these buffers, in the order in which they are wanted. `meanwhile`: what else there is
        to do on this thread, asked for a little of it whenever tiles travel. To be followed by feed_back() when the
        step is whole, or by forget().
        """
        flow = Flow(self, engine, pulled=pulled, meanwhile=meanwhile)
        try:
            flow.take_over(held or {}, sources)
            for tile in tiles:
                if tile not in flow.held:
                    flow.add(tile, sources)
            while flow.advance(wait=True):
                pass
        finally:
            self.join()

    def join(self) -> None:
        """Whoever uses parameters or gradients next, on the current streams, waits for the copies of the step."""
        for way in self._ways():
            _join(way)

    def join_back(self) -> None:
        """The same of copies to parameters."""
        _join(self._ways()[1])

    def follow(self, device: torch.device) -> None:
        """What is copied from now on waits for what is queued on the device's current stream by now."""
        for stream in self._streams[device]:
            stream.wait_stream(torch.accelerator.current_stream(device))

    def _ways(self) -> tuple[Streams, Streams]:
        """Of the step under way: streams to the host, and back."""
        return {d: self._streams[d][0] for d in self._far}, {d: self._streams[d][1] for d in self._far}

    # ---- a step that begins in backward: see overlap/early_images.py -----------------------------------

    def fill(
        self, slot: StagingBuffer, engine: Engine, tile: int, sources: Mapping[int, GradSource], after: Iterable[Any]
    ) -> None:
        """Begins to copy a tile's gradients, dense ones, and the parameters that a device reads, into the slot.

        `sources`: as of begin(), or those of this tile alone. `after`: events after which the gradients are there.
        """
        to_host, _ = self._ways()
        for event in after:
            to_host[event.device].wait_event(event)
        self.begin_fill(slot, engine, tile, sources)

    def equal(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Are all bytes of these tensors the same? Of each pair, the first in a slot, the second anywhere.

        The second are those that the current streams, at begin(), have made. Compared where they lie.
        """
        to_host, _ = self._ways()
        differ: dict[torch.device, torch.Tensor] = {}
        for kept, there in pairs:
            if not is_far(there):
                if not torch.equal(_bits(kept), _bits(there)):
                    return False
                continue
            with on(to_host[there.device]):
                differs = (_bits(kept.to(there.device, non_blocking=True)) != _bits(there)).any()
                differ[there.device] = differs | differ.get(there.device, differs)
        for device, found in differ.items():
            answer = self._buffer(1, torch.bool)
            with on(to_host[device]):
                answer.copy_(found.view(1), non_blocking=True)
            wait_for(recorded(to_host[device]))
            if answer.item():
                return False
        return True

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """For a thread that runs the step beside the program: within, its current streams are none of the program's.

        What that queues from now on is not waited for, and waits for nothing here. In the end all has happened that was
        begun within.
        """
        with contextlib.ExitStack() as entered:
            for device in self._far:
                if device not in self._beside:
                    self._beside[device] = torch.Stream(device)
                entered.enter_context(on(self._beside[device]))
            try:
                yield
            finally:
                self.wait_for_copies()

    def wait_for_copies(self) -> None:
        """Returns when what was queued on the current streams has happened, such as the copies of run()."""
        for device in self._far:
            wait_for(recorded(torch.accelerator.current_stream(device)))

    def feed_back(self) -> None:
        """The step is whole: what it did not send is owed, and the residuals say so."""
        to_host = {device: streams[0] for device, streams in self._streams.items()}
        try:
            self._sparse.feed_back(to_host)
        finally:
            self.forget()
            _join(to_host)

    def forget(self) -> None:
        """The step is undone: the residuals stay as they are."""
        self._sparse.forget()
        self._given = None

    def begin_fill(self, slot: StagingBuffer, engine: Engine, tile: int, sources: Mapping[int, GradSource]) -> None:
        """Begins to copy into the slot: a tile's gradients, or their entries, and parameters that the device reads."""
        streams, _ = self._ways()
        copies: list[tuple[Any, torch.Tensor, torch.Tensor]] = []  # stream, to, from
        for param, _, first, tile_first, n in engine.pieces_of(tile).tolist():
            source = self._to_move(param, sources)
            if source is None:
                continue
            here = slice(first, first + n)
            if source.is_read:
                image = slot.param[4 * tile_first :].view(source.param.dtype)[:n]
                copies.append((streams.get(source.param.device), image, source.param[here]))
            if not source.topk and not source.is_dropped:
                image, begin = slot.grad[4 * tile_first :].view(source.grad_dtype)[:n], first - source.first
                copies.append((streams.get(source.grad.device), image, source.grad[begin : begin + n]))
        entries = self._sparse.entries_of(engine, tile, sources, streams)
        slot.n_entries = 0 if entries is None else len(entries)
        if entries is not None:
            if len(slot.entries) < len(entries):
                slot.entries = self._buffer(1 << (len(entries) - 1).bit_length(), torch.int32)  # seldom again
            copies.append((streams.get(entries.device), slot.entries[: len(entries)], entries))
        used = {stream.device: stream for stream, _, _ in copies if stream is not None}
        # What still leaves the slot goes before. The stream waits for it, not the host, which waits once, for all.
        for stream in used.values():
            for event in slot.under_way:
                stream.wait_event(event)
        if any(stream is None for stream, _, _ in copies):
            slot.wait()
        for stream, to, source_ in copies:
            with on(stream):
                to.copy_(source_, non_blocking=stream is not None)
        slot.has_states = False
        if self._given and slot.states is not None:
            for device in self._given.devices_of(engine, tile).difference(used):
                used[device] = streams[device]
                for event in slot.under_way:
                    used[device].wait_event(event)
            slot.has_states = self._given.fill(slot.states, engine, tile, streams)
        if used:
            slot.under_way = [recorded(stream) for stream in used.values()]

    def _to_move(self, row: int, sources: Mapping[int, GradSource]) -> GradSource | None:
        """Gradient and parameter, if they go with the images of a tile: not if its states are given."""
        return None if self._given and row in self._given.copies else sources.get(row)

    def begin_empty(self, slot: StagingBuffer, pieces: np.ndarray[Any, Any], sources: Mapping[int, GradSource]) -> None:
        """Begins to copy a tile's parameters out of the slot. Torch does not count that: whose step it is does."""
        _, streams = self._ways()
        used, copied = {}, list[tuple[GradSource, Any]]()
        for param, _, first, tile_first, n in pieces.tolist():
            source = self._to_move(param, sources)
            if source is None or source.is_dropped:
                continue
            stream = streams.get(source.param.device)
            with on(stream):
                image = slot.param[4 * tile_first :].view(source.param.dtype)[:n]
                source.param.data[first : first + n].copy_(image, non_blocking=stream is not None)
            if stream is not None:
                used[stream.device] = stream
                copied.append((source, stream.device))
        events = {device: recorded(stream) for device, stream in used.items()}
        for source, device in copied:
            source.arrives = events[device]
        slot.under_way = [*events.values()]


class Flow:
    """Tiles that travel by the slots of a ring, in one step: there with gradients, and back with parameters."""

    def __init__(
        self,
        ring: StagingRing,
        engine: Engine,
        *,
        copied: Callable[[int, Mapping[int, GradSource]], None] | None = None,
        pulled: Callable[[int], None] | None = None,
        meanwhile: Iterator[None] = NOTHING,
    ) -> None:
        """`copied` is called when a tile's gradients have been, with its sources; others: as of StagingRing.run()."""
        self._ring, self._engine, self._copied, self._pulled = ring, engine, copied, pulled
        self._meanwhile = meanwhile
        self.held: Mapping[int, StagingBuffer] = {}
        self._sources: dict[int, Mapping[int, GradSource]] = {}  # of each tile, by row
        self._todo: dict[int, deque[int]] = {}  # tiles, by device
        self._out_on: Counter[int] = Counter()  # tiles, by device
        self._free, self._travelling = deque(ring.slots), deque[tuple[int, StagingBuffer]]()
        self._out: dict[int, StagingBuffer] = {}

    def add(self, tile: int, sources: Mapping[int, GradSource]) -> None:
        """It is to be pushed and pulled. `sources`: at least those of its parameters that have a gradient."""
        self._sources[tile] = sources
        self._todo.setdefault(self._engine.device_of(tile), deque()).append(tile)

    def take_over(self, held: Mapping[int, StagingBuffer], sources: Mapping[int, GradSource]) -> None:
        """These were pushed before: see StagingRing.run()."""
        self.held, self._out = held, dict(held)
        self._sources.update(dict.fromkeys(held, sources))
        updated = {self._engine.pull() for tile in held if self._is_updated(tile)}  # others were perhaps, meanwhile
        for tile in [tile for tile in held if tile in updated]:
            self._comes_back(tile)

    def advance(self, *, wait: bool) -> bool:
        """Does what can be done next; with `wait` returns when it could be. False: there was nothing."""
        while self._todo and self._free:
            # The device with the fewest tiles out goes first: a slow one must not hold all slots.
            owner = min(self._todo, key=lambda d: self._out_on[d])
            tile, slot = self._todo[owner].popleft(), self._free.popleft()
            if not self._todo[owner]:
                del self._todo[owner]
            self._out_on[owner] += 1
            self._ring.begin_fill(slot, self._engine, tile, self._sources[tile])
            self._travelling.append((tile, slot))
        if self._travelling or self._out:
            next(self._meanwhile, None)
        # While the next gradients are under way, parameters that wait to go back do so.
        has_arrived = bool(self._travelling) and self._travelling[0][1].arrived()
        is_updated = not has_arrived and any(map(self._is_updated, self._out))
        if has_arrived or (wait and self._travelling and not is_updated):
            self._goes(*self._travelling.popleft())
        elif is_updated or (wait and self._out):
            self._comes_back(self._engine.pull())
        else:
            return False
        return True

    def _is_updated(self, tile: int) -> bool:
        return self._engine.params_ready(np.array([tile], np.uint32), wait=False)

    def _goes(self, tile: int, slot: StagingBuffer) -> None:
        if slot.has_states and slot.states is not None:
            self._engine.give(tile, slot.states.data_ptr())
        slot.wait()
        self._engine.push(tile, slot.grad.data_ptr(), slot.param.data_ptr(), *slot.words())
        self._out[tile] = slot
        if self._copied:
            self._copied(tile, self._sources[tile])

    def _comes_back(self, tile: int) -> None:
        slot = self._out.pop(tile)
        self._ring.begin_empty(slot, self._engine.pieces_of(tile), self._sources.pop(tile))
        if tile not in self.held:
            self._out_on[self._engine.device_of(tile)] -= 1
            self._free.append(slot)
        if self._pulled:
            self._ring.join_back()
            self._pulled(tile)


def _bits(t: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: as numbers, NaN is not what it is, and 0 is -0."""
    return t.view({2: torch.int16, 4: torch.int32}[t.itemsize])


def _join(streams: Streams) -> None:
    """Whoever uses parameters, gradients or residuals next, on the current streams, waits for these."""
    for device, stream in streams.items():
        torch.accelerator.current_stream(device).wait_stream(stream)
