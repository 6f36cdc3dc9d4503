"""A step that is ready to run: what is updated, and how gradients and parameters travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .accelerator_updates import AcceleratorUpdates
from .all_gather import ParamAllGather
from .spec import StepSpec
from .staging import StagingRing
from .supplied_states import SuppliedStates
from .two_passes import TwoPasses


@dataclass
class PreparedStep:
    """A step with all memory and streams, so that nothing can fail before ranks begin to exchange parameters."""

    spec: StepSpec
    tiles: np.ndarray[Any, Any]  # uint32, in flow order
    supplied: SuppliedStates | None  # states that the accelerator gives to tiles
    images: list[int]  # tiles that travel through staging buffers
    ring: StagingRing | None  # the staging buffers
    gather: ParamAllGather | None  # of the parameters whose updates the ranks share
    accelerated: AcceleratorUpdates | None = None  # updates on the accelerator
    passes: TwoPasses | None = None  # of the matrices in the step

    @property
    def may_begin(self) -> np.ndarray[Any, Any]:
        """The tiles, ascending, that may begin in backward: no states from the accelerator, and a single pass."""
        others = [part.tiles for part in (self.supplied, self.passes) if part]
        return np.setdiff1d(self.tiles, np.concatenate(others)) if others else np.sort(self.tiles)
