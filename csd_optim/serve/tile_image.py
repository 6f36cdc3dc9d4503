"""The layout of gradients and parameters in the images and frames of a tile.

An image has 4 bytes per element of the tile; a piece is packed in its own dtype at the place of its first element. A
frame has only the pieces, in the order of the tile, without gaps: the dense gradients, then the parameters that the
owner reads, then the Top-K entries.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..bindings import DTYPE_CODES

ITEMSIZES = np.zeros(1 + max(DTYPE_CODES.values()), np.int64)  # by code of a dtype
for _dtype, _code in DTYPE_CODES.items():
    ITEMSIZES[_code] = _dtype.itemsize


def view(address: int, nbytes: int) -> memoryview:
    """Return a view of the memory at an address. The caller keeps the memory alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") if nbytes else memoryview(b"")


def places(
    pieces: np.ndarray[Any, Any],
    images: tuple[int, int],
    in_place: tuple[Sequence[int], Sequence[int]] | None = None,
) -> tuple[list[int], list[int]]:
    """Return the addresses of the gradients and of the parameters of a tile's pieces. See bindings.Push."""
    offsets = [4 * first for first in pieces["tile_first"].tolist()]
    in_images = [[image + offset for offset in offsets] for image in images]
    if in_place is None:
        return in_images[0], in_images[1]
    grads, params = ([a or b for a, b in zip(*both, strict=True)] for both in zip(in_place, in_images, strict=True))
    return grads, params


class FrameLayout:
    """Which pieces are in the frames of one step. Lists, as most tiles have few pieces, for which NumPy takes longer.

    Arguments of methods: `pieces` of a tile, dtype PIECE; `grads` and `params`: the addresses of the pieces.
    """

    def __init__(self, table: np.ndarray[Any, Any]) -> None:
        """`table`: of the step, dtype PARAM."""
        self._has_grad: list[bool] = (table["grad"] != 0).tolist()
        self._has_topk: list[bool] = (table["topk"] != 0).tolist()
        self._is_read: list[bool] = (table["in_image"] != 0).tolist()  # the owner reads the parameter
        self._grad_size: list[int] = ITEMSIZES[table["grad_dtype"]].tolist()
        self._param_size: list[int] = ITEMSIZES[table["param_dtype"]].tolist()

    def drop(self, rows: Sequence[int]) -> None:
        """Note that these rows of the table have no gradient after all."""
        for row in rows:
            self._has_grad[row] = False

    def outgoing(self, pieces: np.ndarray[Any, Any], grads: Sequence[int], params: Sequence[int]) -> list[memoryview]:
        """Return the parts of a tile that go to the owner."""
        dense, read = [], []
        for row, n, grad, param in zip(pieces["param"].tolist(), pieces["elems"].tolist(), grads, params, strict=True):
            if self._has_grad[row] and not self._has_topk[row]:
                dense.append(view(grad, n * self._grad_size[row]))
            if self._has_grad[row] and self._is_read[row]:
                read.append(view(param, n * self._param_size[row]))
        return dense + read

    def returning(self, pieces: np.ndarray[Any, Any], params: Sequence[int]) -> list[memoryview]:
        """Return the parts of a tile that come back from the owner."""
        rows = zip(pieces["param"].tolist(), pieces["elems"].tolist(), params, strict=True)
        return [view(at, n * self._param_size[row]) for row, n, at in rows if self._has_grad[row]]

    def most_words(self, pieces: np.ndarray[Any, Any]) -> int:
        """Return the maximum number of words (32 bits) of a tile's Top-K entries.

        A piece has a word for each element sent, a word for each block, and a few for its size: see csd_kernel.h.
        """
        rows = zip(pieces["param"].tolist(), pieces["elems"].tolist(), strict=True)
        here = [n for row, n in rows if self._has_grad[row] and self._has_topk[row]]
        return 2 * sum(here) + 64 * len(here) + 64 if here else 0
