"""Which tiles of a step still lack gradients, if gradients arrive one after another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np

NEVER = np.iinfo(np.int64).max  # rank of a tile if it is unknown when its parameters are needed


class Countdown:
    """Which tiles of a step still lack gradients, and in which order tiles were pushed.

    Counts the units, such as pieces or elements, that each tile needs. Python integers: most gradients have few tiles,
    for which NumPy takes longer.
    """

    def __init__(self, needed: np.ndarray[Any, Any], tiles: Iterable[int]) -> None:
        """`needed`: units by tile of the engine, int64. `tiles`: the tiles of the step, in flow order."""
        self._missing: list[int] = needed.tolist()
        self._left = dict.fromkeys(tiles)
        self.pushed: list[int] = []

    def arrive(self, tiles: Sequence[int], units: Iterable[int] = repeat(1)) -> list[int]:
        """Count `units` that have arrived for each of these tiles. Returns complete(tiles)."""
        for tile, n in zip(tiles, units, strict=False):
            self._missing[tile] -= n
        return self.complete(tiles)

    def complete(self, tiles: Iterable[int]) -> list[int]:
        """Return the tiles, each once, that have all gradients and were not pushed yet."""
        return [*dict.fromkeys(tile for tile in tiles if not self._missing[tile] and tile in self._left)]

    def lacks(self, tile: int) -> bool:
        return bool(self._missing[tile])

    def note_pushed(self, tile: int) -> None:
        del self._left[tile]
        self.pushed.append(tile)

    @property
    def left(self) -> list[int]:
        """The tiles that were not pushed yet, in flow order."""
        return [*self._left]

    def rank(self) -> np.ndarray[Any, Any]:
        """Return a tile_rank for the next step, whose gradients are expected in the same order: int64, by tile."""
        rank = np.full(len(self._missing), NEVER)
        rank[self.pushed] = np.arange(len(self.pushed))
        return rank
