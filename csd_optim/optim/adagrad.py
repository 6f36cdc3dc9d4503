"""CSDAdagrad, with the arguments of torch's Adagrad."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Adagrad, Optimizer
from typing_extensions import Unpack

from ..errors import CSDRuntimeError
from . import rules
from .optimizer import CSDOptimizer, takes_options
from .options import Options


class _WithoutSums(Adagrad):
    """Adagrad whose constructor only checks its arguments; torch's also allocates all sums in memory."""

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__([{"params": []}], *args, **kwargs)
        Optimizer.__init__(self, params, self.defaults)


class CSDAdagrad(CSDOptimizer, _WithoutSums):
    """Adagrad whose fp32 weights and sums live on computational storage devices.

    Positional arguments, defaults and results are those of :class:`torch.optim.Adagrad`; ``foreach`` and ``fused`` are
    accepted and ignored, ``differentiable`` and sparse gradients are refused. Everything else is as with
    :class:`CSDAdam`; ``state_dtype="8bit"`` keeps the roots of the sums.

    ``state[p]`` holds ``step``, ``sum`` and ``master``, from the first step on. A parameter group may have its own
    ``initial_accumulator_value``.

    Rule: Duchi, Hazan & Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", 2011;
    see native/include/adagrad.h.
    """

    _rule = rules.ADAGRAD

    @takes_options
    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params,
            lr,
            lr_decay,
            weight_decay,
            initial_accumulator_value,
            eps,
            foreach,
            maximize=maximize,
            differentiable=differentiable,
            fused=fused,
            **options,
        )

    def share_memory(self) -> None:
        raise CSDRuntimeError("CSDAdagrad does not support share_memory(): its sums are on its devices")


CSDAdagrad.__module__ = "csd_optim"
