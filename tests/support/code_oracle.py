"""8-bit codes of second moments and momenta in NumPy, to compare native/include/codec.h with."""

import numpy as np

GROUP = 64
KINDS = {"float32": (np.uint32, 0), "bfloat16": (np.uint16, 7), "float16": (np.uint16, 10)}


def bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


def real(b):
    return np.asarray(b, np.uint32).view(np.float32)


def hashes(key, n):
    """Return the random bits of n elements, the first of which has this key: Wellons' lowbias32."""
    h = (np.arange(n, dtype=np.uint64) + key).astype(np.uint32)
    h = (h ^ h >> 16) * np.uint32(0x7FEB352D)
    h = (h ^ h >> 15) * np.uint32(0x846CA68B)
    return h ^ h >> 16


def by_group(values):
    """Return values in rows of one group each, with zeros behind the last one."""
    padded = np.zeros(-(-len(values) // GROUP) * GROUP, values.dtype)
    padded[: len(values)] = values
    return padded.reshape(-1, GROUP)


# ---- root: 4 bits of exponent, 4 of mantissa, below the exponent of the group ------------------------------


def decoded_roots(codes, exponents):
    """Return the roots, fp32. `exponents`: one per group."""
    scale = np.ldexp(1.0, exponents.astype(int) - 127 - 14)[:, None]
    c = codes.reshape(-1, GROUP).astype(int)
    values = np.where(c < 16, c / 16, (1 + c % 16 / 16) * 2.0 ** (c // 16 - 1)) * scale
    return np.where(c == 255, np.inf, values).reshape(-1).astype(np.float32)


def encoded_roots(roots, h=None):
    """Return codes and exponents. `h`: hashes, to round by; None: to nearest."""
    u = by_group(roots)
    largest = np.where(np.isfinite(u), u, 0).max(1)
    exponents = np.maximum(90, (bits(largest).astype(int) + 0x0FFFFF) >> 23)
    addend = 1 << 18 if h is None else by_group(h >> 13).astype(int)
    least = (exponents - 14)[:, None]
    b = bits(u).astype(int)
    e = b >> 23
    normal = b - ((least - 1) << 23)
    subnormal = ((b & 0x7FFFFF) | 0x800000) >> np.clip(least - e, 0, 31)
    codes = (np.where(e >= least, normal, subnormal) + addend) >> 19
    codes = np.maximum(codes, u != 0)  # a root above zero stays above it
    codes = np.where(np.isfinite(u), codes, 255)
    return codes.reshape(-1).astype(np.uint8), exponents.astype(np.uint8)


# ---- linear: integers, in units of a power of two that a group shares ----------------------------------------


def decoded_momenta(codes, exponents):
    """Return the momenta, fp32."""
    q = codes.reshape(-1, GROUP).view(np.int8).astype(np.float64)
    values = q * 2.0 ** (exponents.astype(int) - 126)[:, None]
    return np.where(q == -128, np.nan, values).reshape(-1).astype(np.float32)


def encoded_momenta(values, h=None):
    """Return codes and exponents. `h`: hashes, to round by; None: to nearest. `values`: none is below 2^-126."""
    m = by_group(values)
    largest = np.where(np.isfinite(m), np.abs(m), 0).max(1)
    exponents = np.clip((bits(largest).astype(int) + 0x1FFFF >> 23) - 7, 0, 247)
    addend = 1 << 18 if h is None else by_group(h >> 13).astype(int)
    units = np.abs(np.where(np.isfinite(m), m, 0)).astype(np.float64) / 2.0 ** (exponents - 126)[:, None]
    q = np.minimum((np.floor(units * 2**19).astype(int) + addend) >> 19, 127) * np.where(np.signbit(m), -1, 1)
    return np.where(np.isfinite(m), q, -128).reshape(-1).astype(np.int8).view(np.uint8), exponents.astype(np.uint8)


# ---- a 16-bit parameter and its correction: the master in 24 bits ------------------------------------------


def decoded_masters(param, correction):
    """Return the masters, fp32, of bf16 parameters (their bits)."""
    return real((param.astype(np.uint32) << 16) + (correction.astype(np.int8).astype(np.int32).astype(np.uint32) << 8))


def encoded_masters(master, h):
    """Return the bits of bf16 parameters and the corrections, rounded by the hashes. `master`: finite."""
    magnitude = ((bits(master) & 0x7FFFFFFF) + (h >> 5 & 0xFF)) >> 8
    magnitude += np.where(magnitude & 0xFF == 0x80, (h >> 3 & 2) - np.uint32(1), 0).astype(np.uint32)
    param = (magnitude + 0x80 >> 8) | (bits(master) >> 16 & 0x8000)
    return param.astype(np.uint16), (magnitude & 0xFF).astype(np.uint8)
