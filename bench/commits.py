"""What commits cost a step where flushes are slow: in a row of steps, and after a step that was undone.

    python -m bench.commits                   half a minute
    python -m bench.commits --quick           a few steps, to see that it works

Each flush of a store takes --flush seconds longer, as on a drive without a protected cache. Steps follow one another at
once, so that each waits for what the commit before it must have done: the worst case, as a forward usually hides it.
There are one process, and two ranks over gloo, whose commits are rounds. A step is undone as its end fails on rank 1,
after it was complete, and being committed, on rank 0; the time of the next step() is that on rank 0.

First the parameters are compared with those of a training in memory, to the last bit. Times are medians (minimum to
maximum) of --runs steps, each beside the sum of the times of its own flushes, as if nothing overlapped.

--json prints schema csd_optim.bench.commits/1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.ranks import answers_of
from bench.step import machine_facts, say, span
from csd_optim import CSDAdam, CSDError, CSDOSError
from csd_optim.bindings import Native

Row = dict[str, Any]
SIZE = 2  # ranks
WARM_UP = 3  # steps


class Flushes:
    """Makes every flush of a file take longer, on whatever thread, and counts them."""

    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0
        self._lock, flush = threading.Lock(), os.fdatasync

        def slow(fd: int) -> None:
            with self._lock:
                self.count += 1
            flush(fd)
            time.sleep(self.seconds)

        os.fdatasync = slow


class Training:
    """A model that trains with gradients that depend only on the step."""

    def __init__(self, devices: Any, params: int, *, overlap: bool = False) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(params // 4)) for _ in range(4)])
        self.opt = CSDAdam(self.model.parameters(), devices=devices, sharded=False)
        if overlap:
            self.opt.overlap(self.model)
        self.done = 0

    def step(self) -> float:
        """Return the seconds of one step()."""
        generator = torch.Generator().manual_seed(self.done)
        for p in self.model:
            p.grad = torch.randn(p.shape, generator=generator)
        began = time.perf_counter()
        self.opt.step()
        taken = time.perf_counter() - began
        self.done += 1
        return taken

    def until(self, step: int) -> Training:
        while self.done < step:
            self.step()
        return self

    def image(self) -> bytes:
        self.opt.wait()
        return b"".join(p.detach().numpy().tobytes() for p in self.model)


def in_a_row(training: Training, flushes: Flushes, arguments: argparse.Namespace) -> Row:
    """Time steps without pauses between them."""
    training.until(WARM_UP)
    flushes.seconds = arguments.flush
    training.step()
    before, began = flushes.count, time.perf_counter()
    for _ in range(arguments.runs):
        training.step()
    seconds = (time.perf_counter() - began) / arguments.runs
    per_step = (flushes.count - before) / arguments.runs
    flushes.seconds = 0.0
    training.opt.synchronize()
    return {"seconds": [seconds], "flushes": per_step}


def one_by_one(training: Training, flushes: Flushes, arguments: argparse.Namespace, prepare: Callable[[], None]) -> Row:
    """Time single steps, each after prepare()."""
    seconds, counts = [], []
    for _ in range(arguments.runs):
        prepare()
        flushes.seconds, before = arguments.flush, flushes.count
        seconds.append(training.step())
        counts.append(flushes.count - before)
        flushes.seconds = 0.0
        training.opt.synchronize()
    return {"seconds": seconds, "flushes": statistics.median(counts)}


def fails_on_rank_1(training: Training, rank: int) -> None:
    """Take a step whose end fails on rank 1, and which is undone on both."""
    finish = Native.finish

    def fails(native: Native, keep: bool, ending: object = None) -> None:
        finish(native, keep and rank == 0)
        if keep and rank == 1:
            raise CSDOSError(5, "unplugged")

    training.opt.synchronize()  # no step before it is under way
    done = training.done
    Native.finish = fails  # type: ignore[method-assign]
    try:
        with contextlib.suppress(CSDError):
            training.step()
            time.sleep(0.05)  # rank 0 has begun to commit it
            training.opt.synchronize()
    finally:
        Native.finish = finish  # type: ignore[method-assign]
    training.opt.zero_grad()
    training.done = done


def alone(_: int, place: Path, arguments: argparse.Namespace) -> list[Row]:
    torch.set_num_threads(1)
    flushes, rows = Flushes(), []
    training = Training([place / "alone"], arguments.params)
    for _ in range(arguments.turns):
        rows.append({"what": "one process, steps in a row", **in_a_row(training, flushes, arguments)})
    check(training, arguments)
    training.opt.close()
    return rows


def together(rank: int, place: Path, arguments: argparse.Namespace) -> list[Row]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=SIZE)
    flushes, rows = Flushes(), []
    training = Training([place / f"rank-{rank}"], arguments.params)
    for _ in range(arguments.turns):
        rows.append({"what": "2 ranks, steps in a row", **in_a_row(training, flushes, arguments)})
    check(training, arguments)
    training.opt.close()
    overlapped = Training([place / f"overlapped-{rank}"], arguments.params, overlap=True).until(WARM_UP)
    undone = one_by_one(overlapped, flushes, arguments, lambda: fails_on_rank_1(overlapped, rank))
    rows.append({"what": "2 ranks, overlap(), the step after one that was undone", **undone})
    usual = one_by_one(overlapped, flushes, arguments, lambda: None)
    rows.append({"what": "2 ranks, overlap(), a step after one that was kept", **usual})
    check(overlapped, arguments)
    overlapped.opt.close()
    dist.destroy_process_group()
    return rows


def check(training: Training, arguments: argparse.Namespace) -> None:
    """Raise SystemExit unless the parameters are those of a training in memory that nothing has disturbed."""
    if training.image() != Training("ram:", arguments.params).until(training.done).image():
        raise SystemExit("the parameters are not those of a training in memory")


def main() -> None:
    arguments = parse()
    facts = {**machine_facts(), "load": os.getloadavg()[0], "flush": arguments.flush, "params": arguments.params}
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
        for size, run in ((1, alone), (SIZE, together)):
            for row in answers_of(size, run, Path(place), arguments)()[0]:
                known = rows.setdefault(row["what"], {"what": row["what"], "seconds": [], "flushes": row["flushes"]})
                known["seconds"] += row["seconds"]
    for row in rows.values():
        ms, flushes = [1e3 * s for s in row["seconds"]], row["flushes"]
        limit = 1e3 * flushes * arguments.flush
        text = f"{row['what']}: {span(ms, 1)} ms, {flushes:.1f} flushes, {limit:.0f} ms one after another"
        say(text + (f": {statistics.median(ms) / limit:.2f} of that" if limit else ""))
    if arguments.json:
        json.dump({"schema": "csd_optim.bench.commits/1", "machine": facts, "rows": [*rows.values()]}, sys.stdout)
        print()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=6_000_000, help="number of parameters")
    parser.add_argument("--flush", type=float, default=0.02, help="seconds that a flush takes longer (default 0.02)")
    parser.add_argument("--runs", type=int, default=7, help="steps of each kind, at least 5")
    parser.add_argument("--turns", type=int, default=5, help="rows of so many steps")
    parser.add_argument("--directory", type=Path, help="on the disk to be measured; default: that of temporary files")
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs, arguments.turns, arguments.params = 5, 1, 1 << 16
    return arguments


if __name__ == "__main__":
    main()
