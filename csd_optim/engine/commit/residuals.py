"""The residuals of a durable engine: their places on the devices, and which residuals a commit writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...accelerator import is_on_accelerator, on, record_event, wait_for
from ...bindings import crc32c
from ...errors import CSDValueError
from ...store.file import StoreFile
from ...store.format import PAGE, RESIDUAL_BYTES, Contents, rows_with_residual
from ...store.layout import round_up
from ...store.reader import CHUNK
from ..parts import Space

Spaces = dict[int, tuple[int, int]]  # by parameter: space (0 or 1) named by a commit, and checksum of its content


class Room(NamedTuple):
    """The place of a residual: two adjacent spaces of `room` bytes, from offset `base` on, in the store of a device."""

    device: int
    base: int
    room: int


def check_residual(residual: torch.Tensor, numel: int) -> None:
    """Raise CSDValueError unless the residual of a parameter with so many elements is dense bfloat16."""
    if residual.dtype is not torch.bfloat16 or residual.shape != (numel,) or not residual.is_contiguous():
        raise CSDValueError(f"residual is {tuple(residual.shape)} {residual.dtype}, not dense ({numel},) bfloat16")


class Residuals:
    """Two spaces for each residual on the durable devices: a commit writes to the space not named by the last commit.

    A residual is not written again if it is the same tensor, with the same torch version.
    """

    def __init__(self, n_devices: int) -> None:
        self.rooms: dict[int, Room] = {}  # by parameter, even after a residual was dropped
        self.committed: Spaces = {}  # the spaces that the last commit names
        self._allocated = [0] * n_devices  # per device: bytes of one space of each room
        self.written_bytes: list[int] = [0] * n_devices  # per device, in total
        self.before_step: list[int] = [0] * n_devices  # `written_bytes` when the last step began
        self.committed_versions: dict[int, int] = {}  # by parameter: the residual's version when the last commit began

    def adopt_commit(self, recovered: Sequence[Contents]) -> None:
        """Continue from a commit, given by device."""
        for row, p in enumerate(recovered[0].manifest["params"]):
            if "residual" in p:
                self._keep_room(row, Room(**p["residual"]))
        for device, contents in enumerate(recovered):
            rows = rows_with_residual(contents.manifest, device)
            self.committed.update(zip(rows, contents.residuals.tolist(), strict=True))

    def free(self, params: Iterable[int]) -> list[Space]:
        """Forget the rooms of parameters that have left, and return the space of the rooms."""
        rooms = [self.rooms.pop(param) for param in params if param in self.rooms]
        for device, _, room in rooms:
            self._allocated[device] -= room
        return [Space(device, base, 2 * room) for device, base, room in rooms]

    def make_room(self, param: int, numel: int, stores: Sequence[StoreFile | None]) -> None:
        """Allocate a residual's room on the durable device with the fewest bytes of residuals.

        Raises CSDOSError if its disk is full.
        """
        if param not in self.rooms:
            durable = [(self._allocated[d], d, store) for d, store in enumerate(stores) if store and store.durable]
            _, device, store = min(durable, key=lambda entry: entry[:2])
            room = round_up(RESIDUAL_BYTES * numel, PAGE)
            base = store.allocate(2 * room, "residuals (4 bytes per parameter that has one)")
            self._keep_room(param, Room(device, base, room))

    def _keep_room(self, param: int, room: Room) -> None:
        self.rooms[param] = room
        self._allocated[room.device] += room.room

    def mark_replaced(self, param: int) -> None:
        """Note that the residual is a new tensor, which the next commit must write."""
        self.committed_versions.pop(param, None)

    def changed(self, residuals: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the residuals that may differ from the last commit."""
        return {param: r for param, r in residuals.items() if self.committed_versions.get(param) != r._version}

    def mark_committed(self, residuals: Mapping[int, torch.Tensor]) -> None:
        """Note that a commit, perhaps still in flight, contains the residuals' present values."""
        self.committed_versions = {param: r._version for param, r in residuals.items()}

    def bytes_on(self, device: int) -> tuple[int, int]:
        """Return the bytes written to a device: by the last step with its commit, and in total."""
        written = self.written_bytes[device]
        return written - self.before_step[device], written

    def write(
        self,
        device: int,
        store: StoreFile,
        changed: Mapping[int, torch.Tensor],
        ready_events: Mapping[torch.device, Any],
    ) -> Spaces:
        """Write the changed residuals of one device, and return their spaces.

        `ready_events`: by accelerator, an event after which the residuals there have the values to be written. May be
        called again until the commit has completed. Raises CSDOSError.
        """
        spaces = {}
        for param, residual in changed.items():
            room = self.rooms[param]
            if room.device == device:
                space = 1 - self.committed[param][0] if param in self.committed else 0
                offset = room.base + space * room.room
                spaces[param] = space, _write(store, offset, residual, ready_events.get(residual.device))
                self.written_bytes[device] += room.room
        return spaces


def _write(store: StoreFile, offset: int, residual: torch.Tensor, ready: Any) -> int:
    """Write a residual from any torch device, through a few MB of host memory; return its checksum."""
    crc = 0
    for first, n, buffer in _chunks(residual, ready):
        crc = crc32c(buffer[:n].data.cast("B"), crc)
        padded = round_up(RESIDUAL_BYTES * n, PAGE) // RESIDUAL_BYTES
        buffer[n:padded] = 0
        store.write(buffer[:padded].data.cast("B"), offset + RESIDUAL_BYTES * first)
    return crc


def _chunks(residual: torch.Tensor, ready: Any) -> Iterator[tuple[int, int, np.ndarray[Any, Any]]]:
    """Yield first element, length and buffer (int16) of each chunk; the buffer is valid until the next chunk.

    From an accelerator, the next chunk is copied meanwhile, on a separate stream that waits for the event `ready`, but
    not for the forward, which is queued on the current stream by now.
    """
    from_accelerator = is_on_accelerator(residual)
    stream = torch.Stream(residual.device) if from_accelerator else None
    if stream is not None and ready is not None:
        stream.wait_event(ready)
    buffers = [_page_aligned(pinned=from_accelerator) for _ in range(2 if from_accelerator else 1)]
    firsts = range(0, residual.numel(), len(buffers[0]))
    chunks = [residual[first : first + len(buffers[0])].view(torch.int16) for first in firsts]

    def start_copy(k: int) -> Any:
        with on(stream):
            buffers[k % len(buffers)][: len(chunks[k])].copy_(chunks[k], non_blocking=from_accelerator)
        return record_event(stream) if from_accelerator else None

    copied = start_copy(0) if chunks else None
    for k, first in enumerate(firsts):
        if from_accelerator:
            wait_for(copied)
            copied = start_copy(k + 1) if k + 1 < len(chunks) else None
        elif k:
            start_copy(k)
        yield first, len(chunks[k]), buffers[k % len(buffers)].numpy()


def _page_aligned(*, pinned: bool) -> torch.Tensor:
    """Return a buffer of CHUNK bytes, int16, aligned to a page for O_DIRECT."""
    room = torch.empty(CHUNK + PAGE, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    return room[-room.data_ptr() % PAGE :][:CHUNK].view(torch.int16)
