"""Of a guess: tiles that travel by images, such as those of parameters on an accelerator."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from typing import Any

import torch

from ..engine.engine import Engine
from ..params.grad_source import GradSource
from ..params.state_map import StateMap
from ..step.prepare import PreparedStep
from ..step.staging import StagingBuffer

IMAGE_BYTES = 4  # per element of a tile


class EarlyImages:
    """Gradients go to `hold`, which is pinned, as they become final, and new parameters stay there until step().

    The copies are queued on the ring's streams, behind what makes the gradients. A thread hands each tile to the engine
    when its copies have arrived: backward, which is far ahead of the accelerator, does not wait for them. One thread
    for all guesses of an optimizer, so that `hold` is used again only when nothing is on its way there any more.
    """

    def __init__(self, engine: Engine, state_map: StateMap, step: PreparedStep, brings: Executor) -> None:
        """`step`: as of Guess. `brings`: one thread."""
        self._engine, self._state_map, self._step, self._brings = engine, state_map, step, brings
        self.tiles: frozenset[int] = frozenset(step.images)
        self._held: dict[int, StagingBuffer] = {}
        self._read: dict[int, torch.Tensor] = {}  # by tile: its parameters, of codes, before they were updated there
        self.brought: list[Future[None]] = []  # each is done when a tile has its copies, and was pushed or given up
        self._goes_on = True
        self._pushing = threading.RLock()  # the collector may drop an optimizer on the thread that pushes
        if step.ring:
            step.ring.begin(step.prepared)

    def can(self, tile: int) -> bool:
        """Is all that a device reads of this tile in its image? Of codes, parameters in host memory are not."""
        rows = self._engine.pieces_of(tile)["param"]
        return not (self._engine.coded[tile] and self._step.table["param"][rows].any())

    def hold_bytes(self, tile: int) -> int:
        """For the gradients and the new parameters; where a device reads parameters, for what it has read, too."""
        images = 3 if self._reads(tile) else 2
        return images * IMAGE_BYTES * self._engine.elems_of(tile)

    def _reads(self, tile: int) -> bool:
        sources = (self._step.prepared.get(row) for row in self._engine.pieces_of(tile)["param"].tolist())
        return any(source is not None and source.is_read for source in sources)

    def push(self, tile: int, grads: Mapping[int, torch.Tensor], after: Iterable[Any], hold: torch.Tensor) -> None:
        """Begins to. `grads`: by row. `after`: events, after which they are there. `hold`: memory of hold_bytes()."""
        assert self._step.ring
        grad, param, *read = hold.view(-1, IMAGE_BYTES * self._engine.elems_of(tile))
        slot = self._held[tile] = StagingBuffer(grad, param, torch.empty(0, dtype=torch.int32, device="cpu"))
        if read:
            self._read[tile] = read[0]
        sources = {row: self._source(row, grad) for row, grad in grads.items()}
        self._step.ring.fill(slot, self._engine, tile, sources, after)
        try:
            self.brought.append(self._brings.submit(self._bring, tile, slot, sources))
        except RuntimeError:  # the main thread has come to its end, and executors take nothing more
            self._bring(tile, slot, sources)

    def _source(self, row: int, grad: torch.Tensor) -> GradSource:
        return self._state_map.by_index[row].source(grad, None)

    def _bring(self, tile: int, slot: StagingBuffer, _: object) -> None:
        """Holds the gradients until they have been copied."""
        slot.wait()
        if tile in self._read:
            self._read[tile].copy_(slot.param)
        with self._pushing:
            if self._goes_on:
                self._engine.push(tile, slot.grad.data_ptr(), slot.param.data_ptr())

    def wait(self) -> None:
        """Returns when all that was pushed is with the engine. Raises CSDError."""
        for future in self.brought:
            future.result()

    def unchanged(self, step: PreparedStep) -> bool:
        """Are all gradients what was pushed, byte by byte, and the parameters what was read? Raises CSDError."""
        if not self._step.ring:
            return True
        self.wait()
        self._step.ring.begin(step.prepared)  # its streams wait for the gradients of now
        return self._step.ring.equal(self._pairs(step))

    def _pairs(self, step: PreparedStep) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for tile, slot in self._held.items():
            for row, _, first, tile_first, n in self._engine.pieces_of(tile).tolist():
                if row not in self._step.prepared:
                    continue
                here, image = slice(first, first + n), IMAGE_BYTES * tile_first
                # A strided gradient is copied there already: what is copied here nobody waits for.
                source = step.prepared.get(row) or self._source(row, step.grads[row])
                yield slot.grad[image:].view(source.grad.dtype)[:n], source.grad[here]
                if source.is_read:
                    yield self._read[tile][image:].view(source.param.dtype)[:n], source.param[here]

    def held(self, order: Iterable[int]) -> dict[int, StagingBuffer]:
        """What was pushed, in this order of tiles."""
        return {tile: self._held[tile] for tile in order if tile in self._held}

    def give_up(self) -> None:
        """Nothing more is pushed. What was queued still runs."""
        with self._pushing:
            self._goes_on = False
