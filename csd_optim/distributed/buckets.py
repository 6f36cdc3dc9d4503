"""The size of the buckets in which gradients and parameters travel between processes."""

from __future__ import annotations

BUCKET_BYTES = 16 << 20
MIN_BUCKET_BYTES = 64 << 10  # lower bound of a bucket's size, unless all data is smaller
TARGET_BUCKETS = 32  # number of buckets to aim for, so that the first are used while the last are in flight


def bucket_bytes(total: int, target_buckets: int = TARGET_BUCKETS) -> int:
    """Return the bucket size, bytes, for `total` bytes: small enough for so many buckets, within the limits above."""
    return min(BUCKET_BYTES, max(MIN_BUCKET_BYTES, -(-total // target_buckets)))
