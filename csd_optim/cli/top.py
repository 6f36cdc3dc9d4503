"""What a training does now: its own report after each step, and what the system says about its drives.

The training process is not involved. Its report is a file beside each store (csd_optim/store/report.py), the committed
step is in the store's first pages, and the drives' counters are in /sys.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..devices.spec import days_left
from ..devices.sysfs import text_of
from ..errors import CSDOSError
from ..store.file import lock_owner
from ..store.format import FILE_NAME, superblocks
from ..store.report import read_report

SECTOR = 512  # bytes: the unit of the kernel's counters, whatever the drive's sector size
WAITS = 0.6  # a step waits for a device's reads, updates or writes if they take more than this share of the step


@dataclass(frozen=True)
class DriveCounts:
    """A block device's counters at the time `at` (s): bytes read and written so far, and requests in flight."""

    at: float
    read: int
    written: int
    queue: int


def drive_counts(directory: Path) -> DriveCounts | None:
    """Return the counters of the drive below `directory`, or None if there are none: a file system without a drive."""
    number = directory.stat().st_dev
    fields = text_of(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat").split()
    if len(fields) < 9:
        return None
    return DriveCounts(time.monotonic(), SECTOR * int(fields[2]), SECTOR * int(fields[6]), int(fields[8]))


class Top:
    """Watches directories with stores. Raises CSDOSError if there is no store in one of them."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = directories
        for directory in directories:
            if not (directory / FILE_NAME).exists():
                raise CSDOSError(2, f"there is no store in {directory}; name the directories of the training's devices")
        self._before = [drive_counts(directory) for directory in directories]

    def look(self) -> list[dict[str, Any]]:
        """Return what is known of each device. Rates are averages since the previous call; unknown values are None."""
        found = []
        for i, directory in enumerate(self._directories):
            now, before = drive_counts(directory), self._before[i]
            self._before[i] = now
            found.append({"directory": str(directory), **described(directory), **rates(before, now)})
        waits = {d["store_id"]: waits_for([e for e in found if e["store_id"] == d["store_id"]]) for d in found}
        return [{**d, "waits_for": waits[d["store_id"]]} for d in found]


def process(described: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key that devices of one optimizer in one process share. Its ranks have only the store_id in common."""
    return described["pid"], described["rank"], described["store_id"]


def described(directory: Path) -> dict[str, Any]:
    """Return what the store and the report beside it say of one device, without the drive's rates."""
    file = directory / FILE_NAME
    with file.open("rb") as f:
        blocks = superblocks(f.fileno(), str(file))
        pid = lock_owner(os.fstat(f.fileno()))
    report, block = read_report(directory) or {}, blocks[0][1] if blocks else None
    if block is None or report.get("store_id") != block.store_id.hex():
        report = {}  # it belongs to an earlier store in this directory
    keys = ("step", "at", "step_seconds", "iteration_seconds", "params", "seconds", "backend")
    of_drive = ("flash_read_bytes", "flash_write_bytes", "written_bytes", "tbw_bytes")
    known = {key: report.get(key) for key in (*keys, *of_drive)}
    tbw, written, trained = (report.get(key) for key in ("tbw_bytes", "written_bytes", "training_seconds"))
    return {
        "store_id": block.store_id.hex() if block else None,
        "device": block.device if block else 0,
        "rank": report.get("rank", 0),
        "world_size": report.get("world_size", 1),
        "pid": pid,
        "committed_step": block.step if block else 0,
        **known,
        "days_left": days_left(tbw, written, trained) if tbw and written is not None and trained else None,
    }


def rates(before: DriveCounts | None, now: DriveCounts | None) -> dict[str, Any]:
    """Return the drive's rates in bytes per second, whichever process caused them, and its queue length."""
    if before is None or now is None or now.at <= before.at:
        return {"drive_read": None, "drive_written": None, "queue": now.queue if now else None}
    seconds = now.at - before.at
    read, written = (now.read - before.read) / seconds, (now.written - before.written) / seconds
    return {"drive_read": read, "drive_written": written, "queue": now.queue}


def waits_for(devices: Iterable[dict[str, Any]]) -> str | None:
    """Return what bounded the last iteration. `devices`: those of one optimizer on all ranks that are watched, because
    each rank waits for the slowest one.

    "read", "update" or "write", followed by the device's directory; "gradients" if they came more slowly than the
    devices take them; or "model".
    "ranks": possibly ranks that are not among `devices`. None: unknown.
    """
    known = [d for d in devices if d["seconds"] and d["pid"] is not None]
    if not known or not all(d["iteration_seconds"] for d in known):
        return None
    step, iteration = (max(d[f"{what}_seconds"] for d in known) for what in ("step", "iteration"))
    most, kind, directory = max((s, kind, d["directory"]) for d in known for kind, s in d["seconds"].items())
    if step >= 0.5 * iteration and most > WAITS * step:
        return f"{kind} {directory}"
    if len({d["rank"] for d in known}) < known[0]["world_size"]:
        return "ranks"
    return "gradients" if step >= 0.5 * iteration else "model"
