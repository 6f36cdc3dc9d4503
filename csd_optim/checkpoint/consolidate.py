"""The stores of all ranks of a run, combined into one with whole parameters, for exports to any world size."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import CSDStoreError
from ..store.format import Contents
from ..store.joined import joined
from ..store.recovery import last_commits, stores_by_rank
from .snapshot import Paths, last_step, stores_at_rest


@dataclass(frozen=True)
class Consolidated:
    """The combined stores of one or several ranks.

    `contents`: the combined contents. `ranks`: by rank, the contents of its stores, and a map from its parameters' rows
    to rows of `contents`.
    """

    contents: Contents
    ranks: list[tuple[list[Contents], dict[int, int]]]

    @property
    def stores(self) -> list[Contents]:
        return [contents for recovered, _ in self.ranks for contents in recovered]

    def first_of(self, rank: int, row: int) -> list[int] | None:
        """Return the index at which a rank's part begins in the whole parameter; None if the rank has the whole."""
        recovered, _ = self.ranks[rank]
        divided = recovered[0].manifest["params"][row].get("of")
        return divided["first"] if divided and len(self.ranks) > 1 else None


@contextlib.contextmanager
def consolidated_stores(paths: Paths) -> Iterator[Consolidated]:
    """Open stores at the last step that all have, locked for reading: of one process, one rank, or all ranks.

    Raises CSDBusyError, CSDStoreError, CSDOSError.
    """
    with stores_at_rest(paths) as stores:
        by_rank = stores_by_rank(stores)
        yield merge(joined([last_step(stores)] if len(by_rank) == 1 else last_commits(by_rank)))


def merge(ranks: list[list[Contents]]) -> Consolidated:
    """Combine the contents of several ranks. Raises CSDStoreError for shards that only FSDP1 can combine."""
    if len(ranks) == 1:
        [recovered] = ranks
        return Consolidated(
            recovered[0], [(recovered, {row: row for row in range(len(recovered[0].manifest["params"]))})]
        )
    params: list[dict[str, Any]] = []
    steps: list[float] = []
    row_of: dict[tuple[int, int], int] = {}
    rows: list[dict[int, int]] = []
    for recovered in ranks:
        rows.append({})
        for row, p in enumerate(recovered[0].manifest["params"]):
            if p["group"] < 0:  # the parameter moved to another place later
                continue
            refuse_flat(p, recovered[0].path)
            place = p["group"], p["position"]
            if place not in row_of:
                row_of[place] = len(params)
                params.append(_whole_entry(p))
                steps.append(recovered[0].steps[row])
            rows[-1][row] = row_of[place]
            if "residual" in p:
                params[row_of[place]]["residual"] = p["residual"]
    first = ranks[0][0]
    waiting = [p for p in first.manifest["waiting"] if (p["group"], p["position"]) not in row_of]
    for p in waiting:
        refuse_flat(p, first.path)
    manifest = {**first.manifest, "params": params, "waiting": [_whole_entry(p) for p in waiting]}
    contents = replace(first, manifest=manifest, steps=torch.tensor(steps).numpy())
    return Consolidated(contents, list(zip(ranks, rows, strict=True)))


def refuse_flat(p: dict[str, Any], path: str) -> None:
    """Raise CSDStoreError for a flat parameter of FSDP1, or a shard of one, in the store `path`."""
    if "of" in p and p["of"] is None:
        raise CSDStoreError(
            f"{path}: {p['name']} is a shard of FSDP1, which alone can put it together: save it "
            "with FSDP.optim_state_dict() or torch.distributed.checkpoint"
        )


def _whole_entry(p: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest's entry for the whole parameter of which `p` is a part."""
    entry = {k: v for k, v in p.items() if k not in ("of", "residual")}
    if "of" in p:
        shape = p["of"]["shape"]
        entry["shape"] = shape
        if "stride" in p:
            entry["stride"] = list(torch.empty(shape, device="meta").stride())
            entry["numel"] = math.prod(shape) * (2 if p["dtype"] == "complex64" else 1)
    return entry
