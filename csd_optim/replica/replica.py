"""Replica: follows the versions in a folder, as an inference process does beside the training that publishes them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import CSDOSError, CSDStoreError
from .blocks import DeltaFile, TensorFile, change_of_checksum, checksum
from .versions import Tensor, Version, directory_of, read_version, way_to_newest

Array = np.ndarray[Any, Any]
TRIES = 5  # how often a folder is read again from which versions are removed meanwhile


class Target(Protocol):
    """What has the values of a replica: a model, or a dict of arrays."""

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Raise CSDValueError unless it has just these tensors."""

    def exchange(self, tensor: Tensor, indices: Array, values: Array) -> Array:
        """Set elements (int64 indices, uint16 values) of a tensor, and return what they were."""

    def set(self, tensor: Tensor, first: int, values: Array) -> None:
        """Set the elements from `first` on."""

    def read(self, tensor: Tensor, first: int, n: int) -> Array:
        """Return `n` elements from `first` on, uint16."""


class Arrays(Target):
    """A dict of flat uint16 arrays, which gets those that it lacks: for programs without torch."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        self.arrays: dict[str, Array] = arrays

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        sizes = {t.name: t.numel for t in tensors}
        if sizes != {name: len(array) for name, array in self.arrays.items()}:
            self.arrays.clear()
            self.arrays.update({name: np.zeros(n, np.uint16) for name, n in sizes.items()})

    def exchange(self, tensor: Tensor, indices: Array, values: Array) -> Array:
        array = self.arrays[tensor.name]
        before: Array = array[indices]
        array[indices] = values
        return before

    def set(self, tensor: Tensor, first: int, values: Array) -> None:
        self.arrays[tensor.name][first : first + len(values)] = values

    def read(self, tensor: Tensor, first: int, n: int) -> Array:
        return self.arrays[tensor.name][first : first + n]


@dataclass(frozen=True)
class Patch:
    """New values of a tensor. `indices`: flat, int64, each once; None: `values` are all. `values`: 16 bits as uint16.

    With torch: torch.from_numpy(values).view(torch.bfloat16), or float16 where `dtype` is F16.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    indices: Array | None
    values: Array


class Replica:
    """A copy of the model that a training publishes with opt.publish(), as of `version`. Needs no compiled code.

    `directory`: the folder of versions. Methods raise CSDOSError if it cannot be read or has no version yet, and
    CSDStoreError if something is damaged: then `version` is None, and the next call begins with a full version.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory: Path = Path(directory)
        self._have: Version | None = None

    @property
    def version(self) -> int | None:
        """The number of the version that the model has; None: none as a whole."""
        return self._have.number if self._have else None

    @property
    def step(self) -> int | None:
        """The step of the training of which these are the weights."""
        return self._have.step if self._have else None

    def load(self, model: Any) -> None:
        """Set the parameters of a torch module, or a dict (name → flat uint16 array), to the newest version.

        Raises CSDValueError, before anything is changed, if names, shapes or dtypes are others.
        """
        self._have = None
        self.follow(model)

    def follow(self, model: Any) -> int:
        """Apply all newer versions to the model of load(). Returns how many; 0: it has the newest one.

        Where the versions do not lead on from the one that it has, such as after a rollback of the training, this
        begins with a full version. Each result is compared with its checksum.
        """
        target = target_of(model)
        for tries in range(TRIES):
            try:
                return self._follow(target)
            except CSDOSError as e:  # a version was removed between two reads: the newer ones are there
                if e.errno != errno.ENOENT or tries == TRIES - 1 or not any(self.directory.glob("v*")):
                    raise
        raise AssertionError

    def _follow(self, target: Target) -> int:
        have = self._have
        way = way_to_newest(self.directory, have.key if have else None)
        for version in way:
            with opened(version) as files:
                target.prepare(version.tensors)
                before, self._have = self._have, None  # a mix, until all of it is applied
                apply(version, files, before, target)
            self._have = version
        return len(way)

    def verify(self, model: Any) -> None:
        """Compare all values of the model with the checksums of its version. Raises CSDStoreError."""
        if self._have is None:
            raise CSDStoreError("the model has no version as a whole: call follow()")
        target = target_of(model)
        target.prepare(self._have.tensors)
        for tensor in self._have.tensors:
            check_result(self._have, tensor, checksum(target.read(tensor, 0, tensor.numel)))

    def patches(self, since: int | None = None) -> Iterator[Patch]:
        """Yield what differs between version `since` (None: the one that this replica has) and the newest one.

        Changes nothing, and `version` stays. If that version is gone, or none is known, all tensors come whole. A
        tensor in which nothing has changed is left out. Needs memory for the changes of one tensor.
        """
        have = self._have if since is None else read_version(self.directory / directory_of(since))
        way = way_to_newest(self.directory, have.key if have else None)
        if not way:
            return
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(opened(version)) for version in way]
            for tensor in way[-1].tensors:
                if (patch := _patch(tensor, way, files)) is not None:
                    yield patch


Files = list[DeltaFile | TensorFile]


@contextlib.contextmanager
def opened(version: Version) -> Iterator[Files]:
    """Open all files of a version, and verify them: once this yields, nothing is missing."""
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


def apply(version: Version, files: Files, before: Version | None, target: Target) -> None:
    """Apply a version to what has the one before it. Raises CSDStoreError if the result is not what was published."""
    if version.is_full:
        for tensor in version.tensors:
            for first, values in whole(version, files, tensor):
                target.set(tensor, first, values)
        return
    assert before is not None
    if [(t.name, t.dtype, t.shape) for t in before.tensors] != [(t.name, t.dtype, t.shape) for t in version.tensors]:
        raise CSDStoreError(f"{version.path} has other tensors than its base")
    for index, tensor in enumerate(version.tensors):
        total = before.tensors[index].checksum
        for indices, values in changes(version, files, index):
            total += change_of_checksum(indices, target.exchange(tensor, indices, values), values)
        check_result(version, tensor, total)


def check_result(version: Version, tensor: Tensor, found: int) -> None:
    """Raise CSDStoreError if a tensor with this checksum is not that of the version."""
    if found % (1 << 32) != tensor.checksum:
        raise CSDStoreError(
            f"{tensor.name} differs from that of version {version.number}: it was changed here, or its version before "
            "was another one. The next call begins with a full version"
        )


def _patch(tensor: Tensor, way: Sequence[Version], files: Sequence[Files]) -> Patch | None:
    values: Array | None = None
    indices: list[Array] = []  # of single elements, and their values in `parts`
    parts: list[Array] = []
    for version, of_version in zip(way, files, strict=True):
        if version.is_full:
            values = np.zeros(tensor.numel, np.uint16)
            for first, some in whole(version, of_version, tensor):
                values[first : first + len(some)] = some
            continue
        for at, some in changes(version, of_version, index_of(version, tensor)):
            if values is not None:
                values[at] = some
            else:
                indices.append(at)
                parts.append(some)
    if values is None and not indices:
        return None
    if values is not None:
        return Patch(tensor.name, tensor.dtype, tensor.shape, None, values)
    every, last = np.unique(np.concatenate(indices)[::-1], return_index=True)  # of equal indices, the latest counts
    return Patch(tensor.name, tensor.dtype, tensor.shape, every, np.concatenate(parts)[::-1][last])


def index_of(version: Version, tensor: Tensor) -> int:
    """Return the index, in a version, of a tensor of a later one. Raises CSDStoreError if there is none."""
    for index, other in enumerate(version.tensors):
        if (other.name, other.dtype, other.shape) == (tensor.name, tensor.dtype, tensor.shape):
            return index
    raise CSDStoreError(f"{version.path} lacks {tensor.name}, which its successor has")


def target_of(model: Any) -> Target:
    """Return what writes to a module or a dict of arrays."""
    if isinstance(model, dict):
        return Arrays(model)
    from .module import Module  # and torch with it

    return Module(model)
