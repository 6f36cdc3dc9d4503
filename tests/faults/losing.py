"""Disks that lose for good what a failed flush should have covered, like fsync(2) and drives with a volatile cache.

They replace os.fsync and os.fdatasync, through which all flushes of csd_optim go.
"""

import errno
import os
import shutil
import threading
from pathlib import Path

PAGE = 4096


class LosingDisk:
    """A disk whose flush number `nth` (from 0) below `root` fails. Everything written since the last good one is lost.

    `at_once`: from the page cache, too. Otherwise it remains visible there until the cache is dropped, or the end.
    """

    def __init__(self, root, nth=None, *, at_once=True):
        self.root, self.nth, self.at_once = os.path.realpath(root), nth, at_once
        self.flushes = 0
        self.failed = ""  # a description of the flush that failed
        self._real = os.fsync, os.fdatasync, os.posix_fadvise, os.pwrite
        self._lock = threading.Lock()
        self._safe = {}  # by a file's inode: what is on the disk for certain, nothing before its first flush
        self._names = {}  # by directory: the names that are on the disk, each with another link to its file
        self._stash = Path(f"{self.root}.stash")
        self._doomed = []  # what is lost when the cache is dropped

    def __enter__(self):
        self._stash.mkdir()
        os.fsync = lambda fd: self._flush(fd, self._real[0])
        os.fdatasync = lambda fd: self._flush(fd, self._real[1])
        os.posix_fadvise, os.pwrite = self._advise, self._write
        return self

    def __exit__(self, *_):
        os.fsync, os.fdatasync, os.posix_fadvise, os.pwrite = self._real
        self.drop_cache(names=True)
        shutil.rmtree(self._stash)

    def _flush(self, fd, real):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if not (path + "/").startswith(self.root + "/"):
            return real(fd)
        with self._lock:
            number, self.flushes = self.flushes, self.flushes + 1
        lose = self._lose_names if os.path.isdir(path) else self._lose_content
        if number == self.nth:
            self.failed = f"flush {number}, of {path.removeprefix(self.root) or '/'}"
            lose(fd, path)
            if self.at_once:
                self.drop_cache()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)
        with self._lock:
            if os.path.isdir(path):
                self._names[os.fstat(fd).st_ino] = {e.name: self._link(e) for e in os.scandir(path)}
            else:
                self._safe[os.fstat(fd).st_ino] = _content(fd)

    def _link(self, entry):
        link = self._stash / str(entry.inode())
        if entry.is_file() and not link.exists():
            os.link(entry.path, link)
        return entry.inode()

    def _lose_content(self, fd, path):
        now, safe = _content(fd), self._safe.get(os.fstat(fd).st_ino, b"")
        pages = {at for at in range(0, len(now), PAGE) if now[at : at + PAGE] != safe[at : at + PAGE]}
        self._doomed.append((path, os.fstat(fd).st_ino, (now, pages), safe))

    def _write(self, fd, data, at):
        """Write. What is written again, even with the same bytes, reaches the disk with the next flush."""
        for _, inode, then, _ in self._doomed:
            if inode == os.fstat(fd).st_ino and isinstance(then, tuple):
                then[1].difference_update(range(at // PAGE * PAGE, at + len(data), PAGE))
        return self._real[3](fd, data, at)

    def _lose_names(self, fd, path):
        now = {e.name: e.inode() for e in os.scandir(path)}
        self._doomed.append((path, os.fstat(fd).st_ino, now, self._names.get(os.fstat(fd).st_ino, {})))

    def _advise(self, fd, at, n, advice):
        self._real[2](fd, at, n, advice)
        if advice == os.POSIX_FADV_DONTNEED and os.readlink(f"/proc/self/fd/{fd}").startswith(self.root + "/"):
            self.drop_cache()

    def drop_cache(self, *, names=False):
        """Make files show what is on the disk; with `names`, directories, too, as after a power loss."""
        with self._lock:
            doomed, self._doomed = self._doomed, [d for d in self._doomed if isinstance(d[2], dict) and not names]
        for path, inode, then, safe in doomed:
            if not os.path.exists(path) or os.stat(path).st_ino != inode:
                continue
            if isinstance(then, dict) and names:
                self._forget_names(Path(path), then, safe)
            elif isinstance(then, dict):
                continue
            else:
                self._forget_content(path, *then, safe)

    def _forget_content(self, path, then, pages, safe):
        fd = os.open(path, os.O_RDWR)
        try:
            now = _content(fd)
            for at in pages:
                part = then[at : at + PAGE]
                if now[at : at + PAGE] == part:  # otherwise it was written again, by the engine or through a mapping
                    self._real[3](fd, safe[at : at + PAGE].ljust(len(part), b"\0"), at)
            self._real[1](fd)
        finally:
            os.close(fd)

    def _forget_names(self, path, then, safe):
        for name, inode in then.items():
            entry = path / name
            if safe.get(name) == inode or not entry.exists() or entry.stat().st_ino != inode:
                continue
            if entry.is_dir():
                shutil.rmtree(entry)
            elif name in safe:
                os.replace(os.link(self._stash / str(safe[name]), path / ".was") or path / ".was", entry)
            else:
                entry.unlink()


def _content(fd):
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        data = b""
        while more := os.pread(again, 1 << 24, len(data)):
            data += more
        return data
    finally:
        os.close(again)
