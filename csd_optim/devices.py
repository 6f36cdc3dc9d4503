"""Device strings: what a user writes for a CSD, and what it means.

/mnt/nvme0                   an emulated CSD in that directory, durable (short for file:/mnt/nvme0)
file:/mnt/nvme0?scratch=1    one in a nameless file of that directory, gone with the process, however that ends
file:                        the same in the current directory
file:/mnt/nvme0?buffers=16&block=4MiB    tile buffers; size of one I/O request
file:/mnt/nvme0?tbw=600TB    what the drive is rated to take: stats() then tells in how many days that is used up
ram:                         state in host memory, updated in place (beside other devices: in two slots, like a file's)
null:                        keeps and computes nothing; times everything else
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

from .errors import CSDTypeError, CSDValueError

BACKENDS = ("file", "ram", "null")
DEFAULT_BUFFERS = 8  # three were measured to be too few, eight enough
DEFAULT_BLOCK = 1 << 20  # bytes of one I/O request; half and twice as much were measured to be slower
_OPTIONS = ("buffers", "block", "scratch", "tbw")
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}


@dataclass(frozen=True)
class DeviceSpec:
    """One device as the user named it."""

    text: str
    backend: str
    directory: Path | None = None  # file only
    durable: bool = False  # the store has a name and outlives the process
    buffers: int = DEFAULT_BUFFERS
    block_bytes: int = DEFAULT_BLOCK
    tbw_bytes: int | None = None  # the drive's rating: bytes that it takes in its life

    def __str__(self) -> str:
        return self.text


def days_left(tbw_bytes: int, written_bytes: int, seconds: float) -> float:
    """Days of training until a drive has taken what it is rated for, at the rate at which it was written so far."""
    per_day = written_bytes / seconds * 86400 if seconds > 0 else 0.0
    return max(0.0, tbw_bytes - written_bytes) / per_day if per_day else math.inf


def parse_bytes(text: str) -> int:
    """`4096`, `2MiB`, `1.5 GB` → bytes. Raises CSDValueError."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    try:
        assert match is not None
        return int(float(match[1]) * _UNITS[match[2].upper()])
    except (AssertionError, KeyError, ValueError):
        raise CSDValueError(f"Invalid size: {text!r}; write for example 4096, 2MiB or 1GB") from None


def parse_device(text: str | os.PathLike[str]) -> DeviceSpec:
    """Parses one device string. Raises CSDTypeError or CSDValueError; touches nothing."""
    if not isinstance(text, (str, os.PathLike)):
        raise CSDTypeError(f"a device is a string such as '/mnt/nvme0' or 'ram:', got {type(text).__name__}")
    if isinstance(text, os.PathLike):  # a path is a directory as it stands
        return DeviceSpec(os.fspath(text), "file", Path(text), durable=True)
    text = text.strip()
    if not text:
        raise CSDValueError("Invalid device: ''; name a directory, or 'ram:'")
    if text.lower() in BACKENDS:
        raise CSDValueError(f"Invalid device: {text!r}; write '{text.lower()}:', or './{text}' for the directory")
    # A scheme has two letters or more and no slash before its colon; everything else is a directory.
    scheme = re.match(r"([A-Za-z][A-Za-z0-9_]+):", text)
    if not scheme:
        if "?" in text and not Path(text).exists():
            raise CSDValueError(f"Invalid device: {text!r}; options need the back end: 'file:{text}'")
        return DeviceSpec(text, "file", Path(text).expanduser(), durable=True)
    backend = scheme[1].lower()
    if backend not in BACKENDS or text[scheme.end() :].startswith("//"):
        raise CSDValueError(
            f"Invalid device: {text!r}; write a directory such as /mnt/nvme0 or file:/mnt/nvme0; "
            f"the back ends are {', '.join(b + ':' for b in BACKENDS)}"
        )
    place, _, query = text[scheme.end() :].partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if backend != "file":
        if place or options:
            raise CSDValueError(f"Invalid device: {text!r}; {backend}: takes neither place nor options")
        return DeviceSpec(text, backend)
    buffers, block, durable, tbw = DEFAULT_BUFFERS, DEFAULT_BLOCK, bool(place), None
    for name, value in options.items():
        if name == "buffers":
            if not value.isdecimal() or not 3 <= int(value) <= 1024:
                raise CSDValueError(f"Invalid device: {text!r}; buffers is a number from 3 to 1024, got {value!r}")
            buffers = int(value)
        elif name == "block":
            block = parse_bytes(value)
            if block <= 0 or block % 4096:
                raise CSDValueError(f"Invalid device: {text!r}; block is a multiple of 4096 bytes, got {value!r}")
        elif name == "tbw":
            tbw = parse_bytes(value)
            if tbw <= 0:
                raise CSDValueError(f"Invalid device: {text!r}; tbw is a number of bytes such as 600TB, got {value!r}")
        elif name == "scratch":
            if value not in ("0", "1"):
                raise CSDValueError(f"Invalid device: {text!r}; scratch is 0 or 1, got {value!r}")
            durable = durable and value == "0"
        else:
            raise CSDValueError(f"Invalid device: {text!r}; unknown option {name!r}, there are {', '.join(_OPTIONS)}")
    return DeviceSpec(text, "file", Path(place or ".").expanduser(), durable, buffers, block, tbw)


def parse_devices(devices: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None) -> list[DeviceSpec]:
    """What `CSDAdam(devices=...)` accepts: None reads CSD_OPTIM_DEVICES (comma-separated), else one scratch CSD."""
    if devices is None:
        named = os.environ.get("CSD_OPTIM_DEVICES", "")
        devices = [d.strip() for d in named.split(",") if d.strip()] or ["file:"]
    elif isinstance(devices, (str, os.PathLike)):
        devices = [devices]
    elif not isinstance(devices, Iterable):
        raise CSDTypeError(f"devices is a device string or a list of them, got {type(devices).__name__}")
    specs = [parse_device(d) for d in devices]
    if not specs:
        raise CSDValueError("Invalid devices: []; name at least one, or leave the argument out")
    places = [s.directory.resolve() for s in specs if s.directory and s.durable]
    for place in places:
        if places.count(place) > 1:
            raise CSDValueError(
                f"Invalid devices: {str(place)!r} is named twice; each device needs a directory of its own"
            )
    return specs
