"""Distributes tiles among unequal devices so that a step takes the least time.

Each tile keeps its device busy for some time. It may also keep the host's update threads and the link to an accelerator
busy, which all devices share. A step takes as long as the busiest of them all: each device, the host, and the link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A device that may get tiles. Times are seconds per tile, except `saved`."""

    seconds: float  # that the device itself is busy; 0: it only waits for the host
    host: float = 0.0  # that all update threads together are busy; 0: the device updates tiles itself
    room: int = 1 << 62  # number of tiles that fit
    link: float = 0.0  # that the link to an accelerator is busy, the same for all its users; 0: it does not cross it
    saved: float = 0.0  # saved per step by cached states, which need not be read; at most half of all traffic is reads

    def busy_seconds(self, tiles: int) -> float:
        """Return the seconds that the device itself is busy with `tiles` tiles."""
        return max(tiles * self.seconds - self.saved, tiles * self.seconds / 2)

    def max_tiles(self, seconds: float) -> int:
        """Return how many tiles the device itself can handle in a step of `seconds`."""
        if not self.seconds:
            return self.room
        # The factor keeps rounding from losing a number of tiles that fits exactly.
        most = min((seconds + self.saved) / self.seconds, 2 * seconds / self.seconds) * (1 + 1e-12)
        return self.room if most >= self.room else math.floor(most)


def step_seconds(tiles: Sequence[int], candidates: Sequence[Candidate]) -> float:
    """Return the time of a step in which each candidate has the given number of tiles."""
    host = sum(n * c.host for n, c in zip(tiles, candidates, strict=True))
    link = sum(n * c.link for n, c in zip(tiles, candidates, strict=True))
    return max(host, link, *(c.busy_seconds(n) for n, c in zip(tiles, candidates, strict=True)))


def place(n: int, candidates: Sequence[Candidate]) -> list[int] | None:
    """Return how many of `n` tiles each candidate gets for the least step_seconds(); None if room is short."""
    if sum(c.room for c in candidates) < n:
        return None
    # For a given step time, possible() finds the most tiles: each device takes what it can handle, and devices whose
    # tiles cost the host least go first; the link only limits the number of tiles that cross it. A bisection then finds
    # the least time in which all `n` tiles are possible.
    cheapest = sorted(range(len(candidates)), key=lambda d: candidates[d].host)

    def possible(seconds: float) -> list[int]:
        tiles, host, link = [0] * len(candidates), seconds * (1 + 1e-12), seconds * (1 + 1e-12)
        for d in cheapest:
            c = candidates[d]
            most = min(c.max_tiles(seconds), n - sum(tiles))
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
