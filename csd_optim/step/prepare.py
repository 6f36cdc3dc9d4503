"""The preparation of a step: everything that happens before it changes anything.

    bound = bind(...)           gives parameters their places on the devices, and detects writes from outside
    spec = specify(...)         checks everything and changes nothing, neither on the devices nor in `state`
    add_residuals(...)          the first change
    apply_outside_writes(...)

Steps (steps.py) calls these, then prepares memory and streams. The update rules are arguments: nothing here depends on
their formulas.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

import numpy as np
import torch

from ..accelerator import check_not_capturing, is_on_accelerator
from ..bindings import DTYPE_CODES, HYPER, PARAM
from ..compression.policy import entry_dtype, ratios
from ..compression.selection import inverse_of
from ..distributed.grad_norm import Parts
from ..engine.engine import Engine
from ..errors import CSDRuntimeError
from ..muon.newton_schulz import Orthogonal, check_matrix
from ..params.entries import drop_left_behind
from ..params.grad_source import GradSource
from ..params.groups import Groups, members
from ..params.param_state import ParamState
from ..params.state_map import StateMap
from ..params.update_rule import RuleOf
from .spec import NO_ROWS, BoundStep, GradOptions, Participants, Rows, StepPlan, StepSpec
from .two_passes import whole_shape

# Bytes of fp32 masters from parameters that were written from outside. Up to this limit the masters stay in memory
# until the step writes them; beyond it they are written to the devices at once, and committed separately.
EDIT_BYTES = 256 << 20


def participants(groups: Groups, optimizer: str, for_sparse: str) -> Participants:
    """Return all parameters with a gradient. Raises CSDRuntimeError if a gradient is sparse, or during graph capture.

    For error messages: `optimizer` is its name, `for_sparse` the optimizer to recommend for sparse gradients.
    """
    params, grads, groups_of, strided = [], [], [], torch.strided
    for k, group in enumerate(groups):
        for p in group["params"]:
            g = p.grad
            if g is None:
                continue
            if g.layout is not strided:
                raise CSDRuntimeError(
                    f"{optimizer} does not support sparse gradients, please consider {for_sparse} instead"
                )
            params.append(p)
            grads.append(g)
            groups_of.append(k)
    check_not_capturing(grads)
    return Participants(params, grads, groups_of)


def parts_of_grads(groups: Groups, state_map: StateMap, reduced: Rows = NO_ROWS) -> Parts:
    """Yield the gradients that enter the norm for clipping, as norm_of() takes them."""
    for _, _, p in members(groups):
        part = state_map.part(p)
        if part.replicas and id(p) in reduced:
            yield reduced[id(p)], (part.replicas.group,)
        else:
            yield None if p.grad is None else part.local(p.grad), part.groups()


def clip_scale(norm: float, max_norm: float) -> float:
    """Return the factor that clips gradients of this norm to `max_norm`, as torch's clip_grad_norm_().

    If the norm is NaN, so is the factor.
    """
    return min(1.0, max_norm / (norm + 1e-6)) if norm == norm else norm


# ---- places ----------------------------------------------------------------------------


def bind(
    engine: Engine,
    state_map: StateMap,
    groups: Groups,
    taking_part: Participants,
    grad_dtype: torch.dtype | None,
    plan: StepPlan | None,
) -> BoundStep | None:
    """Give new parameters their places, and detect which parameters were written from outside.

    Adopts tensors that were assigned to `state`. `plan`: the previous step's. Returns None if there is no gradient.
    Raises what StateMap.join(), adopt() and ParamState.refresh() raise.
    """
    if not state_map.intact():
        state_map.adopt(engine, groups, grad_dtype)
    if state_map.may_have_left or state_map.unfilled:  # parameters may be in no group any more
        state_map.free_left(engine, groups)
    if not taking_part.params:
        return None
    plan = _plan_for(engine, state_map, groups, taking_part.params, grad_dtype, plan)
    new = state_map.fill_by_step(engine, plan.param_states)
    if not new:
        state_map.fill(engine)
    state_map.describe(engine, groups)
    written = _written(state_map, plan, grad_dtype)
    if written and new:  # a separate commit of outside writes requires that all places are filled
        state_map.fill(engine)
        new = []
    if written:
        for param_state in written:
            param_state.refresh(grad_dtype)
            state_map.show(param_state)
        state_map.remember()
        state_map.count_on_accelerator(engine)
        state_map.changes += 1
        plan = _plan_for(engine, state_map, groups, taking_part.params, grad_dtype, plan)
    return BoundStep(plan, taking_part, new, written, state_map.coded)


def _written(state_map: StateMap, plan: StepPlan, grad_dtype: torch.dtype | None) -> list[ParamState]:
    """Return parameters written, moved or converted since the last step, if they have a gradient or still fit."""
    written: Iterable[ParamState] = plan.param_states
    if grad_dtype is plan.grad_dtype:
        written = (state for state in state_map.param_states.values() if not state.is_new and state.is_dirty)
    return [state for state in written if state.param.grad is not None or state.fits()]


def _plan_for(
    engine: Engine,
    state_map: StateMap,
    groups: Groups,
    params: list[torch.Tensor],
    grad_dtype: torch.dtype | None,
    plan: StepPlan | None,
) -> StepPlan:
    """Return `plan` if it is still valid, else a new one. Gives places to new parameters."""
    if (
        plan is not None
        and plan.changes == state_map.changes
        and len(params) == len(plan.params)
        and all(map(is_, params, plan.params))
    ):
        return plan
    if any(id(p) not in state_map.param_states for p in params):
        joining = set(map(id, params)).difference(state_map.param_states)
        drop_left_behind(groups, state_map.state, state_map.param_states, state_map.rule_of)
        state_map.join(engine, groups, joining, grad_dtype)
    param_states = [state_map.param_states[id(p)] for p in params]
    table = np.zeros(engine.tiles.n_params, PARAM)
    for state in state_map.coded:
        table["first"][state.index] = state.part.first_element() * (2 if state.param.is_complex() else 1) % (1 << 32)
    for state in param_states:
        if direct_dtype := state.reach.direct_dtype:
            row = table[state.index]
            row["param"] = state.local.data_ptr()
            row["grad_dtype"], row["param_dtype"] = DTYPE_CODES[direct_dtype], DTYPE_CODES[state.param.dtype]
    pointers, times = np.unique([state.pointer_now for state in param_states], return_counts=True)
    if (twice := pointers[(times > 1) & (pointers > 0)]).size:
        names = " and ".join(state.name for state in param_states if state.pointer_now == twice[0])
        raise CSDRuntimeError(
            f"parameters {names} share their memory, and would be updated at the same time; "
            "to tie weights, let the modules share the parameter itself (b.weight = a.weight)"
        )
    rows = np.array([state.index for state in param_states])
    table["master"][rows] = [engine.truth.master_of(state) for state in param_states]
    engine.states.watcher.enter(table, param_states)
    layouts = sorted({(state.rule, state.sections) for state in param_states})
    layout_of = np.array([layouts.index((state.rule, state.sections)) for state in param_states])
    return StepPlan(params, param_states, rows, layouts, layout_of, table, grad_dtype, state_map.changes)


# ---- what will be done -----------------------------------------------------------------


def specify(
    engine: Engine, rule_of: RuleOf, bound: BoundStep, groups: Groups, grad_scale: float, options: GradOptions
) -> StepSpec:
    """Check everything, change nothing. `grad_scale`: factor by which gradients are multiplied.

    Raises CSDValueError, CSDTypeError for a gradient that does not fit its parameter or an invalid `topk`, and as
    UpdateRule.checked_constants(); CSDRuntimeError if a group needs a state that one of its parameters does not have,
    or has another rule.
    """
    plan, (_, grads, groups_of) = bound.plan, bound.participants
    grads = [_own_part(state, g, options.reduced) for state, g in zip(plan.param_states, grads, strict=True)]
    steps = engine.states.all_steps()
    steps[plan.rows] += 1
    table = plan.table.copy()
    hypers, table["hyper"][plan.rows] = _hypers(rule_of, plan, groups, groups_of, steps[plan.rows], grad_scale)
    for state in bound.new:
        table["master"][state.index] = engine.truth.master_of(state, is_new=True)
    _fill_codes(engine, bound.coded, steps, table)
    sources = _locate_gradients(plan, grads, table, options.grad_dtype)
    may_have_residual = options.error_feedback and bool(engine.states.residuals)
    residual_mask = np.zeros(len(grads), bool)
    if may_have_residual:
        residual_mask[:] = [state.residual is not None for state in plan.param_states]
    topk = ratios(plan.params, residual_mask, groups_of, groups, steps[plan.rows], options.topk, options.topk_warmup)
    with_residual = _compress(plan, grads, steps, topk, table, sources, options)
    orthogonal = _orthogonal(rule_of, plan, groups, groups_of)
    by_row = {state.index: g for state, g in zip(plan.param_states, grads, strict=True)}
    unscaled = bool(inverse_of(grad_scale))
    return StepSpec(
        plan,
        by_row,
        steps,
        table,
        hypers,
        sources,
        bound.written,
        with_residual,
        options.error_feedback,
        unscaled,
        orthogonal,
    )


def _orthogonal(rule_of: RuleOf, plan: StepPlan, groups: Groups, groups_of: list[int]) -> dict[int, Orthogonal]:
    """Return, by row, how the matrices that take two passes are orthogonalized. Raises CSDValueError."""
    rules = {k: rule_of(groups[k]).orthogonal for k in {*groups_of}}
    found = {}
    for state, k in zip(plan.param_states, groups_of, strict=True) if any(rules.values()) else ():
        if not (orthogonal := rules[k]):
            continue
        shape = whole_shape(state)
        check_matrix(state.name, state.param, shape)  # not checked with its group if it was frozen or lazy
        if 0 not in shape:
            found[state.index] = orthogonal(groups[k], shape, state.local.device)
    return found


def _own_part(state: ParamState, g: torch.Tensor, reduced: Rows) -> torch.Tensor:
    """Return the gradient of the part that this process updates. `g`: the gradient of the whole parameter."""
    rows = reduced.get(id(state.param))
    if rows is not None:
        return rows
    return g if state.part.is_whole else state.part.of(g)


def is_steady(state_map: StateMap, plan: StepPlan) -> bool:
    """Return whether the plan is still valid, and nothing was written from outside."""
    same = plan.changes == state_map.changes and state_map.intact()
    same = same and not (state_map.unfilled or state_map.may_have_left)
    return same and not any(state.is_dirty for state in state_map.param_states.values())


def repeats(
    engine: Engine,
    state_map: StateMap,
    plan: StepPlan | None,
    groups: Groups,
    taking_part: Participants,
    options: GradOptions,
) -> bool:
    """Return whether the step is like that of `plan`, so that preparing it changes nothing."""
    if plan is None or options.grad_dtype is not plan.grad_dtype or not is_steady(state_map, plan):
        return False
    if len(taking_part.params) != len(plan.params) or not all(map(is_, taking_part.params, plan.params)):
        return False
    topk = options.topk is not None or any(group.get("topk") is not None for group in groups)
    return not (topk or engine.states.residuals)


def foresee(
    engine: Engine,
    rule_of: RuleOf,
    state_map: StateMap,
    plan: StepPlan,
    groups: Groups,
    grad_scale: float,
    options: GradOptions,
) -> StepSpec | None:
    """Return the step after that of `plan`, with the same parameters, each of which stands in for its gradient.

    Returns None if something has changed since, if gradients have to be converted before they are pushed, or if ranks
    divide a matrix that is orthogonalized: step() ends such a step. Raises what specify() raises.
    """
    if not is_steady(state_map, plan):
        return None
    if not all(
        state.reach.direct_dtype
        or ((state.images_only or is_on_accelerator(state.local)) and state.local.dtype in DTYPE_CODES)
        for state in plan.param_states
    ):
        return None
    group_of = {id(p): k for k, _, p in members(groups)}
    stand_ins = [state.local if state.part.is_whole else state.param.detach() for state in plan.param_states]
    taking_part = Participants(plan.params, stand_ins, [group_of.get(id(p), 0) for p in plan.params])
    options = options._replace(reduced=NO_ROWS)  # its rows are of an earlier backward
    bound = BoundStep(plan, taking_part, [], [], state_map.coded)
    spec = specify(engine, rule_of, bound, groups, grad_scale, options)
    rounded = any(s.param_and_copy or s.grad_dtype is not s.grad.dtype for s in spec.sources.values())
    divided = any(state.index in spec.orthogonal and not state.part.is_whole for state in plan.param_states)
    return None if rounded or divided or spec.table["topk"].any() else spec


def _hypers(
    rule_of: RuleOf,
    plan: StepPlan,
    groups: Groups,
    groups_of: list[int],
    steps: np.ndarray[Any, Any],
    grad_scale: float,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return this step's constants (dtype HYPER), and each parameter's index among these constants.

    There is one set of constants per combination of group, layout of sections and step count.
    """

    def name_of_first(n: int) -> str:
        return plan.param_states[int(np.argmax(hyper_of == n))].name

    kinds = np.array(groups_of) * len(plan.layouts) + plan.layout_of
    keys = kinds * 2.0**32 + steps
    if (keys == keys[0]).all():  # nearly always; np.unique() takes longer than the rest
        pairs, hyper_of = keys[:1], np.zeros(len(keys), np.intp)
    else:
        pairs, hyper_of = np.unique(keys, return_inverse=True)
    constants = []
    for n, (kind, t) in enumerate(divmod(pair, 2.0**32) for pair in pairs.tolist()):
        k, layout = divmod(int(kind), len(plan.layouts))
        group, (rule_name, sections) = groups[k], plan.layouts[layout]
        rule = rule_of(group)
        if rule.name != rule_name:
            raise CSDRuntimeError(
                f"the rule of parameter {name_of_first(n)} is {rule.name} now, and its states are those of "
                f"{rule_name}: the rule of a group cannot be changed"
            )
        constants.append(rule.checked_constants(group, sections, t, grad_scale))
        if not {*rule.sections_for(group)} <= {*sections}:
            turned_on, missing = rule.lacking(group, sections)
            raise CSDRuntimeError(
                f"{turned_on} was turned on after the state of parameter {name_of_first(n)} was made; "
                f"load a state dict with {missing}, or turn it on before the first step"
            )
    return np.array(constants, HYPER), hyper_of


def _locate_gradients(
    plan: StepPlan, grads: list[torch.Tensor], table: np.ndarray[Any, Any], grad_dtype: torch.dtype | None
) -> dict[int, GradSource]:
    """Write addresses of gradients to the table. Returns, by row, the ones that the engine cannot read in place."""
    sources: dict[int, GradSource] = {}
    pointers = []
    for param_state, g in zip(plan.param_states, grads, strict=True):
        if (
            g.dtype is param_state.reach.direct_dtype
            and g.numel() == param_state.numel
            and g.is_contiguous()
            and not g.is_neg()
        ):
            pointers.append(g.data_ptr())
            continue
        source = sources[param_state.index] = param_state.source(g, grad_dtype)
        pointers.append(source.grad.data_ptr())
        row = table[param_state.index]
        row["param"] = 0 if source.is_far else source.param.data_ptr()
        row["in_image"] = source.is_far and source.param_is_read
        row["grad_dtype"], row["param_dtype"] = DTYPE_CODES[source.grad_dtype], DTYPE_CODES[source.param.dtype]
    table["grad"][plan.rows] = np.array(pointers, np.uint64)
    return sources


def _fill_codes(
    engine: Engine, coded: list[ParamState], steps: np.ndarray[Any, Any], table: np.ndarray[Any, Any]
) -> None:
    """Write what 8-bit states need to the table: the seed of this step's rounding, and the parameters' addresses."""
    for state in coded:
        row = table[state.index]
        row["seed"] = int(steps[state.index]) % (1 << 32)
        row["master"] = engine.truth.master_of(state, is_new=state.is_new)
        if state.is_compared and state.reach.direct_dtype and not row["param"] and not state.is_dirty:
            row["param"], row["param_dtype"] = state.local.data_ptr(), DTYPE_CODES[state.local.dtype]


def _compress(
    plan: StepPlan,
    grads: list[torch.Tensor],
    steps: np.ndarray[Any, Any],
    topk: np.ndarray[Any, Any],
    table: np.ndarray[Any, Any],
    sources: dict[int, GradSource],
    options: GradOptions,
) -> list[ParamState]:
    """Mark sparse gradients in the table. Returns the parameters whose residuals the step changes."""
    if not topk.any():
        return []
    with_residual = []
    for param_state, grad, ratio in zip(plan.param_states, grads, topk.tolist(), strict=True):
        if not ratio:
            continue
        row = table[param_state.index]
        row["topk"], row["topk_dtype"] = ratio, DTYPE_CODES[entry_dtype(grad.dtype, options.grad_dtype)]
        if param_state.index in sources:  # select entries from the gradient in its own dtype
            row["grad_dtype"] = DTYPE_CODES[sources[param_state.index].grad.dtype]
        if options.error_feedback:
            row["seed"] = int(steps[param_state.index])
            with_residual.append(param_state)
    return with_residual


# ---- from here on something changes ----------------------------------------------------


def add_residuals(engine: Engine, state_map: StateMap, spec: StepSpec) -> None:
    """Create missing residuals of parameters with Top-K, and write their addresses to the table. Raises CSDOSError."""
    new = False
    for param_state in spec.with_residual:
        if state_map.add_residual(engine, param_state) and param_state not in state_map.unfilled:
            state_map.show(param_state)
            new = True
        spec.table["residual"][param_state.index] = param_state.windows["residual"].data_ptr()
    if new:
        state_map.remember()


def apply_outside_writes(engine: Engine, spec: StepSpec) -> None:
    """Copy parameters that were written from outside since the last step to their masters. Raises CSDOSError."""
    taking_part = {state.index for state in spec.plan.param_states}
    written = [state for state in spec.written if engine.devices.keeps_state or state.on_accelerator]
    if not engine.devices.resident:  # resident states need no copy: their steps are never undone
        spec.outside_values = {
            state.index: state.local.detach().clone()
            for state in written
            if state.is_compared and state.index in taking_part
        }
    if not written:
        return
    always = not engine.states.synced
    if not engine.durable or 4 * sum(state.numel for state in written) > EDIT_BYTES:
        within = engine.writing([state.index for state in written])
    else:
        engine.states.remap()  # windows show the masters, and keep the program's writes for the step
        within = engine.truth.reseeding()
    with within:
        for param_state in written:
            param_state.reseed(always=always, takes_part=param_state.index in taking_part)
