"""CSDRMSprop: the arguments of torch's RMSprop and the constants of its rule, native/include/rmsprop.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import RMSprop
from typing_extensions import Unpack

from ..bindings import RULES
from ..params.update_rule import Group, UpdateRule
from .optimizer import CSDOptimizer, takes_options
from .options import Options


def constants(group: Group, sections: Sequence[str], t: float, grad_scale: float) -> tuple[int, tuple[float, ...]]:
    """Return the rule's number and its constants for one group whose parameters have these `sections`.

    There is a variant of the rule for each position of momentum_buffer among the sections.
    """
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


RULE = UpdateRule(
    name="rmsprop",
    sections=("master", "square_avg", "grad_avg", "momentum_buffer"),
    min_sections=2,
    hyperparameters=("lr", "momentum", "alpha", "eps", "centered", "weight_decay", "maximize"),
    constants=constants,
    switches={"centered": "grad_avg", "momentum": "momentum_buffer"},
)


class CSDRMSprop(CSDOptimizer, RMSprop):
    """RMSprop whose fp32 weights and averages live on computational storage devices.

    Positional arguments, defaults and results are those of :class:`torch.optim.RMSprop`; ``foreach`` is accepted and
    ignored, ``capturable`` and ``differentiable`` are refused. Everything else is as with :class:`CSDAdam`, except that
    ``state_dtype="8bit"`` is refused: nothing bounds the momentum.

    ``state[p]`` holds ``step``, ``square_avg``, ``master``, with `centered` ``grad_avg``, and with momentum
    ``momentum_buffer``. Neither option can be turned on for a parameter whose first step was without it.

    Rule: Hinton, "Neural Networks for Machine Learning", lecture 6e, 2012; centered as Graves, "Generating Sequences
    With Recurrent Neural Networks", 2013; see native/include/rmsprop.h.
    """

    _rule = RULE

    @takes_options
    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params,
            lr,
            alpha,
            eps,
            weight_decay,
            momentum,
            centered,
            capturable,
            foreach,
            maximize,
            differentiable,
            **options,
        )


CSDRMSprop.__module__ = "csd_optim"
