"""Runs a command with XRT's software emulation set up around it: `devices=["xrt:0"]` works without a card.

XRT itself is the real one. In place of each card it starts hls_kernels/emulator/device.cpp, which runs the HLS kernels
as g++ compiled them; a directory stands for the card's NVMe. All that XRT wants to find lies in a temporary directory.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import settings
from ..errors import CSDUnavailableError, CSDValueError
from .xclbin import write_emulated

PLATFORM = "xilinx_u2_gen3x4_xdma_emulated"
MEMORY_BYTES = 2 << 30  # of each card: what the driver library can map; device.cpp says the same
MAX_DEVICES = 16
PATIENCE = 10  # seconds that a command has to leave after SIGTERM
TIMED_OUT = 124  # the exit status, as of timeout(1)
DRIVER = "libxrt_swemu.so.2"

_GROWS = re.compile(
    # CpuemShim::alloc_void() as Debian's g++ made it of a patch that went wrong: the address that realloc returns is
    # stored where it was null. Every other address is lost, and the next message is written to freed memory.
    rb"(?P<store>\x48\x89\x83\x70\x06\x00\x00)"  # mov %rax,0x670(%rbx)
    rb"\x48\x89\xe8\xeb.\x0f\x1f\x40\x00"  # mov %rbp,%rax; jmp; nop
    rb"\x48\x8b\xbf\x70\x06\x00\x00\xe8....\x48\x85\xc0"  # mov 0x670(%rdi),%rdi; call realloc; test %rax,%rax
    rb"\x75(?P<jump>.)",  # jne
    re.DOTALL,
)


def run(
    command: Sequence[str],
    devices: int | None = None,
    drives: Sequence[str | os.PathLike[str]] | None = None,
    timeout: float | None = None,
) -> int:
    """Runs `command` with `devices` emulated cards and returns its exit status, 128 + N if signal N ended it.

    `drives`: directories that stand for the cards' NVMe, one each; without them they are temporary. The command has a
    session of its own and is passed SIGINT, SIGTERM and SIGHUP; whatever it leaves behind is killed. After `timeout`
    seconds it is ended, and TIMED_OUT returned.

    Raises CSDUnavailableError where XRT is not installed, CSDValueError, FileNotFoundError if there is no such command.
    """
    if not command:
        raise CSDValueError("Invalid command: []; name a program and its arguments")
    directory = tempfile.TemporaryDirectory(prefix="csd_optim_emu_", ignore_cleanup_errors=True)
    with _Signals() as signals, directory as name:
        return _run(command, os.environ | prepare(Path(name), devices, drives), timeout, signals)


def prepare(
    root: Path, devices: int | None = None, drives: Sequence[str | os.PathLike[str]] | None = None
) -> dict[str, str]:
    """Makes below `root`, an empty directory, what XRT wants to find, and returns the environment that says so.

    Raises CSDUnavailableError, CSDValueError.
    """
    if devices is None:
        devices = len(drives) if drives else 1
    if not 1 <= devices <= MAX_DEVICES:
        raise CSDValueError(f"Invalid number of devices: {devices}; it is from 1 to {MAX_DEVICES}")
    if drives is None:
        places = [root / f"drive{i}" for i in range(devices)]
        for place in places:
            place.mkdir()
    else:
        places = [Path(drive).resolve() for drive in drives]
        if len(places) != devices:
            raise CSDValueError(f"Invalid drives: {len(places)} for {devices} devices; each device needs one")
        for place in places:
            if not place.is_dir():
                raise CSDValueError(f"Invalid drive: {str(place)!r} is no directory")
            if places.count(place) > 1:
                raise CSDValueError(f"Invalid drives: {str(place)!r} is named twice; each device needs one of its own")
            if os.pathsep in str(place):
                raise CSDValueError(f"Invalid drive: {str(place)!r}; no {os.pathsep!r} may be in its name")
    if shlex.quote(str(root)) != str(root):
        raise CSDUnavailableError(
            errno.EINVAL,
            f"XRT cannot work in {str(root.parent)!r}: a shell would take that apart; set TMPDIR to another",
        )
    libraries = find_xrt()
    _make_xrt(root / "xrt", libraries)
    _make_vitis(root / "vitis")
    (root / "emconfig.json").write_text(json.dumps(_cards(devices)))
    (root / "xrt.ini").touch()
    xclbin = root / "csd_optim.xclbin"
    write_emulated(xclbin, PLATFORM, MEMORY_BYTES)
    environment = {
        "XCL_EMULATION_MODE": "sw_emu",
        "XILINX_XRT": str(root / "xrt"),
        "XILINX_VITIS": str(root / "vitis"),
        "XILINX_OPENCL": str(root / "vitis"),  # goes before the other
        "EMCONFIG_PATH": str(root),
        "XRT_INI_PATH": str(root / "xrt.ini"),  # not one that happens to lie in the current directory
        "SDACCEL_EM_RUN_DIR": str(root),
        "USER": os.environ.get("USER") or str(os.getuid()),  # without it all sockets have one name
        # One map of all the memory for each buffer. Otherwise a program that is loaded onto one card takes away the
        # maps of the buffers of all others.
        "VITIS_SW_EMU_ENABLE_SINGLE_MMAP": "1",
        "SW_EMU_PACKET_SIZE": "65536",  # of data that goes through a socket; more was measured to be slower
        "CSD_OPTIM_XCLBIN": str(xclbin),
        settings.EMULATED_DRIVES: os.pathsep.join(map(str, places)),
    }
    if not libraries.is_relative_to("/usr/lib"):  # where the loader does not look by itself
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(
            filter(None, [str(libraries), os.environ.get("LD_LIBRARY_PATH", "")])
        )
    return environment


def find_xrt() -> Path:
    """The directory of XRT's libraries with the driver for software emulation. Raises CSDUnavailableError."""
    named = os.environ.get("XILINX_XRT")
    places = [Path(named, "lib")] if named else []
    # Debian's multiarch directories, other distributions', AMD's packages.
    places += [*sorted(Path("/usr/lib").glob("*-linux-gnu*")), Path("/usr/lib64"), Path("/opt/xilinx/xrt/lib")]
    for place in places:
        if (place / DRIVER).exists():
            return place
    raise CSDUnavailableError(
        errno.ENOENT,
        f"XRT is not installed: {DRIVER} is neither in /usr/lib nor in /opt/xilinx/xrt/lib. On Debian and Ubuntu: "
        "apt install libxrt1",
    )


# ---- what XRT wants to find ----------------------------------------------------------


def _make_xrt(root: Path, libraries: Path) -> None:
    """XRT's own directory: links to the libraries, and the driver, repaired if need be."""
    (root / "lib").mkdir(parents=True)
    for library in libraries.glob("libxrt*"):
        if library.name != DRIVER:
            (root / "lib" / library.name).symlink_to(library)
    (root / "lib" / DRIVER).write_bytes(repaired((libraries / DRIVER).read_bytes()))


def repaired(driver: bytes) -> bytes:
    """The driver library with a working alloc_void(); as it is if it does not have Debian's fault.

    Raises CSDUnavailableError if what is to be repaired is there more than once.
    """
    found = list(_GROWS.finditer(driver))
    if not found:
        return driver
    if len(found) > 1:
        raise CSDUnavailableError(
            errno.ENOTSUP, f"this {DRIVER} is not one that is known: alloc_void() is there {len(found)} times"
        )
    at, store = found[0].start("jump"), found[0].start("store")
    return driver[:at] + bytes([(store - (at + 1)) % 256]) + driver[at + 1 :]  # jumps count from the next instruction


def _make_vitis(root: Path) -> None:
    """Of Vitis, XRT only wants the program that stands for a card."""
    emulator = importlib.util.find_spec("csd_optim._emulator")
    if emulator is None or emulator.origin is None:
        raise CSDUnavailableError(errno.ENOENT, "this csd_optim was built without its emulator; install it anew")
    # Not by importing csd_optim, which would import torch. The host's files are closed: it forked, and would not know.
    code = (
        "import ctypes, os; os.closerange(3, os.sysconf('SC_OPEN_MAX')); "
        f"ctypes.CDLL({emulator.origin!r}).csd_emulator_main()"
    )
    program = root / "data/emulation/unified/cpu_em/generic_pcie/model/genericpciemodel"
    program.parent.mkdir(parents=True)
    # A shell, because `#!` takes neither long paths nor such with spaces. Ctrl-C is for the host alone, from the start.
    # Where a real Vitis is set up, XRT has put its libraries before ours.
    program.write_text(
        "#!/bin/sh\n"
        "trap '' INT TERM HUP\n"
        f"export LD_LIBRARY_PATH={shlex.quote(os.environ.get('LD_LIBRARY_PATH', ''))}\n"
        f"exec {shlex.quote(sys.executable)} -IS -c {shlex.quote(code)}\n"
    )
    program.chmod(0o700)
    if not os.access(program, os.X_OK):
        raise CSDUnavailableError(
            errno.EACCES, f"programs in {tempfile.gettempdir()} must not be run; set TMPDIR to where they may"
        )


def _cards(devices: int) -> dict[str, object]:
    """emconfig.json, as Vitis' emconfigutil would write it."""
    card = {
        "Name": PLATFORM,
        "DdrBanks": [{"Size": f"{MEMORY_BYTES >> 30}GB"}],
        "NumDevices": str(devices),
        "FeatureRom": {},
        "PlatformData": {"plp": {"m2m": "disabled", "dma": "xdma"}},
    }
    return {
        "Version": {"FileVersion": "2.0"},
        "Platform": {"UnifiedPlatform": "true", "ExpandedPR": "true", "Boards": [{"Devices": [card]}]},
    }


# ---- the command ---------------------------------------------------------------------


class _Signals:
    """Passes signals on to a process group; those that come before there is one wait for it."""

    def __enter__(self) -> _Signals:
        self._group: int | None = None
        self._early: list[int] = []
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:  # as nohup wants it; the command inherits that
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if self._group is None:
            self._early.append(number)
        else:
            _kill_group(self._group, number)

    def pass_to(self, group: int) -> None:
        self._group = group
        for number in self._early:
            _kill_group(group, number)


def _run(command: Sequence[str], environment: dict[str, str], timeout: float | None, signals: _Signals) -> int:
    # A session of its own, so that whatever the command starts can be found, and ended, as one.
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        signals.pass_to(process.pid)
        ended = os.pidfd_open(process.pid)
        timed_out = not _wait(ended, timeout)
        if timed_out:
            _kill_group(process.pid, signal.SIGTERM)
            _wait(ended, PATIENCE)
        os.close(ended)
    finally:
        # Before the process is waited for: until then nobody else can have its number.
        _kill_group(process.pid, signal.SIGKILL)
        process.wait()
    if timed_out:
        return TIMED_OUT
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _wait(process: int, timeout: float | None) -> bool:
    return bool(select.select([process], [], [], timeout)[0])


def _kill_group(leader: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, number)
