"""How many tiles each of several unequal devices is to have, so that a step is through as early as can be.

A device takes so long for a tile by itself. Besides, the host's update threads take so long for it, and so does the
link to an accelerator, which is time that all devices share. A step takes as long as the busiest of them all: each
device, the host, and the link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """What may have tiles. Seconds are those of one tile."""

    seconds: float  # of the device by itself; 0: it waits for nothing but the host
    host: float = 0.0  # of all update threads together; 0: the device updates by itself
    room: int = 1 << 62  # so many tiles
    link: float = 0.0  # of the link to an accelerator, the same for all that use it; 0: the tile does not cross it
    saved: float = 0.0  # of a step: what is still in memory need not be read, which is at most half of what moves

    def takes(self, tiles: int) -> float:
        """Seconds that the device is busy with so many tiles."""
        return max(tiles * self.seconds - self.saved, tiles * self.seconds / 2)

    def within(self, seconds: float) -> int:
        """So many tiles it can have, for a step that takes no longer."""
        if not self.seconds:
            return self.room
        # A little more than is asked for: a number of tiles that just fits must not be lost to rounding.
        most = min((seconds + self.saved) / self.seconds, 2 * seconds / self.seconds) * (1 + 1e-12)
        return self.room if most >= self.room else math.floor(most)


def step_seconds(tiles: Sequence[int], candidates: Sequence[Candidate]) -> float:
    """Of a step in which each has so many tiles."""
    host = sum(n * c.host for n, c in zip(tiles, candidates, strict=True))
    link = sum(n * c.link for n, c in zip(tiles, candidates, strict=True))
    return max(host, link, *(c.takes(n) for n, c in zip(tiles, candidates, strict=True)))


def place(n: int, candidates: Sequence[Candidate]) -> list[int] | None:
    """The tiles of each, `n` in all, with the least step_seconds(); None: there is no room for so many."""
    if sum(c.room for c in candidates) < n:
        return None
    # In so many seconds a device can have so many tiles; of what the host has time for, there are most if those that
    # cost it least go first; the link only limits how many cross it in all. So the least time in which all `n` can be
    # had is found by halving.
    cheapest = sorted(range(len(candidates)), key=lambda d: candidates[d].host)

    def possible(seconds: float) -> list[int]:
        tiles, host, link = [0] * len(candidates), seconds * (1 + 1e-12), seconds * (1 + 1e-12)
        for d in cheapest:
            c = candidates[d]
            most = min(c.within(seconds), n - sum(tiles))
            if c.host:
                most = min(most, math.floor(host / c.host))
            if c.link:
                most = min(most, math.floor(link / c.link))
            tiles[d] = most
            host -= most * c.host
            link -= most * c.link
        return tiles

    too_short, enough = 0.0, 1e-9
    while sum(possible(enough)) < n:
        too_short, enough = enough, 2 * enough
    while enough - too_short > 1e-9 * enough:
        middle = (too_short + enough) / 2
        if sum(possible(middle)) < n:
            too_short = middle
        else:
            enough = middle
    return possible(enough)
