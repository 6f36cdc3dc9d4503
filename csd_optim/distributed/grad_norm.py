"""The global norm of all gradients, on whatever devices and ranks they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from .ranks import device_of


def norm_of(grads: Iterable[tuple[torch.Tensor | None, tuple[Any, ...]]]) -> float:
    """Return the fp32 2-norm of gradients as one vector, from this process's part of each (None: it has no gradient).

    With each part: the process groups over which the squares of such parts add up, in order; see Partition.groups().
    A collective of these groups.
    """
    norms: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for g, groups in grads:
        of_groups = norms.setdefault(groups, [])
        if g is not None:
            of_groups.append(torch.linalg.vector_norm(g, dtype=torch.complex64 if g.is_complex() else torch.float32))
    totals = [_over_groups(groups, _combine(of_groups)) for groups, of_groups in norms.items()]
    return float(_combine(totals))


def _combine(norms: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of the concatenation of vectors with these norms."""
    total: torch.Tensor = torch.zeros((), device="cpu")
    if norms:
        total = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    return total


def _over_groups(groups: tuple[Any, ...], norm: torch.Tensor) -> torch.Tensor:
    for group in groups:
        square = norm.to(device_of(group), torch.float64).square()
        dist.all_reduce(square, group=group)
        norm = torch.sqrt(square)
    return norm
