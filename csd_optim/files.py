"""Files: exact transfers, durable names, and files and directories that appear as a whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from .errors import CSDBusyError, CSDError, CSDOSError, CSDStoreExistsError

LOCK = ".lock"
CHUNK = 1 << 20  # bytes that sha256_of() reads at a time

# ---- transfers ---------------------------------------------------------------------------


def _transfer(io: Callable[[int], int], size: int, unit: int = 1) -> int:
    """Call `io` with the number of bytes done so far, until all are done or it does none; return how many are done."""
    done = 0
    while done < size and done % unit == 0 and (more := io(done)):
        done += more
    return done


def read_into(fd: int, view: memoryview, offset: int, unit: int = 1) -> int:
    """Fill `view` from byte `offset` on; return the number of bytes, fewer only at the end of the file.

    Continues after short reads. `unit`: a page for O_DIRECT, which cannot continue in the middle of a page; a read that
    stops there has reached the end of the file.
    """
    return _transfer(lambda done: os.preadv(fd, [view[done:]], offset + done), len(view), unit)


def read(fd: int, size: int, offset: int) -> bytes:
    """Return `size` bytes, fewer only at the end of the file."""
    parts: list[bytes] = []

    def io(done: int) -> int:
        parts.append(os.pread(fd, size - done, offset + done))
        return len(parts[-1])

    _transfer(io, size)
    return b"".join(parts)


def write(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data`; continue after short writes."""
    view = memoryview(data)
    if _transfer(lambda done: os.pwrite(fd, view[done:], offset + done), len(view)) < len(view):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def sha256_of(fd: int) -> tuple[int, str]:
    """Return the size of a file in bytes, and its SHA-256 in hexadecimal digits."""
    sha, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(CHUNK))
    while n := read_into(fd, buffer, size):
        sha.update(buffer[:n])
        size += n
    return size, sha.hexdigest()


# ---- what is durable ---------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: Path, flags: int = 0) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        yield fd
    finally:
        os.close(fd)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a directory, are durable."""
    with opened(path) as fd:
        os.fsync(fd)


def write_file(path: Path, data: bytes, *, replaces: bool, mode: int = 0o644) -> None:
    """Write a file, and wait until its content is durable; its name is not yet.

    `replaces`: a file that is there is written anew; otherwise it is refused. `mode`: of a new file, from its first
    byte on.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if replaces else os.O_EXCL) | os.O_CLOEXEC, mode)
    try:
        write(fd, data, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(path: Path, to: Path) -> None:
    """Rename a file or directory whose content is durable, in the place of what is there; its name is durable then."""
    path.rename(to)
    sync(to.parent)


# ---- files that appear as a whole --------------------------------------------------------


def hidden_name(path: Path) -> Path:
    """Return a new hidden name beside `path`, for a file or directory that is not complete yet."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


@contextlib.contextmanager
def appears(path: Path, *, replaces: bool) -> Iterator[Path]:
    """Yield a hidden path for a new file, or a directory of files, that becomes `path` when the block ends.

    Everything is durable before it gets its name. `replaces`: a file that is there is replaced, and only one process at
    a time may do so; otherwise whatever is there is refused. If anything fails, `path` is as it was, and nothing else
    is left.

    Raises CSDStoreExistsError if `path` exists and is not to be replaced, CSDOSError for any OSError of the block.
    """
    path = Path(os.path.abspath(path))  # the program may change its working directory meanwhile
    if not replaces:
        _check_is_free(path)
    hidden = path.with_name(f".{path.name}.new") if replaces else hidden_name(path)
    try:
        remove(hidden)  # of a process that was killed
        yield hidden
        _sync_all(hidden)
        if replaces:
            rename(hidden, path)
        else:
            _take_name(hidden, path)
    except BaseException as e:
        _discard(hidden)
        if isinstance(e, OSError) and not isinstance(e, CSDError):
            left = "it is as it was" if replaces else "nothing of it is left"
            raise CSDOSError(e.errno, f"cannot write {path}: {e.strerror}; {left}") from e
        raise


def _check_is_free(path: Path) -> None:
    if os.path.lexists(path):
        raise CSDStoreExistsError(errno.EEXIST, f"{path} exists, and nothing is overwritten; name another path")
    if not path.parent.is_dir():
        raise CSDOSError(errno.ENOENT, f"there is no directory {path.parent} to make {path.name} in")


def _sync_all(path: Path) -> None:
    """Flush a file; or a directory, after everything in it."""
    for entry in path.iterdir() if path.is_dir() else ():
        _sync_all(entry)
    sync(path)


def _take_name(hidden: Path, path: Path) -> None:
    """Rename if there is nothing at `path`. If the new name cannot be made durable, it is gone again."""
    try:
        os.link(hidden, path)  # unlike a rename, it replaces nothing that another process has just made
    except OSError:  # there is something; or this is a directory, or a file system without links
        _check_is_free(path)
        if claims := hidden.is_file():
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            hidden.rename(path)  # refused if another process has made a directory with content
        except OSError:
            if claims:
                path.unlink()
            raise
    else:
        try:
            hidden.unlink()
        except OSError:
            path.unlink()
            raise
    try:
        sync(path.parent)
    except OSError:
        path.rename(hidden)
        raise


def _discard(hidden: Path) -> None:
    """Remove as much as possible of a file or directory that has no name yet."""
    if hidden.is_dir():
        shutil.rmtree(hidden, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            hidden.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a file, or a directory, which nobody sees half removed; or nothing."""
    if path.is_dir():
        hidden = path.with_name(f".{path.name.lstrip('.')}.old")
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden)
    else:
        path.unlink(missing_ok=True)


# ---- folders -----------------------------------------------------------------------------


def lock_folder(folder: Path, to: str, busy: str) -> int:
    """Make a folder if there is none, and lock it until the returned descriptor is closed.

    `to`, `busy`: what the messages say before the folder, "write to" and "another process writes to". Raises
    CSDBusyError if another process has locked it, CSDOSError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as e:
        raise CSDOSError(e.errno, f"cannot {to} {folder}: {e.strerror}") from e
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as e:
        os.close(fd)
        if isinstance(e, OSError):
            raise CSDBusyError(e.errno, f"{busy} {folder}") from e
        raise
    return fd


def check_free_space(directory: Path, size: int) -> None:
    """Raise CSDOSError if a file system has less than `size` bytes free."""
    stats = os.statvfs(directory)
    if (free := stats.f_bavail * stats.f_frsize) < size:
        raise CSDOSError(
            errno.ENOSPC, f"no room in {directory}: {size / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free"
        )
