"""Rows of parameters as ranks divide them: which elements of one part are which of another, in memory order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..distributed.sharding import rows_of
from ..errors import CSDStoreError
from ..store.sections import GROUP
from .export import in_memory_order


@dataclass(frozen=True)
class Rows:
    """Rows [first, first + rows) of a parameter's dimension 0, as they lie in memory.

    `outer`, `inner`: the sizes of the dimensions before and after it in memory order, multiplied; a complex number is
    two elements. A parameter without dimensions is one row.
    """

    outer: int
    first: int
    rows: int
    inner: int

    @property
    def numel(self) -> int:
        return self.outer * self.rows * self.inner

    def shared(self, other: Rows, first: int, n: int) -> Iterator[tuple[int, int, int]]:
        """Yield which of this part's elements [first, first + n) are in another part of the same parameter.

        Yields runs: the first element here, the same one there, and the number of elements.
        """
        if (self.first, self.rows) == (other.first, other.rows):
            yield first, first, n
            return
        low, high = max(self.first, other.first), min(self.first + self.rows, other.first + other.rows)
        if low >= high or not n:
            return
        here, there = self.rows * self.inner, other.rows * other.inner
        for k in range(first // here, -(-(first + n) // here)):
            # Of these rows in the k-th of `outer` blocks, what lies in the wanted elements.
            begin = k * here + (low - self.first) * self.inner
            at, end = max(begin, first), min(begin + (high - low) * self.inner, first + n)
            if at < end:
                yield at, k * there + (low - other.first) * other.inner + at - begin, end - at

    def keeps_groups(self, other: Rows) -> bool:
        """Return whether all groups of codes that another part needs of this one are groups there, too."""
        return all(here % GROUP == there % GROUP == 0 for here, there, _ in self.shared(other, 0, self.numel))


def memory_order(entries: Sequence[dict[str, Any]]) -> list[int]:
    """Return the order of a parameter's dimensions in memory, the outermost first, given its parts' entries.

    Where a part has one index, its order says nothing of that dimension. Raises CSDStoreError if orders differ.
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
        if not self.shape:
            return Rows(1, 0, 1, self.scale)
        at = self.order.index(0)
        sizes = [self.shape[dim] for dim in self.order]
        return Rows(math.prod(sizes[:at]), first, rows, math.prod(sizes[at + 1 :]) * self.scale)

    def of_rank(self, rank: int, size: int, *, divided: bool) -> Rows:
        """Return the part that DDP and FSDP2 give a rank; with `divided` False, everything."""
        if divided and self.shape:
            return self.part(*rows_of(self.shape[0], size, rank))
        return self.part(0, self.shape[0] if self.shape else 1)


def check_divided(p: dict[str, Any], rank: int, size: int, path: str) -> None:
    """Raise CSDStoreError unless a parameter's part on a rank is its rows as DDP and FSDP2 divide them.

    `p`: its entry in the manifest of the store `path`, with `of`.
    """
    whole, first = p["of"]["shape"], p["of"]["first"]
    at, rows = rows_of(whole[0], size, rank) if whole else (0, 0)
    wanted = [rows, *whole[1:]]
    empty = 0 in wanted and 0 in p["shape"]  # where it begins means nothing then
    if not whole or p["shape"] != wanted or not (empty or first == [at, *[0] * (len(whole) - 1)]):
        raise CSDStoreError(
            f"{path}: {p['name']} is divided otherwise than DDP and FSDP2 divide rows: rank {rank} of {size} has "
            f"{p['shape']} of {whole}, from {first} on, as with HSDP or tensor parallelism. Save it with "
            "torch.distributed.checkpoint, or `csd-optim export` the stores"
        )
