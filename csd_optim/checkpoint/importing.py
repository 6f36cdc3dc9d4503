"""Import: makes a store from an export in the format of torch.save or safetensors, or from another store."""

from __future__ import annotations

import base64
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from ..bindings import DTYPE_CODES, HYPER, NEW, PARAM
from ..devices.spec import parse_devices
from ..engine.engine import Engine
from ..engine.open_engine import open_engine
from ..errors import CSDError, CSDOSError, CSDStoreError, CSDValueError
from ..files import opened
from ..params.groups import check_state_dtype, hyperparameters_of
from ..params.param_state import MOST_RATIO
from ..store.check import rule_named
from ..store.format import FILE_NAME, Contents, Record
from ..store.layout import Extent, round_up
from ..store.sections import CODEC_OF_RULE, EIGHT_BIT, FP32, PARAM_DTYPES, SECTIONS, codec_supports
from ..store.user_state import pack_user_state
from .export import INDEX_NAME, NUMPY, in_memory_order
from .files import Progress, no_progress
from .snapshot import Paths, directories
from .state_dict import EXPORT_WITH_RULES, about_of, dtype_of, mapped_states, numbered

CHUNK = 1 << 20  # elements compared at a time
EXTENT_BYTES = 64 << 20  # minimum growth of the nameless scratch file


@dataclass(frozen=True)
class Export:
    """The contents of an export, or of a store in the form of an export."""

    about: dict[str, Any]  # see about_of
    steps: list[float]
    groups: list[dict[str, Any]]
    user_state: bytes
    state: Callable[[int, str], np.ndarray[Any, Any] | None]  # (parameter, section) → state, or None

    def sections(self, extent: int, row: int) -> Sequence[str]:
        """Return the names of a parameter's states, the same for all parameters of its extent."""
        if "sections" in self.about:
            sections: list[str] = self.about["sections"][extent]
            return sections
        return SECTIONS if self.state(row, SECTIONS[-1]) is not None else SECTIONS[:-1]

    def codec(self, extent: int) -> tuple[str, torch.dtype | None]:
        """Return the codec of an extent's states and, with codes, the dtype of its parameters."""
        codes = self.about["codes"][extent] if "codes" in self.about else {}
        return codes.get("codec", FP32), PARAM_DTYPES.get(codes.get("param_dtype", ""))

    def keeping(self, state_dtype: str) -> Export:
        """Return the same export with all states kept as `state_dtype`.

        With codes, an extent has parameters of one dtype.

        Raises CSDValueError if `state_dtype` cannot keep these states.
        """
        coded = state_dtype == EIGHT_BIT
        entries = self.about["params"]
        codecs = {
            p["extent"]: _codec_for(
                state_dtype, rule_named(self.about, p), self.sections(p["extent"], row), "these states"
            )
            for row, p in enumerate(entries)
        }
        kinds = [(p["extent"], _codes_of(p) if coded else "") for p in entries]
        numbers = {kind: number for number, kind in enumerate(sorted({*kinds}))}
        about = {
            **self.about,
            "params": [{**p, "extent": numbers[kind]} for p, kind in zip(entries, kinds, strict=True)],
            "codes": [{"codec": codecs[e], "param_dtype": dtype} if coded else {} for e, dtype in numbers],
        }
        if "sections" in about:
            about["sections"] = [about["sections"][extent] for extent, _ in numbers]
        return replace(self, about=about)


def _codec_for(state_dtype: str, rule: str, sections: Sequence[str], of_what: str) -> str:
    """Return the codec for a rule's states in `state_dtype`. `of_what`: for the message. Raises CSDValueError."""
    codec = FP32 if state_dtype == FP32 else CODEC_OF_RULE.get(rule, "")
    if not codec_supports(codec, sections, None if codec == FP32 else torch.float32):
        raise CSDValueError(
            f"{of_what} stay fp32: those of {rule} are {', '.join(sections[1:]) or 'none'}, for which there are no "
            "codes of 8 bits"
        )
    return codec


def _codes_of(p: dict[str, Any]) -> str:
    """Return the dtype for which a parameter is encoded; a complex parameter counts as pairs of fp32."""
    return "float32" if p["dtype"] == "complex64" else str(p["dtype"])


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
        pass  # raises a clearer error for a missing file than torch.load()
    try:
        # Only offsets: the system may refuse torch's mapping of a file larger than memory.
        with FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of files that it then refuses
            laid_out = torch.load(path, weights_only=True)
    except Exception as e:
        raise CSDStoreError(
            f"{path} is no export of a store, or damaged: torch.load(weights_only=True) cannot read it "
            f"({type(e).__name__})"
        ) from e
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
        raise CSDStoreError(
            f"{path} is neither a store nor an export of one: there is no {FILE_NAME} in it, and no {INDEX_NAME}"
        )
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


def _check_format(about: dict[str, Any], path: Path) -> None:
    if about["format"] > EXPORT_WITH_RULES:
        raise CSDStoreError(
            f"{path} has format {about['format']}; this csd_optim reads up to {EXPORT_WITH_RULES}: upgrade it"
        )


# ---- a store -------------------------------------------------------------------------


def is_store(paths: Paths) -> bool:
    """Return whether one of the paths is a store or a snapshot."""
    places = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    kept = [place for place in (Path(p).expanduser() for p in places) if place.is_dir() or place.name == FILE_NAME]
    return any((directory / FILE_NAME).exists() for directory in directories(kept))


def read_store(
    paths: Paths,
    zeros: Callable[[int], torch.Tensor],
    progress: Progress = no_progress,
    state_dtype: str | None = None,
) -> Export:
    """Check the last step of the stores in `paths`, and return it in the form of an export: see mapped_states().

    Before reading states, raises CSDStoreError for the store of one of several ranks, and CSDValueError if
    `state_dtype` cannot keep the states. Raises CSDStoreError if a store is damaged, CSDBusyError, CSDOSError.
    """

    def accept(contents: Contents, extents: Sequence[Extent]) -> None:
        if contents.world_size > 1:
            raise CSDStoreError(
                f"{contents.path} is one of {contents.world_size} ranks: export the stores of all, and import that"
            )
        for p in contents.manifest["params"] if state_dtype else ():
            rule, sections = rule_named(contents.manifest, p), extents[p["extent"]].sections
            _codec_for(state_dtype or "", rule, sections, f"the states of {contents.path}")

    contents, states = mapped_states(paths, zeros, progress, accept)
    rows = [row for _, row, _ in numbered(contents.manifest)]

    def state(i: int, name: str) -> np.ndarray[Any, Any] | None:
        if (value := states.get((rows[i], name))) is None:
            return None
        array: np.ndarray[Any, Any] = (value.view(torch.int16) if name == "residual" else value).numpy()
        return array

    steps, record = [float(contents.steps[row]) for row in rows], contents.record
    return Export(about_of(contents), steps, record.groups, record.user_state, state)


class _Scratch:
    """Tensors that are memory-mapped from one nameless file on a drive, which lives as long as any of the tensors."""

    def __init__(self, directory: Path) -> None:
        """`directory`: on the drive; need not exist yet."""
        self._directory = directory
        self._file: IO[bytes] | None = None  # made when first needed
        self._end = self._begin = 0
        self._mapped = np.zeros(0, np.uint8)

    def zeros(self, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return `n` zeros. Raises CSDOSError."""
        size = n * dtype.itemsize
        if size > self._end - self._begin:  # a mapping per tensor would take a file descriptor each
            begin, self._end = self._end, self._end + round_up(max(size, EXTENT_BYTES), 4096)
            try:
                self._file = self._file or self._new_file()
                os.posix_fallocate(self._file.fileno(), begin, self._end - begin)  # so a full disk raises, not SIGBUS
            except OSError as e:
                raise CSDOSError(e.errno, f"no room for what is decoded: {e.strerror}") from e
            self._mapped = np.memmap(self._file, np.uint8, "r+", begin, (self._end - begin,))
            self._begin = begin
        first = len(self._mapped) - (self._end - self._begin)
        self._begin += round_up(size, 8)
        return torch.from_numpy(self._mapped[first : first + size]).view(dtype)

    def _new_file(self) -> IO[bytes]:
        existing = next(d for d in (self._directory, *self._directory.parents) if d.is_dir())
        return tempfile.TemporaryFile(dir=existing)


# ---- a new store ---------------------------------------------------------------------


def _flat(value: np.ndarray[Any, Any], p: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return a state as a 1-D array in the parameter's memory order, still mapped if the file has the same order."""
    return np.ascontiguousarray(value.transpose(in_memory_order(p))).reshape(-1)


def _residual(value: np.ndarray[Any, Any], p: dict[str, Any]) -> torch.Tensor:
    """Return a residual as an engine keeps it: 1-D bfloat16, in memory order."""
    flat = _flat(value, p)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the array is read-only; nothing writes to it
        return torch.from_numpy(flat).view(torch.bfloat16)


def _fill_codes(engine: Engine, states: dict[int, list[np.ndarray[Any, Any]]], params: dict[int, torch.Tensor]) -> None:
    """Encode states of parameters (fp32, in memory order), rounding to nearest.

    `params`: 16-bit parameters that had fp32 states: 1-D, the masters rounded.

    Codes have no windows to write to. Instead, a step without gradients starts from these states (csd_param.edited).
    """
    table = np.zeros(engine.tiles.n_params, PARAM)
    for row, param in params.items():
        table["param"][row], table["param_dtype"][row] = param.data_ptr(), DTYPE_CODES[param.dtype]
        table["master"][row] = NEW
    for row, values in states.items():
        table["edited"][row, : len(values)] = [value.ctypes.data for value in values]
    for tile in engine.begin(table, np.zeros(0, HYPER), engine.tiles.of([*states])).tolist():
        engine.native.push(tile)
    engine.finish()


def import_store(
    source: str | os.PathLike[str],
    devices: Sequence[str | os.PathLike[str]],
    tile_elems: int | None = None,
    progress: Progress = no_progress,
    state_dtype: str | None = None,
) -> dict[str, Any]:
    """Make a store on `devices`, directories that hold no store yet, from an export or the last step of a store.

    `source`: a file or directory that `export` has written, a snapshot, or the directories of a store's devices,
    separated by commas. The source is only read, and a store is checked first. `state_dtype`: for all states; None:
    unchanged. 8-bit states become fp32 exactly, fp32 states are rounded to the nearest code; everything else stays the
    same. Returns facts about the store for a message; `clipped` is the number of elements of exp_avg that were too
    large for 8 bits.

    Raises CSDValueError, CSDStoreError if the source is damaged, CSDStoreExistsError, CSDBusyError, CSDOSError. After
    an error no new store can be resumed.
    """
    specs = parse_devices(devices)
    if temporary := [str(spec) for spec in specs if spec.directory is None or not spec.durable]:
        raise CSDValueError(f"{temporary[0]} keeps nothing; name a directory for the store")
    if state_dtype is not None:
        check_state_dtype(state_dtype)
    stores = [os.fspath(source)] if Path(source).exists() else os.fspath(source).split(",")
    assert specs[0].directory is not None
    scratch = _Scratch(specs[0].directory)
    if is_store(stores):
        open_engine(specs).close()  # raises if the devices are unusable, before the source is read
        export = read_store(stores, scratch.zeros, progress, state_dtype)
    else:
        export = read_export(Path(source).expanduser())
    export = export.keeping(state_dtype) if state_dtype else export
    about = export.about
    numels = [math.prod(p["shape"]) * (2 if p["dtype"] == "complex64" else 1) for p in about["params"]]
    engine = open_engine(specs, tile_elems=tile_elems)
    try:
        params, counts = [], []
        to_encode: dict[int, list[np.ndarray[Any, Any]]] = {}  # by parameter: its states
        rounded: dict[int, torch.Tensor] = {}
        clipped = 0
        with progress("importing", 12 * sum(numels)) as tick:
            for e, number in enumerate(sorted({p["extent"] for p in about["params"]})):
                # Parameters of one extent share an extent again.
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
                    if state_dtype == EIGHT_BIT:
                        master, *moments = to_encode[extent.first_param + at]
                        clipped += _clipped(*moments[:2]) if codec == EIGHT_BIT else 0
                        if param_dtype and param_dtype != torch.float32:
                            rounded[extent.first_param + at] = _rounded(master, scratch.zeros(numels[i], param_dtype))
                    if (value := export.state(i, "residual")) is not None:
                        if (value.dtype, value.shape) != (np.int16, tuple(p["shape"])):
                            raise CSDStoreError(f"{source} is damaged: residual of {p['name']} does not fit")
                        engine.committer.keep_residual(extent.first_param + at, _residual(value, p))
                    counts.append(export.steps[i])
                    params.append({**p, "extent": e, "start": extent.starts[at], "numel": numels[i]})
            rule = {"rule": about["rule"]} if "rule" in about else {}
            described = {**rule, "params": params, "waiting": about["waiting"]}
            engine.committer.describe(described)  # else nothing is committed
            if to_encode:
                _fill_codes(engine, to_encode, rounded)
            engine.states.sync()
        record = Record(export.groups, about["given"], export.user_state, about["seconds"])
        engine.states.go_to(about["step"], record, np.array(counts, np.float32))
    except BaseException:
        engine.abandon()  # close() would commit the incomplete store
        raise
    engine.close()
    found = {"devices": [str(spec) for spec in specs], "step": about["step"], "params": sum(numels)}
    return found | ({"state_dtype": state_dtype, "clipped": clipped} if state_dtype else {})


def _parts(n: int) -> list[slice]:
    return [slice(first, first + CHUNK) for first in range(0, n, CHUNK)]


def _clipped(exp_avg: np.ndarray[Any, Any], exp_avg_sq: np.ndarray[Any, Any]) -> int:
    """Return how many elements of exp_avg are too large for 8 bits."""
    m, v = exp_avg.view(np.float32), exp_avg_sq.view(np.float32)  # complex numbers as pairs
    return sum(int((np.abs(m[part]) > MOST_RATIO * np.sqrt(v[part])).sum()) for part in _parts(len(m)))


def _rounded(master: np.ndarray[Any, Any], param: torch.Tensor) -> torch.Tensor:
    """Round a master into `param`, and return it. Both are 1-D."""
    for part in _parts(len(param)):
        param[part] = torch.from_numpy(master[part].copy())  # a copy, as torch warns of read-only arrays
    return param
