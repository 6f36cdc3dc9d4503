"""The shares of a trainer's states that several owners have: which of its tiles, and how each owner numbers them.

A share consists of whole tiles. To its owner it is a model of its own, whose parameters are the pieces in these tiles,
and the trainer is one of as many ranks as there are shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..bindings import PASS_2
from ..engine.tiles import Tiles
from ..errors import CSDRankError
from ..store.format import devices_of
from ..store.layout import Extent, ExtentRequest
from .link import Link
from .remote_native import RemoteNative

# Elements of one of the trainer's parameters: a parameter of the owner.
PART = np.dtype([("param", np.uint32), ("first", np.uint64), ("elems", np.uint64)])


class Share:
    """What one owner has of a trainer's states."""

    def __init__(self, link: Link, native: RemoteNative, index: int, rank: int, world_size: int, n_shares: int) -> None:
        """`index`: its number among the shares of all trainers, which are `n_shares`. `rank`: the trainer's."""
        self.link: Link = link
        self.native: RemoteNative = native
        self.index: int = index
        self.rank: int = rank
        self.world_size: int = world_size
        self.is_whole: bool = n_shares == world_size  # it is all that the trainer has
        # An extent that the owner has room for, and another owner had not, with the request for it.
        self.pending: tuple[ExtentRequest, Extent] | None = None
        self.weight: float = 1.0  # its part of the states, relative to that of other owners
        self.names: list[str] = []  # of the owner's devices
        self.tiles: Tiles = Tiles()  # as the owner numbers them; that of the engine, if there is one share
        self.numbers: np.ndarray[Any, Any] = np.zeros(0, np.uint32)  # of the owner's tiles: the trainer's
        self.parts: np.ndarray[Any, Any] = np.zeros(0, PART)  # of the owner's parameters

    def add(self, extent: Extent, numbers: np.ndarray[Any, Any], parts: np.ndarray[Any, Any]) -> None:
        """Add what the owner has of an extent of the trainer's, which is `extent` there."""
        self.tiles.add(extent)
        self.numbers = np.append(self.numbers, numbers).astype(np.uint32)
        self.parts = np.append(self.parts, parts)

    def add_whole(self, extent: Extent) -> None:
        """Add an extent of which the owner has everything, as the only one: the engine adds it to `tiles`."""
        n = len(extent.numels)
        parts = np.zeros(n, PART)
        parts["param"], parts["elems"] = np.arange(extent.first_param, extent.first_param + n), extent.numels
        self.parts = np.append(self.parts, parts)

    def request_of(self, wanted: ExtentRequest, tile_elems: int, parts: np.ndarray[Any, Any]) -> ExtentRequest:
        """Return the request for the owner's part of an extent. `wanted`: the whole."""
        numels, first_param, first_tile = parts["elems"].tolist(), len(self.parts), len(self.numbers)
        return wanted._replace(numels=numels, first_param=first_param, first_tile=first_tile, tile_elems=tile_elems)

    def check_not_pending(self) -> None:
        """Raise CSDRankError if the owner has an extent that another one had no room for."""
        if self.pending:
            raise CSDRankError(
                "an optimizer rank has new parameters that another one had no room for: make room, and call step() "
                "with the same parameters; or start again with resume=True"
            )

    @property
    def n_rows(self) -> int:
        """The number of the owner's parameters."""
        return len(self.parts) + (len(self.pending[0].numels) if self.pending else 0)

    def number_of(self, tile: int) -> int:
        """Return the trainer's number of a tile or second pass of the owner."""
        return int(self.numbers[tile & ~PASS_2]) | tile & PASS_2

    def rows_of(self, rows: Sequence[int]) -> list[int]:
        """Return the owner's numbers of its parts of these parameters."""
        found: list[int] = np.flatnonzero(np.isin(self.parts["param"], rows)).tolist()
        return found

    def counts(self, steps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the `step` counts of the owner's parameters, given those of the trainer's."""
        counts: np.ndarray[Any, Any] = steps[self.parts["param"]]
        return counts

    def table(self, params: np.ndarray[Any, Any], n_params: int) -> np.ndarray[Any, Any]:
        """Return the owner's table of a step (dtype PARAM). `params`: the trainer's, with `n_params` or twice that."""
        passes = [params[k : k + n_params][self.parts["param"]] for k in range(0, len(params), max(n_params, 1))]
        table = np.concatenate([params[:0], *passes])
        first = np.tile(self.parts["first"], len(passes))
        table["first"] += first.astype(np.uint32)
        table["edited"] += np.where(table["edited"] != 0, 4 * first[:, None], 0).astype(np.uint64)
        return table


def divide(extent: Extent, owners: np.ndarray[Any, Any], n: int) -> list[tuple[np.ndarray[Any, Any], ...]]:
    """Return which tiles (of the engine) and which parts of parameters each of `n` owners has of an extent.

    `owners`: of its tiles. Parts are in the order of tiles, each within one tile; so an owner that lays them out as
    plan_extent() does has the same elements in each tile. The first owner has the parameters without elements.
    """
    pieces = extent.pieces
    of_pieces = owners[pieces["tile"]]
    divided: list[tuple[np.ndarray[Any, Any], ...]] = []
    for k in range(n):
        tiles = np.flatnonzero(owners == k).astype(np.uint32) + np.uint32(extent.first_tile)
        here = pieces[of_pieces == k]
        parts = np.zeros(len(here), PART)
        parts["param"], parts["first"], parts["elems"] = here["param"], here["param_first"], here["elems"]
        if k == 0:
            empty = [extent.first_param + i for i, numel in enumerate(extent.numels) if not numel]
            parts = np.append(parts, np.array([(row, 0, 0) for row in empty], PART))
        divided.append((tiles, parts))
    return divided


def owners_of(shares: Sequence[Share], n_tiles: int) -> np.ndarray[Any, Any]:
    """Return which owner each of an extent's tiles gets, interleaved, according to their weights: uint32."""
    return devices_of([share.weight for share in shares], n_tiles)


class Places:
    """Where each of a trainer's tiles is, as its shares are now."""

    def __init__(self, shares: Sequence[Share]) -> None:
        n = sum(len(share.numbers) for share in shares)
        self.share: np.ndarray[Any, Any] = np.zeros(n, np.intp)  # by the trainer's tile
        self.tile: np.ndarray[Any, Any] = np.zeros(n, np.uint32)  # likewise: as its owner numbers it
        for k, share in enumerate(shares):
            self.share[share.numbers] = k
            self.tile[share.numbers] = np.arange(len(share.numbers))

    def of(self, tile: int) -> tuple[int, int]:
        """Return the share of a tile or second pass, and its number there."""
        number = tile & ~PASS_2
        return int(self.share[number]), int(self.tile[number]) | tile & PASS_2

    def at(self, k: int, tiles: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return those of these tiles and second passes that are in share k, as its owner numbers them."""
        here = tiles[self.share[tiles & ~np.uint32(PASS_2)] == k]
        found: np.ndarray[Any, Any] = self.tile[here & ~np.uint32(PASS_2)] | here & np.uint32(PASS_2)
        return found
