"""Files in other formats, made from versions. The metadata of each file names its version."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..errors import CSDOSError, CSDStoreError
from ..files import lock_folder, remove
from .blocks import Reader, parse_tensors
from .versions import Version

VersionKey = tuple[int, str]  # number and id of a version


def metadata_of(version: Version) -> dict[str, str]:
    """Return the metadata of a converted file, which name its version."""
    about = {"version": str(version.number), "id": version.id, "run": version.run, "step": str(version.step)}
    return {f"csd_optim.{key}": value for key, value in about.items()}


def key_in(metadata: dict[str, str]) -> VersionKey | None:
    """Return number and id of a file's version from its metadata, or None."""
    try:
        return int(metadata["csd_optim.version"]), metadata["csd_optim.id"]
    except (ValueError, KeyError, TypeError):
        return None


class Converted(Reader):
    """An existing safetensors file, perhaps changed by somebody else.

    `have`: the version named in its metadata, or None. `at`: see parse_tensors().
    """

    def __init__(self, path: Path) -> None:
        """Raises CSDOSError."""
        self.path: Path = path
        with self._wrapping_errors():
            self._fd: int = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.have: VersionKey | None = None
        self.at: dict[str, tuple[str, list[int], int]] = {}
        try:
            metadata, self.at = parse_tensors(self)
            self.have = key_in(metadata)
        except CSDStoreError:
            pass

    def __enter__(self) -> Converted:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder if there is none, and keep other followers out of it.

    What followers that were killed left half written is removed. Raises CSDBusyError if another one is at work there,
    CSDOSError.
    """
    fd = lock_folder(folder, "write to", "another process follows in")
    try:
        try:
            for path in (*folder.glob(".*.new"), *folder.glob(".*.old")):
                remove(path)
        except OSError as e:
            raise CSDOSError(e.errno, f"cannot remove what is half written in {folder}: {e.strerror}") from e
        yield
    finally:
        os.close(fd)


def retire(paths: Sequence[Path], is_full: Callable[[Path], bool]) -> None:
    """Remove all paths before the last full one, with which a receiver may just have begun. Raises CSDOSError."""
    full = [i for i, path in enumerate(paths) if is_full(path)]
    for path in paths[: full[-1]] if full else ():
        try:
            remove(path)
        except OSError as e:
            raise CSDOSError(e.errno, f"cannot remove {path}: {e.strerror}") from e
