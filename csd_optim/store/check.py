"""Plausibility checks of a store's manifest and record. Right checksums do not suffice, as anyone can compute them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import lt
from typing import Any

from ..bindings import MIN_GRAIN
from ..errors import CSDStoreError
from .sections import FP32, PAGE, PARAM_DTYPES, SECTIONS, codec_supports

UNNAMED_RULE = "adamw"  # the update rule of a store that names none
ADAMWS = (SECTIONS[:3], SECTIONS)  # the sections that states of AdamW can have
RESERVED_NAMES = ["residual", "step"]  # reserved names, which no section may have
DTYPES = {"float32", "float16", "bfloat16", "complex64"}
MAX_SIZE = 1 << 60  # limit of all numbers of elements or bytes, so that sums of a few fit in 64 bits
MAX_REGION_BYTES = 1 << 31  # of a manifest or table
# Tiles times devices of an extent with unequal shares: bounds the memory that devices_of() takes. Real stores have
# fewer tiles, since tiles are mappings (layout.MAX_MAPPINGS).
MAX_TILES = 1 << 26


def require(condition: object, message: str) -> None:
    if not condition:
        raise CSDStoreError(
            f"manifest and slot table do not belong together, or the manifest contradicts itself: {message}"
        )


def is_int(value: object, minimum: int, maximum: int = MAX_SIZE) -> bool:
    return type(value) is int and minimum <= value <= maximum


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def is_name(value: object) -> bool:
    return type(value) is str and value.isidentifier()


def is_ints(value: object, minimum: int) -> bool:
    return type(value) is list and len(value) <= 64 and all(is_int(n, minimum) for n in value)


def rule_named(manifest: Mapping[str, Any], p: Mapping[str, Any]) -> str:
    """Return the name of the update rule of a parameter that a manifest describes."""
    name: str = p.get("rule", manifest.get("rule", UNNAMED_RULE))
    return name


def check_rules(manifest: Mapping[str, Any], sections: Sequence[Sequence[str]]) -> None:
    """Check that all parameters of an extent have the same rule, and that an extent of AdamW has AdamW's sections.

    `manifest`: with checked parameters. `sections`: of each extent. Raises CSDStoreError.
    """
    found: dict[int, str] = {}
    for p in manifest["params"]:
        name = rule_named(manifest, p)
        require(found.setdefault(p["extent"], name) == name, f"{p['name']} has another rule than others of its extent")
    for e, name in found.items():
        require(name != UNNAMED_RULE or tuple(sections[e]) in ADAMWS, f"extent {e} has the sections {sections[e]!r}")


def check_extent(extent: Any, devices: int, rule: str | None) -> None:
    """Check the description of an extent. Raises CSDStoreError.

    `rule`: name of the store's update rule; None for AdamW. The sections of other rules are not checked here.
    """
    require(type(extent) is dict, "an extent is no object")
    elems, tiles, slots, sections = (extent.get(key) for key in ("tile_elems", "tiles", "slots", "sections"))
    require(is_int(elems, MIN_GRAIN, 1 << 31) and elems % MIN_GRAIN == 0, f"a tile has {elems!r} elements")
    require(is_int(tiles, 0, 1 << 31), f"an extent has {tiles!r} tiles")
    require(is_int(slots, 1, 2), f"a tile has {slots!r} slots")
    if rule is None:
        valid = type(sections) is list and tuple(sections) in ADAMWS
    else:
        valid = type(sections) is list and 1 <= len(sections) <= 4 and all(is_name(s) for s in sections)
        valid = (
            valid
            and sections[0] == SECTIONS[0]
            and len({*sections, *RESERVED_NAMES}) == len(sections) + len(RESERVED_NAMES)
        )
    require(valid, f"a tile has the sections {sections!r}")
    if {"codec", "param_dtype"} & {*extent}:
        codec, dtype = extent.get("codec"), extent.get("param_dtype")
        valid = type(codec) is str and codec != FP32 and type(dtype) is str
        require(
            valid and codec_supports(codec, sections, PARAM_DTYPES.get(dtype)),
            f"codes {codec!r} of parameters {dtype!r}",
        )
        require(elems % 4096 == 0 and "sum_elems" in extent, f"a tile of codes has {elems!r} elements")
    if "sum_elems" in extent:
        require(is_int(extent["sum_elems"], MIN_GRAIN, 1 << 31), f"a checksum covers {extent['sum_elems']!r} elements")
    if "shares" in extent:
        shares = extent["shares"]
        valid = type(shares) is list and len(shares) == devices and all(is_number(s) and s > 0 for s in shares)
        require(valid, f"the devices have the shares {shares!r}")
    if "tile_numbers" in extent:
        numbers = extent["tile_numbers"]
        valid = type(numbers) is list and all(is_int(n, 0, 1 << 31) for n in numbers)
        require(valid and all(map(lt, numbers, numbers[1:])), "tile numbers are not integers, or out of order")
    offset = extent.get("file_offset")
    require(is_int(offset, 2 * PAGE) and offset % PAGE == 0, f"an extent begins at byte {offset!r}")
    if "freed" in extent:
        freed = extent["freed"]
        valid = type(freed) is list and all(is_int(j, 0, tiles - 1) for j in freed)
        require(valid and all(map(lt, freed, freed[1:])), "freed tiles are not numbers of tiles, or out of order")


def check_param(p: Any, devices: int, *, is_waiting: bool = False) -> tuple[int, int] | None:
    """Check the description of a parameter. Raises CSDStoreError.

    Returns (begin, end) of the residual in its device's file, or None. `is_waiting`: the parameter has no states yet.
    """
    require(type(p) is dict and type(p.get("name")) is str, "a parameter has no name")
    name = p["name"]
    require(not any("\ud800" <= c <= "\udfff" for c in name), "a parameter's name is no text")
    of = f" of parameter {name}"
    require(is_int(p.get("group"), -1) and is_int(p.get("position"), -1), f"group or position{of}")
    require(type(p.get("dtype")) is str, f"dtype{of}")
    require("rule" not in p or is_name(p["rule"]), f"rule{of}")
    if "of" in p and p["of"] is not None:
        whole = p["of"]
        valid = type(whole) is dict and is_ints(whole.get("shape"), 0) and is_ints(whole.get("first"), 0)
        require(valid and len(whole["shape"]) == len(whole["first"]), f"the tensor that it is a part{of}")
    if is_waiting:
        require(p.get("shape") is None or is_ints(p["shape"], 0), f"shape{of}")
        return None
    shape, stride = p.get("shape"), p.get("stride")
    require(p["dtype"] in DTYPES, f"dtype {p['dtype']!r}{of}")
    require(is_ints(shape, 0) and is_ints(stride, 0) and len(shape) == len(stride), f"shape or stride{of}")
    elems = math.prod(shape)
    last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    require(elems == 0 or last < elems, f"stride {stride}{of}")
    numel = elems * (2 if p["dtype"] == "complex64" else 1)
    require(is_int(p.get("numel"), 0) and p["numel"] == numel, f"numel {p.get('numel')!r}{of}")
    require(is_int(p.get("start"), 0) and is_int(p.get("extent"), 0), f"place{of}")
    if "residual" not in p:
        return None
    residual = p["residual"]
    require(type(residual) is dict and {*residual} == {"device", "base", "room"}, f"residual{of}")
    require(is_int(residual["device"], 0, devices - 1), f"device of the residual{of}")
    base, room = residual["base"], residual["room"]
    require(is_int(base, 2 * PAGE) and is_int(room, 0) and base % PAGE == room % PAGE == 0, f"residual{of}")
    require(room >= 2 * numel, f"room of the residual{of}")
    return base, base + 2 * room


def check_origin(origin: Any) -> None:
    """Check a manifest's `origin`, the stores from which its store was made. Raises CSDStoreError."""
    valid = type(origin) is dict and {*origin} == {"store_id", "round", "step", "world_size", "sequences"}
    store_id = origin["store_id"] if valid else None
    valid = valid and type(store_id) is str and len(store_id) == 32 and {*store_id} <= {*"0123456789abcdef"}
    valid = valid and all(is_int(origin[key], 0) for key in ("round", "step")) and is_int(origin["world_size"], 1)
    sequences = origin["sequences"] if valid else None
    valid = type(sequences) is list and len(sequences) == origin["world_size"] and all(is_int(n, 1) for n in sequences)
    require(valid, f"the origin {origin!r}")


def check_record(record: dict[str, Any], rule: str | None) -> None:
    """Check the fields of a Record. `rule`: name of the store's update rule, or None. Raises CSDStoreError."""
    for key in ("groups", "given"):
        require(type(record[key]) is list, f"{key} of the record")
        for group in record[key]:
            require(type(group) is dict, f"{key} of the record")
            if group.get("rule", rule or UNNAMED_RULE) != UNNAMED_RULE:  # only the other rule could check them
                continue
            numbers = [group.get(name) for name in ("lr", "eps", "weight_decay")]
            betas = group.get("betas")
            require(type(betas) is list and len(betas) == 2, f"betas {betas!r}")
            # As in Python, True stands for 1, and 1 for True. A tensor of one element used to be stored as a list.
            numbers = [n[0] if type(n) is list and len(n) == 1 else n for n in numbers]
            numbers += [*betas, group.get("amsgrad"), group.get("maximize")]
            require(all(isinstance(n, (int, float)) for n in numbers), f"hyperparameters in {key}")
    require(is_number(record["seconds"]) and record["seconds"] >= 0, f"seconds {record['seconds']!r}")
    require(is_int(record["written_bytes"], 0), f"written_bytes {record['written_bytes']!r}")
