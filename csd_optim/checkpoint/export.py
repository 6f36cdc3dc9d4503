"""Export of stores to the formats of torch.save and safetensors, and import from these."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import struct
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..bindings import DTYPE_CODES, HYPER, NEW, PARAM
from ..devices.spec import parse_devices
from ..engine.engine import Engine
from ..engine.open_engine import open_engine
from ..errors import CSDError, CSDOSError, CSDStoreError, CSDValueError
from ..params.groups import hyperparameters_of
from ..store.format import RESIDUAL_BYTES, Contents, Record
from ..store.layout import extents_of
from ..store.reader import Residual, Tick, Tile, each_tile, stored_bytes, total_bytes
from ..store.sections import FP32, PARAM_DTYPES, SECTIONS
from ..store.transfer import opened
from ..store.user_state import pack_user_state
from .consolidate import Consolidated, consolidated_stores
from .files import Output, Progress, check_free_space, created_atomically, no_progress
from .snapshot import Paths
from .state_dict import EXPORT_WITH_RULE, about_of, dtype_of, names_of, numbered, state_dict

# The NumPy dtypes for copying torch dtypes: NumPy has no bfloat16, and any 16-bit type copies the same bits.
NUMPY: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.complex64: np.complex64, torch.bfloat16: np.int16}
INDEX_NAME = "optimizer.safetensors.index.json"
SHARD_BYTES = 5 * 10**9

# ---- export --------------------------------------------------------------------------


@dataclass(frozen=True)
class FileRegion:
    """The region of a file that receives one state of a parameter."""

    output: Output
    offset: int
    # If the file's element order is not that of the parameter's memory: the mapped region, viewed in memory order.
    mapped: np.ndarray[Any, Any] | None = None

    def write(self, first: int, data: memoryview) -> None:
        """Write `data`, which begins at byte `first` of the state in memory order."""
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
    """Return the region of a part, given the region of the whole parameter, whose elements are in index order there."""
    dtype, shape = dtype_of(p, name), p["shape"]
    if shape[1:] == whole_entry["shape"][1:] and _in_order(p):
        return FileRegion(region.output, region.offset + first[0] * math.prod(shape[1:]) * dtype.itemsize)
    path = f"/proc/self/fd/{region.output.fd}"
    os.posix_fallocate(region.output.fd, region.offset, _nbytes(whole_entry, name))
    whole = np.memmap(path, NUMPY[dtype], "r+", offset=region.offset, shape=tuple(whole_entry["shape"]))
    block = whole[tuple(slice(begin, begin + n) for begin, n in zip(first, shape, strict=True))]
    return FileRegion(region.output, region.offset, block.transpose(_order(p)))


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

    With several ranks, name the stores of all of them: the parts are combined.
    """
    with consolidated_stores(paths) as source, created_atomically(out) as temporary:
        check_free_space(temporary.parent, sum(stored_bytes(contents, decoded=True) for contents in source.stores))
        wanted: dict[int, tuple[int, str]] = {}  # id of a fake tensor (one without data) → row, name

        def tensor(row: int, name: str, p: dict[str, Any]) -> torch.Tensor:
            with FakeTensorMode():
                empty = torch.empty_strided(p["shape"], p["stride"], dtype=dtype_of(p, name))
            wanted[id(empty)] = row, name
            return empty

        content = state_dict(source.contents, tensor)
        # torch writes everything but the data and leaves gaps for it; loading the file as fake tensors says where.
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
    """Write a directory of safetensors files of about `shard_bytes`, with at least one tensor each, and an index.

    Returns the paths of the files. Several ranks: as in export_torch().
    """
    with consolidated_stores(paths) as source, created_atomically(out) as temporary, contextlib.ExitStack() as stack:
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


def _order(p: dict[str, Any]) -> list[int]:
    """Return the dimensions in memory order, the outermost first."""
    return sorted(range(len(p["shape"])), key=lambda i: -p["stride"][i])


def _in_order(p: dict[str, Any]) -> bool:
    """Return whether the elements are in memory in the order of their indices (row-major)."""
    shape = p["shape"]
    return not p["numel"] or [i for i in _order(p) if shape[i] != 1] == [i for i, n in enumerate(shape) if n != 1]


def _mapped(output: Output, offset: int, p: dict[str, Any], what: str) -> np.ndarray[Any, Any] | None:
    """Return the region of a state, mapped, in memory order; None if memory and file have the same (index) order."""
    order = _order(p)
    if _in_order(p):
        return None
    os.posix_fallocate(output.fd, offset, _nbytes(p, what))  # a full disk raises here; later it would be a SIGBUS
    dtype = NUMPY[dtype_of(p, what)]
    path = f"/proc/self/fd/{output.fd}"
    mapped: np.ndarray[Any, Any] = np.memmap(path, dtype, "r+", offset=offset, shape=tuple(p["shape"])).transpose(order)
    return mapped


# ---- import --------------------------------------------------------------------------


@dataclass(frozen=True)
class Export:
    """The contents of an export."""

    about: dict[str, Any]  # see about_of
    steps: list[float]
    groups: list[dict[str, Any]]
    user_state: bytes
    state: Callable[[int, str], np.ndarray[Any, Any] | None]  # (parameter, section) → state; None: it has none
    # The parameter itself, for its codes: 1-D, in memory order. None: it is the master rounded to nearest.
    param: Callable[[int], torch.Tensor] | None = None

    def sections(self, extent: int, row: int) -> Sequence[str]:
        """Return the names of the states of a parameter; they are the same for all parameters of its extent."""
        if "rule" in self.about:
            sections: list[str] = self.about["sections"][extent]
            return sections
        return SECTIONS if self.state(row, SECTIONS[-1]) is not None else SECTIONS[:-1]

    def codec(self, extent: int) -> tuple[str, torch.dtype | None]:
        """Return the codec of an extent's states, and with codes the dtype of its parameters."""
        codes = self.about["codes"][extent] if "codes" in self.about else {}
        return codes.get("codec", FP32), PARAM_DTYPES.get(codes.get("param_dtype", ""))


def read_export(path: Path) -> Export:
    """Read an export of either format. Raises CSDStoreError if `path` is not an export of a store, CSDOSError."""
    try:
        return _read_safetensors(path) if path.is_dir() else _read_torch(path)
    except CSDError:
        raise
    except OSError as e:
        raise CSDOSError(e.errno, f"cannot read {path}: {e.strerror}") from e
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as e:
        raise CSDStoreError(f"{path} is no export of a store, or damaged: {e!r}") from e


def _read_torch(path: Path) -> Export:
    with opened(path):
        pass  # for a missing file, this raises a clearer error than torch.load()
    try:
        with FakeTensorMode():  # offsets only: torch is refused a mapping of a file larger than memory
            laid_out = torch.load(path, weights_only=True)
    except Exception as e:
        raise CSDStoreError(f"{path} is no file that torch.load(weights_only=True) can read: {e}") from e
    about = laid_out.get("csd_optim") if isinstance(laid_out, dict) else None
    if not isinstance(about, dict):
        raise CSDStoreError(
            f"{path} is no export of a store: the parameters in full precision, their names and dtypes are not in it. "
            "A checkpoint of AdamW is loaded in the script: opt.load_state_dict(torch.load(...))"
        )
    _check_format(about, path)
    data = np.memmap(path, np.uint8, "r")

    def bytes_of(t: torch.Tensor) -> np.ndarray[Any, Any]:
        storage = t.untyped_storage()
        assert storage._checkpoint_offset is not None
        return data[storage._checkpoint_offset :][: storage.nbytes()]

    def small(t: torch.Tensor) -> torch.Tensor:
        storage = torch.from_numpy(bytes_of(t).copy()).untyped_storage()
        return torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.shape, t.stride())

    group_of = {n: (k, i) for k, g in enumerate(laid_out["param_groups"]) for i, n in enumerate(g["params"])}
    entries = {group_of[n]: entry for n, entry in laid_out["state"].items()}
    states = [entries[p["group"], p["position"]] for p in about["params"]]

    def state(i: int, section: str) -> np.ndarray[Any, Any] | None:
        if (t := states[i].get(section)) is None:
            return None
        size, dtype = t.element_size(), NUMPY[t.dtype]
        strides, first = [size * n for n in t.stride()], size * t.storage_offset()
        array: np.ndarray[Any, Any] = np.ndarray(tuple(t.shape), dtype, bytes_of(t), first, strides)
        return array

    steps = [float(small(entry["step"])) for entry in states]
    groups = [hyperparameters_of(group, group) for group in laid_out["param_groups"]]
    user_state = pack_user_state(tree_map_only(torch.Tensor, small, about["user_state"]))
    return Export(about, steps, groups, user_state, state)


def _read_safetensors(path: Path) -> Export:
    if not (path / INDEX_NAME).exists():
        raise CSDStoreError(f"{path} is no export of a store: there is no {INDEX_NAME} in it")
    index = json.loads((path / INDEX_NAME).read_bytes())
    about = index["metadata"]["csd_optim"]
    _check_format(about, path)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for file in sorted({*index["weight_map"].values()}):
        data = np.memmap(path / Path(file).name, np.uint8, "r")
        begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
        entries = json.loads(data[8:begin].tobytes())
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            first, end = entry["data_offsets"]
            dtype = NUMPY[{"F32": torch.float32, "BF16": torch.bfloat16}[entry["dtype"]]]
            arrays[name] = data[begin + first : begin + end].view(dtype).reshape(entry["shape"])

    def state(i: int, section: str) -> np.ndarray[Any, Any] | None:
        p = about["params"][i]
        array = arrays.get(f"{p['name']}.{section}")
        if array is not None and p["dtype"] == "complex64":
            array = array.view(np.complex64)[..., 0]
        return array

    user_state = base64.b64decode(about["user_state"])
    return Export(about, about["steps"], about["param_groups"], user_state, state)


def _flat(value: np.ndarray[Any, Any], p: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return a state as 1-D array in the parameter's memory order, still mapped from the file if it has that order."""
    return np.ascontiguousarray(value.transpose(_order(p))).reshape(-1)


def _residual(value: np.ndarray[Any, Any], p: dict[str, Any]) -> torch.Tensor:
    """Return a residual in the form in which an engine keeps it: 1-D bfloat16, in memory order."""
    flat = _flat(value, p)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the array is read-only; nothing writes to it
        return torch.from_numpy(flat).view(torch.bfloat16)


def _check_format(about: dict[str, Any], path: Path) -> None:
    if about["format"] > EXPORT_WITH_RULE:
        raise CSDStoreError(
            f"{path} has format {about['format']}; this csd_optim reads up to {EXPORT_WITH_RULE}: upgrade it"
        )


def _fill_codes(engine: Engine, states: dict[int, list[np.ndarray[Any, Any]]], params: dict[int, torch.Tensor]) -> None:
    """Encode states of parameters (fp32, in memory order), rounding to nearest. `params`: see Export.

    Codes have no windows to write to. Instead, a step without gradients starts from these states (csd_param.edited).
    """
    table = np.zeros(engine.n_params, PARAM)
    for row, param in params.items():
        table["param"][row], table["param_dtype"][row] = param.data_ptr(), DTYPE_CODES[param.dtype]
        table["master"][row] = NEW
    for row, values in states.items():
        table["edited"][row, : len(values)] = [value.ctypes.data for value in values]
    for tile in engine.begin(table, np.zeros(0, HYPER), engine.tiles_of_params([*states])).tolist():
        engine.push(tile)
    engine.finish()


def import_store(
    source: Path,
    devices: Sequence[str | os.PathLike[str]],
    tile_elems: int | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Make a store from an export, on any number of devices. Returns what the store holds, for a message."""
    return make_store(read_export(source), source, devices, tile_elems, progress, "importing")


def make_store(
    export: Export,
    source: Path,
    devices: Sequence[str | os.PathLike[str]],
    tile_elems: int | None,
    progress: Progress,
    doing: str,
) -> dict[str, Any]:
    """Make a store, as import_store(), from an Export that was read already. `source`, `doing`: for messages."""
    specs = parse_devices(devices)
    if temporary := [str(spec) for spec in specs if not spec.durable]:
        raise CSDValueError(f"{temporary[0]} keeps nothing; name a directory for the store")
    about = export.about
    numels = [math.prod(p["shape"]) * (2 if p["dtype"] == "complex64" else 1) for p in about["params"]]
    engine = open_engine(specs, tile_elems=tile_elems, shadow=about["shadow"])
    try:
        params = []
        to_encode: dict[int, list[np.ndarray[Any, Any]]] = {}  # states by parameter
        coded_params: dict[int, torch.Tensor] = {}
        with progress(doing, 12 * sum(numels)) as tick:
            for e, number in enumerate(sorted({p["extent"] for p in about["params"]})):
                # Parameters that shared an extent share one again.
                rows = [i for i, p in enumerate(about["params"]) if p["extent"] == number]
                sections = export.sections(number, rows[0])
                codec, param_dtype = export.codec(number)
                extent = engine.extend([numels[i] for i in rows], sections, codec=codec, param_dtype=param_dtype)
                for at, i in enumerate(rows):
                    p = about["params"][i]
                    for k, section in enumerate(sections):
                        value, dtype = export.state(i, section), dtype_of(p, section)
                        if value is None or (value.dtype, value.shape) != (NUMPY[dtype], tuple(p["shape"])):
                            raise CSDStoreError(
                                f"{source} is damaged: {section} of {p['name']} is missing or does not fit"
                            )
                        if codec == FP32:
                            window = engine.windows.window(extent, at, k, dtype)
                            np.copyto(window.as_strided(p["shape"], p["stride"]).numpy(), value)
                        else:
                            to_encode.setdefault(extent.first_param + at, []).append(_flat(value, p))
                        tick(4 * numels[i])
                    if export.param and codec != FP32:
                        coded_params[extent.first_param + at] = export.param(i)
                    if (value := export.state(i, "residual")) is not None:
                        if (value.dtype, value.shape) != (np.int16, tuple(p["shape"])):
                            raise CSDStoreError(f"{source} is damaged: residual of {p['name']} does not fit")
                        engine.keep_residual(extent.first_param + at, _residual(value, p))
                    engine.steps[e][at] = export.steps[i]
                    params.append({**p, "extent": e, "start": extent.starts[at], "numel": numels[i]})
            rule = {"rule": about["rule"]} if "rule" in about else {}
            engine.describe({**rule, "params": params, "waiting": about["waiting"]})  # else nothing is committed
            if to_encode:
                _fill_codes(engine, to_encode, coded_params)
            engine.windows.sync()
        engine.step = about["step"]
        engine.record = Record(export.groups, about["given"], export.user_state, about["seconds"])
    except BaseException:
        engine.abandon()  # close() would commit the incomplete store
        raise
    engine.close()
    return {"devices": [str(spec) for spec in specs], "step": about["step"], "params": sum(numels)}
