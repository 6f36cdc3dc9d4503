"""Steps that begin in backward: when one may begin, which tiles it updates there, and the pause after wrong guesses."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from ..accelerator import is_on_accelerator, record_event
from ..engine.tiles import Pieces
from ..errors import CSDError
from ..grad_modes import no_autograd
from ..signals import defer_signals
from ..step.live import Phase
from ..step.spec import Participants, StepSpec
from ..step.steps import Steps
from ..threads import running_pool
from .guess import Guess
from .order import early_of

MAX_PAUSE = 15  # steps: the longest pause after wrong guesses in a row, whose writes were wasted
FIRST_SHARE = 0.5  # fraction of the tiles that flow in backward until the durations of backward and step are known


class EarlySteps:
    """Begins the steps of one optimizer in backward: each is a Guess, begun as soon as the first gradient is final.

    A gradient counts as final once it was accumulated as many times as in the last step. Under DDP the count is of
    reductions of this rank's rows by csd_optim.push.
    """

    def __init__(
        self,
        steps: Steps,
        params: Iterable[torch.Tensor],
        may_begin: Callable[[], Pieces | None],
        hold: torch.Tensor,
        *,
        under_ddp: bool,
    ) -> None:
        """`may_begin` returns None if no step may begin now.

        `hold`: host memory (uint8, 1-D) for results that are ready before step(); pinned if parameters are on an
        accelerator.
        """
        self._steps, self._engine, self._state_map = steps, steps.engine, steps.state_map
        self.redone: Counter[str] = Counter()  # wrong guesses, by what was wrong
        self._may_begin, self._hold = may_begin, hold
        self._finalizer = steps.call_at_end(self._stop)
        self._pusher = running_pool(1, "csd_optim brings gradients")
        self._guess: Guess | None = None
        self._hold_futures: list[Future[None]] = []  # copies of an undone guess that still use `hold`
        self._fired: Counter[int] = Counter()  # by id of the parameter: gradients accumulated since the last step
        self._expected: Counter[int] = Counter()  # the counts of the last step, at which a gradient is final
        self._ready_events: dict[int, Any] = {}  # by id: event after which an accelerator's gradient is ready
        self._share = FIRST_SHARE
        self._began: float | None = None  # start time of the guess under way, or of the guess that the last step kept
        self._stepped = 0.0  # time of the last step()
        self._wrong_in_a_row = 0
        self._pause = 0  # number of coming steps without a guess
        self._impossible = False  # foresee() has found a guess impossible since the last step
        self._under_ddp = under_ddp
        if under_ddp:  # parameters' own hooks see gradients that are not reduced yet
            steps.reduced.on_final = self._on_grad
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._on_grad)  # type: ignore[no-untyped-call]
            for p in params
            if p.requires_grad and not under_ddp
        ]

    def end(self) -> None:
        """Undo the guess, if any, and remove the hooks: no further step begins early."""
        self.undo("other calls")
        self._finalizer.detach()
        self._pusher.shutdown(wait=False)
        for hook in self._hooks:
            hook.remove()
        if self._under_ddp:
            self._steps.reduced.on_final = None
        self._hold = self._hold.new_empty(0)  # frees the memory now, not at the next garbage collection

    def _stop(self) -> None:
        """Stop the guess: the optimizer was dropped, and its engine closes now, perhaps on the background thread."""
        if guess := self._guess:
            guess.stop()

    # ---- in backward -----------------------------------------------------------

    def _on_grad(self, p: torch.Tensor) -> None:
        """Count an accumulated gradient, as a hook, and offer it to the guess if it is final.

        A failing guess is undone, and raises no CSDError in backward. Signals wait until the gradient is dealt with:
        their handlers may read states or close the optimizer, which undoes the guess. Raises what a handler raises.
        """
        if self._engine.pid != os.getpid():  # a forked child takes no steps
            return
        try:
            with defer_signals():
                self._take(p)
        except BaseException:  # backward ends here, before the guess has seen all gradients
            self.undo("failure")
            raise

    def _take(self, p: torch.Tensor) -> None:
        self._fired[id(p)] += 1
        fired, expected = self._fired[id(p)], self._expected[id(p)]
        if fired == expected and is_on_accelerator(p):
            self._ready_events[id(p)] = record_event(torch.accelerator.current_stream(p.device))
        if self._guess and fired > expected:
            self.undo("more backward passes")
        elif fired == expected and (self._guess or self._engine.idle):  # the previous step is complete and committed
            try:
                with self._engine.lock, no_autograd():  # several threads may run backward
                    if not self._engine.is_speculative:  # the engine was closed, and the guess with it
                        self._guess = None
                    if self._guess or self._begin():
                        self._offer_gradient(p)
            except CSDError:
                self.undo("failure")

    def _begin(self) -> bool:
        """Begin a guess if that is possible now; return whether it has begun."""
        if self._pause or self._impossible:
            return False
        if not all(future.done() for future in self._hold_futures):  # a late copy would overwrite parameters in `hold`
            return False
        pieces = self._may_begin()
        if pieces is None:
            return False
        live = self._steps.foresee()
        if live is None:
            self._impossible = True  # do not retry at each gradient: foresee() looks at all parameters
            return False
        travel, engine = live.travel, self._engine
        flow = engine.in_step_order(travel.may_begin)
        early = early_of(flow, self._share)
        flow = np.concatenate([flow, travel.supplied.tiles])
        self._began = time.perf_counter()
        self._guess = Guess(engine, self._state_map, live, early, flow, pieces, self._hold, self._pusher)
        self._guess.begin()
        for param_state in live.spec.plan.param_states:  # some gradients were final before the guess could begin
            self._offer_gradient(param_state.param)
        return True

    def _offer_gradient(self, p: torch.Tensor) -> None:
        """Pass the gradient of this rank's part to the guess if the gradient is final."""
        if self._guess and p.grad is not None and self._fired[id(p)] == self._expected[id(p)]:
            state = self._state_map.param_states[id(p)]
            if self._under_ddp:
                grad = self._steps.reduced.rows_of(p)  # None: DDP's reduction may still be under way
            else:
                grad = state.part.of(p.grad) if state.part.is_here(p.grad) else None
            if grad is not None:
                self._guess.add_gradient(state.index, grad, self._ready_events.get(id(p)))

    # ---- in step() -------------------------------------------------------------

    def before_step(self) -> None:
        """Start to count the gradients of the next step. Called at the beginning of step()."""
        self._expected, self._fired, self._ready_events, self._impossible = self._fired, Counter(), {}, False
        self._pause = max(0, self._pause - (self._guess is None))

    def check(self, taking_part: Participants) -> None:
        """Undo a guess that is wrong whatever the gradients are. Call this before anything else uses the engine."""
        if self._guess and (why := self._guess.wrong_before(taking_part.params)):
            self.undo(why)

    def compare(self, spec: StepSpec) -> None:
        """Undo a guess that differs from the actual step. Called before the step changes anything."""
        if self._guess:
            try:
                why = self._guess.wrong(spec)
            except (CSDError, RuntimeError):  # for example out of memory; if that persists, the step raises it
                why = "failure"
            if why:
                self.undo(why)

    def take_guess(self) -> Guess | None:
        """Remove and return the guess that has passed compare(), for the step to continue; None if there is none."""
        self._stepped = time.perf_counter()
        guess, self._guess = self._guess, None
        if guess:
            self._wrong_in_a_row = 0
        else:
            self._began = None
        return guess

    def note_landed(self, at: float) -> None:
        """Note when the step landed. Later guesses push in backward as large a fraction of the tiles as fits there."""
        if self._began is not None and self._guess is None:
            self._share = min(1.0, (self._stepped - self._began) / (at - self._began))

    def undo(self, why: str) -> None:
        """Undo the guess, if there is one. `why`: the reason, by which stats() counts."""
        if self._engine.pid != os.getpid():  # a forked child: only the parent's guess continues
            self._guess = None
            return
        with defer_signals(), self._engine.lock:
            if (guess := self._guess) is None:
                return
            has_begun = guess.live.phase is not Phase.READY
            self._hold_futures = guess.undo()
            self._guess = None
            if not has_begun:
                return
            self.redone[why] += 1
            self._wrong_in_a_row += 1
            self._pause = min(2 ** (self._wrong_in_a_row - 1) - 1, MAX_PAUSE)

    def forget_gradients(self) -> None:
        """Undo the guess because the gradients are cleared: no step will use them."""
        self.undo("cleared gradients")
        self._fired.clear()
        self._ready_events.clear()
        self._impossible = False
