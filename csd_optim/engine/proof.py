"""After a flush that failed, what a commit names counts only if it can be read from the disk itself.

The system tells once that it could not write a page, marks it as written and may keep it: the next flush succeeds, and
whoever reads the file sees what should be there until the page leaves the cache. And a drive that failed to empty its
cache may have lost that.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import numpy as np

from ..errors import CSDLostError, CSDOSError, CSDStoreError
from ..store.file import Staged, StoreFile
from ..store.format import PAGE, Contents, read_region, unpack
from ..store.reader import find_damage, residuals_of, tiles_of

_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def prove(store: StoreFile, staged: Staged) -> None:
    """Reads everything that a commit names, past the page cache, and compares it with the sums of its table.

    Raises CSDOSError if the store cannot be flushed or read, CSDLostError if something is not what was written there.
    """
    store.sync()
    block, path = staged.superblock, str(store.path)
    try:
        with store.naming("read"):  # somebody may have renamed the directory
            store.forget_cached()
            manifest = staged.manifest or read_region(store.fd, block.manifest, 0, "manifest", path)
            contents = unpack(path, 0, block, manifest, staged.table, None)
            damage = [str(d) for d in find_damage([contents])]
            cached = not damage and _may_be_cached(store, contents)
    except CSDStoreError as e:
        raise CSDOSError(errno.EIO, str(e)) from e
    if cached:
        damage = [f"{path}: what is looked at in memory cannot be read from the disk, as its file system reads that"]
    if damage:
        store.lost = _what_is_lost(store, contents, damage)
        raise CSDLostError(errno.EIO, store.lost)
    store.in_doubt = False


def _may_be_cached(store: StoreFile, contents: Contents) -> bool:
    """May some of what was just read have come out of the page cache? Pages that are mapped do not leave it."""
    with mmap.mmap(-1, PAGE) as page:
        store.forget_cached()
        os.preadv(store.io_fd, [page], 0)  # of the superblock, which nobody maps
    if not _cached(store.fd, 0, PAGE):  # it is read past the cache
        return False
    places = [(t.offset, t.size) for t in tiles_of([contents])]
    places += [(r.offset, r.size) for r in residuals_of([contents])]
    return any(_cached(store.fd, at, size) for at, size in places if size)


def _cached(fd: int, at: int, size: int) -> bool:
    """Is any page of these bytes of a file in the page cache?"""
    first = at // mmap.PAGESIZE * mmap.PAGESIZE
    with mmap.mmap(fd, at + size - first, access=mmap.ACCESS_READ, offset=first) as pages:
        found = np.zeros(-(-len(pages) // mmap.PAGESIZE), np.uint8)
        address = np.frombuffer(pages, np.uint8).ctypes.data
        return bool(_mincore(address, len(pages), found.ctypes.data) != 0 or (found & 1).any())


def _what_is_lost(store: StoreFile, contents: Contents, damage: list[str]) -> str:
    step, before = contents.superblock.step, store.current
    extents = contents.manifest["extents"]
    more = f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
    what = f"what was written to the state after step {step}" if before and before.step == step else f"step {step}"
    said = f"{what} is lost: a flush failed, and what it should have put on the disk is not there: {damage[0]}{more}. "
    return said + way_out(before.step if before else 0, any(e["slots"] == 1 for e in extents))


def way_out(committed_step: int, in_place: bool) -> str:
    """What is left when something is lost for good, and what to do."""
    if in_place:
        left = "With shadow=False nothing older is left, and the store is damaged"
        then = "go back to a snapshot or a checkpoint"
    elif committed_step:
        left = f"The store is as it was at step {committed_step}"
        then = f"go on from step {committed_step} with resume=True"
    else:
        left = "Nothing was committed before"
        then = "begin anew"
    return (
        f"{left}; the parameters in memory are newer than that, and have no states any more to go on with. close() "
        f"this optimizer and {then}, when you trust the drive (its SMART values and the kernel's log say more)"
    )
