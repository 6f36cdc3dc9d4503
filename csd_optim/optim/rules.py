"""The update rules by name, as used in parameter groups and stores, and the rule of a group.

The arithmetic of each rule is a header in native/include; its states, hyperparameters and constants are here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..bindings import PASS_RULES, RULE_ROWS, RULES, RuleRow
from ..errors import CSDRuntimeError, CSDValueError
from ..muon.newton_schulz import JORDAN, Coefficients, Orthogonal, fast_dtype
from ..params.update_rule import FLT_MAX, Group, UpdateRule

UNPROVEN = "no long training has shown that it loses nothing by that"
Constants = tuple[int, tuple[float, ...]]  # the number of a rule or of its variant, and csd_hyper.c

# ---- AdamW and Adam: adamw.h, adam.h ---------------------------------------------------


def _adam_constants(group: Group, decoupled: bool, t: float, grad_scale: float) -> Constants:
    lr, eps, weight_decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
    beta1, beta2 = (float(b) for b in group["betas"])
    if decoupled:
        rule = RULES["amsgrad" if group["amsgrad"] else "adamw"]
    else:
        rule = RULES["adam_amsgrad" if group["amsgrad"] else "adam"]
    return rule, (
        1 - lr * weight_decay if decoupled else weight_decay,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        lr / (1 - beta1**t),
        1 / (1 - beta2**t) ** 0.5,
        eps,
        -grad_scale if group["maximize"] else grad_scale,
    )


def _adamw(group: Group, _: Sequence[str], t: float, grad_scale: float) -> Constants:
    return _adam_constants(group, True, t, grad_scale)


def _adam(group: Group, _: Sequence[str], t: float, grad_scale: float) -> Constants:
    """Return Adam's constants, or AdamW's if the group has `decoupled_weight_decay`, as torch's Adam allows."""
    return _adam_constants(group, bool(group["decoupled_weight_decay"]), t, grad_scale)


def _decays_gradient(group: Group) -> bool:
    return bool(group["weight_decay"]) and not group.get("decoupled_weight_decay")


ADAMW = UpdateRule(
    name="adamw",
    sections=("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    min_sections=3,
    defaults={
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "amsgrad": False,
        "maximize": False,
    },
    constants=_adamw,
    switches={"amsgrad": "max_exp_avg_sq"},
)
ADAM = replace(
    ADAMW,
    name="adam",
    defaults={**ADAMW.defaults, "weight_decay": 0, "decoupled_weight_decay": False},
    constants=_adam,
    decays_gradient=_decays_gradient,
)

# ---- SGD: sgd.h ------------------------------------------------------------------------


def _sgd(group: Group, _: Sequence[str], t: float, grad_scale: float) -> Constants:
    momentum = float(group["momentum"])
    rule = "sgd" if not momentum else "sgd_nesterov" if group["nesterov"] else "sgd_momentum"
    return RULES[rule], (
        float(group["lr"]),
        float(group["weight_decay"]),
        momentum,
        1 - float(group["dampening"]) if t > 1 else 1.0,  # the first momentum is the first gradient, undampened
        *(0.0,) * 4,
        -grad_scale if group["maximize"] else grad_scale,
    )


SGD = UpdateRule(
    name="sgd",
    sections=("master", "momentum_buffer"),
    min_sections=1,
    defaults={"lr": 1e-3, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False},
    constants=_sgd,
    decays_gradient=_decays_gradient,
    switches={"momentum": "momentum_buffer"},
    uncoded={"momentum_buffer": UNPROVEN},
    torch_counts=False,
)

# ---- Adagrad: adagrad.h ----------------------------------------------------------------


def _adagrad(group: Group, _: Sequence[str], t: float, grad_scale: float) -> Constants:
    return RULES["adagrad"], (
        float(group["lr"]) / (1 + (t - 1) * float(group["lr_decay"])),
        float(group["weight_decay"]),
        float(group["eps"]),
        *(0.0,) * 5,
        -grad_scale if group["maximize"] else grad_scale,
    )


ADAGRAD = UpdateRule(
    name="adagrad",
    sections=("master", "sum"),
    min_sections=2,
    defaults={
        "lr": 1e-2,
        "lr_decay": 0,
        "eps": 1e-10,
        "weight_decay": 0,
        "initial_accumulator_value": 0,
        "maximize": False,
    },
    constants=_adagrad,
    decays_gradient=_decays_gradient,
    initial={"sum": "initial_accumulator_value"},
)

# ---- RMSprop: rmsprop.h ----------------------------------------------------------------


def _rmsprop(group: Group, sections: Sequence[str], t: float, grad_scale: float) -> Constants:
    """Return RMSprop's constants: there is a variant for each position of momentum_buffer among the `sections`."""
    lr, weight_decay, alpha = float(group["lr"]), float(group["weight_decay"]), float(group["alpha"])
    momentum, centered = float(group["momentum"]), bool(group["centered"])
    if momentum <= 0:
        rule = "rmsprop_centered" if centered else "rmsprop"
    elif centered:
        rule = "rmsprop_both"
    else:
        rule = "rmsprop_uncentered" if "grad_avg" in sections else "rmsprop_momentum"
    scale = -grad_scale if group["maximize"] else grad_scale
    return RULES[rule], (lr, weight_decay, alpha, 1 - alpha, momentum, float(group["eps"]), 0.0, 0.0, scale)


RMSPROP = UpdateRule(
    name="rmsprop",
    sections=("master", "square_avg", "grad_avg", "momentum_buffer"),
    min_sections=2,
    defaults={
        "lr": 1e-2,
        "momentum": 0,
        "alpha": 0.99,
        "eps": 1e-8,
        "centered": False,
        "weight_decay": 0,
        "maximize": False,
    },
    constants=_rmsprop,
    decays_gradient=_decays_gradient,
    switches={"centered": "grad_avg", "momentum": "momentum_buffer"},
    uncoded={
        "grad_avg": "square_avg - grad_avg**2 would become negative where both are rounded",
        "momentum_buffer": UNPROVEN,
    },
)

# ---- Lion: lion.h ----------------------------------------------------------------------


def _lion(group: Group, _: Sequence[str], t: float, grad_scale: float) -> Constants:
    lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
    decay, scale = 1 - lr * float(group["weight_decay"]), -grad_scale if group["maximize"] else grad_scale
    return RULES["lion"], (decay, lr, beta1, 1 - beta1, beta2, 1 - beta2, 0.0, 0.0, scale)


LION = UpdateRule(
    name="lion",
    sections=("master", "exp_avg"),
    min_sections=2,
    defaults={"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False},
    constants=_lion,
    uncoded={"exp_avg": "the update is a sign, which would be random where exp_avg is smaller than a code"},
)

# ---- Muon: muon.h, and muon/newton_schulz.py between its passes --------------------------


def _muon(group: Group, _: Sequence[str], t: float, grad_scale: float) -> Constants:
    momentum = float(group["momentum"])
    mix = 1.0 if group["nesterov"] else 0.0
    return PASS_RULES["muon_momentum"], (1 - momentum, momentum, mix, *(0.0,) * 5, grad_scale)


def _orthogonal(group: Group, shape: Sequence[int], device: torch.device) -> Orthogonal:
    rows, columns = shape[-2:]
    kind = group["adjust_lr_fn"]
    if kind in (None, "original"):
        ratio = max(1.0, rows / columns) ** 0.5
    elif kind == "match_rms_adamw":
        ratio = 0.2 * max(rows, columns) ** 0.5
    else:
        raise CSDValueError(f"Invalid adjust_lr_fn: {kind!r}; it is None, 'original' or 'match_rms_adamw'")
    lr = float(group["lr"])
    constants = 1 - lr * float(group["weight_decay"]), lr * ratio
    if not max(map(abs, constants)) <= FLT_MAX:
        raise CSDValueError(f"Invalid lr of a parameter group: {lr}; with its shapes it is no finite fp32 number")
    name = group["ns_dtype"]
    if name not in NS_DTYPES:
        raise CSDValueError(f"Invalid ns_dtype: {name!r}; it is one of {', '.join(map(repr, NS_DTYPES))}")
    dtype = NS_DTYPES[name] or fast_dtype(device)
    padded = (*constants, *(0.0,) * 7)
    return Orthogonal(_iterations(group), float(group["eps"]), dtype, PASS_RULES["muon_apply"], padded)


def _iterations(group: Group) -> tuple[Coefficients, ...]:
    """Return the coefficients of each Newton-Schulz iteration."""
    steps, given = group["ns_steps"], group["ns_coefficients"]
    if not (type(steps) is int and 0 <= steps < 100):
        raise CSDValueError(f"Invalid ns_steps: {steps!r}; it is a number of iterations, less than 100")
    try:
        rows = [given] * steps if isinstance(given[0], (int, float)) else [*given]
        found = tuple((float(a), float(b), float(c)) for a, b, c in rows)
        if len(found) == steps and all(abs(value) <= FLT_MAX for row in found for value in row):
            return found
    except (TypeError, ValueError, IndexError, KeyError):
        pass
    raise CSDValueError(
        f"Invalid ns_coefficients: {given!r}; they are three finite numbers, or three for each of the {steps} steps"
    )


NS_DTYPES: Mapping[str, torch.dtype | None] = {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32}
MUON = UpdateRule(
    name="muon",
    sections=("master", "momentum_buffer"),
    min_sections=2,
    defaults={
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": JORDAN,
        "eps": 1e-7,
        "ns_steps": 5,
        "adjust_lr_fn": None,
        "ns_dtype": "auto",
    },
    constants=_muon,
    texts=("ns_coefficients", "adjust_lr_fn", "ns_dtype"),
    orthogonal=_orthogonal,
    torch_counts=False,
)

# ---- the rule of a group ---------------------------------------------------------------

NAMED: Mapping[str, UpdateRule] = {rule.name: rule for rule in (ADAMW, ADAM, SGD, ADAGRAD, RMSPROP, LION, MUON)}
HYPERPARAMETERS = frozenset(name for rule in NAMED.values() for name in rule.hyperparameters)
STATES = frozenset(name for rule in NAMED.values() for name in rule.sections)


def check_native_rules(rules: Iterable[UpdateRule], rows: Sequence[RuleRow]) -> None:
    """Raise CSDRuntimeError unless `rows`, the list in rules.h, has the numbers of csd.h and the sections of `rules`.

    `rules`: all update rules; the codecs of their 8-bit states are compared, too.
    """
    here = {rule.name: (rule.min_sections, len(rule.sections), rule.codec) for rule in rules}
    there = {}
    for name in {row.rule for row in rows}:
        own = [row for row in rows if row.rule == name]
        updated, most = [row.updated for row in own], [row.most for row in own]
        # Two passes divide the sections. Variants after the first one may have states without codes.
        least_and_most = (sum(updated), sum(most)) if own[0].of_pass else (min(updated), max(most))
        there[name] = (*least_and_most, own[0].codec)
    numbers = sorted({*RULES, *PASS_RULES}.symmetric_difference(row.name for row in rows))
    sections = sorted(here.items() ^ there.items())
    if numbers or sections:
        raise CSDRuntimeError(
            f"Python, csd.h and rules.h list different update rules: {numbers}, {sections}; if you changed none, build "
            "csd_optim again"
        )


check_native_rules(NAMED.values(), RULE_ROWS)


def rule_of(own: UpdateRule, group: Group) -> UpdateRule:
    """Return the rule that a group names as "rule"; by default `own`, the rule of the optimizer's class.

    Raises CSDValueError if there is no rule of that name.
    """
    name = group.get("rule", own.name)
    if name == own.name:
        return own
    if not (isinstance(name, str) and name in NAMED):
        raise CSDValueError(f"Invalid rule of a parameter group: {name!r}; there are {', '.join(NAMED)}")
    return NAMED[name]


def named_elsewhere(group: Group) -> tuple[str, str] | None:
    """Return a key by which other libraries choose a group's rule, such as `kind`, and the rule's name."""
    for key, value in group.items():
        if key != "rule" and isinstance(value, str) and value.lower() in NAMED:
            return key, value.lower()
        if isinstance(key, str) and value is True and key.removeprefix("use_") in NAMED and key.startswith("use_"):
            return key, key.removeprefix("use_")
    return None


def fill_in_defaults(own: UpdateRule, group: Group, of_class: Mapping[str, Any]) -> None:
    """Give a new group that names a rule the rule's defaults, before torch fills in the class's.

    `of_class`: the optimizer's `defaults`; a group with only these was filled before. Raises CSDValueError, and changes
    nothing, if there is no such rule, or the rule has no such hyperparameter.
    """
    if "rule" not in group:
        return
    rule = rule_of(own, group)
    for name in HYPERPARAMETERS.intersection(group).difference(rule.hyperparameters):
        if name not in of_class or group[name] != of_class[name]:
            raise CSDValueError(
                f"Invalid {name} of a parameter group: {group[name]!r}; its rule {rule.name} has no {name}, only "
                f"{', '.join(rule.hyperparameters)}"
            )
    if rule is not own:
        for name, value in rule.defaults.items():
            group.setdefault(name, value)
