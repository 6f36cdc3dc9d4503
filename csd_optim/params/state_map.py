"""The map from parameters to their places on the devices, and the dict `state`, which shows the states there."""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
from collections.abc import Callable
from itertools import chain, product
from operator import is_
from typing import Any

import torch

from ..bindings import trim_memory
from ..distributed.ranks import Ranks
from ..distributed.sharding import Partition, part_of
from ..engine.engine import Engine
from ..errors import CSDRuntimeError, CSDWarning, users_stacklevel
from ..store.sections import FP32
from . import accelerated
from .decoded_entry import DecodedEntry
from .entries import Held, drop_left_behind, keep_apart, replaced_tensors
from .groups import Groups, check_state_dtype, members, name_of
from .manifest import manifest
from .memory_warnings import LOADED, REPLACED, bytes_in_memory, warn_if_large
from .param_state import MOST_RATIO, ParamState, check_entry, check_param
from .place import Place
from .strides import flat, numel
from .update_rule import RuleOf

STATES_WAITING = 64 << 20  # bytes of decoded states that fill() collects before it writes them


class StateMap:
    """The places of an optimizer's parameters on the devices; one ParamState per parameter.

    `rule_of`: says which rule defines the states of a group; `ranks`, `sharded`: see part_of(); `state_dtype`: the
    optimizer's argument. In all methods `groups` is the optimizer's `param_groups`, and `grad_dtype` its option.
    """

    def __init__(
        self, rule_of: RuleOf, ranks: Ranks | None = None, *, sharded: bool = True, state_dtype: str = FP32
    ) -> None:
        self.rule_of = rule_of
        self.state_dtype = state_dtype
        self.part_of: Callable[..., Partition] = functools.partial(part_of, ranks=ranks, sharded=sharded)
        self.state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        self.param_states: dict[int, ParamState] = {}  # by id(param); each holds its parameter, so ids stay unique
        self.by_index: list[ParamState] = []  # by the engine's index of the parameter
        self.unfilled: dict[ParamState, bool] = {}  # places still to be filled → whether states read as zero
        self.may_have_left: bool = False  # parameters may have left since the last free_left()
        self._abandoned: list[ParamState] = []  # places whose parameters have new places
        self.changes: int = 0  # number of changes that make the plan of a step out of date
        self._shown: list[Any] = []  # every value in `state` when remember() was last called
        self._described: list[list[tuple[int, torch.dtype]]] | None = None  # the parameters that the manifest describes

    @property
    def coded(self) -> list[ParamState]:
        """The parameters whose states are kept as codes."""
        return [state for state in self.by_index if state.is_coded and state.alive]

    @property
    def decoded(self) -> list[ParamState]:
        """The parameters whose states are read on demand: those kept as codes, and others without windows."""
        return [state for state in self.by_index if state.decoded and state.alive]

    def part(self, p: torch.Tensor) -> Partition:
        """Return the part of a parameter that this process updates."""
        param_state = self.param_states.get(id(p))
        return param_state.part if param_state else self.part_of(p)

    def join(self, engine: Engine, groups: Groups, joining: set[int], grad_dtype: torch.dtype | None) -> None:
        """Give the parameters whose ids are in `joining` places on the devices, to be filled by fill().

        Raises CSDRuntimeError for a parameter on the meta device, what check_param(), check_entry() and
        UpdateRule.check() raise, and CSDMemoryError.
        """
        for k in {k for k, _, p in members(groups) if id(p) in joining}:
            self.rule_of(groups[k]).check(groups[k])  # initial values come from hyperparameters
        by_kind: accelerated.ByKind = {}
        initial: dict[int, dict[str, float]] = {}
        for k, i, p in members(groups):
            if id(p) not in joining:
                continue
            name, entry = name_of(groups, k, i), self.state.get(p) or {}
            check_param(p, name)
            if p.is_meta:
                raise CSDRuntimeError(f"parameter {name} is on the meta device: it has no data yet")
            rule = self.rule_of(groups[k])
            check_entry(entry, p, name, rule.sections)
            kind = rule.sections_for(groups[k], entry), *self.codec_of(groups[k], p), rule.name
            by_kind.setdefault(kind, []).append((name, p, self.part_of(p)))
            initial[id(p)] = rule.initial_for(groups[k])
        chosen = accelerated.choose(engine, by_kind)
        copies = engine.truth.copies
        try:
            for ((sections, codec, dtype, rule_name), of_kind), is_chosen in product(by_kind.items(), (True, False)):
                new = [(name, p, part) for name, p, part in of_kind if (id(p) in chosen) == is_chosen]
                if not new:
                    continue
                # For parameters on the accelerator alone, the engine has only step counts, and no elements. Parameters
                # with copies on the accelerator get separate tiles, which a step need not read.
                alone = is_chosen and copies is None
                numels = [0 if alone else numel(part.of(p)) for _, p, part in new]
                engine.extend(numels, sections, codec=codec, param_dtype=dtype, is_copied=is_chosen and not alone)
                extent = len(engine.tiles.extents) - 1
                for name, p, part in new:
                    local = torch.empty_like(part.of(p), device="meta")
                    states = chosen.get(id(p))
                    on_accelerator = states if alone else None
                    place = Place(extent, local.shape, local.stride(), rule_name, initial[id(p)], on_accelerator)
                    param_state = self.add(engine, p, part, name, place)
                    if states and copies:
                        accelerated.set_copy(engine, param_state, states)
                    param_state.refresh(grad_dtype)
                    self.unfilled[param_state] = True
        finally:  # describe parameters with places even after an error
            self._described = None
            self.describe(engine, groups)
            self.count_on_accelerator(engine)

    def count_on_accelerator(self, engine: Engine) -> None:
        """Tell the engine how many parameters and bytes are on the accelerator."""
        accelerated.count(engine, self.param_states.values())

    def codec_of(self, group: dict[str, Any], p: torch.Tensor) -> tuple[str, torch.dtype | None]:
        """Return the codec for states of a parameter in this group, and with codes its dtype; see Engine.extend()."""
        if group.get("state_dtype", self.state_dtype) == FP32:
            return FP32, None
        return self.rule_of(group).codec, torch.float32 if p.is_complex() else p.dtype

    def describe(self, engine: Engine, groups: Groups) -> None:
        """Give the stores a new manifest if the parameters have changed."""
        if not engine.durable:
            return
        described = [[(id(p), p.dtype) for p in group["params"]] for group in groups]
        if described != self._described:
            engine.committer.describe(manifest(self.rule_of, self.by_index, engine.tiles.extents, groups, self.part_of))
            self._described = described

    def add(self, engine: Engine, p: torch.Tensor, part: Partition, name: str, place: Place) -> ParamState:
        """Give a parameter this place. The caller shows or fills it."""
        param_state = place.take(engine, p, part, name, len(self.by_index))
        self.param_states[id(p)] = param_state
        self.by_index.append(param_state)
        self.changes += 1
        for key, window in param_state.windows.items():
            if param_state.shown[key] is not window:
                engine.windows.watch(param_state.index, param_state.shown[key])
        return param_state

    def add_residual(self, engine: Engine, param_state: ParamState) -> bool:
        """Ensure that a parameter has a residual on its device. Returns False if it was there. Raises CSDOSError."""
        p, residual = param_state.local, param_state.residual
        if residual is None:
            residual = torch.empty_strided(p.shape, param_state.stride, dtype=torch.bfloat16, device=p.device).zero_()
        elif residual.device == p.device:
            return False
        residual = residual.to(p.device)
        engine.committer.keep_residual(param_state.index, flat(residual))
        param_state.set_window("residual", residual)
        return True

    def drop_residual(self, engine: Engine, param_states: list[ParamState]) -> None:
        """Remove the residuals of these parameters."""
        owing = [param_state for param_state in param_states if param_state.residual is not None]
        for param_state in owing:
            engine.committer.drop_residual(param_state.index)
            param_state.drop_window("residual")
            self.state[param_state.param].pop("residual", None)
        if owing:
            self.remember()

    def fill(self, engine: Engine) -> None:
        """Fill the unfilled places from the parameters and `state`. After an error, the next call starts again."""
        if not self.unfilled:
            return
        keep_apart(self.state, self.param_states, self.unfilled)
        for param_state in self.unfilled:
            if "residual" in (self.state.get(param_state.param) or {}):
                self.add_residual(engine, param_state)
        with engine.writing([state.index for state in self.unfilled]):
            clipped = waiting_bytes = 0
            for param_state, fresh in self.unfilled.items():
                self.unfilled[param_state] = param_state.is_new = False
                entry = self.state.get(param_state.param) or {}
                seed = engine.devices.keeps_state or param_state.on_accelerator
                clipped += param_state.fill(entry, seed=seed, fresh=fresh)
                if param_state.codes:
                    engine.states.accelerator_codes.write(param_state.index)
                    continue
                # Without commits, decoded states need not be written together: write batches, to limit memory.
                waiting_bytes += 4 * len(param_state.sections) * param_state.numel if param_state.decoded else 0
                if waiting_bytes > STATES_WAITING and not engine.durable:
                    engine.states.write_decoded()
                    waiting_bytes = 0
            if clipped:
                text = f"8-bit states hold an exp_avg of {MOST_RATIO} times the root of exp_avg_sq at most"
                warnings.warn(f"{text}: {clipped} larger ones become that", CSDWarning, users_stacklevel())
        self.mark_filled()

    def fill_by_step(self, engine: Engine, param_states: list[ParamState]) -> list[ParamState]:
        """Leave filling to the next step, which takes `param_states`, and writes new states without reading any.

        Returns the places that the step fills. Call `mark_filled()` when the step is complete; if it is undone, the
        places are empty as before. Returns an empty list if there is nothing to fill, or a step cannot fill places.
        """
        if not self.unfilled:
            return []
        new = [
            state
            for state in param_states
            if self.unfilled.get(state)
            and not self.state.get(state.param)
            and state.reach.pointer == state.pointer_now
            and not state.initial
        ]
        if len(new) < len(self.unfilled) or not engine.next_step_fills([state.index for state in new]):
            return []
        for param_state in new:
            param_state.is_new = True
        return new

    def mark_filled(self) -> None:
        """Mark all unfilled places as filled, and show them in `state`."""
        if not self.unfilled:
            return
        for param_state in self.unfilled:
            param_state.is_new = False
            self.show(param_state)
        self.unfilled.clear()
        self.remember()

    def check(self, groups: Groups) -> None:
        """Raise CSDValueError if an entry of `state` does not fit its parameter, or cannot be kept in 8 bits."""
        for k, i, p in members(groups):
            group, rule, entry = groups[k], self.rule_of(groups[k]), self.state.get(p) or {}
            check_entry(entry, p, name_of(groups, k, i), rule.sections)
            state_dtype = group.get("state_dtype", self.state_dtype)
            check_state_dtype(state_dtype, f" of group {k}", rule, rule.sections_for(group, entry))

    def adopt(self, engine: Engine, groups: Groups, grad_dtype: torch.dtype | None, *, loaded: bool = False) -> None:
        """Copy values put into `state` to the devices: by load_state_dict() (`loaded`), an assignment or ZeRO.

        A parameter that was resized, or needs more states than its place has, gets another place.
        """
        if not loaded:
            drop_left_behind(groups, self.state, self.param_states, self.rule_of)
        self.check(groups)
        joining = set()
        for k, _, p in members(groups):
            param_state, entry = self.param_states.get(id(p)), self.state.get(p)
            if param_state is not None:
                rule = self.rule_of(groups[k])
                needed = {*rule.sections}.intersection(entry) if entry else {*rule.sections_for(groups[k])}
                shape = self.part_of(p).of(p).shape
                if shape != param_state.own_master.shape or not needed.issubset(param_state.sections):
                    self.abandon(param_state)
                    param_state = None
            if param_state is None:
                if entry:
                    joining.add(id(p))
            elif not entry or not param_state.is_shown_by(entry):
                self.unfilled[param_state] = False
        self._abandoned += self._changed_outside(groups)
        if joining:
            self.join(engine, groups, joining, grad_dtype)
        warn_if_large(bytes_in_memory(replaced_tensors(self.state, self.unfilled)), LOADED if loaded else REPLACED)
        if loaded and self.unfilled:  # continue from the checkpoint's step
            engine.states.go_to(max(int(self.state[state.param].get("step", 0)) for state in self.unfilled))
        self.fill(engine)
        self.remember()
        self.may_have_left = True

    def abandon(self, param_state: ParamState) -> None:
        """Take a place away from its parameter, which gets another one. free_left() gives the place back."""
        del self.param_states[id(param_state.param)]
        param_state.alive = False
        self._abandoned.append(param_state)
        self.may_have_left = True

    def _changed_outside(self, groups: Groups) -> list[ParamState]:
        """Take away, and return, the places of parameters in no group whose entries were changed.

        The entries keep the values. A parameter that returns to a group gets a new place, filled from its entry.
        """
        here = {id(p) for _, _, p in members(groups)}
        entries = [(key, s, self.state.get(s.param)) for key, s in self.param_states.items() if key not in here]
        changed = [key for key, s, e in entries if e and (not s.is_shown_by(e) or e.keys() - {*s.shown, *s.sections})]
        left = [*map(self.param_states.pop, changed)]
        for param_state in left:
            param_state.alive = False
        return left

    def free_left(self, engine: Engine, groups: Groups) -> None:
        """Give back the places of parameters that have left, that is, are in no group and have no entry in `state`.

        As with AdamW, a parameter in no group keeps its states as long as it has an entry. Raises CSDOSError if the
        last step, which contains the parameters, cannot be committed, and CSDError if states that the program still
        holds cannot be read; the next call tries again.
        """
        here = {id(p) for _, _, p in members(groups)}
        left = [s for key, s in self.param_states.items() if key not in here and not self.state.get(s.param)]
        if gone := left + self._abandoned:
            engine.committer.before_joining_or_leaving()
            held = Held(gone)
            keep_apart(self.state, self.param_states, gone)
            self.remember()
            for param_state in left:
                del self.param_states[id(param_state.param)]
            self._abandoned = gone  # for another try, as an optimizer rank may fail to free them
            for param_state in gone:
                self.unfilled.pop(param_state, None)
                engine.committer.drop_residual(param_state.index)
                accelerated.drop_copy(engine, param_state)
                engine.states.accelerator_codes.forget(param_state.index)
                param_state.leave()
            indices = [param_state.index for param_state in gone]
            engine.windows.forget({*indices})
            held.copy()
            self._described = None
            self.describe(engine, groups)  # first: no manifest may place a parameter in a freed tile
            engine.free(indices)
            self._abandoned = []
            trim_memory()
            self.changes += 1
            self.count_on_accelerator(engine)
        self.may_have_left = False

    def saved(self) -> Callable[[Engine, Groups], None]:
        """Return a function that undoes a load's changes here, after the engine's states were restored.

        Parameters that joined during the load lose their places.
        """
        state, shown, unfilled, abandoned = self.state, self._shown, {*self.unfilled}, [*self._abandoned]
        places = {*self.param_states.values()}
        entries = [(p, entry, dict.copy(entry) if type(entry) is dict else None) for p, entry in state.items()]
        known = [(s, s.version, s.windows.get("residual"), s.shown.get("residual")) for s in places]

        def put_back(engine: Engine, groups: Groups) -> None:
            joined = [param_state for param_state in self.param_states.values() if param_state not in places]
            for param_state in joined:
                param_state.alive = False
            self.state, self._shown, self._abandoned = state, shown, abandoned + joined
            self.may_have_left = True
            state.clear()
            for p, entry, values in entries:
                state[p] = entry
                if values is not None:
                    entry.clear()
                    entry.update(values)
            self.param_states = {id(s.param): s for s in places}
            for param_state, version, window, shown_window in known:
                param_state.alive, param_state.version, param_state.is_new = True, version, False
                for windows, residual in ((param_state.windows, window), (param_state.shown, shown_window)):
                    windows.pop("residual", None)
                    if residual is not None:
                        windows["residual"] = residual
            self.unfilled = dict.fromkeys(unfilled, False)  # may no longer read as zero
            self._described = None
            self.changes += 1
            self.count_on_accelerator(engine)
            self.describe(engine, groups)

        return put_back

    # ---- `state` ---------------------------------------------------------------------

    def show(self, param_state: ParamState) -> None:
        """Put our tensors into the parameter's entry in `state`, and keep the program's own values."""
        entry = self.state.get(param_state.param, {})
        if param_state.decoded:
            others = {key: value for key, value in dict.items(entry) if key not in param_state.sections}
            self.state[param_state.param] = param_state.entry(others)
            return
        self.state[param_state.param] = {**param_state.shown, **entry, **param_state.shown}

    def remember(self) -> None:
        self._shown = self._values()

    def intact(self) -> bool:
        """Return whether `state` holds exactly the same objects as at the last remember()."""
        values = self._values()
        return len(values) == len(self._shown) and all(map(is_, values, self._shown))

    def _values(self) -> list[Any]:
        return [
            *chain.from_iterable(
                (p, *(entry.identities if isinstance(entry, DecodedEntry) else entry.values()))
                for p, entry in self.state.items()
                if isinstance(entry, dict) and entry
            )
        ]
