"""Gradients that are freed in backward: the engine borrows each until its tiles are updated."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ..accelerator import is_on_accelerator
from ..bindings import AS_PUSHED, Push
from ..params.grad_source import GradSource
from ..params.strides import flat
from ..step.countdown import Countdown
from ..step.live import LiveStep, Phase
from ..step.staging import StagedTiles


class Lent(NamedTuple):
    """Gradients that the engine reads until the parameters of `tiles` have arrived."""

    tiles: np.ndarray[Any, Any]  # uint32
    grads: list[torch.Tensor]
    nbytes: int


class GradPart(NamedTuple):
    """A contiguous gradient, or a contiguous part from element `first` of the parameter on."""

    grad: torch.Tensor
    first: int

    @property
    def address(self) -> int:
        """The address at which the whole gradient would begin."""
        return self.grad.data_ptr() - self.first * self.grad.element_size()


class LentGradients:
    """The gradients of one step that runs in backward.

    If a tile still lacks gradients, this gradient's part of the tile is copied, so that the gradient can be freed.
    """

    def __init__(self, live: LiveStep, max_bytes: int) -> None:
        """`live`: not begun. `max_bytes`: of gradients that may be in flight."""
        engine, travel = live.engine, live.travel
        self._live, self._travel, self._engine, self._max_bytes = live, travel, engine, max_bytes
        self._pieces = engine.tiles.by_param
        self._parts: dict[int, dict[int, GradPart]] = {}  # by incomplete tile, then by row: gradients that have arrived
        self._lent: deque[Lent] = deque()
        self._bytes = 0  # of the gradients in _lent, and of images still in use
        self._images = frozenset(travel.images)  # tiles that travel through staging buffers
        # The exchange with other ranks asks which parameters have come back.
        on_pulled = travel.note_pulled if travel.shares_updates else None
        self._staged = StagedTiles(travel.ring, engine, on_used=self._note_used, on_pulled=on_pulled)
        self._in_use: dict[int, int] = {}  # by image in flight: bytes of its gradients
        self._missing = np.zeros(len(engine.tiles), np.int64)  # by tile: number of its gradients
        has_grad = live.spec.table["grad"][self._pieces.all["param"]] != 0
        np.add.at(self._missing, self._pieces.all["tile"][has_grad], 1)
        self._countdown = Countdown(self._missing, ())

    def begin(self) -> None:
        """Begin the step. Raises what LiveStep.begin() raises."""
        self._live.begin(Phase.OPEN, order=AS_PUSHED, kept_alive=self._lent)
        self._countdown = Countdown(self._missing, self._live.tiles.tolist())

    @property
    def pushed_elems(self) -> int:
        """The number of elements of the tiles pushed so far."""
        return sum(map(self._engine.tiles.elems_of, self._countdown.pushed))

    def rank(self) -> np.ndarray[Any, Any]:
        """Return a tile_rank for the next step: see Countdown.rank()."""
        return self._countdown.rank()

    def take(self, row: int, grad: torch.Tensor) -> None:
        """Take a contiguous gradient, and push the tiles that are now complete. Raises what a step raises."""
        accelerated = self._travel.accelerated
        if row in accelerated.rows:
            accelerated.launch_one(row, grad, timed=self._engine.states.timeline.is_traced)
            self._hand_over(row, None)
        else:
            self._hand_over(row, grad)

    def _hand_over(self, row: int, grad: torch.Tensor | None) -> None:
        """Push the tiles that are now complete. For each incomplete tile keep a copy of its part of the gradient.

        `grad` None: the accelerator has used it already.
        """
        pieces = self._pieces.of(row)
        self._countdown.arrive(pieces["tile"].tolist())
        complete: dict[int, dict[int, GradPart]] = {}
        for _, tile, first, _, n in pieces.tolist():
            lacks = self._countdown.lacks(tile)
            parts = self._parts.pop(tile, {})
            if grad is not None:
                copies = lacks and n < grad.numel()
                parts[row] = GradPart(flat(grad)[first : first + n].clone(), first) if copies else GradPart(grad, 0)
            (self._parts if lacks else complete)[tile] = parts
        if self._images and grad is not None and is_on_accelerator(grad):
            self._travel.ring.wait_for_current(grad.device)
        for tile, parts in complete.items():
            self._push(tile, parts)
        read = [tile for tile in complete if tile not in self._images]
        if grad is not None and read:
            others = [part.grad for tile in read for other, part in complete[tile].items() if other != row]
            lent = [grad, *others]
            self._lent.append(Lent(np.array(read, np.uint32), lent, sum(part.nbytes for part in lent)))
            self._bytes += self._lent[-1].nbytes

    def _push(self, tile: int, parts: dict[int, GradPart]) -> None:
        """Push a tile with the gradients `parts`, by row; its other parameters have no gradient."""
        pieces = self._engine.tiles.pieces_of(tile)
        if tile in self._images:
            self._staged.add(tile, self._sources_of(pieces["param"].tolist(), parts))
            nbytes = [n * parts[row].grad.element_size() for row, _, _, _, n in pieces.tolist() if row in parts]
            self._in_use[tile] = sum(nbytes)
            self._bytes += self._in_use[tile]
        else:
            rows = pieces["param"].tolist()
            self._engine.native.push(tile, Push(grads=[parts[row].address if row in parts else 0 for row in rows]))
        self._countdown.note_pushed(tile)

    def _sources_of(self, rows: list[int], parts: dict[int, GradPart]) -> dict[int, GradSource]:
        """Return the gradient sources, by row, of a tile that travels through a staging buffer."""
        prepared, sources = self._travel.spec.sources, {}
        for row in rows:
            if row in parts:
                part = parts[row]
                sources[row] = dataclasses.replace(prepared[row], grad=flat(part.grad), first=part.first)
            elif row in prepared:
                sources[row] = dataclasses.replace(prepared[row], is_dropped=True)
        return sources

    def _note_used(self, tile: int, sources: Mapping[int, GradSource]) -> None:
        for source in sources.values():
            source.release()
        self._bytes -= self._in_use.pop(tile)

    def free_used(self) -> float:
        """Free gradients that were used; wait while more than `max_bytes` are in flight.

        Returns the seconds that this took. Raises CSDOSError.
        """
        began, made_progress = time.perf_counter(), True
        while made_progress:
            wait = self._bytes > self._max_bytes
            made_progress = self._staged.advance(wait=wait)
            if not made_progress and self._lent and self._engine.native.params_ready(self._lent[0].tiles, wait=wait):
                self._bytes -= self._lent.popleft().nbytes
                made_progress = True
        return time.perf_counter() - began

    def push_rest(self) -> None:
        """Push the tiles that lack gradients because some parameters get none. Raises what a step raises."""
        for tile in self._countdown.left:
            self._push(tile, self._parts.get(tile, {}))
        while self._staged.advance(wait=True):
            pass
        self.join()

    def join(self) -> None:
        """Make the current streams wait for copies to parameters."""
        self._travel.ring.join()

    def clear(self) -> None:
        """Free all gradients. Call this when the step is over and the engine no longer reads them."""
        self._lent.clear()
        self._parts.clear()
        self._staged.forget()
