"""One step under way: its phases, and how it is kept or undone.

The driver of a step decides when each phase begins. How gradients and parameters travel is in travel.py.

    READY ── begin ──> GUESS ── confirm ──> STEP ── land ──> LANDED ── keep ──> KEPT
      │                OPEN  ── request ──>  │               (at once; after a vote in run(); or once ranks have met)
      └──────────────── begin ───────────────┘
    undo():       READY, GUESS, OPEN, STEP ──> UNDONE; with ranks that meet later ──> FAILED
    take_back():  LANDED, FAILED ──> UNDONE

For these steps, only this module and undo.py call begin(), release(), finish() and undo_last() of the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from enum import Enum, auto
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
from .history import StepHistory
from .spec import StepSpec
from .travel import Travel
from .undo import Undo, undo_states


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
    """One step. Call its methods with the engine's lock, except keep(), undo() and take_back()."""

    def __init__(
        self, history: StepHistory, travel: Travel, record: Record | None, *, votes_later: bool = False
    ) -> None:
        """`record`: for the commit. `votes_later`: ranks vote on the step after it has ended here: see together.py."""
        self.history: StepHistory = history
        self.travel: Travel = travel
        self.engine: Engine = travel.engine
        self.votes_later: bool = votes_later
        self._record = record
        self.phase: Phase = Phase.READY
        self.tiles: np.ndarray[Any, Any] = travel.tiles  # uint32, in flow order; begin() adds the committer's
        self._had_tiles = False  # set when the step ends: the engine took part

    @property
    def spec(self) -> StepSpec:
        return self.travel.spec

    # ---- begin -----------------------------------------------------------------------

    def begin(
        self,
        phase: Phase = Phase.STEP,
        *,
        tiles: np.ndarray[Any, Any] | None = None,
        order: int | None = None,
        kept_alive: object = None,
    ) -> None:
        """READY to `phase`. Raises what Engine.begin() raises; still READY then, unless the devices have begun.

        `tiles`: override the order of the tiles with one pass. `order`: as in Engine.begin(); None: the usual order.
        `kept_alive`: objects whose memory the engine uses until the step ends.
        """
        engine, travel = self.engine, self.travel
        if order is None:
            order = TO_AND_FRO if engine.tile_rank is None else SAME_ORDER
        if tiles is not None:
            travel.reorder(tiles)
        table, hypers, in_order = travel.tables()
        travel.begin()
        try:
            begun = engine.begin(
                table,
                hypers,
                in_order,
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
        """READY to STEP, with gradients on their way. Call travel.run() next, then land()."""
        self.begin()
        self.travel.start(self.tiles)

    def _launch_without_tiles(self) -> None:
        """READY to STEP, if the accelerator updates something."""
        if self.travel.updates_anything:
            self.engine.begin_without_tiles()
            self.phase = Phase.STEP
            self.travel.start(self.tiles)

    def confirm(self, travel: Travel, record: Record | None, order: np.ndarray[Any, Any], pushed: list[int]) -> None:
        """GUESS to STEP: write the parameters that were held back, and start all tiles but `pushed`.

        `travel`: of the same step, as prepared in step(). `order`: its tiles, in the order in which parameters are
        needed. Raises CSDOSError if the store has no room for the commit, and what a step raises; call undo() then.
        """
        assert self.phase is Phase.GUESS
        self.engine.committer.reserve(record)
        # Before release(), which may fail with some parameters written: undo() has to restore these.
        self.phase, self.travel, self._record = Phase.STEP, travel, record
        self.history.has_updated = True
        travel.reorder(order)
        table, _, in_order = travel.tables()
        travel.begin()
        self.engine.release(table, in_order)
        travel.start(order[~np.isin(order, pushed)])

    def request(self, record: Record | None, without: Sequence[int] = ()) -> None:
        """OPEN to STEP; a step without tiles stays READY. Call it before any tile of the rows `without` is pushed.

        `without`: rows that get no gradient after all. Raises CSDOSError if the store has no room for the commit.
        """
        assert self.phase is Phase.OPEN or not len(self.travel.tiles)
        engine = self.engine
        if without:
            self.travel.drop(without)
            engine.truth.enter(self.spec.table)  # masters entered in the table outlive this step
        engine.committer.reserve(record)
        if without:
            engine.native.drop_grads(without)
        self._record = record
        if self.phase is Phase.OPEN:
            self.phase = Phase.STEP

    # ---- within step() ---------------------------------------------------------------

    def run(
        self,
        *,
        descending: bool,
        all_can_undo: bool,
        votes_with_params: bool = False,
        pushed: Callable[[], None] | None = None,
    ) -> None:
        """READY to KEPT, or UNDONE if the step fails on any rank: a collective.

        `descending`: ranks exchange the last bucket first. `all_can_undo`: all ranks can undo the step even when it is
        complete; else no rank completes it before all have updated their tiles, which takes one more collective.
        `votes_with_params`: the exchange of parameters also tells other ranks that the step is complete, and saves a
        collective; only if all ranks can undo the step.
        `pushed`: given if the step is OPEN. Calls request(), raises what a step raises, and returns when all tiles are
        pushed and the parameters of images have arrived.
        """
        travel, ranks = self.travel, self.history.ranks
        travel.begin_exchange(descending=descending, awaits_vote=votes_with_params)
        any_failed = travel.gather.vote if votes_with_params else None
        try:
            with all_ranks_or_none(ranks, any_failed):
                try:
                    if pushed:
                        pushed()
                    else:
                        self.launch() if len(travel.tiles) else self._launch_without_tiles()
                        travel.run()
                    travel.send()
                    if len(travel.tiles) and ranks:  # the vote is on parameters that have arrived
                        travel.arrived(self.tiles[~np.isin(self.tiles, travel.images)], wait=True)
                finally:
                    travel.finish()
                if all_can_undo:
                    self._end()
            if not all_can_undo:
                with all_ranks_or_none(ranks):  # an owner may fail until here
                    self._end()
        except BaseException:
            if self.phase is not Phase.LANDED:
                self.undo(exchanged=True)
            else:  # if the ranks are lost, that is what has to be told
                with contextlib.suppress(CSDTornError) if ranks and ranks.lost else contextlib.nullcontext():
                    self.take_back()
            raise
        self.keep()
        try:
            self._complete()
        finally:  # the step is complete, and parameters have new values
            for source in travel.spec.sources.values():
                source.copy_back()
            self.mark_synced()

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
        """STEP to LANDED: wait until the step is complete. READY to LANDED: count a step of other ranks."""
        engine, spec, timeline = self.engine, self.spec, self.engine.states.timeline
        self._had_tiles = engine.stepping
        if timeline.is_traced:
            timeline.accelerator_spans += self.travel.accelerated.spans
        if engine.stepping:
            engine.finish(ending=engine.committer.before_finish(self._record, spec.steps))
        elif self.travel.updates_anything:
            engine.end_without_tiles()
        elif self.history.ranks:
            engine.count_step_of_others()
        engine.states.set_counts(spec.steps)
        self.history.steps_taken += 1
        self.phase = Phase.LANDED

    def _complete(self) -> None:
        """Update residuals after a complete step, and begin to commit."""
        engine, travel, spec, state_map = self.engine, self.travel, self.spec, self.history.state_map
        self.history.accelerated = travel.accelerated
        self.history.has_updated |= travel.accelerated.has_updates
        state_map.mark_filled()
        try:
            travel.complete()
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
        self.travel.accelerated.end()

    # ---- undo ------------------------------------------------------------------------

    def undo(self, *, exchanged: bool = False) -> None:
        """Undo a step that has not ended. A no-op in later phases.

        If ranks vote later, undoes only states: a forward may be running. `exchanged`: ranks have exchanged new
        parameters; they then exchange the restored ones, a collective. Raises what StepHistory.finish_undo() raises.
        """
        engine, history, travel = self.engine, self.history, self.travel
        with defer_signals(), engine.lock, no_autograd():
            was = self.phase
            if was not in (Phase.READY, Phase.GUESS, Phase.OPEN, Phase.STEP):
                return
            has_begun = was is not Phase.READY
            self.phase = Phase.FAILED if self.votes_later else Phase.UNDONE
            if self.votes_later:
                history.in_flight = True  # reading states raises why it has failed, even if it has not begun
                if has_begun:
                    undo_states(travel)
            elif was is Phase.GUESS:
                if engine.stepping:  # else close() has undone it
                    with contextlib.suppress(CSDError):  # why the guess has failed, if it has
                        engine.finish(keep=False)
            elif (has_begun and not engine.closed) or (exchanged and travel.shares_updates):
                history.undo(Undo(history.state_map, travel, has_begun=has_begun, exchanged=exchanged))

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
            had_tiles, exchanged = self._had_tiles, not alone
            undo = Undo(self.history.state_map, self.travel, landed=landed, had_tiles=had_tiles, exchanged=exchanged)
            self.history.undo(undo)

    @property
    def is_undone(self) -> bool:
        return self.phase in (Phase.FAILED, Phase.UNDONE)
