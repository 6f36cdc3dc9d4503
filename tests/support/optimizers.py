"""Our optimizers, each with its oracle, for test suites that take them as a parameter."""

from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from support.backends import on_cards

from csd_optim import CSDSGD, CSDAdagrad, CSDAdam, CSDAdamL2, CSDLion, CSDMuon, CSDRMSprop
from csd_optim.devices.backends import BACKENDS
from csd_optim.optim import rules as named
from csd_optim.params.update_rule import UpdateRule
from csd_optim.store.sections import FP32


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023, algorithm 2), line by line; torch has none."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, *, maximize=False):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (beta1, beta2), decay = group["betas"], group["weight_decay"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                moment = state.setdefault("exp_avg", torch.zeros_like(p))
                g, m, theta = (torch.view_as_real(t) if t.is_complex() else t for t in (p.grad, moment, p))
                g = -g if group["maximize"] else g
                c = beta1 * m + (1 - beta1) * g
                theta.copy_(theta - group["lr"] * (c.sign() + decay * theta))
                m.copy_(beta2 * m + (1 - beta2) * g)


@dataclass(frozen=True, eq=False)
class Pair:
    """A class of ours and the one of torch that it replaces, with the same arguments.

    `kwargs`: the constructor's arguments. `other`: options that a parameter group may have instead.
    """

    name: str
    ours: type
    reference: type
    rule: UpdateRule
    other: dict
    kwargs: dict = field(default_factory=dict)

    @property
    def has_codes(self):
        return has_codes(self.rule, self.kwargs)

    def __str__(self):
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.kwargs.items())])


def has_codes(rule, options):
    """Return whether a group with these options can have 8-bit states."""
    sections = rule.sections_for({**rule.defaults, **options})
    return rule.codec != FP32 and rule.uncoded.keys().isdisjoint(sections)


AMSGRAD = {"amsgrad": True}
ADAMW = Pair("CSDAdam", CSDAdam, torch.optim.AdamW, named.ADAMW, AMSGRAD)
ADAM = Pair("Adam", CSDAdamL2, torch.optim.Adam, named.ADAM, AMSGRAD)
SGD = Pair("CSDSGD", CSDSGD, torch.optim.SGD, named.SGD, {"momentum": 0.0})
ADAGRAD = Pair("CSDAdagrad", CSDAdagrad, torch.optim.Adagrad, named.ADAGRAD, {"lr_decay": 0.5})
RMSPROP = Pair("CSDRMSprop", CSDRMSprop, torch.optim.RMSprop, named.RMSPROP, {"centered": False})
LION = Pair("CSDLion", CSDLion, Lion, named.LION, {"betas": (0.5, 0.9)})
PAIRS = [ADAMW, ADAM, SGD, ADAGRAD, RMSPROP, LION]
FULL = [
    replace(ADAM, kwargs={"weight_decay": 0.1}),
    replace(SGD, kwargs={"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    replace(ADAGRAD, kwargs={"initial_accumulator_value": 0.1}),
    replace(RMSPROP, kwargs={"momentum": 0.9, "centered": True}),
    replace(LION, kwargs={"weight_decay": 0.1}),
]
# With 8-bit states of another codec than AdamW's. Muon is for matrices alone; for other parameters see MUON_IN_8_BITS.
MUON_CODES = Pair(
    "8-bit Muon",
    partial(CSDMuon, state_dtype="8bit"),
    getattr(torch.optim, "Muon", None),
    named.MUON,
    {"momentum": 0.9},
    {"weight_decay": 0.1},
)
CODED = [
    replace(ADAGRAD, name="8-bit Adagrad", ours=partial(CSDAdagrad, state_dtype="8bit"), kwargs={"weight_decay": 0.1}),
    replace(RMSPROP, name="8-bit RMSprop", ours=partial(CSDRMSprop, state_dtype="8bit"), kwargs={"weight_decay": 0.1}),
]
_MORE = [
    replace(ADAM, kwargs={"amsgrad": True}),
    SGD,
    replace(SGD, kwargs={"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    replace(ADAGRAD, kwargs={"weight_decay": 0.1, "eps": 1e-3, "lr_decay": 0.1}),
    RMSPROP,
    replace(RMSPROP, kwargs={"centered": True, "weight_decay": 0.1}),
    replace(RMSPROP, kwargs={"momentum": 0.9, "alpha": 0.5}),
    LION,
    replace(LION, kwargs={"betas": (0.0, 0.5)}),
]
# Options of a group of each rule that differ from the defaults.
OF_RULES = [
    {},
    {"rule": "lion", "lr": 3e-3, "weight_decay": 0.1},
    {"rule": "sgd", "lr": 0.05, "momentum": 0.9, "dampening": 0.5},
    {"rule": "rmsprop", "momentum": 0.9, "centered": True},
    {"rule": "adam", "weight_decay": 0.1, "amsgrad": True},
    {"rule": "adagrad", "initial_accumulator_value": 0.1},
]


def by_group(params, **options):
    """Return a CSDAdam with a group for each parameter, of one rule after another. Groups are taken as they are."""
    groups = [*params]
    if not isinstance(groups[0], dict):
        groups = [{"params": [p], **OF_RULES[i % len(OF_RULES)]} for i, p in enumerate(groups)]
    for group in groups:
        if not has_codes(named.rule_of(named.ADAMW, group), group):
            group.setdefault("state_dtype", "fp32")
    return CSDAdam(groups, **options)


MIXED = Pair("a rule per group", by_group, None, named.ADAMW, {"rule": "lion"})


class MuonOfMatrices(CSDMuon):
    """Muon for the matrices that the constructor gets, and for groups of nothing else; AdamW for other parameters."""

    def __init__(self, params, *, state_dtype="fp32", matrices="fp32", **options):
        """`state_dtype`, `matrices`: of other parameters and of matrices."""
        groups, divided = [*params], []
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        self.of_others, self.of_matrices = state_dtype, matrices
        for group in groups:
            matrices = [p for p in group["params"] if is_matrix(p)]
            if others := [p for p in group["params"] if not is_matrix(p)]:
                divided.append({**group, "params": others})
            if matrices:
                divided.append({"params": matrices, "state_dtype": self.of_matrices})
        super().__init__(divided, **options)

    def add_param_group(self, group):
        params = [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]
        if len(params) and all(map(is_matrix, params)):
            group = {**group, "rule": "muon", "topk": None, "state_dtype": self.of_matrices}
        else:
            group = {"rule": "adamw", "state_dtype": self.of_others, **group}
        super().add_param_group(group)


def is_matrix(p):
    """Return whether it is a matrix. `p`: a parameter, or a pair with its name."""
    p = p[1] if isinstance(p, tuple) else p
    return p.dim() == 2 and p.numel() > 0 and not p.is_complex()


MUON = Pair("CSDMuon", MuonOfMatrices, None, named.ADAMW, {"rule": "adamw"})
MUON_IN_8_BITS = replace(MUON, name="8-bit CSDMuon", ours=partial(MuonOfMatrices, state_dtype="8bit", matrices="8bit"))


def rules(pairs):
    """Return test parameters for `pairs`. On cards, pairs without a kernel are skipped, and others load theirs."""
    why = pytest.mark.skip(reason="this rule has no kernel yet")

    def marks(pair):
        others = pair.rule.name != "adamw" or pair in (MIXED, MUON, MUON_IN_8_BITS)
        missing = on_cards() and (pair in (MUON, MUON_IN_8_BITS, *CODED) or pair.rule.name not in BACKENDS["xrt"].rules)
        return [why] * missing + [pytest.mark.all_kernels] * others

    return [pytest.param(pair, id=str(pair), marks=marks(pair)) for pair in pairs]


def other_rules():
    """Return all pairs but AdamW's, with all options."""
    return rules(FULL + _MORE)
