"""Top-K: the choice of gradients to send sparse, and of the share of their elements.

From each part of a parameter (its n elements in one tile), the `round(topk * n)` gradients of largest magnitude are
sent, at least one, in 16 bits; among equal ones the first; zeros never. The device takes the others as zero. With error
feedback, the unsent rest is *owed*: it is kept as the residual, in bfloat16, and added to the next gradient. The
residual is in the units of the update, after loss scale and clipping, so that both may change from step to step. It is
rounded stochastically, so that small gradients add up, too, and changes only when a step is complete.

The engine selects from gradients in host memory (native/src/topk.h), the step from all others (selection.py), by the
same definitions and to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import CSDValueError

Groups = Sequence[dict[str, Any]]

# From this share on, entries (4 bytes each) take no less than the dense gradient in 16 bits, though less than in 32.
DENSE_FROM = 0.5
# Smaller parameters are sent dense, and so are those with less than two dimensions: biases and norms are a thousandth
# of a model, and its most sensitive part.
LEAST_ELEMS = 4096


def check_topk(topk: Any, where: str = "") -> None:
    """Raise CSDValueError unless `topk` is None or a share: more than 0, at most 1."""
    if topk is not None and not (isinstance(topk, (int, float)) and topk is not True and 0 < topk <= 1):
        raise CSDValueError(
            f"Invalid topk{where}: {topk!r}; it is the share of gradients to send, such as 0.01, or None"
        )


def is_large(p: torch.Tensor) -> bool:
    """Return whether the parameter is sent sparse even if its group does not set `topk`."""
    return p.dim() >= 2 and p.numel() >= LEAST_ELEMS


def ratios(
    params: Sequence[torch.Tensor],
    owing: np.ndarray[Any, Any],
    groups_of: Sequence[int],
    groups: Groups,
    steps: np.ndarray[Any, Any],
    topk: float | None,
    warmup: int,
) -> np.ndarray[Any, Any]:
    """Return the share of its gradient that each parameter sends in its `steps`-th step; 0: the whole gradient, dense.

    `owing` (bool): whether a parameter has an unsent residual. `groups_of`: index of each parameter's group. A group
    with its own `topk` decides for all its parameters. The first `warmup` steps are dense, then the share falls
    geometrically, for as many steps again (Lin et al., "Deep Gradient Compression", 2018). Raises CSDValueError if
    `topk`, or a group's `topk`, is invalid.
    """
    check_topk(topk)
    for k, group in enumerate(groups):
        check_topk(group.get("topk"), f" of group {k}")
    configured = [group.get("topk", topk) for group in groups]
    if all(share is None for share in configured) and not owing.any():
        return np.zeros(len(params))
    sparse = [
        ("topk" in groups[k] or is_large(p)) and not p.is_complex() for p, k in zip(params, groups_of, strict=True)
    ]
    final = np.where(sparse, [configured[k] or 1.0 for k in groups_of], 1.0)
    if warmup:
        final = final ** np.clip((steps - warmup) / warmup, 0, 1)
    # A parameter that is dense again sends its residual together with the whole gradient, as entries (share 1).
    return np.where(final < DENSE_FROM, final, np.where(owing, 1.0, 0.0))


def entry_dtype(grad: torch.dtype, grad_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the values in entries: the optimizer's `grad_dtype` if that has 16 bits, else the gradient's.

    If neither has 16 bits, bfloat16, which has the range of fp32.
    """
    return next((d for d in (grad_dtype, grad) if d in (torch.float16, torch.bfloat16)), torch.bfloat16)
