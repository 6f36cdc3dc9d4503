"""Conversion of a store between fp32 states and 8-bit codes, by making a new store."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..devices.spec import parse_devices
from ..engine.engine import Engine
from ..engine.open_engine import open_engine
from ..engine.resume import check_recovered
from ..errors import CSDOSError, CSDStoreError, CSDValueError
from ..params.groups import check_state_dtype
from ..params.param_state import MOST_RATIO
from ..store.format import RESIDUAL_BYTES, Contents
from ..store.layout import extents_of, round_up
from ..store.reader import Tile, residuals_of, total_bytes
from ..store.sections import EIGHT_BIT, FP32, PARAM_DTYPES, codec_supports
from .export import Export, make_store
from .files import Progress, no_progress
from .snapshot import Paths, directories
from .state_dict import about_of, dtype_of, numbered

CHUNK = 1 << 20  # elements that are processed at a time
EXTENT_BYTES = 64 << 20  # minimum by which the nameless scratch file grows


def convert_store(
    paths: Paths,
    devices: Sequence[str | os.PathLike[str]],
    state_dtype: str,
    tile_elems: int | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Make a store on `devices` (directories that hold no store yet) from the last step of the store in `paths`.

    All states are converted to `state_dtype`: to fp32 exactly, to 8 bits by rounding to nearest. Everything else stays
    the same: masters (as far as the states hold them), steps, hyperparameters, `user_state`, residuals. The old store
    is checked first, and only read. Returns what the new store holds, for a message; `clipped` is the number of
    elements of exp_avg that were too large for 8 bits.

    Raises CSDValueError if there is nothing to convert, CSDStoreError if the store is damaged or one of several ranks,
    CSDStoreExistsError, CSDBusyError, CSDOSError. After an error there is no new store that could be resumed.
    """
    check_state_dtype(state_dtype)
    specs = parse_devices(devices)
    for spec in specs:
        if spec.directory is None or not spec.durable:
            raise CSDValueError(f"{spec} keeps nothing; name a directory for the store")
    open_engine(specs).close()  # raises if the devices cannot be used, before everything is read
    engine = open_engine(parse_devices(directories(paths)), mode="read")
    try:
        if not engine.recovered:
            raise CSDStoreError(f"{engine.devices.specs[0]} holds no step yet")
        first = engine.recovered[0]
        if first.world_size > 1:
            raise CSDStoreError(f"{first.path} is one of {first.world_size} ranks: load_state_dict() converts these")
        if all(extent.codec == state_dtype for extent in engine.extents):
            raise CSDValueError(f"the states of {first.path} are {state_dtype} already")
        for extent in engine.extents:
            if not codec_supports(state_dtype, extent.sections, torch.float32 if state_dtype == EIGHT_BIT else None):
                raise CSDValueError(
                    f"the states of {first.path} stay fp32: they are {', '.join(extent.sections[1:]) or 'none'}, and "
                    f"{state_dtype} keeps exp_avg and exp_avg_sq"
                )
        assert specs[0].directory is not None
        with _Source(engine, specs[0].directory) as source:
            with progress("checking", total_bytes(engine.recovered)) as tick:
                check_recovered(engine, source.decode_tile, tick)
            export = source.export(state_dtype)
            made = make_store(export, Path(first.path), devices, tile_elems, progress, "converting")
            return {**made, "state_dtype": state_dtype, "clipped": source.clipped}
    finally:
        engine.close()


class _Scratch:
    """Tensors that are memory-mapped from one nameless file on a drive. It lives as long as one of them does."""

    def __init__(self, directory: Path) -> None:
        existing = next(d for d in (directory, *directory.parents) if d.is_dir())
        self._file = tempfile.TemporaryFile(dir=existing)  # noqa: SIM115
        self._end = self._begin = 0
        self._mapped = np.zeros(0, np.uint8)

    def zeros(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `n` zeros. Raises CSDOSError."""
        size = n * dtype.itemsize
        if size > self._end - self._begin:  # one mapping per tensor would take a file descriptor each
            begin, self._end = self._end, self._end + round_up(max(size, EXTENT_BYTES), 4096)
            try:
                os.posix_fallocate(self._file.fileno(), begin, self._end - begin)  # so a full disk raises, not SIGBUS
            except OSError as e:
                raise CSDOSError(e.errno, f"no room for what is decoded: {e.strerror}") from e
            self._mapped = np.memmap(self._file, np.uint8, "r+", begin, (self._end - begin,))
            self._begin = begin
        first = len(self._mapped) - (self._end - self._begin)
        self._begin += round_up(size, 8)
        return torch.from_numpy(self._mapped[first : first + size]).view(dtype)

    def close(self) -> None:
        self._file.close()


class _Source:
    """A store in the form of an Export. States are mapped from its files; decoded codes from a nameless file."""

    def __init__(self, engine: Engine, directory: Path) -> None:
        self._engine = engine
        self._scratch = _Scratch(directory)
        self.clipped = 0
        self._contents: Contents = engine.recovered[0]
        self._rows = [row for _, row, _ in numbered(self._contents.manifest)]
        self._params = self._contents.manifest["params"]
        self._extents = extents_of(engine.recovered)
        self._decoded = {
            extent.first_param + i: [self._scratch.zeros(n, torch.float32) for _ in extent.sections]
            for extent in self._extents
            if extent.codec != FP32
            for i, n in enumerate(extent.numels)
        }
        self._residuals = {r.row: r for r in residuals_of(engine.recovered)}

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.close()

    def decode_tile(self, tile: Tile, data: memoryview | None) -> None:
        """Decode one tile that has passed its check; see each_tile()."""
        if data is None or tile.codes_of is None:
            return
        for row, _, first, tile_first, elems in self._extents[tile.extent].pieces_in(tile.number).tolist():
            tile.decode(data, tile_first, [state[first : first + elems] for state in self._decoded[row]])

    def _flat(self, row: int, k: int) -> torch.Tensor:
        """Return the `k`-th state of a row, 1-D fp32, in memory order."""
        if row in self._decoded:
            return self._decoded[row][k]
        extent = self._engine.extents[self._params[row]["extent"]]
        return self._engine.windows.window(extent, row - extent.first_param, k, torch.float32)

    def _state(self, i: int, name: str) -> np.ndarray[Any, Any] | None:
        row = self._rows[i]
        p = self._params[row]
        sections = self._engine.extents[p["extent"]].sections
        if name == "residual":
            return self._residual(row, p)
        if name not in sections:
            return None
        state = self._flat(row, sections.index(name)).view(dtype_of(p, name))
        return state.as_strided(p["shape"], p["stride"]).numpy()

    def _residual(self, row: int, p: dict[str, Any]) -> np.ndarray[Any, Any] | None:
        if (residual := self._residuals.get(row)) is None:
            return None
        values = np.zeros(0, np.int16)
        if residual.size:
            shape = (residual.size // RESIDUAL_BYTES,)
            values = np.memmap(residual.contents.path, np.int16, "r", residual.offset, shape)
        return torch.from_numpy(values.copy()).as_strided(p["shape"], p["stride"]).numpy()

    def _param(self, i: int) -> torch.Tensor:
        """Return the parameter as after resuming the store, for encoding; count the elements that codes must clip."""
        row = self._rows[i]
        master, exp_avg, exp_avg_sq = (self._flat(row, k) for k in range(3))
        n, name = len(master), self._params[row]["dtype"]
        narrow = name in PARAM_DTYPES and name != "float32"
        param = self._scratch.zeros(n, PARAM_DTYPES[name]) if narrow else master
        for first in range(0, n, CHUNK):
            part = slice(first, first + CHUNK)
            if narrow:
                param[part] = master[part]
            self.clipped += int((exp_avg[part].abs() > MOST_RATIO * exp_avg_sq[part].sqrt()).sum())
        return param

    def export(self, state_dtype: str) -> Export:
        """Return the Export with states of `state_dtype`. With codes, an extent has parameters of one dtype only."""
        about = about_of(self._contents)
        coded = state_dtype == EIGHT_BIT
        kinds = [(p["extent"], _codes_of(p) if coded else "") for p in about["params"]]
        numbers = {kind: number for number, kind in enumerate(sorted({*kinds}))}
        codes = [{"codec": EIGHT_BIT, "param_dtype": dtype} if coded else {} for _, dtype in numbers]
        if "sections" in about:
            about["sections"] = [about["sections"][extent] for extent, _ in numbers]
        params = [{**p, "extent": numbers[kind]} for p, kind in zip(about["params"], kinds, strict=True)]
        record = self._contents.record
        return Export(
            {**about, "params": params, "codes": codes},
            [float(self._contents.steps[row]) for row in self._rows],
            record.groups,
            record.user_state,
            self._state,
            self._param if coded else None,
        )


def _codes_of(p: dict[str, Any]) -> str:
    """Return the dtype for which a parameter is encoded; a complex parameter counts as pairs of fp32."""
    return "float32" if p["dtype"] == "complex64" else str(p["dtype"])
