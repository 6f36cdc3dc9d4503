"""Steps of two passes over a tile, for rules that need more than the tile in between: see CSD_PASS_2 in csd.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..bindings import PASS_2


def order_of_passes(groups: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the tiles of a step, uint32, in an order that needs few buffers: for Engine.begin().

    `groups`: for each group of matrices whose updates are computed together, the tiles with parts of them (uint32);
    groups may share tiles. While one group is computed between its passes, the devices read the next one: its first
    passes come before the second passes of this one. A second pass follows the first passes of all groups that have
    its tile. A step in this order cannot deadlock, however few buffers there are, if second passes are pushed group by
    group: those of a group before it waits for the first passes of the one after the next.
    """
    last = {tile: g for g, tiles in enumerate(groups) for tile in tiles.tolist()}
    listed: dict[int, None] = {}  # in order
    for g in range(len(groups) + 1):
        if g < len(groups):
            listed.update(dict.fromkeys(groups[g].tolist()))
        if g > 0:
            listed.update((tile | PASS_2, None) for tile in groups[g - 1].tolist() if last[tile] == g - 1)
    return np.array([*listed], np.uint32)
