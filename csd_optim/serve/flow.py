"""A step of an owner that is made while its gradients come, and whose parameters leave while others are made.

The protocol of a step; what is said goes by MESSAGE, and what follows it by BULK, one way each:

    trainer 0     says the step to all owners: parameters, in the order in which they travel, and hyperparameters
    trainers      send values that were set from outside, then gradients that have not left in backward, and receive
                  parameters at the same time; with the hook gradients may still be leaving (PUSH, PUSHED)
    owners        vote when they have the message and those values; begin; update each tile when all trainers' gradients
                  of it are there; send each bucket of parameters when its tiles have theirs; vote; commit
    owner 0       replies to all trainers, behind the parameters

All that belongs to a step travels, whatever becomes of it, so that nobody waits in vain: an owner whose drive fails
goes on to receive, and what it has not sent it sends as it is once everything is put back. Then

    a drive fails, or an owner says no    undone on all owners; the reply says why, and trainers pull once more what was
                                          there before. The session goes on
    a trainer is gone, or silent          undone on all owners, unless all of them have all gradients; the session ends
    another session takes over            the same
    an owner is gone                      the others and the trainers end; owners go on from their last common step

With the hook trainer 0 announces, with the first bucket of a backward, what the step will be if nothing but gradients
changes ("guess"; no reply). Owners begin it, and update in their other slots while backward goes on; nothing is sent.
The step's message says whether that was right. If not, or if anything else is asked for, or the session ends, it is
undone, and the step is made as without.

Values from outside, new states, one slot (shadow=False), sums that are clipped or of entries (Top-K): with these a step
begins when all gradients are there, and its parameters leave when it is whole. The protocol is the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..bindings import AS_PUSHED, NEW
from ..distributed.ranks import all_ranks_or_none
from ..engine.pieces import Pieces
from ..errors import CSDError, CSDRankError
from ..params.strides import numel
from ..step.mode import InStep
from ..step.prepare import PreparedStep, StepPlan, participants
from ..store.format import Record
from .blocks import Block, Bucket
from .values import dtype_named

if TYPE_CHECKING:
    from .arrivals import Arrival
    from .owner import Owner

NEVER = np.iinfo(np.int64).max
# What a message says of a step that is announced in backward, and again when it is asked for.
FORESEEN = ("params", "dtypes", "pushed", "scale", "hyper", "shares", "max_grad_norm")


class Rows:
    """In which tiles the rows are that an owner has of a parameter."""

    def __init__(self, local: torch.Tensor, first: int, pieces: np.ndarray[Any, Any]) -> None:
        """`first`: the parameter's row that is the first of `local`; `pieces`: of `local`, dtype PIECE."""
        self._first = first
        self._tiles: np.ndarray[Any, Any] = pieces["tile"].astype(np.int64)
        rows = local.shape[0] if local.dim() else 1
        begin, end = np.zeros(len(pieces), np.int64), np.full(len(pieces), rows)
        if rows and local.is_contiguous():  # else a tile may have something of each row
            width = numel(local) // rows
            begin = pieces["param_first"].astype(np.int64)
            end = -(-(begin + pieces["elems"].astype(np.int64)) // width)
            begin //= width
        self._begin, self._end = begin, end

    def tiles(self, block: Block) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Those with rows of a block of the parameter, and how much of it each lacks without: of an own unit, int64.

        The units of blocks add up to those of a block that consists of them.
        """
        if not block.numel:
            return self._tiles[:0], self._tiles[:0]
        first, n = (block.first[0] - self._first, block.sizes[0]) if block.sizes else (0, 1)
        common = np.minimum(self._end, first + n) - np.maximum(self._begin, first)
        has = common > 0
        return self._tiles[has], common[has] * (block.numel // n)


class Layout:
    """What stays the same from step to step while the same parameters take part."""

    def __init__(self, owner: Owner, plan: StepPlan, indices: Sequence[int], *, apart: bool) -> None:
        """`indices`: of the parameters; `apart`: each trainer sends all of each."""
        opt = owner.optimizer
        self.plan: StepPlan = plan
        self.indices: list[int] = [*indices]
        self.apart: bool = apart
        pieces, params = Pieces(opt._engine), owner.params
        self.rows: dict[int, Rows] = {}
        self.others: set[int] = set()  # parameters of which owners get a part from each other, when the step is whole
        # Of each tile: how much its gradients are.
        self.gradients: np.ndarray[Any, Any] = np.zeros(pieces.n_tiles, np.int64)
        for index in indices:
            state, mine = opt._state_map.param_states[id(params[index])], owner.mine(index)
            first = mine.first[0] if mine.first else 0
            rows = self.rows[index] = Rows(state.local, first, pieces.of(state.index))
            if state.part.replicas:
                self.others.add(index)
            for block in owner.expected(index, apart=apart):
                tiles, units = rows.tiles(block)
                np.add.at(self.gradients, tiles, units)
        # In the order in which parameters travel: so those that leave first are there first. int64.
        flow = np.concatenate([rows.tiles(owner.mine(index))[0] for index, rows in self.rows.items()])
        self.order: np.ndarray[Any, Any] = flow[np.sort(np.unique(flow, return_index=True)[1])]

    def fits(self, plan: StepPlan, indices: Sequence[int], *, apart: bool) -> bool:
        return self.plan is plan and self.indices == [*indices] and self.apart is apart

    def tiles_of(self, bucket: Bucket) -> np.ndarray[Any, Any] | None:
        """Those that a bucket of parameters is in, uint32; None: not only these."""
        if not self.others.isdisjoint(piece.key for piece in bucket):
            return None
        return np.unique(np.concatenate([self.rows[piece.key].tiles(piece.block)[0] for piece in bucket])).astype("u4")


class Flow(InStep):
    """One step of an owner's optimizer, from its message to its end; `begin` and `end_step` are for all owners.

    Its gradients are noted on the threads that receive them, and its parameters awaited on another one.
    """

    def __init__(self, owner: Owner, message: dict[str, Any]) -> None:
        self._owner, self._optimizer, self._message = owner, owner.optimizer, message
        self._indices: list[int] = message["params"]
        dtypes = map(dtype_named, message["dtypes"])
        # Of each parameter: the backward in which its gradient leaves, and as what it travels.
        self._gradients = dict(zip(self._indices, zip(message["pushed"], dtypes, strict=True), strict=True))
        self._apart = "shares" in message
        # All of what follows is read and written with owner.changed held, which is notified.
        self._step: PreparedStep | None = None  # that has begun
        self._layout: Layout | None = None  # likewise
        self._lacks = np.zeros(0, np.int64)  # of each tile
        self._pushed = np.zeros(0, bool)  # each tile
        self._order: list[int] = []  # in which they were
        self._failure: CSDError | None = None
        self._over = False  # whole, or everything is put back
        self._looks = threading.Lock()  # while a thread is in the engine that is not the optimizer's

    @property
    def under_way(self) -> bool:
        return self._step is not None

    def is_for(self, message: dict[str, Any]) -> bool:
        """Was it begun with what is asked for now?"""
        same = all(message.get(name) == self._message.get(name) for name in FORESEEN)
        return same and self.under_way and not message["written"]

    # ---- on the owner's own thread ----------------------------------------------------

    def begin(self) -> None:
        """Begins, if the step can go on while gradients come, on all owners or on none: see `under_way`.

        Raises what a step raises, on all of them; end() is to follow.
        """
        opt, engine = self._optimizer, self._optimizer._engine
        engine.check_open()
        with engine.lock, torch.no_grad():
            engine.confirm()
            with all_ranks_or_none(opt._ranks):
                record = opt._record(engine)
                taking_part = participants(opt.param_groups, type(opt).__name__, opt._for_sparse)
                step = opt._prepare_early(taking_part)
                can = step is not None and self._can(step)
            if not (all(there for (there,) in opt._ranks.gather(can)) if opt._ranks else can):
                return
            with all_ranks_or_none(opt._ranks):
                self._launch(step, record)

    def _can(self, step: PreparedStep) -> bool:
        opt = self._optimizer
        begins = bool((step.table["master"][step.plan.rows] == NEW).any())
        return opt._runner.can_undo(opt._engine, step) and not (begins or step.images or step.near)

    def _launch(self, step: PreparedStep, record: Record) -> None:
        opt, owner = self._optimizer, self._owner
        engine = opt._engine
        layout = owner.layout_of(step.plan, self._indices, apart=self._apart)
        opt._mode, self._step = self, step
        opt._runner.moved = opt._runner.in_flight = True
        if len(step.tiles):
            engine.begin(step.table, step.hypers, step.tiles, record, order=AS_PUSHED)
            engine.guessed, engine.lent = True, step
        with owner.changed:
            self._layout, self._lacks = layout, layout.gradients.copy()
            self._pushed = np.zeros(engine.n_tiles, bool)
            assert owner.arrivals
            for arrival in owner.arrivals.there():
                self._count(arrival)
            self._push(layout.order)
            owner.changed.notify_all()

    def end_step(self, record: Record | None) -> None:
        opt, step = self._optimizer, self._step
        assert step is not None
        engine = opt._engine

        def pushed() -> None:
            if self._failure:
                raise self._failure
            if not self._pushed[step.tiles].all():
                raise CSDRankError("gradients of the step have not come")
            engine.committer.reserve(record)

        try:
            opt._runner.run(engine, step, record, descending=opt._descending, pushed=pushed)
        finally:
            with self._owner.changed:
                self._step = None
        engine.lent = None
        engine.rank = np.full(engine.n_tiles, NEVER)  # gradients will come in the same order
        engine.rank[self._order] = np.arange(len(self._order))

    def come_to_rest(self, *, meets: bool) -> None:
        self._undo()

    def close(self) -> None:
        self._undo()

    def end(self) -> None:
        """The step is whole, or undone now; parameters that have not left do so as they are."""
        try:
            self._undo()
        finally:
            self._optimizer._mode = InStep()
            with self._owner.changed:
                self._over = True
                self._owner.changed.notify_all()
            with self._looks:  # nobody is left in the engine
                pass

    def _undo(self) -> None:
        with self._owner.changed:
            step, self._step = self._step, None
        if step is not None:
            engine = self._optimizer._engine
            with engine.lock, torch.no_grad():
                if engine.stepping:
                    self._optimizer._runner.undo(engine, step)
                engine.lent = None

    # ---- on threads that receive ------------------------------------------------------

    def note(self, arrival: Arrival) -> None:
        """This has come from a trainer."""
        if self._step is not None and self._layout is not None:
            self._push(np.unique(self._count(arrival)))

    def _count(self, arrival: Arrival) -> np.ndarray[Any, Any]:
        """Returns the tiles that have something of it; none if it is not of this step."""
        assert self._layout
        if self._gradients.get(arrival.param) != (arrival.backward, arrival.dtype):
            return np.zeros(0, np.int64)
        tiles, units = self._layout.rows[arrival.param].tiles(arrival.block)
        np.subtract.at(self._lacks, tiles, units)
        return tiles

    def _push(self, tiles: np.ndarray[Any, Any]) -> None:
        """Those of them that lack nothing any more."""
        engine = self._optimizer._engine
        try:
            for tile in tiles[(self._lacks[tiles] == 0) & ~self._pushed[tiles]].tolist():
                engine.push(tile)
                self._pushed[tile] = True
                self._order.append(tile)
        except CSDError as e:
            self._failure = self._failure or e

    # ---- on the thread that sends -----------------------------------------------------

    def await_params(self, bucket: Bucket) -> None:
        """Returns when these parameters can be sent."""
        changed = self._owner.changed
        tiles: np.ndarray[Any, Any] | None = None
        with changed:
            changed.wait_for(lambda: self._over or self._layout is not None)
            if self._layout is not None and not self._over:
                tiles = self._layout.tiles_of(bucket)
            changed.wait_for(lambda: self._over or (tiles is not None and bool(self._pushed[tiles].all())))
            if self._over:
                return
        with self._looks:
            if not self._over and tiles is not None and len(tiles):
                with contextlib.suppress(CSDError):  # it has failed, and is undone next
                    self._optimizer._engine.params_ready(tiles, wait=True)
                    return
        with changed:
            changed.wait_for(lambda: self._over)
