"""CSDMuon, with the arguments of torch's Muon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Unpack

from ..errors import CSDValueError
from ..muon.newton_schulz import JORDAN
from . import rules
from .optimizer import CSDOptimizer, takes_options
from .options import Options

if TYPE_CHECKING or hasattr(torch.optim, "Muon"):
    from torch.optim import Muon
else:  # torch before 2.9
    Muon = torch.optim.Optimizer


class _AnyGroups(Muon):
    """torch's Muon without the check that all parameters of all groups are matrices: groups may have another rule."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        torch.optim.Optimizer.__init__(self, params, defaults)


class CSDMuon(CSDOptimizer, _AnyGroups):
    """Muon whose fp32 weights and momentum live on computational storage devices; other parameters by AdamW.

    Muon is for the matrices within a model. Embeddings, the output layer, biases and norms belong in groups with
    ``"use_muon": False``, which AdamW updates, with its own defaults::

        CSDMuon([
            {"params": hidden_matrices, "lr": 0.02},
            {"params": all_others, "use_muon": False, "lr": 3e-4, "betas": (0.9, 0.95)},
        ], devices="/mnt/nvme0")

    Args:
        params, lr, weight_decay, momentum, nesterov, eps, ns_steps, adjust_lr_fn: as with :class:`torch.optim.Muon`.
            ``"use_muon": False`` in a group is short for ``"rule": "adamw"``, and True for ``"rule": "muon"``.
        ns_coefficients: three coefficients of the Newton-Schulz iteration, or three for each of the `ns_steps`
            iterations.
        ns_dtype: dtype of the iteration: "bf16", torch's; "fp32"; or "auto": bf16, and fp32 where the processor has no
            instructions for bf16. ``stats()["ns_dtype"]`` tells the choice.
        options: the keyword arguments of :class:`CSDAdam` from `devices` on.

    Parameters of Muon are matrices, or batches of matrices (3-D, such as the weights of experts). Momentum and masters
    are fp32, whatever a gradient's dtype. The matrix to be orthogonalized is rounded to bf16, as in torch, and
    orthogonalized by torch, on the parameter's device, once per `step()`.

    ``state_dtype="8bit"`` keeps the momentum as 8-bit integers, and 24 bits of the master of a 16-bit parameter.

    Raises the same errors as CSDAdam, CSDValueError also for parameters of Muon that are no matrices and for ``topk``
    in their groups, and CSDMemoryError in `step()`, before anything is changed, if there is no room to orthogonalize.
    ``state[p]`` holds ``step``, ``momentum_buffer`` and ``master``.

    Rule: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, with torch's learning rate
    and weight decay; see native/include/muon.h and csd_optim/muon/newton_schulz.py.
    """

    _rule = rules.MUON

    @takes_options
    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] | Sequence[Sequence[float]] = JORDAN,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: str = "auto",
        **options: Unpack[Options],
    ) -> None:
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise CSDValueError("Tensor lr must be 1-element")
        for name, value in (("learning rate", lr), ("momentum", momentum), ("weight decay", weight_decay)):
            if not value >= 0.0:
                raise CSDValueError(f"{name} should be >= 0 but is: {value}")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
        }
        super().__init__(params, **defaults, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch. ``use_muon`` is replaced by ``rule``."""
        if "use_muon" in param_group:
            param_group = dict(param_group)
            rule = "muon" if param_group.pop("use_muon") else "adamw"
            if param_group.setdefault("rule", rule) != rule:
                raise CSDValueError(
                    f'Invalid use_muon of a parameter group: it means "rule": {rule!r}, and the group has '
                    f'"rule": {param_group["rule"]!r}'
                )
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            if rules.rule_of(self._rule, group) is self._rule:
                group.setdefault("ns_dtype", "auto")  # torch's checkpoints lack it


CSDMuon.__module__ = "csd_optim"
