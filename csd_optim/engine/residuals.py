"""The residuals of a durable engine: where they are on its devices, and what a commit writes of them."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..accelerator import is_far, on
from ..bindings import crc32c
from ..store.file import StoreFile
from ..store.format import PAGE, RESIDUAL_BYTES, Contents, rows_with_residual
from ..store.layout import round_up
from ..store.reader import CHUNK

Spaces = dict[int, tuple[int, int]]  # by parameter: the space that a commit names, and the checksum of what is in it


class Room(NamedTuple):
    """Of a residual: two spaces of `room` bytes, one after the other from `base` on, in the store of a device."""

    device: int
    base: int
    room: int


class Residuals:
    """Of the two spaces of each a commit writes the one that the commit before does not name.

    A residual that is the tensor that it was, and was not written since as torch counts it, stays where it is.
    """

    def __init__(self, n_devices: int) -> None:
        self.rooms: dict[int, Room] = {}  # by parameter: also of residuals that were dropped
        self.committed: Spaces = {}
        self._taken = [0] * n_devices  # by all their rooms
        self.written_bytes = [0] * n_devices
        self.before_step = [0] * n_devices  # what had been written when the last step began
        self._seen: dict[int, int] = {}  # versions, when the last commit began

    def adopt_commit(self, recovered: Sequence[Contents]) -> None:
        """Goes on from what the stores say, device by device."""
        for row, p in enumerate(recovered[0].manifest["params"]):
            if "residual" in p:
                self._keep_room(row, Room(**p["residual"]))
        for device, contents in enumerate(recovered):
            rows = rows_with_residual(contents.manifest, device)
            self.committed.update(zip(rows, contents.residuals.tolist(), strict=True))

    def make_room(self, param: int, numel: int, stores: Sequence[StoreFile | None]) -> None:
        """On the durable device that has least of them. Raises CSDOSError if its disk is full."""
        if param not in self.rooms:
            durable = [(self._taken[d], d, store) for d, store in enumerate(stores) if store and store.durable]
            _, device, store = min(durable, key=lambda place: place[:2])
            room = round_up(RESIDUAL_BYTES * numel, PAGE)
            base = store.allocate(2 * room, "residuals (4 bytes per parameter that has one)")
            self._keep_room(param, Room(device, base, room))

    def _keep_room(self, param: int, room: Room) -> None:
        self.rooms[param] = room
        self._taken[room.device] += room.room

    def replaced(self, param: int) -> None:
        """It is another tensor now."""
        self._seen.pop(param, None)

    def changed(self, residuals: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Those that are not known to be what the last commit has."""
        return {param: r for param, r in residuals.items() if self._seen.get(param) != r._version}

    def seen(self, residuals: Mapping[int, torch.Tensor]) -> None:
        """As they are now, a commit has them, or will."""
        self._seen = {param: r._version for param, r in residuals.items()}

    def write(self, device: int, store: StoreFile, changed: Mapping[int, torch.Tensor]) -> Spaces:
        """Writes those of one device. May be called again, until the commit is there. Raises CSDOSError."""
        spaces = {}
        for param, residual in changed.items():
            place = self.rooms[param]
            if place.device == device:
                space = 1 - self.committed[param][0] if param in self.committed else 0
                spaces[param] = space, _write(store, place.base + space * place.room, residual)
                self.written_bytes[device] += place.room
        return spaces


def _write(store: StoreFile, offset: int, residual: torch.Tensor) -> int:
    """Through a few MB of memory, wherever the residual is; returns its checksum."""
    buffer, crc = np.frombuffer(mmap.mmap(-1, CHUNK), np.int16), 0  # pages, for O_DIRECT
    with contextlib.ExitStack() as stack:
        if is_far(residual):
            # Not behind the forward, which is on its way by now: who began this commit has waited for the residuals.
            stack.enter_context(on(torch.Stream(residual.device)))
        for first in range(0, residual.numel(), len(buffer)):
            part = residual[first : first + len(buffer)].view(torch.int16).cpu().numpy()
            buffer[: len(part)] = part
            crc = crc32c(buffer[: len(part)].data.cast("B"), crc)
            whole = round_up(part.nbytes, PAGE)
            store.write(buffer[: whole // RESIDUAL_BYTES].data.cast("B"), offset + RESIDUAL_BYTES * first)
    return crc
