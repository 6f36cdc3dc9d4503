"""The devices of an engine, with cards, stores and configurations for the native engine."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..bindings import DeviceConfig, card_close, card_has_p2p, mappings
from ..devices.machine import MEMORY_FILE_SYSTEMS, storage
from ..devices.spec import DeviceSpec, shares_of
from ..errors import CSDError, CSDRuntimeError, CSDWarning, users_stacklevel
from ..store.existing import Mode
from ..store.file import STATE, StoreFile
from ..store.format import Contents
from ..store.layout import SLOTS, SUM_ELEMS, Extent, ExtentRequest, plan_extent
from ..store.sections import FP32, elem_bytes
from .open_card import open_card
from .parts import NativeEngine, Space
from .placing.on_accelerator import OnAccelerator
from .placing.placing import Placement, check_memory, rooms
from .placing.tuning import HUGE_PAGE, node_of, tune_devices

log: logging.Logger = logging.getLogger("csd_optim")
_in_memory: set[Path] = set()  # directories of scratch states that were logged as in memory


class OpenDevices:
    """Devices that this process owns until `close()`, in the order of `specs`, or of the stores after a resume.

    `in_place`: update states in memory in place; if False, steps there can be undone. `kernels`: see open_card().
    Raises what `StoreFile` and open_card() raise; then nothing is left open.
    """

    def __init__(
        self,
        specs: Sequence[DeviceSpec],
        *,
        mode: Mode = "new",
        in_place: bool = True,
        kernels: Collection[str] = (),
    ) -> None:
        self.specs: list[DeviceSpec] = list(specs)
        self.stores: list[StoreFile | None] = []
        self.shares = shares_of(self.specs)  # the devices' shares of future extents; None: equal shares
        self.placement: Placement | None = None  # divides future extents if `auto` sets the shares
        self.written_before: list[int] = [0] * len(self.specs)  # by device: bytes written before opening
        self.pid: int = os.getpid()
        self.accelerator: OnAccelerator | None = None  # has states of its own, or copies of the devices' states
        # Returns the names of the parameters in a tile, for messages; "" if no manifest has them.
        self.name_tile: Callable[[int, int], str] = lambda device, tile: ""
        self._in_place = in_place
        self._cards: dict[str, Any] = {}  # by name
        try:
            self.specs = [open_card(spec, self._cards, kernels) if spec.kind.on_card else spec for spec in self.specs]
            for spec in self.specs:
                store: StoreFile | None = None
                if spec.directory:
                    store = StoreFile(spec.directory, durable=spec.durable, mode=mode)
                elif spec.kind.in_memory and not self.resident:
                    # Another device may fail, so a step must be undoable in memory, too: two slots, as in a file.
                    store = StoreFile(None, durable=False)
                self.stores.append(store)
        except BaseException:
            self.close()
            raise

    @property
    def resident(self) -> bool:
        """Whether every device keeps its states in host memory and updates them in place."""
        return (
            self._in_place
            and all(s.kind.in_memory for s in self.specs)
            and not (self.images_only or self.states_on_demand)
        )

    @property
    def images_only(self) -> bool:
        """Whether all tiles with gradients travel as images: some device cannot access this process's memory."""
        return any(s.kind.images_only for s in self.specs)

    @property
    def records_changes(self) -> bool:
        """Whether updates record what they change: only the CPU's do."""
        return self.accelerator is None and all(spec.kind.updated_by_cpu for spec in self.specs)

    @property
    def states_on_demand(self) -> bool:
        """Whether states are read on first use, because some device has no windows."""
        return any(s.kind.states_on_demand for s in self.specs)

    @property
    def reaches_params(self) -> bool:
        """Whether every device can read an fp32 parameter in host memory as its master. A card cannot."""
        return not (self._cards or self.images_only)

    @property
    def fills_new(self) -> bool:
        """Whether a step can begin with parameters without states: it writes their masters to a slot."""
        return not self._cards and all(self.stores)

    @property
    def keeps_state(self) -> bool:
        return any(s.kind.keeps_state for s in self.specs)

    @property
    def named(self) -> list[DeviceSpec]:
        """The devices that the user named, the accelerator first."""
        if not self.accelerator:
            return self.specs
        return [self.accelerator.spec, *([] if self.accelerator.alone else self.specs)]

    @property
    def all_names(self) -> list[str]:
        """The names of all devices, the accelerator last."""
        return [*map(str, self.specs), *([str(self.accelerator.spec)] if self.accelerator else [])]

    @property
    def closed(self) -> bool:
        return not self.stores

    def check_open(self) -> None:
        """Raise CSDRuntimeError if the devices are closed, or belong to another process."""
        if self.closed:
            raise CSDRuntimeError("this optimizer is closed")
        self.check_process()

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # drives need no interruption

    def check_process(self) -> None:
        """Raise CSDRuntimeError in a forked child."""
        if self.pid != os.getpid():
            raise CSDRuntimeError(
                f"this optimizer belongs to process {self.pid}; a forked process has neither its threads nor "
                "its devices. Construct the optimizer after forking."
            )

    def name(self, device: int, tile: int = -1) -> str:
        """Return the name of a device for messages. `tile`: a damaged tile, whose parameters are named, too, or -1."""
        spec, store = self.specs[device], self.stores[device]
        card = f"xrt:{spec.card}, " if spec.card else ""
        name = f"device {device} ({card}{store.path})" if store else f"device {device} ({spec})"
        damaged = self.name_tile(device, tile) if tile >= 0 else ""
        return f"{name}: {damaged}" if damaged else name

    def give_back(self, spaces: Iterable[Space]) -> None:
        for device, offset, size in spaces:
            if store := self.stores[device]:
                store.give_back(offset, size)

    @contextlib.contextmanager
    def room_for(self, extent: Extent, *, is_copied: bool) -> Iterator[list[int]]:
        """Allocate an extent and yield its offset in each store (bytes); free it if the body of the context raises.

        `is_copied`: as in plan(). Raises CSDOSError if a disk is full.
        """
        param_bytes = extent.slots * elem_bytes(extent.sections, extent.codec, extent.param_dtype)
        what = STATE if extent.codec == FP32 else f"optimizer state ({param_bytes:.0f} bytes per parameter)"
        offsets: list[int] = []
        try:
            for d, store in enumerate(self.stores):
                offsets.append(store.allocate(extent.device_bytes(d), what) if store else 0)
            yield offsets
        except BaseException:
            for d, (store, offset) in enumerate(zip(self.stores, offsets, strict=False)):
                if store:
                    with contextlib.suppress(CSDError):  # the file then stays too long
                        store.undo_allocate(offset, extent.device_bytes(d))
            raise
        if self.placement and extent.n_tiles:
            self.placement.record(extent, is_copied=is_copied)
            self.placement.log_summary()
            self.shares = extent.shares
        if extent.n_tiles and not extent.first_tile:
            self.log_scratch(extent)

    def mappings_of(self, extent: Extent) -> int:
        """Return the number of memory mappings of each window of this extent."""
        return extent.n_tiles if any(self.stores) else 1

    def configs(self) -> list[DeviceConfig]:
        """Return the configuration of each device for the native engine."""
        return [
            DeviceConfig(
                spec.backend,
                store.io_fd,
                spec.buffers,
                spec.block_bytes,
                self._cards.get(spec.card),
                spec.p2p,
                spec.pace,
                spec.depth,
                spec.cache_bytes,
                None if spec.card else node_of(spec, store),
            )
            if store
            else DeviceConfig(spec.backend, pace=spec.pace)
            for spec, store in zip(self.specs, self.stores, strict=True)
        ]

    def tune(self, nbytes: int, *, new: bool) -> None:
        """Measure the drives for `nbytes` of states, and adopt the result: see tune_devices()."""
        self.specs, shares, rates = tune_devices(self.specs, self.stores, nbytes, new=new)
        self.shares = shares or self.shares
        if new and any(spec.is_placed for spec in self.specs):
            paths = [s.path if s and spec.directory else None for s, spec in zip(self.stores, self.specs, strict=True)]
            self.placement = Placement(self.specs, rates, rooms(self.specs, paths))

    def tune_for(
        self, numels: Sequence[int], sections: Sequence[str], codec: str, param_dtype: torch.dtype | None
    ) -> None:
        """Measure the drives before the first states are allocated, for these parameters."""
        if self.placement is None:
            self.tune(int(SLOTS * elem_bytes(sections, codec, param_dtype) * sum(numels)), new=True)
            if self.placement:
                self.placement.accelerator = self.accelerator

    def accelerator_fraction(self, wanted: ExtentRequest, param_bytes: float) -> float:
        """Return the fraction of these parameters that `auto` wants on the accelerator. Raises what plan() raises.

        `param_bytes`: average bytes per element of the parameters.
        """
        numels, sections, codec, param_dtype, *_ = wanted
        if not wanted.first_tile:
            self.tune_for(numels, sections, codec, param_dtype)
        assert self.placement
        extent = plan_extent(numels, len(self.specs), sections=sections, codec=codec, param_dtype=param_dtype)
        return self.placement.accelerator_fraction(extent, param_bytes)

    def plan(self, wanted: ExtentRequest, *, is_copied: bool) -> Extent:
        """Return the extent of new parameters, its tiles assigned to devices. Raises CSDOSError, CSDMemoryError.

        `is_copied`: see PlacedExtent.
        """
        if not wanted.first_tile:
            self.tune_for(wanted.numels, wanted.sections, wanted.codec, wanted.param_dtype)
        plan = partial(
            plan_extent,
            n_devices=len(self.specs),
            sum_elems=SUM_ELEMS,
            mapped=0 if self.resident else mappings(),
            **wanted._asdict(),
        )
        extent = plan(shares=self.shares)
        if self.placement and extent.n_tiles:  # not for empty parameters
            shares = self.placement.shares(extent, is_copied=is_copied)
            extent = self.placement.divide(plan(shares=shares), is_copied=is_copied)
            if not wanted.first_param:  # the first extent may have fewer tiles than devices
                self.share_memory([share * extent.n_tiles * extent.slot_bytes for share in shares])
        return extent

    def share_memory(self, states: Sequence[float]) -> None:
        """If `auto` uses memory as cache, divide it among the drives in proportion to their states.

        `states`: bytes of one slot of the states on each device. Raises CSDMemoryError if there is not enough memory.
        """
        cache = sum(spec.cache_bytes for spec in self.specs)
        if cache > 0 and any(states) and all(spec.is_placed for spec in self.specs):
            caches = [int(cache * n / sum(states)) for n in states]
            check_memory(min(cache, int(sum(states))))
            self.specs = [replace(spec, cache_bytes=n) for spec, n in zip(self.specs, caches, strict=True)]

    def log_scratch(self, extent: Extent) -> None:
        """Log which parts of an extent are scratch: deleted when the process ends."""
        for d, (spec, store) in enumerate(zip(self.specs, self.stores, strict=True)):
            if store and spec.directory and not store.durable:
                log.info(
                    "scratch CSD %d: %.2f GB in %s, gone when the process ends; name devices=[...] to keep it (%s)",
                    d,
                    extent.device_bytes(d) / 1e9,
                    store.path,
                    spec,
                )
                if (kind := storage(store.path)["filesystem"]) in MEMORY_FILE_SYSTEMS and store.path not in _in_memory:
                    _in_memory.add(store.path)
                    text = f"states are in memory, as {store.path} is a {kind} file system: name a drive by devices= or"
                    text = f"{text} CSD_OPTIM_DEVICES. In memory, devices='ram:' is faster"
                    warnings.warn(text, CSDWarning, users_stacklevel())

    def adopt_commit(self, recovered: Sequence[Contents], order: Sequence[int]) -> None:
        """Continue from a commit, given by device. `order`: the index of the store that is device 0, 1 ..."""
        self.specs, self.stores = [self.specs[d] for d in order], [self.stores[d] for d in order]
        self.written_before = [contents.record.written_bytes for contents in recovered]
        for store, contents in zip(self.stores, recovered, strict=True):
            assert store is not None
            store.adopt_commit(contents)

    def sync(self) -> None:
        """Flush all stores, including writes through mappings, to the disks. Raises CSDOSError."""
        for store in self.stores:
            if store:
                store.sync()

    def current_stats(
        self, native: NativeEngine, residual_bytes: Callable[[int], tuple[int, int]]
    ) -> list[dict[str, Any]]:
        """Return one dict per device: see States.stats()."""
        stats = []
        for d, (spec, store) in enumerate(zip(self.specs, self.stores, strict=True)):
            counts = native.stats(d)
            counts["total_write_bytes"] += self.written_before[d]
            if spec.directory is None:  # `ram:` in slots moves tiles like a file, but in memory: no drive traffic
                counts |= {"read_bytes": 0, "write_bytes": 0, "total_write_bytes": 0}
            of_step, in_all = residual_bytes(d)
            counts["write_bytes"] += of_step
            counts["total_write_bytes"] += in_all
            direct = store.direct if store else None
            card = self._cards.get(spec.card)
            p2p = card_has_p2p(card) and spec.p2p != "0" if card else None
            about: dict[str, Any] = {"device": str(spec), "backend": spec.backend, "direct_io": direct, "p2p": p2p}
            # Without huge pages transfers cost 4 to 5 times the CPU time. A card's buffers are elsewhere, and smaller
            # buffers never get a huge page.
            if store and not card and counts["buffer_bytes"] >= HUGE_PAGE:
                about["huge_pages"] = 2 * counts["huge_bytes"] > counts["buffer_bytes"]
            node = counts.pop("numa")
            if store and not card:
                about["numa_node"] = node - 1 if node else None
            if store:
                about |= {"block_bytes": spec.block_bytes, "depth": spec.depth}
            about["free_bytes"] = store.unused.nbytes if store else 0
            stats.append(about | {"share": self.shares[d] if self.shares else 1.0} | counts)
        return stats

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # closes all devices, even if one raises
            for store in self.stores:
                if store:
                    stack.callback(store.close)
            for name, card in self._cards.items():
                stack.callback(card_close, card, name)
            self.stores.clear()
            self._cards.clear()
