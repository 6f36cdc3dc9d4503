"""fp32 tensors of states without windows: such states are *decoded*, that is, read from the device on first use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ..bindings import DTYPE_CODES
from .parts import Devices, NativeEngine
from .tiles import Tiles


class Decoded:
    """The decoded states of one engine: codes, which cannot be memory-mapped as fp32; and fp32 states on devices whose
    `states_on_demand` is set.

    A step that changes the states drops the decoded tensors here; a tensor that the user kept still has the old states.

    Writes to these tensors take effect with the next step, which starts from the written values (rounded to codes for
    8-bit states), or with an earlier flush; see Truth. Writes are noticed by torch's version counters, as for windows.
    """

    def __init__(self, devices: Devices, native: NativeEngine, tiles: Tiles) -> None:
        self._devices, self._native, self._tiles = devices, native, tiles
        self.durable: bool = False  # the states outlive the process
        # By parameter: the states in memory, 1-D in the parameter's memory order; states that nobody needs may be
        # absent.
        self._states: dict[int, dict[str, torch.Tensor]] = {}
        self._views: dict[int, dict[str, torch.Tensor]] = {}  # by parameter: the same states as views() returns them
        self._watched: dict[int, list[tuple[str, torch.Tensor, int]]] = {}  # all tensors of states, and versions
        # Parameters whose masters were written, without a step's update since. They may differ from the rounded masters
        # although the program has not set them.
        self.masters_written: set[int] = set()
        self.rounded: set[int] = set()  # parameters known to equal their rounded written masters
        # Parameters in host memory, 1-D, on devices that update states in place. In `_own_masters`: parameters that
        # serve as the master section themselves (csd_master IN_PARAM). In `_in_sections`: parameters with a section in
        # the tile until a step updates them.
        self._own_masters: dict[int, torch.Tensor] = {}
        self._in_sections: dict[int, torch.Tensor] = {}
        # Rows, addresses and dtypes of `_own_masters`, cached.
        self._own_master_rows: tuple[np.ndarray[Any, Any], ...] | None = None

    @property
    def resident(self) -> bool:
        """Whether the devices keep codes in memory and update them in place."""
        return self._devices.resident

    @property
    def in_memory(self) -> set[int]:
        """Parameters whose decoded states are in memory now."""
        return {*self._states}

    def states(self, param: int) -> dict[str, torch.Tensor]:
        """Return all states of a parameter by name, 1-D fp32, as the next step will find them. Raises CSDOSError.

        Returns the same tensors until a step changes the states. Waits for writes. Not while a step is in flight.
        """
        return self._read(param, self._tiles.extent_with(param).sections)

    def state(self, param: int, name: str) -> torch.Tensor:
        """Return one state of a parameter, without reading the others."""
        return self._read(param, [name])[name]

    def _read(self, param: int, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Read the states `names` of a parameter unless they are in memory; return all that are."""
        self._devices.check_open()
        here = self._states.get(param, {})
        if here.keys() >= {*names}:
            return here
        extent = self._tiles.extent_with(param)
        numel = extent.numels[param - extent.first_param]
        new = {
            name: torch.empty(numel, dtype=torch.float32, device="cpu")
            for name in extent.sections
            if name in names and name not in here
        }
        own = self._own_masters.get(param)
        for _, tile, first, tile_first, n in self._tiles.by_param.of(param).tolist():
            ranges = [new[name][first : first + n] if name in new else None for name in extent.sections]
            address = own[first:].data_ptr() if own is not None else 0
            self._native.decode(tile, tile_first, n, ranges, address)
        self._states[param] = here = {**here, **new}
        self._watched.setdefault(param, []).extend((name, state, state._version) for name, state in new.items())
        return here

    def master(self, param: int, tile: int, first: int, in_tile: int, n: int) -> torch.Tensor:
        """Return elements [first, first + n) of a parameter's master, which begin at element `in_tile` of `tile`.

        Reads these elements only, and keeps nothing. Raises CSDOSError. Not while a step is in flight.
        """
        if "master" in self._states.get(param, ()):
            return self._states[param]["master"][first : first + n]
        master = torch.empty(n, dtype=torch.float32, device="cpu")
        self._native.decode(tile, in_tile, n, [master])
        return master

    def replace(self, param: int, states: Mapping[str, torch.Tensor]) -> None:
        """Make the next step start from `states`: 1-D fp32, contiguous, on the CPU, used by nobody else.

        Other states of the parameter do not change, and are not read.
        """
        others = [entry for entry in self._watched.get(param, ()) if entry[0] not in states]
        self._states[param] = {**self._states.get(param, {}), **states}
        self._views.pop(param, None)
        self._watched[param] = others + [(name, state, -1) for name, state in states.items()]

    def views(self, param: int, view: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the states as `view` presents them. Users may write to these tensors; their versions are watched."""
        if param not in self._views:
            self.states(param)
            names = self._tiles.extent_with(param).sections
            self._views[param] = views = {name: view(self._states[param][name]) for name in names}
            self._watched[param] += [(name, tensor, tensor._version) for name, tensor in views.items()]
        return self._views[param]

    # ---- what was written ----------------------------------------------------------------

    def written(self) -> dict[int, set[str]]:
        """Return, by parameter, the names of the states that were written since they were decoded."""
        found = ((param, self._names_written(param)) for param in self._watched)
        return {param: names for param, names in found if names}

    def _names_written(self, param: int) -> set[str]:
        return {name for name, tensor, version in self._watched.get(param, ()) if tensor._version != version}

    def versions(self) -> dict[int, list[int]]:
        """Return, for the parameters in written(), torch's versions of their tensors: later writes change these."""
        return {param: [tensor._version for _, tensor, _ in self._watched[param]] for param in self.written()}

    def is_master_written(self, param: int) -> bool:
        """Return whether the master was written since it was decoded."""
        return "master" in self._names_written(param)

    def note_rounded(self, param: int) -> None:
        """Note that the parameter equals its rounded master, which was just written."""
        self.rounded.add(param)

    def is_rounded(self, param: int) -> bool:
        """Return whether a parameter that serves as its own master equals the written master, rounded."""
        own = self._own_masters[param]
        return torch.equal(self._states[param]["master"].to(own.dtype), own)

    def addresses(self, param: int, names: Iterable[str]) -> list[int]:
        """Return the address of each state of a parameter: 0 for states not in `names`."""
        states = self._states[param]
        return [states[name].data_ptr() if name in names else 0 for name in self._tiles.extent_with(param).sections]

    def within(self, tiles: np.ndarray[Any, Any], *, wholly: bool) -> list[int]:
        """Return the decoded parameters whose tiles are among `tiles` (ascending): `wholly` or in part."""
        among = [(param, np.isin(self._tiles.of([param]), tiles)) for param in self._states]
        return [param for param, found in among if (found.all() if wholly else found.any())]

    def forget_unwritten(self, params: Iterable[int] | None = None) -> None:
        """Drop unwritten decoded states, which are stale or no longer needed. `params`: None for all parameters."""
        self.drop([p for p in (list(self._states) if params is None else params) if not self._names_written(p)])

    def drop(self, params: Iterable[int]) -> None:
        """Drop decoded states, including writes to them."""
        for param in params:
            self.rounded.discard(param)
            self._states.pop(param, None)
            self._watched.pop(param, None)
            self._views.pop(param, None)

    def forget(self, params: Collection[int]) -> None:
        """Drop everything about parameters that have left."""
        self.drop(params)
        for param in params:
            self._own_masters.pop(param, None)
            self._in_sections.pop(param, None)
        self._own_master_rows = None

    def saved(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return copies of the states that were written, by parameter, for put_back()."""
        return {
            param: {name: self._states[param][name].clone() for name in names}
            for param, names in self.written().items()
        }

    def put_back(self, saved: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Drop all decoded states, including writes, and restore the writes in `saved`."""
        self.drop([*self._states])
        for param, states in saved.items():
            self.replace(param, states)

    # ---- parameters that serve as their own master section -------------------------------

    def is_own_master(self, param: int) -> bool:
        """Return whether the parameter itself serves as its master section, so that the tile has none."""
        return param in self._own_masters

    @property
    def any_in_sections(self) -> bool:
        return bool(self._in_sections)

    def has_section(self, param: int) -> bool:
        """Return whether the tile has a section for a parameter only until a step updates it."""
        return param in self._in_sections

    def set_location(self, param: int, where: torch.Tensor | None, *, fresh: bool = False) -> None:
        """Set the memory of a parameter: 1-D, contiguous, in the dtype of its codes; None if devices cannot use it.

        A parameter that was its own master section, or is `fresh` (no states in its tile yet), is its own section from
        now on. If devices can no longer use it, its master is kept here until the next step writes a section of the
        tile.
        """
        if where is None and param in self._own_masters:
            master = self.state(param, "master")
            self._own_masters.pop(param)
            self.replace(param, {"master": master})
        elif where is not None and (fresh or param in self._own_masters):
            self._own_masters[param] = where
        elif where is not None:
            self._in_sections[param] = where
        if where is None:
            self._in_sections.pop(param, None)
        self._own_master_rows = None

    def own_masters(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Return the rows, addresses and codes of the dtypes of all parameters that are their own master section."""
        if self._own_master_rows is None:
            rows = np.fromiter(self._own_masters, np.int64, len(self._own_masters))
            pointers = np.array([p.data_ptr() for p in self._own_masters.values()], np.uint64)
            dtypes = np.array([DTYPE_CODES[p.dtype] for p in self._own_masters.values()], np.uint32)
            self._own_master_rows = rows, pointers, dtypes
        return self._own_master_rows

    def move_own_masters(self, got_section: Iterable[int], updated: Iterable[int]) -> None:
        """Note that the last step gave some parameters a section, and `updated` others, which no longer need theirs."""
        for param in got_section:
            self._in_sections[param] = self._own_masters.pop(param)
            self._own_master_rows = None
        for param in [*updated]:
            self._own_masters[param] = self._in_sections.pop(param)
            self._own_master_rows = None
