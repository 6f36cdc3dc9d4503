"""The residuals of a durable engine: where they are on its devices, and what a commit writes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..accelerator import is_far, on, recorded, wait_for
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
        self.written_bytes: list[int] = [0] * n_devices
        self.before_step: list[int] = [0] * n_devices  # what had been written when the last step began
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

    def write(
        self, device: int, store: StoreFile, changed: Mapping[int, torch.Tensor], after: Mapping[torch.device, Any]
    ) -> Spaces:
        """Writes those of one device. `after`: events, by accelerator: by then they are as they are to be written.

        May be called again, until the commit is there. Raises CSDOSError.
        """
        spaces = {}
        for param, residual in changed.items():
            place = self.rooms[param]
            if place.device == device:
                space = 1 - self.committed[param][0] if param in self.committed else 0
                offset = place.base + space * place.room
                spaces[param] = space, _write(store, offset, residual, after.get(residual.device))
                self.written_bytes[device] += place.room
        return spaces


def _write(store: StoreFile, offset: int, residual: torch.Tensor, after: Any) -> int:
    """Through a few MB of memory, wherever the residual is; returns its checksum."""
    crc = 0
    for first, n, buffer in _chunks(residual, after):
        crc = crc32c(buffer[:n].data.cast("B"), crc)
        whole = round_up(RESIDUAL_BYTES * n, PAGE) // RESIDUAL_BYTES
        buffer[n:whole] = 0
        store.write(buffer[:whole].data.cast("B"), offset + RESIDUAL_BYTES * first)
    return crc


def _chunks(residual: torch.Tensor, after: Any) -> Iterator[tuple[int, int, np.ndarray[Any, Any]]]:
    """Where each chunk begins, how long it is, and a buffer with it (int16), until the next one is asked for.

    Of a residual on an accelerator the next chunk arrives meanwhile, on a stream of its own: not behind the forward,
    which is on its way by now, but `after` an event.
    """
    far = is_far(residual)
    stream = torch.Stream(residual.device) if far else None
    if stream is not None and after is not None:
        stream.wait_event(after)
    buffers = [_pages(pinned=far) for _ in range(2 if far else 1)]
    firsts = range(0, residual.numel(), len(buffers[0]))
    parts = [residual[first : first + len(buffers[0])].view(torch.int16) for first in firsts]

    def begin(k: int) -> Any:
        with on(stream):
            buffers[k % len(buffers)][: len(parts[k])].copy_(parts[k], non_blocking=far)
        return recorded(stream) if far else None

    arrives = begin(0) if parts else None
    for k, first in enumerate(firsts):
        if far:
            wait_for(arrives)
            arrives = begin(k + 1) if k + 1 < len(parts) else None
        elif k:
            begin(k)
        yield first, len(parts[k]), buffers[k % len(buffers)].numpy()


def _pages(*, pinned: bool) -> torch.Tensor:
    """A buffer of CHUNK bytes, int16, that begins with a page, for O_DIRECT."""
    room = torch.empty(CHUNK + PAGE, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    return room[-room.data_ptr() % PAGE :][:CHUNK].view(torch.int16)
