"""Top-K of gradients that the engine cannot read: the entries to send are selected before their tiles are pushed.

By the kernels of the device that has the gradients, all tiles of a step at once; without kernels on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..compression.kernel_check import topk_kernels_of
from ..compression.kernel_selection import BATCH_BYTES, KernelSelection, nbytes_of_part
from ..compression.selection import HostSelection, Part, Tiles
from ..engine.engine import Engine
from ..params.grad_source import GradSource

FIRST_TILES = 16  # are selected by themselves, so that devices begin to update while the others are selected


class SparseTiles:
    """The selections of the step under way."""

    def __init__(self) -> None:
        self._waiting: dict[int, None] = {}  # tiles that may be selected together with others
        self._selected: dict[int, torch.Tensor] = {}  # by tile: entries that were not sent yet
        self._selections: list[HostSelection | KernelSelection] = []

    def begin(self, tiles: Iterable[int]) -> None:
        """Say which tiles will be asked for. The gradients of all of them are ready."""
        self._waiting = dict.fromkeys(tiles)

    def entries_of(
        self, engine: Engine, tile: int, sources: Mapping[int, GradSource], streams: Mapping[torch.device, Any]
    ) -> torch.Tensor | None:
        """Return the entries of a tile, 1-D int32, with the number of words that are used at the end.

        They are on the host, or on the accelerator and stream that selects. None if the tile has no sparse gradient.
        """
        self._waiting.pop(tile, None)
        if tile not in self._selected and (parts := _parts_of(engine, tile, sources, streams)):
            tiles = {tile: (engine.tiles.elems_of(tile), parts)}
            devices = {part.grad.device for part in parts}
            library = topk_kernels_of(parts[0].grad.device) if len(devices) == 1 else None
            selection: HostSelection | KernelSelection
            if library is None:
                selection = HostSelection(tiles)
            else:
                self._add_others(tiles, engine, sources, streams)
                selection = KernelSelection(library, tiles)
            self._selections.append(selection)
            self._selected.update(selection.rows)
            selection.rows = {}
        return self._selected.pop(tile, None)

    def _add_others(
        self, tiles: Tiles, engine: Engine, sources: Mapping[int, GradSource], streams: Mapping[torch.device, Any]
    ) -> None:
        """Add waiting tiles with sparse gradients on the same device to `tiles`, up to FIRST_TILES or BATCH_BYTES."""
        [(_, first)] = tiles.values()
        nbytes = sum(nbytes_of_part(part.topk, len(part.grad)) for part in first)
        for tile in [*self._waiting]:
            parts = _parts_of(engine, tile, sources, streams)
            if not parts or {part.grad.device for part in parts} != {first[0].grad.device}:
                continue
            if len(tiles) == FIRST_TILES and not self._selections:
                break
            nbytes += sum(nbytes_of_part(part.topk, len(part.grad)) for part in parts)
            if nbytes > BATCH_BYTES:
                break
            tiles[tile] = engine.tiles.elems_of(tile), parts
            del self._waiting[tile]

    def feed_back(self) -> None:
        """Add what the step did not send to the residuals, once the step is complete."""
        for selection in self._selections:
            selection.feed_back()

    def forget(self) -> None:
        self._waiting.clear()
        self._selected.clear()
        self._selections.clear()


def _parts_of(
    engine: Engine, tile: int, sources: Mapping[int, GradSource], streams: Mapping[torch.device, Any]
) -> list[Part]:
    """Return the parts of a tile whose gradients are sparse, in its order."""
    parts = []
    for param, _, first, tile_first, n in engine.tiles.pieces_of(tile).tolist():
        source = sources.get(param)
        if source is None or not source.topk:
            continue
        here, residual = slice(first, first + n), source.topk.residual
        residual = None if residual is None else residual[here]
        stream = streams.get(source.grad.device)
        parts.append(Part(source.topk, source.grad[here], residual, first, tile_first, stream))
    return parts
