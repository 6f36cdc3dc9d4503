"""AdamW's constants for one step, as native/include/adamw.h wants them."""

from __future__ import annotations

from typing import Any


def hyper(group: dict[str, Any], t: float, grad_scale: float) -> tuple[float, ...]:
    """The constants of one group at step `t`, in the order of HYPER, computed in double."""
    lr, eps, weight_decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
    beta1, beta2 = (float(b) for b in group["betas"])
    return (
        1 - lr * weight_decay,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        lr / (1 - beta1**t),
        1 / (1 - beta2**t) ** 0.5,
        eps,
        -grad_scale if group["maximize"] else grad_scale,
        bool(group["amsgrad"]),
    )
