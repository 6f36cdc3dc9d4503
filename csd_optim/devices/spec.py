"""Device strings: the syntax in which users name devices, and the parser.

/mnt/nvme0                   an emulated CSD in that directory, durable (short for file:/mnt/nvme0)
file:/mnt/nvme0?scratch=1    one in a nameless file of that directory, which disappears with the process
file:                        the same in the current directory
file:/mnt/nvme0?buffers=16&block=4MiB    number of tile buffers; size of one I/O request
file:/mnt/nvme0?depth=32     queue depth: requests in flight on its file system
file:/mnt/nvme0?cache=4GB    memory that caches tiles for the next step; off: every step reads everything
file:/mnt/nvme0?numa=1       NUMA node of its buffers and update threads; default: that of the drive, if it is known;
                             off: any
file:/mnt/nvme0?share=0.5    half as many parameters as a device without a share; for any device
file:/mnt/nvme0?tbw=600TB    the bytes that the drive is rated to endure: stats() then tells after how many days of
                             training they are used up
xrt:0                        a SmartSSD: its FPGA by XRT's index or by PCIe address (xrt:0000:65:00.1); durable, on the
                             card's own drive, which is found automatically
xrt:0?nvme=/mnt/nvme0        ... in this directory, which should be on the card's drive; also with scratch, buffers, ...
xrt:0?xclbin=PATH&p2p=0&timeout=60       the file with the kernels; p2p=0: state goes through host memory; seconds after
                             which a kernel counts as hanging
auto                         not a device: listed beside devices, it chooses their shares by how fast they are
ram:?room=20GB               with auto: at most this many bytes of states; also for file:
ram:                         state in host memory, updated in place (beside other devices: in two slots, as in a file)
gpu:                         state in the memory of the parameters' accelerator, updated there; whole parameters only
gpu:?room=4GB                at most this many bytes of states; beside other devices, it takes as much as fits
gpu:?update=5G/s&link=25GB/s with auto: the speed of the accelerator and of its link, which then need no measuring
null:                        keeps and computes nothing; for timing everything else

file:/mnt/nvme0?read=2.9GB/s&write=1.6GB/s&latency=100us    paced: state flows no faster than this, as if on another
                             drive (latency: before each read and write of a tile; mixed=3GB/s: limit for reads and
                             writes together); nothing else changes
ram:?update=240M/s&link=8GB/s            parameters that it updates per second; bytes per second of the link to the
                             host, each way at once, shared by all devices of an optimizer that name it; also for
                             file:, null:
file:?link=8GB/s&host=1      imitates a plain drive: the host updates, and the state goes over the link
file:?link=8GB/s&flash_grads=1           reads gradients from the drive, where others store them during backward

/mnt/nvme{local_rank}        {rank}, {local_rank} and {world_size} are filled in if several processes train together
/mnt/nvme0/{optimizer}       how many optimizers this process has made before with this placeholder: 0, 1, ...
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
from ..errors import CSDTypeError, CSDValueError
from ..rates import UNPACED, Rates
from .backends import BACKENDS, DEFAULT_BLOCK, DEFAULT_DEPTH, Backend
from .machine import available_memory

DEFAULT_BUFFERS = 8  # three were measured to be too few, eight to be enough
AUTO = "auto"  # listed among devices: csd_optim chooses their shares
OPTIMIZER = "{optimizer}"  # a placeholder in device strings
DEFAULT_TIMEOUT = 30.0  # seconds that a kernel may take for a tile; normally it takes milliseconds


@dataclass(frozen=True)
class DeviceSpec:
    """One device as the user named it."""

    text: str
    backend: str
    directory: Path | None = None  # of file; of xrt, once it is known
    durable: bool = False  # the store has a name and outlives the process
    buffers: int = DEFAULT_BUFFERS
    block_bytes: int = DEFAULT_BLOCK
    depth: int = DEFAULT_DEPTH  # requests in flight on its file system, if no other device there asks for more
    user_set: frozenset[str] = frozenset()  # which of "block" and "depth" the user has set
    cache_bytes: int = 0  # memory, beside the buffers, that caches tiles for the next step; or NO_CACHE
    numa: int | None = None  # NUMA node of its buffers and update threads, or ANY_NODE; None: that of the drive
    tbw_bytes: int | None = None  # the bytes that the drive is rated to endure in its life
    share: float | None = None  # of the tiles, relative to the other devices; None: not set
    is_placed: bool = False  # `auto` chooses its share, see balance.py
    room_bytes: int | None = None  # the most bytes of states that it then gets; None: all free space
    pace: Rates = UNPACED
    # gpu only
    known_update: float | None = None  # parameters per second; None: to be measured
    known_link: float | None = None  # bytes per second each way, between host and accelerator; None: to be measured
    # xrt only
    card: str = ""  # XRT's index or a PCIe address
    xclbin: Path | None = None  # None: search the usual places
    p2p: str = "auto"  # "1": required, "0": go through host memory
    timeout: float = DEFAULT_TIMEOUT  # seconds

    def __str__(self) -> str:
        return self.text

    @property
    def kind(self) -> Backend:
        """The device's row in the table of back ends."""
        return BACKENDS[self.backend]


def shares_of(specs: Sequence[DeviceSpec]) -> tuple[float, ...] | None:
    """Return the relative shares of tiles: the user's; else, if all devices are paced, by pace; None: equal ones."""
    rates = [s.pace.params_per_second for s in specs]
    if any(s.share is not None for s in specs):
        shares = tuple(1.0 if s.share is None else s.share for s in specs)
    elif all(map(math.isfinite, rates)):
        shares = tuple(round(rate / max(rates), 3) or 0.001 for rate in rates)
    else:
        return None
    return shares if len({*shares}) > 1 else None


def days_left(tbw_bytes: int, written_bytes: int, seconds: float) -> float:
    """Return the days of training until a drive has reached its rated endurance, at its average write rate so far."""
    per_day = written_bytes / seconds * 86400 if seconds > 0 else 0.0
    return max(0.0, tbw_bytes - written_bytes) / per_day if per_day else math.inf


def parse_device(text: str | os.PathLike[str]) -> DeviceSpec:
    """Parse one device string, and touch nothing. Raises CSDTypeError or CSDValueError."""
    if not isinstance(text, (str, os.PathLike)):
        raise CSDTypeError(f"a device is a string such as '/mnt/nvme0' or 'ram:', got {type(text).__name__}")
    if isinstance(text, os.PathLike):  # a path is a directory and is not parsed
        return DeviceSpec(os.fspath(text), "file", Path(text), durable=True)
    given, text = text, text.strip()
    if not text:
        raise CSDValueError("Invalid device: ''; name a directory, or 'ram:'")
    if text.lower() in BACKENDS:
        example = BACKENDS[text.lower()].example
        raise CSDValueError(f"Invalid device: {text!r}; write '{example}', or './{text}' for the directory")
    # A scheme has at least two letters and no slash before its colon; everything else is a directory.
    scheme = re.match(r"([A-Za-z][A-Za-z0-9_]+):", text)
    if text != given and (not scheme or scheme[1].lower() in ("file", "xrt")):
        raise CSDValueError(f"Invalid device: {given!r}; it begins or ends with a blank. Name such a path by a Path")
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
            values[option.field or name] = option.parse(value)
        except ValueError:
            raise CSDValueError(f"Invalid device: {text!r}; {name} is {option.accepts}, got {value!r}") from None
    values["pace"] = Rates(**{f.name: values.pop(f.name) for f in fields(Rates) if f.name in values})
    scratch = values.pop("scratch", False)
    values["user_set"] = frozenset({"block", "depth"} & options.keys())
    if not backend.place:
        if place:
            raise CSDValueError(f"Invalid device: {text!r}; {backend.name}: takes neither path nor index")
        return DeviceSpec(text, backend.name, **values)
    if backend.place == "directory":
        directory = Path(place or ".").expanduser()
        return DeviceSpec(text, backend.name, directory, durable=bool(place) and not scratch, **values)
    if not re.fullmatch(r"[0-9]{1,4}|([0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", place, re.I):
        raise CSDValueError(f"Invalid device: {text!r}; write a card's index, xrt:0, or its address, xrt:0000:65:00.1")
    return DeviceSpec(text, backend.name, durable=not scratch, card=place.lower(), **values)


def parse_devices(devices: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None) -> list[DeviceSpec]:
    """Parse the argument `devices` of CSDAdam. None: CSD_OPTIM_DEVICES (comma-separated), else one scratch CSD.

    Raises CSDTypeError, CSDValueError.
    """
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
        specs = _with_placement(specs)
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
    with_link = [s for s in specs if s.pace.link < math.inf]
    for spec in with_link:
        if spec.pace.link != with_link[0].pace.link:
            raise CSDValueError(
                f"Invalid devices: '{with_link[0]}' and '{spec}' share one link and name different rates for it"
            )
    return specs


def _is_auto(device: object) -> bool:
    return isinstance(device, str) and device.strip().lower() == AUTO


def _check_accelerator(specs: list[DeviceSpec]) -> None:
    """Raise CSDValueError if `gpu:` is among the devices and cannot keep states beside the others."""
    gpus = [s for s in specs if s.kind.on_accelerator]
    if len(gpus) > 1:
        raise CSDValueError("Invalid devices: gpu: is named twice; it is the accelerator of each parameter")
    if gpus and (card := next((s for s in specs if s.durable and s.kind.on_card), None)):
        raise CSDValueError(
            f"Invalid devices: '{gpus[0]}' beside '{card}', whose states only its kernels write. Take scratch devices "
            f"({card}?scratch=1), or name the directory without the card"
        )
    takes_none = (s for s in specs if s.kind.on_card or not s.kind.keeps_state)
    if gpus and any(s.durable for s in specs) and (other := next(takes_none, None)):
        raise CSDValueError(
            f"Invalid devices: '{gpus[0]}' with named directories and '{other}', which takes no states from an "
            "accelerator: leave one of the three out"
        )


def _with_placement(specs: list[DeviceSpec]) -> list[DeviceSpec]:
    """Return the devices with the fields that `auto` needs. Raises CSDValueError if it cannot choose their shares.

    Memory cannot be a device beside named directories, because a resume would miss its states; it becomes the
    directories' cache instead.
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
            raise CSDValueError(f"Invalid devices: 'auto' chooses share and cache, and '{spec}' sets one of them")
        if spec.pace != UNPACED and math.isinf(spec.pace.params_per_second):
            raise CSDValueError(f"Invalid devices: 'auto' cannot tell from its pace how fast '{spec}' is")
    memory = [spec for spec in specs if spec.kind.in_memory]
    if not any(spec.kind.has_file for spec in specs):  # without `auto`, memory updates in place, in half the space
        alone = "['gpu:?room=4GB', 'ram:']" if len(memory) < len(specs) else "'ram:'"
        raise CSDValueError(f"Invalid devices: 'auto' needs a drive beside memory; for memory alone write {alone}")
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # ranks on this machine, which share the memory equally
    sharing = int(ranks) if ranks.isdecimal() and int(ranks) else 1
    default_room = available_memory() // 2 // sharing // (sum(spec.room_bytes is None for spec in memory) or 1)
    rooms = {id(spec): default_room if spec.room_bytes is None else spec.room_bytes for spec in memory}
    if any(spec.durable for spec in specs):
        files = [spec for spec in specs if spec.kind.has_file]
        cache_bytes = sum(rooms.values()) // len(files)
        gpus = [replace(spec, is_placed=True) for spec in specs if spec.kind.on_accelerator]
        return [
            *gpus,
            *(replace(spec, is_placed=True, cache_bytes=cache_bytes or spec.cache_bytes) for spec in files),
        ]
    return [replace(s, is_placed=True, room_bytes=rooms.get(id(s), s.room_bytes)) for s in specs]


_n_optimizers = 0  # that have used OPTIMIZER


def count_optimizer(devices: Any) -> None:
    """Count an optimizer made on these devices (None: CSD_OPTIM_DEVICES), if their names have the placeholder."""
    global _n_optimizers
    named = settings.devices() if devices is None else [devices] if isinstance(devices, (str, os.PathLike)) else devices
    _n_optimizers += any(isinstance(d, str) and OPTIMIZER in d for d in named)


def fill_in(device: str) -> str:
    """Return `device` with its placeholders filled in; a single process is rank 0 of 1."""
    alone = not (dist.is_available() and dist.is_initialized())
    rank = 0 if alone else dist.get_rank()
    values = {
        "{rank}": rank,
        "{local_rank}": 0 if alone else int(os.environ.get("LOCAL_RANK", rank)),
        "{world_size}": 1 if alone else dist.get_world_size(),
        OPTIMIZER: _n_optimizers,
    }
    return re.sub("|".join(map(re.escape, values)), lambda found: str(values[found[0]]), device)
