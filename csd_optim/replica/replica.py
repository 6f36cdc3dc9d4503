"""Replica: follows the versions in a folder, for an inference process beside the training that publishes them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import CSDOSError, CSDStoreError
from .blocks import change_of_checksum, checksum
from .patches import Patch, Patches
from .reading import Files, changes, check_result, opened, retried, whole
from .versions import Tensor, Version, directory_of, read_version, way_to, way_to_newest

Array = np.ndarray[Any, Any]


class Target(Protocol):
    """The holder of a replica's values: a model, or a dict of arrays."""

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Raise CSDValueError unless the target has exactly these tensors."""

    def exchange(self, tensor: Tensor, indices: Array, values: Array) -> Array:
        """Set elements (int64 indices, uint16 values) of a tensor, and return the old values."""

    def set(self, tensor: Tensor, first: int, values: Array) -> None:
        """Set the elements from `first` on."""

    def read(self, tensor: Tensor, first: int, n: int) -> Array:
        """Return `n` elements from `first` on, uint16."""


class Arrays(Target):
    """A dict of flat uint16 arrays, for programs without torch. prepare() adds missing arrays."""

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


class Replica:
    """A copy of the model that a training publishes with opt.publish(), as of `version`. Needs no compiled code.

    `directory`: the folder of versions. Methods raise CSDOSError if the folder is unreadable or has no version yet, and
    CSDStoreError if something is damaged: then `version` is None, and the next call begins with a full version.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory: Path = Path(directory)
        self._have: Version | None = None

    @property
    def version(self) -> int | None:
        """The number of the model's version; None if the model has no whole version."""
        return self._have.number if self._have else None

    @property
    def step(self) -> int | None:
        """The training step of the model's version, or None."""
        return self._have.step if self._have else None

    def load(self, model: Any, version: int | None = None) -> None:
        """Set the parameters of a torch module, or a dict (name → flat uint16 array), to the newest version.

        `version`: the number of an older version that is still in the folder. Raises CSDValueError, before anything is
        changed, if names, shapes or dtypes differ.
        """
        self._have = None
        if version is None:
            self.follow(model)
        else:
            wanted = read_version(self.directory / directory_of(version))
            self._apply(way_to(self.directory, wanted, None), target_of(model))

    def follow(self, model: Any) -> int:
        """Apply all newer versions to the model of load(). Returns how many; 0 if the model has the newest version.

        If the versions do not continue from the model's, as after a rollback of the training, this begins with a full
        version. Each result is compared with its checksum.
        """
        target = target_of(model)
        return retried(self.directory, lambda: self._follow(target))

    def _version_if_there(self, number: int) -> Version | None:
        try:
            return read_version(self.directory / directory_of(number))
        except CSDOSError as e:
            if e.errno != errno.ENOENT:
                raise
            return None

    def _follow(self, target: Target) -> int:
        way = way_to_newest(self.directory, self._have.key if self._have else None)
        self._apply(way, target)
        return len(way)

    def _apply(self, way: Sequence[Version], target: Target) -> None:
        for version in way:
            with opened(version) as files:
                target.prepare(version.tensors)
                before, self._have = self._have, None  # a mix until all is applied
                apply(version, files, before, target)
            self._have = version

    def verify(self, model: Any) -> None:
        """Compare all values of the model with the checksums of its version. Raises CSDStoreError."""
        if self._have is None:
            raise CSDStoreError("the model has no version as a whole: call follow()")
        target = target_of(model)
        target.prepare(self._have.tensors)
        for tensor in self._have.tensors:
            check_result(self._have, tensor, checksum(target.read(tensor, 0, tensor.numel)))

    def patches(self, since: int | None = None, *, whole_if_nan: bool = False) -> Iterator[Patch]:
        """Yield the changes from version `since` (None: this replica's version) to the newest.

        Changes nothing; `version` stays. If version `since` is gone or unknown, all tensors come whole. Unchanged
        tensors are left out. Needs memory for the changes of one tensor.

        `whole_if_nan`: a tensor comes whole if there is a NaN among its new values, as vLLM requires.
        """
        have = self._have if since is None else self._version_if_there(since)
        if way := way_to_newest(self.directory, have.key if have else None):
            with Patches(self.directory, way, whole_if_nan=whole_if_nan) as patches:
                for tensor in way[-1].tensors:
                    if (patch := patches.of(tensor)) is not None:
                        yield patch


def apply(version: Version, files: Files, before: Version | None, target: Target) -> None:
    """Apply a version to a target with the version `before`.

    Raises CSDStoreError if a checksum does not match afterwards.
    """
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


def target_of(model: Any) -> Target:
    """Return the Target for a module or a dict of arrays."""
    if isinstance(model, Arrays):
        return model
    if isinstance(model, dict):
        return Arrays(model)
    from .module import Module  # and torch with it

    return Module(model)
