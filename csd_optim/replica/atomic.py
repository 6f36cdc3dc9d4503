"""Files and directories that appear as a whole: written under a hidden name, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import CSDBusyError, CSDOSError

LOCK = ".lock"


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def appears(out: Path) -> Iterator[Path]:
    """Yield a hidden path for a new file, or a directory of files, that becomes `out` when the block ends.

    Replaces an existing file. If anything fails, `out` stays as it was, and nothing else is left. Raises CSDOSError for
    any OSError of the block.
    """
    temporary = out.with_name(f".{out.name}.new")
    try:
        remove(temporary)  # left by a killed process
        yield temporary
        for path in (*(temporary.iterdir() if temporary.is_dir() else ()), temporary):
            sync(path)
        temporary.replace(out)
        sync(out.parent)
    except BaseException as e:
        with contextlib.suppress(OSError):
            remove(temporary)
        if isinstance(e, OSError) and not isinstance(e, CSDOSError):
            raise CSDOSError(e.errno, f"cannot write {out}: {e.strerror}; it is as it was") from e
        raise


def remove(path: Path) -> None:
    """Remove a file or a directory, if it exists. Nobody sees a directory half removed."""
    if path.is_dir():
        hidden = path.with_name(f".{path.name.lstrip('.')}.old")
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder if there is none, and keep other followers out of it.

    Removes half-written files of killed followers. Raises CSDBusyError if another follower is at work there,
    CSDOSError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as e:
        raise CSDOSError(e.errno, f"cannot write to {folder}: {e.strerror}") from e
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise CSDBusyError(e.errno, f"another process follows in {folder}") from e
        try:
            for path in (*folder.glob(".*.new"), *folder.glob(".*.old")):
                remove(path)
        except OSError as e:
            raise CSDOSError(e.errno, f"cannot remove what is half written in {folder}: {e.strerror}") from e
        yield
    finally:
        os.close(fd)
