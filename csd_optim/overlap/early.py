"""Steps that begin in backward: when one may, which tiles flow there, and how long none does after wrong guesses."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from ..accelerator import is_far, recorded
from ..engine.engine import Engine
from ..engine.pieces import Pieces
from ..errors import CSDError
from ..params.state_map import StateMap
from ..signals import defer_signals
from ..step.prepare import Participants, PreparedStep
from ..store.format import Record
from .guess import Guess
from .order import spread

MOST_PAUSE = 15  # steps without a guess, after several wrong ones in a row: each writes for nothing
FIRST_SHARE = 0.5  # of the tiles, that flow in backward, before it is known how long that and the step take

# Prepares the step that would follow if gradients were there, with the parameters in their place; None: it cannot.
Foresee = Callable[[], tuple[PreparedStep, "Record | None"] | None]


class EarlySteps:
    """Of one optimizer: begins a guess in backward, as soon as a gradient is final that has as many as last time."""

    def __init__(
        self,
        engine: Engine,
        state_map: StateMap,
        params: Iterable[torch.Tensor],
        foresee: Foresee,
        may_begin: Callable[[], Pieces | None],
        hold: torch.Tensor,
    ) -> None:
        """`foresee`: a bound method of something that may go away.

        `may_begin`: None: no step may begin now. `hold`: host memory (uint8, 1-D) for what is ready before step(); of
        parameters on an accelerator pinned.
        """
        self._engine = engine
        self.redone: Counter[str] = Counter()  # wrong guesses, by what was wrong
        self._state_map, self._may_begin, self._hold = state_map, may_begin, hold
        self._foresee = weakref.WeakMethod(foresee)  # type: ignore[arg-type]
        # Before the finalizer that closes the engine: the last that is made comes first.
        self._if_dropped = weakref.finalize(foresee.__self__, self._give_up)  # type: ignore[attr-defined]
        self._brings = ThreadPoolExecutor(1, "csd_optim brings gradients")  # a thread when it is first needed
        self._guess: Guess | None = None
        self._hold_used: list[Future[None]] = []  # by a guess that was undone, until these are done
        self._fired: Counter[int] = Counter()  # by id of the parameter: gradients accumulated since the last step
        self._expected: Counter[int] = Counter()  # the same, in the last step: then a gradient is final
        self._made: dict[int, Any] = {}  # events, likewise: after them final gradients on an accelerator are there
        self._share = FIRST_SHARE
        self._began: float | None = None  # when, the guess that the last step kept, or the one under way
        self._stepped = 0.0  # when
        self._wrong_in_a_row = 0
        self._pause = 0  # steps for which there is no guess
        self._in_vain = False  # it was tried already since the last step, and cannot be
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._on_grad)  # type: ignore[no-untyped-call]
            for p in params
            if p.requires_grad
        ]

    def end(self) -> None:
        """No further step begins early."""
        self.undo("other calls")
        self._if_dropped.detach()
        self._brings.shutdown(wait=False)
        for hook in self._hooks:
            hook.remove()
        self._engine.lent, self._hold = None, self._hold.new_empty(0)  # not when the collector comes by

    def _give_up(self) -> None:
        """The optimizer is gone, and its engine about to be closed, perhaps on the thread that brings gradients."""
        if guess := self._guess:
            guess.give_up()

    # ---- in backward -----------------------------------------------------------

    def _on_grad(self, p: torch.Tensor) -> None:
        """A gradient was added to what the parameter has. A guess that fails was none: no CSDError leaves backward."""
        self._fired[id(p)] += 1
        fired, expected = self._fired[id(p)], self._expected[id(p)]
        if fired == expected and is_far(p):
            self._made[id(p)] = recorded(torch.accelerator.current_stream(p.device))
        if self._guess and fired > expected:
            self.undo("more backward passes")
        elif fired == expected and (self._guess or self._engine.idle):  # the step before is whole, and committed
            try:
                with self._engine.lock, torch.no_grad():  # several threads may go backward
                    if not self._engine.guessed:  # it went with the optimizer, which was closed or dropped
                        self._guess = None
                    if self._guess or self._begin():
                        self._tell(p)
            except BaseException as failure:  # Ctrl-C, too: the guess may be half told
                self.undo("failure")
                if not isinstance(failure, CSDError):
                    raise

    def _begin(self) -> bool:
        """Begins a guess, if nothing stands in its way."""
        foresee = self._foresee()
        if foresee is None or self._pause or self._in_vain:
            return False
        if not all(future.done() for future in self._hold_used):  # what comes late would overwrite new parameters
            return False
        foreseen = foresee()
        if foreseen is None:
            self._in_vain = True  # not for each gradient: it looks at all parameters
            return False
        pieces = self._may_begin()
        if pieces is None:
            return False
        (step, record), engine = foreseen, self._engine
        with defer_signals():  # that it has begun is noted
            early, late = spread(engine.flowing(step.not_given), self._share)
            if step.given:
                late = np.concatenate([late, step.given.tiles])
            self._began = time.perf_counter()
            self._guess = Guess(engine, self._state_map, step, record, early, late, pieces, self._hold, self._brings)
        for param_state in step.plan.param_states:  # those that were final before it could begin
            self._tell(param_state.param)
        return True

    def _tell(self, p: torch.Tensor) -> None:
        """Hands a gradient to the guess, if it is final."""
        if self._guess and p.grad is not None and self._fired[id(p)] == self._expected[id(p)]:
            self._guess.is_final(self._state_map.param_states[id(p)].index, p.grad, self._made.get(id(p)))

    # ---- in step() -------------------------------------------------------------

    def before_step(self) -> None:
        """From here on gradients are those of the next step."""
        self._expected, self._fired, self._made, self._in_vain = self._fired, Counter(), {}, False
        self._pause = max(0, self._pause - (self._guess is None))

    def check(self, taking_part: Participants) -> None:
        """Undoes a guess that is wrong whatever the gradients are: nobody else may use the engine before this."""
        if self._guess and (why := self._guess.wrong_before(taking_part.params)):
            self.undo(why)

    def compare(self, step: PreparedStep) -> None:
        """Undoes a guess that is not this step, which has not changed anything yet."""
        if self._guess:
            try:
                why = self._guess.wrong(step)
            except (CSDError, RuntimeError):  # such as no memory to compare in: the step tells what lasts
                why = "failure"
            if why:
                self.undo(why)

    def kept(self) -> Guess | None:
        """The guess, which compare() has left, for the step to go on from; from now on there is none."""
        self._stepped = time.perf_counter()
        guess, self._guess = self._guess, None
        if guess:
            self._wrong_in_a_row = 0
        else:
            self._began = None
        return guess

    def landed(self, at: float) -> None:
        """The step has, at this time: so that from now on as much of each flows in backward as fits there."""
        if self._began is not None and self._guess is None:
            self._share = min(1.0, (self._stepped - self._began) / (at - self._began))

    def undo(self, why: str) -> None:
        """There is no guess any more. `why`: for stats()."""
        with self._engine.lock:
            if (guess := self._guess) is None:
                return
            self._hold_used = guess.undo()
            self._guess = None
            self.redone[why] += 1
            self._wrong_in_a_row += 1
            self._pause = min(2 ** (self._wrong_in_a_row - 1) - 1, MOST_PAUSE)

    def forget_gradients(self) -> None:
        """They are cleared, and no step is to have them."""
        self.undo("cleared gradients")
        self._fired.clear()
        self._made.clear()
        self._in_vain = False
