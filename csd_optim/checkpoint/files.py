"""Large files that are written in any order, and a progress bar."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from ..files import write
from ..store.reader import Tick

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
                os.fsync(self.fd)  # here, because a descriptor that is opened later may miss an error
        finally:
            os.close(self.fd)
