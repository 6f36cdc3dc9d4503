"""Files that appear as a whole or not at all, a check for free space, and a progress bar."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from ..errors import CSDError, CSDOSError, CSDStoreExistsError
from ..store.reader import Tick
from ..store.transfer import sync_directory, write

SYNC_BYTES = 64 << 20  # flush and drop from the page cache after so many bytes: training needs the memory
Progress = Callable[[str, int], AbstractContextManager[Tick]]  # (description, total bytes) → context with a Tick


@contextlib.contextmanager
def no_progress(_what: str, _total: int) -> Iterator[Tick]:
    yield lambda _: None


@contextlib.contextmanager
def progress_bar(what: str, total: int) -> Iterator[Tick]:
    """Show a progress bar on stderr, which disappears when done."""
    from rich import progress  # imported here so that training scripts need not wait for it
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(what, total=total)
        yield lambda n: shown.advance(task, n)


@contextlib.contextmanager
def created_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`, and rename it to `path` at exit; after an error, nothing is left.

    Raises CSDStoreExistsError if `path` exists, CSDOSError.
    """
    path = Path(os.path.abspath(path))
    if os.path.lexists(path):
        raise CSDStoreExistsError(errno.EEXIST, f"{path} exists, and nothing is overwritten; name another path")
    if not path.parent.is_dir():
        raise CSDOSError(errno.ENOENT, f"there is no directory {path.parent} to make {path.name} in")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield temporary
        for directory in (*temporary.glob("*/"), temporary):
            if directory.is_dir():
                sync_directory(directory)
        if os.path.lexists(path):
            raise CSDStoreExistsError(errno.EEXIST, f"{path} was created by another process meanwhile")
        temporary.rename(path)
        try:
            sync_directory(path.parent)
        except OSError:
            path.rename(temporary)
            raise
    except BaseException as e:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        if isinstance(e, OSError) and not isinstance(e, CSDError):
            raise CSDOSError(e.errno, f"cannot write {path}: {e.strerror}; nothing of it is left") from e
        raise


class Output:
    """A file that any thread writes in any order, kept out of the page cache. `size`: None if the file exists."""

    def __init__(self, path: Path, size: int | None) -> None:
        new = 0 if size is None else os.O_CREAT | os.O_EXCL
        self.fd: int = os.open(path, os.O_RDWR | os.O_CLOEXEC | new, 0o644)
        self._unsynced = 0
        if size is not None:
            os.ftruncate(self.fd, size)  # a sparse file: reads as zeros, takes no space

    def write(self, data: bytes | memoryview, offset: int) -> None:
        self._unsynced += len(data)
        write(self.fd, data, offset)
        if self._unsynced > SYNC_BYTES:
            self._unsynced = 0
            os.fdatasync(self.fd)
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        try:
            if kind is None:
                os.fsync(self.fd)
        finally:
            os.close(self.fd)


def check_free_space(directory: Path, size: int) -> None:
    stats = os.statvfs(directory)
    if (free := stats.f_bavail * stats.f_frsize) < size:
        raise CSDOSError(
            errno.ENOSPC, f"no room in {directory}: {size / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free"
        )
