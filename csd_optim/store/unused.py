"""The unused parts of a store's file: holes, which read as zeros, to be allocated again."""

from __future__ import annotations

import threading
from bisect import bisect_left

from .layout import round_up


class Unused:
    """The unused parts of one file. Thread-safe, as commits give space back in the background."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, int]] = []  # (offset, size) in bytes, ascending, none adjacent
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(size for _, size in self._parts)

    def add(self, offset: int, size: int) -> None:
        with self._lock:
            first = last = bisect_left(self._parts, (offset, 0))
            end = offset + size
            if first and sum(self._parts[first - 1]) >= offset:
                first -= 1
                offset, end = self._parts[first][0], max(end, sum(self._parts[first]))
            while last < len(self._parts) and self._parts[last][0] <= end:
                end = max(end, sum(self._parts[last]))
                last += 1
            self._parts[first:last] = [(offset, end - offset)]

    def take(self, size: int, unit: int) -> int | None:
        """Take `size` bytes from the first part with enough room; return the offset, a multiple of `unit`, or None."""
        with self._lock:
            for i, (begin, room) in enumerate(self._parts):
                offset = round_up(begin, unit)
                if 0 < size <= begin + room - offset:
                    rest = [(begin, offset - begin), (offset + size, begin + room - offset - size)]
                    self._parts[i : i + 1] = [part for part in rest if part[1]]
                    return offset
        return None
