"""Reads sysfs and the kernel's mount table: PCIe functions, block devices, and the parts of a card's shell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class System:
    """Paths to read facts from; tests build a tree of their own."""

    sysfs: Path = Path("/sys")
    dev: Path = Path("/dev")
    mounts: Path = Path("/proc/self/mountinfo")


THIS_SYSTEM = System()
BDF = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})\.([0-7])")


def bdf_numbers(bdf: str) -> list[int | None]:
    """Return domain (None if left out), bus, slot and function of a PCIe address."""
    match = BDF.fullmatch(bdf)
    assert match is not None
    return [None if x is None else int(x, 16) for x in match.groups()]


def disks_and_volumes(blocks: Sequence[str], system: System) -> tuple[list[str], list[str]]:
    """Return two lists of block devices that lie on these disks: on them alone, and on other disks as well.

    The first has the disks, their partitions, and LVM or md volumes; the second only such volumes.
    """
    block = system.sysfs / "class/block"
    own: list[str] = []
    others = list(blocks)
    while new := [o for o in others if {p.name for p in (block / o / "slaves").glob("*")} <= set(own)]:
        own += new
        parts = [p.parent.name for name in own for p in sorted((block / name).glob("*/partition"))]
        holders = [p.name for name in own for p in sorted((block / name / "holders").glob("*"))]
        others = [o for o in dict.fromkeys(parts + holders) if o not in own]
    return own, others


@dataclass(frozen=True)
class Mount:
    number: str  # major:minor
    root: str  # which directory of the file system is mounted
    mount_point: Path
    source: str


def all_mounts(system: System) -> list[Mount]:
    """Return all mounts, newest first, as a later mount hides an earlier one."""
    mounts = []
    for line in text_of(system.mounts).splitlines():
        left, _, right = line.partition(" - ")
        fields = [re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), field) for field in left.split()]
        mounts.append(Mount(fields[2], fields[3], Path(fields[4]), right.split()[1]))
    return mounts[::-1]


def mounts_of(device: str, system: System) -> list[Mount]:
    """Return the mounts of a block device: of its whole file system first, then of parts, such as bind mounts."""
    at = system.sysfs / "class/block" / device
    # Compares device numbers, and the source for btrfs, which shows a number of its own.
    number, mapper = text_of(at / "dev"), text_of(at / "dm/name")
    sources = {f"/dev/{device}"} | ({f"/dev/mapper/{mapper}"} if mapper else set())
    mounts = [m for m in all_mounts(system) if m.number == number or m.source in sources]
    return sorted(mounts, key=lambda m: m.root != "/")


def p2p_detour(function: Path, drive: str, system: System) -> str:
    """Return why data between FPGA and drive leave the card's switch, or "" if they do not.

    Without an IOMMU they stay below the switch. If an IOMMU translates, addresses are valid only above the switch. In
    passthrough mode it depends on the switch: ports that isolate their devices (ACS) send everything upstream, and the
    kernel then puts FPGA and drive into different IOMMU groups.
    """
    groups = [(system.sysfs / "bus/pci/devices" / bdf / "iommu_group").resolve() for bdf in (function.name, drive)]
    if not all(g.is_dir() for g in groups):
        return ""
    kind = text_of(groups[1] / "type")
    if kind.startswith("DMA"):
        return f"the IOMMU translates (group {groups[1].name} is {kind}); boot with iommu=pt, or switch the IOMMU off"
    if groups[0] != groups[1]:
        return f"the switch isolates its ports (ACS; IOMMU groups {groups[0].name}, {groups[1].name}); IOMMU off helps"
    return ""


def text_of(path: str | Path) -> str:
    """Return the content of a file, or "" if it does not exist or the driver fails to provide it."""
    try:
        return Path(path).read_text(errors="replace").strip(" \t\r\n\0")
    except OSError:
        return ""


def number_of(path: Path) -> int:
    try:
        return int(text_of(path), 0)
    except ValueError:
        return 0


def shell_part(function: Path, part: str, attribute: str) -> str:
    """Return an attribute of a part of the shell; a part's directory has a name like rom.u.2097152."""
    return next(filter(None, (text_of(p / attribute) for p in sorted(function.glob(f"{part}.*")))), "")
