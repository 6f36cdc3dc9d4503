"""One thin function per C function of `native/include/csd.h`; the rest of the package speaks Python.

Every call releases the GIL. Addresses are plain integers (`tensor.data_ptr()`); the caller keeps the memory alive until
the step is finished.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

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

DTYPE_CODES = {torch.float32: lib.CSD_F32, torch.float16: lib.CSD_F16, torch.bfloat16: lib.CSD_BF16}
IO_DEPTH: int = lib.CSD_IO_DEPTH
GRAD_SCALE: int = lib.CSD_GRAD_SCALE
RULES = {name.removeprefix("CSD_").lower(): number for number, name in ffi.typeof("enum csd_rule").elements.items()}
IN_SECTION, FROM_PARAM, IN_PARAM = lib.CSD_IN_SECTION, lib.CSD_FROM_PARAM, lib.CSD_IN_PARAM
UNLESS_SET, NEW, UNCOMPARED, GIVEN = lib.CSD_UNLESS_SET, lib.CSD_NEW, lib.CSD_UNCOMPARED, lib.CSD_GIVEN
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
        *(("first", "u4"), ("in_image", "u4"), ("edited", "u8", 4), ("summands", "u8"), ("n_summands", "u8")),
    ]
)
SUMMAND = np.dtype([("values", "u8"), ("dtype", "u4"), ("run_words", "u4"), ("run_elems", "u8")])
HYPER = np.dtype([("rule", "u4"), ("c", "f4", 9)])
CODECS = {"fp32": lib.CSD_FP32, "8bit": lib.CSD_8BIT}
EVENT_KINDS = ("read", "update", "write")
EVENT = np.dtype([("device", "u4"), ("tile", "u4"), ("kind", "u4"), ("reserved", "u4"), ("begin", "f8"), ("end", "f8")])
TILE_STATE = np.dtype([("slot", "u4"), ("summed", "u4")])

for _dtype, _struct in (
    (PIECE, "csd_piece"),
    (PARAM, "csd_param"),
    (SUMMAND, "csd_summand"),
    (HYPER, "csd_hyper"),
    (TILE_STATE, "csd_tile_state"),
    (EVENT, "csd_event"),
):
    _fields = {name: field.offset for name, field in ffi.typeof(_struct).fields}
    assert _dtype.itemsize == ffi.sizeof(_struct), _struct
    assert {name: _dtype.fields[name][1] for name in _dtype.names} == _fields, _struct  # type: ignore[index,union-attr]

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
class Rates:
    """How fast a device is, or how fast an emulated one may be at most (`csd_pace`). math.inf: no limit."""

    read: float = math.inf  # bytes per second from flash, without writes
    write: float = math.inf
    mixed: float = math.inf  # bytes per second, read plus written, when both happen at once
    update: float = math.inf  # parameters per second; a host's rate counts instead if it updates
    on_host: bool = False  # the host updates, as with a plain drive: states cross the link, gradients do not
    link: float = math.inf  # bytes per second each way, both ways busy; emulated devices that name it share one
    latency: float = 0.0  # seconds before the first byte of a read or write; only emulated
    flash_grads: bool = False  # gradients are read from the drive and do not cross the link; only emulated

    @staticmethod
    def in_turn(read: float, write: float, update: float = math.inf, on_host: bool = False) -> Rates:
        """Return a device that reads and writes at once no faster than in turn: cautious, and true of most drives."""
        return Rates(read, write, 2 / (1 / read + 1 / write), update, on_host)

    def seconds(self, params: float, read: float, written: float) -> float:
        """Return a lower bound on the time that the device takes to update `params` elements and move so many bytes.

        The link is left out, because other devices may share it.
        """
        return max(params / self.update, read / self.read, written / self.write, (read + written) / self.mixed)

    @property
    def params_per_second(self) -> float:
        """Upper bound on the update rate with three fp32 states; math.inf if there is no limit."""
        slowest = self.seconds(1, 12, 12)
        return 1 / slowest if slowest else math.inf


UNPACED = Rates()


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


def _array(values: np.ndarray[Any, Any], ctype: str) -> Any:
    assert values.flags.c_contiguous
    return ffi.cast(ctype, values.ctypes.data)


def card_open(name: str, xclbin: os.PathLike[str], kernels: Sequence[str], seconds: float) -> Any:
    """Open a card. `kernels`: the names of the kernels in the xclbin. Raises CSDUnavailableError."""
    out, error = ffi.new("csd_card **"), ffi.new("csd_error *")
    names = " ".join(kernels).encode()
    status = lib.csd_card_open(name.encode(), os.fsencode(xclbin), names, int(1000 * seconds), out, error)
    error.device = 0
    check(status, error, lambda *_: f"card {name}")
    return out[0]


def card_close(card: Any, name: str) -> None:
    error = ffi.new("csd_error *")
    status = lib.csd_card_close(card, error)
    error.device = 0
    check(status, error, lambda *_: f"card {name}")


def card_has_p2p(card: Any) -> bool:
    return bool(lib.csd_card_has_p2p(card))


def card_try_p2p(card: Any, fd: int, offset: int, name: str) -> None:
    """Test P2P, and set `card_has_p2p`: read a page of an O_DIRECT file into the card's memory and write it back."""
    error = ffi.new("csd_error *")
    status = lib.csd_card_try_p2p(card, fd, offset, error)
    error.device = 0
    check(status, error, lambda *_: f"card {name}")


def card_measure(config: DeviceConfig, offset: int, nbytes: int, name: Namer) -> dict[str, float]:
    """Measure the rates of a device with a card, see `csd_card_rates`. Overwrites `nbytes` of its file at `offset`."""
    device, out, error = ffi.new("csd_device *"), ffi.new("csd_card_rates *"), ffi.new("csd_error *")
    keep = _fill(device, config)
    status = lib.csd_card_measure(device, offset, nbytes, out, error)
    error.device = 0
    check(status, error, name)
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


def engine_create(devices: list[DeviceConfig], name: Namer) -> Any:
    structs = ffi.new("csd_device[]", len(devices))
    keep = [_fill(struct, config) for struct, config in zip(structs, devices, strict=True)]
    out, error = ffi.new("csd_engine **"), ffi.new("csd_error *")
    check(lib.csd_engine_create(structs, len(devices), out, error), error, name)
    del keep
    # No ffi.gc, here or for a card: in a forked child, close() would wait for threads that the child does not have; and
    # the garbage collector may run while its thread holds a lock that close() needs. finalize.py closes dropped ones.
    return out[0]


def engine_close(engine: Any, name: Namer) -> None:
    error = ffi.new("csd_error *")
    check(lib.csd_engine_close(engine, error), error, name)


def engine_extend(
    engine: Any,
    tile_elems: int,
    n_tiles: int,
    sections: int,
    file_offsets: list[int],
    pieces: np.ndarray[Any, Any],
    name: Namer,
    slots: int = 2,
    states: np.ndarray[Any, Any] | None = None,
    devices: np.ndarray[Any, Any] | None = None,
    sum_elems: int | None = None,
    sums: np.ndarray[Any, Any] | None = None,
    mappings: int = 1,
    codec: str = "fp32",
    param_dtype: torch.dtype | None = None,
) -> list[Any]:
    """Add an extent of `n_tiles` tiles with `sections` states; see csd_engine_extend().

    `devices`: the device of each tile, uint32; None: round-robin. `sum_elems`: elements per checksum; None: one
    checksum per section. `sums`: the checksums that go with `states`, uint32, of shape (n_tiles, chunks, sections of a
    slot). `mappings`: how many memory mappings a window consists of. `param_dtype`: with 8-bit codes, the parameters'
    dtype.
    Returns one window per state: a buffer of `4 * n_tiles * tile_elems` bytes that unmaps itself; none for codes.
    """
    assert pieces.dtype == PIECE
    assert devices is None or (devices.dtype == np.uint32 and len(devices) == n_tiles)
    sum_elems = min(sum_elems or tile_elems, tile_elems)
    if states is not None:
        shape = (n_tiles, -(-tile_elems // sum_elems))
        assert sums is not None
        assert (states.dtype, states.shape, sums.dtype, sums.shape[:2]) == (TILE_STATE, (n_tiles,), np.uint32, shape)
        assert codec != "fp32" or sums.shape[2] == sections
    offsets = ffi.new("uint64_t[]", file_offsets)
    extent = ffi.new("csd_extent *")
    extent.tile_elems, extent.n_tiles, extent.sections, extent.slots = tile_elems, n_tiles, sections, slots
    extent.states = ffi.NULL if states is None else _array(states, "csd_tile_state *")
    extent.sum_elems, extent.sums = sum_elems, ffi.NULL if sums is None else _array(sums, "uint32_t *")
    extent.devices = ffi.NULL if devices is None else _array(devices, "uint32_t *")
    extent.file_offset, extent.pieces, extent.n_pieces = offsets, _array(pieces, "csd_piece *"), len(pieces)
    extent.codec, extent.param_dtype = CODECS[codec], DTYPE_CODES[param_dtype or torch.float32]
    windows, error = ffi.new("float *[4]"), ffi.new("csd_error *")
    check(lib.csd_engine_extend(engine, extent, windows, error), error, name)
    elems = n_tiles * tile_elems
    if codec != "fp32":
        return []
    return [ffi.buffer(_window(windows[s], elems, mappings), 4 * elems) for s in range(sections)]


_mappings: dict[int, int] = {}  # address of a window → number of its memory mappings


def _window(window: Any, elems: int, mappings: int) -> Any:
    """Wrap the window so that it unmaps itself; until then mappings() counts it."""
    address, by_address, release = int(ffi.cast("uintptr_t", window)), _mappings, lib.csd_window_release
    by_address[address] = mappings

    def unmap(window: Any) -> None:
        del by_address[address]  # before the release: afterwards another window may get the same address
        release(window, elems)

    return ffi.gc(window, unmap)


def mappings() -> int:
    """Return the number of memory mappings of all windows in this process."""
    return sum([*_mappings.values()])


def engine_begin(
    engine: Any,
    params: np.ndarray[Any, Any],
    hypers: np.ndarray[Any, Any],
    tiles: np.ndarray[Any, Any],
    name: Namer,
    *,
    order: int = TO_AND_FRO,
) -> None:
    assert (params.dtype, hypers.dtype, tiles.dtype) == (PARAM, HYPER, np.uint32)
    error = ffi.new("csd_error *")
    status = lib.csd_engine_begin(
        engine,
        _array(params, "csd_param *"),
        len(params),
        _array(hypers, "csd_hyper *"),
        len(hypers),
        _array(tiles, "uint32_t *"),
        len(tiles),
        order,
        error,
    )
    check(status, error, name)


def engine_push(
    engine: Any,
    tile: int,
    name: Namer,
    *,
    images: tuple[int, int] = (0, 0),
    entries: tuple[int, int] = (0, 0),
    grads: Sequence[int] | None = None,
    hold: int = 0,
    states: int = 0,
) -> None:
    """Push a tile; see csd_push. All are addresses.

    `images`: of gradients and of parameters. `entries`: the address of Top-K entries, and their number of words.
    `grads`: for each of its pieces, where its parameter's gradient begins; 0: it has none.
    """
    how = ffi.NULL
    if images[0] or grads is not None or states:
        addresses = ffi.NULL if grads is None else ffi.new("void *[]", [ffi.cast("void *", grad) for grad in grads])
        grad, param = [ffi.cast("void *", image) for image in images]
        words = ffi.cast("uint32_t *", entries[0])
        more = ffi.cast("void *", hold), ffi.cast("void *", states)
        how = ffi.new("csd_push *", (grad, param, words, entries[1], addresses, *more))
    error = ffi.new("csd_error *")
    check(lib.csd_engine_push(engine, tile, how, error), error, name, _UNDONE)


def engine_read(engine: Any, tile: int, sections: int, elems: int, states: int, name: Namer) -> None:
    error = ffi.new("csd_error *")
    check(lib.csd_engine_read(engine, tile, sections, elems, ffi.cast("void *", states), error), error, name, _UNREAD)


def engine_drop_grads(engine: Any, params: np.ndarray[Any, Any], name: Namer) -> None:
    error = ffi.new("csd_error *")
    check(lib.csd_engine_drop_grads(engine, _array(params, "uint32_t *"), len(params), error), error, name, _UNDONE)


def engine_pull(engine: Any, name: Namer) -> int:
    tile, error = ffi.new("uint32_t *"), ffi.new("csd_error *")
    check(lib.csd_engine_pull(engine, tile, error), error, name, _UNDONE)
    return int(tile[0])


def engine_params_ready(engine: Any, tiles: np.ndarray[Any, Any], wait: bool, name: Namer) -> bool:
    ready, error = ffi.new("int32_t *"), ffi.new("csd_error *")
    check(
        lib.csd_engine_params_ready(engine, _array(tiles, "uint32_t *"), len(tiles), wait, ready, error),
        error,
        name,
        _UNDONE,
    )
    return bool(ready[0])


def engine_finish(engine: Any, keep: bool, name: Namer) -> None:
    error = ffi.new("csd_error *")
    check(lib.csd_engine_finish(engine, keep, error), error, name, _UNDONE)


def engine_take_back(engine: Any, name: Namer) -> None:
    error = ffi.new("csd_error *")
    check(lib.csd_engine_take_back(engine, error), error, name)


def engine_hold_bytes(engine: Any, tile: int) -> int:
    return int(lib.csd_engine_hold_bytes(engine, tile))


def engine_unchanged(engine: Any, params: np.ndarray[Any, Any], name: Namer) -> bool:
    assert params.dtype == PARAM
    unchanged, error = ffi.new("int32_t *"), ffi.new("csd_error *")
    status = lib.csd_engine_unchanged(engine, _array(params, "csd_param *"), len(params), unchanged, error)
    check(status, error, name, _UNDONE)
    return bool(unchanged[0])


def engine_release(engine: Any, params: np.ndarray[Any, Any], order: np.ndarray[Any, Any], name: Namer) -> None:
    assert (params.dtype, order.dtype) == (PARAM, np.uint32)
    error = ffi.new("csd_error *")
    rows, tiles = _array(params, "csd_param *"), _array(order, "uint32_t *")
    check(lib.csd_engine_release(engine, rows, len(params), tiles, len(order), error), error, name, _UNDONE)


def engine_undone(engine: Any) -> list[tuple[int, int]]:
    """Return the tiles whose parameters an undone step has overwritten, each with the number of leading elements."""
    n = lib.csd_engine_undone(engine, ffi.NULL, ffi.NULL, 0)
    tiles, elems = np.empty(n, np.uint32), np.empty(n, np.uint64)
    lib.csd_engine_undone(engine, _array(tiles, "uint32_t *"), _array(elems, "uint64_t *"), n)
    return [*zip(tiles.tolist(), elems.tolist(), strict=True)]


def engine_events(engine: Any) -> np.ndarray[Any, Any]:
    """Return the timeline of the last step, dtype EVENT. Recording starts with the first call, which returns none."""
    events = np.empty(lib.csd_engine_events(engine, ffi.NULL, 0), EVENT)
    lib.csd_engine_events(engine, _array(events, "csd_event *"), len(events))
    return events


def engine_wait_writes(engine: Any, name: Namer) -> None:
    error = ffi.new("csd_error *")
    check(lib.csd_engine_wait_writes(engine, error), error, name)


def engine_remap(engine: Any, name: Namer, *, open: bool) -> None:
    error = ffi.new("csd_error *")
    check(lib.csd_engine_remap(engine, open, error), error, name)


def engine_decode(
    engine: Any, tile: int, first: int, n: int, states: Sequence[torch.Tensor | None], name: Namer, param: int = 0
) -> None:
    """Decode elements [first, first + n) of a tile of codes into up to four contiguous fp32 CPU tensors, one a state.

    A state whose tensor is None is skipped. `first` is a multiple of 64. `param`: address of these elements of the
    parameter, if the parameter itself serves as the section; 0: the section is in the tile. Waits for writes. Must not
    be called while a step is under way.
    """
    assert all(s is None or (s.dtype, s.numel()) == (torch.float32, n) for s in states)
    error = ffi.new("csd_error *")
    to = _addresses("float *", [*states, *[None] * (4 - len(states))])
    check(lib.csd_engine_decode(engine, tile, first, n, ffi.cast("void *", param), to, error), error, name, _UNREAD)


def engine_tiles(
    engine: Any, first: int, n: int, chunks: int, sections: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return slots (TILE_STATE) and checksums (uint32, of shape (n, chunks, sections)) of `n` tiles of one extent."""
    states, sums, error = np.empty(n, TILE_STATE), np.empty((n, chunks, sections), np.uint32), ffi.new("csd_error *")
    status = lib.csd_engine_tiles(
        engine, first, n, _array(states, "csd_tile_state *"), _array(sums, "uint32_t *"), error
    )
    check(status, error)
    return states, sums


def engine_edited(engine: Any, tiles: np.ndarray[Any, Any]) -> None:
    assert tiles.dtype == np.uint32
    error = ffi.new("csd_error *")
    check(lib.csd_engine_edited(engine, _array(tiles, "uint32_t *"), len(tiles), error), error)


def engine_stats(engine: Any, device: int) -> dict[str, float]:
    stats, error = ffi.new("csd_stats *"), ffi.new("csd_error *")
    check(lib.csd_engine_stats(engine, device, stats, error), error)
    return {name: getattr(stats, name) for name, _ in ffi.typeof("csd_stats").fields}


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
    error = ffi.new("csd_error *")
    status = lib.csd_update(
        _array(hyper, "csd_hyper *"),
        ISAS[isa],
        grad.numel(),
        ffi.cast("void *", grad.data_ptr()),
        DTYPE_CODES[grad.dtype],
        _addresses("float *", state),
        len(state),
        ffi.NULL if param is None else ffi.cast("void *", param.data_ptr()),
        lib.CSD_F32 if param is None else DTYPE_CODES[param.dtype],
        error,
    )
    check(status, error)


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
    error = ffi.new("csd_error *")
    status = lib.csd_update_codes(
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
        error,
    )
    check(status, error)


def encode(isa: str, states: Sequence[torch.Tensor | None], dtype: torch.dtype, codes: Sequence[torch.Tensor]) -> None:
    """Encode fp32 states of one length, rounding to nearest: master, exp_avg, exp_avg_sq, max_exp_avg_sq.

    The codes of a state that is None stay as they are. `dtype`: the parameter's.
    """
    error, n = ffi.new("csd_error *"), max(0 if s is None else s.numel() for s in states)
    of = _addresses("float *", states)
    check(lib.csd_encode(ISAS[isa], n, of, DTYPE_CODES[dtype], _addresses("void *", codes), len(codes), error), error)


def decode(isa: str, codes: Sequence[torch.Tensor], dtype: torch.dtype, states: Sequence[torch.Tensor | None]) -> None:
    """Decode into fp32 states of one length; a state that is None is skipped. `dtype`: the parameter's."""
    error, n = ffi.new("csd_error *"), max(0 if s is None else s.numel() for s in states)
    to = _addresses("float *", states)
    check(lib.csd_decode(ISAS[isa], n, _addresses("void *", codes), DTYPE_CODES[dtype], to, len(codes), error), error)


def _addresses(kind: str, tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    return [ffi.NULL if t is None else ffi.cast(kind, t.data_ptr()) for t in tensors]


def topk_count(ratio: float, n: int) -> int:
    """Return how many of a piece's n gradients are sent: max(1, ratio * n rounded to nearest even); 0 if n is 0."""
    return int(lib.csd_topk_count(ratio, n))


def topk_select(
    grad: torch.Tensor, k: int, dtype: torch.dtype, residual: torch.Tensor | None = None, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the engine's Top-K selection alone, on the calling thread.

    Returns up to k indices (int32, ascending) and values (`dtype`, 16 bits).

    `grad`: contiguous, 1-D, on the CPU; `residual`: bfloat16 of the same length, in units of `scale` * gradient.
    """
    indices, values = torch.empty(k, dtype=torch.int32), torch.empty(k, dtype=dtype)
    selected, error = ffi.new("uint64_t *"), ffi.new("csd_error *")
    status = lib.csd_topk_select(
        ffi.cast("void *", grad.data_ptr()),
        DTYPE_CODES[grad.dtype],
        grad.numel(),
        ffi.NULL if residual is None else ffi.cast("uint16_t *", residual.data_ptr()),
        scale,
        DTYPE_CODES[dtype],
        k,
        ffi.cast("uint32_t *", indices.data_ptr()),
        ffi.cast("uint16_t *", values.data_ptr()),
        selected,
        error,
    )
    check(status, error)
    return indices[: selected[0]], values[: selected[0]]


def sum_up(summands: np.ndarray[Any, Any], isa: str, first: int, out: torch.Tensor) -> None:
    """Write the sum of `summands` (dtype SUMMAND) over elements [first, first + len(out)) to `out`.

    `out`: fp32, contiguous, 1-D. Raises CSDValueError for malformed entries.
    """
    assert summands.dtype == SUMMAND
    error = ffi.new("csd_error *")
    address = ffi.cast("float *", out.data_ptr())
    table = _array(summands, "csd_summand *")
    check(lib.csd_sum(table, len(summands), ISAS[isa], first, out.numel(), address, error), error)


def isas() -> list[str]:
    """Return the instruction sets that the updater can use on this CPU, the best last."""
    return [name for name, code in ISAS.items() if code <= lib.csd_isa_best()]


def isa_use(name: str) -> None:
    if name.lower() not in ISAS:
        raise CSDValueError(f"Invalid instruction set: {name!r}; this CPU has {', '.join(isas())}")
    name = name.lower()
    error = ffi.new("csd_error *")
    check(lib.csd_isa_use(ISAS[name], error), error)


def isa_used() -> str:
    return next(name for name, code in ISAS.items() if code == lib.csd_isa_used())


def threads_use(n: int) -> None:
    error = ffi.new("csd_error *")
    check(lib.csd_threads_use(n, error), error)


def threads_used() -> int:
    return int(lib.csd_threads_used())


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
