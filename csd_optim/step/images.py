"""Which tiles of a step travel as images, through staging buffers, and from where."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..bindings import GRAD_SCALE
from ..compression.policy import entry_dtype
from ..compression.selection import TopK
from ..engine.engine import Engine
from ..params.grad_source import GradSource
from ..params.param_state import ParamState
from ..params.state_map import StateMap
from ..params.strides import flat
from .spec import StepSpec
from .supplied_states import SuppliedStates


def images_of(
    engine: Engine, state_map: StateMap, spec: StepSpec, tiles: np.ndarray[Any, Any], supplied: SuppliedStates
) -> list[int]:
    """Return the tiles that travel as images: devices cannot read one of their gradients, or it has to be rounded.

    Prepares the sources of all gradients in these tiles.
    """
    table, sources = spec.table, spec.sources
    if not sources:
        return []
    travels = np.zeros(len(table), bool)
    for row, s in sources.items():
        travels[row] = s.is_far or (s.grad.dtype is not s.grad_dtype and not table["topk"][row])
    if not travels.any():
        return []
    travels[[*supplied.copies]] = True
    images: list[int] = tiles[np.isin(tiles, engine.tiles.of_mask(travels))].tolist()
    # A tile travels as a whole, so every parameter that shares a tile with a travelling one travels, too.
    for tile in images:
        for row in engine.tiles.pieces_of(tile)["param"].tolist():
            if table["grad"][row] and row not in sources:
                sources[row] = state_map.by_index[row].source(spec.grads[row], spec.plan.grad_dtype)
    # For images the ring selects the entries, not the engine.
    for row, source in sources.items():
        if row not in supplied.copies:
            source.topk = topk_of(state_map.by_index[row], source, spec)
    return images


def topk_of(state: ParamState, source: GradSource, spec: StepSpec) -> TopK | None:
    """Return how a step's table says that a gradient is compressed; None: it is dense."""
    row = spec.table[state.index]
    if not row["topk"]:
        return None
    residual = state.residual if row["residual"] else None
    return TopK(
        float(row["topk"]),
        entry_dtype(source.grad.dtype, spec.plan.grad_dtype),
        None if residual is None else flat(residual),
        float(spec.hypers["c"][row["hyper"], GRAD_SCALE]),
        int(row["seed"]),
    )
