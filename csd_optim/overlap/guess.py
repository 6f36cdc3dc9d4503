"""A guess: a step that begins in backward, before it is known to be right; step() keeps or undoes it."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import torch

from ..bindings import SAME_ORDER, Push
from ..engine.engine import Engine
from ..engine.tiles import Pieces
from ..grad_modes import version_of
from ..params.param_state import ParamState
from ..params.state_map import StateMap
from ..params.strides import same_order
from ..step.countdown import Countdown
from ..step.live import LiveStep, Phase
from ..step.spec import StepSpec
from ..step.staging import StagingBuffer
from ..step.travel import Travel
from ..store.format import Record
from .early_images import EarlyImages


class Guess:
    """One step that begins before step(), with the hyperparameters of that moment; gradients join as they become final.

    A program sees no change: new states go to the inactive slots of the store; new parameters, and copies of their
    gradients, stay in `hold`.
    """

    def __init__(
        self,
        engine: Engine,
        state_map: StateMap,
        live: LiveStep,
        early: np.ndarray[Any, Any],
        flow: np.ndarray[Any, Any],
        pieces: Pieces,
        hold: torch.Tensor,
        pusher: Executor,
    ) -> None:
        """`live`: not begun, and prepared with the parameters in place of their gradients.

        `early`: tiles to push in this order, as soon as their gradients are final, while `hold` (uint8, 1-D) has room;
        step() pushes the rest. `flow`: all tiles, in the order in which their parameters are needed. Both uint32.
        `pusher`: an executor with one thread.
        """
        self.live: LiveStep = live
        self.travel: Travel = live.travel
        spec = live.spec
        self._engine, self._state_map = engine, state_map
        self._hold, self._hold_used = hold, 0  # bytes
        self._grads: dict[int, torch.Tensor] = {}  # by row: final gradients
        self._ready_events: dict[int, Any] = {}  # by row: event after which the gradient, on an accelerator, is ready
        self._images = EarlyImages(engine, state_map, live.travel, pusher)
        early = np.array(self._images.that_fit(early.tolist(), len(hold)), np.uint32)
        self._flow, self._early = flow, early
        self._tiles_of: dict[int, list[int]] = {}  # by row: tiles that may be pushed in backward
        missing = np.zeros(pieces.n_tiles, np.int64)  # by tile: number of gradients that are not final yet
        rows, tiles = pieces.all["param"], pieces.all["tile"]
        awaited = (spec.table["grad"][rows] != 0) & np.isin(tiles, early)
        for row, tile in {*zip(rows[awaited].tolist(), tiles[awaited].tolist(), strict=True)}:
            self._tiles_of.setdefault(row, []).append(tile)
            missing[tile] += 1
        self._countdown = Countdown(missing, early.tolist())
        self._far = {row for row, source in spec.sources.items() if source.is_far}
        self._versions_before = self._state_versions()

    def begin(self) -> None:
        """Begin the step. Raises what Engine.begin() raises."""
        order = np.concatenate([self._early, self._flow[~np.isin(self._flow, self._early)]])
        self.live.begin(Phase.GUESS, tiles=order, order=SAME_ORDER, kept_alive=self._hold)

    @property
    def pushed(self) -> list[int]:
        """The tiles that were pushed in backward, in this order."""
        return self._countdown.pushed

    # ---- in backward -----------------------------------------------------------

    def add_gradient(self, row: int, grad: torch.Tensor, ready_event: Any) -> None:
        """Take a parameter's final gradient, and push the tiles that now have all gradients.

        `ready_event`: the event after which a gradient on an accelerator is ready. Raises CSDError if the step fails.
        """
        if row not in self._tiles_of or row in self._grads:
            return
        if not _is_plain(grad, self._state_map.by_index[row]):
            return  # step() converts it
        self._grads[row] = grad
        if ready_event is not None:
            self._ready_events[row] = ready_event
        for tile in self._countdown.arrive(self._tiles_of[row]):
            self._push(tile)

    def _push(self, tile: int) -> None:
        is_image = tile in self._images.tiles
        size = self._images.hold_bytes(tile) if is_image else self._engine.native.hold_bytes(tile)
        if self._hold_used + size > len(self._hold):
            return
        rows = self._engine.tiles.pieces_of(tile)["param"].tolist()
        if is_image:
            grads = {row: self._grads[row] for row in rows if row in self._grads}
            ready_events = [self._ready_events[row] for row in grads if row in self._ready_events]
            self._images.push(tile, grads, ready_events, self._hold[self._hold_used : self._hold_used + size])
        else:
            addresses = [self._grads[row].data_ptr() if row in self._grads else 0 for row in rows]
            self._engine.native.push(tile, Push(grads=addresses, hold=self._hold.data_ptr() + self._hold_used))
        self._hold_used += size
        self._countdown.note_pushed(tile)

    # ---- in step() -------------------------------------------------------------

    def _state_versions(self) -> list[Any]:
        """Return the version counters of all states: they change if the program writes to a state."""
        windows = [version_of(w) for state in self._state_map.by_index for w in state.windows.values()]
        return [windows, self._engine.decoded.versions()]

    def wrong_before(self, params: list[torch.Tensor]) -> str:
        """Return why the guess is wrong whatever the gradients are; "" if it is right. `params`: all that take part."""
        plan, places = self.live.spec.plan, self._state_map
        if len(params) != len(plan.params) or any(p is not q for p, q in zip(params, plan.params, strict=True)):
            return "parameters that take part"
        if plan.changes != places.changes or any(state.is_dirty for state in places.param_states.values()):
            return "parameters"
        return "" if places.intact() and self._state_versions() == self._versions_before else "states"

    def wrong(self, spec: StepSpec) -> str:
        """Return why the guess differs from the actual step, or "". Raises CSDError if the guess has failed."""
        if spec.plan is not self.live.spec.plan or spec.sources.keys() != self._far:
            return "parameters that take part"
        if not np.array_equal(spec.hypers, self.live.spec.hypers) or spec.orthogonal != self.live.spec.orthogonal:
            return "constants"
        table = spec.table.copy()
        self.travel.supplied.mark(table)  # the same in `spec`: no state was written, no parameter was moved
        but_grad = [name for name in table.dtype.names or () if name != "grad"]
        if not all(np.array_equal(table[name], self.live.spec.table[name]) for name in but_grad):
            return "constants"
        # All bytes are compared, as writes through `grad.data` or NumPy do not change torch's version counters.
        tables = np.concatenate([table] * self.travel.passes.n_passes)  # tiles that take two passes are never early
        unchanged = self._images.unchanged(spec) and self._engine.native.unchanged(tables)
        return "" if unchanged else "gradients"

    def keep(self, travel: Travel, record: Record | None) -> dict[int, StagingBuffer]:
        """Keep a right guess, which continues as `travel`. Returns the buffers of pushed images, by tile.

        `record`: for the commit. Raises CSDOSError if the store has no room for it, and what a step raises; the caller
        then undoes the step.
        """
        # Images are pushed a few at a time, as others come back. The early images that are left come first: devices
        # process early tiles before all others, and may already hold their states in buffers.
        first = self._early[np.isin(self._early, [*self._images.tiles]) & ~np.isin(self._early, self.pushed)]
        order = np.concatenate([first, self._flow, self.live.tiles])
        order = order[np.sort(np.unique(order, return_index=True)[1])]
        self.live.confirm(travel, record, order, self.pushed)
        return self._images.buffers(order.tolist())

    def stop(self) -> None:
        """Stop using the engine, which is about to be closed."""
        self._images.stop()

    def undo(self) -> list[Future[None]]:
        """Undo a guess that was wrong or failed. When all futures returned are done, `hold` may be used again."""
        self._images.stop()
        self.live.undo()
        return self._images.push_futures


def _is_plain(grad: torch.Tensor, param_state: ParamState) -> bool:
    """Return whether the gradient can be pushed in place: dtype, device and element order fit."""
    if direct_dtype := param_state.reach.direct_dtype:
        return grad.dtype is direct_dtype and grad.is_contiguous() and not grad.is_neg()
    p = param_state.local
    right = grad.layout is torch.strided and grad.dtype is p.dtype and grad.device == p.device
    return right and same_order(grad.stride(), param_state.stride, p.shape) and not grad.is_neg()
