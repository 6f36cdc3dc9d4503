"""`csd-optim doctor`: checks whether this machine and its drives are fit for training, and says how to fix them.

Each check only turns facts into Findings; the facts come from /proc, /sys, smartctl and a probe.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch

from .. import settings
from ..devices import health, machine
from ..devices import smartssd as cards
from ..devices.machine import MEMORY_FILE_SYSTEMS
from ..devices.spec import DeviceSpec
from ..devices.sysfs import text_of
from ..engine.placing.tuning import ScratchFile, rate
from ..planning.model import slot_bytes
from ..store.file import ownership_advice
from ..store.layout import max_mappings
from .facts import describe_device

Status = Literal["ok", "slow", "no", "unknown"]
OK: Final = "ok"
SLOW: Final = "slow"  # it works, but should be fixed
BAD: Final = "no"
UNKNOWN: Final = "unknown"

NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "gpfs", "beegfs", "virtiofs", "fuse")
COPY_ON_WRITE = ("btrfs", "zfs", "bcachefs")
USUAL_MAPPINGS = 65530 * 7 // 8  # max_mappings() with Linux's default limit
WORN = 80  # percent of the endurance that the maker promises
FELL = 0.75  # a drive has slowed down if its last rate is below this share of its first
PROBE_BLOCK, PROBE_BYTES = 1 << 20, 8 << 30
TURNS = 20  # equal parts of a probe, each measured by itself


@dataclass(frozen=True)
class Finding:
    """One line of the report. `remedy`: what to do about it, empty if nothing."""

    what: str
    status: Status
    found: str
    remedy: str = ""


# ---- the machine -------------------------------------------------------------------------------


def examine_machine() -> list[Finding]:
    here, updater = machine.machine(), machine.updater()
    found = [
        check_updater(updater, settings.isa(), platform.machine()),
        *check_quota(machine.cpu_quota(), updater["threads"]),
        check_memory(here["memory_bytes"], os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        check_huge_pages(here["huge_pages"]),
        check_mappings(max_mappings()),
        check_accelerator(here["torch"], torch.accelerator.is_available()),
    ]
    nodes = text_of("/sys/devices/system/node/online")
    if nodes not in ("", "0"):
        found.append(Finding("NUMA", OK, f"nodes {nodes}; each drive's buffers and threads are put on its own"))
    return [*found, *check_cards(cards.available_cards())]


def check_updater(updater: dict[str, Any], asked: str | None, cpu: str) -> Finding:
    text = f"{updater['isa']}, {updater['threads']} threads"
    if updater["isa"] != "scalar":
        return Finding("CPU updater", OK, text)
    if asked == "scalar":
        return Finding("CPU updater", SLOW, text, "unset CSD_OPTIM_ISA")
    about = "this CPU has neither AVX-512 nor AVX2" if cpu == "x86_64" else f"vectorized by the compiler only on {cpu}"
    return Finding("CPU updater", SLOW, f"{text}: {about}", "csd-optim bench shows whether the CPU is the limit")


def check_quota(quota: float | None, threads: int) -> Iterator[Finding]:
    """Check the cgroup's CPU limit against the updater's threads. `quota`: CPUs, from machine.cpu_quota()."""
    if quota is not None:
        text = f"{quota:g} CPUs: this cgroup's limit"
        remedy = f"set CSD_OPTIM_THREADS={max(1, int(quota))}: more threads are throttled in the middle of an update"
        yield Finding("CPU time", SLOW, text, remedy) if quota < threads else Finding("CPU time", OK, text)


def check_memory(usable: int, there: int) -> Finding:
    limited = usable < there
    text = f"{usable / 1e9:.0f} GB" + (f" of {there / 1e9:.0f} GB: this cgroup's limit" if limited else "")
    return Finding("memory", OK, text)


def check_huge_pages(enabled: str) -> Finding:
    remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: buffers take less CPU time"
    return Finding("huge pages", SLOW, "never", remedy) if enabled == "never" else Finding("huge pages", OK, enabled)


def check_mappings(usable: int) -> Finding:
    """Check how many memory mappings the states may have. `usable`: from max_mappings()."""
    text = f"{usable} mappings for states"
    if usable >= USUAL_MAPPINGS:
        return Finding("vm.max_map_count", OK, text)
    return Finding("vm.max_map_count", SLOW, f"{text}, so tiles are larger", "sysctl -w vm.max_map_count=262144")


def check_accelerator(version: str, there: bool) -> Finding:
    return Finding("torch", OK, f"{version}, {'with' if there else 'without'} an accelerator")


def check_cards(there: Sequence[cards.Card]) -> list[Finding]:
    if not there:
        return [Finding("SmartSSDs", OK, "none; drives do not need one")]
    found = [Finding("SmartSSDs", OK, f"{len(there)}; csd-optim devices --probe xrt:0 measures one")]
    return found + [Finding(f"SmartSSD {c.name}", SLOW, text, "docs/smartssd.md") for c in there for text in c.warnings]


# ---- a directory -------------------------------------------------------------------------------


def examine_directory(spec: DeviceSpec, share: int | None) -> list[Finding]:
    """Check a device's directory. `share`: bytes that the model's states take on its file system, None if unknown."""
    entry = describe_device(spec, {})
    if "problem" in entry:
        remedy = ownership_advice(spec.directory) if spec.directory and not spec.card else ""
        return [Finding("accelerator" if spec.kind.on_accelerator else "directory", BAD, entry["problem"], remedy)]
    if "storage" not in entry:
        return [Finding("directory", OK, "memory: nothing to check")]
    place, store = entry["storage"], entry["store"]
    found = [check_file_system(place["filesystem"]), check_direct_io(entry["direct_io"])]
    found.append(check_room(place["free_bytes"] + (store or {}).get("bytes", 0), share))
    if store:
        found.append(check_store(store))
    blocks = health.disks_below(os.stat(entry["directory"]).st_dev)
    for block in blocks:
        disk = health.describe_disk(block)
        found += check_disk(disk)
        found += check_limits(disk["name"], machine.io_limits(text_of(block / "dev")))
        found += check_smart(disk, health.smart(disk["name"]))
    if not blocks and place["filesystem"] not in MEMORY_FILE_SYSTEMS:
        found.append(Finding("drive", UNKNOWN, "the system does not say which drive this file system is on"))
    return found


def check_file_system(kind: str) -> Finding:
    if kind in MEMORY_FILE_SYSTEMS:
        remedy = 'use a directory on a drive; if memory is meant, devices="ram:" is faster'
        return Finding("file system", BAD, f"{kind}: memory, not a drive", remedy)
    if kind == "overlay":
        return Finding("file system", SLOW, "a container's own layer: lost with it", "mount a volume of the host")
    if kind.partition(".")[0] in NETWORK_FILE_SYSTEMS:
        return Finding("file system", SLOW, f"{kind}: over a network", "use a local drive")
    if kind in COPY_ON_WRITE:
        return Finding("file system", SLOW, f"{kind}: copy-on-write, with its own checksums", "use ext4 or xfs")
    return Finding("file system", OK, kind)


def check_direct_io(direct: bool) -> Finding:
    remedy = "use ext4 or xfs on a local drive"
    return Finding("direct I/O", OK, "yes") if direct else Finding("direct I/O", SLOW, "no: via the page cache", remedy)


def check_room(free_bytes: int, share: int | None) -> Finding:
    if share is None:
        return Finding("room", OK, f"{free_bytes / 1e9:.0f} GB free; --params 7B checks whether a model fits")
    text = f"{free_bytes / 1e9:.0f} GB free, and the states take {share / 1e9:.0f} GB"
    remedy = 'state_dtype="8bit", or one more drive'
    return Finding("room", OK, text) if share <= free_bytes else Finding("room", BAD, text, remedy)


def check_store(store: dict[str, Any]) -> Finding:
    """Check the store that is there. `store`: as in the result of describe_device()."""
    if "problem" in store:
        return Finding("store", BAD, store["problem"], "csd-optim verify")
    if store["owner"] is not None:
        return Finding("store", OK, f"step {store['step']}, in use by process {store['owner']}")
    if store["torn"]:
        text = f"step {store['step']}, torn: stopped within the next step, which one slot per tile cannot undo"
        return Finding("store", BAD, text, "continue from a snapshot or a checkpoint")
    return Finding("store", OK, f"step {store['step']}; resume=True continues, overwrite=True starts anew")


def check_disk(disk: dict[str, Any]) -> Iterator[Finding]:
    """Check the kind of a drive, and its PCIe link. `disk`: from health.describe_disk()."""
    what, model = f"drive {disk['name']}", disk["model"] or "of unknown make"
    if disk["name"].startswith(("vd", "xvd", "nbd", "rbd", "loop")):
        yield Finding(what, UNKNOWN, "virtual: the physical drive is not visible", "--probe 60 measures it")
    elif disk["rotational"]:
        yield Finding(what, SLOW, f"{model}: a hard disk", "use an SSD: a step would take minutes per GB")
    elif disk["removable"]:
        yield Finding(what, SLOW, f"{model}: on USB", "use a drive on PCIe")
    else:
        yield Finding(what, OK, model)
    link, best = disk["link"], disk["best_link"]
    if link and best:
        text = f"{link[0]:g} GT/s x {link[1]}"
        slow = math.prod(link) < math.prod(best)
        remedy = "try another slot; check PCIe power management"
        yield (
            Finding(f"{what}, PCIe", SLOW, f"{text}, could be {best[0]:g} GT/s x {best[1]}", remedy)
            if slow
            else Finding(f"{what}, PCIe", OK, text)
        )


def check_limits(name: str, limits: dict[str, int]) -> Iterator[Finding]:
    """Check what the cgroup allows on drive `name`. `limits`: bytes per second, from machine.io_limits()."""
    if limits:
        text = ", ".join(f"{kind} {rate / 1e9:.2f} GB/s" for kind, rate in limits.items())
        remedy = "raise what the container may read and write, or give it another drive"
        yield Finding(f"drive {name}, limit", SLOW, f"{text}: this cgroup's limit", remedy)


def check_smart(disk: dict[str, Any], said: dict[str, Any]) -> Iterator[Finding]:
    """Check a drive's health and wear. `said`: from health.smart()."""
    what = f"drive {disk['name']}, health"
    if "problem" in said:
        warm = "" if disk["celsius"] is None else f"; {disk['celsius']:.0f} °C"
        yield Finding(what, UNKNOWN, said["problem"] + warm, said.get("remedy", ""))
        return
    facts = [f"{said['percent_used']} % of its endurance used"] if said["percent_used"] is not None else []
    if said["written_bytes"] is not None:
        facts.append(f"{said['written_bytes'] / 1e12:.0f} TB written")
    if said["celsius"] is not None:
        facts.append(f"{said['celsius']} °C")
    text = ", ".join(facts) or "passed"
    if not said["passed"] or said["critical_warning"]:
        yield Finding(what, BAD, f"failing: {text}", "replace it before it loses data")
    elif said["media_errors"]:
        yield Finding(what, SLOW, f"{said['media_errors']} media errors; {text}", "keep snapshots elsewhere")
    elif (said["percent_used"] or 0) >= WORN:
        yield Finding(what, SLOW, text, 'state_dtype="8bit" writes less than half as much')
    else:
        yield Finding(what, OK, text)
    if said["hot_minutes"]:
        hot = f"was above its critical temperature for {said['hot_minutes']} minutes of its life"
        yield Finding(f"{what}, heat", SLOW, hot, "add a heat sink or airflow")


# ---- a probe -----------------------------------------------------------------------------------


def probe(directory: Path, seconds: float, tick: Callable[[], None]) -> tuple[list[float], tuple[float, float] | None]:
    """Read and write an unnamed scratch file as a step does, for `seconds`, in TURNS equal turns.

    Returns the bytes per second of each turn, read plus written, and health.temperature_of() the drive that came
    nearest to its temperature limit, or None. `tick` is called after each turn. Raises CSDOSError.
    """
    free_bytes = machine.storage(directory)["free_bytes"]
    blocks = health.disks_below(directory.stat().st_dev)
    heat: list[tuple[float, float]] = []

    def turned() -> None:
        heat.extend(filter(None, map(health.temperature_of, blocks)))
        tick()

    with ScratchFile(directory, min(PROBE_BYTES, free_bytes // 4), PROBE_BLOCK) as scratch:
        scratch.fill(seconds=seconds / 10)
        rates = list(_turns(scratch, seconds, turned))
    return rates, max(heat, key=lambda h: (h[0] - h[1], h[0]), default=None)


def _turns(scratch: ScratchFile, seconds: float, tick: Callable[[], None]) -> Iterator[float]:
    for _ in range(TURNS):
        end = time.perf_counter() + seconds / TURNS
        rates = []
        while (left := end - time.perf_counter()) > 0:
            rates.append(rate([scratch], "mixed", left))
        yield statistics.mean(rates)
        tick()


def check_rates(rates: Sequence[float], seconds: float, heat: tuple[float, float] | None) -> Finding:
    """Check whether a drive slowed down: the median of the last third of the turns against that of the first third.

    `rates`, `heat`: from probe(), in bytes per second and °C.
    """
    third = len(rates) // 3
    first, last = statistics.median(rates[:third]), statistics.median(rates[-third:])
    what, hot = f"{seconds:.0f} s of work", heat is not None and heat[0] >= heat[1]
    warm = f", {heat[0]:.0f} °C" + (f" of {heat[1]:.0f} at most" if heat[1] < math.inf else "") if heat else ""
    if last >= FELL * first:
        text = f"{last / 1e9:.2f} GB/s, read and written together{warm}"
        return Finding(what, SLOW, text, "cool it: it will slow down") if hot else Finding(what, OK, text)
    cold = heat is not None and not hot and heat[1] < math.inf
    why = "it is too hot" if hot else "its fast cache is full" if cold else "its fast cache is full, or it is too hot"
    text = f"falls from {first / 1e9:.2f} to {last / 1e9:.2f} GB/s: {why}{warm}"
    return Finding(what, SLOW, text, "expect the lower rate in training" + ("" if cold else "; cool it"))


# ---- all of it ---------------------------------------------------------------------------------


def examine(
    specs: Sequence[DeviceSpec], params: int | None, state_dtype: str, seconds: float, tick: Callable[[str], None]
) -> dict[str, list[Finding]]:
    """Return the findings about the machine, and about each device under its name.

    `params`: the model's size, if known. `seconds`: how long each drive is probed, 0 for no probe. `tick` is called
    TURNS times per probe. Raises CSDOSError.
    """
    found = {"this machine": examine_machine()}
    for spec, share in zip(specs, shares(specs, params, state_dtype), strict=True):
        found[str(spec)] = of_this = examine_directory(spec, share)
        if seconds and spec.directory and not any(f.status == BAD for f in of_this):
            at = spec.directory if spec.directory.is_dir() else spec.directory.parent
            rates, heat = probe(at, seconds, lambda at=at: tick(f"measuring {at}"))  # type: ignore[misc]
            of_this.append(check_rates(rates, seconds, heat))
    return found


def shares(specs: Sequence[DeviceSpec], params: int | None, state_dtype: str) -> list[int | None]:
    """Return the bytes that the states of all devices on each device's file system take, per device."""
    if params is None:
        return [None] * len(specs)
    each = 2 * slot_bytes(state_dtype, 2) * params / len(specs)  # two slots, 16-bit parameters
    systems = [_file_system(spec) for spec in specs]
    return [round(each * systems.count(system)) for system in systems]


def _file_system(spec: DeviceSpec) -> int | None:
    places = (spec.directory, spec.directory.parent) if spec.directory else ()
    return next((at.stat().st_dev for at in places if at.is_dir()), None)
