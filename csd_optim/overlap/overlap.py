"""A step that runs concurrently with the program: its state, and what the program has to wait for."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Iterable, Set
from functools import partial
from typing import Any

import torch

from ..engine.tiles import Pieces
from ..errors import CSDError, CSDWarning, users_stacklevel
from ..params.grad_source import GradSource
from ..signals import defer_signals
from ..step.live import LiveStep
from ..step.spec import Participants, StepSpec
from ..step.staging import StagingBuffer
from ..step.steps import Steps
from ..step.travel import Travel
from ..store.format import Record
from .early import EarlySteps
from .flight import Flight
from .mode import ConcurrentMode
from .order import by_next_use
from .together import Together, has_ddp

NOTED_FORWARDS = 2  # forwards whose order of use is recorded: the first may be atypical


class Overlap(ConcurrentMode):
    """The overlap of one optimizer with one model: a step continues after step() returns, and may begin in backward.

    Between two calls of step() one step may be under way: either launched by step(), or begun in backward and not yet
    confirmed by step() (early.py); never both.
    """

    def __init__(self, steps: Steps, model: torch.nn.Module, hold: torch.Tensor | None) -> None:
        """Several ranks all overlap, or none does. `hold`: given if steps begin in backward; see EarlySteps."""
        super().__init__(steps, model)
        self._flight: Flight | None = None
        self.together: Together | None = (
            Together(steps.ranks, steps.engine, steps.resources.carriers) if steps.ranks else None
        )
        # By row: how many parameters the current forward had used before. None: no longer recorded.
        self._use_order: dict[int, int] | None = {}
        self._forwards_to_note = NOTED_FORWARDS
        self._unguarded: list[int] = []  # rows that step() waits for
        self._to_copy_back: dict[int, GradSource] = {}  # by row: parameters ordered unlike their states in memory
        self._waited, self._early_elems = 0.0, 0  # of the last step: seconds waited, elements pushed in backward
        self._warned = False  # whether the user was warned that the model has changed
        # DDP reuses the memory of gradients even after `p.grad` is cleared.
        self._reuses_gradients = self.together is not None and has_ddp(model)
        trainable = self._trainable_params()
        self._hooks += [
            p.register_hook(partial(self._before_grad, weakref.ref(p)))  # type: ignore[no-untyped-call]
            for p in trainable
        ]
        under_ddp, may_begin = self._reuses_gradients, self._may_begin
        self._early = None if hold is None else EarlySteps(steps, trainable, may_begin, hold, under_ddp=under_ddp)

    @property
    def kind(self) -> int:
        return self.together.kind if self.together else 1

    def close(self) -> None:
        try:
            self.drain(collective=False)
        finally:
            if self.together:
                self.together.leave()
                self._steps.resources.forget_gather()  # the next one uses other process groups
            if self._early:
                self._early.end()
            super().close()

    # ---- step() ----------------------------------------------------------------

    def before_step(self, *, scaled: bool) -> CSDError | None:
        """End the last step. From here on only a guess at the new step may be under way."""
        if self._spans:
            self._spans.append_spans()
        self._agree()
        if self._early:
            self._early.before_step()
        return None

    def skip(self) -> None:
        self._undo_early("overflow")

    def check(self, taking_part: Participants) -> None:
        if self._early:
            self._early.check(taking_part)

    def compare(self, spec: StepSpec) -> None:
        if self._early:
            self._early.compare(spec)

    def can_launch(self, travel: Travel | None) -> bool:
        can = travel is not None and self._steps.resources.can_land_later(travel)
        # What the program writes to a gradient of inference mode is not noticed: the step does not use it afterwards.
        can = can and travel is not None and not any(grad.is_inference() for grad in travel.spec.grads.values())
        return can and not (self.together and not self._guards.guarded)

    def launch(self, travel: Travel | None, record: Record | None, *, all_can: bool) -> bool:
        if travel is None or not all_can:
            self._undo_early("what devices cannot reach")
            return False
        if self.together:
            self.together.get_ready(travel.gather)
        self._fly(travel, record)
        return True

    def _fly(self, travel: Travel, record: Record | None) -> None:
        """Launch the step. Raises what a step raises; with several ranks, agree() raises instead."""
        engine = self._engine
        accelerated, sources = travel.accelerated.rows, travel.spec.sources
        awaited = [state for state in travel.spec.plan.param_states if state.index not in accelerated]
        copy_back = {state.index: s for state in awaited if (s := sources.get(state.index)) and s.param_and_copy}
        early_buffers: dict[int, StagingBuffer] = {}
        guess = self._early.take_guess() if self._early else None
        live = guess.live if guess else self._steps.live(travel, record)
        live.votes_later = bool(self.together)  # so far a guess has concerned this rank only
        launched: Flight | None = None
        self._waited, self._early_elems = 0.0, 0
        try:  # even if anything below fails, the other ranks have launched the step
            guarded = self._guarded()
            self._wrap_groups()
            self._note_order()
            flight = Flight(engine, live, travel, self._engine.tiles.by_param, early_buffers)
            if guess:
                self._early_elems = sum(map(engine.tiles.elems_of, guess.pushed))
                early_buffers.update(guess.keep(travel, record))
            else:
                live.launch()
            flight.begin()
            self._flight = launched = flight
        except BaseException as failure:
            live.undo()
            return self._note_outcome(live, failure)
        finally:
            if self.together:
                self.together.launched(live, launched)
        self._unguarded = [state.index for state in awaited if id(state.param) not in guarded]
        self._to_copy_back = copy_back
        self.active: bool = True

    def wait_for_unguarded(self) -> None:
        rows, sources = [*self._unguarded, *self._to_copy_back], self._to_copy_back
        self._unguarded, self._to_copy_back = [], {}
        flight = self._flight
        if rows and flight and not flight.wait(rows):
            self.land()
            return
        with self._engine.lock:  # held by an undo, whose restored values must not be overwritten
            for row, source in sources.items() if not (flight and flight.live.is_undone) else ():
                source.copy_back()
                self._state_map.by_index[row].mark_synced()

    @property
    def _has_to_wait(self) -> bool:
        """Whether readers have to call wait() while no step is under way."""
        return self._use_order is not None or self._steps.undoing is not None

    def note_undo(self) -> None:
        self.active |= self._steps.undoing is not None

    def _finish_undo(self) -> None:
        """Finish the undo of a step, unless the devices are closed: then a new optimizer may own the parameters."""
        if not self._engine.closed:
            self._steps.finish_undo()

    def _undo_early(self, why: str) -> None:
        """Undo a step that began in backward. `why`: for stats()."""
        if self._early:
            self._early.undo(why)

    def clear_gradients(self, *, set_to_none: bool) -> bool:
        """During a step set gradients to None here; if they are to become zeros, wait for the step."""
        if not set_to_none:
            self._undo_early("other calls")
            self.land()
            return False
        if self._early:
            self._early.forget_gradients()
        for group in self._steps.groups:
            for p in list.__iter__(group["params"]):  # does not wait, unlike iterating over the WaitingList
                p.grad = None
        return True

    def _guarded(self) -> Set[int]:
        """Return the ids of the parameters whose readers wait: empty, with a warning, if the model has changed."""
        if self._guards.intact():
            return self._guards.guarded
        if not self._warned:
            self._warned = True
            warnings.warn(
                "the model has changed since overlap(model), and not all of it waits for its parameters: they arrive "
                "within step() from now on. Call overlap(model) again",
                CSDWarning,
                users_stacklevel(),
            )
        return frozenset()

    # ---- order -----------------------------------------------------------------

    def _note_order(self) -> None:
        """From now on make tiles flow in the order in which the last forward used their parameters."""
        if self._use_order:
            self._engine.tile_rank = by_next_use(self._engine.tiles.by_param, self._use_order)
            self._forwards_to_note -= 1
        self._use_order = {} if self._forwards_to_note else None

    def _may_begin(self) -> Pieces | None:
        """Return, in backward, the pieces if the order of use is known and no step is under way, else None."""
        flight = self._flight
        if self._engine.tile_rank is None or (flight and (not flight.landed or flight.failure)):
            return None
        # A step overwrites states to which other ranks may have to go back, until the vote in the background has
        # confirmed.
        if self.together and not (self.together.has_met and self._engine.committer.is_confirmed):
            return None
        self.land()
        return self._engine.tiles.by_param

    # ---- waiting ---------------------------------------------------------------

    def wait(self, params: Iterable[torch.Tensor]) -> None:
        """Return when these parameters have arrived. Raises what land() raises. See Arrivals."""
        places = self._state_map.param_states
        rows = [places[id(p)].index for p in params if id(p) in places]
        if (order := self._use_order) is not None:
            for row in rows:
                # No rank for parameters that the accelerator updates: nothing waits for them, so their tiles flow last.
                if self._state_map.by_index[row].accelerator_copy:
                    continue
                order.setdefault(row, len(order))
        if (flight := self._flight) is None:
            self._finish_undo()
            return
        began = time.perf_counter()
        if flight.landed or (rows and not flight.wait(rows)):
            self.land()
        self._waited += time.perf_counter() - began

    def _before_grad(self, to: weakref.ref[torch.Tensor], _: torch.Tensor) -> None:
        """Wait, as a hook before a gradient is accumulated, while the step still reads `p.grad`."""
        p = to()
        flight = self._flight  # a signal handler or another thread may land the step at any time
        if not (self.active and flight) or p is None:
            return
        if self._reuses_gradients:
            self.land()
            return
        if p.grad is None:
            return
        place = self._state_map.param_states.get(id(p))
        if place and flight.updates_residual(place.index):
            self.land()
        else:
            self.wait([p])

    def land(self) -> None:
        """Return when no step is under way on this rank. If the last step failed, undo it, and raise why, once.

        With several ranks no rank raises alone: see together.py.
        """
        if (flight := self._flight) is not None:
            flight.join()
            with defer_signals():  # Ctrl-C here would lose the outcome on which ranks have to vote
                if self._flight is not flight:  # another thread was faster
                    return
                self._flight, self.active = None, self._has_to_wait
                if self._early and not flight.failure:
                    self._early.note_landed(flight.landed_at)
                self._note_outcome(flight.live, flight.failure)

    def _note_outcome(self, live: LiveStep, failure: BaseException | None) -> None:
        """Note that a step is complete here or has failed; raise the failure, unless other ranks have to know first."""
        if self.together:
            self.together.note_outcome(live, failure)
            self.active |= failure is not None  # so that saving parameters raises the failure: see settle()
        elif failure:
            raise failure

    def settle(self) -> None:
        """As land(); with several ranks also raise why a step failed here, even before they have voted."""
        self.land()
        if self.together:
            self.together.raise_failure()
        self._finish_undo()

    def drain(self, *, collective: bool) -> None:
        self._undo_early("other calls")
        self._agree() if collective else self.settle()

    def _agree(self) -> None:
        """As land(), but on all ranks: a collective, which raises on every rank if the step failed on any."""
        self.land()
        if self.together:
            try:
                self.together.agree()
            finally:
                self.active = self._has_to_wait

    def stats(self) -> dict[str, Any]:
        redone = dict(self._early.redone) if self._early else {}
        return {"waited": self._waited, "early_params": self._early_elems, "redone": redone}
