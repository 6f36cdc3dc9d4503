"""A step of an owner in which tiles are updated, and parameters sent back, while other gradients still arrive.

The protocol of a step (messages have the tag MESSAGE, and tensors BULK, with a connection for each direction):

    trainer 0     sends the step's message to all owners: parameters, in the order in which they travel, hyperparameters
    trainers      send values that were set from outside, then gradients that have not left in backward, and receive
                  parameters at the same time; with the hook, gradients may still be leaving (PUSH, PUSHED)
    owners        vote when they have the message and those values; begin; update each tile when all trainers' gradients
                  of it have arrived; send each bucket of parameters when its tiles are updated; vote; commit
    owner 0       replies to all trainers after the parameters

All data of a step travels even if the step fails, so that no process waits in vain: an owner whose drive fails keeps
receiving, and after the step is undone it sends the remaining parameters unchanged. Failures:

    a drive fails, or an owner refuses    undone on all owners; the reply says why, and trainers pull the previous
                                          parameters again. The session goes on
    a trainer is gone or silent           undone on all owners, unless all of them have all gradients; the session ends
    another session takes over            the same
    an owner is gone                      the other owners and the trainers raise; restarted owners resume from their
                                          last common step

With the hook, trainer 0 announces at the first bucket of a backward what the step will be if nothing but the gradients
changes ("guess"; it has no reply). Owners begin that step and update tiles in the other slots while backward goes on;
they send nothing. The step's message shows whether the guess was right. If it was wrong, if anything else is requested,
or if the session ends, the guess is undone, and the step is made as without one.

With values from outside, new states, Top-K entries, or sums that are clipped, a step
begins only when all gradients have arrived, and sends its parameters when it is complete. The protocol is the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..bindings import AS_PUSHED, NEW
from ..distributed.ranks import all_ranks_or_none
from ..engine.tiles import Pieces
from ..errors import CSDError, CSDRankError
from ..params.strides import numel
from ..step.live import Countdown, LiveStep, Phase
from ..step.mode import InStep
from ..step.prepared import PreparedStep
from ..step.spec import StepPlan
from ..store.format import Record
from .blocks import Block, Bucket
from .values import dtype_named

if TYPE_CHECKING:
    from .arrivals import Arrival
    from .owner import Owner

# Fields that a guess and the message of its step have in common; the guess is right if all of them are equal.
GUESS_FIELDS = ("params", "dtypes", "pushed", "scale", "hyper", "shares", "max_grad_norm")


class Rows:
    """Maps an owner's rows of a parameter to the tiles that contain them."""

    def __init__(self, local: torch.Tensor, first: int, pieces: np.ndarray[Any, Any]) -> None:
        """`first`: number of the parameter's row that `local` begins with; `pieces` of `local`: dtype PIECE."""
        self._first = first
        self._tiles: np.ndarray[Any, Any] = pieces["tile"].astype(np.int64)
        rows = local.shape[0] if local.dim() else 1
        begin, end = np.zeros(len(pieces), np.int64), np.full(len(pieces), rows)
        if rows and local.is_contiguous():  # otherwise each tile may contain elements of every row
            width = numel(local) // rows
            begin = pieces["param_first"].astype(np.int64)
            end = -(-(begin + pieces["elems"].astype(np.int64)) // width)
            begin //= width
        self._begin, self._end = begin, end

    def tiles(self, block: Block) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the tiles with rows of a block of the parameter, and how many elements of its rows each counts; int64.

        A row counts in every tile that has some of it, so disjoint blocks add up to their union.
        """
        if not block.numel:
            return self._tiles[:0], self._tiles[:0]
        first, n = (block.first[0] - self._first, block.sizes[0]) if block.sizes else (0, 1)
        rows = np.minimum(self._end, first + n) - np.maximum(self._begin, first)
        has_rows = rows > 0
        return self._tiles[has_rows], rows[has_rows] * (block.numel // n)


class Layout:
    """What stays the same from step to step while the same parameters take part: which tiles need which gradients."""

    def __init__(self, owner: Owner, plan: StepPlan, indices: Sequence[int], *, summed_by_owners: bool) -> None:
        """`indices`: numbers of the parameters; `summed_by_owners`: each trainer sends all of this owner's rows."""
        opt = owner.optimizer
        self.plan: StepPlan = plan
        self.indices: list[int] = [*indices]
        self.summed_by_owners: bool = summed_by_owners
        pieces, params = Pieces(opt._engine.tiles), owner.params
        self.rows: dict[int, Rows] = {}
        # Elements of gradients, counted as Rows.tiles() does, that each tile needs from all trainers together.
        self.needed_elements: np.ndarray[Any, Any] = np.zeros(pieces.n_tiles, np.int64)
        for index in indices:
            state, mine = opt._state_map.param_states[id(params[index])], owner.owned_block(index)
            first = mine.first[0] if mine.first else 0
            rows = self.rows[index] = Rows(state.local, first, pieces.of(state.index))
            for block in owner.expected_blocks(index, summed_by_owners=summed_by_owners):
                tiles, elements = rows.tiles(block)
                np.add.at(self.needed_elements, tiles, elements)
        # Tiles in the order in which parameters travel, so that gradients which leave first are used first. int64.
        tiles = np.concatenate([rows.tiles(owner.owned_block(index))[0] for index, rows in self.rows.items()])
        self.order: np.ndarray[Any, Any] = tiles[np.sort(np.unique(tiles, return_index=True)[1])]

    def fits(self, plan: StepPlan, indices: Sequence[int], *, summed_by_owners: bool) -> bool:
        return self.plan is plan and self.indices == [*indices] and self.summed_by_owners is summed_by_owners

    def tiles_of(self, bucket: Bucket) -> np.ndarray[Any, Any]:
        """Return the tiles with a bucket's parameters (uint32)."""
        return np.unique(np.concatenate([self.rows[piece.key].tiles(piece.block)[0] for piece in bucket])).astype("u4")


class Flow(InStep):
    """One step of an owner's optimizer, from its message to its end; `begin` and `end_step` are collectives of owners.

    Receiving threads report gradients with `record_arrival`. The sending thread waits for parameters with
    `await_params`.
    """

    def __init__(self, owner: Owner, message: dict[str, Any]) -> None:
        self._owner, self._optimizer, self._message = owner, owner.optimizer, message
        self._indices: list[int] = message["params"]
        dtypes = map(dtype_named, message["dtypes"])
        # By parameter: the backward in which its gradient leaves, and its dtype on the wire.
        self._gradients = dict(zip(self._indices, zip(message["pushed"], dtypes, strict=True), strict=True))
        self._summed_by_owners = "shares" in message
        # owner.changed guards the fields below except the lock _engine_use, and is notified when they change.
        self._live: LiveStep | None = None  # the step under way
        self._layout: Layout | None = None  # of that step
        self._countdown = Countdown(np.zeros(0, np.int64), ())  # of elements of gradients
        self._failure: CSDError | None = None
        self._is_over = False  # the step is complete, or undone
        self._engine_use = threading.Lock()  # held by the sending thread while it uses the engine

    @property
    def under_way(self) -> bool:
        return self._live is not None

    def is_for(self, message: dict[str, Any]) -> bool:
        """Return whether this step was begun as `message` now requests it."""
        same = all(message.get(name) == self._message.get(name) for name in GUESS_FIELDS)
        return same and self.under_way and not message["written"]

    # ---- on the owner's own thread ----------------------------------------------------

    def begin(self) -> None:
        """Begin the step if it need not wait for all gradients, on all owners or on none: see `under_way`.

        Raises what a step raises, on all owners. The caller calls end() afterwards.
        """
        opt, engine = self._optimizer, self._optimizer._engine
        engine.check_open()
        with engine.lock, torch.no_grad():
            engine.committer.confirm()
            with all_ranks_or_none(opt._ranks):
                opt._steps.finish_undo(collective=True)
                live = opt._steps.prepare()
                can_begin = live is not None and self._can_overlap(live.step)
            if not (all(vote for (vote,) in opt._ranks.gather(can_begin)) if opt._ranks else can_begin):
                return
            with all_ranks_or_none(opt._ranks):
                self._launch(live)

    def _can_overlap(self, step: PreparedStep) -> bool:
        opt = self._optimizer
        has_new_states = bool((step.spec.table["master"][step.spec.plan.rows] == NEW).any())
        return opt._steps.can_undo(step) and not (has_new_states or step.images or step.near)

    def _launch(self, live: LiveStep) -> None:
        owner = self._owner
        layout = owner.layout_of(live.spec.plan, self._indices, summed_by_owners=self._summed_by_owners)
        self._optimizer._mode, self._live = self, live
        if len(live.step.tiles):
            live.begin(Phase.OPEN, order=AS_PUSHED, kept_alive=live.step)
        with owner.changed:
            self._layout = layout
            self._countdown = Countdown(layout.needed_elements, live.tiles.tolist())
            assert owner.arrivals
            for arrival in owner.arrivals.all_arrivals():
                self._count(arrival)
            self._push(self._countdown.complete(layout.order.tolist()))
            owner.changed.notify_all()

    def end_step(self, record: Record | None) -> None:
        live, engine = self._live, self._optimizer._engine
        assert live is not None

        def pushed() -> None:
            if self._failure:
                raise self._failure
            if self._countdown.left:
                raise CSDRankError("not all gradients of the step have arrived")
            live.request(record)

        try:
            live.run(descending=self._optimizer._steps.descending, pushed=pushed)
        finally:
            with self._owner.changed:
                self._live = None
        engine.tile_rank = self._countdown.rank()  # expect the next step's gradients in the same order

    def drain(self, *, collective: bool) -> None:
        self._undo()

    def close(self) -> None:
        self._undo()

    def end(self) -> None:
        """End the step: undo it unless it is complete. Parameters that have not left are then sent as they are."""
        try:
            self._undo()
        finally:
            self._optimizer._mode = InStep()
            with self._owner.changed:
                self._is_over = True
                self._owner.changed.notify_all()
            with self._engine_use:  # wait until the sending thread has left the engine
                pass

    def _undo(self) -> None:
        with self._owner.changed:
            live, self._live = self._live, None
        if live is not None:
            live.undo()

    # ---- on threads that receive ------------------------------------------------------

    def record_arrival(self, arrival: Arrival) -> None:
        """Count a gradient that has arrived, and push the tiles that it completes. The caller holds owner.changed."""
        if self._live is not None and self._layout is not None:
            self._push(self._count(arrival))

    def _count(self, arrival: Arrival) -> list[int]:
        """Count an arrival. Returns the tiles that it completes; none if it does not belong to this step."""
        assert self._layout
        if self._gradients.get(arrival.param) != (arrival.backward, arrival.dtype):
            return []
        tiles, elements = self._layout.rows[arrival.param].tiles(arrival.block)
        return sorted(self._countdown.arrive(tiles.tolist(), elements.tolist()))

    def _push(self, tiles: Iterable[int]) -> None:
        """Push tiles whose gradients are complete to the engine."""
        assert self._live
        try:
            for tile in tiles:
                self._live.push(tile)
                self._countdown.note_pushed(tile)
        except CSDError as e:
            self._failure = self._failure or e

    # ---- on the thread that sends -----------------------------------------------------

    def await_params(self, bucket: Bucket) -> None:
        """Wait until these parameters can be sent."""
        changed = self._owner.changed
        with changed:
            changed.wait_for(lambda: self._is_over or self._layout is not None)
            if self._layout is None or self._is_over:
                return
            tiles = self._layout.tiles_of(bucket)
            changed.wait_for(lambda: self._is_over or self._countdown.were_pushed(tiles.tolist()))
            if self._is_over:
                return
        with self._engine_use:
            if not self._is_over and len(tiles):
                with contextlib.suppress(CSDError):  # the step has failed, and will be undone next
                    self._optimizer._engine.native.params_ready(tiles, wait=True)
                    return
        with changed:
            changed.wait_for(lambda: self._is_over)
