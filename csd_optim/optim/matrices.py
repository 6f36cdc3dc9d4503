"""Checks of parameter groups whose matrices are orthogonalized, by Muon."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.parameter import is_lazy

from ..devices.spec import DeviceSpec
from ..distributed.ranks import Ranks
from ..distributed.sharding import Partition
from ..errors import CSDValueError
from ..muon.newton_schulz import check_matrix
from ..params.groups import Groups, name_of
from ..params.state_map import StateMap
from ..params.update_rule import UpdateRule


def any_matrices(groups: Groups, state_map: StateMap) -> bool:
    """Return whether any group's rule orthogonalizes matrices."""
    return any(state_map.rule_of(group).orthogonal for group in groups)


def check_matrices(
    groups: Groups,
    k: int,
    rule: UpdateRule,
    topk: float | None,
    part_of: Callable[[torch.Tensor], Partition],
    ranks: Ranks | None,
) -> None:
    """Raise CSDValueError if group `k` has parameters that cannot be orthogonalized here, Top-K, or a wrong argument.

    `topk`: the optimizer's argument.
    """
    group = groups[k]
    assert rule.orthogonal
    rule.orthogonal(group, (1, 1), torch.device("cpu"))
    if group.get("topk", topk):
        raise CSDValueError(
            f'Invalid topk of group {k}: its rule is muon, which needs whole gradients; "topk": None in the group '
            "leaves them dense"
        )
    for i, p in enumerate(group["params"]):
        if not p.requires_grad or is_lazy(p):
            continue
        name = name_of(groups, k, i)
        check_matrix(name, p, p.shape)
        part = part_of(p)
        if not (part.is_whole or (ranks and part.rows_by_rank(ranks))):
            raise CSDValueError(
                f"parameter {name} is divided among ranks otherwise than by rows over all of them, as by tensor "
                f'parallelism, which Muon cannot make whole: put it in a group with "rule": "adamw"'
            )


def check_devices(specs: Sequence[DeviceSpec], *, resident: bool = False) -> None:
    """Raise CSDValueError if devices cannot take both passes. `resident`: open devices that update in place."""
    for spec in specs:
        if spec.kind.on_accelerator or spec.kind.on_card:
            raise CSDValueError(
                f"{spec} cannot take the two passes of muon, the rule of a parameter group: take devices that the CPU "
                "updates, such as a directory; parameters may be on an accelerator nevertheless"
            )
    if resident:
        raise CSDValueError(
            "this optimizer's devices update states in place, and muon needs two copies: give the group to the "
            "constructor"
        )
