"""CSDSGD: the arguments of torch's SGD and the constants of its rule, native/include/sgd.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import SGD
from typing_extensions import Unpack

from ..bindings import RULES
from ..params.update_rule import Group, UpdateRule
from .optimizer import CSDOptimizer, takes_options
from .options import Options


def constants(group: Group, _: Sequence[str], t: float, grad_scale: float) -> tuple[int, tuple[float, ...]]:
    """Return the rule's number and its constants for one group at step `t`."""
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


RULE = UpdateRule(
    name="sgd",
    sections=("master", "momentum_buffer"),
    min_sections=1,
    hyperparameters=("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    constants=constants,
    switches={"momentum": "momentum_buffer"},
)


class CSDSGD(CSDOptimizer, SGD):
    """SGD whose fp32 weights and momentum live on computational storage devices.

    Positional arguments, defaults and results are those of :class:`torch.optim.SGD`; ``foreach`` and ``fused`` are
    accepted and ignored, ``differentiable`` and sparse gradients are refused. Everything else is as with
    :class:`CSDAdam`, except that ``state_dtype="8bit"`` is refused: nothing bounds the momentum.

    ``state[p]`` holds ``step``, ``master`` and, with momentum, ``momentum_buffer``. Momentum cannot be turned on for a
    parameter whose first step was without it.

    Rule: Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013, with torch's
    learning rate, dampening and weight decay; see native/include/sgd.h.
    """

    _rule = RULE

    @takes_options
    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | torch.Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
            **options,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See CSDAdam. torch's SGD keeps no step count: a momentum without one counts as that of step 1."""
        entries = state_dict["state"].items()
        state = {k: {"step": 1.0, **v} if v.get("momentum_buffer") is not None else v for k, v in entries}
        super().load_state_dict({**state_dict, "state": state})


CSDSGD.__module__ = "csd_optim"
