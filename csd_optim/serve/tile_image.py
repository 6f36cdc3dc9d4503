"""Where gradients and parameters lie in the images of a tile, and in its frames.

An image has 4 bytes per element of the tile; a piece is packed in its own dtype at the place of its first element. In a
frame there are only the pieces, in the order of the tile, with nothing between them: the dense gradients, then the
parameters that the owner reads, then the Top-K entries.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ..bindings import DTYPE_CODES

ITEMSIZE = {code: dtype.itemsize for dtype, code in DTYPE_CODES.items()}


def view(address: int, nbytes: int) -> memoryview:
    """Return the memory at an address, which the caller keeps alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") if nbytes else memoryview(b"")


def _pieces(
    pieces: np.ndarray[Any, Any], table: np.ndarray[Any, Any], taken: np.ndarray[Any, Any], dtype: str, base: int
) -> list[memoryview]:
    """Return the pieces in an image at `base` of the rows in a mask."""
    rows = pieces["param"]
    here = pieces[taken[rows]]
    sizes = [ITEMSIZE[code] for code in table[dtype][here["param"]].tolist()]
    places = zip(here["tile_first"].tolist(), here["elems"].tolist(), sizes, strict=True)
    return [view(base + 4 * first, n * size) for first, n, size in places]


def outgoing(pieces: np.ndarray[Any, Any], table: np.ndarray[Any, Any], images: tuple[int, int]) -> list[memoryview]:
    """Return the parts of a tile's images that go to the owner. `images`: of its gradients and parameters.

    `pieces`: of the tile; `table`: of the step, dtype PARAM.
    """
    has_grad = table["grad"] != 0
    grads = _pieces(pieces, table, has_grad & (table["topk"] == 0), "grad_dtype", images[0])
    return grads + _pieces(pieces, table, has_grad & (table["in_image"] != 0), "param_dtype", images[1])


def returning(pieces: np.ndarray[Any, Any], table: np.ndarray[Any, Any], image: int) -> list[memoryview]:
    """Return the parts of a tile's image of parameters that come back from the owner."""
    return _pieces(pieces, table, table["grad"] != 0, "param_dtype", image)


def most_words(pieces: np.ndarray[Any, Any], table: np.ndarray[Any, Any]) -> int:
    """Return the most words (32 bits) that the Top-K entries of a tile may have.

    A piece has a word for each of its elements that is sent, one for each of its blocks, and a few for its size: see
    csd_kernel.h.
    """
    rows = pieces["param"]
    here = pieces[(table["grad"][rows] != 0) & (table["topk"][rows] > 0)]
    return int(2 * here["elems"].sum()) + 64 * len(here) + 64 if len(here) else 0
