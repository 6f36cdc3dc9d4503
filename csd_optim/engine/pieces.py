"""Looks up the tiles and pieces of each parameter, over all extents of an engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .engine import Engine


class Pieces:
    """The pieces (parts of parameters in tiles) of an engine as it is now.

    `all`: dtype PIECE, sorted by parameter; tiles are numbered over all extents.
    """

    def __init__(self, engine: Engine) -> None:
        self.n_tiles: int = engine.n_tiles
        pieces = np.concatenate([extent.pieces for extent in engine.extents])
        first_tiles = [extent.first_tile for extent in engine.extents]
        pieces["tile"] += np.repeat(first_tiles, [len(extent.pieces) for extent in engine.extents]).astype(np.uint32)
        self.all: np.ndarray[Any, Any] = pieces[np.argsort(pieces["param"], kind="stable")]
        self._begins = np.searchsorted(self.all["param"], np.arange(engine.n_params + 1))

    def of(self, param: int) -> np.ndarray[Any, Any]:
        """Return the pieces of one parameter, which is numbered over all extents."""
        return self.all[self._begins[param] : self._begins[param + 1]]

    def tiles_of(self, params: Iterable[int]) -> np.ndarray[Any, Any]:
        """Return the tiles of these parameters: uint32, ascending, each once."""
        tiles = [self.of(param)["tile"] for param in params]
        return np.unique(np.concatenate(tiles)) if tiles else np.zeros(0, np.uint32)
