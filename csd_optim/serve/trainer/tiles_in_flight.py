"""The tiles of one step at a trainer: which tiles may be sent to the owner, were sent, or have come back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import CSDError, CSDRuntimeError


class TilesInFlight:
    """Guarded by `changed`, which is notified when tiles come back, and at the end.

    Available tiles are sent in the order of the step, but only if they are among the first `window` tiles that have not
    come back. So the owner has a buffer for each tile sent, and devices, which take tiles in this order, never wait for
    a tile without a buffer, whatever the order in which gradients become final. Devices may also take tiles as pushed
    (csd_order): then tiles are sent in that order, at most `window` at a time.
    """

    def __init__(
        self,
        begin: int,
        tiles: Sequence[int],
        *,
        as_pushed: bool,
        window: int,
        changed: threading.Condition,
        may_leave: Sequence[threading.Condition],
    ) -> None:
        """`begin`: number of the BEGIN.

        `tiles`: all with gradients, in the order of the step, or in any order if `as_pushed`.

        `may_leave`: for each stream a condition with the lock of `changed`, notified when a tile may leave.
        """
        self.begin: int = begin
        self._may_leave = may_leave
        self.changed: threading.Condition = changed
        self.frames: int = 0  # frames sent
        self._tiles, self._window, self._as_pushed = tiles, window, as_pushed
        self._place = {tile: i for i, tile in enumerate(tiles)}
        self._first = 0  # the first place whose tile has not come back
        self._waiting: dict[int, int] = {}  # by place: pushed tiles that were not sent yet
        self._left: set[int] = set()  # tiles that were sent, or are being sent
        self._back: set[int] = set()
        self._to_pull: list[int] = []  # tiles that have come back, in this order
        self._returning: dict[int, None] = {}  # tiles that have come back, or have begun to
        self._leaving: set[int] = set()  # tiles being sent
        self._too_early: set[int] = set()  # tiles that came back before they were sent, which no honest owner does
        self._pulled = 0
        self._in_transfer = 0  # frames being sent or received
        self._failure: CSDError | None = None
        self._over = False

    # ---- the program's side --------------------------------------------------------

    def travels(self, tile: int) -> bool:
        """Return whether the tile has gradients, so that it is sent and comes back."""
        return tile in self._place

    def push(self, tile: int) -> None:
        """Let a tile be sent as soon as possible. Does not wait. Raises what a step raises."""
        with self.changed:
            self._check()
            place = len(self._waiting) + len(self._left) if self._as_pushed else self._place[tile]
            if tile in self._left or place in self._waiting:
                raise CSDRuntimeError(f"tile {tile} was pushed twice")
            self._waiting[place] = tile
            self._may_leave[tile % len(self._may_leave)].notify_all()

    def pull(self) -> int:
        """Wait until another tile has come back, and return it. Raises what a step raises."""
        with self.changed:
            self.changed.wait_for(lambda: self.would_pull)
            self._check()
            self._pulled += 1
            return self._to_pull[self._pulled - 1]

    @property
    def would_pull(self) -> bool:
        """Whether pull() would not wait. Remains true until it is called."""
        return self._pulled < len(self._to_pull) or self._failure is not None or self._over

    def are_back(self, tiles: np.ndarray[Any, Any], *, wait: bool) -> bool:
        """Return whether all travelling tiles among `tiles` have come back. `wait`: block until then."""
        with self.changed:
            wanted = {tile for tile in tiles.tolist() if tile in self._place}
            if wait:
                self.changed.wait_for(lambda: wanted <= self._back or self._failure or self._over)
            self._check()
            return wanted <= self._back

    @property
    def all_tiles(self) -> np.ndarray[Any, Any]:
        """All travelling tiles: uint32."""
        return np.array(self._tiles, np.uint32)

    @property
    def began_to_return(self) -> list[int]:
        """The tiles whose parameters in memory may be new, at least in part."""
        return [*self._returning]

    def _check(self) -> None:
        if self._failure:
            raise self._failure
        if self._over:
            raise CSDRuntimeError("no step is under way")

    # ---- the connections' side -----------------------------------------------------

    def next_to_leave(self, stream: int) -> int | None:
        """Return the first tile that this stream may send now, and note that it is sent; None if there is none."""
        if self._failure or self._over:
            return None
        places = (place for place, tile in self._waiting.items() if tile % len(self._may_leave) == stream)
        place = min(places, default=None)
        if place is None or place >= self._window + (len(self._back) if self._as_pushed else self._first):
            return None
        tile = self._waiting.pop(place)
        self._left.add(tile)
        self._leaving.add(tile)
        self._in_transfer += 1
        return tile

    def note_sent(self, tile: int) -> None:
        with self.changed:
            self.frames += 1
            self._in_transfer -= 1
            self._leaving.discard(tile)
            if tile in self._too_early:
                self._note_usable(tile)
            if self._over:
                self.changed.notify_all()

    def begin_return(self, tile: int) -> bool:
        """Return whether this tile's parameters are awaited; if so, note that they are being received."""
        with self.changed:
            if self._over or self._failure or tile not in self._left or tile in self._returning:
                return False
            self._in_transfer += 1
            self._returning[tile] = None
            return True

    def note_back(self, tile: int) -> None:
        """Note that a tile's parameters have arrived.

        A tile counts as back once its gradients were sent completely, too.
        """
        with self.changed:
            self._in_transfer -= 1
            if tile in self._leaving:
                self._too_early.add(tile)
            else:
                self._note_usable(tile)
            if self._over:
                self.changed.notify_all()

    def _note_usable(self, tile: int) -> None:
        self._back.add(tile)
        self._to_pull.append(tile)
        while self._first < len(self._tiles) and self._tiles[self._first] in self._back:
            self._first += 1
        self.changed.notify_all()
        for condition in self._may_leave if self._waiting else ():  # it was outside the window
            condition.notify_all()

    def abort_transfer(self) -> None:
        """Note that the transfer of a frame was cut off with the connection."""
        with self.changed:
            self._in_transfer -= 1
            self.changed.notify_all()

    def fail(self, failure: CSDError) -> None:
        """Let all waits for tiles raise `failure`."""
        with self.changed:
            self._failure = self._failure or failure
            self.changed.notify_all()

    def stop(self) -> None:
        """Stop sending tiles, and return when no frame is being transferred, so that memory may be reused.

        Connections time out, so this does not wait forever.
        """
        with self.changed:
            self._over = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._in_transfer)
