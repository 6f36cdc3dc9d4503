"""Writes one process's share of a version: a file of whole tensors or of changed elements, and its description."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CSDRuntimeError
from ..files import check_free_space
from ..replica.blocks import DENSE
from ..replica.versions import Tensor
from .encode import DeltaWriter, write_tensors
from .folder import CHANGED, WHOLE, Folder, VersionShare
from .pending import PendingVersion
from .recording import Recording
from .tracked import Tracked

Array = np.ndarray[Any, Any]


class ShareWriter:
    """Writes the shares of one process, from the tensors in `tracked` and the records of steps."""

    def __init__(self, folder: Folder, recording: Recording, tracked: Sequence[Tracked], model: str) -> None:
        """`model`: see VersionShare."""
        self._folder, self._recording, self._tracked, self._model = folder, recording, tracked, model
        self._runs = [(t.first, t.numel) for t in tracked]
        self._slices = [t.slice for t in tracked]

    def write(self, version: PendingVersion, in_step: Container[Tracked]) -> None:
        """Write the files of this process's share, then its description, and flush everything.

        `in_step`: tensors that the step updated; their memory may already hold newer values, so their records are used.
        Other tensors are read, as the program may have set them. Raises OSError, CSDTypeError.
        """
        for tracked in self._tracked:
            tracked.check()
        pending, files = self._folder.begin(version.number), []
        if not self._tracked:
            pass
        elif version.base is None:
            files.append(self._write_whole(pending / self._folder.file_of(WHOLE), in_step))
        else:
            files.append(self._write_delta(pending / self._folder.file_of(CHANGED), version.step, in_step))
        checksums = [(t.index, t.checksum) for t in self._tracked]
        place = version.run, version.number, version.step, version.base, self._folder.rank, self._folder.ranks
        self._folder.add(VersionShare(*place, self._model, checksums, files))

    def _write_whole(self, path: Path, in_step: Container[Tracked]) -> dict[str, Any]:
        check_free_space(self._folder.path, 2 * sum(t.numel for t in self._tracked))
        tensors = [rows_in(t.tensor, t.numel) for t in self._tracked]
        slices = self._slices if self._folder.ranks > 1 else ()
        return write_tensors(path, tensors, self._values(in_step), slices)

    def _values(self, in_step: Container[Tracked]) -> Iterator[Array]:
        """Yield the values of all tensors, in order: from the step's records where the step has updated them."""
        recorded = self._recorded_values()
        for number, tracked in enumerate(self._tracked):
            if tracked not in in_step:
                for _, some in tracked.take():
                    yield some
                continue
            done = 0
            while done < tracked.numel:
                at, first, values = next(recorded)
                if (at, first) != (number, done):
                    raise CSDRuntimeError(f"the step has not recorded all of {tracked.name}")
                yield values
                done += len(values)

    def _recorded_values(self) -> Iterator[tuple[int, int, Array]]:
        """Yield the blocks recorded as a whole: number of the tensor, first element, values."""
        for numbers, blocks, payload in self._recording.encoded(self._runs):
            for number, block in zip(numbers.tolist(), blocks, strict=True):
                values = payload[int(block["payload"]) :].view(np.uint16)[: int(block["elems"])]
                yield number, int(block["first"]) if block["kind"] == DENSE else -1, values

    def _write_delta(self, path: Path, step: int, in_step: Container[Tracked]) -> dict[str, Any]:
        read = {i: t for i, t in enumerate(self._tracked) if t not in in_step and t.has_changed()}
        with DeltaWriter(path, step) as file:
            for encoded in self._recording.encoded(self._runs, without=[*read]):
                file.add_encoded(*encoded)
            for number, tracked in read.items():
                tracked.whole = True  # its master may have been replaced
                for first, some in tracked.take():
                    file.add_whole(number, first, some)
            return file.finish(self._slices)


def rows_in(tensor: Tensor, numel: int) -> Tensor:
    """Return the description of `numel` elements of `tensor`: the tensor itself, or some of its rows."""
    if numel == tensor.numel:
        return tensor
    return replace(tensor, shape=(numel // math.prod(tensor.shape[1:]), *tensor.shape[1:]))
