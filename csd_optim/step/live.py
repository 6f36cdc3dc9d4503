"""One step under way: its phases, how it is kept or undone, and which of its tiles still lack gradients.

Whoever drives a step decides only when it does what, and carries the gradients to the engine.

    READY ── begin ──> GUESS ── confirm ──> STEP ── land ──> LANDED ── keep ──> KEPT
      │                OPEN  ── request ──>  │               (at once; after a vote in run(); or once ranks have met)
      └──────────────── begin ───────────────┘
    undo():       READY, GUESS, OPEN, STEP ──> UNDONE; with ranks that meet later ──> FAILED
    take_back():  LANDED, FAILED ──> UNDONE

For these steps, only this module and undo.py call begin(), push() by the table, release(), finish() and undo_last() of
the engine.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch

from ..bindings import PASS_2, SAME_ORDER, TO_AND_FRO
from ..distributed.ranks import all_ranks_or_none
from ..engine.engine import Engine
from ..errors import CSDError, CSDTornError
from ..grad_modes import no_autograd
from ..signals import defer_signals
from ..store.format import Record
from .all_gather import ParamAllGather
from .prepared import PreparedStep
from .progress import Progress
from .spec import StepSpec
from .staging import NOTHING, StagingBuffer
from .undo import Undo, undo_states

NEVER = np.iinfo(np.int64).max  # rank of a tile of which nobody knows when it is needed


class Countdown:
    """Which tiles of a step still lack gradients, and in which order they were pushed.

    Counts units of which each tile needs a number, such as pieces or elements. Python integers: most gradients have few
    tiles, for which NumPy takes longer.
    """

    def __init__(self, needed: np.ndarray[Any, Any], tiles: Iterable[int]) -> None:
        """`needed`: units by tile of the engine, int64. `tiles`: those of the step, in flow order."""
        self._missing: list[int] = needed.tolist()
        self._left = dict.fromkeys(tiles)
        self.pushed: list[int] = []

    def arrive(self, tiles: Sequence[int], units: Iterable[int] = repeat(1)) -> list[int]:
        """Count what has arrived: `units` of each of these tiles. Returns complete(tiles)."""
        for tile, n in zip(tiles, units, strict=False):
            self._missing[tile] -= n
        return self.complete(tiles)

    def complete(self, tiles: Iterable[int]) -> list[int]:
        """Return those of these tiles, each once, that lack nothing and were not pushed yet."""
        return [*dict.fromkeys(tile for tile in tiles if not self._missing[tile] and tile in self._left)]

    def lacks(self, tile: int) -> bool:
        return bool(self._missing[tile])

    def note_pushed(self, tile: int) -> None:
        del self._left[tile]
        self.pushed.append(tile)

    @property
    def left(self) -> list[int]:
        """The tiles of the step that were not pushed yet, in flow order."""
        return [*self._left]

    def rank(self) -> np.ndarray[Any, Any]:
        """Return a tile_rank for the next step, whose gradients are expected in the same order: int64, by tile."""
        rank = np.full(len(self._missing), NEVER)
        rank[self.pushed] = np.arange(len(self.pushed))
        return rank


class Phase(Enum):
    """The phase of a step, and whether states and parameters are those before it (old) or after it (new)."""

    READY = auto()  # it has not begun: both old
    GUESS = auto()  # under way, not requested: both old, as new parameters are held back
    OPEN = auto()  # under way, not requested: parameters become new one after another
    STEP = auto()  # under way, requested by step(): likewise
    LANDED = auto()  # complete here: both new; if ranks have not met since, they may take it back
    FAILED = auto()  # states old, parameters mixed, or written in part, until the ranks meet
    KEPT = auto()  # both new
    UNDONE = auto()  # both old, except for what Progress.undoing has still to restore


class LiveStep:
    """One step. Call its methods with the engine's lock, except push(), arrived(), keep(), undo() and take_back()."""

    def __init__(
        self, progress: Progress, engine: Engine, step: PreparedStep, record: Record | None, *, meets: bool = False
    ) -> None:
        """`record`: for its commit. `meets`: ranks agree on it only after it has ended here: see together.py."""
        self.progress: Progress = progress
        self.engine: Engine = engine
        self.meets: bool = meets
        self._record = record
        self.step: PreparedStep = step
        self.phase: Phase = Phase.READY
        self.tiles: np.ndarray[Any, Any] = step.tiles  # uint32, in flow order; begin() adds those of the committer
        self.ended: threading.Event = threading.Event()  # set if a thread has landed it, and undone it if that failed
        self._had_tiles = False  # it has ended, and the engine has begun it
        self._not_pulled: set[int] = self._carried  # tiles whose parameters were not copied back from their images yet
        self._not_received: Counter[int] = Counter()  # by row: buckets of other ranks' parts that are still awaited
        self._changed = threading.Condition()  # notified when `ended` or one of these two changes

    @property
    def spec(self) -> StepSpec:
        return self.step.spec

    @property
    def _carried(self) -> set[int]:
        """The tiles that carry() pushes."""
        return {*self.step.images, *(self.step.passes.tiles.tolist() if self.step.passes else ())}

    # ---- begin -----------------------------------------------------------------------

    def begin(
        self,
        phase: Phase = Phase.STEP,
        *,
        tiles: np.ndarray[Any, Any] | None = None,
        order: int | None = None,
        kept_alive: object = None,
        carries: bool = False,
    ) -> None:
        """READY to `phase`. Raises what Engine.begin() raises; then it is READY still, unless the devices have begun.

        `tiles`: those that take one pass, in another order. `order`: as in Engine.begin(); None: the usual one.
        `kept_alive`: memory that the engine uses until the end. `carries`: carry() comes next.
        """
        engine, step, spec = self.engine, self.step, self.spec
        if order is None:
            order = TO_AND_FRO if engine.tile_rank is None else SAME_ORDER
        table, hypers = spec.table, spec.hypers
        if step.passes:
            table, hypers = step.passes.tables(spec, step.images)
            if tiles is not None:
                step.passes.begin_with(tiles)
            tiles = step.passes.in_order
        if carries and step.ring is not None:  # before the devices begin: it may lack memory for its streams
            step.ring.begin(step.passes.sources if step.passes else spec.sources, step.given)
        try:
            begun = engine.begin(
                table,
                hypers,
                step.tiles if tiles is None else tiles,
                self._record,
                order=order,
                is_speculative=phase is not Phase.STEP,
                kept_alive=kept_alive,
            )
            self.tiles = begun[begun < PASS_2]
        finally:
            if engine.stepping:
                self.phase = phase
        self.progress.in_flight = True  # reading states waits: codes are not decoded during a step
        if phase is not Phase.GUESS:
            self.progress.has_updated = True

    def launch(self) -> None:
        """Begin it as STEP, and push all tiles but those of carry(), which comes next, and then land()."""
        self.begin(carries=True)
        self._push_all(self.tiles)

    def carry(
        self,
        pulled: Callable[[int], None] | None = None,
        early_buffers: Mapping[int, StagingBuffer] | None = None,
        meanwhile: Iterator[None] = NOTHING,
    ) -> None:
        """Carry the tiles of images, and those of two passes. For the arguments see StagingRing.run()."""
        step = self.step
        if step.passes:
            step.passes.run(step.ring, pulled or self.note_pulled, early_buffers, meanwhile)
        elif step.ring is not None:
            step.ring.run(self.engine, step.images, step.spec.sources, pulled, early_buffers, meanwhile)

    def push(self, tile: int) -> None:
        """Push a tile whose gradients are where the step's table says. Needs no lock."""
        self.engine.native.push(tile)

    def _push_all(self, tiles: np.ndarray[Any, Any]) -> None:
        for tile in tiles[~np.isin(tiles, [*self._carried])].tolist():
            self.push(tile)

    def confirm(
        self, step: PreparedStep, record: Record | None, order: np.ndarray[Any, Any], pushed: list[int]
    ) -> None:
        """GUESS to STEP: write the parameters that were held back, and push all tiles but `pushed` and images.

        `step`: the same step, as prepared in step(). `order`: its tiles, in the order in which parameters are needed.
        Raises CSDOSError if the store has no room for the commit, and what a step raises; then undo it.
        """
        assert self.phase is Phase.GUESS
        self.engine.committer.reserve(record)
        # Before release(): that may fail when some parameters are written, and undo() has to restore them then.
        self.phase, self.step, self._record = Phase.STEP, step, record
        self._not_pulled = self._carried
        self.progress.has_updated = True
        step.images = order[np.isin(order, step.images)].tolist()
        table, listed = step.spec.table, order
        if step.passes:
            table, _ = step.passes.tables(step.spec, step.images)
            step.passes.begin_with(order[~np.isin(order, step.passes.tiles)])
            listed = step.passes.in_order
        self.engine.release(table, listed)
        self._push_all(order[~np.isin(order, pushed)])
        if step.given and step.ring:
            step.ring.begin(step.spec.sources, step.given)

    def request(self, record: Record | None, without: Sequence[int] = ()) -> None:
        """OPEN to STEP; without tiles it stays READY. Call it before any tile of the rows `without` is pushed.

        `without`: rows that get no gradient after all. Raises CSDOSError if the store has no room for the commit.
        """
        assert self.phase is Phase.OPEN or not len(self.step.tiles)
        engine, step, spec = self.engine, self.step, self.spec
        if without:
            spec.steps[without] -= 1
            spec.table["grad"][without] = 0
            if step.given:
                step.given.updated = step.given.updated.difference(without)
            engine.truth.enter(spec.table)  # masters that were written there outlive this step
        engine.committer.reserve(record)
        if without:
            engine.native.drop_grads(without)
        self._record = record
        if self.phase is Phase.OPEN:
            self.phase = Phase.STEP

    def launch_near(self) -> list[int]:
        """Queue all updates on the accelerator, on the current streams.

        Returns the rows that are updated there. Nothing has to wait for these, and the step drops their gradients.
        """
        near = self.step.near
        if not near:
            return []
        if self.step.given:
            self.step.given.set_updates(near, NOTHING)
        _exhaust(near.launch(timed=self.engine.states.timeline.near_spans is not None))
        rows = near.release_scratch()
        for row in rows:
            self.spec.sources.pop(row).copy_back()
        return rows

    # ---- parameters arrive -----------------------------------------------------------

    def arrived(self, tiles: np.ndarray[Any, Any], *, wait: bool) -> bool:
        """Return whether these tiles (uint32), which were pushed, have their new parameters. Needs no lock.

        `wait`: block until they have, or it has `ended`. Raises CSDError once it has failed, or is over.
        """
        if missing := self._not_pulled.intersection(tiles.tolist() if self._not_pulled else ()):
            if not wait:
                return False
            with self._changed:
                self._changed.wait_for(lambda: self.ended.is_set() or missing.isdisjoint(self._not_pulled))
        passes = self.step.passes
        return self.engine.native.params_ready(passes.named(tiles) if passes else tiles, wait=wait)

    def await_buckets(self) -> None:
        """Note that other ranks' parts of the parameters will arrive after step(), when it is launched."""
        if self.step.gather:
            self._not_received.update(row for bucket in self.step.gather.buckets for row in bucket.rows)

    def note_received(self, rows: Sequence[int]) -> None:
        """Note that a bucket with other ranks' parts of these rows has arrived."""
        with self._changed:
            self._not_received.subtract(rows)
            self._changed.notify_all()

    def wait_for_others(self, rows: Sequence[int]) -> None:
        """Return when all other ranks' parts of these rows have arrived, or it has `ended`. Needs no lock."""
        if self.step.gather:
            with self._changed:
                self._changed.wait_for(lambda: self.ended.is_set() or not any(self._not_received[row] for row in rows))

    def note_pulled(self, tile: int) -> None:
        """Note that the last copies from the image of a tile to its parameters were queued."""
        with self._changed:
            self._not_pulled.discard(tile)
            self._changed.notify_all()

    def note_ended(self) -> None:
        with self._changed:
            self.ended.set()
            self._changed.notify_all()

    # ---- within step() ---------------------------------------------------------------

    def run(self, *, descending: bool, all_can_undo: bool, pushed: Callable[[], None] | None = None) -> None:
        """READY to KEPT, or UNDONE if it fails on any rank: a collective.

        `descending`: ranks exchange the last bucket first. `all_can_undo`: all ranks can undo it even when it is
        complete; else no rank completes it before all have updated their tiles, which takes one more collective.
        `pushed`: given if it is OPEN: requests it, returns when all tiles are pushed, and those of images have arrived,
        and raises what a step raises.
        """
        step, gather = self.step, self.step.gather
        if gather:
            gather.begin(self.arrived, step.spec.sources, descending=descending)
        try:
            with all_ranks_or_none(self.progress.ranks):
                try:
                    self._flow(pushed)
                finally:
                    if step.passes:
                        step.passes.finish()
                    if gather:
                        gather.finish()
                if all_can_undo:
                    self._end()
            if not all_can_undo:
                with all_ranks_or_none(self.progress.ranks):  # an owner may fail until here
                    self._end()
        except BaseException:
            if self.phase is not Phase.LANDED:
                self.undo(gather)
            else:  # if the ranks are lost, that is what has to be told
                ranks = self.progress.ranks
                with contextlib.suppress(CSDTornError) if ranks and ranks.lost else contextlib.nullcontext():
                    self.take_back()
            raise
        self.keep()
        try:
            self._complete()
        finally:  # the step is complete, and parameters have new values
            for source in step.spec.sources.values():
                source.copy_back()
            self.mark_synced()

    def _flow(self, pushed: Callable[[], None] | None) -> None:
        """Return when all parameters that other ranks wait for have left, and those of images have arrived."""
        step, gather = self.step, self.step.gather
        if pushed:
            pushed()
        else:
            self._launch_all()
        if gather and (len(step.tiles) or step.near):
            gather.advance(wait=True)
        if len(step.tiles) and self.progress.ranks:
            self.arrived(self.tiles[~np.isin(self.tiles, step.images)], wait=True)

    def _launch_all(self) -> None:
        """Begin it, queue all updates on the accelerator, and return when those of images have arrived."""
        engine, step, gather = self.engine, self.step, self.step.gather
        if len(step.tiles):
            self.launch()
        elif step.near:
            engine.begin_without_tiles()
            self.phase = Phase.STEP
        launching = step.near.launch(timed=engine.states.timeline.near_spans is not None) if step.near else NOTHING
        if step.near and step.given:
            step.given.set_updates(step.near, launching)
        if step.ring is None or gather:  # gather sends parameters without tiles at its first advance()
            _exhaust(launching)
        self.carry(partial(self._pulled, gather) if gather else None, meanwhile=launching)
        _exhaust(launching)

    def _pulled(self, gather: ParamAllGather, tile: int) -> None:
        self.note_pulled(tile)
        if not (self.step.passes and self.step.passes.exchange):  # else these collectives come first
            gather.advance(wait=False)

    # ---- the end ---------------------------------------------------------------------

    def land(self) -> None:
        """STEP to KEPT or LANDED: wait until it is complete, and commit it. It is undone if it does not complete."""
        try:
            self._end()
        except BaseException:
            self.undo()
            raise
        if not self.meets:  # else it keeps what undoes its updates on the accelerator
            self.keep()
        self._complete()

    def _end(self) -> None:
        """STEP to LANDED: wait until it is complete."""
        engine, step = self.engine, self.step
        self._had_tiles = engine.stepping
        if step.near and engine.states.timeline.near_spans is not None:
            engine.states.timeline.near_spans += step.near.spans
        if engine.stepping:
            engine.committer.before_finish(self._record, step.spec.steps)
            engine.finish()
        elif step.near:
            engine.end_without_tiles()
        elif self.progress.ranks:
            engine.count_step_of_others()
        engine.states.set_counts(step.spec.steps)
        self.progress.steps_taken += 1
        self.phase = Phase.LANDED

    def _complete(self) -> None:
        """Update residuals after a complete step, and commit it."""
        engine, step, spec, state_map = self.engine, self.step, self.spec, self.progress.state_map
        self.progress.near = step.near
        self.progress.has_updated |= step.near is not None
        if step.given and step.near:
            step.given.keep()
            step.near.commit_bytes = step.given.nbytes
        state_map.mark_filled()
        try:
            if step.ring is not None:
                step.ring.feed_back()
        finally:  # the step is complete even if the update of its residuals fails
            torch.autograd.graph.increment_version([state.windows["residual"] for state in spec.with_residual])
            if not spec.error_feedback:
                state_map.drop_residual(engine, spec.plan.param_states)
            elif spec.unscaled:
                all_sent = [state for state in spec.with_residual if spec.table["topk"][state.index] == 1]
                state_map.drop_residual(engine, all_sent)
            self.progress.commit(self._record)

    def mark_synced(self) -> None:
        """Count its writes to its parameters. Any later write is one from outside."""
        torch.autograd.graph.increment_version(self.spec.plan.params)
        for param_state in (*self.spec.written, *self.spec.plan.param_states):
            param_state.mark_synced()

    def keep(self) -> None:
        """LANDED to KEPT, and free what would undo it. Needs no lock."""
        if self.phase is Phase.LANDED:
            self.phase = Phase.KEPT
        if self.step.near:
            self.step.near.end()

    # ---- undo ------------------------------------------------------------------------

    def undo(self, exchanged: ParamAllGather | None = None) -> None:
        """Undo a step that has not ended; with ranks that meet later only its states, because these run their forward.

        A no-op in later phases. `exchanged`: the ranks have exchanged new parameters with it, and exchange the restored
        ones: a collective. Raises what Progress.finish_undo() raises.
        """
        engine, progress = self.engine, self.progress
        with defer_signals(), engine.lock, no_autograd():
            was = self.phase
            if was not in (Phase.READY, Phase.GUESS, Phase.OPEN, Phase.STEP):
                return
            has_begun = was is not Phase.READY
            self.phase = Phase.FAILED if self.meets else Phase.UNDONE
            if self.meets:
                progress.in_flight = True  # reading states raises why it has failed, even if it has not begun
                if has_begun:
                    undo_states(engine, self.step)
            elif was is Phase.GUESS:
                if engine.stepping:  # else close() has undone it
                    with contextlib.suppress(CSDError):  # why the guess has failed, if it has
                        engine.finish(keep=False)
            elif (has_begun and not engine.closed) or exchanged:
                progress.undo(Undo(engine, progress.state_map, self.step, has_begun=has_begun, gather=exchanged))

    def take_back(self, *, alone: bool = False) -> None:
        """LANDED or FAILED to UNDONE, because it has failed on some rank. Raises what undo() raises. A collective.

        Also undoes writes to its parameters from outside since then, because these may differ from rank to rank.
        `alone`: no collective; parts that other ranks have updated keep their values.
        """
        with defer_signals(), self.engine.lock, no_autograd():
            assert self.phase in (Phase.LANDED, Phase.FAILED)
            landed = self.phase is Phase.LANDED
            self.phase = Phase.UNDONE
            self.progress.steps_taken -= landed
            had_tiles, gather = self._had_tiles, None if alone else self.step.gather
            undo = Undo(
                self.engine, self.progress.state_map, self.step, landed=landed, had_tiles=had_tiles, gather=gather
            )
            self.progress.undo(undo)

    @property
    def is_undone(self) -> bool:
        return self.phase in (Phase.FAILED, Phase.UNDONE)


def _exhaust(work: Iterator[None]) -> None:
    """Run an iterator to its end."""
    for _ in work:
        pass
