"""The report of a training on its last step: a small file beside each store, for `csd-optim top`.

Nothing else reads the report. It is never flushed, and not part of the store: it may be missing, old or damaged. It
contains a JSON object behind a header with length and checksum, so that reader and writer need no lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

REPORT_NAME = "csd_optim.top"
_HEAD = struct.Struct("<8sII")  # magic, number of bytes that follow, CRC-32
_MAGIC = b"CSDTOP01"


class ReportFile:
    """A report that this process writes, in the directory of a store. The first write() creates the file."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / REPORT_NAME
        self._fd = -1

    def write(self, report: dict[str, Any]) -> None:
        """Replace the report. Ignores errors: no training should fail because of a report."""
        text = json.dumps(report).encode()
        with contextlib.suppress(OSError):
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            os.pwrite(self._fd, _HEAD.pack(_MAGIC, len(text), zlib.crc32(text)) + text, 0)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def read_report(directory: Path) -> dict[str, Any] | None:
    """Return the last report in a directory; None if missing or incomplete."""
    for _ in range(3):  # retry, as a write may be under way
        with contextlib.suppress(OSError, ValueError, struct.error):
            data = (directory / REPORT_NAME).read_bytes()
            magic, length, crc = _HEAD.unpack_from(data)
            text = data[_HEAD.size : _HEAD.size + length]
            if magic == _MAGIC and zlib.crc32(text) == crc and isinstance(report := json.loads(text), dict):
                return report
    return None
