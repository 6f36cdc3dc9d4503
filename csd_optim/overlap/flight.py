"""A step that was launched and has not landed: the devices update parameters while the program continues."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..accelerator import is_captured, wait_for
from ..engine.engine import Engine
from ..engine.tiles import Pieces
from ..errors import CSDError, CSDRuntimeError
from ..step.live import LiveStep
from ..step.staging import StagingBuffer
from ..step.travel import Travel
from .order import last_places

BATCHES = 16  # of tiles: after each batch the gradients that have been used are freed


class Flight:
    """Waits for one step on a background thread, and completes it there; if the step fails, restores everything.

    Until the step has landed, only that thread and wait() use the engine. The flight keeps gradients alive until their
    use.

    The thread also copies the tiles that travel through staging buffers (images); for an accelerator, on streams of the
    ring. wait() blocks the host until a parameter has been copied. Making the current stream wait would not be enough,
    as the program may use the parameter on another stream.

    Updates on the accelerator itself are queued at launch, and nothing waits for them. If directories store these
    states, the thread copies each state as soon as it is updated.
    """

    def __init__(
        self,
        engine: Engine,
        live: LiveStep,
        travel: Travel,
        pieces: Pieces,
        early_buffers: dict[int, StagingBuffer],
    ) -> None:
        """`live`: the step, not launched yet. `travel`: of the same step, as prepared in step().

        `early_buffers`: by tile, of images that were pushed in backward.
        """
        self.live: LiveStep = live
        self._travel = travel
        self._engine, self._pieces, self._early_buffers = engine, pieces, early_buffers
        self.failure: BaseException | None = None  # if set, the step is undone, or will be after the ranks' vote
        self.landed_at: float = 0.0
        self._accelerated = frozenset(travel.accelerated.rows)
        self._tiles = live.tiles
        # All gradients have version counters: Overlap.can_launch() excludes inference mode.
        self._grads = {
            row: (grad, grad._version) for row, grad in travel.spec.grads.items() if row not in self._accelerated
        }
        self._in_step = np.zeros(len(engine.tiles), bool)
        self._copy_events: dict[int, Any] = {}  # by row: event after the last copy to a parameter on an accelerator
        travel.await_buckets()
        self._thread = threading.Thread(target=self._land, name="csd_optim lands a step")

    def begin(self) -> None:
        """Hand the step over to the thread: it has begun, with all tiles pushed but images. Raises what a step raises.

        The caller then undoes the step. Everything else that can fail belongs in the constructor: with `ram:`, a step
        that has begun cannot be undone.
        """
        live = self.live
        self._travel.queue_accelerator()
        live.spec.grads = {}
        self._tiles = live.tiles
        self._in_step[self._tiles] = True
        live.mark_synced()  # before anything can fail: a failure makes values set by the program count as written again
        self._engine.completed_event = self._travel.ended  # last, because its waiters wait for the thread
        try:
            self._thread.start()
        except RuntimeError:  # at interpreter shutdown no more threads start
            self._land()

    @property
    def landed(self) -> bool:
        return self._travel.ended.is_set()

    def wait(self, rows: Sequence[int]) -> bool:
        """Wait for parameters, by row of the step's table.

        Returns True when they are there, False if the step failed.
        """
        self._check_process()
        rows = [row for row in rows if row not in self._accelerated]  # the accelerator's are up to date
        tiles = self._pieces.tiles_of(rows)
        try:
            self._travel.arrived(tiles[self._in_step[tiles]], wait=True)  # the step changes no other tiles
            self._travel.wait_for_others(rows)
        except CSDError:  # the step has failed, or has just landed with all parameters
            self.join()
        if self.landed and self.failure:
            return False
        for row in rows:
            self._free_gradient(row)
            if event := self._copy_events.get(row):
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

    def updates_residual(self, row: int) -> bool:
        """Return whether the gradient is needed until the step is complete, because Top-K then updates its residual."""
        return bool(self._travel.spec.table["residual"][row])

    def join(self) -> None:
        """Return when the step is complete and its commit has begun, or when the step is undone."""
        if not self.landed:  # a flight that landed before a fork is fine in the child
            self._check_process()
            self._travel.ended.wait()

    def _check_process(self) -> None:
        """Raise CSDRuntimeError in a forked child, which lacks the thread that lands the step."""
        if self._engine.pid != os.getpid():
            raise CSDRuntimeError(
                f"process {self._engine.pid} forked this one while a step was in flight: its parameters cannot arrive "
                "here. Call the optimizer's wait() before the fork; with a DataLoader whose workers use the model, "
                "before you iterate over it"
            )

    def _land(self) -> None:
        try:
            with torch.no_grad(), self._travel.ring.on_separate_streams():
                try:
                    self._exchange()
                    self._free_used_gradients()
                    with self._engine.lock:
                        self.live.land()
                except BaseException:
                    self.live.undo()  # on these streams, which then wait for the restored values
                    raise
        except BaseException as failure:
            self.failure = failure
            self.live.undo()  # the ring could not make its streams
        finally:
            self._grads.clear()
            self._early_buffers.clear()
            self.landed_at = time.perf_counter()
            self._travel.end()

    def _exchange(self) -> None:
        """Copy the tiles that travel as images, and exchange parameters whose updates the ranks share.

        Sends all buckets even after a failure here, since the other ranks wait for them.
        """
        travel = self._travel
        travel.begin_exchange(received=self._note_received)
        try:
            travel.run(self._note_pulled, self._early_buffers)
            travel.ring.wait_for_copies()
            travel.send()
        finally:
            travel.finish()

    def _note_received(self, rows: list[int]) -> None:
        for device in {self._param_device(row) for row in rows}:
            if device.type != "cpu":  # readers wait on the host, whatever their stream
                torch.accelerator.current_stream(device).synchronize()
        self._travel.note_received(rows)

    def _param_device(self, row: int) -> torch.device:
        return self.live.history.state_map.by_index[row].local.device

    def _free_used_gradients(self) -> None:
        """Free gradients that have been used. Raises CSDRuntimeError if a gradient was changed before its use.

        The caller then undoes the step.
        """
        spec, last = self._travel.spec, last_places(self._pieces, self._tiles)
        for batch in np.array_split(np.arange(len(self._tiles)), BATCHES):
            if not len(batch):
                continue
            self._travel.arrived(self._tiles[batch], wait=True)
            for row in [row for row in list(self._grads) if last[row] <= batch[-1]]:
                self._free_gradient(row)
        if changed := [row for row, (grad, version) in list(self._grads.items()) if grad._version != version]:
            names = ", ".join(state.name for state in spec.plan.param_states if state.index in changed)
            raise CSDRuntimeError(
                f"the gradient of {names} was changed after step(), which was still using it: the step is undone. "
                "With overlap(), clear gradients by zero_grad(), with set_to_none=True, before the next backward, "
                "or call wait() before you change them"
            )

    def _note_pulled(self, tile: int) -> None:
        """As Travel.note_pulled(); also lets readers wait for copies, and frees gradients of complete parameters."""
        rows = [row for row in self._engine.tiles.pieces_of(tile)["param"].tolist() if row in self._grads]
        for row in rows:
            if (source := self._travel.spec.sources.get(row)) and source.copy_event:
                self._copy_events[row] = source.copy_event
        self._travel.note_pulled(tile)
        for row in rows:
            if self._travel.arrived(self._pieces.tiles_of([row]), wait=False):
                self._free_gradient(row)

    def _free_gradient(self, row: int) -> None:
        """Free a used gradient, unless the program has changed it, or Top-K needs it until the step is complete."""
        entry = self._grads.get(row)
        if entry and entry[0]._version == entry[1] and not self.updates_residual(row):
            self._grads.pop(row, None)
            self._travel.spec.sources.pop(row, None)
