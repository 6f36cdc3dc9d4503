"""CSDLion and its arguments. torch itself has no Lion."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import Unpack

from ..errors import CSDValueError
from . import rules
from .optimizer import CSDOptimizer, takes_options
from .options import Options


class CSDLion(CSDOptimizer):
    """Lion, whose fp32 weights and momentum live on computational storage devices.

    Each element moves by `lr`, up or down: use an `lr` 3 to 10 times smaller than AdamW's, and a `weight_decay` larger
    by the same factor. Real and imaginary part of a complex number move separately.

    Args:
        params, lr, betas, weight_decay: as with AdamW; the defaults are the paper's.
        maximize: maximize the objective.
        options: the keyword arguments of :class:`CSDAdam` from `devices` on, except ``state_dtype="8bit"``, which is
            refused: the update is a sign, which would be random where ``exp_avg`` is smaller than a code.

    Raises the same errors as CSDAdam. ``state[p]`` holds ``step``, ``exp_avg`` and ``master``.

    Rule: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2; see native/include/lion.h.
    """

    _rule = rules.LION

    @takes_options
    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise CSDValueError("Tensor lr must be 1-element")
        if not lr >= 0.0:
            raise CSDValueError(f"Invalid learning rate: {lr}")
        for i, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise CSDValueError(f"Invalid beta parameter at index {i}: {beta}")
        if not weight_decay >= 0.0:
            raise CSDValueError(f"Invalid weight_decay value: {weight_decay}")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)  # checkpoints of other Lion implementations lack it


CSDLion.__module__ = "csd_optim"
