"""Reads a version: the changed elements of each tensor, or all elements, from all files of the version."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..errors import CSDOSError, CSDStoreError
from .blocks import DeltaFile, TensorFile
from .versions import Tensor, Version

Array = np.ndarray[Any, Any]
Files = list[DeltaFile | TensorFile]
Result = TypeVar("Result")
TRIES = 5  # how often to read a folder again if versions are removed meanwhile


def retried(directory: Path, read: Callable[[], Result]) -> Result:
    """Return read(). Calls it again if a version was removed meanwhile, as there are newer ones then."""
    for tries in range(TRIES):
        try:
            return read()
        except CSDOSError as e:
            if e.errno != errno.ENOENT or tries == TRIES - 1 or not any(directory.glob("v*")):
                raise
    raise AssertionError


@contextlib.contextmanager
def opened(version: Version) -> Iterator[Files]:
    """Open and verify all files of a version. Once this yields, nothing can be missing."""
    with contextlib.ExitStack() as stack:
        files: Files = []
        for file in version.files:
            files.append((TensorFile if version.is_full else DeltaFile)(file))
            stack.callback(files[-1].close)
        yield files


def changes(version: Version, files: Files, index: int) -> Iterator[tuple[Array, Array]]:
    """Yield the changed elements of the tensor with this index in a version: indices (int64) and values (uint16)."""
    for file in files:
        assert isinstance(file, DeltaFile)
        for slice, (tensor, _, _) in enumerate(file.slices):
            if tensor == index:
                yield from file.changes(slice)


def whole(version: Version, files: Files, tensor: Tensor) -> Iterator[tuple[int, Array]]:
    """Yield the values of a tensor of a full version, in parts, each with the index of its first element."""
    index = index_of(version, tensor)
    for file in files:
        assert isinstance(file, TensorFile)
        if not file.slices:
            yield from file.values(tensor)
            return
        for of, first, n in file.slices:
            if of == index:
                yield from file.rows(tensor, first, n)


def index_of(version: Version, tensor: Tensor) -> int:
    """Return the index in a version of a later version's tensor. Raises CSDStoreError if it is missing."""
    for index, other in enumerate(version.tensors):
        if (other.name, other.dtype, other.shape) == (tensor.name, tensor.dtype, tensor.shape):
            return index
    raise CSDStoreError(f"{version.path} lacks {tensor.name}, which its successor has")


def check_result(version: Version, tensor: Tensor, found: int) -> None:
    """Raise CSDStoreError if `found` is not the tensor's checksum in the version."""
    if found % (1 << 32) != tensor.checksum:
        raise CSDStoreError(
            f"{tensor.name} differs from that of version {version.number}: it was changed here, or its version before "
            "was another one. The next call begins with a full version"
        )
