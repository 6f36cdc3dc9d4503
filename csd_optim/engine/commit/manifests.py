"""The manifests of an engine's stores: their parameters, extents with their offsets, and format features."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ...distributed.ranks import Ranks, RanksElsewhere
from ...store.format import NAMED_FEATURES, features_of, has_rules, tile_entry, version_of
from ...store.layout import Extent
from ...store.reader import params_in_tile
from .residuals import Room


class Manifests:
    """The manifests, one per device, which differ in the extents.

    `rooms`, an argument of several methods: by parameter, where the existing residuals are stored.
    """

    def __init__(self, n_devices: int, ranks: Ranks | RanksElsewhere | None) -> None:
        self.written: bool = True  # the stores have the current manifests, or will with the commit in flight
        self.extents_on: list[list[dict[str, Any]]] = [[] for _ in range(n_devices)]  # per device
        self.tiles_bytes: list[int] = [0] * n_devices  # per device: size of the tiles' entries in the table
        self._params: dict[str, Any] = {}  # see describe()
        self._has_rules = False
        self._first_tiles: list[int] = []  # of each extent
        self._rank_fields = {"rank": ranks.rank, "world_size": ranks.size} if ranks else {}

    def __bool__(self) -> bool:
        """Return whether describe() or adopt() has set the parameters."""
        return bool(self._params)

    def describe(self, params: dict[str, Any]) -> None:
        """Set the description of the parameters, as params.manifest makes it; the same for all devices.

        The `origin` of an existing description is kept.
        """
        kept = {key: value for key, value in self._params.items() if key == "origin"}
        self._params, self._has_rules, self.written = {**kept, **params}, has_rules(params), False

    def adopt(self, manifest: dict[str, Any]) -> None:
        """Continue from the manifest of a store. The caller adds its extents."""
        self._params = {k: v for k, v in manifest.items() if k not in ("extents", "tiles", "features")}
        self._params["params"] = [{k: v for k, v in p.items() if k != "residual"} for p in manifest["params"]]
        self._has_rules = has_rules(manifest)

    def add(self, extent: Extent, offsets: list[int]) -> None:
        """Add an extent. `offsets`: where it begins on each device (bytes)."""
        dtype = extent.param_dtype
        self._first_tiles.append(extent.first_tile)
        for device, offset in enumerate(offsets):
            about: dict[str, Any] = {
                "tile_elems": extent.tile_elems,
                "tiles": extent.tiles_of(device),
                "slots": extent.slots,
                "sections": [*extent.sections],
                "file_offset": offset,
                **({"codec": extent.codec, "param_dtype": str(dtype).removeprefix("torch.")} if dtype else {}),
                **({"shares": [*extent.shares]} if extent.shares else {}),
                **({"sum_elems": extent.sum_elems} if extent.sum_elems else {}),
                **({"tile_numbers": np.flatnonzero(extent.devices == device).tolist()} if extent.numbered else {}),
            }
            self.extents_on[device].append(about)
            self.tiles_bytes[device] += tile_entry(about).itemsize * about["tiles"]

    def free(self, extent: int, device: int, numbers: Iterable[int]) -> None:
        """Note which tiles of an extent on a device were freed. `numbers`: counted among the extent's tiles there."""
        for extents in self.extents_on:
            extents[extent].setdefault("freed", [])
        about = self.extents_on[device][extent]
        about["freed"] = sorted({*about["freed"], *numbers})

    def version(self, rooms: Mapping[int, Room]) -> int:
        """Return the version of the store format that has all features in use."""
        return version_of(self._features(0, rooms))

    def _features(self, device: int, rooms: Mapping[int, Room]) -> set[str]:
        named = {key: key in self._params for key in ("rule", "origin", "divided")}
        return features_of(self.extents_on[device], residuals=bool(rooms), rules=self._has_rules, **named)

    def pack(self, device: int, rooms: Mapping[int, Room]) -> bytes:
        return json.dumps(self._manifest_of(device, rooms)).encode()

    def _manifest_of(self, device: int, rooms: Mapping[int, Room]) -> dict[str, Any]:
        extents = self.extents_on[device]
        params = [
            {**p, "residual": rooms[row]._asdict()} if row in rooms else p
            for row, p in enumerate(self._params["params"])
        ]
        tiles = sum(e["tiles"] for e in extents)
        manifest = {**self._params, **self._rank_fields, "params": params, "extents": extents, "tiles": tiles}
        features = self._features(device, rooms)
        return {**manifest, "features": sorted(features)} if version_of(features) >= NAMED_FEATURES else manifest

    def params_in_tile(self, device: int, tile: int) -> str:
        """Return the names of the parameters in a tile, for messages; "" if they are unknown."""
        if not self:
            return ""
        extent = bisect.bisect_right(self._first_tiles, tile) - 1
        return ", ".join(params_in_tile(self._manifest_of(device, {}), extent, tile - self._first_tiles[extent]))
