"""`csd-optim bench`: an optimizer step on given devices, beside the same reads and writes without the update."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import bindings, settings
from ..devices.backends import BACKENDS
from ..devices.machine import available_memory, machine, storage, updater
from ..devices.smartssd import find, with_directory
from ..devices.spec import DeviceSpec, shares_of
from ..engine.placing.tuning import ScratchFile, rate
from ..errors import CSDRuntimeError, CSDValueError
from ..optim.adamw import CSDAdam
from ..optim.optimizer import CSDOptimizer
from ..store.layout import round_up
from .io import Tick
from .measure import Memory, Updater, spread

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
TENSOR = 1 << 24  # elements of the largest parameter tensor
WARM_UP = 3  # steps; after them, both slots of every tile have been written
RAW_RUNS = 3  # passes over a device, for each of read, write and mixed
DISK_BYTES = 24  # per parameter and step: three fp32 states, read and written
# Per parameter and step in memory. With 16-bit parameters: three fp32 states read and written, gradient in, parameter
# out. With fp32, the parameter is its own master: it and two states read and written, gradient in. Both make 28.
MEMORY_BYTES = 28
UPDATER_ELEMS = 1 << 24  # far more than fits in the CPU's caches
VERIFIED_STEPS = 10
# Relative, against torch in float64, whose rounding does not count. In each step a value is rounded some five times,
# each time by at most 2⁻²⁴ of its magnitude: a constant or two, products and a sum.
TOLERANCE = VERIFIED_STEPS * 5 * 2.0**-24


def ticks(specs: Sequence[DeviceSpec], steps: int) -> int:
    """Return how often `bench` calls its `tick`."""
    files = sum(s.kind.has_file for s in specs)
    return 1 + 1 + files * (1 + 3) + 1 + WARM_UP + steps


def bench(specs: Sequence[DeviceSpec], params: int, dtype: str, steps: int, tick: Tick) -> dict[str, Any]:
    """Verify a step, then measure it. Creates only unnamed scratch files, in the devices' directories.

    `tick` is called at the beginning of each part with its description. Raises CSDError if there is no room, a device
    fails, or the result is not torch's.
    """
    if any(spec.is_placed for spec in specs):
        raise CSDValueError(
            "'auto' is for training only: name devices with their shares, which `csd-optim plan --place` shows"
        )
    if gpu := next((spec for spec in specs if spec.kind.on_accelerator), None):
        raise CSDValueError(
            f"{gpu} keeps states of parameters on an accelerator, but this command's parameters are in host memory: "
            "time a step of your model instead, or use csd-optim plan --place"
        )
    specs = [with_directory(spec) for spec in specs]
    check_room(specs, params, DTYPES[dtype])
    tick("verifying")
    difference = verify(specs, DTYPES[dtype])
    tick("updater")
    alone = Updater(min(params, UPDATER_ELEMS), DTYPES[dtype])
    alone.rate()
    updater_rates = [alone.rate() for _ in range(max(5, steps))]
    del alone

    devices: list[dict[str, Any]] = [{"device": str(s), "backend": s.backend} for s in specs]
    files: dict[int, ScratchFile] = {}
    memory: Memory | None = None
    try:
        for d, (spec, here) in enumerate(zip(specs, _divided(specs, params), strict=True)):
            if spec.directory is not None:
                tick(f"filling scratch space {d}")
                size = max(64 << 20, round_up(DISK_BYTES * here, spec.block_bytes))
                files[d] = ScratchFile(spec.directory, size, spec.block_bytes)
                files[d].fill()
                devices[d] |= {"storage": storage(spec.directory), "direct_io": files[d].direct}
        for d, file in files.items():
            for kind in ("read", "write", "mixed"):
                tick(f"device {d}, {kind}")
                rates = [rate([file], kind) for _ in range(RAW_RUNS)]
                devices[d][f"{kind}_bytes_per_second"] = spread(rates)
        if any(s.kind.in_memory for s in specs):
            memory = Memory(min(1 << 30, max(64 << 20, 12 * params)))
        tick("making parameters")
        seconds, returned, disk, memory_rates, stats = _steps(
            specs, params, DTYPES[dtype], steps, list(files.values()), memory, tick
        )
    finally:
        for file in files.values():
            file.close()

    moved = stats["flash_read_bytes"] + stats["flash_write_bytes"]
    in_memory = sum(d["params"] for d in stats["devices"] if BACKENDS[d["backend"]].in_memory)
    limits: dict[str, Any] = {}
    if disk:
        limits["disk"] = {
            "bytes_per_second": spread(disk),
            "seconds": spread([moved / r for r in disk]),
        }
    if memory_rates:
        limits["memory"] = {
            "bytes_per_second": spread(memory_rates),
            "seconds": spread([MEMORY_BYTES * in_memory / r for r in memory_rates]),
        }
    for entry, measured in zip(devices, stats["devices"], strict=True):
        entry["params"], entry["p2p"] = measured["params"], measured["p2p"]
        entry["params_per_second"] = spread([measured["params"] / s for s in seconds])
    # Each step is compared with the limit measured right after it: the speed of a shared machine drifts.
    floors = [
        max(moved / d if d else 0.0, MEMORY_BYTES * in_memory / m if m else 0.0)
        for d, m in zip(disk or [0.0] * steps, memory_rates or [0.0] * steps, strict=True)
    ]
    ratios = [f / s for f, s in zip(floors, seconds, strict=True)]
    return {
        "machine": machine(),
        "emulated": any(spec.card and find(spec.card).emulated for spec in specs),
        "updater": updater() | {"params_per_second": spread(updater_rates)},
        "params": params,
        "dtype": dtype,
        "steps": steps,
        "largest_relative_difference": difference,
        "devices": devices,
        "step_seconds": spread(seconds),
        "step_returns_after_seconds": spread(returned),
        "params_per_second": spread([params / s for s in seconds]),
        "bytes_per_param": {
            name: stats[f"{name}_bytes"] / params for name in ("push", "pull", "flash_read", "flash_write")
        },
        "buffer_bytes": stats["buffer_bytes"],
        "limits": limits,
        "ratio_to_limit": spread(ratios) if any(floors) else None,
    }


def _steps(
    specs: Sequence[DeviceSpec],
    params: int,
    dtype: torch.dtype,
    steps: int,
    files: list[ScratchFile],
    memory: Memory | None,
    tick: Tick,
) -> tuple[list[float], list[float], list[float], list[float], dict[str, Any]]:
    """Time steps, each followed by one pass over the disks and one over the memory.

    Returns lists with an entry per step: seconds until all states are written, seconds until step() returned, bytes per
    second of the disks, bytes per second of the memory (the last two empty if there is none); and the last step's
    statistics.
    """
    seconds, returned, disk, in_memory = [], [], [], []
    with make_optimizer(specs, params, dtype) as opt:
        for i in range(WARM_UP + steps):
            tick(f"step {i - WARM_UP + 1} of {steps}" if i >= WARM_UP else "warming up")
            start = time.perf_counter()
            opt.step()
            back = time.perf_counter()
            stats = opt.stats()  # waits until all states are written
            end = time.perf_counter()
            if i < WARM_UP:
                continue
            seconds.append(end - start)
            returned.append(back - start)
            if files:
                disk.append(rate(files, "mixed"))
            if memory:
                in_memory.append(memory.rate(bindings.threads_used()))
    return seconds, returned, disk, in_memory, stats


def make_optimizer(
    specs: Sequence[DeviceSpec],
    params: int,
    dtype: torch.dtype,
    *,
    durable: bool = False,
    topk: float | None = None,
    **options: Any,
) -> CSDAdam:
    """Return a CSDAdam over `params` random elements that have gradients, on scratch space of the devices.

    With `durable`, on ordinary stores there. `options` are CSDAdam's.
    """
    sizes = [min(TENSOR, params - first) for first in range(0, params, TENSOR)]
    tensors = [torch.nn.Parameter(torch.randn(n).to(dtype)) for n in sizes]
    for p in tensors:
        p.grad = torch.randn(p.numel()).to(dtype)
    groups = [{"params": tensors, "topk": topk}]  # as a group's option it applies to every parameter
    with settings.without_options():
        return CSDAdam(groups, devices=[str(s) if durable else scratch(s) for s in specs], **options)


def scratch(spec: DeviceSpec) -> str:
    """Return the user's device string with an unnamed scratch store, so that a store in the directory is not touched.

    Unless the string names a cache, there is none: it might hold all states of a bench, but not those of a model.
    """
    if spec.card:
        return f"{spec}{'&' if '?' in spec.text else '?'}scratch=1"
    if not spec.kind.has_file:
        return str(spec)
    options = spec.text.partition("?")[2] if spec.text.lower().startswith("file:") else ""
    cache = "" if "cache=" in options else "&cache=off"
    return f"file:{spec.directory}?{options}&scratch=1{cache}"


def verify(
    specs: Sequence[DeviceSpec],
    dtype: torch.dtype,
    ours: Callable[..., CSDOptimizer] = CSDAdam,
    theirs: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> float | None:
    """Compare ten steps on these devices with torch's on float64 copies. Returns the largest relative difference.

    Masters and states are compared. Differences are relative to the largest magnitude that an element of the tensor had
    after any step: rounding errors are in proportion to that, even if the sums then cancel each other out. In fp32,
    torch's own result would depend on the instructions that its build uses on this CPU.

    Returns None if a device keeps no state to compare. Raises CSDRuntimeError if the difference exceeds TOLERANCE.
    """
    if not all(s.kind.keeps_state for s in specs):
        return None
    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(n).to(dtype)) for n in (1, 4095, 300_001)]
    copies = [torch.nn.Parameter(p.detach().double()) for p in params]
    magnitudes = [torch.rand(p.shape) + 0.01 for p in params]
    oracle = theirs(copies)
    largest: dict[tuple[int, str], float] = {}
    worst = 0.0

    def expected(q: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        return {**oracle.state[q], "master": q.detach()}

    with settings.without_options():
        opt = ours(params, devices=[scratch(s) for s in specs])
    with opt:
        for _ in range(VERIFIED_STEPS):
            for p, q, magnitude in zip(params, copies, magnitudes, strict=True):
                # An element's gradients differ by sign and a tenth: Lion adds 0.1 of one to at most 0.09 of one before,
                # and takes the sign, which must not depend on rounding.
                p.grad = (magnitude * (1 + torch.rand(p.shape) / 10) * torch.randn(p.shape).sign()).to(dtype)
                q.grad = p.grad.double()
            opt.step()
            oracle.step()
            for i, q in enumerate(copies):
                for key, value in expected(q).items():
                    largest[i, key] = max(largest.get((i, key), 0.0), float(value.abs().max()))
        for i, (p, q) in enumerate(zip(params, copies, strict=True)):
            for key, value in expected(q).items():
                worst = max(worst, float((opt.state[p][key] - value).abs().max()) / largest[i, key])
            if not torch.equal(p, opt.state[p]["master"].to(dtype)):
                raise CSDRuntimeError("a parameter is not its rounded master: nothing is timed; please report this")
    if not worst <= TOLERANCE:
        raise CSDRuntimeError(
            f"the result differs from {type(oracle).__name__}'s by {worst:.1e}: nothing is timed; please report this"
        )
    return worst


def _divided(specs: Sequence[DeviceSpec], params: int) -> list[int]:
    """Return how many of the parameters each device has."""
    shares = shares_of(specs) or [1.0] * len(specs)
    return [math.ceil(params * share / sum(shares)) for share in shares]


def check_room(specs: Sequence[DeviceSpec], params: int, dtype: torch.dtype) -> None:
    """Raise CSDValueError if disks or memory are too small, before anything is created."""
    needs: dict[int, int] = {}
    for spec, here in zip(specs, _divided(specs, params), strict=True):
        if spec.directory is None:
            continue
        if not spec.directory.is_dir():
            raise CSDValueError(f"{spec.directory}: no such directory")
        place = storage(spec.directory)
        file_system = spec.directory.stat().st_dev
        # Half for the store, half for the scratch file that measures the disk.
        needs[file_system] = needs.get(file_system, 64 << 20) + 2 * DISK_BYTES * here + (64 << 20)
        if needs[file_system] > place["free_bytes"]:
            raise CSDValueError(
                f"{spec.directory}: {place['free_bytes'] / 1e9:.1f} GB are free, {params / 1e6:.0f} M parameters need "
                f"{needs[file_system] / 1e9:.1f} GB; try --params {place['free_bytes'] // (3 * DISK_BYTES):.0e}"
            )
    element = dtype.itemsize
    in_memory = sum(12 * n for s, n in zip(specs, _divided(specs, params), strict=True) if s.kind.in_memory)
    need = 2 * element * params + in_memory + (12 + 2 * element) * min(params, UPDATER_ELEMS) + (1 << 30)
    if need > available_memory():
        raise CSDValueError(
            f"{available_memory() / 1e9:.1f} GB of memory are available, {params / 1e6:.0f} M parameters need "
            f"{need / 1e9:.1f} GB here; try fewer --params"
        )
