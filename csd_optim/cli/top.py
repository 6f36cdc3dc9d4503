"""What a training does now: what it tells once per step, and what the system says of its drives. It asks nothing of it.

The process that trains takes no notice: what it tells is in a file beside each store (csd_optim/store/report.py), what
is committed in the store's first pages, what a drive does in /sys.
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

SECTOR = 512  # bytes, in what the kernel counts, whatever the drive's are
WAITS = 0.6  # share of a step in which a device is busy with the same from which on that is what the step waits for


@dataclass(frozen=True)
class DriveCounts:
    """Of the file system's block device since it is there: bytes, and requests under way now. At a time, in seconds."""

    at: float
    read: int
    written: int
    queue: int


def drive_counts(directory: Path) -> DriveCounts | None:
    """None where the system does not tell, as of a file system without a drive."""
    number = directory.stat().st_dev
    fields = text_of(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat").split()
    if len(fields) < 9:
        return None
    return DriveCounts(time.monotonic(), SECTOR * int(fields[2]), SECTOR * int(fields[6]), int(fields[8]))


class Top:
    """Looks at directories with stores, again and again. Raises CSDOSError if there is no store in one of them."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = directories
        for directory in directories:
            if not (directory / FILE_NAME).exists():
                raise CSDOSError(2, f"there is no store in {directory}; name the directories that a training names")
        self._before = [drive_counts(directory) for directory in directories]

    def look(self) -> list[dict[str, Any]]:
        """What is known of each now; rates are since the look before. What is not known is None."""
        found = []
        for i, directory in enumerate(self._directories):
            now, before = drive_counts(directory), self._before[i]
            self._before[i] = now
            found.append({"directory": str(directory), **described(directory), **rates(before, now)})
        waits = {d["store_id"]: waits_for([e for e in found if e["store_id"] == d["store_id"]]) for d in found}
        return [{**d, "waits_for": waits[d["store_id"]]} for d in found]


def process(described: dict[str, Any]) -> tuple[Any, ...]:
    """What devices of the same optimizer in the same process have in common; its ranks share the store_id alone."""
    return described["pid"], described["rank"], described["store_id"]


def described(directory: Path) -> dict[str, Any]:
    """Without rates."""
    file = directory / FILE_NAME
    with file.open("rb") as f:
        blocks = superblocks(f.fileno(), str(file))
        pid = lock_owner(os.fstat(f.fileno()))
    report, block = read_report(directory) or {}, blocks[0][1] if blocks else None
    if block is None or report.get("store_id") != block.store_id.hex():
        report = {}  # of a store that was there before
    keys = ("step", "at", "step_seconds", "iteration_seconds", "transfer_seconds", "params", "seconds", "backend")
    of_drive = ("flash_read_bytes", "flash_write_bytes", "written_bytes", "tbw_bytes")
    known = {key: report.get(key) for key in (*keys, *of_drive)}
    tbw, written, trained = (report.get(key) for key in ("tbw_bytes", "written_bytes", "training_seconds"))
    return {
        "store_id": block.store_id.hex() if block else None,
        "device": block.device if block else 0,
        "rank": report.get("rank", 0),
        "world_size": report.get("world_size", 1),
        "trainers": report.get("trainers"),
        "pid": pid,
        "committed_step": block.step if block else 0,
        **known,
        "days_left": days_left(tbw, written, trained) if tbw and written is not None and trained else None,
    }


def rates(before: DriveCounts | None, now: DriveCounts | None) -> dict[str, Any]:
    """Of the drive, whoever uses it."""
    if before is None or now is None or now.at <= before.at:
        return {"drive_read": None, "drive_written": None, "queue": now.queue if now else None}
    seconds = now.at - before.at
    read, written = (now.read - before.read) / seconds, (now.written - before.written) / seconds
    return {"drive_read": read, "drive_written": written, "queue": now.queue}


def waits_for(devices: Iterable[dict[str, Any]]) -> str | None:
    """What would make the last iteration shorter, of the devices of one optimizer, on all its ranks: a rank waits for
    the slowest one.

    "read", "update" or "write", with the device's directory; "gradients", which came more slowly than devices take
    them; or "model". Of owners: "network", between them and trainers, or "trainers". "ranks": something else than the
    ranks among `devices`. None: not known.
    """
    known = [d for d in devices if d["seconds"] and d["pid"] is not None]
    if not known or not all(d["iteration_seconds"] for d in known):
        return None
    step, iteration = (max(d[f"{what}_seconds"] for d in known) for what in ("step", "iteration"))
    most, kind, directory = max((s, kind, d["directory"]) for d in known for kind, s in d["seconds"].items())
    served = known[0]["trainers"] is not None  # then gradients are there before a step begins
    if step >= 0.5 * iteration and (served or most > WAITS * step):
        return f"{kind} {directory}"
    if len({d["rank"] for d in known}) < known[0]["world_size"]:
        return "ranks"
    if served:
        moving = max(d["transfer_seconds"] for d in known)
        return "network" if moving > iteration - step - moving else "trainers"
    return "gradients" if step >= 0.5 * iteration else "model"
