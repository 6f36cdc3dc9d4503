"""States that devices keep as codes, as fp32 tensors for whoever looks at them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import bindings

if TYPE_CHECKING:
    from .engine import Engine


class Decoded:
    """Of one engine. Codes cannot be mapped as fp32: they are decoded when somebody asks, and that is let go of when a
    step has changed them. Who has kept a tensor from before keeps the states of before.

    What somebody writes to these tensors counts with the next step, which begins with it, rounded to the codes, or with
    a flush before that; see csd_param.edited. Torch counts what is written, as it does of windows.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = weakref.proxy(engine)  # it owns this
        self._states: dict[int, dict[str, torch.Tensor]] = {}  # by parameter: 1-D, in the order of its memory
        self._shown: dict[int, dict[str, torch.Tensor]] = {}  # the same as shown()
        self._seen: dict[int, list[tuple[str, torch.Tensor, int]]] = {}  # tensors that show them, and their versions
        # Parameters whose masters somebody wrote, and that no step has updated since: that they are not the rounded
        # masters does not mean that somebody set them.
        self.apart: set[int] = set()
        self._rounded: set[int] = set()  # of which it is known that they are what was written
        self._updated: set[int] = set()  # parameters, by the step that was told last

    @property
    def durable(self) -> bool:
        """Do the codes outlive the process?"""
        return self._engine.durable

    @property
    def kept(self) -> set[int]:
        """Parameters whose states are in memory now."""
        return {*self._states}

    def states(self, param: int) -> dict[str, torch.Tensor]:
        """All states of a parameter by name, 1-D fp32: as the next step begins with them. Raises CSDOSError.

        The same dict until a step changes them. Waits for writes; not while a step is under way.
        """
        self._engine.check_open()
        if param not in self._states:
            extent = self._engine.extent_with(param)
            numel = extent.numels[param - extent.first_param]
            states = {name: torch.empty(numel, dtype=torch.float32, device="cpu") for name in extent.sections}
            handle, name = self._engine.handle, self._engine.name_device
            for piece in extent.pieces[extent.pieces["param"] == param].tolist():
                _, tile, first, tile_first, n = piece
                parts = [state[first : first + n] for state in states.values()]
                bindings.engine_decode(handle, extent.first_tile + tile, tile_first, n, parts, name)
            self._states[param] = states
            self._seen[param] = [(name, state, state._version) for name, state in states.items()]
        return self._states[param]

    def replace(self, param: int, states: Mapping[str, torch.Tensor]) -> None:
        """The next step begins with these states: 1-D fp32, contiguous, on the CPU, and nobody's else."""
        names = self._engine.extent_with(param).sections
        had = {} if {*states} == {*names} else self.states(param)
        others = [seen for seen in self._seen.get(param, ()) if seen[0] not in states]
        self._states[param] = {name: states[name] if name in states else had[name] for name in names}
        self._shown.pop(param, None)
        self._seen[param] = others + [(name, state, -1) for name, state in states.items()]

    def is_rounded(self, param: int) -> None:
        """The parameter is what its master, as it was written now, rounds to."""
        self._rounded.add(param)

    def shown(self, param: int, show: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same as `show` shows them: tensors through which somebody may write, and which count that themselves."""
        if param not in self._shown:
            self._shown[param] = shown = {name: show(state) for name, state in self.states(param).items()}
            self._seen[param] += [(name, tensor, tensor._version) for name, tensor in shown.items()]
        return self._shown[param]

    def written(self) -> dict[int, set[str]]:
        """Parameters of which somebody wrote states since they were decoded, and which."""
        found = {
            param: {name for name, shown, version in seen if shown._version != version}
            for param, seen in self._seen.items()
        }
        return {param: names for param, names in found.items() if names}

    def versions(self) -> dict[int, list[int]]:
        """Of the same parameters: what tells whether somebody wrote once more."""
        return {param: [shown._version for _, shown, _ in self._seen[param]] for param in self.written()}

    def tell(self, table: np.ndarray[Any, Any]) -> None:
        """Says in a step's table (dtype PARAM) what was written. It is read until the step has come to its end."""
        for param, names in self.written().items():
            for k, (name, state) in enumerate(self._states[param].items()):
                table["edited"][param, k] = state.data_ptr() if name in names else 0
        self._updated = {*np.flatnonzero(table["grad"]).tolist()} if self._states or self.apart else set()

    def forget(self, tiles: np.ndarray[Any, Any] | None = None) -> None:
        """A step has changed the codes, or what was written has got there: in `tiles` (ascending), or everywhere."""
        gone = [p for p in self._states if tiles is None or np.isin(self._engine.tiles_of_params([p]), tiles).all()]
        masters = {param for param, names in self.written().items() if "master" in names}
        self.apart = (self.apart | masters & {*gone}) - self._rounded - self._updated
        self._drop(gone)

    def forget_unwritten(self, params: Iterable[int] | None = None) -> None:
        """What was decoded is not needed any longer, or no longer true: of these parameters, or of all."""
        kept = self.written()
        self._drop([p for p in (list(self._states) if params is None else params) if p not in kept])

    def _drop(self, params: Iterable[int]) -> None:
        for param in params:
            self._rounded.discard(param)
            self._states.pop(param, None)
            self._seen.pop(param, None)
            self._shown.pop(param, None)
