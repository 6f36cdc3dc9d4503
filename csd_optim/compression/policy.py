"""Which gradients are sent sparse (Top-K), how much of them, and where what is not sent is kept.

Of each part of a parameter (what lies in one tile, n elements) the `round(topk * n)` gradients of the largest magnitude
are sent, at least one: as they are in 16 bits; among equal ones the first; zeros never. The device takes the others as
zero. With error feedback what was not sent is *owed*: the residual, bfloat16, is added to the next gradient. It is in
the units of the update, that is after loss scale and clipping, so that both may change from step to step; it is rounded
at random, so that small gradients add up, too; and it changes only when a step is whole.

The engine selects where gradients lie in host memory (native/src/topk.h), compression.py where they do not, by the same
definitions and to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import CSDValueError

Groups = Sequence[dict[str, Any]]

# From here on an entry for each (4 bytes) is no smaller than all of them in 16 bits, and less than they are in 32.
DENSE_FROM = 0.5
# Smaller parameters go dense, and so do those with less than two dimensions: biases and norms are a thousandth of a
# model, and the most sensitive part of it.
LEAST_ELEMS = 4096


def check_topk(topk: Any, where: str = "") -> None:
    """Raises CSDValueError unless it is None or a share: more than 0, at most 1."""
    if topk is not None and not (isinstance(topk, (int, float)) and topk is not True and 0 < topk <= 1):
        raise CSDValueError(
            f"Invalid topk{where}: {topk!r}; it is the share of gradients to send, such as 0.01, or None"
        )


def is_large(p: torch.Tensor) -> bool:
    """Goes sparse without being told so by its group."""
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
    """The share of its gradients that each parameter sends in this step, its `steps`-th; 0: all of them, dense.

    `owing` (bool): does it owe something that is still to be sent? `groups_of`: the group of each; one that names
    `topk` decides for all its parameters. The first `warmup` steps are dense, then the share falls geometrically, for
    as many steps again (Lin et al., "Deep Gradient Compression", 2018).
    Raises CSDValueError if `topk` or that of a group is none.
    """
    check_topk(topk)
    for k, group in enumerate(groups):
        check_topk(group.get("topk"), f" of group {k}")
    named = [group.get("topk", topk) for group in groups]
    if all(share is None for share in named) and not owing.any():
        return np.zeros(len(params))
    sparse = [
        ("topk" in groups[k] or is_large(p)) and not p.is_complex() for p, k in zip(params, groups_of, strict=True)
    ]
    final = np.where(sparse, [named[k] or 1.0 for k in groups_of], 1.0)
    if warmup:
        final = final ** np.clip((steps - warmup) / warmup, 0, 1)
    # What is owed by one that is dense again is sent with all the rest, as entries.
    return np.where(final < DENSE_FROM, final, np.where(owing, 1.0, 0.0))


def entry_dtype(grad: torch.dtype, grad_dtype: torch.dtype | None) -> torch.dtype:
    """Of the values that are sent: the optimizer's `grad_dtype` if that has 16 bits, else the gradient's own.

    bfloat16 for gradients of 32 bits: it has their range.
    """
    return next((d for d in (grad_dtype, grad) if d in (torch.float16, torch.bfloat16)), torch.bfloat16)
