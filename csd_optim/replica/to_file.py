"""A safetensors file that follows the versions in a folder. It is replaced as a whole, so readers never see a mix."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CSDOSError, CSDStoreError
from .blocks import Reader, checksum, header_of, parse_tensors, read_values
from .replica import TRIES, Files, changes, check_result, index_of, opened, whole
from .versions import Tensor, Version, way_to_newest

Array = np.ndarray[Any, Any]


def follow(directory: Path, out: Path) -> Version | None:
    """Bring `out`, which need not exist, to the newest version of a folder. Returns that version; None: it has it.

    `out` says in its metadata which version it is. Memory for the largest tensor is enough. Every tensor is compared
    with its checksum: a file that was changed is made anew. Raises CSDOSError, CSDStoreError.
    """
    for tries in range(TRIES):
        try:
            return _follow(directory, out)
        except CSDOSError as e:  # a version was removed between two reads
            if e.errno != errno.ENOENT or tries == TRIES - 1:
                raise
    raise AssertionError


def _follow(directory: Path, out: Path) -> Version | None:
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(_Old(out)) if out.exists() else None
        have = old.have if old else None
        way = way_to_newest(directory, have)
        if not way:
            return None
        try:
            _write(way, old, out)
        except CSDStoreError:
            if have is None:
                raise
            _write(way_to_newest(directory, None), None, out)  # the old file was not what it said it was
        return way[-1]


class _Old(Reader):
    """The file as it is. `have`: the version of which it says it is; None: of none."""

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        self._fd: int = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.have: tuple[int, str] | None = None
        try:
            metadata, self._at = parse_tensors(self)
            if "csd_optim.version" in metadata:
                self.have = int(metadata["csd_optim.version"]), metadata["csd_optim.id"]
        except (CSDStoreError, ValueError, KeyError):
            self._at = {}

    def values(self, tensor: Tensor) -> Iterator[tuple[int, Array]]:
        yield from read_values(self, tensor, self._at)

    def __enter__(self) -> _Old:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write(way: list[Version], old: _Old | None, out: Path) -> None:
    newest, temporary = way[-1], out.with_name(f".{out.name}.new")
    about = {"version": str(newest.number), "id": newest.id, "run": newest.run, "step": str(newest.step)}
    header = header_of(newest.tensors, {f"csd_optim.{key}": value for key, value in about.items()})
    try:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(opened(version)) for version in way]
            to = stack.enter_context(open(temporary, "wb"))
            to.write(header)
            for tensor in newest.tensors:
                values = _tensor(tensor, way, files, old)
                check_result(newest, tensor, checksum(values))
                to.write(values.data)
            to.flush()
            os.fsync(to.fileno())
        temporary.replace(out)
        fd = os.open(out.parent, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException as e:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(e, OSError) and not isinstance(e, CSDOSError):
            raise CSDOSError(e.errno, f"cannot write {out}: {e.strerror}; it is as it was") from e
        raise


def _tensor(tensor: Tensor, way: list[Version], files: list[Files], old: _Old | None) -> Array:
    values = np.zeros(tensor.numel, np.uint16)
    for version, of_version in zip(way, files, strict=True):
        begin: Iterator[tuple[int, Array]] = iter(())
        if version.is_full:
            begin = whole(version, of_version, tensor)
        elif version is way[0]:
            assert old is not None
            begin = old.values(tensor)
        for first, some in begin:
            values[first : first + len(some)] = some
        if not version.is_full:
            for at, some in changes(version, of_version, index_of(version, tensor)):
                values[at] = some
    return values
