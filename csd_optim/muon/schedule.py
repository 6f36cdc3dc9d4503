"""The order in which a step updates matrices, with two passes over the tiles of each.

Pass 1 updates the momentum and returns X; pass 2 updates the parameter with the orthogonalized X. A group of matrices
is orthogonalized at a time, while the devices read the next group:

    pass 1 of group 0, pass 1 of group 1, pass 2 of group 0, pass 1 of group 2, pass 2 of group 1, ...

Tiles do not end where matrices do. A tile that groups share takes pass 1 with the first of them, and pass 2 with the
last. So the pass 2 of a tile never comes before the pass 1 that it waits for, and devices that take jobs in this order
cannot block. Groups that share a tile need not be neighbours: matrices are in the order of the parameters, but a tile
may hold parameters from anywhere that got gradients late. So a group's X has its buffer from the first pass 1 over a
tile of it to the last pass 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .newton_schulz import flops

BEHIND = 3  # pass 1 of a group waits for pass 2 of the group that is so many before it
# Where only neighbours share tiles, so many groups have their X in memory: the one that is orthogonalized; the next,
# with a tile of the one after that; and two whose second passes are under way.
IN_MEMORY = BEHIND + 2
LEAST_TILES = 8  # of a group: fewer would not keep the devices busy while a group is orthogonalized


@dataclass(frozen=True)
class Matrix:
    """A parameter that is orthogonalized: one matrix, or a batch of them."""

    row: int  # in a step's table
    shape: tuple[int, ...]  # (..., rows, columns)
    tiles: tuple[int, ...]  # that have a part of it
    is_divided: bool = False  # among ranks, which make it whole together

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def cost(self) -> int:
        """The floating-point operations of one iteration."""
        rows, columns = self.shape[-2:]
        return math.prod(self.shape[:-2]) * flops(rows, columns, 1)


@dataclass
class Group:
    """Matrices that are orthogonalized together. All are divided, or none is."""

    matrices: list[Matrix]
    first: list[int]  # tiles whose pass 1 is due with this group, in order
    second: list[int]  # tiles whose pass 2 is due with this group
    buffer: int = 0  # number of the buffer that has its X

    @property
    def is_divided(self) -> bool:
        return self.matrices[0].is_divided

    @property
    def numel(self) -> int:
        return sum(matrix.numel for matrix in self.matrices)


def groups_of(matrices: Sequence[Matrix], least: int) -> list[Group]:
    """Return groups of consecutive matrices, each with at least `least` elements, unless it is the last of its kind."""
    groups: list[Group] = []
    for matrix in matrices:
        if not groups or groups[-1].numel >= least or groups[-1].is_divided is not matrix.is_divided:
            groups.append(Group([], [], []))
        groups[-1].matrices.append(matrix)
    first: dict[int, int] = {}  # by tile: number of the group with which its pass is due
    last: dict[int, int] = {}
    for k, group in enumerate(groups):
        for matrix in group.matrices:
            for tile in matrix.tiles:
                first.setdefault(tile, k)
                last[tile] = k
    for due, passes in ((first, [group.first for group in groups]), (last, [group.second for group in groups])):
        for tile, k in due.items():
            passes[k].append(tile)
    _give_buffers(groups, first, last)
    return groups


def _give_buffers(groups: Sequence[Group], first: dict[int, int], last: dict[int, int]) -> None:
    tiles = [[tile for matrix in group.matrices for tile in matrix.tiles] for group in groups]
    begins = [min((first[tile] for tile in needed), default=k) for k, needed in enumerate(tiles)]
    until: list[int] = []  # by buffer: number of the group whose pass 2 is the last one that uses it
    for k in sorted(range(len(groups)), key=lambda k: begins[k]):
        buffer = next((b for b, end in enumerate(until) if end + BEHIND <= begins[k]), len(until))
        until[buffer : buffer + 1] = [max((last[tile] for tile in tiles[k]), default=k)]
        groups[k].buffer = buffer
