"""Presents the stores of a trainer's several optimizer ranks as stores of one process on all their devices.

Each optimizer rank has some of the trainer's tiles, and its store describes these as a separate model, whose parameters
are parts of the trainer's parameters, each within one tile. The field `divided` of its manifest describes the whole
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import CSDStoreError
from .check import MAX_SIZE, is_int, require
from .file import StoreFile
from .format import DIVIDED, PAGE, Contents, all_tiles, checked_manifest, features_of, has_rules, tiles_on
from .recovery import last_commits, stores_by_rank


def joined_commit(stores: Sequence[StoreFile]) -> list[Contents]:
    """Return the last commit that all optimizer ranks of one trainer have, as the contents of their `stores`.

    Empty unless these are stores of optimizer ranks that divide a trainer's states. Raises CSDStoreError.
    """
    if not all(store.recovered and DIVIDED in store.recovered[0].manifest for store in stores):
        return []
    trainers = joined(last_commits(stores_by_rank(stores)))
    if len(trainers) > 1:
        raise CSDStoreError(f"{stores[0].path} and the others are stores of {len(trainers)} trainers: export them")
    by_path = {contents.path: contents for contents in trainers[0]}
    return [by_path[str(store.path)] for store in stores]


def joined(ranks: list[list[Contents]]) -> list[list[Contents]]:
    """Return the stores of each trainer, by device. `ranks`: all ranks' stores.

    Stores that are not divided stay unchanged.

    Raises CSDStoreError if stores of optimizer ranks do not belong together, or one is missing.
    """
    first = ranks[0][0]
    by_trainer: dict[int, list[list[Contents]]] = {}
    for stores in ranks:
        divided = stores[0].manifest.get(DIVIDED)
        if (divided is None) != (DIVIDED not in first.manifest):
            raise CSDStoreError(f"{first.path} and {stores[0].path} are not stores of the same trainers")
        if divided is None:
            return ranks
        if type(divided) is not dict or not is_int(divided.get("rank"), 0):
            raise CSDStoreError(f"{stores[0].path}: its manifest does not say whose states it has")
        by_trainer.setdefault(divided["rank"], []).append(stores)
    if len(ranks) != first.world_size:
        raise CSDStoreError(
            f"{first.path} is the store of rank {first.rank} of {first.world_size}, each of which has some tiles of "
            "a trainer's states: name the stores of all"
        )
    try:
        return [_of_trainer(shares) for _, shares in sorted(by_trainer.items())]
    except CSDStoreError as e:
        raise CSDStoreError(f"{first.path}, and those that belong to it: {e}") from None
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as e:
        raise CSDStoreError(f"{first.path}: the manifests of the ranks do not belong together ({e!r})") from e


def _of_trainer(shares: list[list[Contents]]) -> list[Contents]:
    """Return the contents of a trainer's stores. `shares`: by optimizer rank and device."""
    wholes = [stores[0].manifest[DIVIDED] for stores in shares]
    first = wholes[0]
    same = all((w["params"], w["extents"]) == (first["params"], first["extents"]) for w in wholes)
    require(same, "they describe different models")
    n_tiles = all_tiles({"params": first["params"], "extents": first["extents"]})
    listed = sorted(number for whole in wholes for number in whole["tiles"])
    require(sum(n_tiles) == len(listed), "they have other tiles than they say")
    require(listed == [*range(len(listed))], "they do not have each tile once")
    steps = np.zeros(len(first["params"]), shares[0][0].steps.dtype)
    templates: dict[int, dict[str, Any]] = {}  # by the trainer's extent: as in some owner's manifest
    for stores in shares:
        manifest = stores[0].manifest
        steps[[p["part_of"] for p in manifest["params"]]] = stores[0].steps
        templates |= dict(zip(manifest[DIVIDED]["extents_here"], manifest["extents"], strict=True))
    begins = np.cumsum([0, *n_tiles]).tolist()
    devices = [contents for stores in shares for contents in stores]
    return [
        replace(
            contents,
            superblock=replace(contents.superblock, device=d, devices=len(devices)),
            manifest=_manifest(contents, templates, begins, d, len(devices)),
            sums=_sums(contents, len(templates)),
            steps=steps,
        )
        for d, contents in enumerate(devices)
    ]


def _manifest(
    contents: Contents, templates: dict[int, dict[str, Any]], begins: Sequence[int], device: int, devices: int
) -> dict[str, Any]:
    """Return the manifest of one of the trainer's devices.

    `begins`: the first tile of each extent, over all extents.
    """
    manifest, block = contents.manifest, contents.superblock
    divided, first = manifest[DIVIDED], 0
    here: dict[int, dict[str, Any]] = {}
    for e, extent, n in zip(divided["extents_here"], manifest["extents"], all_tiles(manifest), strict=True):
        numbers = divided["tiles"][first : first + n]
        on_device = [numbers[k] - begins[e] for k in tiles_on(extent, n, block.device, block.devices)]
        here[e] = {**extent, "tile_numbers": on_device}
        first += n
    require(first == len(divided["tiles"]), "a store has other tiles than it says")
    nothing = {"tiles": 0, "tile_numbers": [], "file_offset": 2 * PAGE}
    absent = {e: {**extent, **nothing} for e, extent in templates.items() if e not in here}
    extents = [extent for _, extent in sorted({**here, **absent}.items())]
    for extent, about in zip(extents, divided["extents"], strict=True):
        extent.pop("shares", None)
        same = (extent["tile_elems"], extent["sections"]) == (about["tile_elems"], about["sections"])
        require(same, "an extent of the whole is another one than its parts")
    of_ranks = {"rank": divided["rank"], "world_size": divided["world_size"]} if divided["world_size"] > 1 else {}
    kept = {k: v for k, v in manifest.items() if k not in (DIVIDED, "rank", "world_size")}
    whole = {**kept, **of_ranks, "params": divided["params"], "extents": extents}
    features = features_of(
        extents, residuals=False, rule="rule" in whole, rules=has_rules(whole), origin="origin" in whole, divided=False
    )
    return checked_manifest(
        {**whole, "features": sorted(features)}, replace(block, device=device, devices=devices), MAX_SIZE
    )


def _sums(contents: Contents, n_extents: int) -> list[np.ndarray[Any, Any]]:
    """Return the checksums of each of the trainer's extents."""
    here = dict(zip(contents.manifest[DIVIDED]["extents_here"], contents.sums, strict=True))
    return [here.get(e, np.zeros((0, 0, 0), np.uint32)) for e in range(n_extents)]
