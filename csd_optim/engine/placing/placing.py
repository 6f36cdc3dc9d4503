"""Divides the states among devices that include `auto`, by their speed and free space."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...devices.machine import available_memory
from ...devices.spec import DeviceSpec
from ...errors import CSDMemoryError, CSDOSError
from ...rates import UNPACED
from ...store.format import devices_of
from ...store.layout import Extent
from ...store.sections import FP32, GROUP, elem_bytes, sections_beside_param, state_dtype_of
from .balance import Candidate, place, step_seconds
from .engine_rate import engine_rate
from .on_accelerator import OnAccelerator

log: logging.Logger = logging.getLogger("csd_optim")

NO_PARAMETERS = "no parameters"  # `limited_by` of an accelerator that can update no parameter

PARTS = 4096  # number of equal parts of states, to choose shares before tiles are known


class PlacedExtent(NamedTuple):
    """An extent that has been placed."""

    extent: Extent
    tiles: list[int]  # number of tiles per device
    candidates: list[Candidate]  # per device: the speed and room that the placement was based on
    is_copied: bool  # the accelerator updates the states, and devices only write them

    @property
    def params(self) -> int:
        return sum(self.extent.numels)


class Placement:
    """Divides extents among devices so that all devices finish a step at the same time.

    `rates`: by device, measured bytes per second, read plus written, of unpaced drives. `rooms`: by device, the bytes
    of states that fit in total, see rooms(). `accelerator`: holds states that no device has; or, beside named
    directories, copies of states that it updates: devices write these states, but need not read them.
    """

    accelerator: OnAccelerator | None = None
    _accelerated: Candidate | None = None  # the accelerator's speed and room, per element, used for the choice
    _link = _accelerator_link = 0.0  # seconds per element on the link: elements elsewhere; on the accelerator
    _is_full = False  # the accelerator has no room for more

    def __init__(self, specs: Sequence[DeviceSpec], rates: Mapping[int, float], rooms: Sequence[int]) -> None:
        self._specs, self._rates, self._rooms = specs, rates, [*rooms]
        self._placed: list[PlacedExtent] = []

    @property
    def _copies(self) -> bool:
        """Whether the devices also contain the states that are on the accelerator."""
        return any(spec.durable for spec in self._specs)

    def shares(self, extent: Extent, *, is_copied: bool = False) -> list[float]:
        """Return the devices' best shares of an extent, regardless of tiles. Raises CSDOSError if there is no room.

        `is_copied`: see PlacedExtent.
        """
        elems = extent.n_tiles * extent.tile_elems / PARTS
        tiles, _ = self._place(extent, PARTS, elems, is_copied=is_copied)
        return [max(n, 1) / PARTS for n in tiles]  # a device with nothing now may get states that join later

    def divide(self, extent: Extent, *, is_copied: bool = False) -> Extent:
        """Return the extent with its tiles assigned to devices.

        Raises CSDOSError, CSDMemoryError if there is no room.
        """
        tiles, _ = self._place(extent, extent.n_tiles, extent.tile_elems, is_copied=is_copied)
        in_memory = sum(n for n, spec in zip(tiles, self._specs, strict=True) if spec.kind.in_memory)
        needed = extent.slots * extent.slot_bytes * in_memory
        if self._placed:  # for the first extent, share_memory() checks the memory for caches
            more = 0 if is_copied else extent.n_tiles * extent.slot_bytes
            needed += self._cached(self._read_bytes + more) - self._cached(self._read_bytes)
        check_memory(needed)
        return replace(
            extent,
            shares=tuple(max(round(n / extent.n_tiles, 4), 1e-4) for n in tiles),
            devices=devices_of([max(n, 1e-9) for n in tiles], extent.n_tiles),
        )

    def accelerator_fraction(self, extent: Extent, param_bytes: float) -> float:
        """Return the fraction of an extent that goes to the accelerator. Raises CSDOSError if there is no room.

        `param_bytes`: bytes per element that cross the link each way, as a parameter and as a gradient.
        """
        assert self.accelerator
        rates, elems = self.accelerator.rates(), extent.n_tiles * extent.tile_elems / PARTS
        state_bytes, copies = elems * elem_bytes(extent.sections, extent.codec, extent.param_dtype), 1
        if not self._copies:
            copies = extent.slots
            if extent.codec != FP32:
                sizes = sections_beside_param(extent.sections, extent.codec, extent.param_dtype)
                state_bytes = elems * sum(group_bytes for _, group_bytes in sizes) / GROUP
        room = int(self.accelerator.room / (state_bytes * copies))
        # The measured rate is AdamW's, with 3 fp32 states, and is taken for codes as well; for other rules the time
        # scales with the number of states.
        accelerated = Candidate(elems / rates.update * len(extent.sections) / 3, room=max(0, room))
        link = elems * param_bytes / rates.link
        others = [replace(c, link=link) for c in self.candidates(extent, elems)]
        if self._copies:
            accelerated = replace(accelerated, link=state_bytes / rates.link)
            parts = self._part_copied(accelerated, others, self.candidates(extent, elems, is_copied=True), extent)
        elif tiles := place(PARTS, [accelerated, *others]):
            parts = tiles[0]
        else:
            raise self._no_room(extent)
        self._accelerated = replace(accelerated, seconds=accelerated.seconds / elems)
        self._link, self._accelerator_link = link / elems, accelerated.link / elems
        self._is_full = parts == accelerated.room
        return parts / PARTS

    def _part_copied(
        self, accelerated: Candidate, others: list[Candidate], written: list[Candidate], extent: Extent
    ) -> int:
        """Return how many of PARTS the accelerator should copy, for the shortest step.

        `others`: the devices as candidates for parts that devices update; `written`: the same devices, for parts that
        are only written. Raises CSDOSError if there is no room.
        """
        if place(PARTS, others) is None:  # devices need room for all parts, even copied ones
            raise self._no_room(extent)

        def devices(n: int) -> float:
            """Return the seconds that devices are busy if the accelerator has `n` parts, which need not be read."""
            return sum(step_seconds(place(k, c) or [], c) for k, c in ((n, written), (PARTS - n, others)) if k)

        def accelerator(n: int) -> float:
            return max(n * accelerated.seconds, n * accelerated.link + (PARTS - n) * others[0].link)

        few, many = 0, min(accelerated.room, PARTS)
        while few < many:
            middle = (few + many) // 2
            few, many = (few, middle) if accelerator(middle) >= devices(middle) else (middle + 1, many)
        return min((n for n in (few - 1, few) if n >= 0), key=lambda n: max(accelerator(n), devices(n)))

    @property
    def extents(self) -> list[Extent]:
        """All extents that have been placed."""
        return [placed.extent for placed in self._placed]

    @property
    def _read_bytes(self) -> int:
        """Bytes of states that a step reads from devices if nothing is cached."""
        return sum(t.extent.n_tiles * t.extent.slot_bytes for t in self._placed if not t.is_copied)

    def _cached(self, nbytes: int) -> int:
        """Return how many of `nbytes` bytes of states the drives' caches in memory can keep."""
        return min(nbytes, sum(max(0, spec.cache_bytes) for spec in self._specs))

    def record(self, extent: Extent, *, is_copied: bool = False) -> None:
        """Record an extent as placed by divide(), and subtract its space from the rooms."""
        found = self._place(extent, extent.n_tiles, extent.tile_elems, is_copied=is_copied)
        self._placed.append(PlacedExtent(extent, *found, is_copied))
        for d in range(len(self._specs)):
            self._rooms[d] -= extent.device_bytes(d)

    def _place(self, extent: Extent, n: int, elems: float, *, is_copied: bool) -> tuple[list[int], list[Candidate]]:
        """Return each device's number of the `n` tiles (of `elems` elements), and the candidates for the choice."""
        candidates = self.candidates(extent, elems, is_copied=is_copied)
        tiles = place(n, candidates)
        if tiles is None:
            raise self._no_room(extent)
        return tiles, candidates

    def _no_room(self, extent: Extent) -> CSDOSError:
        free = [*zip(self._specs, self._rooms, strict=True)]
        if self.accelerator and not self._copies:
            free.insert(0, (self.accelerator.spec, int(self.accelerator.room)))
        rooms = ", ".join(f"{spec} {room / 1e9:.3f} GB" for spec, room in free)
        nbytes = extent.slots * extent.slot_bytes * extent.n_tiles
        return CSDOSError(
            errno.ENOSPC,
            f"the states of these {sum(extent.numels) / 1e6:.1f} M parameters take {nbytes / 1e9:.3f} GB, and "
            f"there is room for {sum(room for _, room in free) / 1e9:.3f} GB ({rooms}): "
            "name more devices, or a larger room",
        )

    def candidates(self, extent: Extent, elems: float, *, is_copied: bool = False) -> list[Candidate]:
        """Return the speed and room of the devices for tiles of `elems` elements. `is_copied`: see PlacedExtent."""
        dtype, slot = extent.param_dtype, extent.slot_bytes * elems / extent.tile_elems
        # A slot of codes also contains the parameters, which need not be read, as they are in memory.
        read = slot - (0 if extent.codec == FP32 or dtype is None else dtype.itemsize * elems)
        read = 0 if is_copied else read
        found = []
        for d, spec in enumerate(self._specs):
            room = max(0, int(self._rooms[d] / (extent.slots * slot)))
            if spec.pace != UNPACED:
                found.append(Candidate(spec.pace.seconds(0 if is_copied else elems, read, slot), room=room))
                continue
            # The measured rate is AdamW's, with 3 states; for other rules the time scales with the number of states.
            # States from the accelerator are copied and checksummed, which takes as long as an update in memory.
            in_memory = spec.kind.in_memory or is_copied
            host = elems / engine_rate(dtype or torch.bfloat16, state_dtype_of(extent.codec), in_memory=in_memory)
            host *= len(extent.sections) / 3
            drive = 0.0 if spec.kind.in_memory else (read + slot) / self._rates[d]
            found.append(Candidate(drive, host, room))
        cache = sum(max(0, spec.cache_bytes) for spec in self._specs)
        if cache > 0 and not is_copied:
            # share_memory() divides the drives' cache in proportion to their states, so all save the same time.
            saved = cache / sum((read + slot) / c.seconds for c in found)
            found = [replace(c, saved=saved) for c in found]
        return found

    def describe(self) -> dict[str, Any]:
        """Return the choice, and its reasons, as plain values.

        `seconds`: predicted time of a step. `host_seconds`: time that the update threads are busy. `link_seconds`: time
        that the link to an accelerator is busy; absent without an accelerator. `cache_bytes`: memory for caches, whose
        content drives need not read. `devices`: one dict for each, with `params`; `share`, the fraction of all
        parameters; `seconds`, the time that the device itself is busy; `params_per_second`, None if as fast as the
        host; `limited_by`: the device's "room" or "speed", or the "host" or "link", for which the device waits. An
        accelerator is limited by "no parameters" if it can update none. Beside named
        directories, `params` of a device excludes the parameters that the accelerator updates, and `seconds` includes
        the time to write their states.
        """
        on_devices = sum(placed.params for placed in self._placed if not placed.is_copied)
        accelerated = sum(placed.params for placed in self._placed if placed.is_copied)
        if self.accelerator and not self._copies:
            accelerated = self.accelerator.params
        total = accelerated + on_devices
        host = sum(n * c.host for placed in self._placed for n, c in zip(placed.tiles, placed.candidates, strict=True))
        devices: list[dict[str, Any]] = []
        for d, spec in enumerate(self._specs):
            own = [(placed, placed.tiles[d], placed.candidates[d]) for placed in self._placed]
            updated = [(placed, n, c) for placed, n, c in own if not placed.is_copied]
            params = sum(min(1, n / placed.extent.n_tiles) * placed.params for placed, n, _ in updated)
            writes = sum(n * c.seconds for placed, n, c in own if placed.is_copied)
            moves = sum(n * c.seconds for _, n, c in updated)
            rate = max((placed.extent.tile_elems / c.seconds for placed, _, c in updated if c.seconds), default=None)
            devices.append(
                {
                    "device": str(spec),
                    "params": round(params),
                    "share": params / total,
                    "seconds": writes + (max(moves - updated[0][2].saved, moves / 2) if updated else 0.0),
                    "params_per_second": rate,
                    "limited_by": "room" if any(n == c.room for _, n, c in own) else "",
                }
            )
        link = self._link * on_devices + self._accelerator_link * accelerated
        if self.accelerator and self._accelerated:
            seconds = accelerated * self._accelerated.seconds
            about: dict[str, Any] = {"params": accelerated, "share": accelerated / total, "seconds": seconds}
            about |= {"params_per_second": 1 / self._accelerated.seconds, "limited_by": "room" if self._is_full else ""}
            devices.insert(0, {"device": str(self.accelerator.spec), **about})
        elif self.accelerator:
            nothing = {
                "params": 0,
                "share": 0.0,
                "seconds": 0.0,
                "params_per_second": None,
                "limited_by": NO_PARAMETERS,
            }
            devices.insert(0, {"device": str(self.accelerator.spec), **nothing})
        seconds = max([host, link, *(d["seconds"] for d in devices)])
        shared = "link" if link > host else "host"
        for device in devices:
            if not device["limited_by"]:
                device["limited_by"] = "speed" if device["seconds"] > 0.9 * seconds else shared
        cache = self._cached(self._read_bytes)
        found = {"seconds": seconds, "host_seconds": host, "cache_bytes": cache, "devices": devices}
        return found | ({"link_seconds": link} if self._accelerated else {})

    def log_summary(self) -> None:
        """Log the choice: see describe()."""
        found = self.describe()
        for d in found["devices"]:
            if d["limited_by"] == NO_PARAMETERS:
                log.info("auto: %s has nothing: no parameter is on an accelerator with kernels for it", d["device"])
                continue
            rate = (
                f"{d['params_per_second'] / 1e6:.0f} M parameters/s" if d["params_per_second"] else "as fast as the CPU"
            )
            log.info(
                "auto: %s has %.1f M parameters, %.1f %%, limited by %s (%s)",
                *(d["device"], d["params"] / 1e6, 100 * d["share"], d["limited_by"], rate),
            )
        if found["cache_bytes"]:
            log.info(
                "auto: %.3f GB of memory cache states, which drives then need not read", found["cache_bytes"] / 1e9
            )
        log.info("auto: a step is predicted to take %.3f s", found["seconds"])


def check_memory(nbytes: int) -> None:
    """Raise CSDMemoryError if `nbytes` bytes of states do not fit into memory without swapping."""
    if nbytes and nbytes > (available := available_memory()):
        raise CSDMemoryError(
            f"{nbytes / 1e9:.3f} GB of states would be in memory, of which {available / 1e9:.3f} GB are available: "
            "name a smaller room for ram:"
        )


def rooms(specs: Sequence[DeviceSpec], paths: Sequence[Path | None]) -> list[int]:
    """Return the bytes of states that fit on each device: the `room` that the user set, or less if less is free.

    `paths`: by device, the file of its store or a directory; None: the device is in memory.
    """
    file_systems = [path.stat().st_dev if path else None for path in paths]
    found = []
    for spec, path, file_system in zip(specs, paths, file_systems, strict=True):
        room = 1 << 60 if spec.room_bytes is None else spec.room_bytes
        if path:
            free = os.statvfs(path)
            own = 0 if path.is_dir() else 512 * path.stat().st_blocks  # of a store that will be overwritten
            room = min(room, free.f_bavail * free.f_frsize // file_systems.count(file_system) + own)
        found.append(room)
    return found
