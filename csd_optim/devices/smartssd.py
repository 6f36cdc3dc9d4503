"""Finds the SmartSSDs of this machine, and pairs each FPGA with the NVMe drive behind the same PCIe switch.

All facts come from sysfs, where XRT's own tools look too: that takes a millisecond, needs no privileges, and works even
if XRT is broken. The drive of a card is found by its place on the PCIe bus, never by its name. `ask_pyxrt()` adds what
XRT itself reports, for `csd-optim devices`; training never waits for it.

In emulation (XCL_EMULATION_MODE is set) sysfs has no cards: CSD_OPTIM_EMULATED_DRIVES lists a directory for each card,
separated by `:`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .. import settings
from ..errors import CSDUnavailableError, CSDValueError
from .spec import DeviceSpec
from .sysfs import (
    BDF,
    THIS_SYSTEM,
    System,
    all_mounts,
    bdf_numbers,
    disks_and_volumes,
    mounts_of,
    number_of,
    p2p_detour,
    shell_part,
    text_of,
)

XILINX = 0x10EE
ACCELERATOR = 0x12  # PCI classes
NVME = 0x0108
OLDEST_XRT = (2, 13)  # see native/src/xrt.h
ASK_SECONDS = 30.0  # timeout for pyxrt's answer


@dataclass(frozen=True)
class Drive:
    """The NVMe drive of a card."""

    name: str  # controller, such as nvme4; "" without a driver
    bdf: str
    model: str
    serial: str
    blocks: tuple[str, ...]  # whole disks, such as nvme4n1
    mounted: tuple[tuple[str, Path], ...]  # (name of disk, partition or volume; mount point), if on this drive alone


@dataclass(frozen=True)
class Card:
    """One card. Text is "" if the system does not tell it."""

    index: int | None  # XRT's number of the card; None if XRT does not see it
    bdf: str  # PCIe address of the user function, such as 0000:65:00.1; "" in emulation
    shell: str  # VBNV, such as xilinx_u2_gen3x4_xdma_gc_base_2
    serial: str  # of the card; on SmartSSDs that of the drive
    xclbin_uuid: str  # of the xclbin that is loaded now, or ""
    ready: bool
    p2p: str  # in XRT's words: enabled, disabled, no iomem, not supported; or unknown
    nvme: Drive | None
    directory: Path | None  # where a store goes if the user names no directory
    problems: tuple[str, ...] = ()  # reasons why the FPGA cannot be used
    no_directory: str = ""  # why there is no `directory`, and what the user can do
    warnings: tuple[str, ...] = ()  # reasons why it is slower than it could be

    @property
    def emulated(self) -> bool:
        return not self.bdf

    @property
    def name(self) -> str:
        """The card's name for `xrtDeviceOpenByBDF`. Unlike XRT's numbering it does not depend on XRT's version."""
        return self.bdf or str(self.index)

    def store_directory(self, named: Path | None = None) -> Path:
        """Return the directory for a store: `named` by the user, else the card's own.

        Raises CSDUnavailableError with the reason why the card cannot be used and what the user can do.
        """
        if self.problems:
            raise CSDUnavailableError(errno.ENODEV, f"card {self.name}: {self.problems[0]}")
        where = named or self.directory
        if where is None:
            raise CSDUnavailableError(errno.ENODEV, f"card {self.name}: {self.no_directory}")
        return where

    def drive_contains(self, directory: Path, system: System = THIS_SYSTEM) -> bool:
        """Return whether a directory, which need not exist, is on this card's drive. If not, data go through the host.

        In emulation every directory counts as on the drive.
        """
        if self.emulated:
            return True
        where = directory.resolve()
        mounts = [m for m in all_mounts(system) if where.is_relative_to(m.mount_point)]
        # The newest of several at one mount point.
        mount = max(mounts, key=lambda m: len(m.mount_point.parts), default=None)
        own = disks_and_volumes(self.nvme.blocks, system)[0] if self.nvme else []
        return any(mount in mounts_of(name, system) for name in own)


Facts = Mapping[str, str]  # what XRT reports about a card: index, name, xclbin_uuid, serial


def cards(xrt_facts: Mapping[str, Facts] | None = None, system: System = THIS_SYSTEM) -> list[Card]:
    """Return all cards in XRT's order, then those that XRT does not see. `xrt_facts`: by BDF, from `ask_pyxrt()`.

    Raises CSDUnavailableError in an emulation that names no drives.
    """
    if os.environ.get("XCL_EMULATION_MODE"):
        return _emulated()
    driver = system.sysfs / "bus/pci/drivers/xocl"
    functions = sorted(p for p in driver.glob("*") if BDF.fullmatch(p.name))
    nodes = {f.name: next(f.glob("drm/renderD*"), None) for f in functions}
    seen = [f for f in functions if (node := nodes[f.name]) and (system.dev / "dri" / node.name).exists()]
    ready = [f for f in seen if number_of(f / "ready")]
    if _xrt_version(system) < (2, 15):
        ready.reverse()  # up to 2.14, XRT numbers ready cards from the last to the first
    order = ready + [f for f in seen if f not in ready]
    found = [_card(f, order.index(f) if f in order else None, nodes[f.name], system) for f in functions]
    found.sort(key=lambda c: (c.index is None, c.index))
    return [_with_xrt_facts(c, xrt_facts[c.bdf]) if xrt_facts and c.bdf in xrt_facts else c for c in found]


def available_cards() -> list[Card]:
    """Return all cards; none in an emulation that names no drives: `find` then raises the reason."""
    try:
        return cards()
    except CSDUnavailableError:
        return []


def find(name: str, system: System = THIS_SYSTEM, xrt_facts: Mapping[str, Facts] | None = None) -> Card:
    """Return the card `name`: XRT's index, or a PCIe address, in full or short (65:00.1). `xrt_facts`: see `cards`.

    Raises CSDValueError if there is no such card, listing those that exist; CSDUnavailableError if there are no cards,
    with the reason.
    """
    found = cards(xrt_facts, system)
    if not found:
        raise CSDUnavailableError(errno.ENODEV, _why_none(system))
    there_are = "there are " + ", ".join(c.name if c.index is None else f"xrt:{c.index} ({c.name})" for c in found)
    if not found[0].bdf:
        there_are = "the emulation has " + ", ".join(f"xrt:{c.index}" for c in found)
    wrong = f"Invalid device: 'xrt:{name}'; "
    if name.isdecimal():
        chosen = [c for c in found if c.index == int(name)]
    elif BDF.fullmatch(name):
        domain, *rest = bdf_numbers(name)
        slot = [
            c
            for c in found
            if c.bdf and domain in (None, bdf_numbers(c.bdf)[0]) and bdf_numbers(c.bdf)[1:3] == rest[:2]
        ]
        chosen = [c for c in slot if bdf_numbers(c.bdf)[3] == rest[2]]
        if slot and not chosen:
            raise CSDValueError(f"{wrong}this is no user function; that of the same card is 'xrt:{slot[0].bdf}'")
        if len(chosen) > 1:
            raise CSDValueError(
                f"{wrong}write one of {', '.join(c.bdf for c in chosen)}: in full, with the PCIe domain"
            )
    else:
        raise CSDValueError(f"{wrong}write a number, xrt:0, or a PCIe address, xrt:0000:65:00.1; {there_are}")
    if not chosen:
        raise CSDValueError(f"{wrong}there is no such card; {there_are}")
    return chosen[0]


def no_p2p(driver_says: str) -> str:
    """Return the warning about a card whose drive cannot reach its memory. `driver_says`: Card.p2p."""
    return f"its drive cannot reach its memory by P2P (the driver says: {driver_says}): data goes through the host"


def with_directory(spec: DeviceSpec) -> DeviceSpec:
    """Return the device with the directory of its store filled in. Raises as `find` and `Card.store_directory`."""
    return replace(spec, directory=find(spec.card).store_directory(spec.directory)) if spec.card else spec


# ---- what XRT itself reports ---------------------------------------------------------

# Runs in another process, because a broken installation may crash or hang. Leaves out what a version of pyxrt lacks.
_ASK = """
import json, sys
import pyxrt
def attempt(call):
    try:
        return call()
    except Exception:
        return ""
def search(tree, key):
    if isinstance(tree, dict) and isinstance(tree.get(key), str):
        return tree[key]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return next((x for x in (search(part, key) for part in parts) if x), "")
about = pyxrt.xrt_info_device
cards = {}
for index in range(64):
    try:
        card = pyxrt.device(index)
        bdf = card.get_info(about.bdf)
    except Exception:
        break
    platform = attempt(lambda: json.loads(card.get_info(about.platform)))
    cards[bdf] = {
        "index": str(index),
        "name": attempt(lambda: card.get_info(about.name)),
        "xclbin_uuid": attempt(lambda: card.get_xclbin_uuid().to_string()),
        "serial": search(platform, "serial_number"),
    }
sys.stdout.write("\\n" + json.dumps(cards) + "\\n")
"""


def ask_pyxrt(seconds: float = ASK_SECONDS) -> dict[str, dict[str, str]]:
    """Return what pyxrt reports about each card, by BDF; nothing without pyxrt, or if it fails or exceeds `seconds`.

    Nothing in emulation either: there pyxrt would start emulated cards of its own, which have no BDF.
    """
    if os.environ.get("XCL_EMULATION_MODE"):
        return {}
    try:
        done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=seconds)
        answer = json.loads(done.stdout.strip().rpartition("\n")[2])  # XRT may crash at exit, so the status is ignored
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return answer if isinstance(answer, dict) else {}


def _with_xrt_facts(card: Card, xrt_facts: Facts) -> Card:
    warnings = card.warnings
    if card.index is not None and xrt_facts["index"] != str(card.index):
        warnings += (f"XRT itself counts this card as {xrt_facts['index']}: name it xrt:{card.bdf}",)
    return replace(
        card,
        shell=card.shell or xrt_facts["name"],
        serial=card.serial or xrt_facts["serial"],
        xclbin_uuid=card.xclbin_uuid or _uuid(xrt_facts["xclbin_uuid"]),
        warnings=warnings,
    )


def _uuid(text: str) -> str:
    """Return a UUID in lower case, or "" if it is all zeros, which means that no xclbin is loaded."""
    return text.lower() if text.strip("0-") else ""


# ---- a card in sysfs ---------------------------------------------------------------


def _card(function: Path, index: int | None, node: Path | None, system: System) -> Card:
    bdf = function.name
    problems = []
    if index is None:
        what = f"{system.dev}/dri/{node.name}" if node else "a DRM node"
        problems.append(f"{what} is missing: in a container, pass the device in; else load the driver xocl again")
    elif node and not os.access(system.dev / "dri" / node.name, os.R_OK | os.W_OK):
        problems.append(f"no permission for {system.dev}/dri/{node.name}: join the group that owns it, often `render`")
    version = _xrt_version(system)
    if version < OLDEST_XRT:
        problems.append(f"its driver is of XRT {version[0]}.{version[1]}; 2.13 or later is needed")
    if not (ready := bool(number_of(function / "ready"))):
        problems.append("it is not ready: `xbmgmt examine` as root says why; often the shell must be flashed")
    p2p = _p2p(function)
    warnings = []
    if p2p in _P2P_HELP:
        warnings.append(f"P2P is {p2p}, the state goes through the host: {_P2P_HELP[p2p].format(bdf=bdf)}")
    drive, directory, no_directory = _drive(function, system)
    if drive and p2p == "enabled" and (detour := p2p_detour(function, drive.bdf, system)):
        warnings.append(f"P2P goes through the host: {detour}")
    return Card(
        index=index,
        bdf=bdf,
        shell=shell_part(function, "rom", "VBNV"),
        serial=shell_part(function, "xmc", "serial_num") or (drive.serial if drive else ""),
        xclbin_uuid=_uuid(text_of(function / "xclbinuuid").partition("\n")[0]),
        ready=ready,
        p2p=p2p,
        nvme=drive,
        directory=directory,
        problems=tuple(problems),
        no_directory=no_directory,
        warnings=tuple(warnings),
    )


_P2P_HELP = {
    "disabled": "as root, `xbutil configure --p2p enable --device {bdf}`, then perhaps a warm reboot",
    "no iomem": "reboot warm; if that does not help, switch on `Above 4G decoding` in the BIOS",
    "not supported": "this shell has no P2P memory; flash one that has",
}


def _p2p(function: Path) -> str:
    """Return the state of P2P, derived like XRT's tools do from the sizes of the memory window (BAR) in sysfs."""
    lines = shell_part(function, "p2p", "config").splitlines()
    sizes = {key.strip(): int(size) for key, _, size in (line.partition(":") for line in lines) if size.isdecimal()}
    if not sizes:
        return "unknown"
    if "bar" not in sizes:
        return "not supported"
    if sizes.get("rbar", 0) > sizes["bar"]:  # the device asks for a larger window than the system has given it
        return "no iomem"
    return "enabled" if sizes.get("exp_bar") == sizes["bar"] else "disabled"


def _drive(function: Path, system: System) -> tuple[Drive | None, Path | None, str]:
    """Return the card's drive, the directory for a store, and if there is no directory, the reason."""
    name_it = f"name a directory: 'xrt:{function.name}?nvme=/mnt/...'"
    above = function.resolve().parents  # nearest first
    everything = [p.resolve() for p in (system.sysfs / "bus/pci/devices").glob("*")]
    disks = [p for p in everything if number_of(p / "class") >> 8 == NVME]
    common = next((p for p in above if BDF.fullmatch(p.name) and any(d.is_relative_to(p) for d in disks)), None)
    near = sorted(d for d in disks if common and d.is_relative_to(common))
    if not common or number_of(common / "vendor") != XILINX:
        # A common switch from another vendor joins several cards: a drive there belongs to another card, or to none.
        also = f"; {near[0].name} is only behind the same switch {common.name}" if common else ""
        return None, None, f"no NVMe drive is behind the switch of this card{also}; {name_it}"
    if len(near) > 1:
        return None, None, f"several NVMe drives are behind {common.name}: {', '.join(d.name for d in near)}; {name_it}"
    controller = next((near[0] / "nvme").glob("nvme*"), None)
    if not controller:
        drive = Drive("", near[0].name, "", "", (), ())
        return drive, None, f"its NVMe drive {near[0].name} has no driver: `modprobe nvme`"
    # With NVMe multipath, the kernel names each path like nvme4c4n1 and hides it; the disk is nvme4n1.
    blocks = sorted({re.sub(r"c\d+n", "n", p.name) for p in controller.glob("nvme*n*")})
    own, spread = disks_and_volumes(blocks, system)
    mounted = [(name, mounts[0].mount_point) for name in own if (mounts := mounts_of(name, system))]
    model, serial = text_of(controller / "model"), text_of(controller / "serial")
    drive = Drive(controller.name, near[0].name, model, serial, tuple(blocks), tuple(mounted))
    if not blocks:
        return drive, None, f"its NVMe drive {controller.name} has no namespace: `nvme list`, `nvme create-ns`"
    if len(mounted) == 1:
        return drive, mounted[0][1], ""
    if mounted:
        places = ", ".join(f"{at} ({block})" for block, at in mounted)
        return drive, None, f"several file systems of its NVMe drive are mounted: {places}; {name_it}"
    if spread:
        return drive, None, f"{spread[0]} lies on other drives too, not only on {blocks[0]}; {name_it}"
    disk = f"/dev/{own[-1]}"  # the disk, or the topmost partition or volume on it
    new = "" if own[1:] else f", after `mkfs.ext4 {disk}` if it is new (that erases it)"
    return drive, None, f"its NVMe drive {disk} is not mounted: `mount {disk} /mnt/smartssd0`{new}"


def _why_none(system: System) -> str:
    """Return the reason why no cards were found, with what the user can do."""
    pci = system.sysfs / "bus/pci"
    boards = [
        p.name
        for p in sorted((pci / "devices").glob("*"))
        if number_of(p / "vendor") == XILINX and number_of(p / "class") >> 16 == ACCELERATOR
    ]
    if not boards:
        return "there is no Xilinx card on the PCIe bus; without one, run it under `csd-optim emu -- ...`"
    if not (pci / "drivers/xocl").is_dir():
        return f"no XRT driver is loaded (xocl), but there is a card at {boards[0]}: install XRT, or `modprobe xocl`"
    return f"XRT's driver has taken no card, but there is one at {boards[0]}: `xbmgmt examine`; flash its shell"


def _xrt_version(system: System) -> tuple[int, ...]:
    """Return the version of XRT's driver, installed together with the library; a high one if it is unknown."""
    match = re.match(r"(\d+)\.(\d+)", text_of(system.sysfs / "module/xocl/version"))
    return (int(match[1]), int(match[2])) if match else (99,)


# ---- emulation ---------------------------------------------------------------------


def _emulated() -> list[Card]:
    drives = settings.emulated_drives()
    if not drives:
        raise CSDUnavailableError(
            errno.ENODEV, "XCL_EMULATION_MODE is set, but no emulated drives: run it under `csd-optim emu -- ...`"
        )
    return [
        Card(i, "", f"emulated ({os.environ['XCL_EMULATION_MODE']})", "", "", True, "enabled", None, Path(d).resolve())
        for i, d in enumerate(drives)
    ]
