"""fp32 tensors of states without windows: such states are *decoded*, that is, read from the device on first use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..bindings import DTYPE_CODES
from .decoded_states import DecodedStates
from .parts import Devices, NativeEngine
from .tiles import Tiles


class Decoded(DecodedStates):
    """The decoded states of one engine: codes, which cannot be memory-mapped as fp32; and fp32 states on devices whose
    `states_on_demand` is set.

    The next step starts from written values (rounded to codes for 8-bit states), or an earlier flush does; see Truth.
    """

    def __init__(self, devices: Devices, native: NativeEngine, tiles: Tiles) -> None:
        super().__init__()
        self._devices, self._native, self._tiles = devices, native, tiles
        self.durable: bool = False  # the states outlive the process
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

    def check_open(self) -> None:
        self._devices.check_open()

    def _sections(self, param: int) -> Sequence[str]:
        return self._tiles.extent_with(param).sections

    def _numel(self, param: int) -> int:
        extent = self._tiles.extent_with(param)
        return extent.numels[param - extent.first_param]

    def _decode(self, param: int, wanted: Mapping[str, torch.Tensor]) -> None:
        own, sections = self._own_masters.get(param), self._sections(param)
        for _, tile, first, tile_first, n in self._tiles.by_param.of(param).tolist():
            ranges = [wanted[name][first : first + n] if name in wanted else None for name in sections]
            address = own[first:].data_ptr() if own is not None else 0
            self._native.decode(tile, tile_first, n, ranges, address)

    def master(self, param: int, tile: int, first: int, in_tile: int, n: int) -> torch.Tensor:
        """Return elements [first, first + n) of a parameter's master, which begin at element `in_tile` of `tile`.

        Reads these elements only, and keeps nothing. Raises CSDOSError. Not while a step is in flight.
        """
        if "master" in self._states.get(param, ()):
            return self._states[param]["master"][first : first + n]
        master = torch.empty(n, dtype=torch.float32, device="cpu")
        self._native.decode(tile, in_tile, n, [master])
        return master

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

    def drop(self, params: Iterable[int]) -> None:
        params = [*params]
        super().drop(params)
        self.rounded.difference_update(params)

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

    def relocate(
        self, param: int, in_place: torch.Tensor | None, in_order: Callable[[], torch.Tensor], *, fresh: bool
    ) -> None:
        if self.resident:
            self.set_location(param, in_place, fresh=fresh)

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
