"""The buckets in which gradients and parameters travel between processes: their size and content."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

ALIGN = 16  # bytes: alignment in a bucket, enough for any dtype
IN_FLIGHT = 3  # buckets: one being filled, one travelling, one being emptied
BUCKET_BYTES = 16 << 20
MIN_BUCKET_BYTES = 64 << 10  # lower bound of a bucket's size, of data that takes several
SINGLE_BUCKET_BYTES = 256 << 10  # so little data travels in one bucket: a second exchange would take longer
TARGET_BUCKETS = 32  # number of buckets to aim for, so that the first are used while the last are in flight


def bucket_bytes(total: int, target_buckets: int = TARGET_BUCKETS) -> int:
    """Return the bucket size in bytes for `total` bytes: small enough for `target_buckets`, within the limits above.

    Little data gets a single bucket, with room for alignment.
    """
    if total <= SINGLE_BUCKET_BYTES:
        return SINGLE_BUCKET_BYTES
    return min(BUCKET_BYTES, max(MIN_BUCKET_BYTES, -(-total // target_buckets)))


class Cut(NamedTuple):
    """Some rows of an item, in a bucket."""

    item: int  # number of the item
    first: int
    rows: int
    offset: int  # in the bucket, bytes


def pack(items: Iterable[tuple[int, int]], max_bytes: int, align: int = ALIGN) -> list[list[Cut]]:
    """Cut items into buckets, in order. `items`: (number of rows, bytes of a row) of each item.

    A bucket has at most `max_bytes`, or a single row. The result depends on the arguments alone.
    """
    buckets: list[list[Cut]] = []
    end = max_bytes
    for item, (rows, row_bytes) in enumerate(items):
        first = 0
        while first < rows:
            n = min((max_bytes - end) // row_bytes, rows - first)
            if n <= 0:
                buckets.append([])
                end, n = 0, min(max(1, max_bytes // row_bytes), rows - first)
            buckets[-1].append(Cut(item, first, n, end))
            first += n
            end = aligned(end + n * row_bytes, align)
    return buckets


def aligned(nbytes: int, align: int = ALIGN) -> int:
    """Return `nbytes` rounded up to the alignment in buckets."""
    return -(-nbytes // align) * align


def view_in(buffer: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return the view of a bucket's buffer (uint8, 1-D) that begins at byte `offset`, with this dtype and shape."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return buffer[offset : offset + nbytes].view(dtype).view(shape)
