"""Continues from the commit that a trainer's owners have resumed, after checks of the owners' answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...engine.engine import Engine
from ...errors import CSDStoreError
from ...store.check import check_param, check_record, check_rules, is_name, require
from ...store.format import DIVIDED, Contents, Record, Region, Superblock
from ...store.layout import Extent, ExtentRequest, plan_extent
from ..messages import WIRE_INDEX, array, dtype_named, extent_fields, number_of, refuse, unpack_counts
from ..requests import MAX_VALUES, ExtentFields, Welcome, unpacked
from .divided_manifest import tiles_of, whole_of
from .link import Reply
from .remote_devices import extent_of
from .shares import Share, divide


class OfOwner:
    """An owner's answer about the commit that it has resumed."""

    def __init__(self, answer: Reply, n_devices: int) -> None:
        """Check everything that does not need other owners. `n_devices`: of this owner. Raises CSDRankError."""
        self.fields: Welcome = answer.fields
        counts, devices, user_state = number_of(answer.arrays, 3)
        # Twice as much as an owner accepts, as it repeats what it was told: what was accepted can be resumed.
        self.manifest: dict[str, Any] = unpacked(self.fields.manifest, 2 * MAX_VALUES)
        record = unpacked(self.fields.record)
        self._n_devices = n_devices
        self._devices = array(devices, WIRE_INDEX, "the devices of tiles")
        self.extents: list[ExtentFields] = self.fields.extents
        self.step: int = self.fields.step
        try:
            check_params(self.manifest, len(self.extents), n_devices)
            self.record: Record = Record(record["groups"], record["given"], bytes(user_state), record["seconds"])
            check_record(vars(self.record), self.manifest.get("rule"))
        except (CSDStoreError, KeyError, TypeError, ValueError) as e:
            refuse(f"the store of the optimizer ranks: {e}")
        self.params: list[dict[str, Any]] = self.manifest["params"]
        self.counts: np.ndarray[Any, Any] = unpack_counts(counts, len(self.params))
        self._taken = 0  # extents returned by next_extent()

    def next_extent(self, first_param: int, first_tile: int) -> Extent:
        """Return the owner's next extent. Raises CSDRankError."""
        e, self._taken = self._taken, self._taken + 1
        if e >= len(self.extents):
            refuse("the extents of a store")
        numels = [p["numel"] for p in self.params if p["extent"] == e]
        wanted = request_of(self.extents[e], numels, first_param, first_tile)
        n_tiles = plan_extent(n_devices=1, **wanted._asdict()).n_tiles
        devices, self._devices = self._devices[:n_tiles], self._devices[n_tiles:]
        return extent_of(wanted, self._n_devices, devices)

    def check_end(self) -> None:
        """Raise CSDRankError unless next_extent() has returned all extents."""
        if self._taken < len(self.extents) or len(self._devices):
            refuse("the devices of tiles")


def check_params(manifest: dict[str, Any], n_extents: int, n_devices: int) -> None:
    """Check the parameters that a manifest describes. Raises CSDStoreError, KeyError, TypeError."""
    for p in manifest["params"]:
        check_param(p, n_devices)
        require(p["extent"] < n_extents, "a parameter's extent")
    for p in manifest["waiting"]:
        check_param(p, n_devices, is_waiting=True)


def request_of(about: ExtentFields, numels: list[int], first_param: int, first_tile: int) -> ExtentRequest:
    """Return the request from which an extent of a store was made. Raises CSDRankError."""
    if not all(is_name(s) for s in about.sections):
        refuse("the states of a store")
    dtype = dtype_named(about.param_dtype)
    return ExtentRequest(numels, about.sections, about.codec, dtype, first_param, first_tile, about.tile_elems)


def adopt(engine: Engine, shares: Sequence[Share], answers: Sequence[Reply]) -> None:
    """Continue from the commit that the owners have resumed. Raises CSDRankError, CSDStoreError."""
    owners = [OfOwner(answer, len(share.names)) for share, answer in zip(shares, answers, strict=True)]
    path = ", ".join(owner.fields.path for owner in owners)
    if shares[0].is_whole and DIVIDED in owners[0].manifest:
        raise CSDStoreError(
            f"{path} of the optimizer ranks is one of several stores that had the states of one trainer: name as many "
            "optimizer ranks as then, or export them on their machines"
        )
    first = owners[0]
    if shares[0].is_whole:
        manifest, described = first.manifest, first.extents
    else:
        manifest, described = whole_of([owner.manifest for owner in owners], path)
        if any((owner.step, owner.record) != (first.step, first.record) for owner in owners):
            refuse("the optimizer ranks have resumed different steps")
        try:
            check_params(manifest, len(described), len(engine.devices.specs))
        except (CSDStoreError, KeyError, TypeError) as e:
            refuse(f"the store of the optimizer ranks: {e}")
    _add_extents(engine, shares, owners, manifest, described)
    steps = np.zeros(len(manifest["params"]), np.float32)
    for share, owner in zip(shares, owners, strict=True):
        owner.check_end()
        steps[share.parts["param"]] = owner.counts
    if not all(np.array_equal(share.counts(steps), o.counts) for share, o in zip(shares, owners, strict=True)):
        refuse("the optimizer ranks have different step counts of a parameter")
    engine.states.go_to(first.step, first.record, steps)
    n_devices, nowhere = len(engine.devices.specs), Region(0, 0, 0, 0)
    contents = Contents(
        path=f"{path} of the optimizer ranks",
        copy=0,
        superblock=Superblock(b"", 0, n_devices, 0, first.step, 0, nowhere, nowhere),
        manifest={**json.loads(json.dumps(manifest)), "extents": _of_manifest(engine.tiles.extents)},
        tiles=np.zeros(0),
        sums=[],
        steps=steps,
        residuals=np.zeros(0),
        record=first.record,
    )
    engine.recovered = [contents] * n_devices


def _of_manifest(extents: Sequence[Extent]) -> list[dict[str, Any]]:
    """Return the extents with the fields of a manifest that a resume reads."""
    return [
        {"sections": [*extent.sections]} | ({"codec": extent.codec} if extent.param_dtype is not None else {})
        for extent in extents
    ]


def _add_extents(
    engine: Engine,
    shares: Sequence[Share],
    owners: Sequence[OfOwner],
    manifest: dict[str, Any],
    described: Sequence[ExtentFields],
) -> None:
    """Add the extents of a store. `manifest`: of the whole model. Raises CSDRankError, CSDStoreError."""
    n_devices = len(engine.devices.specs)
    nowhere = [0] * n_devices, (np.zeros(0), np.zeros(0))  # owners have the slots and checksums
    try:
        check_rules(manifest, [about.sections for about in described])
    except CSDStoreError as e:
        refuse(f"the store of the optimizer ranks: {e}")
    of_tiles = tiles_of([owner.manifest for owner in owners]) if not shares[0].is_whole else None
    for number, about in enumerate(described):
        first_param, first_tile = engine.tiles.n_params, len(engine.tiles)
        if of_tiles is None:
            extent = owners[0].next_extent(first_param, first_tile)
            shares[0].add_whole(extent)
        else:
            numels = [p["numel"] for p in manifest["params"] if p["extent"] == number]
            extent = plan_extent(n_devices=1, **request_of(about, numels, first_param, first_tile)._asdict())
            here = of_tiles[first_tile : first_tile + extent.n_tiles]
            if len(here) < extent.n_tiles:
                refuse("the tiles of the optimizer ranks")
            extent = _take_divided(extent, here, shares, owners)
        engine.states.add(extent, *nowhere)
    if of_tiles is not None and len(of_tiles) > len(engine.tiles):
        refuse("the tiles of the optimizer ranks")


def _take_divided(
    extent: Extent, of_tiles: np.ndarray[Any, Any], shares: Sequence[Share], owners: Sequence[OfOwner]
) -> Extent:
    """Return an extent with its devices, after checks that it is divided among owners as by divide().

    Raises CSDRankError.
    """
    devices, first = np.zeros(extent.n_tiles, np.uint32), 0
    for share, owner, (tiles, parts) in zip(shares, owners, divide(extent, of_tiles, len(shares)), strict=True):
        if len(parts):
            there = owner.next_extent(len(share.parts), len(share.numbers))
            if extent_fields(there) != extent_fields(extent):
                refuse("an extent of the optimizer ranks is not that of the whole")
            if [*there.numels] != parts["elems"].tolist() or there.n_tiles != len(tiles):
                refuse("the optimizer ranks have other parts of parameters")
            devices[tiles - extent.first_tile] = first + there.devices
            share.add(there, tiles, parts)
        first += len(share.names)
    return replace(extent, devices=devices)
