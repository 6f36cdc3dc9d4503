"""Matrices whose rows the ranks divide, assembled on the rank that orthogonalizes them.

Each matrix has one such rank, its root. For a group of matrices all ranks send their rows of X to the roots, which
orthogonalize, and get their rows of the result back: 2 B + 2 B per parameter, of which 1/n is not sent. All ranks make
the same exchanges in the same order, also after a failure: see finish().
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..distributed.ranks import Ranks
from ..muon.schedule import Matrix

Blocks = list[tuple[int, int]]  # by rank: first element (row by row) and number of elements of its part of a matrix


class WholeMatrices:
    """The exchanges of one step. The ranks have the same groups, of the same matrices in the same order."""

    def __init__(self, ranks: Ranks, groups: Sequence[tuple[Sequence[Matrix], Sequence[Blocks]]]) -> None:
        """`groups`: the divided matrices of each group, with their blocks."""
        self._ranks, self._blocks = ranks, [blocks for _, blocks in groups]
        self._roots = [_roots(matrices, ranks.size) for matrices, _ in groups]
        self._done = 0  # exchanges: two for each group

    def has_root_here(self, k: int) -> list[bool]:
        """Return for each matrix of group `k` whether it is orthogonalized here."""
        return [root == self._ranks.rank for root in self._roots[k]]

    def collect(self, k: int, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return X of the matrices of group `k` that are orthogonalized here. A collective.

        `rows`: this rank's part of X for all matrices of the group. All tensors are bf16, 1-D, row by row.
        """
        me, size, roots = self._ranks.rank, self._ranks.size, self._roots[k]
        mine = [[x for x, root in zip(rows, roots, strict=True) if root == rank] for rank in range(size)]
        here = [blocks for blocks, root in zip(self._blocks[k], roots, strict=True) if root == me]
        parts = self._swap(mine, [[blocks[rank][1] for blocks in here] for rank in range(size)], rows)
        in_order = [sorted(range(size), key=lambda rank, b=blocks: b[rank]) for blocks in here]  # type: ignore[misc]
        return [torch.cat([parts[rank][i] for rank in order]) for i, order in enumerate(in_order)]

    def hand_out(self, k: int, wholes: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's part of all matrices of group `k`. A collective.

        `wholes`: the results for the matrices whose root this rank is. `like`: the `rows` that collect() got.
        """
        me, size, roots = self._ranks.rank, self._ranks.size, self._roots[k]
        here = [blocks for blocks, root in zip(self._blocks[k], roots, strict=True) if root == me]
        out = [
            [whole[blocks[rank][0] :][: blocks[rank][1]] for whole, blocks in zip(wholes, here, strict=True)]
            for rank in range(size)
        ]
        of_root = [[len(x) for x, root in zip(like, roots, strict=True) if root == rank] for rank in range(size)]
        parts = [iter(part) for part in self._swap(out, of_root, like)]
        return [next(parts[root]) for root in roots]

    def finish(self) -> None:
        """Make the remaining exchanges with zeros, after a failure here, as other ranks wait for them."""
        me = self._ranks.rank
        while self._done < 2 * len(self._roots) and not self._ranks.lost:
            k = self._done // 2
            rows = [torch.zeros(blocks[me][1], dtype=torch.bfloat16, device="cpu") for blocks in self._blocks[k]]
            if self._done % 2 == 0:
                self.collect(k, rows)
            else:
                here = zip(self._blocks[k], self.has_root_here(k), strict=True)
                sizes = [sum(n for _, n in blocks) for blocks, is_here in here if is_here]
                self.hand_out(k, [torch.zeros(n, dtype=torch.bfloat16, device="cpu") for n in sizes], rows)

    def _swap(
        self, out: Sequence[Sequence[torch.Tensor]], sizes: Sequence[Sequence[int]], like: Sequence[torch.Tensor]
    ) -> list[list[torch.Tensor]]:
        """Send each rank its tensors of `out`; return what each sent here. `sizes`: elements, by rank and tensor."""
        device = self._ranks.device
        own = torch.cat(
            [_bytes(t) for of_rank in out for t in of_rank] or [torch.empty(0, dtype=torch.uint8, device="cpu")]
        )
        own = own.to(device)
        there = torch.empty(2 * sum(map(sum, sizes)), dtype=torch.uint8, device=device)
        sent, received = [sum(t.nbytes for t in of_rank) for of_rank in out], [2 * sum(of_rank) for of_rank in sizes]
        self._done += 1  # only now: if something above fails, finish() makes this exchange
        self._ranks.wait([self._ranks.all_to_all(there, received, own, sent)])
        there = there.to(like[0].device).view(torch.bfloat16)
        by_rank = torch.split(there, [sum(of_rank) for of_rank in sizes])
        return [[*torch.split(part, [*of_rank])] for part, of_rank in zip(by_rank, sizes, strict=True)]


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def _roots(matrices: Sequence[Matrix], size: int) -> list[int]:
    """Return the root of each matrix: the costliest matrix first, each to the rank with the least work."""
    load, roots = [0] * size, [0] * len(matrices)
    costs = [matrix.cost for matrix in matrices]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        roots[i] = load.index(min(load))
        load[roots[i]] += costs[i]
    return roots
