"""Reports each step to `csd-optim top`, in the background of the next forward, without waiting."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ...distributed.ranks import Ranks, RanksElsewhere
from ...store.file import StoreFile
from ...store.report import ReportFile
from ..states import States


class Reports:
    """The report files of one engine, one for each device with a durable store."""

    def __init__(self) -> None:
        self._files: dict[int, ReportFile] = {}
        self._step = -1  # the step that was reported last
        self._ended = 0.0  # when that step ended

    def report(
        self,
        states: States,
        stores: Mapping[int, StoreFile],
        stats: list[dict[str, Any]],
        *,
        store_id: str,
        training_seconds: float,
        ranks: Ranks | RanksElsewhere | None,
    ) -> None:
        """Report the last step unless that is done. All its states must be on the devices.

        `stats`: from States.stats(). `training_seconds`: over the stores' lifetime, until the step began.
        """
        if states.step == self._step:
            return
        began, ended = states.timeline.began, states.timeline.ended
        common = {
            "store_id": store_id,
            "step": states.step,
            "at": time.time() - (time.perf_counter() - ended),
            "step_seconds": ended - began,
            "iteration_seconds": ended - self._ended if 0 < self._ended < ended else None,
            "training_seconds": training_seconds,
            "devices": len(stats),
            "rank": ranks.rank if ranks else 0,
            "world_size": ranks.size if ranks else 1,
        }
        self._step, self._ended = states.step, ended
        for d, store in stores.items():
            counts, spec = stats[d], states.devices.specs[d]
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
