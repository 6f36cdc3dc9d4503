"""The order in which the tiles of a step flow, so that parameters arrive in the order of their next use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..engine.tiles import Pieces
from ..step.countdown import NEVER


def last_places(pieces: Pieces, flow: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return, by row, the index in `flow` (a sequence of tiles) of the last tile with a piece of the parameter.

    -1 if no tile of `flow` has one.
    """
    place = np.full(pieces.n_tiles, -1)
    place[flow] = np.arange(len(flow))
    last = np.full(pieces.n_params, -1)
    np.maximum.at(last, pieces.all["param"], place[pieces.all["tile"]])
    return last


def by_next_use(pieces: Pieces, uses: Mapping[int, int]) -> np.ndarray[Any, Any]:
    """Return each tile's rank, int64: the lowest rank of its parameters. `uses`: parameters' ranks, by row."""
    rank_of = np.full(pieces.n_params, NEVER)
    rank_of[[*uses]] = [*uses.values()]
    ranks = np.full(pieces.n_tiles, NEVER)
    np.minimum.at(ranks, pieces.all["tile"], rank_of[pieces.all["param"]])
    return ranks


def early_of(flow: np.ndarray[Any, Any], share: float) -> np.ndarray[Any, Any]:
    """Return the tiles that backward pushes, in its order. `flow`: all tiles, in the order of use.

    Selects the fraction `share` of every layer, last layer first. The next forward then finds that fraction of each
    layer done, and waits for the rest of one layer at a time.
    """
    places = np.arange(len(flow))
    early = np.floor((places + 1) * share) > np.floor(places * share)
    early[-1] |= not early.any()
    found: np.ndarray[Any, Any] = flow[early][::-1].copy()
    return found
