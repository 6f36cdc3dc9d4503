"""Travel: everything that moves the gradients of one step to the devices, and its parameters back.

A tile travels in one of these ways:

in place        the engine reads gradients and writes parameters where they lie
as an image     through a staging buffer (staging.py), together with states that the accelerator supplies
in two passes   the tiles of a matrix, which is orthogonalized in between (two_passes.py)

Parameters with states on the accelerator need no tile, and are updated there (accelerator_updates.py).

Parameters whose updates ranks share then travel to the other ranks (all_gather.py). One sequence serves all steps,
within step() and after it:

    begin, start, run, send, finish; then complete or, through undo.py, undo

A new way for tiles is one part here. A part that a step does not need is an object that does nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..engine.engine import Engine
from .accelerator_updates import NO_UPDATES, AcceleratorUpdates
from .all_gather import ParamAllGather
from .spec import StepSpec
from .staging import NO_BUFFERS, StagingBuffer, StagingRing
from .supplied_states import SuppliedStates
from .two_passes import OnePass


@dataclass(eq=False)
class Travel:
    """The ways by which gradients and parameters of one step move.

    Has all memory and streams, so that little can fail once ranks exchange parameters. LiveStep decides when each
    method is called: nothing here begins, keeps or undoes the step.
    """

    engine: Engine
    spec: StepSpec
    tiles: np.ndarray[Any, Any]  # uint32, in flow order
    supplied: SuppliedStates  # states that the accelerator gives to tiles
    images: list[int]  # tiles that travel through staging buffers
    ring: StagingRing  # the staging buffers
    passes: OnePass  # the order of the tiles; TwoPasses, if the step has matrices
    gather: ParamAllGather  # of the parameters whose updates the ranks share
    accelerated: AcceleratorUpdates = NO_UPDATES  # the updates on the accelerator
    ended: threading.Event = field(default_factory=threading.Event)  # set when nothing more arrives: see end()

    def __post_init__(self) -> None:
        self._not_pulled: set[int] = self.pushed_by_run  # tiles whose parameters are still in their images
        self._not_received: Counter[int] = Counter()  # by row: number of buckets awaited from other ranks
        self._changed = threading.Condition()  # notified when `ended`, `_not_pulled` or `_not_received` changes

    # ---- before the step begins ------------------------------------------------------

    @property
    def pushed_by_run(self) -> set[int]:
        """The tiles that run() pushes."""
        return {*self.images, *self.passes.tiles.tolist()}

    @property
    def may_begin(self) -> np.ndarray[Any, Any]:
        """The tiles, ascending, that may begin in backward: no states from the accelerator, and a single pass."""
        return np.setdiff1d(self.tiles, np.concatenate([self.supplied.tiles, self.passes.tiles]))

    @property
    def updates_anything(self) -> bool:
        """Whether this rank updates any parameter in the step."""
        return bool(len(self.tiles)) or self.accelerated.has_updates

    @property
    def shares_updates(self) -> bool:
        """Whether ranks share the updates of some parameters, and exchange these."""
        return bool(self.gather.buckets)

    @property
    def can_vote_with_params(self) -> bool:
        """Whether ranks can vote on the step as they exchange its parameters, unless it was begun in backward."""
        return self.gather.can_vote and not self.spec.orthogonal

    def reorder(self, order: np.ndarray[Any, Any]) -> None:
        """Set the order of the tiles with one pass, `order` (uint32); matrices keep theirs."""
        places = {tile: place for place, tile in enumerate(order.tolist())}
        self.images.sort(key=lambda tile: places.get(tile, len(places)))
        self.passes.begin_with(order[~np.isin(order, self.passes.tiles)])

    def tables(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the step's table, its constants and its tiles for Engine.begin(), second passes included."""
        return *self.passes.tables(self.images), self.passes.in_order

    def begin(self) -> None:
        """Get the streams ready, on the thread whose current streams produce gradients. May run out of memory."""
        self.ring.begin(self.passes.sources, self.supplied)

    # ---- the step --------------------------------------------------------------------

    def start(self, tiles: np.ndarray[Any, Any]) -> None:
        """Push `tiles` (uint32) but those that run() pushes, and get the accelerator's updates ready to be queued."""
        pushed_by_run = self.pushed_by_run
        for tile in tiles.tolist():
            if tile not in pushed_by_run:
                self.engine.native.push(tile)
        self.accelerated.begin(timed=self.engine.states.timeline.is_traced)

    def queue_accelerator(self) -> list[int]:
        """Queue all updates on the accelerator, after start(), and drop their gradients.

        Returns the rows of their parameters: nothing has to wait for these.
        """
        self.accelerated.queue_all()
        rows = self.accelerated.release_scratch()
        for row in rows:
            self.spec.sources.pop(row).copy_back()
        return rows

    def begin_exchange(
        self,
        *,
        descending: bool = False,
        received: Callable[[list[int]], None] | None = None,
        awaits_vote: bool = False,
    ) -> None:
        """Begin to exchange parameters with other ranks; finish() has to be called then. See ParamAllGather.begin()."""
        copies = {row: source for row, source in self.spec.sources.items() if source.param_and_copy}
        self.gather.begin(self.arrived, copies, descending=descending, received=received, awaits_vote=awaits_vote)

    def run(
        self,
        on_pulled: Callable[[int], None] | None = None,
        early_buffers: Mapping[int, StagingBuffer] = NO_BUFFERS,
    ) -> None:
        """Return when the parameters of images have arrived, all passes are made, and the accelerator's updates queued.

        Meanwhile parameters are sent to other ranks as they arrive. `on_pulled`: called with each tile whose parameters
        have arrived, instead of note_pulled(). `early_buffers`: see StagingRing.run().
        """
        if not self.images or self.shares_updates:  # the first advance() sends parameters without tiles
            self.accelerated.queue_all()
        if self.shares_updates or len(self.passes.tiles):
            on_pulled = on_pulled or self.note_pulled
        self.passes.run(self.ring, on_pulled, early_buffers, self.accelerated.queue_next)
        self.accelerated.queue_all()

    def send(self) -> None:
        """Send all parameters that other ranks wait for, each as soon as it has arrived."""
        if self.updates_anything:
            self.gather.advance(wait=True)

    def finish(self) -> None:
        """Send what other ranks still wait for, also after a failure, and receive what they send."""
        self.passes.finish()
        self.gather.finish()

    # ---- parameters arrive -----------------------------------------------------------

    def arrived(self, tiles: np.ndarray[Any, Any], *, wait: bool) -> bool:
        """Return whether the new parameters of these tiles (uint32) have arrived; the tiles were pushed. Needs no lock.

        `wait`: block until they have arrived, or the step has `ended`. Raises CSDError if the step failed or is over.
        """
        if missing := self._not_pulled.intersection(tiles.tolist() if self._not_pulled else ()):
            if not wait:
                return False
            with self._changed:
                self._changed.wait_for(lambda: self.ended.is_set() or missing.isdisjoint(self._not_pulled))
        return self.engine.native.params_ready(self.passes.named(tiles), wait=wait)

    def note_pulled(self, tile: int) -> None:
        """Note that all copies from a tile's image to its parameters are queued, and send what is ready to be sent."""
        with self._changed:
            self._not_pulled.discard(tile)
            self._changed.notify_all()
        if not self.passes.exchange:  # else its collectives come first
            self.gather.advance(wait=False)

    def await_buckets(self) -> None:
        """Note that other ranks' parts of the parameters will arrive after step()."""
        self._not_received.update(row for bucket in self.gather.buckets for row in bucket.rows)

    def note_received(self, rows: Sequence[int]) -> None:
        """Note that a bucket with other ranks' parts of these rows has arrived."""
        with self._changed:
            self._not_received.subtract(rows)
            self._changed.notify_all()

    def wait_for_others(self, rows: Sequence[int]) -> None:
        """Return when all other ranks' parts of these rows have arrived, or the step has `ended`. Needs no lock."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended.is_set() or not any(self._not_received[row] for row in rows))

    def end(self) -> None:
        """Note that nothing more arrives: a thread has landed the step, or it has failed and is undone."""
        with self._changed:
            self.ended.set()
            self._changed.notify_all()

    # ---- the end ---------------------------------------------------------------------

    def drop(self, rows: Collection[int]) -> None:
        """Take rows out of the step that get no gradient after all. Call this before any of their tiles is pushed."""
        self.spec.steps[[*rows]] -= 1
        self.spec.table["grad"][[*rows]] = 0
        self.supplied.updated = self.supplied.updated.difference(rows)

    def complete(self) -> None:
        """Note that the step is complete, and update the residuals of Top-K."""
        self.supplied.keep()
        self.accelerated.complete()
        self.accelerated.commit_bytes = self.supplied.nbytes
        self.ring.feed_back()
