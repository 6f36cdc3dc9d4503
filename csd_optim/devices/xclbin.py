"""Reads xclbin files, the containers of FPGA programs, and writes one for the emulator. Layout: XRT's xclbin.h."""

from __future__ import annotations

import errno
import os
import struct
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO
from xml.sax.saxutils import quoteattr

from .. import settings
from ..errors import CSDStoreError, CSDUnavailableError

INSTALLED = "/usr/local/share/csd_optim/csd_optim.xclbin"

MODES = {0: "hw", 1: "hw", 4: "hw_emu", 5: "sw_emu", 6: "hw_emu"}  # full designs, and those loaded into a shell

_MAGIC = b"xclbin2\0"
_HEAD = struct.Struct("<8si28s256sQ")  # magic, no signature (-1), reserved, key block, unique id
# Length, time, time of the feature ROM, version, mode, action mask, interface, VBNV, uuid, debug file, sections.
_HEADER = struct.Struct("<QQQHBBHH16s64s16s16sI4x")
_SECTION = struct.Struct("<I16s4xQQ")  # kind, name, offset, size
_BANK = struct.Struct("<BB6xQQ16s")  # kind, is used, size in KiB, address, name
_UNIT = struct.Struct("<IIQ64s")  # kind, properties, address of the registers, kernel:unit
_BITSTREAM, _METADATA, _MEMORIES, _CONNECTIONS, _UNITS = 0, 2, 6, 7, 8
_DDR4 = 1
_KERNEL = 1
_CHAINED = 1 << 8  # ap_ctrl_chain: the kernel can queue runs
_MOST_SECTIONS = 1 << 16

_FIRST_UNIT, _UNIT_BYTES = 0x1800000, 0x10000
_FIRST_ARGUMENT, _POINTER_BYTES, _SCALAR_BYTES = 0x10, 12, 8  # registers, as Vitis HLS lays them out


@dataclass(frozen=True)
class Xclbin:
    """The description of an FPGA program in its xclbin file."""

    path: Path
    uuid: uuid.UUID
    platform: str  # the shell that it was built for, as vendor, board, name and version
    mode: str  # "hw", "hw_emu" or "sw_emu"; "" if it is none of these
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Kernel:
    """The arguments of a kernel in order: buffers, then 32-bit scalars."""

    buffers: tuple[str, ...]
    scalars: tuple[str, ...]


def _kernel(ports: int) -> Kernel:
    """Return the arguments of a kernel that reads and writes a tile through `ports` ports each way."""
    tile_in, tile_out = ([f"tile_{way}_{port}" for port in range(ports)] for way in ("in", "out"))
    return Kernel(
        (*tile_in, "grad", "entries", "segments", *tile_out, "param", "report"),
        ("n_words", "sections", "n_segments", "grad_words", "entry_words", "param_words", "sum_words"),
    )


# Our kernels, as declared in csd_kernel.h; a test compares them with the sources. Each is for the fp32 states of an
# update rule (UpdateRule.name), with as many ports as the rule can have sections, or for the codes of its states.
_PORTS = {"adamw": 4, "adamw_8bit": 3, "adam": 4, "adam_8bit": 3, "sgd": 2, "adagrad": 2, "rmsprop": 4, "lion": 2}
KERNELS: Mapping[str, Kernel] = {f"csd_{of}_update": _kernel(ports) for of, ports in _PORTS.items()}
RULES = frozenset(name for name in _PORTS if not name.endswith("_8bit"))


def kernel_for(rule: str, state_dtype: str) -> str:
    """Return the name of the kernel for a rule of RULES, with states stored as "fp32" or as codes ("8bit")."""
    return f"csd_{rule}_update" if state_dtype == "fp32" else f"csd_{rule}_{state_dtype}_update"


# ---- reading ---------------------------------------------------------------------


def read_xclbin(path: str | os.PathLike[str]) -> Xclbin:
    """Read the headers of an xclbin and the names of its kernels, but not the rest of a possibly large file.

    Raises CSDStoreError if it is no xclbin or is cut short or damaged, OSError if it cannot be read.
    """
    path = Path(path)
    with path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        magic, *_ = _HEAD.unpack(_read(file, _HEAD.size, path))
        if magic != _MAGIC:
            raise CSDStoreError(f"{path} is no xclbin, or one from before 2017: it begins with {magic!r}")
        header = _HEADER.unpack(_read(file, _HEADER.size, path))
        length, mode, platform, identity, n_sections = (header[i] for i in (0, 6, 9, 10, 12))
        if length > file_bytes:
            raise CSDStoreError(f"{path} is cut short: it has {file_bytes} of {length} bytes; copy it again")
        if n_sections > _MOST_SECTIONS:
            raise CSDStoreError(f"{path} is damaged: it claims to have {n_sections} sections")
        kernels: tuple[str, ...] = ()
        for kind, _, offset, size in _SECTION.iter_unpack(_read(file, n_sections * _SECTION.size, path)):
            if kind != _UNITS:
                continue
            if offset + size > file_bytes:
                raise CSDStoreError(f"{path} is damaged: a section lies beyond its end")
            file.seek(offset)
            kernels = _kernels(_read(file, size, path), path)
    return Xclbin(path, uuid.UUID(bytes=identity), _text(platform), MODES.get(mode, ""), kernels)


def find_kernels(named: Path | None = None, needed: Collection[str] = ()) -> Xclbin:
    """Return the xclbin with our kernels: `named` by the user, else CSD_OPTIM_XCLBIN, else that of `make install`.

    `needed`: required kernels, of KERNELS; at least one kernel must be there in any case. `kernels` of the result lists
    only ours. Raises CSDUnavailableError if the file does not exist, has no kernel of ours or lacks a needed one.
    """
    path = (named or settings.xclbin() or Path(INSTALLED)).resolve()
    try:
        found = read_xclbin(path)
    except OSError as e:
        raise CSDUnavailableError(
            e.errno, f"the FPGA's program {path}: {e.strerror}. Build it, or name it by ?xclbin= (docs/smartssd.md)"
        ) from e
    except CSDStoreError as e:
        raise CSDUnavailableError(errno.ENOEXEC, str(e)) from e
    ours = tuple(name for name in found.kernels if name in KERNELS)
    there_are = ", ".join(found.kernels) or "none"
    if not ours:
        raise CSDUnavailableError(
            errno.ENOEXEC, f"{path} has no kernel of ours; it has {there_are}. Build one (docs/smartssd.md)"
        )
    if missing := [name for name in needed if name not in ours]:
        rule = missing[0].removeprefix("csd_").removesuffix("_update")
        raise CSDUnavailableError(
            errno.ENOEXEC,
            f"{path} has no kernel {missing[0]}; it has {there_are}. Build one that does: "
            f"make -C hls_kernels RULE={rule} (docs/smartssd.md, step 6)",
        )
    return replace(found, kernels=ours)


def _read(file: BinaryIO, size: int, path: Path) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise CSDStoreError(f"{path} is no xclbin, or cut short: it ends within its headers")
    return data


def _kernels(section: bytes, path: Path) -> tuple[str, ...]:
    """Return the kernels that have a compute unit, each once. `section`: the content of the section of units."""
    (count,) = struct.unpack_from("<i", section.ljust(8, b"\0"))
    if not 0 <= count <= (len(section) - 8) // _UNIT.size:
        raise CSDStoreError(f"{path} is damaged: it claims to have {count} compute units")
    units = (_UNIT.unpack_from(section, 8 + i * _UNIT.size) for i in range(count))
    return tuple(dict.fromkeys(_text(name).partition(":")[0] for kind, _, _, name in units if kind == _KERNEL))


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "replace")


# ---- writing ---------------------------------------------------------------------


def write_emulated(path: Path, platform: str, memory_bytes: int, kernels: Mapping[str, Kernel] = KERNELS) -> None:
    """Write an xclbin for software emulation: one compute unit per kernel, all buffers in one bank of memory.

    Its bitstream is text for hls_kernels/emulator/device.cpp: a line with name and address of each unit.
    """
    units = [(_FIRST_UNIT + i * _UNIT_BYTES, name, kernel) for i, (name, kernel) in enumerate(kernels.items())]
    connections = [
        (argument, i, 0) for i, (_, _, kernel) in enumerate(units) for argument in range(len(kernel.buffers))
    ]
    sections = [
        (_BITSTREAM, b"".join(f"{name} {base:x}\n".encode() for base, name, _ in units)),
        (_METADATA, _metadata(platform, units).encode()),
        (_MEMORIES, struct.pack("<i4x", 1) + _BANK.pack(_DDR4, 1, memory_bytes >> 10, 0, b"bank0")),
        (
            _UNITS,
            struct.pack("<i4x", len(units))
            + b"".join(_UNIT.pack(_KERNEL, _CHAINED, base, f"{name}:{name}_1".encode()) for base, name, _ in units),
        ),
        (_CONNECTIONS, struct.pack("<i", len(connections)) + b"".join(struct.pack("<iii", *c) for c in connections)),
    ]
    headers, data = b"", b""
    first = _aligned(_HEAD.size + _HEADER.size + len(sections) * _SECTION.size)
    for kind, content in sections:
        headers += _SECTION.pack(kind, b"", first + len(data), len(content))
        data += content.ljust(_aligned(len(content)), b"\0")
    identity = uuid.uuid5(uuid.NAMESPACE_OID, f"csd_optim {platform} {data!r}")  # the same content gets the same uuid
    version = (0, 2, 13)
    head = _HEAD.pack(_MAGIC, -1, b"\xff" * 28, b"", identity.int >> 64)
    header = _HEADER.pack(
        first + len(data), 0, 0, *version, 5, 0, b"", platform.encode(), identity.bytes, b"", len(sections)
    )
    path.write_bytes((head + header + headers).ljust(first, b"\0") + data)


def _aligned(size: int) -> int:
    return size + -size % 8


def _metadata(platform: str, units: list[tuple[int, str, Kernel]]) -> str:
    """Return the XML that tells XRT at which register offsets the kernels' arguments are."""
    text = (
        f'<project name="csd_optim"><platform vendor="xilinx" boardid="emulated" name={quoteattr(platform)}>'
        '<version major="1" minor="0"/><device name="fpga0"><core name="OCL_REGION_0" target="sw_emu" '
        f'type="clc_region" clockFreq="0MHz" numComputeUnits="{len(units)}">'
    )
    for base, name, kernel in units:
        text += f'<kernel name="{name}" language="c" hwControlProtocol="ap_ctrl_chain">'
        for buffer in kernel.buffers:
            text += f'<port name="M_AXI_{buffer}" mode="master" range="0xFFFFFFFFFFFFFFFF" dataWidth="512"/>'
        text += f'<port name="S_AXI_CONTROL" mode="slave" range="{_UNIT_BYTES:#x}" dataWidth="32"/>'
        offset = _FIRST_ARGUMENT
        for i, buffer in enumerate(kernel.buffers):
            text += _argument(i, buffer, f"M_AXI_{buffer}", 8, offset, "void*")
            offset += _POINTER_BYTES
        for i, scalar in enumerate(kernel.scalars, len(kernel.buffers)):
            text += _argument(i, scalar, "S_AXI_CONTROL", 4, offset, "unsigned int")
            offset += _SCALAR_BYTES
        text += f'<instance name="{name}_1"><addrRemap base="{base:#x}" port="S_AXI_CONTROL"/></instance></kernel>'
    return text + "</core></device></platform></project>"


def _argument(index: int, name: str, port: str, size: int, offset: int, kind: str) -> str:
    return (
        f'<arg name="{name}" addressQualifier="{int(kind.endswith("*"))}" id="{index}" port="{port}" size="{size:#x}" '
        f'offset="{offset:#x}" hostOffset="0x0" hostSize="{size:#x}" type="{kind}"/>'
    )
