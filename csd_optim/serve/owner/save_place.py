"""Paths at which trainers may request snapshots: below directories named at the owner's start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ...errors import CSDError, CSDOSError, CSDRankError


class SavePlace:
    """A path below an allowed directory. Call close() when the snapshot is complete.

    `through` is the same path by way of a descriptor, so that links made meanwhile have no effect; no component below
    the allowed directory may be a link.
    """

    def __init__(self, allowed: Sequence[Path], path: Path) -> None:
        """Raises CSDRankError if the path is not below one of the allowed directories, CSDOSError."""
        top = next((top for top in allowed if top in path.parents), None)
        if top is None or ".." in path.parts:
            below = (
                "below " + " or ".join(map(str, allowed)) if allowed else "nowhere (start them with --allow-save DIR)"
            )
            raise CSDRankError(f"{path} is not where the optimizer ranks may save on their machine, which is {below}")
        self._path, self._fd = path, -1
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            self._fd = os.open(top, flags)
            for name in path.relative_to(top).parts[:-1]:
                before, self._fd = self._fd, os.open(name, flags | os.O_NOFOLLOW, dir_fd=self._fd)
                os.close(before)
        except OSError as e:
            self.close()
            raise CSDOSError(e.errno, f"cannot save at {path}: {e.strerror}") from None
        self.through: Path = Path(f"/proc/self/fd/{self._fd}") / path.name

    def as_named(self, e: CSDError) -> CSDError:
        """Return the same error about the path that the trainer has named."""
        text = str(e.strerror if isinstance(e, OSError) else e).replace(str(self.through), str(self._path))
        return type(e)(e.errno, text) if isinstance(e, OSError) else type(e)(text)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
