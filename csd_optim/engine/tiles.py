"""Where states lie: an extent is cut into tiles, and a tile holds pieces (parts of parameters)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..bindings import PASS_2, PIECE
from ..store.layout import Extent
from ..store.sections import FP32


class Tiles:
    """The tiles of an engine. Tiles and parameters are numbered over all extents. No states, and no policy."""

    def __init__(self) -> None:
        self.extents: list[Extent] = []
        self._first_tiles: list[int] = []  # of each extent
        self._by_param: Pieces | None = None

    @property
    def by_param(self) -> Pieces:
        """The present pieces of all tiles, by parameter."""
        if not self._by_param or (self._by_param.n_tiles, self._by_param.n_params) != (len(self), self.n_params):
            self._by_param = Pieces(self)
        return self._by_param

    @property
    def n_params(self) -> int:
        return sum(len(e.numels) for e in self.extents)

    def __len__(self) -> int:
        return sum(e.n_tiles for e in self.extents)

    @property
    def coded(self) -> np.ndarray[Any, Any]:
        """Which tiles store codes: bool, one per tile."""
        return np.concatenate([np.zeros(0, bool), *(np.full(e.n_tiles, e.codec != FP32) for e in self.extents)])

    def extent_with(self, param: int) -> Extent:
        return next(e for e in reversed(self.extents) if e.first_param <= param)

    def add(self, extent: Extent) -> None:
        self.extents.append(extent)
        self._first_tiles.append(extent.first_tile)

    def extent_of(self, tile: int) -> Extent:
        """Return the extent of a tile. Raises IndexError."""
        extent = self.extents[bisect_right(self._first_tiles, tile) - 1]
        if tile - extent.first_tile >= extent.n_tiles:
            raise IndexError(tile)
        return extent

    def by_place(self, tiles: np.ndarray[Any, Any]) -> Iterator[tuple[int, int, np.ndarray[Any, Any]]]:
        """Yield (index of an extent, device, numbers) for each extent and device with any of `tiles` (ascending).

        The numbers count the tiles of the extent on the device, ascending.
        """
        of_extent = np.searchsorted(self._first_tiles, tiles, side="right") - 1
        for e in np.unique(of_extent).tolist():
            extent = self.extents[e]
            here = tiles[of_extent == e].astype(np.int64) - extent.first_tile
            for device in np.unique(extent.devices[here]).tolist():
                on_device = np.flatnonzero(extent.devices == device)
                yield e, device, np.flatnonzero(np.isin(on_device, here, assume_unique=True))

    def device_of(self, tile: int) -> int:
        """Return the device of a tile, or of a second pass over it (PASS_2)."""
        extent = self.extent_of(tile & ~PASS_2)
        return int(extent.devices[(tile & ~PASS_2) - extent.first_tile])

    def elems_of(self, tile: int) -> int:
        return self.extent_of(tile).tile_elems

    def pieces_of(self, tile: int) -> np.ndarray[Any, Any]:
        """Return the pieces in a tile, dtype PIECE; `tile` counts from the extent's first tile.

        For a second pass (PASS_2), `param` is the parameter's second row in a step's table.
        """
        extent = self.extent_of(tile & ~PASS_2)
        pieces = extent.pieces_in((tile & ~PASS_2) - extent.first_tile)
        if tile & PASS_2:
            pieces = pieces.copy()
            pieces["param"] += np.uint32(self.n_params)
        return pieces

    def of_mask(self, params: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the tiles of the parameters in a mask (bool, one per parameter): uint32, ascending."""
        pieces = self.by_param.all
        has_tile = np.zeros(len(self), bool)
        has_tile[pieces["tile"][params[pieces["param"]]]] = True
        return np.flatnonzero(has_tile).astype(np.uint32)

    def of(self, params: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return the tiles of these parameters: uint32, ascending."""
        mask = np.zeros(self.n_params, bool)
        mask[params] = True
        return self.of_mask(mask)

    def params_in(self, tiles: np.ndarray[Any, Any]) -> set[int]:
        """Return the parameters with elements in `tiles`."""
        return {param for tile in tiles.tolist() for param in self.pieces_of(tile)["param"].tolist()}


class Pieces:
    """The pieces of all tiles at one time, by parameter.

    `all`: dtype PIECE, sorted by parameter; tiles are numbered over all extents.
    """

    def __init__(self, tiles: Tiles) -> None:
        self.n_tiles: int = len(tiles)
        self.n_params: int = tiles.n_params
        pieces = np.concatenate([np.zeros(0, PIECE), *(extent.pieces for extent in tiles.extents)])
        first_tiles = [extent.first_tile for extent in tiles.extents]
        pieces["tile"] += np.repeat(first_tiles, [len(extent.pieces) for extent in tiles.extents]).astype(np.uint32)
        self.all: np.ndarray[Any, Any] = pieces[np.argsort(pieces["param"], kind="stable")]
        self._begins = np.searchsorted(self.all["param"], np.arange(self.n_params + 1))

    def of(self, param: int) -> np.ndarray[Any, Any]:
        """Return the pieces of one parameter."""
        return self.all[self._begins[param] : self._begins[param + 1]]

    def tiles_of(self, params: Iterable[int]) -> np.ndarray[Any, Any]:
        """Return the tiles of these parameters: uint32, ascending, each once."""
        tiles = [self.of(param)["tile"] for param in params]
        return np.unique(np.concatenate(tiles)) if tiles else np.zeros(0, np.uint32)
