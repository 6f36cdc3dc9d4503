"""The whole parameters in the stores of all ranks: each rank's part, and checks that the parts make up the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import CSDStoreError
from ..store.format import Contents
from ..store.reader import tiles_of
from ..store.sections import FP32, PARAM_DTYPES
from .consolidate import Consolidated, refuse_flat
from .new_stores import ExtentKind
from .parts import Rows, Whole, block_of, memory_order, ranks_that_cover


@dataclass(frozen=True)
class OldParam:
    """A whole parameter, and the parts to read from each rank."""

    entry: dict[str, Any]  # of the whole parameter, as in a manifest
    whole: Whole
    kind: ExtentKind
    extent: int  # of the first rank: parameters of one extent share an extent again
    step: float
    is_divided: bool  # if not, each rank has the whole
    has_residual: bool
    sources: dict[int, tuple[int, Rows]]  # by rank: the row in the rank's manifest, and the rank's part

    @property
    def name(self) -> str:
        return str(self.entry["name"])


def old_params(source: Consolidated) -> list[OldParam]:
    """Return all parameters with states, in the order of the first rank. Raises CSDStoreError, naming a parameter.

    The parts in `sources` cover each element of the whole parameter exactly once.
    """
    _check_complete(source)
    rows: dict[int, dict[int, int]] = {}  # by row of the combined stores: by rank, the row there
    for rank, (_, row_of) in enumerate(source.ranks):
        for row, whole in row_of.items():
            rows.setdefault(whole, {})[rank] = row
    described = source.contents.manifest["params"]
    found = [_param(source, of_rank) for whole, of_rank in sorted(rows.items()) if described[whole]["group"] >= 0]
    if len(source.ranks) > 1 and not any(p.is_divided for p in found):
        _check_replicas(source)
    return found


def is_divided(entries: Mapping[int, dict[str, Any]]) -> bool:
    """Return whether ranks divide a parameter. `entries`: by rank, the manifest's entry.

    A part that is a whole, non-empty tensor is a replica, or the only part.
    """
    parts = [p for p in entries.values() if p.get("of") is not None and p["of"]["shape"]]
    return any(p["of"]["shape"] != p["shape"] or 0 in p["shape"] for p in parts)


def _check_complete(source: Consolidated) -> None:
    stores = [recovered[0] for recovered, _ in source.ranks]
    first = stores[0]
    if len(stores) != first.world_size:
        raise CSDStoreError(
            f"{first.path} is the store of rank {first.rank} of {first.world_size}: name those of all ranks"
        )
    for contents in stores:
        if contents.record.groups != first.record.groups:
            raise CSDStoreError(f"{contents.path} and {first.path} have different hyperparameters")
        if contents.manifest.get("rule") != first.manifest.get("rule"):
            raise CSDStoreError(f"{contents.path} and {first.path} have states of different rules")
        for p in (*contents.manifest["params"], *contents.manifest["waiting"]):
            refuse_flat(p, contents.path)


def _param(source: Consolidated, rows: dict[int, int]) -> OldParam:
    """Return a parameter. `rows`: by rank, the parameter's row."""
    stores = [recovered[0] for recovered, _ in source.ranks]
    size, first = len(stores), min(rows)
    entries = {rank: stores[rank].manifest["params"][row] for rank, row in rows.items()}
    p = entries[first]
    name, shape = p["name"], p["of"]["shape"] if "of" in p else p["shape"]
    if len(rows) < size:
        without = ", ".join(str(rank) for rank in range(size) if rank not in rows)
        raise CSDStoreError(f"{stores[first].path} has a state of {name}, and rank {without} has none")
    for rank, other in entries.items():
        here = other["name"], other["of"]["shape"] if "of" in other else other["shape"], other["dtype"], "of" in other
        if here != (name, shape, p["dtype"], "of" in p):
            raise CSDStoreError(
                f"{name} is parameter {p['position']} of group {p['group']} in {stores[first].path}; in "
                f"{stores[rank].path} that is {here[0]}, {here[1]} {here[2]}: these are no ranks of one model"
            )
        if _kind(stores[rank], rows[rank]) != _kind(stores[first], rows[first]):
            raise CSDStoreError(f"the states of {name} are other ones on rank {rank} than on rank {first}")
    whole = Whole(shape, memory_order([*entries.values()]), 2 if p["dtype"] == "complex64" else 1)
    blocks = {rank: block_of(entries[rank], stores[rank].path, rank, size) for rank in rows}
    ranks = ranks_that_cover(blocks, whole.rows)
    if ranks is None:
        raise CSDStoreError(
            f"{stores[first].path}: the rows of {name} on the ranks overlap, or do not make up all {whole.rows}: "
            f"{', '.join(f'rank {rank}: {n} from {at} on' for rank, (at, n) in blocks.items())}"
        )
    sources = {rank: (rows[rank], whole.part(*blocks[rank])) for rank in ranks}
    steps = {rank: float(stores[rank].steps[rows[rank]]) for rank in entries}
    if len({steps[rank] for rank, (_, part) in sources.items() if part.numel}) > 1:
        raise CSDStoreError(f"{name} has made different numbers of steps on the ranks: {steps}")
    return OldParam(
        entry={**p, "shape": shape},
        whole=whole,
        kind=_kind(stores[first], rows[first]),
        extent=p["extent"],
        step=next((steps[rank] for rank, (_, part) in sources.items() if part.numel), steps[first]),
        is_divided=is_divided(entries),
        has_residual=any("residual" in entries[rank] for rank in sources),
        sources=sources,
    )


def _kind(contents: Contents, row: int) -> ExtentKind:
    extent = contents.manifest["extents"][contents.manifest["params"][row]["extent"]]
    dtype = PARAM_DTYPES.get(extent.get("param_dtype", ""))
    return tuple(extent["sections"]), extent.get("codec", FP32), dtype


def _check_replicas(source: Consolidated) -> None:
    """Raise CSDStoreError if ranks with whole parameters and the same layout have different states.

    With `sharded=False` such ranks may have parts of one model, such as experts, instead of replicas. States are
    compared by checksums.
    """
    wanted = None
    for rank, (recovered, _) in enumerate(source.ranks):
        tiles = tiles_of(recovered)
        layout = [(t.extent, t.number, t.elems, t.sum_elems, t.sections, t.summed) for t in tiles]
        sums = [t.sums for t in tiles]
        if wanted is None:
            wanted = layout, sums
        elif wanted[0] == layout and not all(map(np.array_equal, wanted[1], sums)):
            raise CSDStoreError(
                f"{recovered[0].path}: rank {rank} has other states than rank 0, and neither has a part of a larger "
                "parameter: with sharded=False these are parts of one model, or models of their own, which go on with "
                "as many ranks as before"
            )
