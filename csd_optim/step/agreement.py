"""The agreement of all ranks before a step: whether all of them take it, and whether it is the same step."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..distributed.grad_norm import OwnNorm
from ..distributed.ranks import Ranks
from ..distributed.sharding import is_replicated
from ..engine.committer import Ballot, Committer
from ..errors import CSDRankError
from ..params.groups import Groups, members, name_of
from ..params.strides import flat
from .joining import copy_from_leader
from .same_gradients import Sample, check_same_gradients

SHARDED_ADVICE = (
    "If ZeroRedundancyOptimizer divides the parameters among the ranks already, pass it sharded=False: "
    "ZeroRedundancyOptimizer(params, optimizer_class=CSDAdam, sharded=False, ...)"
)


class Capabilities(NamedTuple):
    """What a rank, or all ranks, can do with a prepared step."""

    can_launch: bool  # let it go on after step()
    can_undo: bool  # undo it even when it is complete here
    votes_with_params: bool  # tell the others that it is complete as they exchange parameters


class Proposal(NamedTuple):
    """What a rank says of the next step before the ranks agree on it, as integers for a collective."""

    taken: int  # steps that the rank has taken
    mode: int  # InStep.kind: whether overlap() was called, and how
    under_way: int  # the step has begun in backward, and only has to be ended
    descending: int  # the rank's tiles would flow from the last to the first
    skips: int  # the rank skips the step: it has found an overflow
    joined: int  # the rank has run out of data (torch's Join)
    creates: int  # see asks_for_states()
    # What the rank has got ready:
    is_examined: int  # the rank has found out what takes part, which can fail
    is_prepared: int  # nothing can fail any more before the step begins; the fields below are valid only then
    can_launch: int
    can_undo: int
    votes_with_params: int
    knows_norm: int  # gradients are clipped, by a norm that the ranks' votes suffice to compute
    square: int  # the bits of OwnNorm.square, fp64
    # Set by agree_on_step():
    failed: int = 0  # the rank cannot take a step
    names: int = 0  # checksum of the names of replicated parameters that have gradients
    new: int = 0  # checksum of the names of parameters among these that take part for the first time; 0: none


def all_capable(by_rank: Iterable[Capabilities]) -> Capabilities:
    """Return what all ranks can do."""
    return Capabilities(*map(all, zip(*by_rank, strict=True)))


def bits_of(norm: OwnNorm | None) -> tuple[bool, int]:
    """Return `knows_norm` and `square` of a proposal."""
    square = norm.square if norm else 0.0
    return norm is not None, struct.unpack("<q", struct.pack("<d", square))[0]


@dataclass
class StepAgreement:
    """What the ranks have agreed on for one step."""

    skips: bool  # true if any rank has an overflow
    creates: bool  # on all ranks the step only creates states
    descending: bool
    scale: float | None  # of the gradients
    has_joined: bool = False  # some rank has run out of data: drop what was prepared before the vote
    is_examined: bool = False  # on all ranks
    capabilities: Capabilities | None = None  # of all ranks together; None: not every rank has prepared the step
    squares: list[float] | None = None  # OwnNorm.square of each rank; None: not every rank knows its own


Named = list[tuple[str, torch.Tensor]]  # parameters, with their names


@dataclass
class ParamsToCompare:
    """The optimizer's parameters, and which of them have to be alike on all ranks."""

    groups: Groups
    placed: Container[int]  # the ids of parameters that have taken part before
    sharded: bool  # plain parameters are replicas
    reduced: Container[int]  # the ids of parameters whose gradients a hook of DDP has reduced, the same on all ranks
    divided: Container[int]  # the ids of sharded parameters that need gradients on all ranks or none

    def is_bound(self, p: torch.Tensor) -> bool:
        return id(p) in self.placed

    def with_gradients(self) -> tuple[Named, Named]:
        """Return the replicated parameters with gradients, and all with gradients that need some on every rank."""
        found = [
            (name_of(self.groups, k, i) + " (reduced by csd_optim.push)" * (id(p) in self.reduced), p)
            for k, i, p in members(self.groups)
            if p.grad is not None
        ]
        replicated = [(name, p) for name, p in found if self._is_replica(p)]
        return replicated, [(name, p) for name, p in found if id(p) in self.divided or self._is_replica(p)]

    def _is_replica(self, p: torch.Tensor) -> bool:
        return self.sharded and is_replicated(p)


def agree_on_step(
    ranks: Ranks,
    params: ParamsToCompare,
    proposal: Proposal,
    ballot: Ballot,
    committer: Committer,
    *,
    scale: float | None,
    failure: BaseException | None,
    sample: Sample,
) -> StepAgreement:
    """Agree on a step with all ranks, before anything is changed; a collective.

    `proposal`, `ballot`: what this rank says of this step, and of the last round; `committer` counts the ballots,
    whatever else fails. `scale`: a GradScaler's; ranks that have joined have none. `failure`: why this rank cannot take
    a step; raised here, while other ranks raise CSDRankError. `sample`: see check_same_gradients().

    Raises CSDRankError, on all ranks, if the ranks cannot take this step together. In particular, replicas of a
    parameter that takes part for the first time must be equal, and so must gradients, up to rounding.
    """

    def exchange_votes() -> tuple[list[Proposal], list[Ballot], list[Sample]]:
        names = _checksum([name for name, _ in alike])
        new = _checksum([name for name, p in replicated if not params.is_bound(p)])
        vote = proposal._replace(failed=failure is not None, names=names, new=new)
        numbers, n, end = ranks.gather(*vote, *ballot, *sample.numbers()), len(vote), len(vote) + len(ballot)
        return (
            [Proposal(*sent[:n]) for sent in numbers],
            [Ballot(*sent[n:end]) for sent in numbers],
            [Sample.from_numbers(*sent[end:]) for sent in numbers],
        )

    # Parameters do not join in backward, and by now the step has changed them.
    replicated, alike = params.with_gradients() if failure is None and not proposal.under_way else ([], [])
    votes, ballots, samples = exchange_votes()
    committer.count(ballots)
    if any(vote.failed for vote in votes):
        ranks.agree(failure)
    if len(steps := {vote.taken for vote in votes}) > 1:
        raise CSDRankError(f"ranks have taken different numbers of steps: {sorted(steps)}. Resume from the store")
    if len({vote.mode for vote in votes}) > 1:
        raise CSDRankError(
            "overlap() was called on some of the ranks, or with other options: call it on all of them, or on none"
        )
    if len({vote.under_way for vote in votes}) > 1:
        raise CSDRankError("backward has begun the step on some of the ranks only: they need gradients alike")
    if has_joined := any(vote.joined for vote in votes):
        leader = [vote.joined for vote in votes].index(0)
        scale = copy_from_leader(ranks, leader, params.groups, scale, joined=bool(proposal.joined))
        replicated, alike = params.with_gradients()
        votes, _, samples = exchange_votes()
    if len({vote.names for vote in votes}) > 1:
        difference = ranks.first_difference([(name,) for name, _ in alike])
        raise CSDRankError(
            f"ranks have gradients of different parameters: {difference}. With sharded=True plain parameters have to "
            f"be replicas, with gradients reduced over the ranks, as DistributedDataParallel does it. {SHARDED_ADVICE}"
        )
    if any(vote.new for vote in votes):
        # If a rank has failed before it placed new parameters, other ranks may have placed theirs: compare all
        # parameters.
        same = len({vote.new for vote in votes}) == 1
        if difference := ranks.first_difference(
            [(name, *_digest(p)) for name, p in replicated if not (same and params.is_bound(p))]
        ):
            raise CSDRankError(
                f"ranks do not hold the same parameters: {difference}. With sharded=True plain ones have to be "
                "replicas, as DistributedDataParallel makes them. If each rank trains a model of its own, it needs a "
                f"process_group of its own; if they are parts of one model, sharded=False. {SHARDED_ADVICE}"
            )
    if not any(vote.skips for vote in votes):
        check_same_gradients(samples)
    skips, creates = any(vote.skips for vote in votes), all(vote.creates for vote in votes)
    agreed = StepAgreement(skips, creates, bool(votes[0].descending), scale, has_joined)
    if not has_joined:
        agreed.is_examined = all(vote.is_examined for vote in votes)
        if all(vote.is_prepared for vote in votes):
            agreed.capabilities = all_capable(
                Capabilities(bool(vote.can_launch), bool(vote.can_undo), bool(vote.votes_with_params)) for vote in votes
            )
        if all(vote.knows_norm for vote in votes):
            agreed.squares = [struct.unpack("<d", struct.pack("<q", vote.square))[0] for vote in votes]
    return agreed


def _digest(p: torch.Tensor) -> tuple[Any, ...]:
    """Return what must be equal among replicas: shape, stride, dtype, and the sum of the elements' bits as integers."""
    bits = flat(p.detach().contiguous())
    integers = bits.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()])
    return tuple(p.shape), p.stride(), str(p.dtype), int(integers.sum(dtype=torch.int64))


def _checksum(names: list[str]) -> int:
    return zlib.crc32("\n".join(names).encode())
