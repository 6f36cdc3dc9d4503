"""States that devices keep as codes, as fp32 tensors for whoever looks at them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import bindings
from ..bindings import DTYPE_CODES, FROM_PARAM, IN_PARAM

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
        # Parameters that lie in host memory, 1-D, where devices update states where they are: `own` are the sections
        # themselves (csd_master IN_PARAM), of `others` the tile has one, until a step has updated them.
        self._own: dict[int, torch.Tensor] = {}
        self._others: dict[int, torch.Tensor] = {}
        self._leaving: set[int] = set()  # the step that was told last gives them a section
        self._own_rows: tuple[np.ndarray[Any, Any], ...] | None = None  # what a table says of `own`

    @property
    def durable(self) -> bool:
        """Do the codes outlive the process?"""
        return self._engine.durable

    @property
    def resident(self) -> bool:
        """Do the devices update them where they lie, in memory?"""
        return self._engine.devices.resident

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
            handle, name, own = self._engine.handle, self._engine.name_device, self._own.get(param)
            for piece in extent.pieces[extent.pieces["param"] == param].tolist():
                _, tile, first, tile_first, n = piece
                parts = [state[first : first + n] for state in states.values()]
                at = own[first:].data_ptr() if own is not None else 0
                bindings.engine_decode(handle, extent.first_tile + tile, tile_first, n, parts, name, at)
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

    # ---- parameters that are their own sections ------------------------------------------

    def is_own(self, param: int) -> bool:
        """Is the parameter the section that has its values, and the tile has none?"""
        return param in self._own

    def lies_at(self, param: int, where: torch.Tensor | None, *, fresh: bool = False) -> None:
        """Where a parameter is now, 1-D, contiguous, of the dtype of its codes; None: not in reach.

        It was its own section, or is `fresh`, in an empty place: then it is from now on. One that gets out of reach
        leaves its master behind, for the next step to put into a section.
        """
        if where is None and param in self._own:
            master = self.states(param)["master"]
            self._own.pop(param)
            self.replace(param, {"master": master})
        elif where is not None and (fresh or param in self._own):
            self._own[param] = where
        elif where is not None:
            self._others[param] = where
        if where is None:
            self._others.pop(param, None)
        self._own_rows = None

    def wrote_master(self, param: int) -> bool:
        """Since it was decoded, did somebody write the master?"""
        return any(name == "master" and shown._version != version for name, shown, version in self._seen.get(param, ()))

    def _tell_own(self, table: np.ndarray[Any, Any]) -> None:
        if self._own_rows is None:
            rows = np.fromiter(self._own, np.int64, len(self._own))
            pointers = np.array([p.data_ptr() for p in self._own.values()], np.uint64)
            dtypes = np.array([DTYPE_CODES[p.dtype] for p in self._own.values()], np.uint32)
            self._own_rows = rows, pointers, dtypes
        rows, pointers, dtypes = self._own_rows
        table["param"][rows], table["param_dtype"][rows], table["master"][rows] = pointers, dtypes, IN_PARAM
        self._leaving.clear()
        for param, names in self.written().items():
            own = self._own.get(param)
            if own is None or "master" not in names or table["grad"][param]:
                continue
            # It is not to be written without a gradient; and need not be, if it is what its master rounds to.
            if torch.equal(self._states[param]["master"].to(own.dtype), own):
                self._rounded.add(param)
            else:
                self._rounded.discard(param)
                self._leaving.add(param)
                table["master"][param] = FROM_PARAM

    def _change_places(self, gone: Iterable[int]) -> None:
        """A step is whole: who got a section has it, and who was updated from one needs it no longer."""
        left = self._leaving.intersection(gone)
        back = self._updated.intersection(self._others)
        for param in left:
            self._others[param] = self._own.pop(param)
        for param in back:
            self._own[param] = self._others.pop(param)
        if left or back:
            self._own_rows = None
        self._leaving.clear()

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
        if self._own:
            self._tell_own(table)
        for param, names in self.written().items():
            for k, (name, state) in enumerate(self._states[param].items()):
                table["edited"][param, k] = state.data_ptr() if name in names else 0
        wanted = self._states or self.apart or self._others
        self._updated = {*np.flatnonzero(table["grad"]).tolist()} if wanted else set()

    def forget(self, tiles: np.ndarray[Any, Any] | None = None) -> None:
        """A step has changed the codes, or what was written has got there: in `tiles` (ascending), or everywhere."""
        gone = [p for p in self._states if tiles is None or np.isin(self._engine.tiles_of_params([p]), tiles).all()]
        masters = {param for param, names in self.written().items() if "master" in names}
        self.apart = (self.apart | masters & {*gone}) - self._rounded - self._updated
        self._change_places(gone)
        self._drop(gone)

    def forget_unwritten(self, params: Iterable[int] | None = None) -> None:
        """What was decoded is not needed any longer, or no longer true: of these parameters, or of all."""
        kept = self.written()
        self._drop([p for p in (list(self._states) if params is None else params) if p not in kept])

    def discard(self, tiles: np.ndarray[Any, Any]) -> None:
        """What was decoded of these tiles is no longer true, nor does it count that somebody wrote to it."""
        self._drop([p for p in self._states if np.isin(self._engine.tiles_of_params([p]), tiles).any()])

    def _drop(self, params: Iterable[int]) -> None:
        for param in params:
            self._rounded.discard(param)
            self._states.pop(param, None)
            self._seen.pop(param, None)
            self._shown.pop(param, None)
