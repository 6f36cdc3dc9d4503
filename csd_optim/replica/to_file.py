"""A safetensors file that follows the versions in a folder. It is replaced as a whole, so readers never see a mix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CSDStoreError
from ..files import appears
from .blocks import checksum, header_of, read_values
from .converted import Converted, metadata_of
from .reading import Files, changes, check_result, index_of, opened, retried, whole
from .versions import Tensor, Version, way_to_newest

Array = np.ndarray[Any, Any]


def follow(directory: Path, out: Path) -> Version | None:
    """Bring `out`, which need not exist, to the newest version of a folder. Returns the version; None if `out` has it.

    The metadata of `out` name its version. Memory for the largest tensor is enough. Every tensor is compared with its
    checksum: a file that was changed is written again. Raises CSDOSError, CSDStoreError.
    """
    return retried(directory, lambda: _follow(directory, out))


def _follow(directory: Path, out: Path) -> Version | None:
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(Converted(out)) if out.exists() else None
        have = old.have if old else None
        way = way_to_newest(directory, have)
        if not way:
            return None
        try:
            _write(way, old, out)
        except CSDStoreError:
            if have is None:
                raise
            _write(way_to_newest(directory, None), None, out)  # the old file was not the version in its metadata
        return way[-1]


def _write(way: list[Version], old: Converted | None, out: Path) -> None:
    newest = way[-1]
    with appears(out, replaces=True) as path, contextlib.ExitStack() as stack:
        files = [stack.enter_context(opened(version)) for version in way]
        to = stack.enter_context(open(path, "wb"))
        to.write(header_of(newest.tensors, metadata_of(newest)))
        for tensor in newest.tensors:
            values = _tensor(tensor, way, files, old)
            check_result(newest, tensor, checksum(values))
            to.write(values.data)


def _tensor(tensor: Tensor, way: list[Version], files: list[Files], old: Converted | None) -> Array:
    values = np.zeros(tensor.numel, np.uint16)
    for version, of_version in zip(way, files, strict=True):
        begin: Iterator[tuple[int, Array]] = iter(())
        if version.is_full:
            begin = whole(version, of_version, tensor)
        elif version is way[0]:
            assert old is not None
            begin = read_values(old, tensor, old.at)
        for first, some in begin:
            values[first : first + len(some)] = some
        if not version.is_full:
            for at, some in changes(version, of_version, index_of(version, tensor)):
                values[at] = some
    return values
