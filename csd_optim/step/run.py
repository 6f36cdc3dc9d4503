"""One step, from what is prepared to what is done: tiles flow through the devices, or everything is put back."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..accelerator import is_far
from ..bindings import GRAD_SCALE, SAME_ORDER, TO_AND_FRO
from ..compression.policy import entry_dtype
from ..compression.selection import TopK
from ..distributed.ranks import Ranks, all_ranks_or_none
from ..engine.engine import Engine
from ..errors import CSDError
from ..params.groups import Groups
from ..params.state_map import StateMap
from ..params.strides import flat
from ..store.format import Record
from .all_gather import ParamAllGather
from .given_states import given_states
from .near_updates import NearUpdate, NearUpdates, parameters_of_new
from .prepare import PreparedStep, StepPlan
from .staging import BUFFERS_PER_DEVICE, NOTHING, StagingRing


def _exhaust(work: Iterator[None]) -> None:
    """Does all that is left of it."""
    for _ in work:
        pass


class StepRunner:
    """Takes the steps of one optimizer."""

    def __init__(self, state_map: StateMap, ranks: Ranks | None) -> None:
        self._state_map, self._ranks = state_map, ranks
        self.ring: StagingRing | None = None  # made when first needed
        self.taken: int = 0  # steps, that ranks have to agree about
        self.moved: bool = False  # tiles, in the last step
        self.near: NearUpdates | None = None  # of the last step
        self.in_flight: bool = False  # last states may still be on their way

    def make_ready(self, engine: Engine, step: PreparedStep) -> None:
        """Whatever can fail before the ranks begin to exchange parameters, such as for lack of memory."""
        step.tiles = engine.tiles_with(step.table["grad"] != 0)
        step.given = given_states(engine, step)
        step.images = self._images(engine, step)
        step.ring = self._ring(engine, step) if step.images else None
        step.gather = self._gather(engine, step.plan)

    def make_near_ready(self, engine: Engine, step: PreparedStep, *, one_by_one: bool) -> None:
        """The same of what it does on the accelerator. `one_by_one`: its gradients are not there yet, but come so.

        Raises CSDMemoryError.
        """
        updates = []
        for b in step.plan.param_states:
            is_given = step.given is not None and b.index in step.given.updated
            if b.numel and (b.on_accelerator or is_given):
                rule, constants = step.hypers[step.table["hyper"][b.index]].tolist()
                updates.append(NearUpdate(b, step.prepared[b.index], rule, constants))
        if updates:
            assert engine.accelerator
            undoes = engine.copies > 1 or step.given is not None
            if step.given:
                updates = step.given.in_order(updates)
                step.set_to |= parameters_of_new(updates)
            step.near = NearUpdates(updates, exact=engine.accelerator.spec.exact, undoes=undoes)
            if not one_by_one:
                step.near.get_ready()

    def run(
        self,
        engine: Engine,
        step: PreparedStep,
        record: Record | None,
        *,
        descending: bool,
        pushed: Callable[[], None] | None = None,
    ) -> None:
        """Takes the step, and commits it with `record`. On any failure, of any rank, all is put back.

        `descending`: of what the ranks share, the last goes first. `pushed`: the step was launched before, and has no
        images; when this returns all of its tiles are pushed, or it raises what a step raises.
        """
        self._flow(engine, step, record, descending=descending, pushed=pushed)
        if step.near:
            step.near.end()
        try:
            self._complete(engine, step, record)
        finally:  # it is whole, and parameters have new values
            for source in step.prepared.values():
                source.give_back()
            self.is_ours(step)

    def _complete(self, engine: Engine, step: PreparedStep, record: Record | None) -> None:
        """The step is whole: what it owes is noted, and it is committed."""
        step.whole = True
        self.near = step.near
        self.moved |= step.near is not None
        if step.given and step.near:
            step.given.keep()
            step.near.commit_bytes = step.given.nbytes
        self._state_map.filled()
        self.taken += 1
        try:
            if step.ring is not None:
                step.ring.feed_back()
        finally:  # the step is whole, whatever becomes of what it owes
            torch.autograd.graph.increment_version([b.windows["residual"] for b in step.owed])
            if not step.error_feedback:
                self._state_map.drop_residual(engine, step.plan.param_states)
            elif step.unscaled:
                all_sent = [b for b in step.owed if step.table["topk"][b.index] == 1]
                self._state_map.drop_residual(engine, all_sent)
            for extent, own in zip(engine.extents, engine.steps, strict=True):
                own[:] = step.steps[extent.first_param : extent.first_param + len(own)]
            engine.commit(record)

    @staticmethod
    def is_ours(step: PreparedStep) -> None:
        """Counts the step's write to its parameters; what is written to them from here on is written by others."""
        torch.autograd.graph.increment_version(step.plan.params)
        for param_state in (*step.written, *step.plan.param_states):
            param_state.is_ours()

    # ---- a step that lands later: see overlap/ -----------------------------------------

    def can_land_later(self, engine: Engine, step: PreparedStep) -> bool:
        """Can it go on without this thread? Nobody else waits for what it updates.

        Among ranks it has to be one that take_back() undoes.
        """
        can = bool(len(step.tiles)) and step.gather is None
        return can and (self._ranks is None or self.can_undo(engine, step))

    def can_undo(self, engine: Engine, step: PreparedStep) -> bool:
        """Can it be undone at any time, as if it had never begun?"""
        if engine.slots == 1 or engine.devices.resident or self._state_map.unfilled:
            return False
        owes = step.owed or engine.residuals  # of what is owed there is one copy
        written = step.written or engine.windows.written or engine.decoded.apart
        return not (owes or written)

    def launch(self, engine: Engine, step: PreparedStep, record: Record | None) -> np.ndarray[Any, Any]:
        """Begins the step, and returns its tiles in the order in which they flow. Images, and land(), are to follow."""
        try:
            return self._begin(engine, step, record)
        except BaseException:
            if engine.stepping:
                self.undo(engine, step)
            raise

    @staticmethod
    def launch_near(engine: Engine, step: PreparedStep) -> list[int]:
        """Queues what there is to do on the accelerator, on the streams that are current.

        Returns the rows of what is updated so: for those nobody has to wait, and their gradients are the program's.
        """
        if not step.near:
            return []
        if step.given:
            step.given.follow(step.near, NOTHING)
        _exhaust(step.near.launch(timed=engine.near_spans is not None))
        rows = step.near.all_queued()
        for row in rows:
            step.prepared.pop(row).give_back()
        return rows

    def land(self, engine: Engine, step: PreparedStep, record: Record | None) -> None:
        """Waits until the step is whole, and commits it. On any failure all is put back.

        Among ranks only the states are: take_back() is to follow. A commit that fails is confirm()'s business there.
        What it takes to undo what was done on the accelerator they keep until they have met.
        """
        try:
            self._note_near(engine, step)
            engine.finish()
        except BaseException:
            self.give_up(engine, step)
            raise
        if step.near and not self._ranks:
            step.near.end()
        with contextlib.suppress(CSDError) if self._ranks else contextlib.nullcontext():
            self._complete(engine, step, record)

    def give_up(self, engine: Engine, step: PreparedStep) -> None:
        """Puts back a step that was launched; among ranks only its states, for the others go on with their forward."""
        if self._ranks:
            self._undo_states(engine, step)
        else:
            self.undo(engine, step)

    def take_back(self, engine: Engine, step: PreparedStep) -> None:
        """Of ranks: undoes a step that not all of them could make, whether it was landed here or given up.

        Also what somebody has written to its parameters since: how far it had come differs from rank to rank.
        """
        if step.whole:
            engine.take_back(step.plan.rows)
            self.taken -= 1
        if step.near:
            step.near.undo()
        engine.remap()
        for param_state in step.plan.param_states:
            with param_state.decoding():
                param_state.restore(0, param_state.numel)
        if step.near:
            step.near.end()

    def run_without_gradients(self, engine: Engine, groups: Groups, record: Record | None) -> None:
        """A step of the other ranks, for which this one has no gradients: it is counted and committed with theirs."""
        with all_ranks_or_none(self._ranks):
            self._state_map.fill(engine)
        self.taken += 1
        engine.step += 1
        self._state_map.describe(engine, groups)
        engine.commit(record)

    def _flow(
        self,
        engine: Engine,
        step: PreparedStep,
        record: Record | None,
        *,
        descending: bool,
        pushed: Callable[[], None] | None,
    ) -> None:
        """The step proper. On any failure, of any rank, parameters and state are put back."""
        prepared, images, ring, gather = step.prepared, step.images, step.ring, step.gather
        if gather:
            gather.begin(images, prepared, descending=descending)
        done = False  # by all ranks
        try:
            with all_ranks_or_none(self._ranks):
                try:
                    tiles = step.tiles
                    if pushed:
                        pushed()
                    elif len(step.tiles):
                        tiles = self._begin(engine, step, record)
                    elif step.near:
                        engine.begin_without_tiles()
                    launching = step.near.launch(timed=engine.near_spans is not None) if step.near else NOTHING
                    if step.near and step.given:
                        step.given.follow(step.near, launching)
                    if ring is None or gather:  # which sends what is on no tile as soon as it is asked
                        _exhaust(launching)
                    if ring is not None:
                        pulled = gather.pulled if gather else None
                        ring.run(engine, images, prepared, pulled, meanwhile=launching)
                        _exhaust(launching)
                    if gather and (len(step.tiles) or step.near):
                        gather.advance(wait=True)
                    if len(step.tiles) and self._ranks:
                        engine.params_ready(tiles[~np.isin(tiles, images)], wait=True)
                finally:
                    if gather:
                        gather.finish()
            done = True
            self._note_near(engine, step)
            if engine.stepping:
                engine.finish()
            elif step.near:
                engine.end_without_tiles()
            elif self._ranks:
                engine.step += 1  # that of the others
        except BaseException:
            if engine.stepping or done or (step.near and step.near.launched):
                self.undo(engine, step)
            if gather and not done:
                gather.again()
            raise

    def _begin(self, engine: Engine, step: PreparedStep, record: Record | None) -> np.ndarray[Any, Any]:
        """Begins, and pushes all tiles that need no image. Returns all that flow, in their order."""
        order = TO_AND_FRO if engine.rank is None else SAME_ORDER
        tiles = engine.begin(step.table, step.hypers, step.tiles, record, order=order)
        self.in_flight = self.moved = True
        for tile in tiles[~np.isin(tiles, step.images)].tolist():
            engine.push(tile)
        if step.ring is not None:
            step.ring.begin(step.prepared, step.given)
        return tiles

    @staticmethod
    def _note_near(engine: Engine, step: PreparedStep) -> None:
        """For the timeline: what was done on the accelerator."""
        if step.near and engine.near_spans is not None:
            engine.near_spans += step.near.spans

    def undo(self, engine: Engine, step: PreparedStep) -> None:
        """Puts everything back; a finish() that failed has done so with the states already."""
        self._undo_states(engine, step)
        self._restore(engine, step)
        if step.near and step.near.launched:
            step.near.wait()  # whoever is told of it, on any stream, finds what was before

    @staticmethod
    def _undo_states(engine: Engine, step: PreparedStep) -> None:
        with contextlib.suppress(CSDError):
            engine.finish(keep=False)
        if step.ring is not None:
            step.ring.forget()
        if step.near and step.near.launched:
            whole = False
            try:
                if step.near.undoes:
                    step.near.undo()
                    whole = True
            finally:  # also if the accelerator fails
                if not whole:
                    engine.tear()

    def _images(self, engine: Engine, step: PreparedStep) -> list[int]:
        """Tiles that travel by images: with gradients on a GPU, or to be rounded. Prepares whatever lies in them."""
        table, prepared = step.table, step.prepared
        travels = np.zeros(len(table), bool)
        for row, s in prepared.items():
            travels[row] = s.is_far or (s.grad.dtype is not s.grad_dtype and not table["topk"][row])
        if not travels.any():
            return []
        if step.given:
            travels[[*step.given.copies]] = True
        tiles: list[int] = step.tiles[np.isin(step.tiles, engine.tiles_with(travels))].tolist()
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

    def _ring(self, engine: Engine, step: PreparedStep) -> StagingRing:
        tile_elems = max(e.tile_elems for e in engine.extents)
        pinned = any(is_far(s.grad) for s in step.prepared.values())
        if self.ring is None or self.ring.tile_elems < tile_elems or pinned > self.ring.pinned:
            self.ring = StagingRing(tile_elems, BUFFERS_PER_DEVICE * len(engine.devices.specs), pinned=pinned)
        if step.given:
            self.ring.make_room_for_states(step.given.tile_sections)
        return self.ring

    def _gather(self, engine: Engine, plan: StepPlan) -> ParamAllGather | None:
        """What goes to the other ranks, if they share the updates of these parameters."""
        if plan.gather is None and self._ranks and (shares := [b for b in plan.param_states if b.part.replicas]):
            plan.gather = ParamAllGather(self._ranks, engine, shares)
        return plan.gather

    def _restore(self, engine: Engine, step: PreparedStep) -> None:
        """Gives the parameters of an undone step the values they had: those of the masters, back in their place.

        Or those that somebody had set them to.
        """
        took_part, set_to = step.table["grad"] != 0, step.set_to
        engine.remap()  # the windows show the masters as they were
        written = defaultdict[int, list[tuple[int, int]]](list)
        for tile, elems in engine.undone():
            for row, _, first, in_tile, n in engine.pieces_of(tile).tolist():
                if took_part[row] and in_tile < elems:
                    written[row].append((first, min(n, elems - in_tile)))
        for param_state in step.near.changed if step.near else ():
            written[param_state.index] = [(0, param_state.numel)]
        for row, spans in written.items():
            param_state = self._state_map.by_index[row]
            with param_state.decoding():
                for first, n in spans:
                    param_state.restore(first, n, set_to.get(row))
