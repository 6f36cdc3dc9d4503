"""Staging buffers: a ring of fixed host buffers for tiles whose gradients the engine cannot read where they lie.

The engine cannot read gradients on an accelerator, nor gradients that are pushed in a lower precision; where devices
have `images_only`, it can read none. Tiles with such gradients travel as images: contiguous copies of the gradients and
the parameters of a tile. An engine that `takes_in_place` needs no copy of a tensor in host memory that travels in its
own dtype: such gradients are read, and such parameters written, in place. For an accelerator the buffers are pinned,
and the copies run on two side streams, one each way, so that several tiles travel while others are updated. Gradients
with Top-K travel as entries only, selected on the stream that copies them (see sparse.py).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from ..accelerator import has_completed, is_on_accelerator, on, pause, record_event, wait_for
from ..bindings import Push, threads_used
from ..compression.kernel_check import topk_kernels_of
from ..engine.engine import Engine
from ..params.grad_source import GradSource
from .sparse import SparseTiles
from .supplied_states import NO_SUPPLIED, SuppliedStates

# Tiles in flight per device: one travelling each way, and two being updated or waiting for their states. A drive has no
# use for more: its own buffers hold few tiles, too. Tiles in memory are updated as fast as they arrive, so that further
# ones must be on their way for each update thread. Threads share tiles, so 16 of these buffers suffice for any number.
BUFFERS_PER_DEVICE = 4
MOST_FOR_THREADS = 16

Streams = dict[torch.device, Any]


def nothing() -> None:
    """Do nothing: the idle work of a step that has none."""


@dataclass
class StagingBuffer:
    grad: torch.Tensor  # uint8, 4 bytes per element of a tile
    param: torch.Tensor  # likewise
    entries: torch.Tensor  # int32: grows to what the fullest tile so far needed
    n_entries: int = 0  # room for a tile's entries, in words, plus one word for their number; 0: no entries
    before: torch.Tensor | None = None  # uint8, as `param`: old parameters of an accelerator, see keeps_old()
    states: torch.Tensor | None = None  # uint8, a slot of a tile; only where an accelerator gives states
    has_states: bool = False
    # For an engine that takes_in_place: by piece of the tile, addresses of gradient and parameter; 0: in the image.
    # None: everything is in the images.
    in_place: tuple[list[int], list[int]] | None = None
    under_way: list[Any] = field(default_factory=list)  # events after the last copies from or to this buffer

    @property
    def has_grads_in_place(self) -> bool:
        return self.in_place is not None and any(self.in_place[0])

    def arrived(self) -> bool:
        return all(map(has_completed, self.under_way))

    def wait(self) -> None:
        for event in self.under_way:
            wait_for(event)
        self.under_way.clear()

    def words(self) -> tuple[int, int]:
        """Return the address of the entries that have arrived, and the number of their words."""
        if not self.n_entries:
            return 0, 0
        return self.entries.data_ptr(), int(self.entries[self.n_entries - 1])


NO_BUFFERS: Mapping[int, StagingBuffer] = MappingProxyType({})


class StagingRing:
    """The buffers and streams. Created once per engine and tile size; then only the memory of entries may grow."""

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
        self._streams: dict[torch.device, tuple[Any, ...]] = {}  # by device: a stream to the host, a stream back
        self._separate_streams: dict[torch.device, Any] = {}  # streams for on_separate_streams(), created lazily
        self._accelerators: set[torch.device] = set()  # accelerators of the step under way
        self._sparse = SparseTiles()
        self._supplied = NO_SUPPLIED  # of the step under way

    def make_room_for_states(self, nbytes: int) -> None:
        """Make the buffers large enough for the states of a tile with that many bytes: see SuppliedStates."""
        for slot in self.slots:
            if nbytes > (0 if slot.states is None else len(slot.states)):
                slot.states = self._buffer(nbytes, torch.uint8)

    def _buffer(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(n, dtype=dtype, device="cpu", pin_memory=self.pinned)

    @property
    def bytes(self) -> int:
        of_slots = [t for s in self.slots for t in (s.grad, s.param, s.entries, s.before, s.states)]
        return sum(t.nbytes for t in of_slots if t is not None)

    def begin(self, sources: Mapping[int, GradSource], supplied: SuppliedStates) -> None:
        """Begin a step, before run() and on the thread whose current streams produce gradients and read parameters.

        `sources`: by row, the parameters with a gradient. `supplied`: the states that the accelerator supplies. May run
        out of memory.
        """
        self.forget()
        self._supplied = supplied
        self._accelerators = {t.device for s in sources.values() for t in (s.grad, s.param) if is_on_accelerator(t)}
        self._accelerators |= supplied.devices
        for device in self._accelerators:
            if device not in self._streams:
                self._streams[device] = torch.Stream(device), torch.Stream(device)
        for device in {s.grad.device for s in sources.values() if s.topk}:
            topk_kernels_of(device)  # compiled and checked here, where nothing has changed yet
        for device in self._accelerators:  # wait until gradients are ready, and the old parameters were read
            self.wait_for_current(device)

    def run(
        self,
        engine: Engine,
        tiles: Iterable[int],
        sources: Mapping[int, GradSource],
        on_pulled: Callable[[int], None] | None,
        early_buffers: Mapping[int, StagingBuffer] = NO_BUFFERS,
        idle_work: Callable[[], None] = nothing,
    ) -> None:
        """Push and pull `tiles` of the step under way. `sources`: as in begin().

        `on_pulled` is called with each tile when its parameters can be used on the current streams. `early_buffers`:
        tiles that were pushed before, each with its buffer, in the order in which they are needed. `idle_work`: does
        a bit of other work; called whenever tiles travel. Afterwards call feed_back() if the step is complete, else
        forget().
        """
        staged = StagedTiles(self, engine, on_pulled=on_pulled, idle_work=idle_work)
        try:
            staged.adopt_pushed(early_buffers, sources)
            left = [tile for tile in tiles if tile not in staged.early_buffers]
            self._sparse.begin(left)
            for tile in left:
                staged.add(tile, sources)
            while staged.advance(wait=True):
                pass
        finally:
            self.join()

    def join(self) -> None:
        """Make the current streams wait for the step's copies of gradients and parameters."""
        for streams in self._copy_streams():
            _join(streams)

    def join_back(self) -> None:
        """Make the current streams wait for the step's copies to parameters."""
        _join(self._copy_streams()[1])

    def wait_for_current(self, device: torch.device) -> None:
        """Make later copies wait for everything queued so far on the device's current stream."""
        for stream in self._streams[device]:
            stream.wait_stream(torch.accelerator.current_stream(device))

    def _copy_streams(self) -> tuple[Streams, Streams]:
        """Return the streams of the step under way, by device: to the host, and back."""
        devices = self._accelerators
        return {d: self._streams[d][0] for d in devices}, {d: self._streams[d][1] for d in devices}

    # ---- a step that begins in backward: see overlap/early_images.py -----------------------------------

    def fill(
        self, slot: StagingBuffer, engine: Engine, tile: int, sources: Mapping[int, GradSource], after: Iterable[Any]
    ) -> None:
        """Begin to copy a tile's dense gradients, and the parameters that a device reads, into the slot.

        `sources`: as in begin(); may contain only this tile's rows. `after`: events after which the gradients are
        ready.
        """
        to_host, _ = self._copy_streams()
        for event in after:
            to_host[event.device].wait_event(event)
        self.begin_fill(slot, engine, tile, sources, in_place=False)

    def equal(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Return whether the tensors of each pair have the same bytes. The first is in a slot, the second anywhere.

        The second tensors were produced by the streams that were current at begin(), and are compared on their own
        device.
        """
        to_host, _ = self._copy_streams()
        differ: dict[torch.device, torch.Tensor] = {}
        for staged, current in pairs:
            if not is_on_accelerator(current):
                if not torch.equal(_bits(staged), _bits(current)):
                    return False
                continue
            with on(to_host[current.device]):
                differs = (_bits(staged.to(current.device, non_blocking=True)) != _bits(current)).any()
                differ[current.device] = differs | differ.get(current.device, differs)
        for device, found in differ.items():
            answer = self._buffer(1, torch.bool)
            with on(to_host[device]):
                answer.copy_(found.view(1), non_blocking=True)
            wait_for(record_event(to_host[device]))
            if answer.item():
                return False
        return True

    @contextlib.contextmanager
    def on_separate_streams(self) -> Iterator[None]:
        """Make separate streams current, for a thread that runs a step concurrently with the program.

        So neither thread waits for work that the other queues from now on. On exit all work queued within is done.
        """
        with contextlib.ExitStack() as entered:
            for device in self._accelerators:
                if device not in self._separate_streams:
                    self._separate_streams[device] = torch.Stream(device)
                entered.enter_context(on(self._separate_streams[device]))
            try:
                yield
            finally:
                self.wait_for_copies()

    def wait_for_copies(self) -> None:
        """Return when everything queued on the current streams is done, such as the copies of run()."""
        for device in self._accelerators:
            wait_for(record_event(torch.accelerator.current_stream(device)))

    def feed_back(self) -> None:
        """Add what the step did not send to the residuals, once the step is complete."""
        try:
            self._sparse.feed_back()
        finally:
            self.forget()
            _join({device: streams[0] for device, streams in self._streams.items()})

    def forget(self) -> None:
        """Forget the selections of a step that is undone or over. The residuals do not change."""
        self._sparse.forget()
        self._supplied = NO_SUPPLIED

    def begin_fill(
        self,
        slot: StagingBuffer,
        engine: Engine,
        tile: int,
        sources: Mapping[int, GradSource],
        *,
        in_place: bool,
    ) -> None:
        """Begin to copy a tile's gradients, or their entries, and parameters that the device reads into the slot.

        `in_place`: leave out what the engine can read or write in place.
        """
        streams, _ = self._copy_streams()
        copies: list[tuple[Any, torch.Tensor, torch.Tensor]] = []  # stream, to, from
        grads_at, params_at = [], []
        for param, _, first, tile_first, n in engine.tiles.pieces_of(tile).tolist():
            source = self._image_source(param, sources)
            grad_at, param_at = _places_of(engine, param, source, first) if source and in_place else (0, 0)
            grads_at.append(grad_at)
            params_at.append(param_at)
            if source is None:
                continue
            here = slice(first, first + n)
            if source.param_is_read and not param_at:
                image = slot.param[4 * tile_first :].view(source.param.dtype)[:n]
                copies.append((streams.get(source.param.device), image, source.param[here]))
            if keeps_old(engine, param, source):
                if slot.before is None:
                    slot.before = self._buffer(len(slot.param), torch.uint8)
                old = slot.before[4 * tile_first :].view(source.param.dtype)[:n]
                copies.append((streams.get(source.param.device), old, source.param[here]))
            if not (source.topk or source.is_dropped or grad_at):
                image, begin = slot.grad[4 * tile_first :].view(source.grad_dtype)[:n], first - source.first
                copies.append((streams.get(source.grad.device), image, source.grad[begin : begin + n]))
        slot.in_place = (grads_at, params_at) if in_place else None
        entries = self._sparse.entries_of(engine, tile, sources, streams)
        slot.n_entries = 0 if entries is None else len(entries)
        if entries is not None:
            if len(slot.entries) < len(entries):
                slot.entries = self._buffer(1 << (len(entries) - 1).bit_length(), torch.int32)  # grows seldom
            copies.append((streams.get(entries.device), slot.entries[: len(entries)], entries))
        used = {stream.device: stream for stream, _, _ in copies if stream is not None}
        # Copies out of the slot come first. The stream waits for them, so that the host waits once, for all copies.
        for stream in used.values():
            for event in slot.under_way:
                stream.wait_event(event)
        if any(stream is None for stream, _, _ in copies):
            slot.wait()
        for stream, to, source_ in copies:
            _copy(to, source_, stream)
        slot.has_states = False
        if slot.states is not None:
            for device in self._supplied.devices_of(engine, tile).difference(used):
                used[device] = streams[device]
                for event in slot.under_way:
                    used[device].wait_event(event)
            slot.has_states = self._supplied.fill(slot.states, engine, tile, streams)
        if used:
            slot.under_way = [record_event(stream) for stream in used.values()]

    def _image_source(self, row: int, sources: Mapping[int, GradSource]) -> GradSource | None:
        """Return the source of a row whose gradient and parameter travel in images; None if its states are supplied."""
        return None if row in self._supplied.copies else sources.get(row)

    def begin_empty(self, slot: StagingBuffer, engine: Engine, tile: int, sources: Mapping[int, GradSource]) -> None:
        """Begin to copy a tile's parameters out of the slot. Does not change version counters: the step does."""
        if slot.in_place and all(slot.in_place[1]):
            return
        _, streams = self._copy_streams()
        used, copied = {}, list[tuple[GradSource, Any]]()
        pieces, watcher = engine.tiles.pieces_of(tile), engine.states.watcher
        for i, (param, _, first, tile_first, n) in enumerate(pieces.tolist()):
            source = self._image_source(param, sources)
            if source is None or source.is_dropped or (slot.in_place and slot.in_place[1][i]):
                continue
            stream = streams.get(source.param.device)
            image, to = slot.param[4 * tile_first :].view(source.param.dtype)[:n], source.param.data[first : first + n]
            old = to
            if slot.before is not None and keeps_old(engine, param, source):
                old = slot.before[4 * tile_first :].view(to.dtype)[:n]
            watcher.param_arrives(tile, pieces[i : i + 1], old, image)
            _copy(to, image, stream)
            if stream is not None:
                used[stream.device] = stream
                copied.append((source, stream.device))
        events = {device: record_event(stream) for device, stream in used.items()}
        for source, device in copied:
            source.copy_event = events[device]
        slot.under_way = [*events.values()]


def slots_for(engine: Engine) -> int:
    """Return how many slots the steps of an engine need: no more than it has tiles."""
    specs = engine.devices.specs
    in_memory = any(spec.backend == "ram" for spec in specs)
    for_threads = min(threads_used(), MOST_FOR_THREADS) if in_memory else 0
    return min(BUFFERS_PER_DEVICE * len(specs) + for_threads, len(engine.tiles))


class NoStaging(StagingRing):
    """The ring of a step without images: has no buffers and no streams."""

    def __init__(self) -> None:
        super().__init__(0, 0, pinned=False)

    def begin(self, sources: Mapping[int, GradSource], supplied: SuppliedStates) -> None:
        pass


NO_STAGING = NoStaging()


def _places_of(engine: Engine, row: int, source: GradSource, first: int) -> tuple[int, int]:
    """Return the addresses of a gradient and a parameter from element `first` on; 0: has to travel in the image."""
    is_dense = not (source.topk or source.is_dropped) and source.grad.dtype is source.grad_dtype
    grad_at = _address(source.grad, first - source.first) if is_dense else 0
    return grad_at, 0 if engine.states.watcher.compares(row) else _address(source.param, first)


def _address(t: torch.Tensor, first: int) -> int:
    """Return the address of an element of a 1-D tensor; 0 if the tensor is not in host memory."""
    return 0 if is_on_accelerator(t) else t.data_ptr() + first * t.itemsize


def keeps_old(engine: Engine, row: int, source: GradSource) -> bool:
    """Return whether a parameter's old values are copied to the host, too, for a watcher to compare with the new."""
    return is_on_accelerator(source.param) and engine.states.watcher.compares(row)


class StagedTiles:
    """The travel of one step's tiles through the slots of a ring: out with gradients, back with parameters."""

    def __init__(
        self,
        ring: StagingRing,
        engine: Engine,
        *,
        on_used: Callable[[int, Mapping[int, GradSource]], None] | None = None,
        on_pulled: Callable[[int], None] | None = None,
        idle_work: Callable[[], None] = nothing,
    ) -> None:
        """`on_used` is called with a tile and its sources once its gradients were used. Others: see run()."""
        self._ring, self._engine, self._on_used, self._on_pulled = ring, engine, on_used, on_pulled
        self._idle_work = idle_work
        self.early_buffers: Mapping[int, StagingBuffer] = {}
        self._sources: dict[int, Mapping[int, GradSource]] = {}  # by tile, then by row
        self._todo: dict[int, deque[int]] = {}  # by device: tiles that have not begun to travel
        self._in_flight_on: Counter[int] = Counter()  # by device: number of tiles in flight
        self._free, self._travelling = deque(ring.slots), deque[tuple[int, StagingBuffer]]()
        self._pushed: dict[int, StagingBuffer] = {}

    def add(self, tile: int, sources: Mapping[int, GradSource]) -> None:
        """Add a tile to push and pull. `sources`: by row; has at least the tile's parameters with a gradient."""
        self._sources[tile] = sources
        self._todo.setdefault(self._engine.tiles.device_of(tile), deque()).append(tile)

    def adopt_pushed(self, buffers: Mapping[int, StagingBuffer], sources: Mapping[int, GradSource]) -> None:
        """Add the tiles that were pushed before: see `early_buffers` of StagingRing.run()."""
        self.early_buffers, self._pushed = buffers, dict(buffers)
        self._sources.update(dict.fromkeys(buffers, sources))
        native, updated = self._engine.native, set[int]()
        while len(updated) < len(buffers) and native.would_pull:
            updated.add(native.pull())
        for tile in [tile for tile in buffers if tile in updated]:  # pull() returns them in any order
            self._pull_slot(tile)

    def forget(self) -> None:
        """Drop everything that keeps gradients alive: the step is over."""
        self._on_used = self._on_pulled = None
        for kept in (self._sources, self._todo, self._pushed, self._travelling):
            kept.clear()

    def advance(self, *, wait: bool) -> bool:
        """Make one transfer, and return True. `wait`: block until a transfer is possible.

        Returns False if nothing is left to do, or, without `wait`, if nothing can be done yet.
        """
        while self._todo and self._free:
            # The device with the fewest tiles in flight goes first, so that a slow one cannot take all slots.
            owner = min(self._todo, key=lambda d: self._in_flight_on[d])
            tile, slot = self._todo[owner].popleft(), self._free.popleft()
            if not self._todo[owner]:
                del self._todo[owner]
            self._in_flight_on[owner] += 1
            in_place = self._engine.native.takes_in_place
            self._ring.begin_fill(slot, self._engine, tile, self._sources[tile], in_place=in_place)
            self._travelling.append((tile, slot))
        if self._travelling or self._pushed:
            self._idle_work()
        while not self._transfer(wait=wait and not self._travelling):
            if not (wait and self._travelling):
                return False
            pause()
        return True

    def _transfer(self, *, wait: bool) -> bool:
        """Push the tile whose gradients have arrived, or pull an updated one. Returns whether there was one."""
        if self._travelling and self._travelling[0][1].arrived():
            self._push_slot(*self._travelling.popleft())
        elif self._pushed and (wait or self._engine.native.would_pull):
            self._pull_slot(self._engine.native.pull())
        else:
            return False
        return True

    def _push_slot(self, tile: int, slot: StagingBuffer) -> None:
        states = slot.states.data_ptr() if slot.has_states and slot.states is not None else 0
        images = slot.grad.data_ptr(), slot.param.data_ptr()
        how = Push(images=images, in_place=slot.in_place, entries=slot.words(), states=states)
        self._engine.native.push(tile, how)
        self._pushed[tile] = slot
        if self._on_used and not slot.has_grads_in_place:
            self._on_used(tile, self._sources[tile])

    def _pull_slot(self, tile: int) -> None:
        slot, sources = self._pushed.pop(tile), self._sources.pop(tile)
        self._ring.begin_empty(slot, self._engine, tile, sources)
        if self._on_used and slot.has_grads_in_place:
            self._on_used(tile, sources)
        if tile not in self.early_buffers:
            self._in_flight_on[self._engine.tiles.device_of(tile)] -= 1
            self._free.append(slot)
        if self._on_pulled:
            self._ring.join_back()
            self._on_pulled(tile)


def _bits(t: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers: compared as floats, NaN would differ from itself, and 0 would equal -0."""
    return t.view({2: torch.int16, 4: torch.int32}[t.itemsize])


def _copy(to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
    """Copy 1-D tensors of equal length, on an accelerator's stream, or on the CPU if that is None."""
    if stream is None and to.dtype is source.dtype and to.is_contiguous() and source.is_contiguous():
        # Not copy_(): after each piece the threads of OpenMP would go on spinning, which took ten times the CPU time of
        # the copies.
        ctypes.memmove(to.data_ptr(), source.data_ptr(), to.nbytes)
        return
    with on(stream):
        to.copy_(source, non_blocking=stream is not None)


def _join(streams: Streams) -> None:
    """Make the current stream of each device wait for the given one."""
    for device, stream in streams.items():
        torch.accelerator.current_stream(device).wait_stream(stream)
