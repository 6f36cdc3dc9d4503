"""In which order the tiles of a step flow, so that each parameter arrives when it is used next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..engine.engine import Engine

NEVER = np.iinfo(np.int64).max  # used, as far as is known


def pieces(engine: Engine) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Of each piece of a parameter in a tile: the parameter's row, and the tile; over all extents."""
    rows = [e.pieces["param"] for e in engine.extents]
    tiles = [e.pieces["tile"] + np.uint32(e.first_tile) for e in engine.extents]
    return np.concatenate(rows), np.concatenate(tiles)


class TilesOf:
    """The tiles of each parameter."""

    def __init__(self, engine: Engine) -> None:
        self.n_tiles = engine.n_tiles
        rows, tiles = pieces(engine)
        order = np.argsort(rows, kind="stable")
        self._tiles = tiles[order].astype(np.uint32)
        self._begins = np.searchsorted(rows[order], np.arange(engine.n_params + 1))

    def __call__(self, rows: Iterable[int]) -> np.ndarray[Any, Any]:
        """Of these parameters (rows of the step's table): uint32, each once."""
        parts = [self._tiles[self._begins[row] : self._begins[row + 1]] for row in rows]
        return np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.uint32)


def last_places(engine: Engine, flow: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of each parameter, by row: the place in `flow`, a sequence of tiles, of the last one that has a piece of it."""
    place = np.full(engine.n_tiles, -1)
    place[flow] = np.arange(len(flow))
    rows, tiles = pieces(engine)
    last = np.full(engine.n_params, -1)
    np.maximum.at(last, rows, place[tiles])
    return last


def by_next_use(engine: Engine, uses: Mapping[int, int]) -> np.ndarray[Any, Any]:
    """A rank for each tile, int64: that of the earliest use of what is in it. `uses`: of parameters, by row."""
    rank_of = np.full(engine.n_params, NEVER)
    rank_of[[*uses]] = [*uses.values()]
    rows, tiles = pieces(engine)
    ranks = np.full(engine.n_tiles, NEVER)
    np.minimum.at(ranks, tiles, rank_of[rows])
    return ranks


def spread(flow: np.ndarray[Any, Any], share: float) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Divides tiles, given in the order of use, into those for backward and those for after it, each as it flows.

    In backward every layer's share comes, the last layer first: then the forward that follows finds a share of each
    layer done, and waits for the rest of one only as long as that takes.
    """
    places = np.arange(len(flow))
    early = np.floor((places + 1) * share) > np.floor(places * share)
    early[-1] |= not early.any()
    return flow[early][::-1].copy(), flow[~early]
