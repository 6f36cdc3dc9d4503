"""Optimizers as `csd-optim plan --optimizer` names them, such as `CSDSGD,momentum`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import settings
from ..devices.units import parse_rate
from ..errors import CSDValueError
from ..muon import newton_schulz
from ..optim.classes import OPTIMIZERS
from ..optim.rules import NAMED
from ..params.groups import check_state_dtype
from ..params.update_rule import Group, UpdateRule
from ..planning.advice import PlannedOptimizer
from ..planning.model import NS_DTYPES, Orthogonalization
from ..store.sections import FP32

Hyper = tuple[int, tuple[float, ...]]  # the rule and constants of a first step, as csd_hyper has them
Part = tuple[float, tuple[str, ...], Hyper]  # the share of some parameters, the names of their sections, their Hyper


def described(text: str, state_dtype: str) -> tuple[PlannedOptimizer, tuple[str, ...], Hyper]:
    """Parse `CLASS[,OPTION...]`, an optimizer class and those of its arguments that add a state.

    Returns the optimizer for a plan, and its sections and Hyper. Raises CSDValueError, also if its states cannot be
    kept as `state_dtype`.
    """
    name, *options = (part.strip() for part in text.split(","))
    if name not in OPTIMIZERS:
        raise CSDValueError(f"Invalid optimizer: {text!r}; there are {', '.join(OPTIMIZERS)}")
    make, rule = OPTIMIZERS[name], OPTIMIZERS[name]._rule
    _check_options("optimizer", text, name, options, rule)
    check_state_dtype(state_dtype, "", rule, [rule.switches[name] for name in options])
    asked: dict[str, Any] = dict.fromkeys(options, True)
    parameter = torch.nn.Parameter(torch.zeros(1, 1))
    with settings.without_options(), make([parameter], devices="null:", **asked) as optimizer:
        group = optimizer.param_groups[0]
    sections, hyper = _first_step(rule, group, state_dtype)
    return (
        PlannedOptimizer(name, tuple(n for n in rule.switches if n in options), rule.name, len(sections)),
        sections,
        hyper,
    )


def with_groups(
    optimizer: PlannedOptimizer, own: Part, texts: Sequence[str], state_dtype: str
) -> tuple[PlannedOptimizer, list[Part]]:
    """Return an optimizer for a plan with groups of other rules, each `RULE[,OPTION...]=SHARE`, and its parts.

    `own`: that of the optimizer without them. Raises CSDValueError.
    """
    parts, groups = [], []
    for text in texts:
        of, _, given = text.partition("=")
        name, *options = (part.strip() for part in of.split(","))
        if name not in NAMED:
            raise CSDValueError(f"Invalid group: {text!r}; write RULE=SHARE, the rules are {', '.join(NAMED)}")
        rule = NAMED[name]
        _check_options("group", text, name, options, rule)
        check_state_dtype(state_dtype, f" of group {text!r}", rule, [rule.switches[name] for name in options])
        try:
            share = float(given.strip().removesuffix("%")) / (100 if given.strip().endswith("%") else 1)
        except ValueError:
            share = math.nan
        if not 0 < share < 1:
            raise CSDValueError(f"Invalid group: {text!r}; its share of the parameters is a number such as 0.2 or 20%")
        groups.append((",".join((name, *options)), share))
        parts.append((share, *_first_step(rule, {**rule.defaults, **dict.fromkeys(options, True)}, state_dtype)))
    left = 1 - math.fsum(share for _, share in groups)
    if left < 0:
        raise CSDValueError(f"Invalid groups: their shares are {1 - left:g} of the parameters; 1 is all")
    parts = [(left, *own[1:]), *parts]
    sections = math.fsum(share * len(names) for share, names, _ in parts)
    return replace(optimizer, sections=sections if groups else optimizer.sections, groups=tuple(groups)), parts


def orthogonalization(optimizer: PlannedOptimizer, width: int, rate: str | None) -> Orthogonalization | None:
    """Return what is orthogonalized in a step of this optimizer, if anything is.

    `width`: of the model. `rate`: floating-point operations per second, as `200T/s`; None: measured on
    this machine's CPU. Raises CSDValueError.
    """
    left = 1 - math.fsum(share for _, share in optimizer.groups)
    shares = zip(optimizer.rules, (left, *(share for _, share in optimizer.groups)), strict=True)
    share = math.fsum(share for rule, share in shares if NAMED[rule].orthogonal)
    if not share:
        return None
    if rate is not None:
        return Orthogonalization(share, width, parse_rate(rate, ""))
    cpu = torch.device("cpu")
    dtype = newton_schulz.fast_dtype(cpu)
    name = next(name for name, named in NS_DTYPES.items() if named is dtype)
    return Orthogonalization(share, width, newton_schulz.rate(dtype, cpu), name, measured=True)


def _check_options(what: str, text: str, name: str, options: Sequence[str], rule: UpdateRule) -> None:
    for option in options:
        if option not in rule.switches:
            known = ", ".join(rule.switches) or "nothing"
            raise CSDValueError(f"Invalid {what}: {text!r}; {option!r} adds no state to {name}, but {known} does")


def _first_step(rule: UpdateRule, group: Group, state_dtype: str) -> tuple[tuple[str, ...], Hyper]:
    sections = rule.sections_for(group)
    if rule.orthogonal:  # its two passes are planned as the one pass of a rule with as many states and codes
        rule = NAMED["sgd" if state_dtype == FP32 else "rmsprop"]
        group = {**rule.defaults, "momentum": 0.95 if state_dtype == FP32 else 0}
    return sections, rule.constants(group, sections, 1, 1.0)
