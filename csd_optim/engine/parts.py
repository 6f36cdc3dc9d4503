"""Protocols of an engine's parts: the devices, and the native engine that drives the devices.

OpenDevices and bindings.Native implement both in this process. With other parts, the same engine works on devices
elsewhere. Committers have a base class, Committer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..bindings import DeviceConfig, ExtentConfig, Push
from ..devices.spec import DeviceSpec
from ..errors import CSDError
from ..store.format import Record
from ..store.layout import Extent, ExtentRequest
from .placing.on_accelerator import OnAccelerator
from .placing.placing import Placement


class Ending(NamedTuple):
    """What a step needs to be completed and committed: made by Committer.before_finish(), for NativeEngine.finish()."""

    step: int  # number of the step
    record: Record
    counts: np.ndarray[Any, Any]  # the `step` counts of all parameters after the step, fp32
    round: int  # number of the commit, if the ranks commit together


class Outcome(NamedTuple):
    """What has become of a step whose commit begins as it completes: it is complete, even if its commit has failed."""

    record: Record  # of the commit
    commit_failure: CSDError | None = None  # Committer.commit() raises it


class Space(NamedTuple):
    """A part of a device's store."""

    device: int
    offset: int  # bytes
    size: int


class Devices(Protocol):
    """The devices that have the tiles of an engine, in the order of `specs`."""

    specs: list[DeviceSpec]
    pid: int  # the process that opened the devices
    accelerator: OnAccelerator | None  # see Engine.accelerator
    placement: Placement | None  # divides extents among the devices if `auto` sets the shares

    # ---- capabilities: see Backend -----------------------------------------------

    @property
    def keeps_state(self) -> bool:
        """Whether some device stores data."""

    @property
    def resident(self) -> bool:
        """Whether every device keeps its states in host memory and updates them in place: no step can be undone."""

    @property
    def reaches_params(self) -> bool:
        """Whether every device can read an fp32 parameter in host memory as its master."""

    @property
    def images_only(self) -> bool:
        """Whether devices can access neither gradients nor parameters in this process's memory.

        Every tile with a gradient is then pushed as an image, even with Top-K, and in the table of a step `param` is 0
        and `grad` only a flag. Such devices are not `resident`, nor `reaches_params`.
        """

    @property
    def records_changes(self) -> bool:
        """Whether updates record what they change in watched parameters: see csd_watch.

        Else changes are found when parameters arrive: see Watcher.param_arrives().
        """

    def give_back(self, spaces: Iterable[Space]) -> None:
        """Free disk space that is no longer in use."""

    @property
    def states_on_demand(self) -> bool:
        """Whether no states have windows, not even fp32 states.

        States are then read by NativeEngine.decode(), and the program's writes are `edited` in a step's table. The
        devices are not `resident`. NativeEngine.remap(), edited() and read() are not called.
        """

    @property
    def fills_new(self) -> bool:
        """Whether a step can begin with parameters without states (csd_master NEW)."""

    # ---- their names, and their end ----------------------------------------------

    @property
    def named(self) -> list[DeviceSpec]:
        """The devices that the user named, the accelerator first."""

    @property
    def all_names(self) -> list[str]:
        """The names of all devices, the accelerator last."""

    def name(self, device: int, tile: int = -1) -> str:
        """Return the name of a device for messages. `tile`: a damaged tile, whose parameters are named, too, or -1."""

    @property
    def closed(self) -> bool: ...

    def check_open(self) -> None:
        """Raise CSDRuntimeError if the devices are closed, or belong to another process."""

    def close(self) -> None: ...

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """Let Ctrl-C, which is deferred inside, soon end waits for other machines: see signals.interruptible()."""

    # ---- extents -----------------------------------------------------------------

    def plan(self, wanted: ExtentRequest, *, is_copied: bool) -> Extent:
        """Return the extent of new parameters, its tiles assigned to devices. Raises CSDOSError, CSDMemoryError.

        `is_copied`: see PlacedExtent.
        """

    def room_for(self, extent: Extent, *, is_copied: bool) -> contextlib.AbstractContextManager[list[int]]:
        """Allocate a planned extent and yield its offset in each store (bytes); free it if the body raises.

        Raises CSDOSError if a disk is full.
        """

    def accelerator_fraction(self, wanted: ExtentRequest, param_bytes: float) -> float:
        """As Engine.accelerator_fraction(), if `auto` is among the devices."""

    def configs(self) -> list[DeviceConfig]:
        """Return the configuration of each device for the native engine."""

    def mappings_of(self, extent: Extent) -> int:
        """Return the number of memory mappings of each window of this extent."""

    # ---- between steps -----------------------------------------------------------

    def sync(self) -> None:
        """Flush writes to windows to the disks. Raises CSDOSError."""

    def current_stats(
        self, native: NativeEngine, residual_bytes: Callable[[int], tuple[int, int]]
    ) -> list[dict[str, Any]]:
        """Return one dict per device: see States.stats()."""


class NativeEngine(Protocol):
    """The interface of bindings.Native, which drives the devices; see there for methods and errors.

    finish() needs the Ending to keep a step on devices elsewhere. It returns None if the step's commit has not begun.
    """

    takes_in_place: bool  # push() takes Push.in_place

    @property
    def is_open(self) -> bool: ...
    def open(self, devices: Sequence[DeviceConfig]) -> None: ...
    def close(self) -> None: ...

    def extend(self, config: ExtentConfig) -> list[Any]: ...
    def tiles(
        self, first: int, n: int, chunks: int, sections: int
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]: ...

    # ---- a step ------------------------------------------------------------------

    def begin(
        self,
        params: np.ndarray[Any, Any],
        hypers: np.ndarray[Any, Any],
        tiles: np.ndarray[Any, Any],
        *,
        order: int = ...,
    ) -> None: ...
    def push(self, tile: int, how: Push | None = None) -> None: ...
    def drop_grads(self, params: Sequence[int]) -> None: ...
    def pull(self) -> int: ...
    @property
    def would_pull(self) -> bool: ...
    def params_ready(self, tiles: np.ndarray[Any, Any], *, wait: bool) -> bool: ...
    def finish(self, keep: bool, ending: Ending | None = ...) -> Outcome | None: ...
    def take_back(self) -> None: ...
    def go_back(self, tiles: np.ndarray[Any, Any]) -> None: ...
    def free_tiles(self, tiles: np.ndarray[Any, Any]) -> None: ...
    def undone(self) -> list[tuple[int, int]]: ...

    # ---- a guess -----------------------------------------------------------------

    def hold_bytes(self, tile: int) -> int: ...
    def unchanged(self, params: np.ndarray[Any, Any]) -> bool: ...
    def release(self, params: np.ndarray[Any, Any], order: np.ndarray[Any, Any]) -> None: ...

    # ---- between steps -----------------------------------------------------------

    def wait_writes(self) -> None: ...
    def remap(self, *, open: bool) -> None: ...
    def edited(self, tiles: np.ndarray[Any, Any]) -> None: ...
    def read(self, tile: int, sections: int, elems: int, states: int) -> None: ...
    def decode(
        self, tile: int, first: int, n: int, states: Sequence[torch.Tensor | None], param: int = ...
    ) -> None: ...
    def stats(self, device: int) -> dict[str, float]: ...
    def events(self) -> np.ndarray[Any, Any]: ...
