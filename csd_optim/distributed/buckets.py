"""The size of the buckets in which gradients and parameters travel between processes."""

from __future__ import annotations

BUCKET_BYTES = 16 << 20
LEAST_BYTES = 64 << 10  # lower bound of a bucket's size, unless all data is smaller
FEWEST = 32  # number of buckets to aim for, so that the first are used while the last are in flight


def bucket_bytes(total: int, fewest: int = FEWEST) -> int:
    """Return the bucket size, bytes, for `total` bytes: small enough for `fewest` buckets, within the limits above."""
    return min(BUCKET_BYTES, max(LEAST_BYTES, -(-total // fewest)))
