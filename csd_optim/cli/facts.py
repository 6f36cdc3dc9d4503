"""Facts about devices and stores, as plain values: what the commands print and what `--json` contains."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import settings
from ..accelerator import accelerator_type
from ..devices import machine
from ..devices import smartssd as cards
from ..devices.backends import DEFAULT_BLOCK
from ..devices.spec import AUTO, DeviceSpec, days_left, parse_devices
from ..devices.xclbin import Xclbin, find_kernels
from ..engine.placing.on_accelerator import OnAccelerator
from ..engine.placing.placing import Placement, rooms
from ..engine.placing.tuning import ScratchFile, rate, tune
from ..errors import CSDError, CSDOSError, CSDStoreError, CSDValueError
from ..planning import advice
from ..rates import UNPACED
from ..store.check import rule_named
from ..store.file import lock_owner
from ..store.format import CLEAN, FILE_NAME, RESIDUAL_BYTES, UNDER_WAY, read_contents, rows_with_residual, store_file
from ..store.layout import MEMORY_STATE_BYTES, STORE_BYTES, Extent, plan_extent
from ..store.sections import FP32, PARAM_DTYPES, codec_of, elem_bytes, sections_of, size_of
from . import measure
from .io import message, progress

P2P_SHARE = 0.6  # P2P below this share of the drive's rate is suspected to take a detour
PROBE_BYTES = 1 << 30  # scratch space of a speed check; less on a drive that cannot fill it in the time


def specs_of(names: list[str] | None) -> list[DeviceSpec]:
    """Return the named devices, by default those of CSD_OPTIM_DEVICES or else the current directory."""
    return parse_devices(names or (None if settings.devices() else "."))


def describe_states(extents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how a store keeps its states: for each kind of extent the states' names, codec and bytes per parameter."""
    found = []
    for extent in extents:
        how = {"names": extent["sections"], "codec": extent.get("codec", FP32), "of": extent.get("param_dtype")}
        each = elem_bytes(how["names"], how["codec"], PARAM_DTYPES.get(how["of"]))
        if (how := how | {"bytes_per_param": each}) not in found:
            found.append(how)
    return found


def describe_device(spec: DeviceSpec, xrt_facts: Mapping[str, cards.Facts]) -> dict[str, Any]:
    """Return what is known of a device. `xrt_facts`: of ask_pyxrt(). `problem` in the result: why it cannot be used."""
    entry: dict[str, Any] = {"device": str(spec), "backend": spec.backend}
    if spec.card:
        try:
            card = cards.find(spec.card, xrt_facts=xrt_facts)
            facts = asdict(card) | {"emulated": card.emulated}
            entry["card"] = json.loads(json.dumps(facts, default=str))  # paths as text
            spec = replace(spec, directory=card.store_directory(spec.directory))
            entry["xclbin"] = describe_xclbin(find_kernels(spec.xclbin))
        except CSDError as e:
            return entry | {"problem": message(e)}
    if spec.kind.on_accelerator and not accelerator_type():
        return entry | {"problem": f"torch {torch.__version__} has no accelerator here"}
    if spec.kind.in_memory:
        entry["free_bytes"] = machine.available_memory()
        entry["room_for_params"] = entry["free_bytes"] // MEMORY_STATE_BYTES  # as the only device
    if spec.directory is None:
        return entry
    directory = spec.directory
    entry["exists"] = directory.is_dir()
    # CSDAdam makes a directory that is not there, but not its parents.
    entry["directory"] = str((directory if entry["exists"] else directory.parent).resolve())
    try:
        if not entry["exists"] and (directory.exists() or not directory.parent.is_dir()):
            raise CSDValueError(f"no such directory: {directory}")
        entry["storage"] = machine.storage(Path(entry["directory"]))
        entry["room_for_params"] = entry["storage"]["free_bytes"] // STORE_BYTES
        entry["store"] = describe_store_there(directory / FILE_NAME) if entry["exists"] and spec.durable else None
        with ScratchFile(Path(entry["directory"]), 0, 4096) as scratch:
            entry["direct_io"] = scratch.direct
    except (CSDError, OSError) as e:
        entry["problem"] = message(e)
    return entry


def describe_xclbin(program: Xclbin) -> dict[str, Any]:
    """Return facts about the program that a step would load on the card."""
    facts = {"file": str(program.path), "uuid": str(program.uuid), "platform": program.platform, "mode": program.mode}
    return facts | {"kernels": list(program.kernels)}


def measure_device(spec: DeviceSpec, entry: dict[str, Any]) -> dict[str, Any]:
    """Return what `--probe` adds to a device's facts: how fast it is."""
    directory, free = Path(entry["directory"]), entry["storage"]["free_bytes"]
    speed = check_speed(directory, free)
    if not spec.card:
        return {"speed": speed}
    try:
        rates = measure.card_rates(replace(spec, directory=directory), free)
    except CSDError as e:
        return {"speed": speed, "problem": message(e)}
    added: dict[str, Any] = {"speed": speed, "card_speed": rates}
    # P2P to the card should be no slower than the host's reads of the same drive.
    if not rates["drive_to_card"] and spec.p2p != "0":
        added["problem" if spec.p2p == "1" else "warning"] = cards.no_p2p(entry["card"]["p2p"])
    slow = rates["drive_to_card"] < P2P_SHARE * speed["read_bytes_per_second"]
    if rates["drive_to_card"] and slow and not entry["card"]["emulated"]:
        added["warning"] = (
            "P2P is much slower than the drive: it goes through the host or the IOMMU (docs/smartssd.md, step 1)"
        )
    return added


def measured_request(request: advice.PlanRequest, names: list[str]) -> advice.PlanRequest:
    """Return the request with the measured rates of the named devices in place of assumed ones. Raises CSDError."""
    specs = parse_devices(names)
    entries = [describe_device(spec, {}) for spec in specs]
    with progress(len(specs)) as tick:
        for spec, entry in zip(specs, entries, strict=True):
            tick(f"measuring {spec}")
            if "storage" in entry and "problem" not in entry:
                entry |= measure_device(spec, entry)
    device = advice.measured(entries)
    places = [entry["storage"]["mounted_at"] for entry in entries]
    ratings = [spec.tbw_bytes for spec in specs if spec.tbw_bytes]
    return replace(
        request,
        devices=len(specs),
        on="drive" if device.on_host else "csd",
        drive=device if device.on_host else request.drive,
        csd=request.csd if device.on_host else device,
        tbw=request.tbw or (min(ratings) if ratings else None),
        free=min(entry["storage"]["free_bytes"] / places.count(entry["storage"]["mounted_at"]) for entry in entries),
        measured=True,
    )


def planned_placement(
    names: list[str] | None, params: int, dtype: torch.dtype, state_dtype: str, sections: Sequence[str]
) -> dict[str, Any]:
    """Return the placement that `auto` would choose for `params` parameters, after measuring devices, CPU and link.

    The result is that of Placement.describe(), with `rooms`, the bytes that each device has room for, and
    `drives_alone`, the seconds of a step on the drives only; None if there are only drives, no devices, or too little
    room. Raises CSDError.
    """
    named = parse_devices([AUTO, *(names or settings.devices())])
    gpu = next((s for s in named if s.kind.on_accelerator), None)
    specs = [s for s in named if s is not gpu]
    places = [s.directory and (s.directory if s.directory.is_dir() else s.directory.parent) for s in specs]
    if missing := next((s for s, place in zip(specs, places, strict=True) if place and not place.is_dir()), None):
        raise CSDValueError(f"{missing}: no such directory")
    tried = {d: place for d, place in enumerate(places) if place and specs[d].pace == UNPACED}
    tuned = dict(zip(tried, tune([*tried.values()]), strict=True)) if tried else {}

    def placed(chosen: dict[int, DeviceSpec], gpu: DeviceSpec | None = None) -> dict[str, Any]:
        there = rooms([*chosen.values()], [places[d] for d in chosen])
        rates = {i: tuned[d].bytes_per_second for i, d in enumerate(chosen) if d in tuned}
        placement = Placement([*chosen.values()], rates, there)
        param_dtype = None if state_dtype == FP32 else dtype
        codec = codec_of(state_dtype, sections)
        how: dict[str, Any] = {"sections": sections, "codec": codec, "param_dtype": param_dtype}
        left = params

        def plan(shares: Sequence[float] | None = None) -> Extent:
            return plan_extent([left], len(chosen), shares=shares, **how)

        if gpu:
            placement.accelerator = OnAccelerator(gpu, [*chosen.values()])
            left = on_accelerator = round(params * placement.accelerator_fraction(plan(), dtype.itemsize))
            placement.accelerator.params = on_accelerator
            if left and any(spec.durable for spec in chosen.values()):  # durable devices keep a copy
                shares = placement.shares(plan(), is_copied=True)
                placement.record(placement.divide(plan(shares), is_copied=True), is_copied=True)
            left = params - on_accelerator
            there.insert(0, gpu.room_bytes or 0)
        if left:
            placement.record(placement.divide(plan(placement.shares(plan()))))
        return placement.describe() | {"rooms": there}

    found = placed(dict(enumerate(specs)), gpu)
    drives = {d: replace(spec, cache_bytes=0) for d, spec in enumerate(specs) if spec.directory}
    alone = None
    if drives and (len(drives) < len(named) or found["cache_bytes"]):
        with contextlib.suppress(CSDOSError):
            alone = placed(drives)["seconds"]
    return found | {"drives_alone": alone}


def describe_store_there(file: Path) -> dict[str, Any] | None:
    """Return a summary of the store in a device's directory, None if there is none."""
    if not file.exists():
        return None
    owner = lock_owner(file.stat())
    try:
        block = read_contents(file).superblock
    except CSDStoreError as e:
        return {"owner": owner, "problem": str(e)}
    return {
        "owner": owner,
        "step": block.step,
        "device": block.device,
        "devices": block.devices,
        "clean": bool(block.flags & CLEAN),
        "torn": bool(block.flags & UNDER_WAY),
        "bytes": file.stat().st_size,
    }


def check_speed(directory: Path, free: int) -> dict[str, float]:
    """Return bytes per second of direct reads, writes and both at once, on scratch space. Takes about four seconds."""
    with ScratchFile(directory, min(PROBE_BYTES, free // 4), DEFAULT_BLOCK) as scratch:
        scratch.fill(seconds=1.5)
        return {f"{kind}_bytes_per_second": rate([scratch], kind, 1.0) for kind in ("read", "write", "mixed")}


def describe_store(path: Path, tbw_bytes: int | None = None) -> dict[str, Any]:
    """Return all that `inspect` shows. `tbw_bytes`: the drive's rating. Raises CSDStoreError, CSDOSError."""
    try:
        contents = read_contents(path)
    except OSError as e:
        described = "there is no store" if isinstance(e, FileNotFoundError) else "cannot read the store"
        raise CSDOSError(e.errno, f"{described} in {path}: {e.strerror}") from e
    block, manifest = contents.superblock, contents.manifest
    file = store_file(path)
    stat = file.stat()
    present = [p for p in manifest["params"] if p["group"] >= 0]  # the others have left, or are in no group now
    total = sum(p["numel"] for p in present)
    shares = next((e["shares"] for e in manifest["extents"] if "shares" in e), [1.0] * block.devices)
    share = shares[block.device] / sum(shares)  # of all parameters, between 0 and 1
    named = contents.are_named()
    slots = contents.tiles["slot"][named]
    slot_bytes = np.array([size_of(sections_of(extent)) for extent, *_ in contents.slots()], np.int64)
    rules: dict[str, int] = {}  # elements by rule
    for p in present:
        rules[rule_named(manifest, p)] = rules.get(rule_named(manifest, p), 0) + p["numel"]
    rows = rows_with_residual(manifest, block.device)
    residual_bytes = [RESIDUAL_BYTES * manifest["params"][row]["numel"] for row in rows]
    return {
        "file": str(file),
        "format": block.version,
        "store_id": block.store_id.hex(),
        "device": block.device,
        "devices": block.devices,
        "rank": contents.rank,
        "world_size": contents.world_size,
        "share": share,
        "origin": contents.origin,
        "step": block.step,
        "clean": bool(block.flags & CLEAN),
        "torn": bool(block.flags & UNDER_WAY),
        "owner": lock_owner(stat),
        "total_params": total,
        "file_bytes": stat.st_size,
        "allocated_bytes": 512 * stat.st_blocks,
        "free_bytes": sum(size for _, size in contents.unused()),
        "bytes_per_param": 512 * stat.st_blocks / max(1.0, total * share),
        "tiles": {
            "count": len(slots),
            "in_slot": [int((slots == s).sum()) for s in range(2)],
            "with_checksum": int(contents.tiles["summed"].sum()),
        },
        "rules": rules,
        "states": describe_states(manifest["extents"]),
        "residuals": {"count": len(residual_bytes), "bytes": sum(residual_bytes)},
        # Bytes that a step writes if every parameter has a gradient.
        "step_bytes": int(slot_bytes[named].sum()) + sum(residual_bytes),
        "written_bytes": contents.record.written_bytes,
        "training_seconds": contents.record.seconds,
        "tbw_bytes": tbw_bytes,
        "days_left": days_left(tbw_bytes, contents.record.written_bytes, contents.record.seconds)
        if tbw_bytes
        else None,
        "extents": manifest["extents"],
        "groups": contents.record.groups,
        "params": [
            {k: p[k] for k in ("name", "shape", "dtype", "group", "numel")}
            | {"rule": rule_named(manifest, p), "step": float(step)}
            for p, step in zip(manifest["params"], contents.steps, strict=True)
        ],
    }
