"""AdamW's rule: names, and its constants for one step as native/include/adamw.h wants them."""

from __future__ import annotations

from ..bindings import RULES
from ..params.update_rule import Group, UpdateRule


def constants(group: Group, t: float, grad_scale: float) -> tuple[int, tuple[float, ...]]:
    """The rule's number and constants for one group at step `t`."""
    lr, eps, weight_decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
    beta1, beta2 = (float(b) for b in group["betas"])
    return RULES["amsgrad" if group["amsgrad"] else "adamw"], (
        1 - lr * weight_decay,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        lr / (1 - beta1**t),
        1 / (1 - beta2**t) ** 0.5,
        eps,
        -grad_scale if group["maximize"] else grad_scale,
    )


ADAMW = UpdateRule(
    name="adamw",
    sections=("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    least=3,
    hyperparameters=("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"),
    constants=constants,
    switches={"amsgrad": "max_exp_avg_sq"},
)
