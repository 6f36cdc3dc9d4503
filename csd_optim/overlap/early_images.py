"""The tiles of a guess that travel through staging buffers ("images"), such as those of accelerator parameters."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from typing import Any

import torch

from ..bindings import Push
from ..engine.engine import Engine
from ..params.grad_source import GradSource
from ..params.state_map import StateMap
from ..step.spec import StepSpec
from ..step.staging import StagingBuffer, keeps_old
from ..step.travel import Travel

IMAGE_BYTES = 4  # per element of a tile


class EarlyImages:
    """Copies final gradients to `hold`, pinned memory, where the new parameters also stay until step().

    The copies are queued on the ring's streams, behind the kernels that produce the gradients. A background thread
    pushes each tile to the engine when its copies have arrived, because backward runs far ahead of the accelerator and
    must not wait for them. All guesses of an optimizer share one thread, so that `hold` is reused only when no copy to
    it is in flight.
    """

    def __init__(self, engine: Engine, state_map: StateMap, travel: Travel, pusher: Executor) -> None:
        """`travel`: as in Guess. `pusher`: an executor with one thread."""
        self._engine, self._state_map, self._travel, self._pusher = engine, state_map, travel, pusher
        self.tiles: frozenset[int] = frozenset(travel.images)
        self._buffers: dict[int, StagingBuffer] = {}
        self._old_params: dict[int, torch.Tensor] = {}  # by tile: old parameters, if a device reads them (8-bit states)
        self.push_futures: list[Future[None]] = []  # by tile: done when pushed or given up
        self._active = True
        self._push_lock = threading.RLock()  # reentrant: the garbage collector may drop an optimizer on this thread

    def that_fit(self, tiles: Iterable[int], nbytes: int) -> list[int]:
        """Return `tiles` without images that cannot be pushed, or do not fit into `hold`, of `nbytes`."""
        found = []
        for tile in tiles:
            if tile in self.tiles:
                if not self._can_push(tile) or self.hold_bytes(tile) > nbytes:
                    continue
                nbytes -= self.hold_bytes(tile)
            found.append(tile)
        return found

    def _can_push(self, tile: int) -> bool:
        """Return whether the image of this tile contains everything that a device reads.

        False for 8-bit states if some parameters of the tile are in host memory.
        """
        rows = self._engine.tiles.pieces_of(tile)["param"]
        return not (self._engine.tiles.coded[tile] and self._travel.spec.table["param"][rows].any())

    def hold_bytes(self, tile: int) -> int:
        """Return a tile's bytes in `hold`: gradients, new parameters, and old ones for a device or watcher to read."""
        images = 2 + self._is_read(tile) + self._keeps_old(tile)
        return images * IMAGE_BYTES * self._engine.tiles.elems_of(tile)

    def _sources_in(self, tile: int) -> list[tuple[int, GradSource]]:
        rows, sources = self._engine.tiles.pieces_of(tile)["param"].tolist(), self._travel.spec.sources
        return [(row, sources[row]) for row in rows if row in sources]

    def _is_read(self, tile: int) -> bool:
        return any(source.param_is_read for _, source in self._sources_in(tile))

    def _keeps_old(self, tile: int) -> bool:
        return any(keeps_old(self._engine, row, source) for row, source in self._sources_in(tile))

    def push(self, tile: int, grads: Mapping[int, torch.Tensor], after: Iterable[Any], hold: torch.Tensor) -> None:
        """Begin to copy and push a tile.

        `grads`: by row. `after`: events after which the gradients are ready. `hold`: hold_bytes(tile) bytes.
        """
        grad, param, *others = hold.view(-1, IMAGE_BYTES * self._engine.tiles.elems_of(tile))
        slot = self._buffers[tile] = StagingBuffer(grad, param, torch.empty(0, dtype=torch.int32, device="cpu"))
        if self._keeps_old(tile):
            slot.before = others.pop()
        if others:
            self._old_params[tile] = others.pop()
        sources = {row: self._source(row, grad) for row, grad in grads.items()}
        self._travel.ring.fill(slot, self._engine, tile, sources, after)
        try:
            self.push_futures.append(self._pusher.submit(self._push_when_copied, tile, slot, sources))
        except RuntimeError:  # at interpreter shutdown executors take no more work
            self._push_when_copied(tile, slot, sources)

    def _source(self, row: int, grad: torch.Tensor) -> GradSource:
        return self._state_map.by_index[row].source(grad, None)

    def _push_when_copied(self, tile: int, slot: StagingBuffer, _: object) -> None:
        """Wait for the copies and push the tile. The last argument keeps the gradients alive until then."""
        slot.wait()
        if tile in self._old_params:
            self._old_params[tile].copy_(slot.param)
        with self._push_lock:
            if self._active:
                self._engine.native.push(tile, Push(images=(slot.grad.data_ptr(), slot.param.data_ptr())))

    def wait(self) -> None:
        """Return when the engine has all tiles that were pushed. Raises CSDError."""
        for future in self.push_futures:
            future.result()

    def unchanged(self, spec: StepSpec) -> bool:
        """Return whether the gradients pushed and the parameters read still have the same bytes.

        Raises CSDError.
        """
        self.wait()
        ring = self._travel.ring
        ring.begin(spec.sources, self._travel.supplied)  # the ring's streams wait for the current gradients
        return ring.equal(self._pairs(spec))

    def _pairs(self, spec: StepSpec) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for tile, slot in self._buffers.items():
            for row, _, first, tile_first, n in self._engine.tiles.pieces_of(tile).tolist():
                if row not in self._travel.spec.sources:
                    continue
                here, image = slice(first, first + n), IMAGE_BYTES * tile_first
                # `spec` already has a contiguous copy of a strided gradient. Nothing would wait for a copy made here.
                source = spec.sources.get(row) or self._source(row, spec.grads[row])
                yield slot.grad[image:].view(source.grad.dtype)[:n], source.grad[here]
                if source.param_is_read:
                    yield self._old_params[tile][image:].view(source.param.dtype)[:n], source.param[here]

    def buffers(self, order: Iterable[int]) -> dict[int, StagingBuffer]:
        """Return the buffers of the tiles that were pushed, by tile, in the order of `order`."""
        return {tile: self._buffers[tile] for tile in order if tile in self._buffers}

    def stop(self) -> None:
        """Stop pushing tiles. Copies that are queued still run."""
        with self._push_lock:
            self._active = False
