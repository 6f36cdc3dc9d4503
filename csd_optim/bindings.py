"""One thin function per C function of `native/include/csd.h`, those of an engine in `Native`; the rest speaks Python.

Every call releases the GIL. Addresses are plain integers (`tensor.data_ptr()`); the caller keeps the memory alive until
the step is finished.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from . import settings
from ._native import ffi, lib
from .errors import (
    CSDMemoryError,
    CSDOSError,
    CSDRuntimeError,
    CSDStoreError,
    CSDTornError,
    CSDUnavailableError,
    CSDValueError,
)
from .rates import UNPACED, Rates

DTYPE_CODES = {torch.float32: lib.CSD_F32, torch.float16: lib.CSD_F16, torch.bfloat16: lib.CSD_BF16}
IO_DEPTH: int = lib.CSD_IO_DEPTH
GRAD_SCALE: int = lib.CSD_GRAD_SCALE
MIN_GRAIN: int = lib.CSD_MIN_GRAIN
ELEMS_PER_BLOCK, ENTRY_LANES = 1 << 16, 16  # of Top-K's entries: kBlockElems, kLanes of native/include/csd_kernel.h
# The numbers of rules by name. PASS_RULES are for one of two passes over a tile; the second pass is named by the tile's
# index with PASS_2.
RULES, PASS_RULES = (
    {name.removeprefix("CSD_").lower(): number for number, name in ffi.typeof(kind).elements.items()}
    for kind in ("enum csd_rule", "enum csd_pass_rule")
)
PASS_2: int = lib.CSD_PASS_2
IN_SECTION, FROM_PARAM, IN_PARAM = lib.CSD_IN_SECTION, lib.CSD_FROM_PARAM, lib.CSD_IN_PARAM
UNLESS_SET, NEW, UNCOMPARED, SUPPLIED = lib.CSD_UNLESS_SET, lib.CSD_NEW, lib.CSD_UNCOMPARED, lib.CSD_SUPPLIED
TO_AND_FRO, SAME_ORDER, AS_PUSHED = lib.CSD_TO_AND_FRO, lib.CSD_SAME_ORDER, lib.CSD_AS_PUSHED
P2P = {"auto": lib.CSD_P2P_AUTO, "1": lib.CSD_P2P_ON, "0": lib.CSD_P2P_OFF}
ISAS = {"scalar": lib.CSD_ISA_SCALAR, "avx2": lib.CSD_ISA_AVX2, "avx512": lib.CSD_ISA_AVX512}

# numpy dtypes of the C structs that are passed as arrays; checked against the compiler's layout below.
PIECE = np.dtype([("param", "u4"), ("tile", "u4"), ("param_first", "u8"), ("tile_first", "u8"), ("elems", "u8")])
PARAM = np.dtype(
    [
        *(
            ("grad", "u8"),
            ("param", "u8"),
            ("grad_dtype", "u4"),
            ("param_dtype", "u4"),
            ("hyper", "u4"),
            ("master", "u4"),
        ),
        *(("topk", "f8"), ("residual", "u8"), ("topk_dtype", "u4"), ("seed", "u4")),
        *(("first", "u4"), ("in_image", "u4"), ("edited", "u8", 4)),
        ("watch", "u8"),
    ]
)
HYPER = np.dtype([("rule", "u4"), ("c", "f4", 9)])
TOPK_PART = np.dtype(
    [
        *(("grad", "u8"), ("residual", "u8"), ("n", "u8"), ("k", "u8"), ("tile_first", "u8")),
        *(("grad_dtype", "u4"), ("dtype", "u4"), ("scale", "f4"), ("seed", "u4")),
    ]
)
CODECS = {"fp32": lib.CSD_FP32, "8bit": lib.CSD_8BIT, "root": lib.CSD_ROOT, "linear": lib.CSD_LINEAR}
EVENT_KINDS = ("read", "update", "write")
CHANGE = np.dtype([("param", "u4"), ("count", "u4"), ("first", "u8"), ("elems", "u8"), ("at", "u8")])
BLOCK = np.dtype(
    [("first", "u8"), ("elems", "u8"), ("record", "u8"), ("payload", "u8"), ("kind", "u4"), ("count", "u4")]
)
EVENT = np.dtype([("device", "u4"), ("tile", "u4"), ("kind", "u4"), ("reserved", "u4"), ("begin", "f8"), ("end", "f8")])
TILE_STATE = np.dtype([("slot", "u4"), ("summed", "u4")])

for _dtype, _struct in (
    (PIECE, "csd_piece"),
    (PARAM, "csd_param"),
    (HYPER, "csd_hyper"),
    (TOPK_PART, "csd_topk_part"),
    (TILE_STATE, "csd_tile_state"),
    (EVENT, "csd_event"),
    (CHANGE, "csd_change"),
    (BLOCK, "csd_block"),
):
    _fields = {name: field.offset for name, field in ffi.typeof(_struct).fields}
    assert _dtype.itemsize == ffi.sizeof(_struct), _struct
    assert {name: _dtype.fields[name][1] for name in _dtype.names} == _fields, _struct  # type: ignore[index,union-attr]


class RuleRow(NamedTuple):
    """A row of native/include/rules.h; see `csd_rule_row`."""

    name: str  # a key of RULES or PASS_RULES
    rule: str  # the UpdateRule of which it is a variant or a pass
    of_pass: int  # 1 or 2; 0: the rule has one pass
    updated: int  # number of sections that it updates
    most: int  # most sections that a tile may have; of a pass, in its half
    codec: str  # a key of CODECS
    type: str  # the type in its header


def _rule_rows() -> list[RuleRow]:
    """Return all rows of rules.h. A number that is in no enum of csd.h is its own name."""
    names = {number: name for name, number in (*RULES.items(), *PASS_RULES.items())}
    codecs = {number: name for name, number in CODECS.items()}
    found, row = [], lib.csd_rules()
    while row.type:
        name = names.get(row.number, str(row.number))
        kind = ffi.string(row.type).decode()
        rule = name.partition("_")[0] if row.of_pass else kind.lower()
        found.append(RuleRow(name, rule, row.of_pass, row.updated, row.most, codecs[row.codec], kind))
        row += 1
    return found


RULE_ROWS = _rule_rows()

# (device, damaged tile or -1) → their name in error messages
Namer = Callable[[int, int], str]


# The state that an I/O error leaves behind. _UNDONE: it occurred within a step. _KEPT: the step was complete, but some
# of its states could not be written afterwards. _UNREAD: it occurred between steps, when states were read.
_UNDONE = "The step was undone; parameters and state are those before it."
TORN = (
    "With ram: or gpu: without a drive, a step cannot be undone: parameters and state are a mix of two steps. "
    "Go back to a snapshot or a checkpoint."
)
_KEPT = "The previous step is complete; states that were not written stay in memory, and the next call tries again."
_UNREAD = "The next call tries again."


def check(status: int, error: Any, name: Namer | None = None, outcome: str = _KEPT) -> None:
    """Turn a C status into an exception; no other place does. `outcome`: the state that an I/O error leaves behind."""
    if status == lib.CSD_OK:
        return
    text = ffi.string(error.text).decode(errors="replace")
    if status == lib.CSD_EDEVICE:
        device = f"{name(error.device, -1)}: " if name and error.device >= 0 else ""
        reason = f" ({os.strerror(error.os_errno)})" if error.os_errno else ""
        end = f" {outcome}" if outcome == _UNDONE else ""
        raise CSDUnavailableError(error.os_errno, f"{device}{text}{reason}.{end}")
    if name and error.device >= 0:
        text += f" on {name(error.device, error.tile)}"
    if status == lib.CSD_EINVAL:
        raise CSDValueError(text)
    if status == lib.CSD_ENOMEM:
        raise CSDMemoryError(text)
    if status == lib.CSD_EDAMAGED:
        raise CSDStoreError(f"{text}. {outcome}")
    if status == lib.CSD_ETORN:
        reason = os.strerror(error.os_errno) if error.os_errno else "given up"
        raise CSDTornError(error.os_errno or errno.EIO, f"{text}: {reason}. {TORN}")
    if status == lib.CSD_EIO:
        text += f": {os.strerror(error.os_errno)}. {outcome}"
        if error.os_errno == errno.ENOSPC:
            text += " Free some space and call step() again."
        raise CSDOSError(error.os_errno, text)
    raise CSDRuntimeError(text)


@dataclass(frozen=True)
class DeviceConfig:
    """What the engine needs to know about a device; see `csd_device`."""

    backend: str
    fd: int = -1
    buffers: int = 0
    block_bytes: int = 0
    card: Any = None  # the handle returned by card_open()
    p2p: str = "auto"
    pace: Rates = UNPACED
    depth: int = IO_DEPTH
    cache_bytes: int = 0  # host memory for tiles kept from step to step; -1: every step reads everything
    numa_node: int | None = None  # the drive's NUMA node; None: any


@dataclass(frozen=True, eq=False)
class ExtentConfig:
    """Equal tiles that are added to an engine, and what is in them; see `csd_extent`."""

    tile_elems: int  # elements of each section of a tile
    n_tiles: int
    sections: int  # number of states, 1 to 4
    file_offsets: Sequence[int]  # by device: the byte of its file at which its tiles begin
    pieces: np.ndarray[Any, Any]  # dtype PIECE, sorted by tile and place; tiles are numbered within the extent
    slots: int = 2  # of each tile; 1: steps write in place and cannot be undone
    states: np.ndarray[Any, Any] | None = None  # TILE_STATE, shape (n_tiles,), of an existing store; None: new, zeros
    devices: np.ndarray[Any, Any] | None = None  # uint32, shape (n_tiles,): the device of each tile; None: round-robin
    sum_elems: int | None = None  # elements of a section that one checksum covers; None: all
    sums: np.ndarray[Any, Any] | None = None  # with `states`: uint32, shape (n_tiles, chunks, sections of a slot)
    mappings: int = 1  # number of memory mappings of which a window consists
    codec: str = "fp32"  # a key of CODECS
    param_dtype: torch.dtype | None = None  # with codes: the dtype of all parameters


@dataclass(slots=True)  # frozen, it would take a microsecond longer per tile
class Push:
    """How a tile is pushed; see `csd_push`. Addresses are of host memory; 0: none.

    This memory is read or written until the tile's parameters are ready or the step ends.
    """

    # Addresses of the images of gradients and parameters, each of 4 bytes per element of the tile.
    images: tuple[int, int] = (0, 0)
    # Only where an engine takes_in_place. For each piece of the tile the addresses of its gradients, and those of its
    # parameters; 0: they are in the images.
    in_place: tuple[Sequence[int], Sequence[int]] | None = None
    # With images: the address of the Top-K entries among the gradients, and their number of words (uint32).
    entries: tuple[int, int] = (0, 0)
    # For each piece of the tile the address where its parameter's gradient begins; 0: it has no gradient after all.
    # None: gradients are in the images, or where the step's table says. Not for tiles with Top-K.
    grads: Sequence[int] | None = None
    # Address of hold_bytes() bytes, with which the tile is pushed early: nothing changes before release(),
    # finish(keep=False) undoes it, and `grads` are read until unchanged() returns. Not for tiles in memory, new, or
    # with Top-K.
    hold: int = 0
    # Address of all sections of the tile (fp32), one after another, as they are after the step: for parameters whose
    # master is SUPPLIED.
    states: int = 0


def _call(
    function: Any, *arguments: Any, name: Namer | None = None, outcome: str = _KEPT, device: int | None = None
) -> None:
    """Call a C function whose last argument is a csd_error. `device`: the device to name in errors."""
    error = ffi.new("csd_error *")
    status = function(*arguments, error)
    if device is not None:
        error.device = device
    check(status, error, name, outcome)


def _array(values: np.ndarray[Any, Any], ctype: str) -> Any:
    assert values.flags.c_contiguous
    return ffi.cast(ctype, values.ctypes.data)


def _address(address: int) -> Any:
    return ffi.cast("void *", address)


def card_open(name: str, xclbin: os.PathLike[str], kernels: Sequence[str], seconds: float) -> Any:
    """Open a card. `kernels`: the names of the kernels in the xclbin. Raises CSDUnavailableError."""
    out, names = ffi.new("csd_card **"), " ".join(kernels).encode()
    arguments = name.encode(), os.fsencode(xclbin), names, int(1000 * seconds), out
    _call(lib.csd_card_open, *arguments, name=lambda *_: f"card {name}", device=0)
    return out[0]


def card_close(card: Any, name: str) -> None:
    _call(lib.csd_card_close, card, name=lambda *_: f"card {name}", device=0)


def card_has_p2p(card: Any) -> bool:
    return bool(lib.csd_card_has_p2p(card))


def card_try_p2p(card: Any, fd: int, offset: int, name: str) -> None:
    """Test P2P, and set `card_has_p2p`: read a page of an O_DIRECT file into the card's memory and write it back."""
    _call(lib.csd_card_try_p2p, card, fd, offset, name=lambda *_: f"card {name}", device=0)


def card_measure(config: DeviceConfig, offset: int, nbytes: int, name: Namer) -> dict[str, float]:
    """Measure the rates of a device with a card, see `csd_card_rates`. Overwrites `nbytes` of its file at `offset`."""
    device, out = ffi.new("csd_device *"), ffi.new("csd_card_rates *")
    keep = _fill(device, config)
    _call(lib.csd_card_measure, device, offset, nbytes, out, name=name, device=0)
    del keep
    return {field: getattr(out, field) for field, _ in ffi.typeof(out[0]).fields}


def _fill(device: Any, config: DeviceConfig) -> Any:
    """Fill a `csd_device`. Returns the objects that it points to; they must live as long as the struct is read."""
    device.backend = backend = ffi.new("char[]", config.backend.encode())
    device.fd, device.buffers, device.block_bytes = config.fd, config.buffers, config.block_bytes
    device.card, device.p2p = config.card or ffi.NULL, P2P[config.p2p]
    limits = {k: 0 if v == math.inf else v for k, v in asdict(config.pace).items()}
    limits["host"] = limits.pop("on_host")
    device.pace = pace = ffi.new("csd_pace *", limits)
    device.depth, device.cache_bytes = config.depth, config.cache_bytes
    device.numa = 0 if config.numa_node is None else 1 + config.numa_node
    return backend, pace


_mappings: dict[int, int] = {}  # address of a window → number of its memory mappings


def _window(window: Any, elems: int, mappings: int) -> Any:
    """Return the window with a finalizer that unmaps its memory; until then mappings() counts it."""
    address, by_address, release = int(ffi.cast("uintptr_t", window)), _mappings, lib.csd_window_release
    by_address[address] = mappings

    def unmap(window: Any) -> None:
        del by_address[address]  # before the release: afterwards another window may get the same address
        release(window, elems)

    return ffi.gc(window, unmap)


def mappings() -> int:
    """Return the number of memory mappings of all windows in this process."""
    return sum([*_mappings.values()])


class Changes:
    """What steps change in watched parameters, recorded in a file of its own. `fd` stays the caller's: close it later.

    free() it when no step is under way, and no row of a table names one of its watches any more.
    """

    def __init__(self, fd: int) -> None:
        out = ffi.new("csd_changes **")
        _call(lib.csd_changes_create, fd, out)
        self.handle: Any = out[0]

    def free(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            lib.csd_changes_free(handle)

    def list(self) -> np.ndarray[Any, Any]:
        """Return the records, dtype CHANGE. Raises CSDOSError if some could not be written."""
        error = ffi.new("int32_t *")
        records = np.empty(lib.csd_changes_list(self.handle, ffi.NULL, 0, error), CHANGE)
        lib.csd_changes_list(self.handle, _array(records, "csd_change *"), len(records), error)
        if error[0]:
            raise CSDOSError(error[0], os.strerror(error[0]))
        return records

    @property
    def count(self) -> int:
        """The number of records."""
        return int(lib.csd_changes_list(self.handle, ffi.NULL, 0, ffi.new("int32_t *")))

    def rewind(self, n: int) -> None:
        """Drop all records but the first `n`, and forget why others are missing."""
        lib.csd_changes_rewind(self.handle, n)

    def encode(self, records: np.ndarray[Any, Any], blocks: np.ndarray[Any, Any], payload: np.ndarray[Any, Any]) -> int:
        """Encode blocks (BLOCK, filled in) from their records, into `payload` (uint8). Returns its used size.

        See csd_changes_encode. Raises CSDOSError.
        """
        used = ffi.new("uint64_t *")
        what = _array(records, "csd_change *"), len(records), _array(blocks, "csd_block *"), len(blocks)
        _call(lib.csd_changes_encode, self.handle, *what, _array(payload, "void *"), used)
        return int(used[0])


def checksum_of(address: int, first: int, n: int) -> int:
    """Return the checksum of `n` values of 16 bits of a parameter, the first of which is element `first`."""
    return int(lib.csd_changes_sum(ffi.cast("uint16_t *", address), first, n))


class Watch:
    """A csd_watch: makes the updates of a parameter record what they change. See csd.h.

    `first`: the index of its first element in the tensor of which it is a part. `groups`: by tile from `first_tile` on,
    the index of the first check; None: it needs no checks.
    """

    def __init__(
        self, changes: Changes, param: int, first: int, first_tile: int, groups: np.ndarray[Any, Any] | None
    ) -> None:
        self._struct: Any = ffi.new("csd_watch *")
        self._struct.changes, self._struct.param, self._struct.first = changes.handle, param, first
        self._struct.first_tile = first_tile
        self._checks: list[np.ndarray[Any, Any]] = []
        if groups is not None:
            self._groups = np.ascontiguousarray(groups, np.uint64)
            self._checks = [np.zeros(int(groups[-1]), np.uint32) for _ in range(2)]
            self._struct.groups = _array(self._groups, "uint64_t *")
            self._set_checks()

    def _set_checks(self) -> None:
        if self._checks:
            self._struct.checks, self._struct.new_checks = (_array(c, "uint32_t *") for c in self._checks)

    @property
    def address(self) -> int:
        return int(ffi.cast("uintptr_t", self._struct))

    @property
    def updated(self) -> int:
        """The number of elements that were updated since begin()."""
        return int(self._struct.updated)

    @property
    def sum(self) -> int:
        """By how much its checksum has changed since begin(); with `whole`, what it is."""
        return int(self._struct.sum)

    def begin(self, *, whole: bool) -> None:
        """Begin a step. `whole`: it records all elements."""
        self._struct.whole, self._struct.sum, self._struct.updated = whole, 0, 0

    def note(self, tile: int, piece: np.ndarray[Any, Any], dtype: torch.dtype, before: int, after: int) -> None:
        """Record what a step has changed in a piece that was updated elsewhere. See csd_watch_note.

        `piece`: an array of one, dtype PIECE. `before`, `after`: addresses.
        """
        row, code = _array(piece, "csd_piece *"), DTYPE_CODES[dtype]
        lib.csd_watch_note(self._struct, tile, row, code, _address(before), _address(after))

    def arrays(self) -> Sequence[np.ndarray[Any, Any]]:
        """Return the memory that it takes."""
        return [*self._checks]

    def keep(self) -> None:
        """Note that the step was kept: the next step compares with its bits."""
        self._checks.reverse()
        self._set_checks()


class Native:
    """One native engine: see the functions of the same names in csd.h. Errors call its devices as `name` does.

    No finalizer closes it: in a forked child, close() would wait for threads that the child does not have; and the
    garbage collector may run while its thread holds a lock that close() needs. finalize.py closes dropped ones.
    """

    takes_in_place = False

    def __init__(self, name: Namer) -> None:
        self._name = name
        self._engine: Any = None

    def _call(self, function: Any, *arguments: Any, outcome: str = _KEPT) -> None:
        _call(function, self._engine, *arguments, name=self._name, outcome=outcome)

    @property
    def is_open(self) -> bool:
        return self._engine is not None

    def open(self, devices: Sequence[DeviceConfig]) -> None:
        """Create the engine on these devices."""
        structs = ffi.new("csd_device[]", len(devices))
        keep = [_fill(struct, config) for struct, config in zip(structs, devices, strict=True)]
        out = ffi.new("csd_engine **")
        _call(lib.csd_engine_create, structs, len(devices), out, name=self._name)
        del keep
        self._engine = out[0]

    def close(self) -> None:
        """Close the engine, even if this raises."""
        engine, self._engine = self._engine, None
        _call(lib.csd_engine_close, engine, name=self._name)

    # ---- layout ----------------------------------------------------------------

    def extend(self, config: ExtentConfig) -> list[Any]:
        """Add an extent. Return one window per state; none for codes.

        A window is a buffer of `4 * n_tiles * tile_elems` bytes that unmaps itself. Raises CSDValueError if the extent
        is not as csd.h demands, CSDMemoryError, CSDOSError.
        """
        states, sums, devices, pieces = config.states, config.sums, config.devices, config.pieces
        assert pieces.dtype == PIECE
        assert devices is None or (devices.dtype == np.uint32 and len(devices) == config.n_tiles)
        sum_elems = min(config.sum_elems or config.tile_elems, config.tile_elems)
        if states is not None:
            shape = (config.n_tiles, -(-config.tile_elems // sum_elems))
            assert sums is not None
            assert (states.dtype, states.shape, sums.dtype, sums.shape[:2]) == (TILE_STATE, shape[:1], np.uint32, shape)
            assert config.codec != "fp32" or sums.shape[2] == config.sections
        offsets = ffi.new("uint64_t[]", [*config.file_offsets])
        extent = ffi.new("csd_extent *")
        extent.tile_elems, extent.n_tiles = config.tile_elems, config.n_tiles
        extent.sections, extent.slots = config.sections, config.slots
        extent.states = ffi.NULL if states is None else _array(states, "csd_tile_state *")
        extent.sum_elems, extent.sums = sum_elems, ffi.NULL if sums is None else _array(sums, "uint32_t *")
        extent.devices = ffi.NULL if devices is None else _array(devices, "uint32_t *")
        extent.file_offset, extent.pieces, extent.n_pieces = offsets, _array(pieces, "csd_piece *"), len(pieces)
        extent.codec, extent.param_dtype = CODECS[config.codec], DTYPE_CODES[config.param_dtype or torch.float32]
        windows = ffi.new("float *[4]")
        self._call(lib.csd_engine_extend, extent, windows)
        if config.codec != "fp32":
            return []
        elems = config.n_tiles * config.tile_elems
        return [ffi.buffer(_window(windows[s], elems, config.mappings), 4 * elems) for s in range(config.sections)]

    def tiles(
        self, first: int, n: int, chunks: int, sections: int
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return slots (TILE_STATE) and checksums (uint32, shape (n, chunks, sections)) of `n` tiles of one extent."""
        states, sums = np.empty(n, TILE_STATE), np.empty((n, chunks, sections), np.uint32)
        self._call(lib.csd_engine_tiles, first, n, _array(states, "csd_tile_state *"), _array(sums, "uint32_t *"))
        return states, sums

    # ---- a step ----------------------------------------------------------------

    def begin(
        self,
        params: np.ndarray[Any, Any],
        hypers: np.ndarray[Any, Any],
        tiles: np.ndarray[Any, Any],
        *,
        order: int = TO_AND_FRO,
    ) -> None:
        """Begin a step over `tiles` (uint32). `params`: a row per parameter, dtype PARAM. `hypers`: dtype HYPER.

        With second passes (PASS_2) among the tiles, `params` has two rows per parameter: all first ones, then all
        second ones.
        """
        assert (params.dtype, hypers.dtype, tiles.dtype) == (PARAM, HYPER, np.uint32)
        rows, constants = _array(params, "csd_param *"), _array(hypers, "csd_hyper *")
        arguments = rows, len(params), constants, len(hypers), _array(tiles, "uint32_t *"), len(tiles)
        self._call(lib.csd_engine_begin, *arguments, order)

    def push(self, tile: int, how: Push | None = None) -> None:
        """Push a tile. `how` None: gradients are where the step's table says. Raises what a step raises."""
        struct = ffi.NULL
        if how is not None:
            assert how.in_place is None
            grad, param = map(_address, how.images)
            words, n_words = how.entries
            grads = ffi.NULL if how.grads is None else ffi.new("void *[]", [*map(_address, how.grads)])
            entries = ffi.cast("uint32_t *", words), n_words
            struct = ffi.new("csd_push *", (grad, param, *entries, grads, _address(how.hold), _address(how.states)))
        self._call(lib.csd_engine_push, tile, struct, outcome=_UNDONE)

    def drop_grads(self, params: Sequence[int]) -> None:
        """Leave these parameters unchanged, as they have no gradient. Must precede the push of their first tile."""
        rows = np.array(params, np.uint32)
        self._call(lib.csd_engine_drop_grads, _array(rows, "uint32_t *"), len(rows), outcome=_UNDONE)

    def pull(self) -> int:
        """Wait until another tile that was pushed with an image has its new parameters, and return it."""
        tile = ffi.new("uint32_t *")
        self._call(lib.csd_engine_pull, tile, outcome=_UNDONE)
        return int(tile[0])

    @property
    def would_pull(self) -> bool:
        """Whether pull() would not wait, also because it would raise."""
        return bool(lib.csd_engine_would_pull(self._engine))

    def params_ready(self, tiles: np.ndarray[Any, Any], *, wait: bool) -> bool:
        """Return whether these pushed tiles (uint32) have their new parameters. `wait`: block until they have."""
        ready = ffi.new("int32_t *")
        listed = _array(tiles, "uint32_t *")
        self._call(lib.csd_engine_params_ready, listed, len(tiles), wait, ready, outcome=_UNDONE)
        return bool(ready[0])

    def finish(self, keep: bool, ending: object = None) -> None:
        """Complete the step, or undo it: also if this raises. `ending`: not needed by this engine."""
        self._call(lib.csd_engine_finish, keep, outcome=_UNDONE)

    def take_back(self) -> None:
        """Undo the last step, which was finished."""
        self._call(lib.csd_engine_take_back)

    def go_back(self, tiles: np.ndarray[Any, Any]) -> None:
        """Make the other slots of these tiles (uint32) current, and close the tiles' windows. Between steps."""
        self._call(lib.csd_engine_go_back, _array(tiles, "uint32_t *"), len(tiles))

    def free_tiles(self, tiles: np.ndarray[Any, Any]) -> None:
        """Give these tiles (uint32) back: see csd_engine_free_tiles. Between steps."""
        self._call(lib.csd_engine_free_tiles, _array(tiles, "uint32_t *"), len(tiles))

    def undone(self) -> list[tuple[int, int]]:
        """Return the tiles whose parameters the last undone step had already written.

        With each tile comes how many of its elements were written, from its first one on.
        """
        n = lib.csd_engine_undone(self._engine, ffi.NULL, ffi.NULL, 0)
        tiles, elems = np.empty(n, np.uint32), np.empty(n, np.uint64)
        lib.csd_engine_undone(self._engine, _array(tiles, "uint32_t *"), _array(elems, "uint64_t *"), n)
        return [*zip(tiles.tolist(), elems.tolist(), strict=True)]

    # ---- a guess ---------------------------------------------------------------

    def hold_bytes(self, tile: int) -> int:
        """Return how many bytes a tile of the step in flight needs to be pushed early; 0: it has no such tile."""
        return int(lib.csd_engine_hold_bytes(self._engine, tile))

    def unchanged(self, params: np.ndarray[Any, Any]) -> bool:
        """Return whether the tiles pushed early read what is in memory now. `params`: all rows, current addresses."""
        assert params.dtype == PARAM
        unchanged = ffi.new("int32_t *")
        rows = _array(params, "csd_param *")
        self._call(lib.csd_engine_unchanged, rows, len(params), unchanged, outcome=_UNDONE)
        return bool(unchanged[0])

    def release(self, params: np.ndarray[Any, Any], order: np.ndarray[Any, Any]) -> None:
        """Confirm a speculative step: write the parameters of tiles pushed early, and let other tiles be pushed.

        `params`: the rows passed to begin(), with current addresses of gradients and parameters. `order`: tiles
        (uint32) in the order in which their parameters are needed; the other tiles follow. Tiles that came before
        others in begin() may have buffers, and keep them until they are pushed: do not wait for the others before that.
        """
        assert (params.dtype, order.dtype) == (PARAM, np.uint32)
        rows, tiles = _array(params, "csd_param *"), _array(order, "uint32_t *")
        self._call(lib.csd_engine_release, rows, len(params), tiles, len(order), outcome=_UNDONE)

    # ---- between steps ---------------------------------------------------------

    def wait_writes(self) -> None:
        """Wait until all states are written to their devices. Raises CSDOSError if a write keeps failing."""
        if self.is_open:
            self._call(lib.csd_engine_wait_writes)

    def remap(self, *, open: bool) -> None:
        """Wait for all writes, then map the current slots. `open`: writes to windows go to the devices."""
        self._call(lib.csd_engine_remap, open)

    def edited(self, tiles: np.ndarray[Any, Any]) -> None:
        """Report that the windows of these tiles (uint32) were written."""
        assert tiles.dtype == np.uint32
        self._call(lib.csd_engine_edited, _array(tiles, "uint32_t *"), len(tiles))

    def read(self, tile: int, sections: int, elems: int, states: int) -> None:
        """Copy the first `sections` sections of a tile's fp32 states to the address `states`, one after another.

        Not during a step. Raises CSDOSError, or CSDStoreError if one of the first `elems` elements is damaged.
        """
        self._call(lib.csd_engine_read, tile, sections, elems, _address(states), outcome=_UNREAD)

    def decode(self, tile: int, first: int, n: int, states: Sequence[torch.Tensor | None], param: int = 0) -> None:
        """Read the states of elements [first, first + n) of a tile into up to four contiguous fp32 CPU tensors.

        Codes are decoded; then `first` is a multiple of 64. A state whose tensor is None is skipped. `param`: with
        codes, the address of these elements of the parameter, if the parameter itself serves as the section; 0: the
        section is in the tile. Waits for writes. Must not be called while a step is under way. Raises CSDOSError, or
        CSDStoreError if the tile is damaged.
        """
        assert all(s is None or (s.dtype, s.numel()) == (torch.float32, n) for s in states)
        to = _addresses("float *", [*states, *[None] * (4 - len(states))])
        self._call(lib.csd_engine_decode, tile, first, n, _address(param), to, outcome=_UNREAD)

    # ---- information -----------------------------------------------------------

    def stats(self, device: int) -> dict[str, float]:
        """Return the counts of the last step on a device: see csd_stats."""
        stats = ffi.new("csd_stats *")
        self._call(lib.csd_engine_stats, device, stats)
        return {name: getattr(stats, name) for name, _ in ffi.typeof("csd_stats").fields}

    def events(self) -> np.ndarray[Any, Any]:
        """Return the timeline of the last step, dtype EVENT. The first call starts recording, and returns none."""
        events = np.empty(lib.csd_engine_events(self._engine, ffi.NULL, 0), EVENT)
        lib.csd_engine_events(self._engine, _array(events, "csd_event *"), len(events))
        return events


def update(
    hyper: np.ndarray[Any, Any],
    isa: str,
    grad: torch.Tensor,
    state: Sequence[torch.Tensor],
    param: torch.Tensor | None,
) -> None:
    """Run the update rule alone, in place, on the calling thread, on contiguous CPU tensors of one length.

    `hyper`: one element of dtype HYPER. `state`: fp32, section by section, as many as the rule takes.
    """
    assert hyper.dtype == HYPER
    _call(
        lib.csd_update,
        _array(hyper, "csd_hyper *"),
        ISAS[isa],
        grad.numel(),
        ffi.cast("void *", grad.data_ptr()),
        DTYPE_CODES[grad.dtype],
        _addresses("float *", state),
        len(state),
        ffi.NULL if param is None else ffi.cast("void *", param.data_ptr()),
        lib.CSD_F32 if param is None else DTYPE_CODES[param.dtype],
    )


def update_codes(
    hyper: np.ndarray[Any, Any],
    isa: str,
    grad: torch.Tensor,
    codes: Sequence[torch.Tensor],
    param: torch.Tensor,
    key: int,
) -> None:
    """Run the update rule on codes, in place: one contiguous CPU tensor for each section, see csd_codec.

    `param`: receives the updated parameters. `key`: 32 bits that seed stochastic rounding, counted from the first
    element.
    """
    assert hyper.dtype == HYPER
    _call(
        lib.csd_update_codes,
        _array(hyper, "csd_hyper *"),
        ISAS[isa],
        grad.numel(),
        ffi.cast("void *", grad.data_ptr()),
        DTYPE_CODES[grad.dtype],
        _addresses("void *", codes),
        len(codes),
        ffi.cast("void *", param.data_ptr()),
        DTYPE_CODES[param.dtype],
        key,
    )


def encode(
    isa: str,
    states: Sequence[torch.Tensor | None],
    dtype: torch.dtype,
    codes: Sequence[torch.Tensor],
    codec: str = "8bit",
) -> None:
    """Encode up to four fp32 states of one length, the master first, rounding to nearest.

    The codes of a state that is None or missing stay as they are. `dtype`: the parameter's.
    """
    n = max(0 if s is None else s.numel() for s in states)
    source, to = _addresses("float *", _four(states)), _addresses("void *", codes)
    _call(lib.csd_encode, ISAS[isa], n, source, CODECS[codec], DTYPE_CODES[dtype], to, len(codes))


def decode(
    isa: str,
    codes: Sequence[torch.Tensor],
    dtype: torch.dtype,
    states: Sequence[torch.Tensor | None],
    codec: str = "8bit",
) -> None:
    """Decode into fp32 states of one length, see encode(); a state that is None or missing is skipped."""
    n = max(0 if s is None else s.numel() for s in states)
    source, to = _addresses("void *", codes), _addresses("float *", _four(states))
    _call(lib.csd_decode, ISAS[isa], n, source, CODECS[codec], DTYPE_CODES[dtype], to, len(codes))


def _four(states: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [*states, *[None] * (4 - len(states))]


def _addresses(kind: str, tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    return [ffi.NULL if t is None else ffi.cast(kind, t.data_ptr()) for t in tensors]


def topk_count(ratio: float, n: int) -> int:
    """Return how many of a piece's n gradients are sent: max(1, ratio * n rounded to nearest even); 0 if n is 0."""
    return int(lib.csd_topk_count(ratio, n))


def topk_entries(parts: np.ndarray[Any, Any], elems: int) -> torch.Tensor:
    """Select the Top-K gradients of a tile of `elems` elements, on the calling thread.

    Returns the tile's entries, int32, with the number of their words at the end. `parts`: dtype TOPK_PART, in the order
    of the tile; addresses are of host memory.
    """
    assert parts.dtype == TOPK_PART
    room = int(parts["k"].sum()) + ENTRY_LANES * -(-elems // ELEMS_PER_BLOCK)
    words, used = torch.empty(room + 1, dtype=torch.int32, device="cpu"), ffi.new("uint64_t *")
    array = ffi.from_buffer("csd_topk_part[]", parts)
    _call(lib.csd_topk_entries, array, len(parts), elems, ffi.cast("uint32_t *", words.data_ptr()), used)
    words[used[0]] = used[0]
    return words[: used[0] + 1]


def topk_feed_back(parts: np.ndarray[Any, Any], row: torch.Tensor) -> None:
    """Update the residuals of `parts`, in host memory, with what their tile does not send.

    `row`: as topk_entries() returned it.
    """
    assert parts.dtype == TOPK_PART
    words = ffi.cast("const uint32_t *", row.data_ptr())
    _call(lib.csd_topk_feed_back, ffi.from_buffer("csd_topk_part[]", parts), len(parts), words, int(row[-1]))


def isas() -> list[str]:
    """Return the instruction sets that the updater can use on this CPU, the best last."""
    return [name for name, code in ISAS.items() if code <= lib.csd_isa_best()]


def isa_use(name: str) -> None:
    if name.lower() not in ISAS:
        raise CSDValueError(f"Invalid instruction set: {name!r}; this CPU has {', '.join(isas())}")
    _call(lib.csd_isa_use, ISAS[name.lower()])


def isa_used() -> str:
    return next(name for name, code in ISAS.items() if code == lib.csd_isa_used())


def threads_use(n: int) -> None:
    _call(lib.csd_threads_use, n)


def threads_used() -> int:
    return int(lib.csd_threads_used())


def small_step_use(elems: int) -> None:
    """Let the thread that pushes update steps of up to so many elements itself, from the next step on."""
    lib.csd_small_step_use(elems)


def small_step_used() -> int:
    return int(lib.csd_small_step_used())


def trim_memory() -> None:
    """Return memory that is not in use to the system."""
    lib.csd_trim_memory()


def punch_hole(fd: int, offset: int, nbytes: int) -> int:
    """Free whole pages of a file, which then reads as zeros there. Returns 0 or an errno."""
    return int(lib.csd_punch_hole(fd, offset, nbytes))


def crc32c(data: bytes | bytearray | memoryview, crc: int = 0) -> int:
    """Return the CRC-32C (Castagnoli) of `data`, continuing from `crc`."""
    return int(lib.csd_crc32c(crc, ffi.from_buffer(data), len(data)))


if _isa := settings.isa():
    isa_use(_isa)
if _threads := settings.threads():
    threads_use(_threads)
elif (_ranks := os.environ.get("LOCAL_WORLD_SIZE", "")).isdecimal() and threads_used() == os.cpu_count():
    # Ranks on one machine divide its CPUs among themselves, unless this process is already confined to some of them.
    threads_use(max(1, threads_used() // max(1, int(_ranks))))
