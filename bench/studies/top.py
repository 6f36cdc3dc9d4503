"""The cost of `csd-optim top` for the training it watches. From the project's root:

    python -m bench.studies.top
    python -m bench.studies.top --quick         to see that it works

It times steps of a model so small that only the fixed costs of a step count. Each step is durable before the next one
begins. Three ways take turns:

    silent      without reports: Reports.report() is removed, which a real training never does
    told        as always: each step writes a report to a file beside each store
    watched     the same while `csd-optim top` looks ten times a second

It reports the seconds of a step, wall and CPU, as medians with quartiles; the ratio of each turn to the silent one next
to it; and the time of Reports.report() by itself. --json prints schema csd_optim.bench.top/1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.step import machine_facts, say
from csd_optim import CSDAdam
from csd_optim.devices import machine
from csd_optim.engine.commit.reports import Reports

WAYS = ("silent", "told", "watched")


def main() -> None:
    arguments = parse()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    facts = {**machine_facts(), "storage": machine.storage(arguments.directory)}
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    told: list[float] = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        devices = [Path(directory, f"csd{i}") for i in range(arguments.devices)]
        p = torch.nn.Parameter(torch.ones(1000))
        with CSDAdam([p], devices=devices) as opt:
            turn(opt, p, arguments.steps)
            for _ in range(arguments.turns):
                for way in WAYS:
                    with watching(way, devices):
                        wall, process = turn(opt, p, arguments.steps)
                    seconds[way].append(wall)
                    cpu[way].append(process)
            with mock.patch.object(Reports, "report", timed(Reports.report, told)):
                turn(opt, p, arguments.steps)
    rows = [
        {
            "way": way,
            "seconds": seconds[way],
            "cpu_seconds": cpu[way],
            "ratio_to_silent": [a / b for a, b in zip(seconds[way], seconds["silent"], strict=True)],
        }
        for way in WAYS
    ]
    for row in rows:
        say(f"{row['way']:8} {spread(row['seconds'], 1e6)} us a step, {spread(row['cpu_seconds'], 1e6)} of CPU time, ")
        say(f"         {spread(row['ratio_to_silent'], 1)} times the silent one")
    say(f"Reports.report(), on {arguments.devices} devices: {spread(told, 1e6)} us, beside the next forward")
    if arguments.json:
        print(json.dumps({"schema": "csd_optim.bench.top/1", "machine": facts, "rows": rows, "tell_seconds": told}))


class watching:
    """A context that sets up one of the three ways for a turn."""

    def __init__(self, way: str, devices: list[Path]) -> None:
        command = [sys.executable, "-m", "csd_optim", "top", *map(str, devices), "--json", "--interval", "0.1"]
        self._command = command if way == "watched" else None
        self._silent = mock.patch.object(Reports, "report", return_value=None) if way == "silent" else None

    def __enter__(self) -> None:
        if self._silent:
            self._silent.start()
        if self._command:
            self._looks = subprocess.Popen(self._command, stdout=subprocess.PIPE)
            assert self._looks.stdout
            self._looks.stdout.readline()  # wait until `top` has begun to look

    def __exit__(self, *_: object) -> None:
        if self._silent:
            self._silent.stop()
        if self._command:
            self._looks.kill()
            self._looks.communicate()


def turn(opt: CSDAdam, p: torch.nn.Parameter, steps: int) -> tuple[float, float]:
    """Return the seconds of a step, wall and CPU."""
    p.grad = torch.ones_like(p)
    began = time.perf_counter(), time.process_time()
    for _ in range(steps):
        opt.step()
        opt.synchronize()
    return (time.perf_counter() - began[0]) / steps, (time.process_time() - began[1]) / steps


def timed(function: Callable[..., None], seconds: list[float]) -> Callable[..., None]:
    def call(*arguments: Any, **named: Any) -> None:
        began = time.thread_time()
        function(*arguments, **named)
        seconds.append(time.thread_time() - began)

    return call


def spread(values: list[float], scale: float) -> str:
    low, median, high = (scale * q for q in statistics.quantiles(values, n=4))
    digits = 3 if scale == 1 else 0
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="of a turn")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="where the stores go")
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.turns = 3, 2
    return arguments


if __name__ == "__main__":
    main()
