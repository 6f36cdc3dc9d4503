"""Reports each step to `csd-optim top`, in the background of the next forward and without waiting for anything."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..store.file import StoreFile
from ..store.report import ReportFile

if TYPE_CHECKING:
    from .engine import Engine


class Reports:
    """The report files of one engine, one for each device with a durable store."""

    def __init__(self) -> None:
        self._files: dict[int, ReportFile] = {}
        self._step = -1  # the step that was reported last
        self._ended = 0.0  # when that step ended

    def report(
        self,
        engine: Engine,
        stores: Mapping[int, StoreFile],
        stats: list[dict[str, Any]],
        *,
        store_id: str,
        training_seconds: float,
        rank: int,
        world_size: int,
    ) -> None:
        """Report the last step, whose states must all be on their devices, unless it was reported already.

        `stats`: as of Engine.stats(). `training_seconds`: of the stores' life, up to that step's begin.
        """
        if engine.step == self._step:
            return
        began, ended = engine.step_span
        common = {
            "store_id": store_id,
            "step": engine.step,
            "at": time.time() - (time.perf_counter() - ended),
            "step_seconds": ended - began,
            "iteration_seconds": ended - self._ended if 0 < self._ended < ended else None,
            "training_seconds": training_seconds,
            "devices": len(stats),
            "rank": rank,
            "world_size": world_size,
            **engine.served,
        }
        self._step, self._ended = engine.step, ended
        for d, store in stores.items():
            counts, spec = stats[d], engine.devices.specs[d]
            file = self._files.setdefault(d, ReportFile(store.path.parent))
            seconds = {kind: counts[f"{kind}_seconds"] for kind in ("read", "update", "write")}
            device = {
                "device": d,
                "backend": counts["backend"],
                "params": counts["updated"],
                "flash_read_bytes": counts["read_bytes"],
                "flash_write_bytes": counts["write_bytes"],
                "seconds": seconds,
                "written_bytes": counts["total_write_bytes"],
                "tbw_bytes": spec.tbw_bytes,
            }
            file.write({**common, **device})

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
