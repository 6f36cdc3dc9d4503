"""Writes the files of a version: blocks of changed elements, each in the smallest of three forms; and whole tensors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CSDOSError
from ..files import sha256_of, write
from ..replica.blocks import ALIGN, BITMAP, BLOCK, DENSE, HEADER, MAGIC, ROW, SPARSE, header_of
from ..replica.versions import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

Array = np.ndarray[Any, Any]


def form_of(count: int, elems: int) -> int:
    """Return the smallest form of a block with `count` changed elements; of equally small ones, the first."""
    sizes = {SPARSE: 4 * count, BITMAP: -(-elems // 64) * 8 + 2 * count, DENSE: 2 * elems}
    return min(sizes, key=lambda kind: (sizes[kind], kind))


class FileWriter:
    """A new file of a version. Raises CSDOSError."""

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        self.nbytes: int = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, data: Array | bytes) -> None:
        """Append."""
        view = data if isinstance(data, bytes) else data.view(np.uint8).data
        write(self._fd, view, self.nbytes)
        self.nbytes += len(view)

    def finish(self, slices: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
        """Flush to the disk; return the file's entry in the manifest."""
        os.fsync(self._fd)
        nbytes, sha256 = sha256_of(self._fd)
        if nbytes != self.nbytes:
            raise CSDOSError(errno.EIO, f"{self.path} has {nbytes} bytes, and {self.nbytes} were written")
        entry = {"name": self.path.name, "bytes": nbytes, "sha256": sha256}
        return {**entry, "slices": [[*s] for s in slices]} if slices else entry

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        os.close(self._fd)


class DeltaWriter(FileWriter):
    """A file of changed elements. Blocks are added in any order."""

    def __init__(self, path: Path, step: int) -> None:
        super().__init__(path)
        self._step = step
        self._rows: list[Array] = []
        self.write(bytes(HEADER.size))

    def add(self, slice: int, first: int, elems: int, kind: int, count: int, payload: Array | bytes) -> None:
        """Append an encoded block."""
        self._rows.append(np.array([(slice, count, first, elems, kind, self.nbytes)], ROW))
        self.write(payload)
        self.write(bytes(-self.nbytes % ALIGN))

    def add_encoded(self, slices: Array, blocks: Array, payload: Array) -> None:
        """Append blocks (BLOCK of bindings.py) with their payloads."""
        rows = np.zeros(len(blocks), ROW)
        rows["slice"], rows["payload"] = slices, blocks["payload"] + self.nbytes
        for name in ("count", "first", "elems", "kind"):
            rows[name] = blocks[name]
        self._rows.append(rows)
        self.write(payload)

    def add_whole(self, slice: int, first: int, values: Array) -> None:
        """Append elements from `first` (a multiple of BLOCK) on, all as changed."""
        for i in range(0, len(values), BLOCK):
            some = np.ascontiguousarray(values[i : i + BLOCK])
            self.add(slice, first + i, len(some), DENSE, len(some), some)

    def finish(self, slices: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
        table = self.nbytes
        rows = np.concatenate([np.zeros(0, ROW), *self._rows])
        self.write(rows[np.lexsort((rows["first"], rows["slice"]))].tobytes())
        write(self._fd, HEADER.pack(MAGIC, len(rows), 0, table, self._step), 0)
        return super().finish(slices)


def write_tensors(
    path: Path, tensors: Sequence[Tensor], values: Iterable[Array], slices: Sequence[Sequence[int]] = ()
) -> dict[str, Any]:
    """Write tensors as safetensors. Returns the file's entry in the manifest.

    `values`: of all tensors in order, in parts of any size. `slices`: if `tensors` are rows of the model's tensors:
    (index, first element, number of elements) of each.
    """
    with FileWriter(path) as file:
        file.write(header_of(tensors, {}))
        for part in values:
            file.write(part)
        return file.finish(slices)
