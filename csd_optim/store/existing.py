"""What is in the file on which a store is opened: commits to continue from, or why it must not be touched."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Literal

from ..errors import CSDStoreError, CSDStoreExistsError
from ..files import read
from .format import MAGIC, PAGE, Contents, read_commits, read_region, superblocks

SECTOR = 512  # bytes that a disk writes atomically
# What to do with an existing store: raise an error, erase it at the first write, continue from it, only read it.
Mode = Literal["new", "overwrite", "resume", "read"]


def existing_commits(fd: int, path: Path, mode: Mode) -> list[Contents]:
    """Return the commits of an existing file that `mode` continues from or reads, the newest first.

    Raises CSDStoreExistsError if `mode` must not touch the file, CSDStoreError, OSError.
    """
    if mode in ("resume", "read"):
        # The last writer may have died before a flush, or a flush may have failed. Unflushed data are readable from
        # the page cache, and lost once evicted. So flush, and read from the disk itself.
        try:
            os.fdatasync(fd)
            forget_cached(fd)
        except OSError as e:
            if mode != "read" or e.errno not in (errno.EINVAL, errno.EROFS, errno.ENOSYS):
                raise  # a read-only file system has nothing to flush
    heads = [read(fd, PAGE, i * PAGE) for i in range(2)]
    never_committed = _was_never_committed(fd, path, *heads)
    if mode != "read" and MAGIC not in (head[:8] for head in heads) and not never_committed:
        raise CSDStoreExistsError(errno.EEXIST, f"{path} exists and is no csd_optim store; move it away")
    if mode in ("resume", "read") and not never_committed:
        return read_commits(fd, str(path))
    if mode == "new":
        known = superblocks(fd, str(path))
        step = f" of step {known[0][1].step}" if known else ""
        raise CSDStoreExistsError(
            errno.EEXIST,
            f"{path} holds a store{step}; pass resume=True to continue from there, overwrite=True to erase it, or "
            "name another directory",
        )
    return []


def _was_never_committed(fd: int, path: Path, first: bytes, second: bytes) -> bool:
    """Return whether the process that created this store was stopped before its first commit.

    In that case copy 1 is all zeros, and copy 0 is incomplete, and zero except for its first and last sector.
    """
    sectors = [first[i : i + SECTOR] for i in range(0, PAGE, SECTOR)]
    if any(second) or any(map(any, sectors[1:-1])) or (any(sectors[0]) and first[: len(MAGIC)] != MAGIC):
        return False
    for copy, block in superblocks(fd, str(path)):  # raises for an unknown format
        with contextlib.suppress(CSDStoreError):
            read_region(fd, block.manifest, copy, "manifest", str(path))
            read_region(fd, block.table, copy, "slot table", str(path))
            return False  # a whole superblock: there was a commit, even if it may be unreadable
    return True


def forget_cached(fd: int) -> None:
    """Evict clean pages of a file from the page cache, so that the next read comes from the disk."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
