"""Top-K: from every part of a gradient, only the elements of largest magnitude are sent, as index and value.

A *part* is one parameter's elements in one tile; a tile has about a million elements at most. The engine selects from
gradients in host memory that it can read in place. From all others the step selects, and pushes the entries:

    selection = HostSelection(tiles)               on the host, by the engine's functions
    selection = KernelSelection(library, tiles)    on the accelerator that has the gradients: see kernel_selection.py
    selection.rows                                 the entries of each tile
    selection.spread(to)                           if entries do not travel: their values, dense
    selection.feed_back()                          when the step is complete

All give the same bits, except those of nan. The rules are in native/src/topk.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..accelerator import on
from ..bindings import DTYPE_CODES, ELEMS_PER_BLOCK, ENTRY_LANES, TOPK_PART, topk_count, topk_entries, topk_feed_back


@dataclass
class TopK:
    """How one parameter's gradient is compressed in this step."""

    ratio: float  # share of each part's elements, see bindings.topk_count(); 1.0 sends all that are not zero
    dtype: torch.dtype  # of the values that are sent: float16 or bfloat16
    residual: torch.Tensor | None  # 1-D bf16, like the flat gradient and on its device; None: no error feedback
    scale: float  # the fp32 factor by which the device multiplies the gradient
    step: int  # the parameter's step, from 1


def inverse_of(scale: float) -> float:
    """Return 1 / scale in fp32; 0 if `scale` or its inverse is not a finite nonzero number."""
    if scale == 1.0:  # the usual one, without NumPy's switch of the mode, which takes microseconds
        return 1.0
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / np.float32(scale)
    return float(inverse) if np.isfinite(inverse) else 0.0


@dataclass
class Part:
    """One parameter's elements in one tile. The tensors are 1-D, contiguous and on one device."""

    topk: TopK
    grad: torch.Tensor
    residual: torch.Tensor | None
    first: int  # in the parameter
    tile_first: int
    stream: Any = None  # that uses the tensors, if they are on an accelerator

    @property
    def updates_residual(self) -> bool:
        return self.residual is not None and self.topk.ratio < 1

    def on_host(self) -> Part:
        """Return the part in host memory: itself, or a copy."""
        with on(self.stream):
            residual = None if self.residual is None else self.residual.cpu()
            return replace(self, grad=self.grad.cpu(), residual=residual)

    def put_residual(self, residual: torch.Tensor) -> None:
        """Set the residual. No copy is made if it is the same tensor."""
        assert self.residual is not None
        if residual is not self.residual:
            with on(self.stream):
                self.residual.copy_(residual)


Tiles = dict[int, tuple[int, list[Part]]]  # by tile: the number of its elements, and its parts in order


def table_of(parts: Sequence[Part]) -> np.ndarray[Any, Any]:
    """Return parts as the engine and the kernels take them, dtype TOPK_PART."""
    rows = [
        (
            part.grad.data_ptr(),
            0 if part.residual is None else part.residual.data_ptr(),
            len(part.grad),
            topk_count(part.topk.ratio, len(part.grad)),
            part.tile_first,
            DTYPE_CODES[part.grad.dtype],
            DTYPE_CODES[part.topk.dtype],
            part.topk.scale,
            (part.first + part.topk.step * 0x9E3779B9) % (1 << 32),  # as the engine does: see native/src/topk.cpp
        )
        for part in parts
    ]
    return np.array(rows, TOPK_PART)


class HostSelection:
    """The entries of some tiles, selected on the calling thread. Gradients on an accelerator are copied to the host.

    `rows`: by tile its entries, with their number at the end.
    """

    def __init__(self, tiles: Tiles) -> None:
        self.rows: dict[int, torch.Tensor] = {}
        self._places = {  # without the gradients, whose memory may be free before the step is complete
            tile: (elems, [(part.first, part.tile_first, len(part.grad)) for part in parts])
            for tile, (elems, parts) in tiles.items()
        }
        self._to_feed_back: list[tuple[list[Part], torch.Tensor]] = []
        for tile, (elems, parts) in tiles.items():
            on_host = [part.on_host() for part in parts]
            self.rows[tile] = row = topk_entries(table_of(on_host), elems)
            if owing := [part for part in parts if part.updates_residual]:
                self._to_feed_back.append((owing, row))

    def spread(self, to: torch.Tensor) -> None:
        """Write the values of all entries, dense, with zeros for the rest.

        `to`: int16, as long as the parameter to which all parts belong. Copied to it on the current stream.
        """
        for tile, (elems, places) in self._places.items():
            values = _dense(self.rows[tile], elems)
            for first, tile_first, n in places:
                to[first : first + n].copy_(values[tile_first : tile_first + n])

    def feed_back(self) -> None:
        """Add what the step did not send to the residuals. Copies gradients once more, as keeping them takes memory."""
        for parts, row in self._to_feed_back:
            on_host = [part.on_host() for part in parts]
            topk_feed_back(table_of(on_host), row)
            for part, copy in zip(parts, on_host, strict=True):
                assert copy.residual is not None
                part.put_residual(copy.residual)


def _dense(row: torch.Tensor, elems: int) -> torch.Tensor:
    """Return the values of a tile's entries (native/include/csd_kernel.h) in 16 bits, with zeros for the rest."""
    words, values, at = row.numpy().view(np.uint32), np.zeros(elems, np.uint16), 0
    for first in range(0, elems, ELEMS_PER_BLOCK):
        entries = words[at + 1 : at + 1 + int(words[at])]
        values[first : first + ELEMS_PER_BLOCK][entries & 0xFFFF] = entries >> 16
        at += -(-(1 + len(entries)) // ENTRY_LANES) * ENTRY_LANES
    return torch.from_numpy(values.view(np.int16))
