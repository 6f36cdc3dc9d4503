"""The dict that CSDAdam.stats() returns, and what it says about the last step as a whole."""

from __future__ import annotations

import time
from typing import Any

from ..devices.energy import EnergyMeter
from ..devices.spec import days_left
from ..step.steps import Steps

KINDS = ("read", "update", "write")
NOTHING_DONE = ("params", "nonfinite_grads", "seconds", "commit_bytes")


class LastStep:
    """How long the last step() took, what energy, and whether it was skipped."""

    def __init__(self) -> None:
        self.seconds: float = 0.0
        self.skipped: bool = False
        self.energy: EnergyMeter = EnergyMeter()
        self._start: float | None = None  # when it began

    def begin(self) -> float:
        """Note that a step begins. Returns the seconds since the step before began; 0 if this is the first one."""
        before, self._start = self._start, time.perf_counter()
        self.energy.begin()
        return 0.0 if before is None else self._start - before

    def end(self) -> None:
        """Note that the step is done."""
        assert self._start is not None
        self.seconds = time.perf_counter() - self._start
        self.energy.end()


def describe(
    steps: Steps, counters: list[dict[str, Any]], last_step: LastStep, *, overlap: dict[str, Any] | None
) -> dict[str, Any]:
    """Build the result of stats(). `counters`: the engine's, one dict per device; `overlap`: those of the mode."""
    engine, accelerated, trained = steps.engine, steps.accelerated, steps.trained_seconds
    n = int(steps.has_updated)  # 0 if the step was skipped or had no gradients
    devices = [
        {
            "device": d["device"],
            "backend": d["backend"],
            "direct_io": d["direct_io"],
            "p2p": d["p2p"],
            "huge_pages": d.get("huge_pages"),
            "numa_node": d.get("numa_node"),
            "block_bytes": d.get("block_bytes"),
            "depth": d.get("depth"),
            "share": d["share"],
            "push_bytes": n * d["push_bytes"],
            "pull_bytes": n * d["pull_bytes"],
            "flash_read_bytes": n * d["read_bytes"],
            "flash_write_bytes": n * d["write_bytes"],
            "written_bytes": d["total_write_bytes"],
            "free_bytes": d["free_bytes"],
            "days_left": days_left(spec.tbw_bytes, d["total_write_bytes"], trained) if spec.tbw_bytes else None,
            "params": n * d["updated"],
            "nonfinite_grads": n * d["nonfinite"],
            "buffer_bytes": d["buffer_bytes"],
            "seconds": {kind: n * d[f"{kind}_seconds"] for kind in KINDS},
        }
        for spec, d in zip(engine.devices.specs, counters, strict=False)
    ]
    link, flash = ("push_bytes", "pull_bytes"), ("flash_read_bytes", "flash_write_bytes", "written_bytes")
    if engine.accelerator:
        spec, nothing = engine.accelerator.spec, dict.fromkeys(("push_bytes", "pull_bytes", "flash_read_bytes"), 0)
        done = accelerated.counters() if n else dict.fromkeys(NOTHING_DONE, 0)
        seconds_by_kind = {"read": 0.0, "update": done.pop("seconds"), "write": 0.0}
        about = {"device": str(spec), "backend": spec.backend, "share": spec.share or 1.0, **done, **nothing}
        about |= {
            "flash_write_bytes": 0,
            "written_bytes": 0,
            "free_bytes": 0,
            "buffer_bytes": 0,
            "state_bytes": engine.accelerator.nbytes,
            "kernels": engine.accelerator.kernels,
        }
        unknown = ("direct_io", "p2p", "huge_pages", "numa_node", "block_bytes", "depth", "days_left")
        # If the accelerator is the only device that the user named, the engine's other device is empty: leave it out.
        beside = [] if engine.accelerator.alone else devices
        devices = [{**about, **dict.fromkeys(unknown), "seconds": seconds_by_kind}, *beside]
    totals: dict[str, Any] = {
        name: sum(d[name] for d in devices) for name in (*link, *flash, "params", "nonfinite_grads", "buffer_bytes")
    }
    totals["buffer_bytes"] += steps.resources.buffer_bytes
    totals["residual_bytes"] = sum(residual.nbytes for residual in engine.states.residuals.values())
    totals["gathered_bytes"] = n * steps.resources.gather.received_bytes
    totals["skipped"] = last_step.skipped
    totals["energy"] = last_step.energy.describe()
    if steps.ns_dtypes:
        totals["ns_dtype"] = " and ".join(steps.ns_dtypes)
    if steps.grad_norm is not None:
        totals["grad_norm"] = steps.grad_norm
    if overlap is not None:
        totals["overlap"] = overlap
    placement = engine.devices.placement
    if placement and (placement.extents or (placement.accelerator and placement.accelerator.params)):
        totals["placement"] = placement.describe()
    busiest = {kind: max((d["seconds"][kind] for d in devices), default=0.0) for kind in KINDS}
    return {**totals, "seconds": {**busiest, "step": last_step.seconds}, "devices": devices}
