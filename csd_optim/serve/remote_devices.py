"""An owner's devices as an engine sees them: they have tiles, and everything else about them is with the owner."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..bindings import DeviceConfig
from ..devices.spec import DeviceSpec
from ..engine.on_accelerator import OnAccelerator
from ..engine.parts import NativeEngine
from ..engine.placing import Placement
from ..errors import CSDRuntimeError
from ..store.layout import Extent, ExtentRequest, plan_extent
from .link import Link
from .messages import WIRE_INDEX, Fields, array, name_of_dtype, number_of, refuse

MAX_DEVICES = 1 << 10


class RemoteDevices:
    """The devices of an owner; see engine/parts.py. They read gradients and parameters from images only."""

    accelerator: OnAccelerator | None = None
    placement: Placement | None = None

    def __init__(self, link: Link, address: str) -> None:
        self._link, self._address = link, address
        self.specs: list[DeviceSpec] = []
        self.names: list[str] = []
        self.pid: int = os.getpid()
        self._is_open = True

    def take(self, fields: Fields) -> None:
        """Take over what an owner says about its devices in the answer to a HELLO. Raises CSDRankError."""
        self.names = fields.texts("devices")
        if not 0 < len(self.names) <= MAX_DEVICES:
            refuse(f"{len(self.names)} devices")
        ratings = fields.integers("tbw")
        if len(ratings) != len(self.names):
            refuse(f"{len(ratings)} ratings of devices")
        self.specs = [
            DeviceSpec(f"{self._address}, {name}", "file", durable=True, tbw_bytes=rating or None)
            for name, rating in zip(self.names, ratings, strict=True)
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
        return f"device {device} of {self._address} ({self.names[device]})"

    @property
    def closed(self) -> bool:
        return not self._is_open

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
        self._link.close()

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        return self._link.interruptible()

    # ---- extents -----------------------------------------------------------------

    def plan(self, wanted: ExtentRequest, *, is_copied: bool) -> Extent:
        """Have the owner allocate an extent, and compute the same one here: no piece of it comes from the owner."""
        answer = self._link.request(
            "extend",
            np.array(wanted.numels, ">u8"),
            sections=[*wanted.sections],
            codec=wanted.codec,
            param_dtype=name_of_dtype(wanted.param_dtype),
            first_param=wanted.first_param,
            tile_elems=wanted.tile_elems,
        )
        (devices,) = number_of(answer.arrays, 1)
        chosen = wanted._replace(tile_elems=answer.fields.integer("tile_elems", 1, 1 << 31))
        return extent_of(chosen, len(self.names), array(devices, WIRE_INDEX, "the devices of tiles"))

    @contextlib.contextmanager
    def room_for(self, extent: Extent, *, is_copied: bool) -> Iterator[list[int]]:
        yield [0] * len(self.names)

    def accelerator_fraction(
        self, numels: Sequence[int], sections: Sequence[str], param_bytes: float, *, is_first: bool
    ) -> float:
        return 0.0

    def configs(self) -> list[DeviceConfig]:
        return []

    def mappings_of(self, extent: Extent) -> int:
        return 0

    # ---- between steps -----------------------------------------------------------

    def sync(self) -> None:
        """Nothing to do: windows are with the owner."""

    def current_stats(
        self, native: NativeEngine, residual_bytes: Callable[[int], tuple[int, int]]
    ) -> list[dict[str, Any]]:
        """Return the counts of the owner's devices for the last step."""
        counts = self._link.request("stats").fields.listed("devices")
        if len(counts) != len(self.names) or not all(isinstance(c, dict) for c in counts):
            refuse("the counts of devices")
        return [_checked_counts(c) for c in counts]


COUNTS = (
    *("push_bytes", "pull_bytes", "read_bytes", "write_bytes", "total_write_bytes", "updated", "nonfinite"),
    *("buffer_bytes", "read_seconds", "update_seconds", "write_seconds", "share"),
)
ABOUT = ("device", "backend", "direct_io", "p2p", "huge_pages", "numa_node", "block_bytes", "depth")


def _checked_counts(counts: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of a device with the fields that stats() reads. Raises CSDRankError."""
    for name in COUNTS:
        if not isinstance(counts.get(name), (int, float)) or not 0 <= counts[name] < 1e300:
            refuse(f"{name} of a device")
    about = {name: counts.get(name) for name in ABOUT}
    if not all(value is None or isinstance(value, (str, int, bool)) for value in about.values()):
        refuse("what is said about a device")
    return {name: counts[name] for name in COUNTS} | about


def extent_of(described: ExtentRequest, n_devices: int, devices: np.ndarray[Any, Any]) -> Extent:
    """Return the extent that an owner has laid out, given the devices of its tiles. Raises CSDRankError."""
    extent = plan_extent(n_devices=n_devices, devices=devices.astype(np.uint32), **described._asdict())
    if extent.tile_elems != described.tile_elems or len(devices) != extent.n_tiles or not (devices < n_devices).all():
        refuse("the tiles of new parameters")
    return extent
