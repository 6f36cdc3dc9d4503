"""How large the buckets are in which gradients and parameters travel between processes."""

from __future__ import annotations

BUCKET_BYTES = 16 << 20
LEAST_BYTES = 64 << 10  # of a bucket that could be larger
FEWEST = 32  # buckets: the first are used while the last are under way


def bucket_bytes(total: int, fewest: int = FEWEST) -> int:
    """The size of the buckets of so many bytes together: of a small model, `fewest` of them, if there is enough."""
    return min(BUCKET_BYTES, max(LEAST_BYTES, -(-total // fewest)))
