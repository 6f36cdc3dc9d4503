"""CSDSGD, with the arguments of torch's SGD."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD
from typing_extensions import Unpack

from . import rules
from .optimizer import CSDOptimizer, takes_options
from .options import Options


class CSDSGD(CSDOptimizer, SGD):
    """SGD whose fp32 weights and momentum live on computational storage devices.

    Positional arguments, defaults and results are those of :class:`torch.optim.SGD`; ``foreach`` and ``fused`` are
    accepted and ignored, ``differentiable`` and sparse gradients are refused. Everything else is as with
    :class:`CSDAdam`, except that ``state_dtype="8bit"`` is refused: it is not known what that costs.

    ``state[p]`` holds ``step``, ``master`` and, with momentum, ``momentum_buffer``. Momentum cannot be turned on for a
    parameter whose first step was without it.

    Rule: Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013, with torch's
    learning rate, dampening and weight decay; see native/include/sgd.h.
    """

    _rule = rules.SGD

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


CSDSGD.__module__ = "csd_optim"
