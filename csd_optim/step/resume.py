"""Resuming a store: parameters get their places back, and, like hyperparameters, the values of the last commit."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from typing import Any

import torch

from ..distributed.ranks import Ranks
from ..distributed.sharding import UNSHARDED
from ..engine.engine import Engine
from ..errors import CSDRuntimeError, CSDStoreError, CSDWarning, users_stacklevel
from ..params.accelerated import choose_copies
from ..params.groups import Groups, members, restore_hyperparameters
from ..params.manifest import codec_difference, first_difference, ignored_by_resume, rule_difference
from ..params.param_state import ParamState
from ..params.place import Place
from ..params.state_map import StateMap
from ..store.check import rule_named
from ..store.format import Record
from ..store.user_state import stored_user_state
from .all_gather import ParamAllGather
from .schedules import ResumedSchedules


class Resume:
    """How one optimizer resumes a store, from its construction to its first step.

    `groups`, `grad_dtype`: the optimizer's `param_groups` and option, as in StateMap.
    """

    def __init__(self, state_map: StateMap, ranks: Ranks | None) -> None:
        self._state_map, self._ranks = state_map, ranks
        self.pending: bool = False  # a store was resumed, and no step was taken yet
        self.schedules: ResumedSchedules | None = None  # while `pending`
        self._resumed: list[torch.Tensor] = []  # parameters in the groups at the resume, while `pending`
        self._without_data: str | None = None  # name of a parameter that could not be restored: it is on meta

    def adopt_store(
        self, engine: Engine, groups: Groups, initial_groups: Groups, grad_dtype: torch.dtype | None
    ) -> tuple[Record, dict[str, Any]] | None:
        """Resume the store. Everything is checked before anything is changed, in memory or on a device.

        `initial_groups`: the hyperparameters with which this process was started. Returns the record of the last commit
        and its `user_state`; None, with a warning, if there is no store. Raises CSDStoreError if the store cannot be
        resumed.
        """
        if not engine.recovered:
            where = ", ".join(map(str, engine.devices.specs))
            warnings.warn(f"there is no store in {where} to resume: a new one is begun", CSDWarning, users_stacklevel())
            return None
        rule_of, recovered = self._state_map.rule_of, engine.recovered[0]
        with engine.committer.all_ranks_or_none():
            if difference := rule_difference(recovered, groups, rule_of):
                raise CSDStoreError(f"{recovered.path} cannot be resumed: {difference}")
            if difference := first_difference(recovered.manifest, groups, self._state_map.part_of):
                raise CSDStoreError(f"{recovered.path} is the store of another model: {difference}")
            if difference := codec_difference(recovered.manifest, groups, self._state_map.codec_of):
                raise CSDStoreError(f"{recovered.path} cannot be resumed: {difference}")
            user_state = stored_user_state(recovered.record.user_state, recovered.path)
            engine.committer.check_recovered()
        with engine.committer.all_ranks_or_none():
            engine.committer.discard_newer()
        with engine.committer.all_ranks_or_none():
            self._adopt_places(engine, groups)
        for changed in ignored_by_resume(rule_of, initial_groups, recovered.record):
            warnings.warn(changed, CSDWarning, users_stacklevel())
        self.pending, self._resumed = True, [p for _, _, p in members(groups)]
        self._restore_values(engine, groups, grad_dtype)
        self.schedules = ResumedSchedules(recovered.record.groups)
        return recovered.record, user_state

    def restore(self, engine: Engine, groups: Groups, grad_dtype: torch.dtype | None) -> None:
        """See CSDOptimizer.restore()."""
        if not engine.recovered:
            return
        if not self.pending:
            raise CSDRuntimeError("restore() goes before the first step()")
        with engine.committer.all_ranks_or_none():
            self._follow_replaced_params(engine, groups, by_position=True)
        self._restore_values(engine, groups, grad_dtype)
        if self.schedules:
            self.schedules.restore(groups)

    def begin_step(self, engine: Engine, groups: Groups) -> None:
        """End the resume: the first step takes the parameters that the groups hold now.

        Raises CSDRuntimeError if a parameter had no data when the store was resumed, CSDStoreError if the parameters no
        longer fit the store.
        """
        if not self.pending:
            return
        if self._without_data:
            raise CSDRuntimeError(
                f"parameter {self._without_data} was on the meta device when the store was resumed; "
                "call restore() when it has data"
            )
        self._follow_replaced_params(engine, groups, by_position=False)
        self._choose_copies(engine)
        if self.schedules:
            self.schedules.end(groups)
        self.pending, self.schedules, self._resumed = False, None, []

    def _choose_copies(self, engine: Engine) -> None:
        """Choose which states get copies on the accelerator: see choose_copies()."""
        if engine.truth.copies is not None:
            try:
                choose_copies(engine, self._state_map.param_states.values())
            finally:
                self._state_map.count_on_accelerator(engine)
                self._state_map.changes += 1

    def unwritten(self) -> list[ParamState]:
        """Return parameters not written since the resume; of replicated parameters, on no rank. A collective."""
        unwritten = [state for state in self._state_map.param_states.values() if state.version == state.version_now]
        if self._ranks is None:
            return unwritten
        said = self._ranks.gather_objects([state.name for state in unwritten])
        on_all = set.intersection(*map(set, said))
        return [state for state in unwritten if state.name in on_all or not state.part.replicas]

    def set_from_masters(
        self, engine: Engine, groups: Groups, param_states: Collection[ParamState], grad_dtype: torch.dtype | None
    ) -> str | None:
        """Set parameters to their masters' values on all ranks. Returns the name of a parameter without data, or None.

        A collective.
        """
        gather = None
        with engine.committer.all_ranks_or_none():
            without_data = self._set_own(param_states, grad_dtype)
            there = [self._state_map.param_states.get(id(p)) for _, _, p in members(groups)]
            divided = [state for state in there if state and state.part.replicas]
            if self._ranks and divided and not without_data:
                gather = ParamAllGather(self._ranks, divided)
        if self._ranks:
            said = self._ranks.gather_objects((bool(param_states), without_data))
            without_data = next((name for _, name in said if name), None)
            if gather and not without_data and any(has_given for has_given, _ in said):
                gather.resend()
                for param_state in divided:
                    param_state.mark_synced()
        return without_data

    def _adopt_places(self, engine: Engine, groups: Groups) -> None:
        """Give parameters their places in the store. The caller has checked that all fit."""
        state_map, here = self._state_map, {(k, i): p for k, i, p in members(groups)}
        stored = engine.recovered[0].manifest
        for entry in stored["params"]:
            gone = entry["group"] < 0  # the parameter moved to another place later
            p = here.get((entry["group"], entry["position"]))
            if p is None or gone:
                p, part = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]), device="meta"), UNSHARDED
                initial = {}
            else:
                group = groups[entry["group"]]
                part, initial = state_map.part_of(p), state_map.rule_of(group).initial_for(group)
            place = Place(entry["extent"], entry["shape"], tuple(entry["stride"]), rule_named(stored, entry), initial)
            param_state = state_map.add(engine, p, part, entry["name"], place)
            if gone:
                state_map.abandon(param_state)
                continue
            if (residual := engine.states.residuals.get(param_state.index)) is not None:
                param_state.set_window(
                    "residual", residual.as_strided(param_state.own_master.shape, param_state.stride)
                )
            state_map.show(param_state)
        state_map.remember()

    def _restore_values(self, engine: Engine, groups: Groups, grad_dtype: torch.dtype | None) -> None:
        self._without_data = self.set_from_masters(engine, groups, self._state_map.param_states.values(), grad_dtype)
        for group, kept in zip(groups, engine.recovered[0].record.groups, strict=False):
            restore_hyperparameters(group, kept)

    def _follow_replaced_params(self, engine: Engine, groups: Groups, *, by_position: bool) -> None:
        """Move places to parameters that have replaced others since the store was resumed.

        `by_position`: each parameter takes the place of the earlier parameter in its position. Otherwise only a new
        parameter without states does, and only if the earlier one has left all groups but still has its entry in
        `state`. Raises CSDStoreError if shape or dtype of a new parameter differs from the store's.
        """
        state_map, here = self._state_map, {(k, i): p for k, i, p in members(groups)}
        entries, state = engine.recovered[0].manifest["params"], state_map.state
        known, in_groups = {*map(id, self._resumed)}, {*map(id, here.values())}
        changed = [
            (entry, param_state, p)
            for entry, param_state in zip(entries, state_map.by_index, strict=False)
            if param_state.alive
            and (p := here.get((entry["group"], entry["position"]))) is not None
            and p is not param_state.param
            and (
                by_position
                or (
                    id(param_state.param) not in in_groups
                    and state.get(param_state.param)
                    and not (id(p) in known or state.get(p))
                )
            )
        ]
        for entry, param_state, p in changed:
            local = state_map.part_of(p).of(p)
            if local.shape != param_state.own_master.shape or p.dtype is not param_state.param.dtype:
                raise CSDStoreError(
                    f"parameter {entry['name']} is {tuple(local.shape)} {p.dtype} now; in the store that was resumed "
                    f"it is {tuple(param_state.own_master.shape)} {param_state.param.dtype}"
                )
        for _, param_state, _ in changed:  # remove all before adding any: parameters may have swapped positions
            del state_map.param_states[id(param_state.param)]
            state.pop(param_state.param, None)
        for _, param_state, p in changed:
            param_state.move_to(p, state_map.part_of(p))
            state_map.param_states[id(p)] = param_state
            state_map.show(param_state)
            state_map.changes += 1
        if changed:
            state_map.remember()

    def _set_own(self, param_states: Iterable[ParamState], grad_dtype: torch.dtype | None) -> str | None:
        """Set parameters to this process's masters. Returns the name of a parameter on the meta device, or None.

        Where ranks share a parameter's updates, each rank has the masters of its own part only.
        """
        without_data = None
        for param_state in param_states:
            if param_state.param.is_meta:
                without_data = param_state.name
            else:
                param_state.set_from_master(grad_dtype)
        self._state_map.changes += 1
        return without_data
