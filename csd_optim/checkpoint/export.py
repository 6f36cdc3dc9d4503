"""Export of stores to the formats of torch.save and safetensors."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from ..errors import CSDValueError
from ..files import appears, check_free_space
from ..store.format import RESIDUAL_BYTES, Contents
from ..store.layout import extents_of
from ..store.reader import Residual, Tick, Tile, each_tile, stored_bytes, total_bytes
from .consolidate import Consolidated, consolidated_stores
from .files import Output, Progress, no_progress
from .snapshot import Paths
from .state_dict import about_of, dtype_of, names_of, numbered, state_dict

# NumPy dtypes for copies of torch dtypes: NumPy has no bfloat16, but any 16-bit type copies the same bits.
NUMPY: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.complex64: np.complex64, torch.bfloat16: np.int16}
INDEX_NAME = "optimizer.safetensors.index.json"
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class FileRegion:
    """The region of a file that receives one state of a parameter."""

    output: Output
    offset: int
    # If the file's element order differs from the parameter's memory order: the mapped region, viewed in memory order.
    mapped: np.ndarray[Any, Any] | None = None

    def write(self, first: int, data: memoryview) -> None:
        """Write `data` from byte `first` of the state (in memory order) on."""
        if self.mapped is None:
            self.output.write(data, self.offset + first)
        else:
            values = np.frombuffer(data, self.mapped.dtype)
            first //= self.mapped.itemsize
            self.mapped[np.unravel_index(np.arange(first, first + len(values)), self.mapped.shape)] = values


def _copy_tiles(source: Consolidated, regions: dict[tuple[int, str], FileRegion], progress: Progress) -> None:
    """Copy every tile's pieces of parameters, and every residual, to their regions, keyed by row and name."""
    with progress("exporting", total_bytes(source.stores)) as tick:
        for rank, (recovered, rows) in enumerate(source.ranks):
            own = {}
            for row, whole in rows.items():
                p, first = recovered[0].manifest["params"][row], source.first_of(rank, row)
                for name in names_of(recovered[0].manifest, p):
                    if region := regions.get((whole, name)):
                        whole_entry = source.contents.manifest["params"][whole]
                        own[row, name] = (
                            region if first is None else _region_of_part(region, whole_entry, first, p, name)
                        )
            _copy_tiles_of_rank(recovered, own, tick)


def _region_of_part(
    region: FileRegion, whole_entry: dict[str, Any], first: list[int], p: dict[str, Any], name: str
) -> FileRegion:
    """Return the region of a part. `region`: of the whole parameter, with elements in index order."""
    dtype, shape = dtype_of(p, name), p["shape"]
    if shape[1:] == whole_entry["shape"][1:] and _in_order(p):
        return FileRegion(region.output, region.offset + first[0] * math.prod(shape[1:]) * dtype.itemsize)
    path = f"/proc/self/fd/{region.output.fd}"
    os.posix_fallocate(region.output.fd, region.offset, _nbytes(whole_entry, name))
    whole = np.memmap(path, NUMPY[dtype], "r+", offset=region.offset, shape=tuple(whole_entry["shape"]))
    block = whole[tuple(slice(begin, begin + n) for begin, n in zip(first, shape, strict=True))]
    return FileRegion(region.output, region.offset, block.transpose(in_memory_order(p)))


def _copy_tiles_of_rank(recovered: list[Contents], regions: dict[tuple[int, str], FileRegion], tick: Tick) -> None:
    extents = extents_of(recovered)

    def copy_tile(tile: Tile, data: memoryview | None) -> None:
        if data is None:
            return
        for row, _, first, tile_first, elems in extents[tile.extent].pieces_in(tile.number).tolist():
            for state, values in zip(tile.states, _values(tile, data, tile_first, elems), strict=True):
                if region := regions.get((row, state)):
                    region.write(4 * first, values)

    def copy_residual(residual: Residual, first: int, data: memoryview) -> None:
        if region := regions.get((residual.row, "residual")):
            region.write(first, data)

    each_tile(recovered, copy_tile, copy_residual, tick=tick)


def _values(tile: Tile, data: memoryview, first: int, elems: int) -> list[memoryview]:
    """Return states of elements [first, first + elems) of a tile as fp32, one buffer each. `data`: the tile's slot."""
    if tile.codes_of is None:
        return [data[section.at(first) : section.at(first + elems)] for section in tile.sections]
    states = [torch.empty(elems, dtype=torch.float32, device="cpu") for _ in tile.states]
    tile.decode(data, first, states)
    return [state.numpy().data.cast("B") for state in states]


def export_torch(paths: Paths, out: Path, progress: Progress = no_progress) -> list[Path]:
    """Write one file with the content of torch.save(CSDAdam.load(paths), out). Returns its path, as a list.

    `paths`: with several ranks, the stores of all ranks, whose parts are combined.
    """
    with consolidated_stores(paths) as source, appears(out, replaces=False) as temporary:
        check_free_space(temporary.parent, sum(stored_bytes(contents, decoded=True) for contents in source.stores))
        wanted: dict[int, tuple[int, str]] = {}  # id of a fake tensor (one without data) → row, name

        def tensor(row: int, name: str, p: dict[str, Any]) -> torch.Tensor:
            with FakeTensorMode():
                empty = torch.empty_strided(p["shape"], p["stride"], dtype=dtype_of(p, name))
            wanted[id(empty)] = row, name
            return empty

        content = state_dict(source.contents, tensor)
        # torch writes everything but the data, with gaps; loading the file as fake tensors tells where the gaps are.
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(content, temporary)
        with FakeTensorMode():
            laid_out = torch.load(temporary, weights_only=True)
        with Output(temporary, None) as output:
            regions = {}
            for saved, original in zip(tree_leaves(laid_out), tree_leaves(content), strict=True):
                if not isinstance(saved, torch.Tensor):
                    continue
                offset = saved.untyped_storage()._checkpoint_offset
                assert offset is not None
                if id(original) in wanted:
                    regions[wanted[id(original)]] = FileRegion(output, offset)
                else:
                    storage = torch.empty(0, dtype=torch.uint8).set_(original.untyped_storage())
                    output.write(storage.numpy().tobytes(), offset)
            _copy_tiles(source, regions, progress)
    return [out]


def export_safetensors(
    paths: Paths, out: Path, shard_bytes: int = SHARD_BYTES, progress: Progress = no_progress
) -> list[Path]:
    """Write a directory of safetensors files of about `shard_bytes` each, with at least one tensor, and an index.

    Returns the paths of the files. Several ranks: as in export_torch().
    """
    with (
        consolidated_stores(paths) as source,
        appears(out, replaces=False) as temporary,
        contextlib.ExitStack() as stack,
    ):
        first = source.contents
        check_free_space(temporary.parent, sum(stored_bytes(contents, decoded=True) for contents in source.stores))
        temporary.mkdir()
        shards: list[dict[str, tuple[int, str, dict[str, Any]]]] = [{}]  # per file: name → row, state, entry; in order
        filled, names = 0, set()
        for _, row, p in numbered(first.manifest):
            for what in names_of(first.manifest, p):
                name, size = f"{p['name']}.{what}", _nbytes(p, what)
                if name in names:
                    raise CSDValueError(f"two parameters are called {p['name']}; export them in torch's format")
                if filled and filled + size > shard_bytes:
                    shards.append({})
                    filled = 0
                filled += size
                shards[-1][name] = row, what, p
                names.add(name)
        regions, weight_map = {}, {}
        for i, shard in enumerate(shards):
            file = f"optimizer-{i + 1:05}-of-{len(shards):05}.safetensors"
            weight_map.update(dict.fromkeys(shard, file))
            entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            end = 0
            # Residuals (16 bits) go last, so that fp32 tensors stay aligned.
            for name, (_, what, p) in sorted(shard.items(), key=lambda item: item[1][1] == "residual"):
                # A complex number is stored as two fp32 values: not every reader knows a complex type.
                shape = [*p["shape"], 2] if p["dtype"] == "complex64" else p["shape"]
                dtype, begin, end = "BF16" if what == "residual" else "F32", end, end + _nbytes(p, what)
                entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            header = json.dumps(entries).encode()
            header += b" " * (-len(header) % 8)
            begin = 8 + len(header)
            output = stack.enter_context(Output(temporary / file, begin + end))
            output.write(struct.pack("<Q", len(header)) + header, 0)
            for name, (row, what, p) in shard.items():
                offset = begin + entries[name]["data_offsets"][0]
                regions[row, what] = FileRegion(output, offset, _mapped(output, offset, p, what))
        _copy_tiles(source, regions, progress)
        steps = [float(first.steps[row]) for _, row, _ in numbered(first.manifest)]
        about = {
            **about_of(first),
            "steps": steps,
            "param_groups": first.record.groups,
            "user_state": base64.b64encode(first.record.user_state).decode(),
        }
        index = {"metadata": {"csd_optim": about}, "weight_map": weight_map}
        with Output(temporary / INDEX_NAME, 0) as output:
            output.write(json.dumps(index, indent=1).encode(), 0)
    return [out / name for name in (*sorted({*weight_map.values()}), INDEX_NAME)]


def _nbytes(p: dict[str, Any], what: str) -> int:
    return (RESIDUAL_BYTES if what == "residual" else 4) * int(p["numel"])


def in_memory_order(p: dict[str, Any]) -> list[int]:
    """Return the dimensions in memory order, the outermost first."""
    return sorted(range(len(p["shape"])), key=lambda i: -p["stride"][i])


def _in_order(p: dict[str, Any]) -> bool:
    """Return whether the elements lie in memory in the order of their indices (row-major)."""
    shape = p["shape"]
    return not p["numel"] or [i for i in in_memory_order(p) if shape[i] != 1] == [
        i for i, n in enumerate(shape) if n != 1
    ]


def _mapped(output: Output, offset: int, p: dict[str, Any], what: str) -> np.ndarray[Any, Any] | None:
    """Return the mapped region of a state, in memory order; None if the memory order is the file's (index) order."""
    order = in_memory_order(p)
    if _in_order(p):
        return None
    os.posix_fallocate(output.fd, offset, _nbytes(p, what))  # a full disk raises here; later it would be a SIGBUS
    dtype = NUMPY[dtype_of(p, what)]
    path = f"/proc/self/fd/{output.fd}"
    mapped: np.ndarray[Any, Any] = np.memmap(path, dtype, "r+", offset=offset, shape=tuple(p["shape"])).transpose(order)
    return mapped
