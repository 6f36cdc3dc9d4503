"""Facts about the drives below a file system: their connection, temperature and wear."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from .sysfs import number_of, text_of

DATA_UNIT = 512_000  # bytes; the unit in which NVMe drives count data
SMART_SECONDS = 20  # timeout of smartctl; waking a sleeping drive takes a while


def disks_below(device: int, sysfs: Path = Path("/sys")) -> list[Path]:
    """Return the disks below a file system as directories of sysfs. `device`: `st_dev` of a file on it.

    With LVM or a RAID there may be several; for network file systems, tmpfs and btrfs there are none.
    """
    found: dict[Path, None] = {}
    below = [(sysfs / f"dev/block/{os.major(device)}:{os.minor(device)}").resolve()]
    while below:
        block = below.pop()
        if slaves := [*block.glob("slaves/*")]:
            below += [slave.resolve() for slave in slaves]
        elif (block / "queue").exists():
            found[block] = None
        elif (block.parent / "queue").exists():  # a partition; its disk is one level up
            found[block.parent] = None
    return list(found)


def describe_disk(block: Path) -> dict[str, Any]:
    """Return name, model and properties of a disk in sysfs.

    `link`, `best_link`: the current and the best PCIe link as (GT/s, lanes), None for other buses. `celsius`: None
    without a sensor.
    """
    temperature = temperature_of(block)
    return {
        "name": block.name,
        "model": text_of(block / "device/model"),
        "rotational": text_of(block / "queue/rotational") == "1",
        "removable": text_of(block / "removable") == "1" or "/usb" in str(block),
        "link": link_of(block, "current"),
        "best_link": link_of(block, "max"),
        "celsius": temperature[0] if temperature else None,
    }


def temperature_of(block: Path) -> tuple[float, float] | None:
    """Return the temperature of a disk in sysfs and the one from which it warns and throttles, in degrees Celsius.

    The second is inf if the disk does not report it. Returns None without a sensor.
    """
    for sensor in sorted((block / "device").glob("**/hwmon*/temp1_input")):
        limit = number_of(sensor.with_name("temp1_max")) / 1000
        return number_of(sensor) / 1000, limit if limit > 0 else math.inf
    return None


def link_of(block: Path, which: str) -> tuple[float, int] | None:
    """Return the PCIe link of an NVMe drive as (GT/s per lane, lanes). `which`: "current" or "max"."""
    function = block / "device/device"
    speed, lanes = text_of(function / f"{which}_link_speed"), number_of(function / f"{which}_link_width")
    try:
        return float(speed.partition(" ")[0]), lanes
    except ValueError:
        return None


def smart(name: str) -> dict[str, Any]:
    """Return what smartctl reports about /dev/`name`; with only `problem` (and `remedy`) if it reports nothing.

    `passed`; `percent_used` of the endurance that the vendor promises; `written_bytes` in the drive's lifetime;
    `media_errors`; `critical_warning` (bits); `hot_minutes` above its critical temperature; `celsius`. A value is None
    if the drive does not report it.
    """
    if shutil.which("smartctl") is None:
        return {"problem": "smartctl is not installed", "remedy": "install smartmontools to see how worn it is"}
    try:
        done = subprocess.run(
            ["smartctl", "--json", "--all", f"/dev/{name}"], capture_output=True, text=True, timeout=SMART_SECONDS
        )
        report = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as e:
        return {"problem": f"smartctl fails: {e}"}
    return parse_smart(report)


def parse_smart(report: dict[str, Any]) -> dict[str, Any]:
    """Return the same from smartctl's JSON output."""
    if "smart_status" not in report:
        messages = [m["string"] for m in report.get("smartctl", {}).get("messages", [])]
        denied = any("ermission denied" in m for m in messages)
        problem = messages[0] if messages else "smartctl says nothing of its health"
        return {"problem": problem, "remedy": "run as root"} if denied else {"problem": problem}
    log = report.get("nvme_smart_health_information_log", {})
    units = log.get("data_units_written")
    return {
        "passed": bool(report["smart_status"].get("passed", True)),
        "percent_used": log.get("percentage_used", report.get("endurance_used", {}).get("current_percent")),
        "written_bytes": None if units is None else units * DATA_UNIT,
        "media_errors": log.get("media_errors"),
        "critical_warning": log.get("critical_warning", 0),
        "hot_minutes": log.get("critical_comp_time"),
        "celsius": report.get("temperature", {}).get("current"),
    }
