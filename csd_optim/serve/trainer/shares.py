"""A trainer's states divided among several owners: which tiles belong to which owner, and each owner's numbering.

A share consists of whole tiles. Its owner sees a model of its own, whose parameters are the pieces in these tiles, and
as many ranks as there are shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...bindings import PASS_2
from ...engine.tiles import Tiles
from ...errors import CSDRankError
from ...store.format import devices_of
from ...store.layout import Extent, ExtentRequest
from .link import Link
from .remote_native import RemoteNative

# Elements of one of the trainer's parameters: a parameter of the owner.
PART = np.dtype([("param", np.uint32), ("first", np.uint64), ("elems", np.uint64)])


class Share:
    """One owner's part of a trainer's states."""

    def __init__(self, link: Link, native: RemoteNative, index: int, rank: int, world_size: int, n_shares: int) -> None:
        """`index`: the share's number among the `n_shares` shares of all trainers. `rank`: the trainer's."""
        self.link: Link = link
        self.native: RemoteNative = native
        self.index: int = index
        self.rank: int = rank
        self.world_size: int = world_size
        self.is_whole: bool = n_shares == world_size  # the share has all states of the trainer
        # An extent, and its request, for which this owner had room, but another owner had not.
        self.pending: tuple[ExtentRequest, Extent] | None = None
        self.weight: float = 1.0  # relative part of the states
        self.names: list[str] = []  # of the owner's devices
        self.tiles: Tiles = Tiles()  # in the owner's numbers; the engine's own object, if there is one share
        self.numbers: np.ndarray[Any, Any] = np.zeros(0, np.uint32)  # the trainer's number of each of the owner's tiles
        self.parts: np.ndarray[Any, Any] = np.zeros(0, PART)  # of the owner's parameters

    def add(self, extent: Extent, numbers: np.ndarray[Any, Any], parts: np.ndarray[Any, Any]) -> None:
        """Add the owner's part of an extent. `extent`: as the owner has it. `numbers`, `parts`: see the fields."""
        self.tiles.add(extent)
        self.numbers = np.append(self.numbers, numbers).astype(np.uint32)
        self.parts = np.append(self.parts, parts)

    def add_whole(self, extent: Extent) -> None:
        """Add a whole extent, if there is one owner: the engine adds it to `tiles`."""
        n = len(extent.numels)
        parts = np.zeros(n, PART)
        parts["param"], parts["elems"] = np.arange(extent.first_param, extent.first_param + n), extent.numels
        self.parts = np.append(self.parts, parts)

    def request_of(self, wanted: ExtentRequest, tile_elems: int, parts: np.ndarray[Any, Any]) -> ExtentRequest:
        """Return the request for the owner's part of an extent. `wanted`: the whole."""
        numels, first_param, first_tile = parts["elems"].tolist(), len(self.parts), len(self.numbers)
        return wanted._replace(numels=numels, first_param=first_param, first_tile=first_tile, tile_elems=tile_elems)

    def check_not_pending(self) -> None:
        """Raise CSDRankError if the owner has an extent for which another owner had no room."""
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
        """Return the owner's table of a step (dtype PARAM).

        `params`: the trainer's, with `n_params` or twice as many rows.
        """
        passes = [params[k : k + n_params][self.parts["param"]] for k in range(0, len(params), max(n_params, 1))]
        table = np.concatenate([params[:0], *passes])
        first = np.tile(self.parts["first"], len(passes))
        table["first"] += first.astype(np.uint32)
        table["edited"] += np.where(table["edited"] != 0, 4 * first[:, None], 0).astype(np.uint64)
        return table


def divide(extent: Extent, owners: np.ndarray[Any, Any], n: int) -> list[tuple[np.ndarray[Any, Any], ...]]:
    """Return, for each of `n` owners, the tiles (in the engine's numbers) and the parts of parameters of an extent.

    `owners`: for each tile, the index of its owner. Parts are in the order of tiles, each within one tile; so an owner
    that lays them out by plan_extent() has the same elements in each tile. Empty parameters go to the first owner.
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
    """Return the owner of each tile of an extent, interleaved in proportion to weights: uint32."""
    return devices_of([share.weight for share in shares], n_tiles)


class Places:
    """The places of a trainer's tiles in its present shares."""

    def __init__(self, shares: Sequence[Share]) -> None:
        n = sum(len(share.numbers) for share in shares)
        self.share: np.ndarray[Any, Any] = np.zeros(n, np.intp)  # by the trainer's tile
        self.tile: np.ndarray[Any, Any] = np.zeros(n, np.uint32)  # by the trainer's tile: the owner's number
        for k, share in enumerate(shares):
            self.share[share.numbers] = k
            self.tile[share.numbers] = np.arange(len(share.numbers))

    def of(self, tile: int) -> tuple[int, int]:
        """Return the share of a tile or second pass, and the owner's number of the tile."""
        number = tile & ~PASS_2
        return int(self.share[number]), int(self.tile[number]) | tile & PASS_2

    def at(self, k: int, tiles: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the tiles and second passes that are in share `k`, in its owner's numbers."""
        here = tiles[self.share[tiles & ~np.uint32(PASS_2)] == k]
        found: np.ndarray[Any, Any] = self.tile[here & ~np.uint32(PASS_2)] | here & np.uint32(PASS_2)
        return found
