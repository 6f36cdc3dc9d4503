"""The parts of a store's file that nothing is in: holes, which read as zeros, from which others are served."""

from __future__ import annotations

import threading

from .layout import round_up


class Unused:
    """Thread-safe: commits give space back in the background."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, int]] = []  # offset and size (bytes), ascending, none of which touch
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(size for _, size in self._parts)

    def add(self, offset: int, size: int) -> None:
        with self._lock:
            found: list[tuple[int, int]] = []
            for begin, room in sorted([*self._parts, (offset, size)]):
                before, end = (found[-1][0], sum(found[-1])) if found else (0, -1)
                if begin <= end:
                    found[-1] = before, max(end, begin + room) - before
                else:
                    found.append((begin, room))
            self._parts = found

    def take(self, size: int, unit: int) -> int | None:
        """Return the offset, a multiple of `unit`, of the first part of this size; None if there is none."""
        with self._lock:
            for i, (begin, room) in enumerate(self._parts):
                offset = round_up(begin, unit)
                if 0 < size <= begin + room - offset:
                    rest = [(begin, offset - begin), (offset + size, begin + room - offset - size)]
                    self._parts[i : i + 1] = [part for part in rest if part[1]]
                    return offset
        return None
