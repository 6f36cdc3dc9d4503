"""Owners' devices as an engine sees them: only their tiles are known here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...bindings import DeviceConfig
from ...devices.spec import DeviceSpec
from ...engine.parts import NativeEngine, Space
from ...engine.placing.on_accelerator import OnAccelerator
from ...engine.placing.placing import Placement
from ...errors import CSDRuntimeError
from ...signals import interruptible
from ...store.layout import Extent, ExtentRequest, plan_extent
from ..messages import WIRE_INDEX, array, name_of_dtype, number_of, refuse
from ..requests import ABOUT, COUNTS, Welcome
from ..wire.schema import msgspec
from .address import Address
from .link import Reply
from .shares import Share, divide, owners_of


class RemoteDevices:
    """The devices of all owners of a trainer, one after another; see engine/parts.py.

    The devices cannot access this process's memory: RemoteNative sends all that they read.
    """

    accelerator: OnAccelerator | None = None
    placement: Placement | None = None

    def __init__(self, shares: Sequence[Share]) -> None:
        self._shares = shares
        self.specs: list[DeviceSpec] = []
        self.names: list[str] = []
        self.pid: int = os.getpid()
        self._is_open = True

    def take(self, share: Share, address: Address, welcome: Welcome) -> None:
        """Add the devices of the next owner, from its answer to a HELLO. Raises CSDRankError."""
        names, ratings = welcome.devices, welcome.tbw
        if len(ratings) != len(names):
            refuse(f"{len(ratings)} ratings of devices")
        share.names, share.weight = names, address.share or float(len(names))
        self.names += names
        self.specs += [
            DeviceSpec(f"{address}, {name}", "file", durable=True, tbw_bytes=rating or None)
            for name, rating in zip(names, ratings, strict=True)
        ]

    # ---- capabilities ------------------------------------------------------------

    images_only = True
    records_changes = False
    states_on_demand = True
    keeps_state = True
    resident = False
    reaches_params = False
    fills_new = True

    # ---- their names, and their end ----------------------------------------------

    @property
    def named(self) -> list[DeviceSpec]:
        return self.specs

    @property
    def all_names(self) -> list[str]:
        return self.names

    def name(self, device: int, tile: int = -1) -> str:
        return str(self.specs[device])

    @property
    def closed(self) -> bool:
        return not self._is_open

    def give_back(self, spaces: Iterable[Space]) -> None:
        """A no-op: see RemoteCommitter.free()."""

    def check_open(self) -> None:
        if self.closed:
            raise CSDRuntimeError("this optimizer is closed")
        if self.pid != os.getpid():
            raise CSDRuntimeError(
                f"this optimizer belongs to process {self.pid}; a forked process has no link to the optimizer ranks. "
                "Construct the optimizer after forking."
            )

    def close(self) -> None:
        self._is_open = False
        for share in self._shares:
            share.link.close()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        links = [share.link for share in self._shares]

        def give_up() -> None:
            for link in links:
                link.give_up()

        try:
            with interruptible(give_up):
                yield
        finally:
            for link in links:
                link.go_on()

    # ---- extents -----------------------------------------------------------------

    def plan(self, wanted: ExtentRequest, *, is_copied: bool) -> Extent:
        """Have the owners allocate an extent, and compute the same extent here: no piece is taken from an answer."""
        if self._shares[0].is_whole:
            extent = _extended(self._shares[0], wanted)
            self._shares[0].add_whole(extent)
            return extent
        # If one owner has no room, the others keep their parts of the extent.
        planned = plan_extent(n_devices=len(self.names), **wanted._asdict())
        divided = divide(planned, owners_of(self._shares, planned.n_tiles), len(self._shares))
        for share, (_, parts) in zip(self._shares, divided, strict=True):
            request = share.request_of(wanted, planned.tile_elems, parts)
            if share.pending and share.pending[0] != request:
                share.check_not_pending()
            if not share.pending and request.numels:
                share.pending = request, _extended(share, request)
        devices, first = np.zeros(planned.n_tiles, np.uint32), 0
        for share, (tiles, parts) in zip(self._shares, divided, strict=True):
            if share.pending:
                (_, extent), share.pending = share.pending, None
                if (extent.tile_elems, extent.n_tiles) != (planned.tile_elems, len(tiles)):
                    refuse("the tiles of new parameters")
                devices[tiles - planned.first_tile] = first + extent.devices
                share.add(extent, tiles, parts)
            first += len(share.names)
        return replace(planned, devices=devices)

    @contextlib.contextmanager
    def room_for(self, extent: Extent, *, is_copied: bool) -> Iterator[list[int]]:
        yield [0] * len(self.names)

    def accelerator_fraction(self, wanted: ExtentRequest, param_bytes: float) -> float:
        return 0.0

    def configs(self) -> list[DeviceConfig]:
        return []

    def mappings_of(self, extent: Extent) -> int:
        return 0

    # ---- between steps -----------------------------------------------------------

    def sync(self) -> None:
        """A no-op: there are no windows here."""

    def current_stats(
        self, native: NativeEngine, residual_bytes: Callable[[int], tuple[int, int]]
    ) -> list[dict[str, Any]]:
        """Return the counts of the owner's devices for the last step."""
        found: list[dict[str, Any]] = []
        for share in self._shares:
            if not len(share.parts):  # an owner without states has no counts
                found += [dict.fromkeys(COUNTS, 0) | dict.fromkeys(ABOUT) | {"device": name} for name in share.names]
                continue
            counts = share.link.request("stats").fields.devices
            if len(counts) != len(share.names):
                refuse("the counts of devices")
            found += [msgspec.structs.asdict(c) for c in counts]
        return found


def _extended(share: Share, wanted: ExtentRequest) -> Extent:
    """Have an owner allocate its part of an extent, and return that part in the owner's numbers."""
    answer: Reply = share.link.request(
        "extend",
        np.array(wanted.numels, ">u8"),
        sections=[*wanted.sections],
        codec=wanted.codec,
        param_dtype=name_of_dtype(wanted.param_dtype),
        first_param=wanted.first_param,
        tile_elems=wanted.tile_elems,
    )
    (devices,) = number_of(answer.arrays, 1)
    chosen = wanted._replace(tile_elems=answer.fields.tile_elems)
    return extent_of(chosen, len(share.names), array(devices, WIRE_INDEX, "the devices of tiles"))


def extent_of(described: ExtentRequest, n_devices: int, devices: np.ndarray[Any, Any]) -> Extent:
    """Return an owner's extent. `devices`: of its tiles. Raises CSDRankError."""
    extent = plan_extent(n_devices=n_devices, devices=devices.astype(np.uint32), **described._asdict())
    if extent.tile_elems != described.tile_elems or len(devices) != extent.n_tiles or not (devices < n_devices).all():
        refuse("the tiles of new parameters")
    return extent
