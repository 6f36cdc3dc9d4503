"""A folder of published versions: their manifests, and the chain from one version to another (docs/publish-format.md).

This folder needs NumPy only: an inference process reads versions without torch, and without our compiled code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CSDOSError, CSDStoreError

FORMAT = "csd_optim version 1"
MANIFEST = "manifest.json"
NAME = re.compile(r"v(\d{10,})")
DTYPES = ("BF16", "F16")


@dataclass(frozen=True)
class Tensor:
    """A tensor of a version. `checksum`: of its values in this version, see checksum() in blocks.py."""

    name: str
    dtype: str  # of DTYPES
    shape: tuple[int, ...]
    checksum: int
    aliases: tuple[str, ...] = ()  # other names of the same tensor (tied weights)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class File:
    """A file of a version. `slices`: the parts of tensors in it, as (index of the tensor, first element, elements)."""

    path: Path
    nbytes: int
    sha256: str
    slices: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Version:
    """The manifest of one version."""

    path: Path
    id: str  # SHA-256 of the manifest, which contains the id of the base
    run: str
    number: int
    step: int
    base: tuple[int, str] | None  # number and id of the base version; None for a full version
    tensors: tuple[Tensor, ...]
    files: tuple[File, ...]

    @property
    def is_full(self) -> bool:
        return self.base is None

    @property
    def key(self) -> tuple[int, str]:
        """Number and id, by which the next version names its base."""
        return self.number, self.id

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def directory_of(number: int) -> str:
    return f"v{number:010d}"


def numbers(directory: Path) -> list[int]:
    """Return the numbers of the versions in a folder, ascending. Raises CSDOSError."""
    try:
        names = os.listdir(directory)
    except OSError as e:
        raise CSDOSError(e.errno, f"cannot read the folder of versions {directory}: {e.strerror}") from e
    return sorted(int(match[1]) for name in names if (match := NAME.fullmatch(name)))


def read_version(path: Path) -> Version:
    """Read the manifest of the version in a directory. Raises CSDOSError, CSDStoreError."""
    try:
        data = (path / MANIFEST).read_bytes()
    except OSError as e:
        raise CSDOSError(e.errno, f"cannot read {path / MANIFEST}: {e.strerror}") from e
    try:
        found = json.loads(data)
        if found["format"] != FORMAT:
            raise CSDStoreError(f"{path} is no version that this program knows, but of format {found['format']!r}")
        tensors = tuple(
            Tensor(t["name"], t["dtype"], tuple(t["shape"]), t["checksum"], tuple(t.get("aliases", ())))
            for t in found["tensors"]
        )
        base = found["base"]
        version = Version(
            path,
            hashlib.sha256(data).hexdigest(),
            found["run"],
            found["number"],
            found["step"],
            base and (base["number"], base["id"]),
            tensors,
            tuple(_file(path, f) for f in found["files"]),
        )
        _check_slices(version)
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        if isinstance(e, CSDStoreError):
            raise
        raise CSDStoreError(f"{path / MANIFEST} is no manifest of a version: {type(e).__name__} {e}") from e
    if unknown := {t.dtype for t in tensors} - {*DTYPES}:
        raise CSDStoreError(f"{path} has tensors of dtype {sorted(unknown)}, which this program does not know")
    return version


def _file(path: Path, found: dict[str, Any]) -> File:
    name = found["name"]
    if Path(name).name != name:
        raise ValueError(f"{name!r} is no name of a file")
    slices = tuple((int(t), int(first), int(n)) for t, first, n in found.get("slices", ()))
    return File(path / name, found["bytes"], found["sha256"], slices)


def _check_slices(version: Version) -> None:
    """Raise ValueError unless slices are disjoint parts of tensors; in a full version of several files, all parts."""
    is_divided = version.is_full and any(file.slices for file in version.files)
    ends = [0] * len(version.tensors)
    for tensor, first, n in sorted(s for file in version.files for s in file.slices):
        if tensor < 0 or n < 0 or first < ends[tensor] or (is_divided and first > ends[tensor]):
            raise ValueError(f"slices of tensor {tensor} overlap, or leave something out")
        ends[tensor] = first + n
    if any(t.numel < end or (is_divided and end < t.numel) for t, end in zip(version.tensors, ends, strict=True)):
        raise ValueError("its slices have not the elements that the tensors have")


def way_to_newest(directory: Path, have: tuple[int, str] | None) -> list[Version]:
    """Return the versions to apply in order to get the newest; an empty list if `have` is the newest.

    `have`: number and id of the caller's version. If it is None, or no chain continues from it, the first version
    returned is full.

    Raises CSDOSError if there is no version, or some were removed meanwhile; CSDStoreError.
    """
    found = numbers(directory)
    if not found:
        raise CSDOSError(errno.ENOENT, f"no version has been published in {directory} yet")
    return way_to(directory, read_version(directory / directory_of(found[-1])), have)


def way_to(directory: Path, version: Version, have: tuple[int, str] | None) -> list[Version]:
    """As way_to_newest(), for another version of the folder."""
    if have == version.key:
        return []
    way = [version]
    while way[-1].base not in (None, have):
        number, id = way[-1].base  # type: ignore[misc]
        base = read_version(directory / directory_of(number))
        if base.id != id:
            raise CSDStoreError(
                f"{way[-1].path} is the successor of a version {number} with another manifest than {base.path}"
            )
        way.append(base)
    return way[::-1]
