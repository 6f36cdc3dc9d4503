"""Parts of parameters, divided among ranks by rows, and the elements that two parts share, in memory order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..distributed.sharding import rows_of
from ..errors import CSDStoreError
from ..store.sections import GROUP
from .export import in_memory_order


@dataclass(frozen=True)
class Rows:
    """Rows [first, first + rows) of a parameter's dimension 0, as they lie in memory.

    `outer`, `inner`: the products of the sizes of dimensions before and after dimension 0 in memory order; a complex
    number is two elements. A parameter without dimensions is one row.
    """

    outer: int
    first: int
    rows: int
    inner: int

    @property
    def numel(self) -> int:
        return self.outer * self.rows * self.inner

    def shared(self, other: Rows, first: int, n: int) -> Iterator[tuple[int, int, int]]:
        """Yield which of this part's elements [first, first + n) are also in another part of the same parameter.

        Yields runs: (first element here, the same element's index there, number of elements).
        """
        if (self.first, self.rows) == (other.first, other.rows):
            yield first, first, n
            return
        low, high = max(self.first, other.first), min(self.first + self.rows, other.first + other.rows)
        if low >= high or not n:
            return
        here, there = self.rows * self.inner, other.rows * other.inner
        for k in range(first // here, -(-(first + n) // here)):
            # The common rows in block k of `outer`, limited to the wanted elements.
            begin = k * here + (low - self.first) * self.inner
            at, end = max(begin, first), min(begin + (high - low) * self.inner, first + n)
            if at < end:
                yield at, k * there + (low - other.first) * other.inner + at - begin, end - at

    def keeps_groups(self, other: Rows) -> bool:
        """Return whether all groups of codes that `other` takes from this part are groups there, too."""
        return all(here % GROUP == there % GROUP == 0 for here, there, _ in self.shared(other, 0, self.numel))


def memory_order(entries: Sequence[dict[str, Any]]) -> list[int]:
    """Return the order of a parameter's dimensions in memory, the outermost first. `entries`: of its parts.

    A part's strides say nothing about dimensions of size 1. Raises CSDStoreError if orders differ.
    """
    parts = [p for p in entries if p["numel"]]
    if not parts:
        return [*range(len(entries[0]["shape"]))]
    most = in_memory_order(max(parts, key=lambda p: sum(n > 1 for n in p["shape"])))
    if any(_longer(most, p["shape"]) != _longer(in_memory_order(p), p["shape"]) for p in parts):
        raise CSDStoreError(f"{parts[0]['name']} has another memory order (strides) on some ranks than on others")
    return most


def _longer(order: Sequence[int], shape: Sequence[int]) -> list[int]:
    return [dim for dim in order if shape[dim] > 1]


def stride_of(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return the strides of a dense tensor whose dimensions are in this order in memory."""
    stride, step = [0] * len(shape), 1
    for dim in reversed(order):
        stride[dim], step = step, step * max(shape[dim], 1)
    return stride


@dataclass(frozen=True)
class Whole:
    """A whole parameter: its shape, the order of its dimensions in memory, and elements per number (complex: 2)."""

    shape: list[int]
    order: list[int]
    scale: int

    def part(self, first: int, rows: int) -> Rows:
        """Return rows of the parameter; the whole, if it has no dimensions."""
        if not self.shape:
            return Rows(1, 0, 1, self.scale)
        at = self.order.index(0)
        sizes = [self.shape[dim] for dim in self.order]
        return Rows(math.prod(sizes[:at]), first, rows, math.prod(sizes[at + 1 :]) * self.scale)

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


class Division(NamedTuple):
    """How ranks divide the rows of a parameter: into `shards`, and each shard among its `replicas`, as in HSDP.

    Rank r * shards + s has the r-th part of shard s. DDP and FSDP2 divide rows alike: as many shards as ranks.
    """

    shards: int
    replicas: int = 1

    def rows_of(self, rows: int, rank: int) -> tuple[int, int]:
        """Return the first row and the number of rows of a rank's part. `rows`: of the whole parameter."""
        first, n = rows_of(rows, self.shards, rank % self.shards)
        more, n = rows_of(n, self.replicas, rank // self.shards)
        return first + more, n


def block_of(p: dict[str, Any], path: str, rank: int, size: int) -> tuple[int, int]:
    """Return the first row and the number of rows of a rank's part of a parameter.

    `p`: the part's entry in the manifest of the store `path`. Raises CSDStoreError if the part does not consist of
    whole rows.
    """
    shape, divided = p["shape"], p.get("of")
    if divided is None or not divided["shape"]:
        return 0, shape[0] if shape else 1
    whole, first = divided["shape"], divided["first"]
    if shape[1:] != whole[1:] or (shape[0] and any(first[1:])):
        raise CSDStoreError(
            f"{path}: {p['name']} is not divided by rows: rank {rank} of {size} has {shape} of {whole}, from {first} "
            "on, as with tensor parallelism. Save it with torch.distributed.checkpoint, or `csd-optim export` the "
            "stores of all ranks"
        )
    return first[0], shape[0]


def ranks_that_cover(blocks: Mapping[int, tuple[int, int]], rows: int) -> list[int] | None:
    """Return ranks whose blocks cover all `rows` rows exactly once; None if blocks overlap, or leave out a row.

    `blocks`: by rank, the first row and the number of rows. Of ranks with the same block, which are replicas, the first
    is taken. A rank's rows need not be known to be adjacent: if the blocks cover all rows, there is no room for gaps.
    """
    owners: dict[tuple[int, int], int] = {}
    for rank, block in sorted(blocks.items()):
        if block[1]:
            owners.setdefault(block, rank)
    end = 0
    for first, n in sorted(owners):
        if first != end:
            return None
        end += n
    return sorted(owners.values()) if end == rows else None
