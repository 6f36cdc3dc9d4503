"""Reads all of the commit that a resume has found: verifies the states, and loads the residuals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...errors import CSDStoreError
from ...store.format import RESIDUAL_BYTES, Contents
from ...store.reader import Residual, Tick, Tile, find_damage, residuals_of

Use = Callable[[Tile, memoryview | None], None]


def read_recovered(recovered: Sequence[Contents], use: Use, tick: Tick, *, load: bool) -> dict[int, torch.Tensor]:
    """Read and verify all states of a commit; return its residuals by parameter, or none unless `load`.

    `use`, `tick`: see each_tile(); `use` is called for intact tiles only. Raises CSDStoreError, naming tile and
    parameters, if a tile is damaged.
    """
    residuals = {
        r.row: torch.empty(r.size // RESIDUAL_BYTES, dtype=torch.bfloat16, device="cpu")
        for r in (residuals_of(recovered) if load else ())
    }

    def copy(residual: Residual, first: int, data: memoryview) -> None:
        if residuals:
            target = residuals[residual.row].view(torch.uint8).numpy()
            target[first : first + len(data)] = np.frombuffer(data, np.uint8)

    damage = find_damage(recovered, copy, use=use, tick=tick)
    if damage:
        more = f" (and {len(damage) - 1} more: `csd-optim verify` lists them)" if len(damage) > 1 else ""
        raise CSDStoreError(f"{damage[0]}{more}. Go back to a snapshot or a checkpoint")
    return residuals
