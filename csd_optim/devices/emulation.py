"""Runs a command with XRT's software emulation set up around it: `devices=["xrt:0"]` works without a card.

XRT itself is the real one. In place of each card it starts hls_kernels/emulator/device.cpp, which runs the HLS kernels
as compiled by g++; a directory stands in for the card's NVMe. A temporary directory holds the files that XRT expects.
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
MEMORY_BYTES = 2 << 30  # per card: the most that the driver library can map; device.cpp has the same constant
MAX_DEVICES = 16
TERM_SECONDS = 10  # seconds that a command has to exit after SIGTERM
TIMED_OUT = 124  # exit status after a timeout, as of timeout(1)
DRIVER = "libxrt_swemu.so.2"

_ALLOC_VOID = re.compile(
    # CpuemShim::alloc_void() of Debian's XRT, which a wrong patch broke: it stores the address that realloc() returns
    # only if that is null. Every other address is lost, and the next message is written to freed memory.
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
    """Run `command` with `devices` emulated cards and return its exit status, 128 + N if signal N ended it.

    `drives`: directories that stand in for the cards' NVMe, one per card; None: temporary ones. The command runs in its
    own session and receives SIGINT, SIGTERM and SIGHUP; processes that it leaves behind are killed. After `timeout`
    seconds it is terminated, and the result is TIMED_OUT.

    Raises CSDUnavailableError if XRT is not installed, CSDValueError, FileNotFoundError if the command does not exist.
    """
    if not command:
        raise CSDValueError("Invalid command: []; name a program and its arguments")
    directory = tempfile.TemporaryDirectory(prefix="csd_optim_emu_", ignore_cleanup_errors=True)
    with _Signals() as signals, directory as name:
        return _run(command, os.environ | prepare(Path(name), devices, drives), timeout, signals)


def prepare(
    root: Path, devices: int | None = None, drives: Sequence[str | os.PathLike[str]] | None = None
) -> dict[str, str]:
    """Create the files that XRT expects in the empty directory `root`; return the environment that points to them.

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
            f"XRT cannot work in {str(root.parent)!r}: a shell would not take that for one word; set TMPDIR to another",
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
        "XILINX_OPENCL": str(root / "vitis"),  # takes precedence over XILINX_VITIS
        "EMCONFIG_PATH": str(root),
        "XRT_INI_PATH": str(root / "xrt.ini"),  # so that one in the current directory is ignored
        "SDACCEL_EM_RUN_DIR": str(root),
        "USER": os.environ.get("USER") or str(os.getuid()),  # part of the names of sockets, which must differ by user
        # One mapping of the whole memory for all buffers. Otherwise loading an xclbin onto one card unmaps the buffers
        # of all other cards.
        "VITIS_SW_EMU_ENABLE_SINGLE_MMAP": "1",
        "SW_EMU_PACKET_SIZE": "65536",  # bytes per socket message; larger ones were measured to be slower
        "CSD_OPTIM_XCLBIN": str(xclbin),
        settings.EMULATED_DRIVES: os.pathsep.join(map(str, places)),
    }
    if not libraries.is_relative_to("/usr/lib"):  # elsewhere the dynamic loader does not look by default
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(
            filter(None, [str(libraries), os.environ.get("LD_LIBRARY_PATH", "")])
        )
    return environment


def find_xrt() -> Path:
    """Return the directory with XRT's libraries and its software emulation driver. Raises CSDUnavailableError."""
    named = os.environ.get("XILINX_XRT")
    places = [Path(named, "lib")] if named else []
    # Debian's multiarch directories, those of other distributions, and that of AMD's packages.
    places += [*sorted(Path("/usr/lib").glob("*-linux-gnu*")), Path("/usr/lib64"), Path("/opt/xilinx/xrt/lib")]
    for place in places:
        if (place / DRIVER).exists():
            return place
    raise CSDUnavailableError(
        errno.ENOENT,
        f"XRT is not installed: {DRIVER} is neither in /usr/lib nor in /opt/xilinx/xrt/lib. On Debian and Ubuntu: "
        "apt install libxrt1",
    )


# ---- the files that XRT expects ------------------------------------------------------


def _make_xrt(root: Path, libraries: Path) -> None:
    """Create XRT's directory: links to the libraries, and a copy of the driver, repaired if necessary."""
    (root / "lib").mkdir(parents=True)
    for library in libraries.glob("libxrt*"):
        if library.name != DRIVER:
            (root / "lib" / library.name).symlink_to(library)
    (root / "lib" / DRIVER).write_bytes(repaired((libraries / DRIVER).read_bytes()))


def repaired(driver: bytes) -> bytes:
    """Return the driver library with a working alloc_void(), unchanged if it does not have Debian's bug.

    Raises CSDUnavailableError if the code to be patched occurs more than once.
    """
    found = list(_ALLOC_VOID.finditer(driver))
    if not found:
        return driver
    if len(found) > 1:
        raise CSDUnavailableError(
            errno.ENOTSUP, f"this version of {DRIVER} is unknown: alloc_void() is there {len(found)} times"
        )
    at, store = found[0].start("jump"), found[0].start("store")
    return driver[:at] + bytes([(store - (at + 1)) % 256]) + driver[at + 1 :]  # relative to the next instruction


def _make_vitis(root: Path) -> None:
    """Create the only part of Vitis that XRT uses: the program that emulates a card."""
    emulator = importlib.util.find_spec("csd_optim._emulator")
    if emulator is None or emulator.origin is None:
        raise CSDUnavailableError(errno.ENOENT, "this csd_optim was built without its emulator; install it anew")
    # Loads the library by path: importing csd_optim would import torch. Closes the host's files, which the fork has
    # inherited.
    code = (
        "import ctypes, os; os.closerange(3, os.sysconf('SC_OPEN_MAX')); "
        f"ctypes.CDLL({emulator.origin!r}).csd_emulator_main()"
    )
    program = root / "data/emulation/unified/cpu_em/generic_pcie/model/genericpciemodel"
    program.parent.mkdir(parents=True)
    # A shell script, because `#!` accepts neither long paths nor paths with spaces. Only the host reacts to Ctrl-C, so
    # signals are ignored from the start. If a real Vitis is installed, XRT has put its libraries in front of ours.
    program.write_text(
        "#!/bin/sh\n"
        "trap '' INT TERM HUP\n"
        f"export LD_LIBRARY_PATH={shlex.quote(os.environ.get('LD_LIBRARY_PATH', ''))}\n"
        f"exec {shlex.quote(sys.executable)} -IS -c {shlex.quote(code)}\n"
    )
    program.chmod(0o700)
    if not os.access(program, os.X_OK):
        raise CSDUnavailableError(
            errno.EACCES, f"programs in {tempfile.gettempdir()} cannot be executed; set TMPDIR to where they can"
        )


def _cards(devices: int) -> dict[str, object]:
    """Return the content of emconfig.json, as Vitis' emconfigutil would write it."""
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
    """Forwards signals to a process group, including those that arrive before the group exists."""

    def __enter__(self) -> _Signals:
        self._group: int | None = None
        self._pending: list[int] = []
        self._previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:  # set by nohup, and inherited by the command
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if self._group is None:
            self._pending.append(number)
        else:
            _kill_group(self._group, number)

    def forward_to(self, group: int) -> None:
        self._group = group
        for number in self._pending:
            _kill_group(group, number)


def _run(command: Sequence[str], environment: dict[str, str], timeout: float | None, signals: _Signals) -> int:
    # In its own session, so that all processes that the command starts form one group that can be killed.
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        signals.forward_to(process.pid)
        pidfd = os.pidfd_open(process.pid)
        timed_out = not _wait(pidfd, timeout)
        if timed_out:
            _kill_group(process.pid, signal.SIGTERM)
            _wait(pidfd, TERM_SECONDS)
        os.close(pidfd)
    finally:
        # Before wait() reaps the process: until then no other process group can have its number.
        _kill_group(process.pid, signal.SIGKILL)
        process.wait()
    if timed_out:
        return TIMED_OUT
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _wait(pidfd: int, timeout: float | None) -> bool:
    return bool(select.select([pidfd], [], [], timeout)[0])


def _kill_group(leader: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, number)
