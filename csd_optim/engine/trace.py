"""Writes a timeline of the devices' work: CSD_OPTIM_TRACE=step.json, for https://ui.perfetto.dev or chrome://tracing.

The file is a JSON array of events (the "Trace Event Format"). An optimizer appears as a process. Its tracks are its
steps; forward and backward, with overlap(); and the reads, updates and writes of each device and of the accelerator.
The file is written step by step; both viewers also accept the incomplete file that a killed process leaves behind.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..bindings import EVENT_KINDS
from ..errors import CSDOSError

log: logging.Logger = logging.getLogger("csd_optim")

Span = tuple[str, float, float]  # name, begin, end (seconds)
TrackGroup = tuple[int, int]  # (device, kind of event), or one of the two constants below
STEPS, MODEL = (-1, 1), (-1, 2)
_numbers = itertools.count(1)


class Trace:
    """The timeline of one engine. `devices`: their names. Raises CSDOSError if the file cannot be created.

    If `path` exists already, for example from another optimizer, the ids of process and optimizer are appended to the
    name.
    """

    def __init__(self, path: str, devices: Sequence[str]) -> None:
        self._process = os.getpid() * 1000 + next(_numbers)  # the "process" that viewers show this optimizer as
        self._devices = devices
        self._ends: dict[TrackGroup, list[float]] = {}  # per group: the end of each track's last event
        self._tracks: dict[tuple[TrackGroup, int], int] = {}  # the number of each track
        self.path: Path = Path(path) if not Path(path).exists() else Path(f"{path}.{self._process}")
        try:
            self._file = self.path.open("x", encoding="utf-8")
        except OSError as e:
            raise CSDOSError(e.errno, f"CSD_OPTIM_TRACE: cannot make {self.path}: {e.strerror}") from e
        log.info("timeline of each step: %s", self.path)
        self._file.write("[\n")

    def step(
        self,
        name: str,
        begin: float,
        end: float,
        events: np.ndarray[Any, Any],
        model: list[Span],
        accelerated: list[Span],
    ) -> None:
        """Write one step, from begin to end (seconds of CLOCK_MONOTONIC), and its events (dtype EVENT).

        `model`: forward and backward spans of that time; `accelerated`: updates on the accelerator, the last device.
        Both lists are emptied.
        """
        self._write(STEPS, name, begin, end)
        while model:
            self._write(MODEL, *model.pop(0))
        while accelerated:
            self._write((len(self._devices) - 1, EVENT_KINDS.index("update")), *accelerated.pop(0))
        for device, tile, kind, _, *times in np.sort(events, order="begin").tolist():
            self._write((device, kind), f"tile {tile}", *times)
        self._file.flush()

    def _write(self, group: TrackGroup, name: str, begin: float, end: float) -> None:
        # Events that overlap in time go to separate tracks of their group.
        ends = self._ends.setdefault(group, [])
        lane = next((i for i, last in enumerate(ends) if last <= begin), len(ends))
        ends[lane:] = [end, *ends[lane + 1 :]]
        if (group, lane) not in self._tracks:
            self._tracks[group, lane] = len(self._tracks)
            device, kind = group
            track = {STEPS: "step", MODEL: "model"}.get(group)
            track = track or f"device {device} ({self._devices[device]}): {EVENT_KINDS[kind]} {lane + 1}"
            self._event(ph="M", name="thread_name", tid=self._tracks[group, lane], args={"name": track})
            order = 1000 * (1 + len(EVENT_KINDS) * device + kind) + lane
            self._event(ph="M", name="thread_sort_index", tid=self._tracks[group, lane], args={"sort_index": order})
        times = {"ts": round(1e6 * begin, 3), "dur": round(1e6 * (end - begin), 3)}
        self._event(ph="X", name=name, tid=self._tracks[group, lane], **times)

    def _event(self, **event: Any) -> None:
        self._file.write(json.dumps({"pid": self._process, **event}) + ",\n")

    def close(self) -> None:
        self._event(ph="M", name="process_name", args={"name": f"csd_optim, process {os.getpid()}"})
        self._file.seek(self._file.tell() - 2)
        self._file.write("\n]\n")
        self._file.close()
