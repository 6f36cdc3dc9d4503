"""Operands whose product or quotient is just below 2^-126: processors differ in whether that is subnormal (soft.h)."""

from __future__ import annotations

import numpy as np

# The quotient is 2^-126 - 2^-150. There are no other quotients of fp32 numbers from there to 2^-126.
EDGE_DIVIDEND, EDGE_DIVISOR = (2.0**24 - 1) * 2.0**-100, 2.0**50


def edge_factors(pairs: int, seed: int = 0) -> tuple[list[float], list[float]]:
    """Return the factors, about 2^-62 and 2^-64, of products in both intervals in which processors differ.

    The first `pairs` products are from 2^-126 - 2^-150 to 2^-126 - 2^-151, which x86 flushes to zero; as many more are
    from there to 2^-126, which x86 rounds up.
    """
    a = np.random.default_rng(seed).integers(1 << 23, 1 << 24, 64 * pairs, dtype=np.int64)
    b = (1 << 47) // a
    off = (1 << 47) - a * b  # the product is 2^-126 * (1 - off / 2^47)
    intervals = (off <= 1 << 23) & (off > 1 << 22), (off < 1 << 22) & (off > 0)
    inside = np.concatenate([np.flatnonzero(interval & (b < 1 << 24))[:pairs] for interval in intervals])
    return (a[inside] * 2.0**-86).tolist(), (b[inside] * 2.0**-87).tolist()
