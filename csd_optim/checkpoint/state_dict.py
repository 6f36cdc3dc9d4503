"""A store as a state dict of torch, with tensors memory-mapped from the files.

8-bit states are decoded into memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..devices.spec import parse_devices
from ..engine.commit.durable import DurableCommitter
from ..engine.engine import Engine
from ..engine.open_engine import open_engine
from ..errors import CSDStoreError
from ..files import opened
from ..store.file import close_in_children, lock
from ..store.format import RESIDUAL_BYTES, Contents, has_rules
from ..store.layout import Extent
from ..store.reader import Tile, residuals_of, total_bytes
from ..store.sections import FP32
from ..store.user_state import stored_user_state
from .files import Progress, no_progress
from .snapshot import Paths, directories

EXPORT_FORMAT = 1  # format of the entry "csd_optim" in a state dict
EXPORT_WITH_RESIDUALS = 2  # with residuals, which a reader of format 1 would silently drop
EXPORT_WITH_RULE = 3  # with another rule than AdamW: readers of formats 1 and 2 would make a store of AdamW
EXPORT_WITH_RULES = 4  # with several rules: params[].rule, as in a manifest


def numbered(manifest: dict[str, Any]) -> list[tuple[int, int, dict[str, Any]]]:
    """Return (number over all groups, as in torch; row; manifest's entry) of each parameter with states."""
    lengths: dict[int, int] = {}
    for p in (*manifest["params"], *manifest["waiting"]):
        lengths[p["group"]] = max(lengths.get(p["group"], 0), p["position"] + 1)
    first = {k: sum(n for group, n in lengths.items() if 0 <= group < k) for k in lengths}
    found = [(first[p["group"]] + p["position"], row, p) for row, p in enumerate(manifest["params"]) if p["group"] >= 0]
    return sorted(found, key=lambda n: n[0])


def _groups(manifest: dict[str, Any], hypers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the `param_groups` of a state dict. `hypers`: the hyperparameters of each group."""
    groups, n = [], 0
    for k, recovered in enumerate(hypers):
        members = [p for p in (*manifest["params"], *manifest["waiting"]) if p["group"] == k]
        names = [p["name"] for p in sorted(members, key=lambda p: p["position"])]
        betas = {"betas": tuple(recovered["betas"])} if "betas" in recovered else {}
        group = {**recovered, **betas, "params": [*range(n, n + len(names))]}
        if names != [f"{k}.{i}" for i in range(len(names))]:
            group["param_names"] = names
        groups.append(group)
        n += len(names)
    return groups


def about_of(contents: Contents) -> dict[str, Any]:
    """Return the entry "csd_optim": facts for recreating the store that have no place in torch's state dict."""
    manifest, extents = contents.manifest, contents.manifest["extents"]
    entries = [p for _, _, p in numbered(manifest)]
    params = [{k: v for k, v in p.items() if k not in ("start", "numel", "residual")} for p in entries]
    residuals = any("residual" in p for p in entries)
    rule, rules = {key: manifest[key] for key in ("rule",) if key in manifest}, has_rules(manifest)
    if rule or rules:
        rule["sections"] = [e["sections"] for e in extents]
    format_ = EXPORT_WITH_RULES if rules else EXPORT_WITH_RULE if rule else None
    # Codes need no new format: an older reader makes a store of fp32 states, and loses nothing.
    codes = [{k: e[k] for k in ("codec", "param_dtype") if k in e} for e in extents]
    return {
        "format": format_ or (EXPORT_WITH_RESIDUALS if residuals else EXPORT_FORMAT),
        "step": contents.superblock.step,
        "seconds": contents.record.seconds,
        "given": contents.record.given,
        "shadow": True,  # tells earlier versions to make a store with two slots
        "params": params,
        "waiting": manifest["waiting"],
        **rule,
        **({"codes": codes} if any(codes) else {}),
    }


def state_dict(contents: Contents, tensor: Callable[[int, str, dict[str, Any]], torch.Tensor]) -> dict[str, Any]:
    """Return torch's state dict, plus our entry "csd_optim". `tensor`: (row, state's name, manifest entry) → tensor."""
    state = {}
    for number, row, p in numbered(contents.manifest):
        master, *others = names_of(contents.manifest, p)
        step = torch.tensor(contents.steps[row], dtype=torch.float32)
        state[number] = {"step": step, **{name: tensor(row, name, p) for name in (*others, master)}}
    return {
        "state": state,
        "param_groups": _groups(contents.manifest, contents.record.groups),
        "csd_optim": {**about_of(contents), "user_state": stored_user_state(contents.record.user_state, contents.path)},
    }


def names_of(manifest: dict[str, Any], p: dict[str, Any]) -> list[str]:
    """Return the names of a parameter's states, plus "residual" if it has one."""
    return [*manifest["extents"][p["extent"]]["sections"], *(["residual"] if "residual" in p else [])]


def dtype_of(p: dict[str, Any], name: str) -> torch.dtype:
    """Return the dtype of the state `name` of a parameter."""
    if name == "residual":
        return torch.bfloat16
    return torch.complex64 if p["dtype"] == "complex64" else torch.float32


class _SharedLocks:
    """Holds shared locks on the stores' files, so that no optimizer writes them while this object lives."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = contextlib.ExitStack()
        weakref.finalize(self, self._files.close)
        close_in_children(self)
        for file in files:
            lock(self._files.enter_context(opened(file)), file, shared=True)

    def close_without_unlocking(self) -> None:
        self._files.close()


class _DecodedStates:
    """The fp32 values of states that are stored as codes, filled tile by tile. `zeros`: returns n fp32 zeros."""

    def __init__(self, engine: Engine, zeros: Callable[[int], torch.Tensor]) -> None:
        self._extents = engine.tiles.extents
        self.states = {  # by parameter: all states
            extent.first_param + i: [zeros(numel) for _ in extent.sections]
            for extent in engine.tiles.extents
            if extent.codec != FP32
            for i, numel in enumerate(extent.numels)
        }

    def decode_tile(self, tile: Tile, data: memoryview | None) -> None:
        """Decode one checked tile, as `use` of each_tile()."""
        if data is None or tile.codes_of is None:
            return
        for row, _, first, tile_first, elems in self._extents[tile.extent].pieces_in(tile.number).tolist():
            tile.decode(data, tile_first, [state[first : first + elems] for state in self.states[row]])


def load(paths: Paths) -> dict[str, Any]:
    """See CSDAdam.load().

    The codes of an 8-bit store are decoded into memory: 12 bytes per parameter, 16 with amsgrad.
    """
    # Zeros take no memory until written.
    contents, states = mapped_states(paths, lambda n: torch.zeros(n, dtype=torch.float32, device="cpu"))
    return state_dict(contents, lambda row, name, _: states[row, name])


def mapped_states(
    paths: Paths,
    zeros: Callable[[int], torch.Tensor],
    progress: Progress = no_progress,
    accept: Callable[[Contents, Sequence[Extent]], None] | None = None,
) -> tuple[Contents, dict[tuple[int, str], torch.Tensor]]:
    """Check a store, and return its contents, and its states by row and name, memory-mapped from the files.

    The states keep the files locked. Codes are decoded into the tensors that `zeros` returns for a number of elements.
    `accept` may raise an error to refuse the store before states are read. Raises CSDStoreError if the store is
    damaged, CSDBusyError, CSDOSError.
    """
    engine = open_engine(parse_devices(directories(paths)), mode="read")
    try:
        if not engine.recovered:
            raise CSDStoreError(f"{engine.devices.specs[0]} holds no step yet")
        if accept:
            accept(engine.recovered[0], engine.tiles.extents)
        decoded = _DecodedStates(engine, zeros)
        with progress("checking", total_bytes(engine.recovered)) as tick:
            assert isinstance(engine.committer, DurableCommitter)
            engine.committer.check_recovered(decoded.decode_tile, tick)
        first = engine.recovered[0]
        windows: dict[tuple[int, str], torch.Tensor] = {}
        for row, p in enumerate(first.manifest["params"]):
            extent = engine.tiles.extents[p["extent"]]
            for k, section in enumerate(extent.sections):
                if row in decoded.states:
                    window = decoded.states[row][k].view(dtype_of(p, section))
                else:
                    window = engine.windows.window(extent, row - extent.first_param, k, dtype_of(p, section))
                windows[row, section] = window.as_strided(p["shape"], p["stride"])
        # The tensors stay mapped after the engine is closed, and keep the files locked.
        locks = _SharedLocks(Path(c.path) for c in engine.recovered)
        engine.windows.keep_alive(locks)
        for residual in residuals_of(engine.recovered):
            p, values = first.manifest["params"][residual.row], np.zeros(0, np.int16)
            if residual.size:
                path, shape = residual.contents.path, (residual.size // RESIDUAL_BYTES,)
                values = np.memmap(path, np.int16, "c", residual.offset, shape)
                weakref.finalize(values, id, locks).atexit = False
            flat = torch.from_numpy(values).view(torch.bfloat16)
            windows[residual.row, "residual"] = flat.as_strided(p["shape"], p["stride"])
        return first, windows
    finally:
        engine.close()
