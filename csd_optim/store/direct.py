"""Direct I/O, past the page cache, where the file system has it."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from .sections import PAGE

NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)


def open_direct(file: str | Path, mode: int, *, overwrite: bool = False) -> int | None:
    """Open a file with O_DIRECT and test that on its second page. Returns None if the file system cannot do it.

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
