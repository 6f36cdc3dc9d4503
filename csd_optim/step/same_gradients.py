"""Checks, by sums of sampled values, that ranks which share the updates of parameters have the same gradients.

With Local SGD each rank steps with gradients of its own. Ranks that then took their parameters for replicas would
overwrite each other's, without an error. So in some steps each rank samples values of its gradients, and sends their
norm and a few sums with the vote on the step: no further collective, and nothing waits for an accelerator.

Rounding makes a difference among healthy ranks, too: with tensor parallelism, other GPUs or other kernels. It is small
against the gradients as a whole, though not against a value, or a parameter's gradient, that has nearly cancelled out.
Gradients of other data differ by about as much as they are large.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..accelerator import has_completed, is_on_accelerator, record_event
from ..errors import CSDRankError
from ..params.groups import Groups, members, name_of
from ..params.state_map import StateMap

SAMPLED = 4096  # number of values that are sampled, of all gradients together
LEAST = 4  # of each gradient, however many there are
SUMS = 7
PERIOD = 16  # number of steps from one sample to the next, after the first ones
# A difference of more than this part of the norm is not rounding. Without sampling errors, independent gradients of the
# same norm would differ by sqrt(2) times the norm.
TOLERANCE = 1 / 8


class Sample(NamedTuple):
    """A summary of one rank's gradients, for comparison with other ranks."""

    key: int  # identifies the step and the values sampled: only equal ones are compared; 0: no sample
    norm: float  # of the sampled values, weighted; NaN: not all are finite
    sums: tuple[float, ...]

    @property
    def step(self) -> int:
        return self.key >> 32

    def numbers(self) -> list[int]:
        """Return the sample as integers for a collective."""
        bits: list[int] = np.array([self.norm, *self.sums]).view(np.int64).tolist()
        return [self.key, *bits]

    @classmethod
    def from_numbers(cls, key: int, *bits: int) -> Sample:
        norm, *sums = np.array(bits, np.int64).view(np.float64).tolist()
        return cls(key, norm, tuple(sums))


NOTHING = Sample(0, 0.0, (0.0,) * SUMS)


def check_same_gradients(samples: Sequence[Sample]) -> None:
    """Raise CSDRankError if ranks have different gradients of parameters whose updates they divide.

    `samples`: by rank. All ranks come to the same result, as no library rounds what they compute here.
    """
    if any(math.isnan(sample.norm) for sample in samples):
        return
    first: dict[int, int] = {}  # the lowest rank with the same `of`
    for rank, b in enumerate(samples):
        a = samples[first.setdefault(b.key, rank)]
        distance = math.sqrt(math.fsum((x - y) * (x - y) for x, y in zip(a.sums, b.sums, strict=True)))
        norm = max(a.norm, b.norm)
        if distance > TOLERANCE * norm:
            raise CSDRankError(
                f"rank {first[b.key]} and rank {rank} have different gradients in step {b.step}: values of them are "
                f"about {distance / norm:.1f} times their norm apart. With sharded=True, the default, each rank "
                "updates a part of every parameter for all ranks, so gradients have to be reduced over the ranks "
                "before step(), as DistributedDataParallel does it. If each rank is to step with gradients of its own, "
                "as with Local SGD (PostLocalSGDOptimizer, Accelerate's LocalSGD, DiLoCo), pass sharded=False: each "
                "rank then stores and updates all parameters, on devices of its own, such as "
                'devices="/mnt/nvme{local_rank}" (docs/distributed.md)'
            )


class Samples:
    """Samples the gradients of one optimizer."""

    def __init__(self) -> None:
        self._known = NOTHING
        # Arguments of _sample() whose values are being copied from an accelerator, and the event that ends the copy.
        self._under_way: tuple[int, float, list[int], torch.Tensor, Any] | None = None

    def take(self, step: int, groups: Groups, state_map: StateMap, reduced: Container[int]) -> Sample:
        """Return what to send with the vote on `step` (counted from 1): a sample of its gradients, or of earlier ones.

        Values on an accelerator are copied without waiting, so they are known in a later step. `reduced`: the ids of
        parameters whose `.grad` is this rank's own, because csd_optim.push has reduced it.
        """
        if self._under_way and has_completed(self._under_way[-1]):
            self._known, self._under_way = _sample(*self._under_way[:-1]), None
        if not _is_sampled(step):
            return self._known
        grads = [*_shared(groups, state_map, reduced)]
        device = _device_of(grads)
        if device is None:
            self._known, self._under_way = NOTHING, None
            return NOTHING
        grads = [shared for shared in grads if shared.grad.device == device]
        key = step << 32 | zlib.crc32(repr(([shared.name for shared in grads], grads[0].ranks)).encode())
        least = max(torch.finfo(shared.grad.dtype).smallest_normal for shared in grads)
        sampled = _sampled([shared.grad for shared in grads], step)
        values, counts = torch.cat(sampled), [*map(len, sampled)]
        if not is_on_accelerator(values):
            self._known = _sample(key, least, counts, values)
        else:
            on_host = torch.empty(len(values), dtype=values.dtype, device="cpu", pin_memory=True)
            on_host.copy_(values, non_blocking=True)
            self._under_way = key, least, counts, on_host, record_event(torch.accelerator.current_stream(device))
        return self._known


def _is_sampled(step: int) -> bool:
    return step % PERIOD == 0 or step & (step - 1) == 0


class _Shared(NamedTuple):
    """A gradient that has to be the same on several ranks."""

    name: str  # of the parameter
    grad: torch.Tensor  # this rank's local tensor, real
    ranks: list[int]


def _shared(groups: Groups, state_map: StateMap, reduced: Container[int]) -> Iterator[_Shared]:
    """Yield the gradients of parameters whose updates ranks share, if this rank has them without communication."""
    ranks: list[int] | None = None
    for k, i, p in members(groups):
        if p.grad is None or id(p) in reduced:
            continue
        part = state_map.part(p)
        if not part.replicas or not part.is_here(p.grad):
            continue
        # On a mesh of more dimensions several sets of ranks may be possible. The first one is enough.
        ranks = ranks or part.replicas.members
        grad = part.local(p.grad)
        is_plain = type(grad) is torch.Tensor and grad.layout is torch.strided
        if part.replicas.members == ranks and is_plain and grad.numel():
            grad = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
            yield _Shared(name_of(groups, k, i), grad, ranks)


def _device_of(grads: Sequence[_Shared]) -> torch.device | None:
    """Return the device whose gradients are sampled: the host if it has any, as reading them needs no wait."""
    devices = [shared.grad.device for shared in grads if not shared.grad.is_meta]
    return next((device for device in devices if device.type == "cpu"), devices[0] if devices else None)


def _sampled(grads: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
    """Return evenly spread values of each gradient: from the same places on all ranks, other places in other steps."""
    most, found = max(LEAST, SAMPLED // len(grads)), []
    for g in grads:
        stride, columns = -(-g.numel() // most), g.shape[-1] if g.dim() > 1 else 1
        while math.gcd(stride, columns) > 1:  # else only some columns would be sampled
            stride += 1
        found.append(g.reshape(-1)[(step * 40503 >> 4) % stride % g.numel() :: stride])
    return found


def _sample(key: int, least: float, counts: Sequence[int], values: torch.Tensor) -> Sample:
    """Return the sample of values in host memory; NOTHING if all are smaller than `least`, but not all are zero.

    `counts`: the number of values of each gradient. Gradients of the same magnitude get the same weight.
    """
    exact = values.double().numpy()
    if not np.isfinite(exact).all():
        return Sample(key, math.nan, NOTHING.sums)
    if 0 < np.abs(exact).max() < least:
        return NOTHING  # mostly rounding errors
    exact /= np.sqrt(np.repeat(counts, counts))
    signed = np.zeros(-(-len(exact) // SUMS) * SUMS)
    signed[: len(exact)] = exact * _signs(len(exact))
    return Sample(key, float(np.linalg.norm(exact)), tuple(signed.reshape(-1, SUMS).sum(0).tolist()))


@functools.lru_cache(maxsize=8)
def _signs(n: int) -> np.ndarray[Any, Any]:
    """Return `n` pseudorandom signs, by a hash of the index, so that differences do not cancel out in the sums."""
    h = np.arange(n, dtype=np.uint32) * np.uint32(0x9E3779B1)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> np.uint32(shift)) * np.uint32(factor)
    signs: np.ndarray[Any, Any] = 1.0 - 2.0 * (h >> np.uint32(31))
    return signs
