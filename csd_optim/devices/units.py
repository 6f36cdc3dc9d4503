"""Parses sizes, rates and durations as people write them."""

from __future__ import annotations

import re

from ..errors import CSDValueError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6}


def parse_bytes(text: str) -> int:
    """Parse `4096`, `2MiB`, `1.5 GB` into bytes. Raises CSDValueError."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    try:
        assert match is not None
        return int(float(match[1]) * _UNITS[match[2].upper()])
    except (AssertionError, KeyError, ValueError):
        raise CSDValueError(f"Invalid size: {text!r}; write for example 4096, 2MiB or 1GB") from None


def parse_rate(text: str, unit: str = "B") -> float:
    """Parse `2.9GB/s`, `800MiB/s` into bytes per second; with `unit` "", `240M/s` into 240e6. Raises CSDValueError."""
    match = re.fullmatch(rf"\s*([0-9.]+)\s*([KMGT]i?)?{unit}/s\s*", text, re.I)
    try:
        assert match is not None
        return float(match[1]) * _UNITS[f"{match[2] or ''}B".upper()]
    except (AssertionError, ValueError):
        raise CSDValueError(f"Invalid rate: {text!r}; write for example 1.5G{unit}/s") from None


def parse_seconds(text: str) -> float:
    """Parse `100us`, `1.5 ms`, `2s` into seconds. Raises CSDValueError."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*(s|ms|us)\s*", text)
    try:
        assert match is not None
        return float(match[1]) / _PER_SECOND[match[2]]
    except (AssertionError, ValueError):
        raise CSDValueError(f"Invalid duration: {text!r}; write for example 100us") from None
