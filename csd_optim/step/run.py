"""One step, from what is prepared to what is done: tiles flow through the devices, or everything is put back."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..bindings import GRAD_SCALE
from ..compression.policy import entry_dtype
from ..compression.selection import TopK
from ..distributed.ranks import Ranks, all_ranks_or_none
from ..engine.engine import Engine
from ..errors import CSDError
from ..params.param_state import ParamState
from ..params.state_map import StateMap
from ..params.strides import flat
from ..store.format import Record
from .all_gather import ParamAllGather
from .staging import BUFFERS_PER_DEVICE, GradSource, StagingRing


@dataclass
class StepPlan:
    """What stays the same from step to step while the same parameters take part."""

    params: list[torch.Tensor]
    param_states: list[ParamState]
    rows: np.ndarray[Any, Any]  # their rows in the table
    sections: np.ndarray[Any, Any]  # how many each has
    table: np.ndarray[Any, Any]  # dtype PARAM, without gradients and hyperparameters
    grad_dtype: torch.dtype | None  # the optimizer's option when this was made
    changes: int  # of the places, when this was made
    gather: ParamAllGather | None = None  # of the parameters whose updates the ranks share; made when first needed


@dataclass
class PreparedStep:
    """A step that is ready to be taken."""

    plan: StepPlan
    grads: dict[int, torch.Tensor]  # of the parts, by row of the table
    steps: np.ndarray[Any, Any]  # as they will be
    table: np.ndarray[Any, Any]
    hypers: np.ndarray[Any, Any]
    prepared: dict[int, GradSource]  # what the engine cannot take as it stands, by row
    written: list[ParamState]  # from outside, since the last step
    owed: list[ParamState]  # residuals that the step changes
    unscaled: bool  # gradients can be told from the scale: what is sent whole is owed no more
    # How it flows: see StepRunner.make_ready()
    tiles: np.ndarray[Any, Any] = field(init=False)
    images: list[int] = field(init=False)  # tiles that travel by them
    ring: StagingRing | None = field(init=False)
    gather: ParamAllGather | None = field(init=False)


class StepRunner:
    """Takes the steps of one optimizer."""

    def __init__(self, state_map: StateMap, ranks: Ranks | None) -> None:
        self._state_map, self._ranks = state_map, ranks
        self.ring: StagingRing | None = None  # made when first needed
        self.moved = False  # tiles, in the last step
        self.in_flight = False  # last states may still be on their way

    def make_ready(self, engine: Engine, step: PreparedStep) -> None:
        """Whatever can fail before the ranks begin to exchange parameters, such as for lack of memory."""
        step.tiles = engine.tiles_with(step.table["grad"] != 0)
        step.images = self._images(engine, step)
        step.ring = self._ring(engine, step.prepared) if step.images else None
        step.gather = self._gather(engine, step.plan)

    def run(self, engine: Engine, step: PreparedStep, record: Record | None, *, descending: bool) -> StagingRing | None:
        """The step proper. On any failure, of any rank, parameters and state are put back.

        `descending`: of what the ranks share, the last goes first. Returns the ring, if something went through it,
        which has residuals yet to be brought up to date.
        """
        table, prepared = step.table, step.prepared
        tiles, images, ring, gather = step.tiles, step.images, step.ring, step.gather
        if gather:
            gather.begin(images, prepared, descending=descending)
        done = False  # by all ranks
        try:
            with all_ranks_or_none(self._ranks):
                try:
                    if len(tiles):
                        tiles = engine.begin(table, step.hypers, tiles, record)
                        self.in_flight = self.moved = True
                        direct = tiles[~np.isin(tiles, images)]
                        for tile in direct.tolist():
                            engine.push(tile)
                        if ring is not None:
                            ring.run(engine, images, prepared, gather.pulled if gather else None)
                        if gather:
                            gather.advance(wait=True)
                        if self._ranks:
                            engine.params_ready(direct, wait=True)
                finally:
                    if gather:
                        gather.finish()
            done = True
            if engine.stepping:
                engine.finish()
            elif self._ranks:
                engine.step += 1  # that of the others
        except BaseException:
            if engine.stepping or done:
                with contextlib.suppress(CSDError):
                    engine.finish(keep=False)  # a finish() that failed has undone the step already
                if ring is not None:
                    ring.forget()
                self._restore(engine, table["grad"] != 0)
            if gather and not done:
                gather.again()
            raise
        return ring

    def _images(self, engine: Engine, step: PreparedStep) -> list[int]:
        """Tiles that travel by images: with gradients on a GPU, or to be rounded. Prepares whatever lies in them."""
        table, prepared = step.table, step.prepared
        travels = np.zeros(len(table), bool)
        for row, s in prepared.items():
            travels[row] = s.grad.is_cuda or (s.grad.dtype is not s.grad_dtype and not table["topk"][row])
        if not travels.any():
            return []
        tiles: list[int] = engine.tiles_with(travels).tolist()
        # A tile goes as a whole: what shares it with a travelling parameter travels too.
        for tile in tiles:
            for row in engine.pieces_of(tile)["param"].tolist():
                if table["grad"][row] and row not in prepared:
                    prepared[row] = self._state_map.by_index[row].source(step.grads[row], step.plan.grad_dtype)
        # What the table tells the engine, which does not select from images.
        for row, source in prepared.items():
            if share := float(table["topk"][row]):
                residual = self._state_map.by_index[row].residual if table["residual"][row] else None
                source.topk = TopK(
                    share,
                    entry_dtype(source.grad.dtype, step.plan.grad_dtype),
                    None if residual is None else flat(residual),
                    float(step.hypers["c"][table["hyper"][row], GRAD_SCALE]),
                    int(table["seed"][row]),
                )
        return tiles

    def _ring(self, engine: Engine, prepared: dict[int, GradSource]) -> StagingRing:
        tile_elems = max(e.tile_elems for e in engine.extents)
        pinned = any(s.grad.is_cuda for s in prepared.values())
        if self.ring is None or self.ring.tile_elems < tile_elems or pinned > self.ring.pinned:
            self.ring = StagingRing(tile_elems, BUFFERS_PER_DEVICE * len(engine.devices.specs), pinned=pinned)
        return self.ring

    def _gather(self, engine: Engine, plan: StepPlan) -> ParamAllGather | None:
        """What goes to the other ranks, if they share the updates of these parameters."""
        if plan.gather is None and self._ranks and (shares := [b for b in plan.param_states if b.part.replicas]):
            plan.gather = ParamAllGather(self._ranks, engine, shares)
        return plan.gather

    def _restore(self, engine: Engine, took_part: np.ndarray[Any, Any]) -> None:
        """Gives the parameters of an undone step the values they had: those of the masters, back in their place."""
        engine.remap()  # the windows show the masters as they were
        for tile, elems in engine.undone():
            for row, _, first, in_tile, n in engine.pieces_of(tile).tolist():
                if took_part[row] and in_tile < elems:
                    self._state_map.by_index[row].restore(first, min(n, elems - in_tile))
