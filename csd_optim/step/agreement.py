"""What ranks tell each other before a step: whether they all take it, and the same one."""

from __future__ import annotations

import zlib
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..distributed.ranks import Ranks
from ..distributed.sharding import is_replicated
from ..errors import CSDRankError
from ..params.groups import Groups, members, name_of
from ..params.strides import flat
from .joining import borrow

DIVIDED = (
    "If ZeroRedundancyOptimizer divides the parameters among the ranks already, pass it sharded=False: "
    "ZeroRedundancyOptimizer(params, optimizer_class=CSDAdam, sharded=False, ...)"
)


class _Vote(NamedTuple):
    """Of one rank. What is sent are numbers."""

    skips: int  # the step: it has found an overflow
    taken: int  # steps that it has taken
    joined: int  # it has no more data
    names: int  # checksum of the names of parameters with gradients that ranks hold alike
    new: int  # the same of those among them that have not taken part before; 0: there are none
    descending: int  # its tiles would flow from the last to the first
    overlaps: int  # overlap() was called


@dataclass
class StepAgreement:
    """About one step."""

    skips: bool  # one overflow is enough
    descending: bool
    scale: float | None  # of the gradients


def agree_on_step(
    ranks: Ranks,
    placed: Container[int],
    groups: Groups,
    *,
    sharded: bool,
    descending: bool,
    skips: bool,
    taken: int,
    joined: bool,
    overlaps: bool,
    scale: float | None,
) -> StepAgreement:
    """Before anything is touched; a collective. `scale`: a GradScaler's, which ranks that have `joined` lack.

    `placed`: the ids of parameters that have taken part before; `descending`: tiles would flow from the last on.

    Of parameters that take part for the first time, ranks that share them have to hold the same.
    Raises CSDRankError, on all ranks, if they cannot take this step together.
    """

    def is_bound(p: torch.Tensor) -> bool:
        return id(p) in placed

    def say() -> list[_Vote]:
        names = _checksum([name for name, _ in alike])
        new = _checksum([name for name, p in alike if not is_bound(p)])
        word = _Vote(skips, taken, joined, names, new, descending, overlaps)
        return [_Vote(*said) for said in ranks.gather(*word)]

    alike = _with_gradients(groups) if sharded else []
    words = say()
    if len(steps := {word.taken for word in words}) > 1:
        raise CSDRankError(f"ranks have taken different numbers of steps: {sorted(steps)}. Resume from the store")
    if len({word.overlaps for word in words}) > 1:
        raise CSDRankError("overlap() was called on some of the ranks: call it on all of them, or on none")
    if any(word.joined for word in words):
        leader = [word.joined for word in words].index(0)
        scale = borrow(ranks, leader, groups, scale, joined=joined)
        alike = _with_gradients(groups) if sharded else []
        words = say()
    if len({word.names for word in words}) > 1:
        difference = ranks.first_difference([(name,) for name, _ in alike])
        raise CSDRankError(
            f"ranks have gradients of different parameters: {difference}. With sharded=True plain parameters have to "
            f"be replicas, with gradients reduced over the ranks, as DistributedDataParallel does it. {DIVIDED}"
        )
    if any(word.new for word in words):
        # Where a rank failed before it gave them a place, others may have done so: then all of them are compared.
        same = len({word.new for word in words}) == 1
        if difference := ranks.first_difference(
            [(name, *_digest(p)) for name, p in alike if not (same and is_bound(p))]
        ):
            raise CSDRankError(
                f"ranks do not hold the same parameters: {difference}. With sharded=True plain ones have to be "
                "replicas, as DistributedDataParallel makes them. If each rank trains a model of its own, it needs a "
                f"process_group of its own; if they are parts of one model, sharded=False. {DIVIDED}"
            )
    return StepAgreement(any(word.skips for word in words), bool(words[0].descending), scale)


def _digest(p: torch.Tensor) -> tuple[Any, ...]:
    """What replicas have in common: shape, stride, dtype, and the sum of their bits as integers."""
    bits = flat(p.detach().contiguous())
    integers = bits.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()])
    return tuple(p.shape), p.stride(), str(p.dtype), int(integers.sum(dtype=torch.int64))


def _checksum(names: list[str]) -> int:
    return zlib.crc32("\n".join(names).encode())


def _with_gradients(groups: Groups) -> list[tuple[str, torch.Tensor]]:
    """Those that ranks hold alike, with their names."""
    return [(name_of(groups, k, i), p) for k, i, p in members(groups) if p.grad is not None and is_replicated(p)]
