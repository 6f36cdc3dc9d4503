"""What the steps of one optimizer use again: staging buffers, and the all-gather of updated parameters."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..accelerator import is_on_accelerator
from ..compression.dense import DenseTopK
from ..distributed.ranks import Ranks
from ..engine.engine import Engine
from ..params.param_state import ParamState
from ..params.state_map import StateMap
from ..store.layout import plan_extent
from .accelerator_updates import NO_UPDATES, AcceleratorUpdate, AcceleratorUpdates, parameters_of_new
from .all_gather import ParamAllGather
from .images import images_of, topk_of
from .spec import StepPlan, StepSpec
from .staging import NO_STAGING, StagingRing, slots_for
from .supplied_states import SuppliedStates, supplied_states
from .travel import Travel
from .two_passes import OnePass, TwoPasses


class StepResources:
    """Gets the ways of a step ready, with memory that later steps use again."""

    def __init__(self, state_map: StateMap, ranks: Ranks | None) -> None:
        self._state_map, self._ranks = state_map, ranks
        self.ring: StagingRing = NO_STAGING
        self.gather: ParamAllGather = ParamAllGather()  # of the plan's parameters that ranks share
        self._plan: StepPlan | None = None  # for which `gather` was made
        self.carriers: dict[Ranks, Ranks] = {}  # process groups that replace the ranks' own in that exchange
        # By the first parameter of an extent whose states are on the accelerator alone: see _parts_of().
        self._planned: dict[int, np.ndarray[Any, Any]] = {}

    @property
    def buffer_bytes(self) -> int:
        return self.ring.bytes

    def forget_gather(self) -> None:
        """Have the next step make another all-gather, as the plan or the process groups are others."""
        self._plan, self.gather = None, ParamAllGather()

    def prepare(self, engine: Engine, spec: StepSpec, *, foreseen: bool = False, one_by_one: bool = False) -> Travel:
        """Do everything that may fail, such as allocations, before ranks exchange data. Raises what a step raises.

        `foreseen`: the step may begin in backward, but step() prepares another one, which does what the tiles that
        begin in backward do not need. `one_by_one`: gradients arrive one after another.
        """
        tiles = engine.in_step_order(engine.tiles.of_mask(spec.table["grad"] != 0))
        supplied = supplied_states(engine, spec, tiles)
        images = images_of(engine, self._state_map, spec, tiles, supplied)
        ring = self._ring_for(engine, spec, supplied) if images else NO_STAGING
        passes = OnePass(engine, spec, tiles)
        if spec.orthogonal:
            passes = TwoPasses(engine, spec, tiles, self._ranks, foreseen=foreseen)
        travel = Travel(engine, spec, tiles, supplied, images, ring, passes, self._gather(engine, spec.plan))
        if not foreseen:
            travel.accelerated = self._accelerator_updates(travel, one_by_one=one_by_one)
            if supplied.updated:
                supplied.accelerated = travel.accelerated
        return travel

    def _ring_for(self, engine: Engine, spec: StepSpec, supplied: SuppliedStates) -> StagingRing:
        tile_elems = max(e.tile_elems for e in engine.tiles.extents)
        pinned = any(is_on_accelerator(s.grad) for s in spec.sources.values())
        slots = slots_for(engine)
        if self.ring.tile_elems < tile_elems or len(self.ring.slots) < slots or pinned > self.ring.pinned:
            self.ring = StagingRing(tile_elems, slots, pinned=pinned)
        self.ring.make_room_for_states(supplied.slot_bytes(engine))
        return self.ring

    def _gather(self, engine: Engine, plan: StepPlan) -> ParamAllGather:
        if self._ranks and plan is not self._plan:
            shared = [state for state in plan.param_states if state.part.replicas]
            self._plan, self.gather = plan, ParamAllGather(self._ranks, shared, engine.tiles.by_param)
            self.gather.travel_by(self.carriers)
        return self.gather

    # ---- whether a step can be undone ----------------------------------------------------

    def can_land_later(self, travel: Travel) -> bool:
        """Return whether the step can go on without this thread.

        With several ranks, LiveStep.take_back() must be able to undo it. Parameters that the accelerator updates for
        all ranks are sent within step(), on the streams of their updates.
        """
        if travel.accelerated.has_updates and (travel.shares_updates or not len(travel.tiles)):
            return False
        if travel.passes.exchange:  # its collectives would mix with the program's
            return False
        return self.can_undo(travel) if self._ranks else bool(len(travel.tiles))

    def can_undo(self, travel: Travel) -> bool:
        """Return whether the step can be undone at any time, even after it is complete."""
        engine = travel.engine
        if engine.devices.resident or self._state_map.unfilled:
            return False
        has_residuals = travel.spec.with_residual or engine.states.residuals  # residuals have a single copy
        written = travel.spec.written or engine.truth.is_written or engine.decoded.masters_written
        return not (has_residuals or written)

    # ---- updates on the accelerator ------------------------------------------------------

    def _accelerator_updates(self, travel: Travel, *, one_by_one: bool) -> AcceleratorUpdates:
        """Prepare the updates on the accelerator. `one_by_one`: see prepare(). Raises CSDMemoryError."""
        engine, spec, supplied = travel.engine, travel.spec, travel.supplied
        updates = [
            self._accelerator_update(engine, spec, state)
            for state in spec.plan.param_states
            if state.numel and (state.on_accelerator or state.index in supplied.updated)
        ]
        if not updates:
            return NO_UPDATES
        assert engine.accelerator
        if supplied.updated:
            updates = supplied.in_order(updates)
            spec.outside_values |= parameters_of_new(updates)
        undoes = engine.copies > 1 or bool(supplied.updated)
        accelerated = AcceleratorUpdates(updates, undoes=undoes)
        if not one_by_one:
            accelerated.allocate()
        return accelerated

    def _accelerator_update(self, engine: Engine, spec: StepSpec, state: ParamState) -> AcceleratorUpdate:
        row, source = spec.table[state.index], spec.sources[state.index]
        rule, constants = spec.hypers[row["hyper"]].tolist()
        key = (int(row["seed"]) * 0x9E3779B9 + int(row["first"])) % (1 << 32)  # key_of() of native/src/device.h
        topk = topk_of(state, source, spec)
        parts = DenseTopK(topk, self._parts_of(engine, state)) if topk else None
        return AcceleratorUpdate(state, source, rule, constants, key, parts)

    def _parts_of(self, engine: Engine, state: ParamState) -> list[tuple[int, int]]:
        """Return first element and length of each part of a parameter, from which Top-K selects.

        Parameters without tiles have the parts that they would have in tiles of the devices.
        """
        pieces = engine.tiles.by_param.of(state.index)
        if state.on_accelerator:
            extent = engine.tiles.extent_with(state.index)
            first = extent.first_param
            if first not in self._planned:
                numels = [self._state_map.by_index[first + i].numel for i in range(len(extent.numels))]
                self._planned[first] = plan_extent(
                    numels,
                    len(engine.devices.specs),
                    first_param=first,
                    sections=extent.sections,
                    codec=extent.codec,
                    param_dtype=extent.param_dtype,
                    tile_elems=engine.tile_elems,
                ).pieces
            planned = self._planned[first]
            pieces = planned[planned["param"] == state.index]
        return [*zip(pieces["param_first"].tolist(), pieces["elems"].tolist(), strict=True)]
