"""The steps of one optimizer: how each is prepared, and what outlives it, such as an undo that is not over."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ..accelerator import is_on_accelerator
from ..bindings import GRAD_SCALE
from ..compression.policy import entry_dtype
from ..compression.selection import TopK
from ..distributed.ranks import Ranks, all_ranks_or_none
from ..engine.engine import Engine
from ..engine.pieces import Pieces
from ..errors import CSDTornError
from ..params.groups import Groups
from ..params.state_map import StateMap
from ..params.strides import flat
from ..params.update_rule import UpdateRule
from ..signals import defer_signals
from ..store.format import Record
from .all_gather import ParamAllGather
from .given_states import GivenStates, given_states
from .near_updates import NearUpdate, NearUpdates, parameters_of_new
from .prepare import add_residuals, apply_outside_writes, bind, foresee, specify
from .prepared import PreparedStep
from .spec import GradOptions, Participants, StepPlan, StepSpec
from .staging import BUFFERS_PER_DEVICE, StagingRing
from .undo import Undo


class Steps:
    """The steps of one optimizer. Knows neither torch's Optimizer nor who drives a step: see LiveStep."""

    def __init__(self, state_map: StateMap, rule: UpdateRule, ranks: Ranks | None) -> None:
        self.state_map: StateMap = state_map
        self.ranks: Ranks | None = ranks
        self._rule = rule
        self.plan: StepPlan | None = None  # of the last step that was prepared
        self.ring: StagingRing | None = None  # made when first needed
        self.gather: ParamAllGather | None = None  # of the parameters of `plan` whose updates the ranks share; likewise
        self.steps_taken: int = 0  # number of steps taken, which must be the same on all ranks
        self.has_updated: bool = False  # whether the last step has updated anything
        self.near: NearUpdates | None = None  # the updates of the last step on the accelerator
        self.in_flight: bool = False  # whether states of the last step may still be on their way
        self.undoing: Undo | None = None  # of a step whose parameters are not all restored yet
        self._forward_guard: RemovableHandle | None = None  # while it is set

    # ---- a step is prepared ------------------------------------------------------------

    def prepare(
        self,
        engine: Engine,
        groups: Groups,
        taking_part: Participants,
        grad_scale: float,
        options: GradOptions,
        compare: Callable[[StepSpec], None],
        *,
        one_by_one: bool = False,
    ) -> PreparedStep | None:
        """Return a step that is ready to run; None if there is no gradient. Raises what a step raises.

        `grad_scale`: factor by which gradients are multiplied. `compare` examines it before it changes anything.
        `one_by_one`: the gradients in `taking_part` are stand-ins; the real ones arrive one after another.
        """
        bound = bind(engine, self.state_map, groups, taking_part, options.grad_dtype, self.plan)
        if bound is None:
            return None
        if bound.plan is not self.plan:
            self.plan, self.gather = bound.plan, None
        spec = specify(engine, self._rule, bound, groups, grad_scale, options)
        compare(spec)
        add_residuals(engine, self.state_map, spec)
        apply_outside_writes(engine, spec)
        step = self._prepared(engine, spec)
        step.near = self._near_updates(engine, step, one_by_one=one_by_one)
        return step

    def foresee(self, engine: Engine, groups: Groups, grad_scale: float, options: GradOptions) -> PreparedStep | None:
        """Prepare the next step, assuming that only gradients will change: see foresee(). None: not possible now."""
        if self.plan is None or self.undoing:
            return None
        spec = foresee(engine, self._rule, self.state_map, self.plan, groups, grad_scale, options)
        if spec is None:
            return None
        step = self._prepared(engine, spec)
        return step if len(step.not_given) else None  # None: the accelerator updates everything

    def _prepared(self, engine: Engine, spec: StepSpec) -> PreparedStep:
        """Do everything that may fail, as for lack of memory, before ranks begin to exchange parameters."""
        tiles = engine.tiles_with(spec.table["grad"] != 0)
        given = given_states(engine, spec, tiles)
        images = self._images(engine, spec, tiles, given)
        ring = self._ring(engine, spec, given) if images else None
        return PreparedStep(spec, tiles, given, images, ring, self._gather(engine, spec.plan))

    def _near_updates(self, engine: Engine, step: PreparedStep, *, one_by_one: bool) -> NearUpdates | None:
        """Prepare the updates on the accelerator. `one_by_one`: as in prepare(). Raises CSDMemoryError."""
        updates, spec, given = [], step.spec, step.given
        for b in spec.plan.param_states:
            if b.numel and (b.on_accelerator or (given and b.index in given.updated)):
                rule, constants = spec.hypers[spec.table["hyper"][b.index]].tolist()
                updates.append(NearUpdate(b, spec.sources[b.index], rule, constants))
        if not updates:
            return None
        assert engine.accelerator
        if given:
            updates = given.in_order(updates)
            spec.outside_values |= parameters_of_new(updates)
        undoes = engine.copies > 1 or given is not None
        near = NearUpdates(updates, exact=engine.accelerator.spec.exact, undoes=undoes)
        if not one_by_one:
            near.allocate()
        return near

    def _images(
        self, engine: Engine, spec: StepSpec, tiles: np.ndarray[Any, Any], given: GivenStates | None
    ) -> list[int]:
        """Return the tiles that travel through staging buffers: those with gradients on a GPU, or to be rounded.

        Prepares the sources of all gradients in these tiles.
        """
        table, sources = spec.table, spec.sources
        travels = np.zeros(len(table), bool)
        for row, s in sources.items():
            travels[row] = s.is_on_accelerator or (s.grad.dtype is not s.grad_dtype and not table["topk"][row])
        if not travels.any():
            return []
        if given:
            travels[[*given.copies]] = True
        images: list[int] = tiles[np.isin(tiles, engine.tiles_with(travels))].tolist()
        # A tile travels as a whole, so every parameter that shares a tile with a travelling one travels, too.
        for tile in images:
            for row in engine.pieces_of(tile)["param"].tolist():
                if table["grad"][row] and row not in sources:
                    sources[row] = self.state_map.by_index[row].source(spec.grads[row], spec.plan.grad_dtype)
        # Top-K settings from the table: for images the ring selects the entries, not the engine.
        for row, source in sources.items():
            if share := float(table["topk"][row]):
                residual = self.state_map.by_index[row].residual if table["residual"][row] else None
                source.topk = TopK(
                    share,
                    entry_dtype(source.grad.dtype, spec.plan.grad_dtype),
                    None if residual is None else flat(residual),
                    float(spec.hypers["c"][table["hyper"][row], GRAD_SCALE]),
                    int(table["seed"][row]),
                )
        return images

    def _ring(self, engine: Engine, spec: StepSpec, given: GivenStates | None) -> StagingRing:
        tile_elems = max(e.tile_elems for e in engine.extents)
        pinned = any(is_on_accelerator(s.grad) for s in spec.sources.values())
        if self.ring is None or self.ring.tile_elems < tile_elems or pinned > self.ring.pinned:
            self.ring = StagingRing(tile_elems, BUFFERS_PER_DEVICE * len(engine.devices.specs), pinned=pinned)
        if given:
            self.ring.make_room_for_states(given.tile_sections)
        return self.ring

    def _gather(self, engine: Engine, plan: StepPlan) -> ParamAllGather | None:
        """Return the all-gather of the plan's parameters whose updates the ranks share; None if there are none."""
        if self.gather is None and self.ranks and (shares := [b for b in plan.param_states if b.part.replicas]):
            self.gather = ParamAllGather(self.ranks, shares, Pieces(engine))
        return self.gather

    # ---- a step that lands later: see overlap/ -----------------------------------------

    def can_land_later(self, engine: Engine, step: PreparedStep) -> bool:
        """Return whether the step can go on without this thread. It cannot if other ranks wait for its updates.

        With several ranks it also has to be a step that LiveStep.take_back() can undo.
        """
        can = bool(len(step.tiles)) and step.gather is None
        return can and (self.ranks is None or self.can_undo(engine, step))

    def can_undo(self, engine: Engine, step: PreparedStep) -> bool:
        """Return whether the step can be undone at any time, even after it is complete."""
        if engine.slots == 1 or engine.devices.resident or self.state_map.unfilled:
            return False
        has_residuals = step.spec.with_residual or engine.residuals  # residuals have a single copy
        written = step.spec.written or engine.windows.written or engine.decoded.masters_written
        return not (has_residuals or written)

    def without_gradients(self, engine: Engine, groups: Groups, record: Record | None) -> None:
        """Count and commit a step of the other ranks, for which this rank has no gradients."""
        with all_ranks_or_none(self.ranks):
            self.state_map.fill(engine)
        self.steps_taken += 1
        engine.step += 1
        self.state_map.describe(engine, groups)
        engine.commit(record)

    # ---- undo ------------------------------------------------------------------------

    def undo(self, undo: Undo) -> None:
        """Undo a step. Raises what finish_undo() raises."""
        self.undoing = undo  # whatever interrupts it, everybody finishes it before parameters are read
        self.in_flight = True  # the windows may show states of the undone step
        self.finish_undo(collective=True)

    def finish_undo(self, *, collective: bool = False) -> None:
        """Return when no parameter is unknown because a step was undone. `collective`: all ranks call it.

        Raises what Undo.finish() raises.
        """
        if (undoing := self.undoing) is None:
            return
        if undoing.engine.pid != os.getpid():
            undoing.engine.check_open()  # raises, before it waits for a lock that a thread of the parent may hold
        with defer_signals(), undoing.engine.lock, torch.no_grad():
            if self.undoing is not undoing:  # another thread was faster
                return
            if undoing.is_collective and not collective:
                raise CSDTornError(
                    errno.EIO,
                    "a step failed, and parameters are a mix of two steps until all ranks call step()",
                )
            try:
                undoing.finish()
            finally:
                # Torn states have no old values: each step says so. A collective undo ends on all ranks, or on none.
                if undoing.is_done or (undoing.engine.torn and not undoing.is_collective):
                    self.undoing = None
                    if self._forward_guard:
                        self._forward_guard.remove()
                        self._forward_guard = None
                elif not self._forward_guard:
                    self._guard_forwards(undoing)

    def _guard_forwards(self, undoing: Undo) -> None:
        """Finish the undo before the forward of any module with unknown parameters: gradients would be of a mix."""
        weak_self, unknown = weakref.ref(self), {id(b.param) for b in undoing.unknown}

        def before_forward(module: torch.nn.Module, _: Any) -> None:
            steps = weak_self()
            if steps is None or undoing.engine.closed:  # close() has said so; another optimizer may have them now
                hook.remove()
            elif any(id(p) in unknown for p in module.parameters()):
                steps.finish_undo()

        self._forward_guard = hook = register_module_forward_pre_hook(before_forward)
