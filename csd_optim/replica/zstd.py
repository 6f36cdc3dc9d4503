"""Frames of Zstandard (RFC 8878): compressed if the package `zstandard` is installed, otherwise with raw blocks.

Raw blocks are the format's blocks for incompressible data, so any decoder reads such frames.
"""

from __future__ import annotations

from typing import Any

MAGIC = b"\x28\xb5\x2f\xfd"
DESCRIPTOR = 0b1100_0000  # the size of the content follows in 8 bytes; no checksum, no dictionary
WINDOW = 7 << 3  # 2^(10 + 7) bytes: the largest block
BLOCK = 1 << 17
LEVEL = 1


def frame(data: bytes) -> bytes:
    """Return a frame with this content, and its size in the header."""
    if compressor := _compressor():
        compressed: bytes = compressor.compress(data)
        return compressed
    return stored(data)


def stored(data: bytes) -> bytes:
    """Return a frame of raw blocks."""
    parts = [MAGIC, bytes([DESCRIPTOR, WINDOW]), len(data).to_bytes(8, "little")]
    for first in range(0, max(1, len(data)), BLOCK):
        part = data[first : first + BLOCK]
        is_last = first + BLOCK >= len(data)
        parts += [(len(part) << 3 | is_last).to_bytes(3, "little"), part]
    return b"".join(parts)


def _compressor() -> Any:
    try:
        import zstandard
    except ImportError:
        return None
    return zstandard.ZstdCompressor(level=LEVEL)
