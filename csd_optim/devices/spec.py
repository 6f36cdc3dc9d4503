"""Device strings: what a user writes for a CSD, and what it means.

/mnt/nvme0                   an emulated CSD in that directory, durable (short for file:/mnt/nvme0)
file:/mnt/nvme0?scratch=1    one in a nameless file of that directory, gone with the process, however that ends
file:                        the same in the current directory
file:/mnt/nvme0?buffers=16&block=4MiB    tile buffers; size of one I/O request
file:/mnt/nvme0?depth=32     requests in flight on its file system
file:/mnt/nvme0?cache=4GB    memory for tiles that the next step then need not read; off: every step reads everything
file:/mnt/nvme0?numa=1       its buffers and update threads on this NUMA node; without, on the drive's, where the system
                             tells; off: on any
file:/mnt/nvme0?share=0.5    half as many parameters as a device that says nothing: any device may have a share
file:/mnt/nvme0?tbw=600TB    what the drive is rated to take: stats() then tells in how many days that is used up
xrt:0                        a SmartSSD: its FPGA by XRT's index, or by PCIe address (xrt:0000:65:00.1); durable, on
                             its own drive, which is found
xrt:0?nvme=/mnt/nvme0        ... in this directory, which should be on its own drive; also with scratch, buffers, ...
xrt:0?xclbin=PATH&p2p=0&timeout=60       the kernels' file; state by way of host memory; seconds until a kernel hangs
auto                         not a device, but a word beside some: which part each gets is chosen, by how fast they are
ram:?room=20GB               with auto: so many bytes at most; also for file:
ram:                         state in host memory, updated in place (beside other devices: in two slots, like a file's)
gpu:                         state in the memory of the parameters' accelerator, updated there; of whole parameters
gpu:?room=4GB                so many bytes of states at most, and beside other devices as much as that
gpu:?exact=0                 also where the accelerator rounds otherwise than the CPU
gpu:?update=5G/s&link=25GB/s with auto: what is known of the accelerator and its link, and is not measured then
null:                        keeps and computes nothing; times everything else

file:/mnt/nvme0?read=2.9GB/s&write=1.6GB/s&latency=100us    paced: its state flows no faster than that, as if the drive
                             were another (latency: before each read and write of a tile; mixed=3GB/s: what is read
                             and written together); nothing else changes
ram:?update=240M/s&link=8GB/s            parameters per second that it updates; and the link to the host, in bytes each
                             way at once, which all devices of an optimizer that name it share; also for file:, null:
file:?link=8GB/s&host=1      a plain drive: the host updates, and it is the state that goes over the link
file:?link=8GB/s&flash_grads=1           gradients come from the drive, where others put them during backward

/mnt/nvme{local_rank}        {rank}, {local_rank} and {world_size} are filled in where several processes train together
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import torch.distributed as dist

from .. import settings
from ..bindings import UNPACED, Pace
from ..errors import CSDTypeError, CSDValueError
from .backends import BACKENDS, DEFAULT_BLOCK, DEFAULT_DEPTH, Backend
from .machine import available_memory

DEFAULT_BUFFERS = 8  # three were measured to be too few, eight enough
AUTO = "auto"  # among devices: their shares are chosen
DEFAULT_TIMEOUT = 30.0  # seconds that a kernel may take for a tile; it takes milliseconds


@dataclass(frozen=True)
class DeviceSpec:
    """One device as the user named it."""

    text: str
    backend: str
    directory: Path | None = None  # file; xrt, where it is known
    durable: bool = False  # the store has a name and outlives the process
    buffers: int = DEFAULT_BUFFERS
    block_bytes: int = DEFAULT_BLOCK
    depth: int = DEFAULT_DEPTH  # requests in flight on its file system, if no other device there asks for more
    chosen: frozenset[str] = frozenset()  # by the user, of block and depth
    cache_bytes: int = 0  # memory, beside the buffers, for what the next step need not read; or NO_CACHE
    numa: int | None = None  # the node of its buffers and update threads, or ANY_NODE; None: the drive's
    tbw_bytes: int | None = None  # the drive's rating: bytes that it takes in its life
    share: float | None = None  # of the tiles, relative to the other devices; None: not said
    is_placed: bool = False  # its share is chosen, see placement.py
    room_bytes: int | None = None  # that it may then have of states; None: all that is free
    pace: Pace = UNPACED
    # gpu only
    exact: bool = True  # the bits of other devices, or an error
    known_update: float | None = None  # parameters per second; None: to be measured
    known_link: float | None = None  # bytes per second each way, between host and accelerator; None: likewise
    # xrt only
    card: str = ""  # XRT's index or a PCIe address
    xclbin: Path | None = None  # None: where it is looked for
    p2p: str = "auto"  # "1": insist, "0": by way of host memory
    timeout: float = DEFAULT_TIMEOUT  # seconds

    def __str__(self) -> str:
        return self.text

    @property
    def kind(self) -> Backend:
        """Its row in the table of back ends."""
        return BACKENDS[self.backend]


def shares_of(specs: Sequence[DeviceSpec]) -> tuple[float, ...] | None:
    """Of the tiles, relative to each other, as it was said; else, if all are paced, as their pace is. None: equal."""
    rates = [s.pace.params_per_second for s in specs]
    if any(s.share is not None for s in specs):
        shares = tuple(1.0 if s.share is None else s.share for s in specs)
    elif all(map(math.isfinite, rates)):
        shares = tuple(round(rate / max(rates), 3) or 0.001 for rate in rates)
    else:
        return None
    return shares if len({*shares}) > 1 else None


def days_left(tbw_bytes: int, written_bytes: int, seconds: float) -> float:
    """Days of training until a drive has taken what it is rated for, at the rate at which it was written so far."""
    per_day = written_bytes / seconds * 86400 if seconds > 0 else 0.0
    return max(0.0, tbw_bytes - written_bytes) / per_day if per_day else math.inf


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
        example = BACKENDS[text.lower()].example
        raise CSDValueError(f"Invalid device: {text!r}; write '{example}', or './{text}' for the directory")
    # A scheme has two letters or more and no slash before its colon; everything else is a directory.
    scheme = re.match(r"([A-Za-z][A-Za-z0-9_]+):", text)
    if not scheme:
        if "?" in text and not Path(text).exists():
            raise CSDValueError(f"Invalid device: {text!r}; options need the back end: 'file:{text}'")
        return DeviceSpec(text, "file", Path(text).expanduser(), durable=True)
    backend = BACKENDS.get(scheme[1].lower())
    if not backend or text[scheme.end() :].startswith("//"):
        raise CSDValueError(
            f"Invalid device: {text!r}; write a directory such as /mnt/nvme0 or file:/mnt/nvme0; "
            f"the back ends are {', '.join(b + ':' for b in BACKENDS)}"
        )
    place, _, query = text[scheme.end() :].partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    values: dict[str, Any] = {"block_bytes": backend.block_bytes}
    for name, value in options.items():
        option = next((o for o in backend.options if o.name == name), None)
        if option is None:
            names = ", ".join(o.name for o in backend.options)
            raise CSDValueError(f"Invalid device: {text!r}; unknown option {name!r}, there are {names}")
        try:
            values[option.field or name] = option.read(value)
        except ValueError:
            raise CSDValueError(f"Invalid device: {text!r}; {name} is {option.what}, got {value!r}") from None
    values["pace"] = Pace(**{f.name: values.pop(f.name) for f in fields(Pace) if f.name in values})
    scratch = values.pop("scratch", False)
    values["chosen"] = frozenset({"block", "depth"} & options.keys())
    if not backend.place:
        if place:
            raise CSDValueError(f"Invalid device: {text!r}; {backend.name}: takes no place")
        return DeviceSpec(text, backend.name, **values)
    if backend.place == "directory":
        directory = Path(place or ".").expanduser()
        return DeviceSpec(text, backend.name, directory, durable=bool(place) and not scratch, **values)
    if not re.fullmatch(r"[0-9]{1,4}|([0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", place, re.I):
        raise CSDValueError(f"Invalid device: {text!r}; write a card's index, xrt:0, or its address, xrt:0000:65:00.1")
    return DeviceSpec(text, backend.name, durable=not scratch, card=place.lower(), **values)


def parse_devices(devices: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None) -> list[DeviceSpec]:
    """What `CSDAdam(devices=...)` accepts: None reads CSD_OPTIM_DEVICES (comma-separated), else one scratch CSD."""
    if devices is None:
        devices = settings.devices() or ["file:"]
    elif isinstance(devices, (str, os.PathLike)):
        devices = [devices]
    elif not isinstance(devices, Iterable):
        raise CSDTypeError(f"devices is a device string or a list of them, got {type(devices).__name__}")
    devices = [*devices]
    named = [d for d in devices if not _is_auto(d)]
    is_auto = len(named) < len(devices)
    if is_auto and not named:
        named = ["ram:", "file:"]
    specs = [parse_device(fill_in(d) if isinstance(d, str) else d) for d in named]
    if not specs:
        raise CSDValueError("Invalid devices: []; name at least one, or leave the argument out")
    _check_accelerator(specs)
    if is_auto:
        specs = _placed(specs)
    elif limited := next((s for s in specs if s.room_bytes is not None and not s.kind.on_accelerator), None):
        raise CSDValueError(f"Invalid device: '{limited}'; room is for devices beside 'auto', which chooses shares")
    cards = [s.card for s in specs if s.card]
    if twice := next((card for card in cards if cards.count(card) > 1), None):
        raise CSDValueError(f"Invalid devices: card {twice} is named twice")
    places = [s.directory.resolve() for s in specs if s.directory and s.durable]
    for place in places:
        if places.count(place) > 1:
            raise CSDValueError(
                f"Invalid devices: {str(place)!r} is named twice; each device needs a directory of its own"
            )
    linked = [s for s in specs if s.pace.link]
    for spec in linked:
        if spec.pace.link != linked[0].pace.link:
            raise CSDValueError(
                f"Invalid devices: '{linked[0]}' and '{spec}' share one link and name different rates for it"
            )
    return specs


def _is_auto(device: object) -> bool:
    return isinstance(device, str) and device.strip().lower() == AUTO


def _check_accelerator(specs: list[DeviceSpec]) -> None:
    """Raises CSDValueError if an accelerator cannot keep states beside these."""
    near = [s for s in specs if s.kind.on_accelerator]
    if len(near) > 1:
        raise CSDValueError("Invalid devices: gpu: is named twice; it is the accelerator of each parameter")
    if near and (card := next((s for s in specs if s.durable and s.kind.on_card), None)):
        raise CSDValueError(
            f"Invalid devices: '{near[0]}' beside '{card}', whose states only its kernels write. Take scratch devices "
            f"({card}?scratch=1), or name the directory without the card"
        )
    takes_none = (s for s in specs if s.kind.on_card or not s.kind.keeps_state)
    if near and any(s.durable for s in specs) and (other := next(takes_none, None)):
        raise CSDValueError(
            f"Invalid devices: '{near[0]}' beside named directories and '{other}', which takes no states from an "
            "accelerator: leave one of the three out"
        )


def _placed(specs: list[DeviceSpec]) -> list[DeviceSpec]:
    """Devices that are to have the shares that are best. Raises CSDValueError where that cannot be known.

    Where directories keep their states, memory cannot be a device beside them, as nothing could be resumed: it keeps
    what they then need not read.
    """
    for spec in specs:
        if spec.kind.on_accelerator and spec.room_bytes is None:
            raise CSDValueError(
                f"Invalid devices: 'auto' and '{spec}' without room; how much of its memory the model and its "
                "activations leave, only you know: gpu:?room=4GB"
            )
        if not (spec.kind.in_memory or spec.kind.has_file or spec.kind.on_accelerator) or spec.kind.on_card:
            raise CSDValueError(f"Invalid devices: 'auto' places states in directories and in ram:, not on '{spec}'")
        if spec.share is not None or spec.cache_bytes > 0:
            raise CSDValueError(f"Invalid devices: 'auto' chooses share and cache, and '{spec}' says one of them")
        if spec.pace != UNPACED and math.isinf(spec.pace.params_per_second):
            raise CSDValueError(f"Invalid devices: 'auto' cannot tell from its pace how fast '{spec}' is")
    memory = [spec for spec in specs if spec.kind.in_memory]
    if not any(spec.kind.has_file for spec in specs):  # in place, and in half of the room
        alone = "['gpu:?room=4GB', 'ram:']" if len(memory) < len(specs) else "'ram:'"
        raise CSDValueError(f"Invalid devices: 'auto' needs a drive beside memory; for memory alone write {alone}")
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # on this machine, each with as much
    sharing = int(ranks) if ranks.isdecimal() and int(ranks) else 1
    left = available_memory() // 2 // sharing // (sum(spec.room_bytes is None for spec in memory) or 1)
    rooms = {id(spec): left if spec.room_bytes is None else spec.room_bytes for spec in memory}
    if any(spec.durable for spec in specs):
        files = [spec for spec in specs if spec.kind.has_file]
        each = sum(rooms.values()) // len(files)
        near = [replace(spec, is_placed=True) for spec in specs if spec.kind.on_accelerator]
        return [*near, *(replace(spec, is_placed=True, cache_bytes=each or spec.cache_bytes) for spec in files)]
    return [replace(s, is_placed=True, room_bytes=rooms.get(id(s), s.room_bytes)) for s in specs]


def fill_in(device: str) -> str:
    """`device` with {rank}, {local_rank} and {world_size} filled in; a process on its own is rank 0 of 1."""
    alone = not (dist.is_available() and dist.is_initialized())
    rank = 0 if alone else dist.get_rank()
    values = {
        "{rank}": rank,
        "{local_rank}": 0 if alone else int(os.environ.get("LOCAL_RANK", rank)),
        "{world_size}": 1 if alone else dist.get_world_size(),
    }
    return re.sub("|".join(map(re.escape, values)), lambda found: str(values[found[0]]), device)
