"""Bytes between memory and files: transfers that are finished, and files past the page cache where there is a way."""

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
    """Fills `view` from byte `offset` on; returns how many bytes there are: less only where the file ends.

    The system may cut a transfer short. `unit`: with O_DIRECT a page, in the middle of which it would refuse to go on;
    there, too, the file has ended.
    """
    n = 0
    while n < len(view) and n % unit == 0 and (more := os.preadv(fd, [view[n:]], offset + n)):
        n += more
    return n


def read(fd: int, size: int, offset: int) -> bytes:
    """Up to `size` bytes: less only where the file ends."""
    data = bytearray(size)
    return bytes(data[: read_into(fd, memoryview(data), offset)])


def write(fd: int, data: bytes | memoryview, offset: int) -> None:
    """All of it: the system may cut a transfer short."""
    while len(data):
        n = os.pwrite(fd, data, offset)
        data, offset = data[n:], offset + n


def open_direct(file: str | Path, mode: int, *, overwrite: bool = False) -> int | None:
    """Opens a file for O_DIRECT and tries that out on its second page; None: its file system cannot.

    Some file systems refuse only the I/O itself. `mode`: O_RDONLY or O_RDWR. `overwrite`: the page is written, too.
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
    """Waits until the names in it are on the disk."""
    with opened(path, os.O_DIRECTORY) as fd:
        os.fsync(fd)
