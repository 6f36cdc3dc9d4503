"""File I/O: complete transfers between memory and files, and direct I/O if the file system has it."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .sections import PAGE

NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)


def read_into(fd: int, view: memoryview, offset: int, unit: int = 1) -> int:
    """Fill `view` from byte `offset` on; return the number of bytes, fewer only at the end of the file.

    Continues after short reads. `unit`: a page for O_DIRECT, which cannot continue in the middle of a page; a read that
    stops there has reached the end of the file.
    """
    n = 0
    while n < len(view) and n % unit == 0 and (more := os.preadv(fd, [view[n:]], offset + n)):
        n += more
    return n


def read(fd: int, size: int, offset: int) -> bytes:
    """Return `size` bytes, fewer only at the end of the file."""
    data = bytearray(size)
    return bytes(data[: read_into(fd, memoryview(data), offset)])


def write(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data`; continue after short writes."""
    while len(data):
        n = os.pwrite(fd, data, offset)
        data, offset = data[n:], offset + n


def open_direct(file: str | Path, mode: int, *, overwrite: bool = False) -> int | None:
    """Open a file with O_DIRECT, and test direct I/O on its second page. Returns None if the file system has none.

    The test is needed because some file systems refuse only the I/O. `mode`: O_RDONLY or O_RDWR. `overwrite`: test
    writing, too, which destroys the page.
    """
    fd = -1
    try:
        fd = os.open(file, mode | os.O_CLOEXEC | os.O_DIRECT)
        with mmap.mmap(-1, PAGE) as page:
            if overwrite:
                os.pwritev(fd, [page], PAGE)
            os.preadv(fd, [page], PAGE)
    except BaseException as e:
        if fd >= 0:
            os.close(fd)
        if isinstance(e, OSError) and e.errno in NO_DIRECT:
            return None
        raise
    return fd


@contextmanager
def opened(file: Path, flags: int = 0) -> Iterator[int]:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        yield fd
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are durable."""
    with opened(path, os.O_DIRECTORY) as fd:
        os.fsync(fd)
