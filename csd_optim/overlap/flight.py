"""A step that was launched and has not landed: the devices update while the program goes on."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..accelerator import is_captured, wait_for
from ..engine.engine import Engine
from ..engine.pieces import Pieces
from ..errors import CSDError, CSDRuntimeError
from ..step.prepare import PreparedStep
from ..step.run import StepRunner
from ..store.format import Record
from .order import last_places

BATCHES = 16  # of tiles, after each of which the gradients that nobody needs any more are let go of


class Flight:
    """Waits for one step on a thread of its own, and makes it whole there; or puts everything back.

    Until it has landed, only that thread and wait() use the engine. It holds the gradients until they have been used.

    What travels by images is copied there, too: of an accelerator, on streams of the ring. Who waits for a parameter
    stands still until it has been copied. A stream that waited in his stead would be the current one, and whoever has a
    reference may use the parameter on another.

    What is updated on the accelerator is queued when the step is launched. For that nobody waits. Where directories
    keep its states, the thread copies these, too, as soon as each is updated.
    """

    def __init__(
        self,
        runner: StepRunner,
        engine: Engine,
        step: PreparedStep,
        record: Record | None,
        launch: Callable[[], np.ndarray[Any, Any]],
        pieces: Pieces,
    ) -> None:
        """Launches the step, by `launch`, which returns its tiles in the order in which they flow.

        Raises what that raises; then nothing is under way.
        """
        self._runner, self._engine, self._record = runner, engine, record
        self.step: PreparedStep = step
        self._pieces = pieces
        self.failure: BaseException | None = None  # parameters and states are those before the step: see give_up()
        self.landed_at: float = 0.0
        self._tiles = launch()
        self._near = frozenset(runner.launch_near(engine, step))
        self._held = {row: (grad, grad._version) for row, grad in step.grads.items() if row not in self._near}
        step.grads = {}
        self._takes_part, self._is_image, self._pulled = (np.zeros(engine.n_tiles, bool) for _ in range(3))  # each tile
        self._takes_part[self._tiles] = True
        self._is_image[step.images] = True
        self._arrivals: dict[int, Any] = {}  # events, by row: the last copies to parameters on an accelerator
        self._news = threading.Condition()  # of tiles that were pulled, and of the end
        engine.landing = self._landed = threading.Event()
        try:
            threading.Thread(target=self._land, name="csd_optim lands a step").start()
        except RuntimeError:  # the interpreter shuts down and has no more threads to give
            self._land()

    @property
    def landed(self) -> bool:
        return self._landed.is_set()

    def wait(self, rows: Sequence[int]) -> bool:
        """Returns whether these parameters have arrived, which are rows of the step's table; no: it has failed."""
        self._check_process()
        rows = [row for row in rows if row not in self._near]  # which is there, though states travel
        tiles = self._pieces.tiles_of(rows)
        tiles = tiles[self._takes_part[tiles]]  # others are as they were
        images = tiles[self._is_image[tiles]]
        with self._news:
            self._news.wait_for(lambda: self._pulled[images].all() or self.landed)
        try:
            self._engine.params_ready(tiles[~self._is_image[tiles]], wait=True)
        except CSDError:  # it has failed; or it has just landed, and all have arrived
            self.join()
        if self.landed and self.failure:
            return False
        for row in rows:
            self._is_used(row)
            if event := self._arrivals.get(row):
                self._wait_for_copy(event)
        return True

    @staticmethod
    def _wait_for_copy(event: Any) -> None:
        if is_captured(event.device):
            raise CSDRuntimeError(
                "a graph is captured that uses a parameter which the last step() is still updating: call wait() of the "
                "optimizer before the capture"
            )
        wait_for(event)

    def owes(self, row: int) -> bool:
        """Is the parameter's gradient needed until the step is whole, as Top-K owes what it did not send?"""
        return bool(self.step.table["residual"][row])

    def join(self) -> None:
        """Returns when the step is whole and its commit has begun, or is undone."""
        if not self.landed:  # before a fork it may have
            self._check_process()
            self._landed.wait()

    def _check_process(self) -> None:
        """In a forked child nobody lands. Raises CSDRuntimeError."""
        if self._engine.pid != os.getpid():
            self._engine.check_open()

    def _land(self) -> None:
        ring = self.step.ring
        try:
            with torch.no_grad(), ring.beside() if ring else contextlib.nullcontext():
                self._wait_for_use()
                with self._engine.lock:
                    self._runner.land(self._engine, self.step, self._record)
        except BaseException as failure:
            for param_state in self.step.written:  # those that the step was to take over count as written still
                param_state.version = -1
            self.failure = failure
            with torch.no_grad(), self._engine.lock:
                if self._engine.stepping:  # there were no streams for it
                    self._runner.give_up(self._engine, self.step)
        finally:
            self._held.clear()
            self.step.held.clear()
            self.landed_at = time.perf_counter()
            with self._news:
                self._landed.set()
                self._news.notify_all()

    def _wait_for_use(self) -> None:
        """Lets go of gradients as soon as they have been used. Raises CSDRuntimeError if somebody changed one before.

        Then, and on any other failure, the step is undone.
        """
        last = last_places(self._pieces, self._engine.n_params, self._tiles)
        try:
            step = self.step
            if step.ring is not None:
                step.ring.run(self._engine, step.images, step.prepared, self._is_pulled, step.held)
                step.ring.wait_for_copies()
            for batch in np.array_split(np.arange(len(self._tiles)), BATCHES):
                if not len(batch):
                    continue
                self._engine.params_ready(self._tiles[batch], wait=True)
                for row in [row for row in list(self._held) if last[row] <= batch[-1]]:
                    self._is_used(row)
            if changed := [row for row, (grad, version) in list(self._held.items()) if grad._version != version]:
                names = ", ".join(b.name for b in self.step.plan.param_states if b.index in changed)
                raise CSDRuntimeError(
                    f"the gradient of {names} was changed after step(), which was still using it: the step is undone. "
                    "With overlap(), clear gradients by zero_grad(), with set_to_none=True, before the next backward, "
                    "or call wait() before you change them"
                )
        except BaseException:
            with self._engine.lock:
                self._runner.give_up(self._engine, self.step)
            raise

    def _is_pulled(self, tile: int) -> None:
        """The last copies to the parameters of an image were begun."""
        rows = [row for row in self._engine.pieces_of(tile)["param"].tolist() if row in self._held]
        for row in rows:
            if (source := self.step.prepared.get(row)) and source.arrives:
                self._arrivals[row] = source.arrives
        with self._news:
            self._pulled[tile] = True
            self._news.notify_all()
        for row in rows:
            if self._pulled[self._pieces.tiles_of([row])].all():
                self._is_used(row)

    def _is_used(self, row: int) -> None:
        """The gradient is not needed any more, unless it was changed before this, or the step owes something of it."""
        held = self._held.get(row)
        if held and held[0]._version == held[1] and not self.owes(row):
            self._held.pop(row, None)
            self.step.prepared.pop(row, None)
