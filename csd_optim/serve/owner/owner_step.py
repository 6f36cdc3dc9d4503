"""A step at an owner: gradients arrive in buffers, tiles are updated, and parameters are sent back."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...bindings import PASS_2, Push
from ...engine.engine import Engine
from ...errors import CSDError
from ..messages import refuse
from ..requests import TileGradients
from ..tile_image import FrameLayout, places, view
from ..wire.connection import Connection

SENDING_SECONDS = 10.0  # time in which a sending thread puts the buffer of sent parameters back


class Buffer(NamedTuple):
    """Memory for the two images of a tile: gradients and parameters; uint8, 4 bytes per element."""

    grad: torch.Tensor
    param: torch.Tensor

    @property
    def images(self) -> tuple[int, int]:
        return self.grad.data_ptr(), self.param.data_ptr()


class Buffers:
    """The buffers of an owner, made when first needed."""

    def __init__(self, window: int) -> None:
        """`window`: the number of buffers."""
        self._window = window
        self._free: list[Buffer] = []
        self._tile_elems = 0

    def resize(self, tile_elems: int) -> None:
        """Make the buffers large enough. Not during a step. Raises MemoryError."""
        if tile_elems > self._tile_elems:
            self._free = [
                # Zeros, as trainers must not see earlier content of the owner's memory.
                Buffer(*(torch.zeros(4 * tile_elems, dtype=torch.uint8, device="cpu") for _ in range(2)))
                for _ in range(self._window)
            ]
            self._tile_elems = tile_elems

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def take(self) -> Buffer:
        """Return a free buffer. Raises CSDRankError if a trainer has sent more tiles than the window."""
        return self._free.pop() if self._free else refuse("more tiles were pushed than the window has")

    def put(self, buffer: Buffer) -> None:
        self._free.append(buffer)


class TileAtOwner(NamedTuple):
    """A tile that was pushed. `entries` keeps the Top-K entries alive."""

    tile: int
    buffer: Buffer
    entries: np.ndarray[Any, Any]


class OwnerStep:
    """One step. Frames come from several receiving threads, and leave on one thread per device."""

    def __init__(
        self,
        engine: Engine,
        begin: int,
        table: np.ndarray[Any, Any],
        tiles: np.ndarray[Any, Any],
        buffers: Buffers,
    ) -> None:
        """`begin`: number of the BEGIN. `table`: parameters, dtype PARAM. `tiles`: with second passes."""
        self.begin: int = begin
        self._engine, self._table, self._buffers = engine, table, buffers
        self._layout = FrameLayout(table)
        with_grads = engine.tiles.of_mask(table["grad"] != 0)
        # Tiles and second passes that the trainer pushes.
        self.expected: set[int] = {*tiles[np.isin(tiles & ~np.uint32(PASS_2), with_grads)].tolist()}
        self.received: int = 0  # frames
        self.failure: CSDError | None = None
        self.changed: threading.Condition = threading.Condition()
        self._pushed: list[deque[TileAtOwner]] = [deque() for _ in engine.devices.specs]  # by device
        self._in_transfer = 0  # frames being received or sent, and tiles being pushed
        self._sent = 0
        self._over = False

    # ---- gradients arrive --------------------------------------------------------------

    def receive(self, connection: Connection, message: TileGradients, nbytes: int) -> None:
        """Receive a tile's gradients, and push the tile. Raises CSDRankError if the message is wrong."""
        tile, words = message.tile, message.entries
        with self.changed:
            # The trainer may receive another tile's parameters, and push this tile, before the buffer is put back.
            self.changed.wait_for(lambda: self._buffers.any_free or self.is_over, SENDING_SECONDS)
            if self.is_over:
                buffer = None
            elif tile not in self.expected:
                refuse(f"tile {tile} is not to be pushed, or was pushed before")
            else:
                self.expected.discard(tile)
                buffer = self._buffers.take()
                self._in_transfer += 1
            self.received += 1
        if buffer is None:
            return connection.discard()
        pushed = False
        try:
            pieces = self._engine.tiles.pieces_of(tile)
            views = self._layout.outgoing(pieces, *places(pieces, buffer.images))
            size, most = sum(map(len, views)), self._layout.most_words(pieces)
            if words > most or nbytes != size + 4 * words:
                refuse(f"{nbytes} bytes and {words} words of gradients in tile {tile}")
            entries = np.empty(words, np.uint32)
            connection.fill([*views, view(entries.ctypes.data, entries.nbytes)])
            pushed = self._push(TileAtOwner(tile, buffer, entries))
        finally:
            with self.changed:
                self._in_transfer -= 1
                if not pushed:
                    self._buffers.put(buffer)
                self.changed.notify_all()

    def _push(self, at: TileAtOwner) -> bool:
        """Push a tile to the devices. Returns False if the step is over or has failed."""
        with self.changed:
            if self._over or self.failure:
                return False
            words = (at.entries.ctypes.data, len(at.entries)) if len(at.entries) else (0, 0)
            try:
                self._engine.native.push(at.tile, Push(images=at.buffer.images, entries=words))
            except CSDError as e:
                self.failure = e
                return False
            self._pushed[self._engine.tiles.device_of(at.tile)].append(at)
            return True

    def push_unsent(self, tiles: Sequence[int]) -> None:
        """Push the tiles without gradients, whose states were written: no trainer pushes these."""
        for tile in tiles:
            if tile not in self.expected:
                self._engine.native.push(tile)

    def drop(self, rows: np.ndarray[Any, Any]) -> None:
        """Leave these parameters unchanged: they get no gradient after all."""
        with self.changed:
            self._engine.native.drop_grads(rows.tolist())
            self._table["grad"][rows] = 0
            self._layout.drop(rows.tolist())

    # ---- parameters leave --------------------------------------------------------------

    def send_next(self, device: int, send: Callable[[int, int, list[memoryview]], None]) -> None:
        """Wait for the next tile of a device, and send its parameters; return at once if the step is over.

        `send` is called with the number of the BEGIN, the tile and its parameters.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._pushed[device] or self._over or self.failure)
            if self._over or self.failure or not self._pushed[device]:
                return
            at = self._pushed[device].popleft()
            self._in_transfer += 1
        try:
            self._engine.native.params_ready(np.array([at.tile], np.uint32), wait=True)
            pieces = self._engine.tiles.pieces_of(at.tile)
            _, to = places(pieces, at.buffer.images)
            send(self.begin, at.tile, self._layout.returning(pieces, to))
        except CSDError as e:
            with self.changed:
                self.failure = self.failure or e
        finally:
            with self.changed:
                self._buffers.put(at.buffer)
                self._in_transfer -= 1
                self._sent += 1
                self.changed.notify_all()

    @property
    def rows(self) -> np.ndarray[Any, Any]:
        """The parameters that the step updates."""
        return np.flatnonzero(self._table["grad"][: self._engine.tiles.n_params])

    @property
    def is_over(self) -> bool:
        return self._over or self.failure is not None

    # ---- the end -----------------------------------------------------------------------

    def keep(self, frames: int) -> None:
        """Complete the step. `frames`: the number that the trainer has sent.

        If this raises CSDError, the step is undone.
        """
        with self.changed:  # the trainer may have the last parameters before this thread notes that they were sent
            self.changed.wait_for(lambda: not self._in_transfer or self.failure)
            complete = not self.expected and frames == self.received == self._sent and not self.failure
        if not complete:
            self.undo()
            raise self.failure or refuse(f"{frames} frames were sent, and {self.received} have arrived")
        self._stop(lambda: self._engine.finish())

    def undo(self) -> None:
        """Undo the step, if under way. Raises CSDTornError if that is impossible, as on devices without slots."""
        if self._over:
            return

        def undo() -> None:
            with contextlib.suppress(CSDError):  # why it has failed
                self._engine.finish(keep=False)

        self._stop(undo)

    def _stop(self, finish: Callable[[], None]) -> None:
        with self.changed:
            self._over = True
            self.changed.notify_all()
        try:
            with self._engine.lock:
                finish()
        finally:
            with self.changed:  # connections time out, so this does not wait forever
                self.changed.wait_for(lambda: not self._in_transfer)
                for left in self._pushed:
                    for at in left:
                        self._buffers.put(at.buffer)
                    left.clear()
