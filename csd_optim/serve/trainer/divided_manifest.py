"""The manifests of a trainer's several owners: each describes the owner's parts, and the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...engine.tiles import Tiles
from ...errors import CSDStoreError
from ...store.format import DIVIDED
from ..messages import extent_fields, refuse
from ..requests import DividedFields, ExtentFields
from ..wire.schema import msgspec
from .shares import Share

_KEPT = ("name", "group", "position", "dtype", "rule")  # of a parameter's entry


def part_manifest(manifest: dict[str, Any], share: Share, tiles: Tiles) -> dict[str, Any]:
    """Return the manifest of an owner. `manifest`, `tiles`: the trainer's."""
    extents = [extent_fields(e) for e in tiles.extents]
    places = [(k, start) for k, extent in enumerate(share.tiles.extents) for start in extent.starts]
    params = []
    for (extent, start), (row, first, n) in zip(places, share.parts.tolist(), strict=True):
        whole = manifest["params"][row]
        about = {name: whole[name] for name in _KEPT if name in whole}
        elems = n // 2 if whole["dtype"] == "complex64" else n
        about |= {"shape": [elems], "stride": [1], "of": None, "part_of": row, "first": first}
        params.append(about | {"extent": extent, "start": start, "numel": n})
    own = [manifest["params"][int(share.parts["param"][e.first_param])]["extent"] for e in share.tiles.extents]
    divided = {"params": manifest["params"], "extents": extents, "extents_here": own, "tiles": share.numbers.tolist()}
    divided |= {"rank": share.rank, "world_size": share.world_size}
    return {**manifest, "params": params, DIVIDED: divided}


def whole_of(manifests: Sequence[dict[str, Any]], path: str) -> tuple[dict[str, Any], list[ExtentFields]]:
    """Return the trainer's manifest and its entries about extents, from the manifests of all owners.

    Raises CSDRankError, and CSDStoreError if the stores were not divided in this way.
    """
    if not all(DIVIDED in manifest for manifest in manifests):
        raise CSDStoreError(
            f"{path} of the optimizer ranks are stores of several trainers, and this is one: start as many as then"
        )
    said = [(manifest[DIVIDED]["params"], _divided(manifest).extents) for manifest in manifests]
    others = [(manifest.get("rule"), manifest["waiting"]) for manifest in manifests]
    if any(a != said[0] for a in said) or any(b != others[0] for b in others):
        raise CSDStoreError(f"{path} of the optimizer ranks are not stores of one trainer")
    params, extents = said[0]
    return {**{k: v for k, v in manifests[0].items() if k != DIVIDED}, "params": params}, extents


def tiles_of(manifests: Sequence[dict[str, Any]]) -> np.ndarray[Any, Any]:
    """Return, for each of the trainer's tiles, the index of its owner: intp. Raises CSDRankError."""
    listed = [_divided(manifest).tiles for manifest in manifests]
    n = sum(map(len, listed))
    if sorted(number for numbers in listed for number in numbers) != [*range(n)]:
        refuse("the tiles of the optimizer ranks")
    owners = np.zeros(n, np.intp)
    for k, numbers in enumerate(listed):
        if numbers != sorted(numbers):
            refuse("the tiles of an optimizer rank")
        owners[numbers] = k
    return owners


def _divided(manifest: dict[str, Any]) -> DividedFields:
    """Return what an owner's manifest says about the whole model. Raises CSDRankError."""
    try:
        return msgspec.convert(manifest[DIVIDED], DividedFields)
    except msgspec.ValidationError as e:
        refuse(f"the store of the optimizer ranks: {e}")
