"""The table of back ends: the options and the capabilities of each. A new one is a row here; see CONTRIBUTING.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bindings import IO_DEPTH
from .units import parse_bytes, parse_rate, parse_seconds
from .xclbin import RULES

DEFAULT_BLOCK = 1 << 20  # bytes per I/O request; half and twice this size were measured to be slower
DEFAULT_DEPTH = IO_DEPTH  # requests in flight on a file system
NO_CACHE = -1  # every step reads everything, even tiles that are still in a buffer
ANY_NODE = -1  # buffers and update threads need not be on the drive's NUMA node
CARD_BLOCK = 4 << 20  # published measurements of P2P transfers recommend 4 MiB and more


@dataclass(frozen=True)
class Option:
    """An option of a device string, after its `?`."""

    name: str
    accepts: str  # the values it accepts, for error messages
    parse: Callable[[str], Any]  # parses a value; raises ValueError
    field: str = ""  # the field of DeviceSpec or Rates, if its name differs


def _within(value: float, low: float, high: float) -> Any:
    if not low <= value <= high:
        raise ValueError
    return value


def _block(value: str) -> int:
    size = parse_bytes(value)
    if size % 4096:
        raise ValueError
    return int(_within(size, 4096, math.inf))


def _choice(*choices: str) -> Callable[[str], str]:
    return lambda value: choices[choices.index(value)]


def _flag(value: str) -> bool:
    return _choice("0", "1")(value) == "1"


def _cache(value: str) -> int:
    return NO_CACHE if value == "off" else int(_within(parse_bytes(value), 0, 1 << 50))


def _node(value: str) -> int:
    return ANY_NODE if value == "off" else int(_within(int(value), 0, 1023))


def _rate(unit: str) -> Callable[[str], float]:
    return lambda value: _within(parse_rate(value, unit), 1e3, 1e15)


_ANY_OPTIONS = (Option("share", "a number from 0.001 to 1000", lambda v: _within(float(v), 0.001, 1000)),)
_STORE_OPTIONS = (
    Option("buffers", "a number from 1 to 1024", lambda v: _within(int(v), 1, 1024)),
    Option("block", "a multiple of 4096 bytes", _block, "block_bytes"),
    Option("depth", f"a number from {DEFAULT_DEPTH} to 256", lambda v: _within(int(v), DEFAULT_DEPTH, 256)),
    Option("scratch", "0 or 1", _flag),
    Option("tbw", "a number of bytes such as 600TB", lambda v: _within(parse_bytes(v), 1, math.inf), "tbw_bytes"),
)
_PLACED_OPTIONS = (
    Option("room", "a number of bytes such as 20GB", lambda v: int(_within(parse_bytes(v), 1, 1 << 60)), "room_bytes"),
)
_FILE_OPTIONS = (
    Option("cache", "a number of bytes such as 4GB, or off", _cache, "cache_bytes"),
    Option("numa", "the number of a node, or off", _node),
)
_XRT_OPTIONS = (
    Option("nvme", "a directory on the card's drive", lambda v: Path(v).expanduser(), "directory"),
    Option("xclbin", "a file", lambda v: Path(v).expanduser()),
    Option("p2p", "0, 1 or auto", _choice("0", "1", "auto")),
    Option("timeout", "a number of seconds from 0.1 to 3600", lambda v: _within(float(v), 0.1, 3600)),
)
# Only devices without a real FPGA can be paced, that is, slowed down to the speed of another device.
_PACE = "a rate such as 2.9GB/s"
_DRIVE_PACE = (
    Option("read", _PACE, _rate("B")),
    Option("write", _PACE, _rate("B")),
    Option("mixed", _PACE, _rate("B")),
    Option("latency", "a time such as 100us", lambda v: _within(parse_seconds(v), 0, 60)),
    Option("host", "0 or 1", _flag, field="on_host"),
    Option("flash_grads", "0 or 1", _flag),
)
_UPDATE_PACE = (
    Option("update", "parameters per second such as 240M/s", _rate("")),
    Option("link", _PACE, _rate("B")),
)
# Rates of an accelerator do not pace it: `auto` uses them instead of measuring.
_ACCELERATOR_OPTIONS = (
    Option("update", "parameters per second such as 5G/s", _rate(""), "known_update"),
    Option("link", _PACE, _rate("B"), "known_link"),
)


@dataclass(frozen=True)
class Backend:
    """One kind of device: its options and capabilities. The native engine's part of it is a file in native/src."""

    name: str  # before the colon of a device string
    about: str
    example: str  # the shortest device string
    place: str  # what follows the colon: a "directory", a "card" or "" (nothing)
    options: tuple[Option, ...]
    has_file: bool = False  # its state lies in a file, which can be durable and has to be read and written
    on_card: bool = False  # a card's FPGA updates its state, with the kernels of an xclbin; else the CPU, if anything
    in_memory: bool = False  # its state lies in host memory, where a step can update it in place
    on_accelerator: bool = False  # its state lies with the parameters and torch updates it; the engine has no device
    keeps_state: bool = True  # False: it only imitates a device, for timing
    images_only: bool = False  # it reaches no gradient and no parameter in memory: tiles with gradients are images
    states_on_demand: bool = False  # its states have no windows: they are read when somebody looks at them
    rules: frozenset[str] | None = None  # update rules (UpdateRule.name) that it has kernels for; None: all
    block_bytes: int = DEFAULT_BLOCK  # default size of one I/O request

    @property
    def updated_by_cpu(self) -> bool:
        """Whether the native engine updates its state, with the code that opt.publish() has record what changes."""
        return (self.has_file or self.in_memory) and not self.on_card and self.keeps_state


BACKENDS = {
    b.name: b
    for b in (
        Backend(
            "file",
            "an emulated CSD: tiles in a file, updated by the CPU",
            "file:",
            "directory",
            _STORE_OPTIONS + _FILE_OPTIONS + _DRIVE_PACE + _UPDATE_PACE + _ANY_OPTIONS + _PLACED_OPTIONS,
            has_file=True,
        ),
        Backend(
            "xrt",
            "a SmartSSD: tiles on its drive, updated by its FPGA",
            "xrt:0",
            "card",
            _STORE_OPTIONS + _XRT_OPTIONS + _ANY_OPTIONS,
            has_file=True,
            on_card=True,
            rules=RULES,
            block_bytes=CARD_BLOCK,
        ),
        Backend(
            "ram",
            "states in host memory, updated by the CPU",
            "ram:",
            "",
            _UPDATE_PACE + _ANY_OPTIONS + _PLACED_OPTIONS,
            in_memory=True,
        ),
        Backend(
            "gpu",
            "states in the memory of the parameters' accelerator, updated there by torch",
            "gpu:",
            "",
            _ACCELERATOR_OPTIONS + _ANY_OPTIONS + _PLACED_OPTIONS,
            on_accelerator=True,
        ),
        Backend(
            "null",
            "keeps and computes nothing: times the rest",
            "null:",
            "",
            _UPDATE_PACE + _ANY_OPTIONS,
            keeps_state=False,
        ),
    )
}
