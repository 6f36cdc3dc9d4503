"""In which order the tiles of a step flow, so that each parameter arrives when it is used next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..engine.pieces import Pieces

NEVER = np.iinfo(np.int64).max  # used, as far as is known


def last_places(pieces: Pieces, n_params: int, flow: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of each parameter, by row: the place in `flow`, a sequence of tiles, of the last one that has a piece of it."""
    place = np.full(pieces.n_tiles, -1)
    place[flow] = np.arange(len(flow))
    last = np.full(n_params, -1)
    np.maximum.at(last, pieces.all["param"], place[pieces.all["tile"]])
    return last


def by_next_use(pieces: Pieces, n_params: int, uses: Mapping[int, int]) -> np.ndarray[Any, Any]:
    """A rank for each tile, int64: that of the earliest use of what is in it. `uses`: of parameters, by row."""
    rank_of = np.full(n_params, NEVER)
    rank_of[[*uses]] = [*uses.values()]
    ranks = np.full(pieces.n_tiles, NEVER)
    np.minimum.at(ranks, pieces.all["tile"], rank_of[pieces.all["param"]])
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
