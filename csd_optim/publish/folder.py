"""The folder of versions, as its only writer sees it: versions appear as a whole, and old ones go."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import CSDBusyError, CSDOSError, CSDStoreError
from ..replica.versions import FORMAT, MANIFEST, Tensor, Version, directory_of, numbers, read_version

PENDING = re.compile(r"\.v(\d{10,})\.pending")
LOCK = ".lock"


class Folder:
    """A folder of versions, locked against other writers until close(). Methods raise OSError.

    The constructor raises CSDBusyError if somebody else publishes there, and CSDOSError.
    """

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise CSDOSError(e.errno, f"cannot publish in {path}: {e.strerror}") from e
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(self._lock)
            raise CSDBusyError(e.errno, f"somebody else publishes in {path}") from e

    def close(self) -> None:
        """Let others publish here. May be called again."""
        fd, self._lock = self._lock, -1
        if fd >= 0:
            os.close(fd)

    def newest(self) -> Version | None:
        """Return the newest version; None if there is none, or it cannot be read."""
        found = numbers(self.path)
        try:
            return read_version(self.path / directory_of(found[-1])) if found else None
        except (CSDStoreError, CSDOSError):
            return None

    def last_full(self, version: Version) -> int:
        """Return the number of the full version with which the chain to this one begins; 0 if it is not all there."""
        try:
            while version.base:
                number, id = version.base
                version = read_version(self.path / directory_of(number))
                if version.id != id:
                    return 0
        except (CSDStoreError, CSDOSError):
            return 0
        return version.number

    def next_number(self) -> int:
        """Return the number of the next version: no other has had it, as the newest one stays."""
        return max(numbers(self.path), default=0) + 1

    # ---- one version ---------------------------------------------------------------

    def begin(self, number: int) -> Path:
        """Return a new directory for the files of a version, which readers do not see."""
        path = self.path / f".{directory_of(number)}.pending"
        if path.exists():
            shutil.rmtree(path)
        path.mkdir()
        return path

    def complete(self, pending: Path, manifest: dict[str, Any]) -> None:
        """Write the manifest of a version whose files are on the disk, and flush all of it. It gets no name yet."""
        fd = os.open(pending / MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with os.fdopen(fd, "wb") as file:
            file.write(json.dumps({"format": FORMAT, **manifest}).encode())
            file.flush()
            os.fsync(fd)
        sync(pending)
        sync(self.path)

    def pending(self) -> tuple[Path, Version] | None:
        """Return a complete version that has no name yet, if there is one."""
        for path in sorted(self.path.iterdir()):
            if PENDING.fullmatch(path.name):
                with contextlib.suppress(CSDStoreError, CSDOSError):
                    return path, read_version(path)
        return None

    def name(self, pending: Path) -> Version:
        """Let readers see a complete version: it appears as a whole."""
        match = PENDING.fullmatch(pending.name)
        assert match
        path = self.path / directory_of(int(match[1]))
        pending.rename(path)
        sync(self.path)
        return read_version(path)

    def discard_pending(self) -> None:
        """Remove what has no name."""
        for path in [*self.path.iterdir()]:
            if path.name.startswith(".v"):
                shutil.rmtree(path, ignore_errors=True)

    # ---- old versions --------------------------------------------------------------

    def retire(self, keep: int, last_full: int) -> None:
        """Remove all versions but the `keep` newest, and those from `last_full` on, which a new reader needs."""
        found = numbers(self.path)
        for number in found[: max(0, len(found) - keep)]:
            if number >= last_full:
                break
            gone = self.path / f".{directory_of(number)}.gone"
            with contextlib.suppress(FileNotFoundError):
                (self.path / directory_of(number)).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def manifest_of(
    run: str, number: int, step: int, base: Version | None, tensors: Sequence[Tensor], files: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the manifest of a version. `base`: the version from which it differs; None: it is full."""
    return {
        "run": run,
        "number": number,
        "step": step,
        "base": base and {"number": base.number, "id": base.id},
        "tensors": [_entry(t) for t in tensors],
        "files": [*files],
    }


def _entry(t: Tensor) -> dict[str, Any]:
    entry = {"name": t.name, "dtype": t.dtype, "shape": [*t.shape], "checksum": t.checksum}
    return {**entry, "aliases": [*t.aliases]} if t.aliases else entry


def check_room(path: Path, nbytes: int) -> None:
    """Raise CSDOSError if the file system has less room."""
    stats = os.statvfs(path)
    if (free := stats.f_bavail * stats.f_frsize) < nbytes:
        raise CSDOSError(errno.ENOSPC, f"{nbytes / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free")


def sync(directory: Path) -> None:
    """Flush the entries of a directory to the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
