"""CSDRMSprop, with the arguments of torch's RMSprop."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import RMSprop
from typing_extensions import Unpack

from . import rules
from .optimizer import CSDOptimizer, takes_options
from .options import Options


class CSDRMSprop(CSDOptimizer, RMSprop):
    """RMSprop whose fp32 weights and averages live on computational storage devices.

    Positional arguments, defaults and results are those of :class:`torch.optim.RMSprop`; ``foreach`` is accepted and
    ignored, ``capturable`` and ``differentiable`` are refused. Everything else is as with :class:`CSDAdam`, except that
    ``state_dtype="8bit"``, which keeps the roots of ``square_avg``, is refused with `centered` and with momentum.

    ``state[p]`` holds ``step``, ``square_avg``, ``master``, with `centered` ``grad_avg``, and with momentum
    ``momentum_buffer``. Neither option can be turned on for a parameter whose first step was without it.

    Rule: Hinton, "Neural Networks for Machine Learning", lecture 6e, 2012; centered as Graves, "Generating Sequences
    With Recurrent Neural Networks", 2013; see native/include/rmsprop.h.
    """

    _rule = rules.RMSPROP

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
