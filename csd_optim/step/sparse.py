"""Top-K of gradients that the engine cannot read: the entries to send are selected on the gradient's device.

A large parameter fills many tiles by itself. Several such tiles are selected at once, as the rows of a matrix, because
an accelerator takes longer to launch the kernels of one tile than to run them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..accelerator import on
from ..bindings import topk_count
from ..compression.dense import feed_back, rounded, select
from ..compression.selection import TopK, listed, pack
from ..engine.engine import Engine
from ..params.grad_source import GradSource

# Limits of what is selected at once: tiles, and bytes of temporary memory.
ROWS, BATCH_BYTES = 8, 160 << 20
# Temporary memory of selection.py: ELEM_BYTES per element, or KEPT_BYTES per element and SENT_BYTES per sent one.
ELEM_BYTES, KEPT_BYTES, SENT_BYTES = 20, 3, 80


@dataclass
class SparsePiece:
    """The part of a parameter with Top-K in `rows` tiles, of equal length in each. All tensors 1-D, on its device."""

    topk: TopK
    grad: torch.Tensor
    residual: torch.Tensor | None
    first: int  # in the parameter
    rows: int = 1

    @property
    def k(self) -> int:
        """The number of elements of each row that are sent at most."""
        return topk_count(self.topk.ratio, len(self.grad) // self.rows)

    @property
    def updates_residual(self) -> bool:
        return self.residual is not None and self.topk.ratio < 1

    def select(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the 16-bit values, and a bool mask of those to send; both of shape (rows, elements)."""
        values = rounded(self.grad, self.residual, self.topk.scale, self.topk.dtype).view(self.rows, -1)
        return values, select(values, self.k)

    def feed_back(self) -> None:
        """Update the residual. Selects again, which costs less than keeping the selections of all parameters."""
        assert self.residual is not None
        values, sent = (t.view(-1) for t in self.select())
        feed_back(self.grad, self.residual, self.topk.scale, values, sent, self.first, self.topk.step)


class _Place(NamedTuple):
    """The place of a sparse parameter in a tile."""

    source: GradSource
    first: int  # in the parameter
    tile_first: int
    n: int


class SparseTiles:
    """The selections of the step under way."""

    def __init__(self) -> None:
        self._selected: dict[int, torch.Tensor] = {}  # by tile: entries that were not sent yet
        self._feedback_pieces: list[SparsePiece] = []  # pieces whose residuals change when the step is complete

    def entries_of(
        self, engine: Engine, tile: int, sources: Mapping[int, GradSource], streams: Mapping[torch.device, Any]
    ) -> torch.Tensor | None:
        """Return the entries of a tile, 1-D, as pack() returns them, on the device and stream of the selection.

        None if the tile has no sparse gradient.
        """
        if tile in self._selected:
            return self._selected.pop(tile)
        rows = engine.tiles.pieces_of(tile).tolist()
        places = [_Place(sources[p], *where) for p, _, *where in rows if p in sources and sources[p].topk]
        if not places:
            return None
        elems = engine.tiles.elems_of(tile)
        tiles, pieces = [tile], [_piece(place) for place in places]
        if places[0].n == elems:
            tiles, pieces = _batch(tile, places[0])
        devices = {piece.grad.device for piece in pieces}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")  # where the entries are packed
        lists = []
        for place, piece in zip(places, pieces, strict=True):
            with on(streams.get(piece.grad.device)):
                elements, values = listed(*piece.select(), piece.k, place.tile_first, elems)
                lists.append((elements.to(device), values.to(device)))
                if piece.updates_residual:
                    self._feedback_pieces.append(piece)
        with on(streams.get(device)):
            self._selected.update(zip(tiles, pack(lists, len(tiles), elems), strict=True))
        return self._selected.pop(tile)

    def feed_back(self, streams: Mapping[torch.device, Any]) -> None:
        """Add what the step did not send to the residuals, once the step is complete."""
        for piece in self._feedback_pieces:
            # On the stream that selects, so after the selection of this step and before that of the next.
            with on(streams.get(piece.grad.device)):
                piece.feed_back()

    def forget(self) -> None:
        self._selected.clear()
        self._feedback_pieces.clear()


def _piece(place: _Place, rows: int = 1) -> SparsePiece:
    here, topk = slice(place.first, place.first + rows * place.n), place.source.topk
    assert topk
    return SparsePiece(
        topk, place.source.grad[here], None if topk.residual is None else topk.residual[here], place.first, rows
    )


def _batch(tile: int, place: _Place) -> tuple[list[int], list[SparsePiece]]:
    """Return the batch of tiles around `tile` that are selected at once, all filled by the parameter at `place`."""
    topk, n = place.source.topk, place.n
    assert topk
    row_bytes = max(ELEM_BYTES * n, KEPT_BYTES * n + SENT_BYTES * topk_count(topk.ratio, n))
    most = max(1, min(ROWS, BATCH_BYTES // row_bytes))
    number, offset = divmod(place.first, n)
    first = number // most * most
    rows = min(most, (len(place.source.grad) - offset) // n - first)
    tiles = [tile + k - number for k in range(first, first + rows)]
    return tiles, [_piece(place._replace(first=first * n + offset), rows)]
