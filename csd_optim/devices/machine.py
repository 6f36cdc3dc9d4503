"""Facts about this machine from /proc and /sys: processor, memory, limits, storage behind a directory, NUMA nodes."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .. import bindings
from .health import disks_below
from .sysfs import text_of

CGROUPS = Path("/sys/fs/cgroup")
MEMORY_LIMIT = {2: "memory.max", 1: "memory.limit_in_bytes"}  # by version
MEMORY_USED = {2: "memory.current", 1: "memory.usage_in_bytes"}


def machine() -> dict[str, Any]:
    """Return the processor, the cores and the memory (bytes) that this process may use, and versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (text_of(at / MEMORY_LIMIT[version]) for at, version in control_groups("memory"))
    model = next((v for k, v in _fields("/proc/cpuinfo") if k in ("model name", "Model")), "")
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": min([memory, *(int(limit) for limit in limits if limit.isdigit())]),
        "huge_pages": text_of("/sys/kernel/mm/transparent_hugepage/enabled").partition("[")[2].partition("]")[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def updater() -> dict[str, Any]:
    """Return the instruction set and the number of threads of the CPU updater."""
    return {"isa": bindings.isa_used(), "isas": bindings.isas(), "threads": bindings.threads_used()}


def available_memory() -> int:
    """Return the bytes that can be allocated without swapping or being killed; a container may limit them further."""
    text = dict(_fields("/proc/meminfo")).get("MemAvailable", "")
    available = int(text.split()[0]) << 10 if text else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for directory, version in control_groups("memory"):
        limit, used = text_of(directory / MEMORY_LIMIT[version]), text_of(directory / MEMORY_USED[version])
        if limit.isdigit() and used.isdigit():
            counts = dict(line.partition(" ")[::2] for line in text_of(directory / "memory.stat").splitlines())
            cached = sum(int(counts.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
            available = min(available, max(0, int(limit) - int(used) + cached))
    return available


def cpu_quota() -> float | None:
    """Return the CPU time limit of this process's control groups, in CPUs; None if they set no limit."""
    quotas = []
    for directory, version in control_groups("cpu"):
        if version == 2:
            quota, _, period = text_of(directory / "cpu.max").partition(" ")
        else:
            quota, period = text_of(directory / "cpu.cfs_quota_us"), text_of(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def io_limits(disk: str) -> dict[str, int]:
    """Return the limits for "read" and "write" that this process's control groups set, in bytes per second.

    `disk`: its number, such as "254:0". Limits of requests per second are not looked at.
    """
    found: dict[str, int] = {}
    for directory, version in control_groups("blkio"):
        for kind in ("read", "write"):
            file, limit = f"blkio.throttle.{kind}_bps_device", r"(\d+)"
            if version == 2:
                file, limit = "io.max", rf".*\b{kind[0]}bps=(\d+)"
            if match := re.search(f"^{disk} {limit}", text_of(directory / file), re.MULTILINE):
                found[kind] = min(int(match[1]), found.get(kind, int(match[1])))
    return found


def control_groups(controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the directories of this process's control groups, from its own upwards as far as a container sees them.

    Each comes with its version, 1 or 2. A group of version 1 belongs to one `controller`, such as "memory"; a group of
    version 2 is for all controllers.
    """
    for line in text_of("/proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root, version = (CGROUPS / controller, 1) if controllers else (CGROUPS, 2)
        at = root / group.lstrip("/")  # a container may see only directories above it
        yield from ((d, version) for d in (at, *(d for d in at.parents if d.is_relative_to(root))))


MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


def storage(directory: Path) -> dict[str, Any]:
    """Return file system, drive and space (bytes) behind an existing directory; "" for what is unknown."""
    where = directory.resolve()
    # Fields of a line: id, parent, major:minor, root, mount point, options ... - type, source, options. The kernel
    # writes a blank in a path as \040; mounts of later lines hide those of earlier ones.
    mounts = [line.partition(" - ") for line in text_of("/proc/self/mountinfo").splitlines()]
    points = [(Path(left.split()[4].replace("\\040", " ")), right.split()) for left, _, right in mounts]
    mount, (kind, source, *_) = max(
        (p for p in points if where.is_relative_to(p[0])), key=lambda p: len(p[0].parts), default=(Path("/"), ["", ""])
    )
    number = where.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if not (block / "queue").exists():
        block = block.parent  # a partition; its disk is one level up
    is_disk = (block / "queue").exists()  # tmpfs, overlay and network file systems have none
    space = shutil.disk_usage(where)
    return {
        "filesystem": kind,
        "mounted_at": str(mount),
        "source": source,
        "disk": block.name if is_disk else "",
        "model": text_of(block / "device/model") if is_disk else "",
        "free_bytes": space.free,
        "total_bytes": space.total,
    }


def numa_node(device: int, sysfs: Path = Path("/sys")) -> int | None:
    """Return the NUMA node of the drives below a file system. `device`: `st_dev` of a file on it.

    None if the machine has only one node, the node is unknown (network file systems, btrfs), or the drives differ.
    """
    if text_of(sysfs / "devices/system/node/online") in ("", "0"):
        return None
    nodes = set()
    for block in disks_below(device, sysfs):
        # The directory of the drive's controller, further up, has the file.
        node = next((text for at in (block, *block.parents) if (text := text_of(at / "numa_node"))), "-1")
        nodes.add(int(node))
    return nodes.pop() if len(nodes) == 1 and min(nodes) >= 0 else None


def _fields(path: str) -> Iterator[tuple[str, str]]:
    """Yield the `key : value` lines of a system file."""
    for line in text_of(path).splitlines():
        key, _, value = line.partition(":")
        yield key.strip(), value.strip()
