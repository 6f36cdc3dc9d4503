"""One step under way: its phases, how it is kept or undone, and which tiles still lack gradients.

The driver of a step decides when each phase begins, and carries the gradients to the engine.

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
from .history import StepHistory
from .prepared import PreparedStep
from .spec import StepSpec
from .staging import NOTHING, StagingBuffer
from .undo import Undo, undo_states

NEVER = np.iinfo(np.int64).max  # rank of a tile if it is unknown when its parameters are needed


class Countdown:
    """Which tiles of a step still lack gradients, and in which order tiles were pushed.

    Counts the units, such as pieces or elements, that each tile needs. Python integers: most gradients have few tiles,
    for which NumPy takes longer.
    """

    def __init__(self, needed: np.ndarray[Any, Any], tiles: Iterable[int]) -> None:
        """`needed`: units by tile of the engine, int64. `tiles`: the tiles of the step, in flow order."""
        self._missing: list[int] = needed.tolist()
        self._left = dict.fromkeys(tiles)
        self.pushed: list[int] = []

    def arrive(self, tiles: Sequence[int], units: Iterable[int] = repeat(1)) -> list[int]:
        """Count `units` that have arrived for each of these tiles. Returns complete(tiles)."""
        for tile, n in zip(tiles, units, strict=False):
            self._missing[tile] -= n
        return self.complete(tiles)

    def complete(self, tiles: Iterable[int]) -> list[int]:
        """Return the tiles, each once, that have all gradients and were not pushed yet."""
        return [*dict.fromkeys(tile for tile in tiles if not self._missing[tile] and tile in self._left)]

    def lacks(self, tile: int) -> bool:
        return bool(self._missing[tile])

    def note_pushed(self, tile: int) -> None:
        del self._left[tile]
        self.pushed.append(tile)

    @property
    def left(self) -> list[int]:
        """The tiles that were not pushed yet, in flow order."""
        return [*self._left]

    def rank(self) -> np.ndarray[Any, Any]:
        """Return a tile_rank for the next step, whose gradients are expected in the same order: int64, by tile."""
        rank = np.full(len(self._missing), NEVER)
        rank[self.pushed] = np.arange(len(self.pushed))
        return rank


class Phase(Enum):
    """The phase of a step, and whether states and parameters are from before the step (old) or after it (new)."""

    READY = auto()  # not begun: both old
    GUESS = auto()  # under way, not requested: both old, as new parameters are held back
    OPEN = auto()  # under way, not requested: parameters become new one after another
    STEP = auto()  # under way, requested by step(): likewise
    LANDED = auto()  # complete on this rank: both new; if ranks vote later, they may still take the step back
    FAILED = auto()  # states old, parameters a mix of old and new, until the ranks vote
    KEPT = auto()  # both new
    UNDONE = auto()  # both old, except for what StepHistory.undoing has still to restore


class LiveStep:
    """One step. Call its methods with the engine's lock, except push(), arrived(), keep(), undo() and take_back()."""

    def __init__(
        self,
        history: StepHistory,
        engine: Engine,
        step: PreparedStep,
        record: Record | None,
        *,
        votes_later: bool = False,
    ) -> None:
        """`record`: for the commit. `votes_later`: ranks vote on the step after it has ended here: see together.py."""
        self.history: StepHistory = history
        self.engine: Engine = engine
        self.votes_later: bool = votes_later
        self._record = record
        self.step: PreparedStep = step
        self.phase: Phase = Phase.READY
        self.tiles: np.ndarray[Any, Any] = step.tiles  # uint32, in flow order; begin() adds the committer's
        self.ended: threading.Event = threading.Event()  # set when a thread has landed it, or has failed and undone it
        self._had_tiles = False  # set when the step ends: the engine took part
        self._not_pulled: set[int] = self._transferred  # tiles whose parameters are still in their images
        self._not_received: Counter[int] = Counter()  # by row: number of buckets awaited from other ranks
        self._changed = threading.Condition()  # notified when `ended`, `_not_pulled` or `_not_received` changes

    @property
    def spec(self) -> StepSpec:
        return self.step.spec

    @property
    def _transferred(self) -> set[int]:
        """The tiles that transfer() pushes."""
        return {*self.step.images, *(self.step.passes.tiles.tolist() if self.step.passes else ())}

    # ---- begin -----------------------------------------------------------------------

    def begin(
        self,
        phase: Phase = Phase.STEP,
        *,
        tiles: np.ndarray[Any, Any] | None = None,
        order: int | None = None,
        kept_alive: object = None,
        transfers: bool = False,
    ) -> None:
        """READY to `phase`. Raises what Engine.begin() raises; still READY then, unless the devices have begun.

        `tiles`: override the order of the tiles with one pass. `order`: as in Engine.begin(); None: the usual order.
        `kept_alive`: objects whose memory the engine uses until the step ends. `transfers`: transfer() is called next.
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
        if transfers and step.ring is not None:  # before the devices begin: this may run out of memory
            step.ring.begin(step.passes.sources if step.passes else spec.sources, step.supplied)
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
        self.history.in_flight = True  # reading states waits: codes are not decoded during a step
        if phase is not Phase.GUESS:
            self.history.has_updated = True

    def launch(self) -> None:
        """READY to STEP: push the tiles that need no transfer(). Call transfer() next, then land()."""
        self.begin(transfers=True)
        self._push_all(self.tiles)

    def transfer(
        self,
        pulled: Callable[[int], None] | None = None,
        early_buffers: Mapping[int, StagingBuffer] | None = None,
        idle_work: Iterator[None] = NOTHING,
    ) -> None:
        """Push and pull the tiles that travel as images or take two passes. Arguments: see StagingRing.run()."""
        step = self.step
        if step.passes:
            step.passes.run(step.ring, pulled or self.note_pulled, early_buffers, idle_work)
        elif step.ring is not None:
            step.ring.run(self.engine, step.images, step.spec.sources, pulled, early_buffers, idle_work)

    def push(self, tile: int) -> None:
        """Push a tile with the gradients that the step's table names. Needs no lock."""
        self.engine.native.push(tile)

    def _push_all(self, tiles: np.ndarray[Any, Any]) -> None:
        for tile in tiles[~np.isin(tiles, [*self._transferred])].tolist():
            self.push(tile)

    def confirm(
        self, step: PreparedStep, record: Record | None, order: np.ndarray[Any, Any], pushed: list[int]
    ) -> None:
        """GUESS to STEP: write the parameters that were held back, and push all tiles but `pushed` and images.

        `step`: the same step, as prepared in step(). `order`: its tiles, in the order in which parameters are needed.
        Raises CSDOSError if the store has no room for the commit, and what a step raises; call undo() then.
        """
        assert self.phase is Phase.GUESS
        self.engine.committer.reserve(record)
        # Before release(), which may fail with some parameters written: undo() has to restore these.
        self.phase, self.step, self._record = Phase.STEP, step, record
        self._not_pulled = self._transferred
        self.history.has_updated = True
        step.images = order[np.isin(order, step.images)].tolist()
        table, listed = step.spec.table, order
        if step.passes:
            table, _ = step.passes.tables(step.spec, step.images)
            step.passes.begin_with(order[~np.isin(order, step.passes.tiles)])
            listed = step.passes.in_order
        self.engine.release(table, listed)
        self._push_all(order[~np.isin(order, pushed)])
        if step.supplied and step.ring:
            step.ring.begin(step.spec.sources, step.supplied)

    def request(self, record: Record | None, without: Sequence[int] = ()) -> None:
        """OPEN to STEP; a step without tiles stays READY. Call it before any tile of the rows `without` is pushed.

        `without`: rows that get no gradient after all. Raises CSDOSError if the store has no room for the commit.
        """
        assert self.phase is Phase.OPEN or not len(self.step.tiles)
        engine, step, spec = self.engine, self.step, self.spec
        if without:
            spec.steps[without] -= 1
            spec.table["grad"][without] = 0
            if step.supplied:
                step.supplied.updated = step.supplied.updated.difference(without)
            engine.truth.enter(spec.table)  # masters entered in the table outlive this step
        engine.committer.reserve(record)
        if without:
            engine.native.drop_grads(without)
        self._record = record
        if self.phase is Phase.OPEN:
            self.phase = Phase.STEP

    def launch_on_accelerator(self) -> list[int]:
        """Queue all updates on the accelerator, on the current streams.

        Returns the rows of their parameters. Nothing has to wait for these rows; the step drops their gradients.
        """
        accelerated = self.step.accelerated
        if not accelerated:
            return []
        if self.step.supplied:
            self.step.supplied.set_updates(accelerated, NOTHING)
        _exhaust(accelerated.launch(timed=self.engine.states.timeline.is_traced))
        rows = accelerated.release_scratch()
        for row in rows:
            self.spec.sources.pop(row).copy_back()
        return rows

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
        passes = self.step.passes
        return self.engine.native.params_ready(passes.named(tiles) if passes else tiles, wait=wait)

    def await_buckets(self) -> None:
        """Note, for a step that is launched, that other ranks' parts of the parameters will arrive after step()."""
        if self.step.gather:
            self._not_received.update(row for bucket in self.step.gather.buckets for row in bucket.rows)

    def note_received(self, rows: Sequence[int]) -> None:
        """Note that a bucket with other ranks' parts of these rows has arrived."""
        with self._changed:
            self._not_received.subtract(rows)
            self._changed.notify_all()

    def wait_for_others(self, rows: Sequence[int]) -> None:
        """Return when all other ranks' parts of these rows have arrived, or the step has `ended`. Needs no lock."""
        if self.step.gather:
            with self._changed:
                self._changed.wait_for(lambda: self.ended.is_set() or not any(self._not_received[row] for row in rows))

    def note_pulled(self, tile: int) -> None:
        """Note that all copies from a tile's image to its parameters are queued."""
        with self._changed:
            self._not_pulled.discard(tile)
            self._changed.notify_all()

    def note_ended(self) -> None:
        with self._changed:
            self.ended.set()
            self._changed.notify_all()

    # ---- within step() ---------------------------------------------------------------

    def run(self, *, descending: bool, all_can_undo: bool, pushed: Callable[[], None] | None = None) -> None:
        """READY to KEPT, or UNDONE if the step fails on any rank: a collective.

        `descending`: ranks exchange the last bucket first. `all_can_undo`: all ranks can undo the step even when it is
        complete; else no rank completes it before all have updated their tiles, which takes one more collective.
        `pushed`: given if the step is OPEN. Calls request(), raises what a step raises, and returns when all tiles are
        pushed and the parameters of images have arrived.
        """
        step, gather = self.step, self.step.gather
        if gather:
            gather.begin(self.arrived, step.spec.sources, descending=descending)
        try:
            with all_ranks_or_none(self.history.ranks):
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
                with all_ranks_or_none(self.history.ranks):  # an owner may fail until here
                    self._end()
        except BaseException:
            if self.phase is not Phase.LANDED:
                self.undo(gather)
            else:  # if the ranks are lost, that is what has to be told
                ranks = self.history.ranks
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
        """Return when everything that other ranks wait for has been sent, and the parameters of images have arrived."""
        step, gather = self.step, self.step.gather
        if pushed:
            pushed()
        else:
            self._launch_all()
        if gather and (len(step.tiles) or step.accelerated):
            gather.advance(wait=True)
        if len(step.tiles) and self.history.ranks:
            self.arrived(self.tiles[~np.isin(self.tiles, step.images)], wait=True)

    def _launch_all(self) -> None:
        """Begin, queue all updates on the accelerator, and return when the parameters of images have arrived."""
        engine, step, gather = self.engine, self.step, self.step.gather
        if len(step.tiles):
            self.launch()
        elif step.accelerated:
            engine.begin_without_tiles()
            self.phase = Phase.STEP
        timed = engine.states.timeline.is_traced
        launching = step.accelerated.launch(timed=timed) if step.accelerated else NOTHING
        if step.accelerated and step.supplied:
            step.supplied.set_updates(step.accelerated, launching)
        if step.ring is None or gather:  # the first gather.advance() sends parameters without tiles
            _exhaust(launching)
        self.transfer(partial(self._pulled, gather) if gather else None, idle_work=launching)
        _exhaust(launching)

    def _pulled(self, gather: ParamAllGather, tile: int) -> None:
        self.note_pulled(tile)
        if not (self.step.passes and self.step.passes.exchange):  # else the collectives of the passes come first
            gather.advance(wait=False)

    # ---- the end ---------------------------------------------------------------------

    def land(self) -> None:
        """STEP to KEPT or LANDED: wait until the step is complete, and commit. Undoes the step if it fails."""
        try:
            self._end()
        except BaseException:
            self.undo()
            raise
        if not self.votes_later:  # else keep the copies from which the accelerator's updates can be undone
            self.keep()
        self._complete()

    def _end(self) -> None:
        """STEP to LANDED: wait until the step is complete."""
        engine, step = self.engine, self.step
        self._had_tiles = engine.stepping
        if step.accelerated and engine.states.timeline.is_traced:
            engine.states.timeline.accelerator_spans += step.accelerated.spans
        if engine.stepping:
            engine.finish(ending=engine.committer.before_finish(self._record, step.spec.steps))
        elif step.accelerated:
            engine.end_without_tiles()
        elif self.history.ranks:
            engine.count_step_of_others()
        engine.states.set_counts(step.spec.steps)
        self.history.steps_taken += 1
        self.phase = Phase.LANDED

    def _complete(self) -> None:
        """Update residuals after a complete step, and begin to commit."""
        engine, step, spec, state_map = self.engine, self.step, self.spec, self.history.state_map
        self.history.accelerated = step.accelerated
        self.history.has_updated |= step.accelerated is not None
        if step.supplied and step.accelerated:
            step.supplied.keep()
            step.accelerated.commit_bytes = step.supplied.nbytes
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
            self.history.commit(self._record)

    def mark_synced(self) -> None:
        """Count the step's writes to parameters. Any later write comes from outside."""
        torch.autograd.graph.increment_version(self.spec.plan.params)
        for param_state in (*self.spec.written, *self.spec.plan.param_states):
            param_state.mark_synced()

    def keep(self) -> None:
        """LANDED to KEPT: free the copies from which it could be undone. Needs no lock."""
        if self.phase is Phase.LANDED:
            self.phase = Phase.KEPT
        if self.step.accelerated:
            self.step.accelerated.end()

    # ---- undo ------------------------------------------------------------------------

    def undo(self, exchanged: ParamAllGather | None = None) -> None:
        """Undo a step that has not ended. A no-op in later phases.

        If ranks vote later, undoes only states: a forward may be running. `exchanged`: given if ranks exchanged new
        parameters; they then exchange the restored ones, a collective. Raises what StepHistory.finish_undo() raises.
        """
        engine, history = self.engine, self.history
        with defer_signals(), engine.lock, no_autograd():
            was = self.phase
            if was not in (Phase.READY, Phase.GUESS, Phase.OPEN, Phase.STEP):
                return
            has_begun = was is not Phase.READY
            self.phase = Phase.FAILED if self.votes_later else Phase.UNDONE
            if self.votes_later:
                history.in_flight = True  # reading states raises why it has failed, even if it has not begun
                if has_begun:
                    undo_states(engine, self.step)
            elif was is Phase.GUESS:
                if engine.stepping:  # else close() has undone it
                    with contextlib.suppress(CSDError):  # why the guess has failed, if it has
                        engine.finish(keep=False)
            elif (has_begun and not engine.closed) or exchanged:
                history.undo(Undo(engine, history.state_map, self.step, has_begun=has_begun, gather=exchanged))

    def take_back(self, *, alone: bool = False) -> None:
        """LANDED or FAILED to UNDONE, because the step failed on some rank. Raises what undo() raises. A collective.

        Also undoes what the program has written to the parameters since then, because ranks may have written different
        values. `alone`: no collective; parts that other ranks have updated keep the new values.
        """
        with defer_signals(), self.engine.lock, no_autograd():
            assert self.phase in (Phase.LANDED, Phase.FAILED)
            landed = self.phase is Phase.LANDED
            self.phase = Phase.UNDONE
            self.history.steps_taken -= landed
            had_tiles, gather = self._had_tiles, None if alone else self.step.gather
            undo = Undo(
                self.engine, self.history.state_map, self.step, landed=landed, had_tiles=had_tiles, gather=gather
            )
            self.history.undo(undo)

    @property
    def is_undone(self) -> bool:
        return self.phase in (Phase.FAILED, Phase.UNDONE)


def _exhaust(work: Iterator[None]) -> None:
    """Run an iterator to its end."""
    for _ in work:
        pass
