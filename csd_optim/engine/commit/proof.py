"""After a failed flush, a commit is valid only if all its data can be read back from the disk itself.

The kernel reports a failed page write only once; it then marks the page clean and may keep it. So the next flush
succeeds, and reads return the expected bytes until the page leaves the page cache, although these bytes never reached
the disk. Likewise, a drive that failed to flush its own cache may have lost the cache's content.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import numpy as np

from ...errors import CSDLostError, CSDOSError, CSDStoreError
from ...store.file import Staged, StoreFile
from ...store.format import PAGE, Contents, read_region, unpack
from ...store.reader import find_damage, residuals_of, tiles_of
from ..states import loss_remedy

_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def prove(store: StoreFile, staged: Staged) -> None:
    """Read all data of a commit, bypassing the page cache, and verify it by the checksums in the commit's table.

    Raises CSDOSError if the store cannot be flushed or read, CSDLostError if something differs from what was written.
    """
    store.sync()
    block, path = staged.superblock, str(store.path)
    try:
        with store.wrapping_errors("read"):  # find_damage() opens the store by its path, which may be gone
            store.forget_cached()
            manifest = staged.manifest or read_region(store.fd, block.manifest, 0, "manifest", path)
            contents = unpack(path, 0, block, manifest, staged.table, None)
            damage = [str(d) for d in find_damage([contents])]
            cached = not damage and _may_be_in_page_cache(store, contents)
    except CSDStoreError as e:
        raise CSDOSError(errno.EIO, str(e)) from e
    if cached:
        damage = [f"{path}: this file system reads what is mapped in memory from the page cache, not from the disk"]
    if damage:
        store.lost = _loss_message(store, contents, damage)
        raise CSDLostError(errno.EIO, store.lost)
    store.in_doubt = False


def _may_be_in_page_cache(store: StoreFile, contents: Contents) -> bool:
    """Return whether the page cache may have served some of the reads: mapped pages never leave it."""
    with mmap.mmap(-1, PAGE) as page:
        store.forget_cached()
        os.preadv(store.io_fd, [page], 0)  # reads the superblock, which nobody maps, as a probe
    if not _in_page_cache(store.fd, 0, PAGE):  # so reads bypass the page cache
        return False
    places = [(t.offset, t.size) for t in tiles_of([contents])]
    places += [(r.offset, r.size) for r in residuals_of([contents])]
    return any(_in_page_cache(store.fd, at, size) for at, size in places if size)


def _in_page_cache(fd: int, at: int, size: int) -> bool:
    """Return whether any page of this range of a file is in the page cache."""
    first = at // mmap.PAGESIZE * mmap.PAGESIZE
    with mmap.mmap(fd, at + size - first, access=mmap.ACCESS_READ, offset=first) as pages:
        found = np.zeros(-(-len(pages) // mmap.PAGESIZE), np.uint8)
        address = np.frombuffer(pages, np.uint8).ctypes.data
        return bool(_mincore(address, len(pages), found.ctypes.data) != 0 or (found & 1).any())


def _loss_message(store: StoreFile, contents: Contents, damage: list[str]) -> str:
    step, before = contents.superblock.step, store.current
    more = f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
    what = f"what was written to the state after step {step}" if before and before.step == step else f"step {step}"
    said = f"{what} is lost: a flush failed, and what it should have put on the disk is not there: {damage[0]}{more}. "
    return said + loss_remedy(before.step if before else 0)
