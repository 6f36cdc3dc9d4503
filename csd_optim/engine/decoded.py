"""fp32 tensors of states that devices store as codes, decoded when somebody reads them."""

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
    """The decoded states of one engine. Codes cannot be memory-mapped as fp32, so they are decoded lazily.

    A step that changes the codes drops the decoded tensors here; a tensor that the user kept still has the old states.

    What is written to these tensors takes effect with the next step, which starts from it, rounded to codes, or with a
    flush before that; see csd_param.edited. As for windows, torch's version counters tell what was written.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = weakref.proxy(engine)  # weak, as the engine owns this
        self._states: dict[int, dict[str, torch.Tensor]] = {}  # by parameter: 1-D, in the order of its memory
        self._views: dict[int, dict[str, torch.Tensor]] = {}  # by parameter: the same states as views() returns them
        self._watched: dict[int, list[tuple[str, torch.Tensor, int]]] = {}  # all tensors of states, with versions
        # Parameters whose masters were written, and that no step has updated since. They may differ from the rounded
        # masters although nobody has set the parameters.
        self.masters_written: set[int] = set()
        self._rounded: set[int] = set()  # parameters known to equal their written masters, rounded
        self._updated: set[int] = set()  # parameters that the step prepared by the last enter_in_table() updates
        # Parameters in host memory, 1-D, on devices that update states in place. Those in `_own_masters` serve as the
        # master section themselves (csd_master IN_PARAM); the tile has a section for those in `_in_sections` until a
        # step updates them.
        self._own_masters: dict[int, torch.Tensor] = {}
        self._in_sections: dict[int, torch.Tensor] = {}
        # Parameters of `_own_masters` that get a section in the step of the last enter_in_table().
        self._getting_section: set[int] = set()
        # Rows, addresses and dtypes of `_own_masters`, cached.
        self._own_master_rows: tuple[np.ndarray[Any, Any], ...] | None = None

    @property
    def durable(self) -> bool:
        """Whether the codes outlive the process."""
        return self._engine.durable

    @property
    def resident(self) -> bool:
        """Whether the devices keep the codes in memory and update them in place."""
        return self._engine.devices.resident

    @property
    def in_memory(self) -> set[int]:
        """Parameters whose decoded states are in memory now."""
        return {*self._states}

    def states(self, param: int) -> dict[str, torch.Tensor]:
        """Return all states of a parameter by name, 1-D fp32, as the next step will find them. Raises CSDOSError.

        Returns the same dict until a step changes the states. Waits for writes. Not while a step is in flight.
        """
        self._engine.check_open()
        if param not in self._states:
            extent = self._engine.extent_with(param)
            numel = extent.numels[param - extent.first_param]
            states = {name: torch.empty(numel, dtype=torch.float32, device="cpu") for name in extent.sections}
            handle, name, own = self._engine.handle, self._engine.name_device, self._own_masters.get(param)
            for piece in extent.pieces[extent.pieces["param"] == param].tolist():
                _, tile, first, tile_first, n = piece
                ranges = [state[first : first + n] for state in states.values()]
                address = own[first:].data_ptr() if own is not None else 0
                bindings.engine_decode(handle, extent.first_tile + tile, tile_first, n, ranges, name, address)
            self._states[param] = states
            self._watched[param] = [(name, state, state._version) for name, state in states.items()]
        return self._states[param]

    def master(self, param: int, tile: int, first: int, in_tile: int, n: int) -> torch.Tensor:
        """Return elements [first, first + n) of a parameter's master, which begin at `in_tile` in this tile.

        Decodes only these, and keeps nothing. Raises CSDOSError. Not while a step is in flight.
        """
        if param in self._states:
            return self._states[param]["master"][first : first + n]
        master = torch.empty(n, dtype=torch.float32, device="cpu")
        bindings.engine_decode(self._engine.handle, tile, in_tile, n, [master], self._engine.name_device)
        return master

    def replace(self, param: int, states: Mapping[str, torch.Tensor]) -> None:
        """Make the next step start from `states`: 1-D fp32, contiguous, on the CPU, used by nobody else."""
        names = self._engine.extent_with(param).sections
        previous = {} if {*states} == {*names} else self.states(param)
        others = [entry for entry in self._watched.get(param, ()) if entry[0] not in states]
        self._states[param] = {name: states[name] if name in states else previous[name] for name in names}
        self._views.pop(param, None)
        self._watched[param] = others + [(name, state, -1) for name, state in states.items()]

    # ---- parameters that serve as their own master section -------------------------------

    def is_own_master(self, param: int) -> bool:
        """Return whether the parameter itself serves as its master section, so that the tile has none."""
        return param in self._own_masters

    def set_location(self, param: int, where: torch.Tensor | None, *, fresh: bool = False) -> None:
        """Set where a parameter is: 1-D, contiguous, in the dtype of its codes; None: devices cannot use it there.

        If it was its own master section, or is `fresh` (its tile has no state yet), it is its own section from now on.
        Once devices cannot use it, its master is kept here, and the next step writes it to a section of the tile.
        """
        if where is None and param in self._own_masters:
            master = self.states(param)["master"]
            self._own_masters.pop(param)
            self.replace(param, {"master": master})
        elif where is not None and (fresh or param in self._own_masters):
            self._own_masters[param] = where
        elif where is not None:
            self._in_sections[param] = where
        if where is None:
            self._in_sections.pop(param, None)
        self._own_master_rows = None

    def is_master_written(self, param: int) -> bool:
        """Return whether the master was written since it was decoded."""
        watched = self._watched.get(param, ())
        return any(name == "master" and tensor._version != version for name, tensor, version in watched)

    def _enter_own_masters(self, table: np.ndarray[Any, Any]) -> None:
        if self._own_master_rows is None:
            rows = np.fromiter(self._own_masters, np.int64, len(self._own_masters))
            pointers = np.array([p.data_ptr() for p in self._own_masters.values()], np.uint64)
            dtypes = np.array([DTYPE_CODES[p.dtype] for p in self._own_masters.values()], np.uint32)
            self._own_master_rows = rows, pointers, dtypes
        rows, pointers, dtypes = self._own_master_rows
        table["param"][rows], table["param_dtype"][rows], table["master"][rows] = pointers, dtypes, IN_PARAM
        self._getting_section.clear()
        for param, names in self.written().items():
            own = self._own_masters.get(param)
            if own is None or "master" not in names or table["grad"][param]:
                continue
            # A parameter without a gradient must not be changed. It need not be if its master rounds to it.
            if torch.equal(self._states[param]["master"].to(own.dtype), own):
                self._rounded.add(param)
            else:
                self._rounded.discard(param)
                self._getting_section.add(param)
                table["master"][param] = FROM_PARAM

    def _move_own_masters(self, dropped: Iterable[int]) -> None:
        """After a step, move parameters that got a section to `_in_sections`, and updated ones back."""
        left = self._getting_section.intersection(dropped)
        back = self._updated.intersection(self._in_sections)
        for param in left:
            self._in_sections[param] = self._own_masters.pop(param)
        for param in back:
            self._own_masters[param] = self._in_sections.pop(param)
        if left or back:
            self._own_master_rows = None
        self._getting_section.clear()

    def note_rounded(self, param: int) -> None:
        """Note that the parameter equals its master, as written just now, rounded."""
        self._rounded.add(param)

    def views(self, param: int, view: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the states as `view` presents them. Users may write to these tensors; their versions are watched."""
        if param not in self._views:
            self._views[param] = views = {name: view(state) for name, state in self.states(param).items()}
            self._watched[param] += [(name, tensor, tensor._version) for name, tensor in views.items()]
        return self._views[param]

    def written(self) -> dict[int, set[str]]:
        """Return, by parameter, the names of the states that were written since they were decoded."""
        found = {
            param: {name for name, tensor, version in watched if tensor._version != version}
            for param, watched in self._watched.items()
        }
        return {param: names for param, names in found.items() if names}

    def versions(self) -> dict[int, list[int]]:
        """Return, for the same parameters, the versions of their tensors, which tell whether they are written again."""
        return {param: [tensor._version for _, tensor, _ in self._watched[param]] for param in self.written()}

    def enter_in_table(self, table: np.ndarray[Any, Any]) -> None:
        """Enter what was written into a step's table (dtype PARAM). The step reads these tensors until its end."""
        if self._own_masters:
            self._enter_own_masters(table)
        for param, names in self.written().items():
            for k, (name, state) in enumerate(self._states[param].items()):
                table["edited"][param, k] = state.data_ptr() if name in names else 0
        is_needed = self._states or self.masters_written or self._in_sections
        self._updated = {*np.flatnonzero(table["grad"]).tolist()} if is_needed else set()

    def forget(self, tiles: np.ndarray[Any, Any] | None = None) -> None:
        """Drop decoded states after a step or a flush rewrote their codes, in `tiles` (ascending) or everywhere."""
        dropped = [p for p in self._states if tiles is None or np.isin(self._engine.tiles_of_params([p]), tiles).all()]
        masters = {param for param, names in self.written().items() if "master" in names}
        self.masters_written = (self.masters_written | masters & {*dropped}) - self._rounded - self._updated
        self._move_own_masters(dropped)
        self._drop(dropped)

    def forget_unwritten(self, params: Iterable[int] | None = None) -> None:
        """Drop decoded states that nobody has written, of these parameters or of all, as stale or no longer needed."""
        written = self.written()
        self._drop([p for p in (list(self._states) if params is None else params) if p not in written])

    def discard(self, tiles: np.ndarray[Any, Any]) -> None:
        """Drop decoded states in these tiles as stale, including what was written to them."""
        self._drop([p for p in self._states if np.isin(self._engine.tiles_of_params([p]), tiles).any()])

    def _drop(self, params: Iterable[int]) -> None:
        for param in params:
            self._rounded.discard(param)
            self._states.pop(param, None)
            self._watched.pop(param, None)
            self._views.pop(param, None)
