"""What the collectives of a step cost on many ranks, simulated on two. From the project's root:

    python -m bench.collectives               about two minutes
    python -m bench.collectives --quick       a few steps, to see that it works

Two processes on this machine train with gloo. Each collective of csd_optim is made to take longer by ceil(log2(N))
times a latency (--latency), as a tree over N ranks would if every message took that long; N = 2 has no delay. So this
shows how the time of step() grows with the number of collectives, and nothing of bandwidth, or of slow ranks.

Gradients are given and small, states in scratch files. Ways take turns: step() alone, with max_grad_norm, and
overlap(), whose vote behind the program is delayed as well. First each way is trained without delay, and its parameters
are compared with those of a process alone (with max_grad_norm, which is high, all gradients pass unclipped), and
afterwards those of both ranks. Nothing is reported unless all are equal, to the last bit.

--json prints schema csd_optim.bench.collectives/1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.ranks import answers_of
from bench.step import machine_facts, say, span
from csd_optim import CSDAdam
from csd_optim.distributed.ranks import Ranks

Row = dict[str, Any]
SIZE = 2  # processes
WAYS: dict[str, Row] = {"step()": {}, "max_grad_norm": {"max_grad_norm": 1e9}, "overlap()": {}}
WARM_UP = 3  # steps: states are created, groups are made


def main() -> None:
    arguments = parse()
    facts = {**machine_facts(), "load": os.getloadavg()[0], "latency": arguments.latency}
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    with tempfile.TemporaryDirectory() as place:
        rows = measured(Path(place), arguments)
    for row in rows:
        ms = [1e3 * s for s in row["seconds"]]
        say(f"{row['way']}, {row['ranks']} ranks, collectives: {row['collectives']}: {span(ms, 2)} ms, {len(ms)} steps")
    if arguments.json:
        json.dump({"schema": "csd_optim.bench.collectives/1", "machine": facts, "rows": rows}, sys.stdout, indent=1)
        print()


def measured(place: Path, arguments: argparse.Namespace) -> list[Row]:
    """Return a row for each way and number of ranks. Raises SystemExit if parameters differ."""
    results = answers_of(SIZE, run, place / "meet", arguments)
    wanted = {way: Way(way, arguments.params) for way in WAYS}
    for way in wanted.values():
        way.train(WARM_UP)
    answers = results()
    for way in WAYS:
        if any(answer["early"][way] != wanted[way].image() for answer in answers):
            raise SystemExit(f"{way}: the parameters are not those of a process alone")
        if answers[0]["late"][way] != answers[1]["late"][way]:
            raise SystemExit(f"{way}: the parameters of the ranks differ")
    rows: list[Row] = answers[0]["rows"]
    return rows


class Way:
    """A model that trains in one way, with gradients that depend only on the step."""

    def __init__(self, way: str, params: int) -> None:
        width = math.isqrt(params // 4)
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
        self.opt = CSDAdam(self.model.parameters(), devices="file:", **WAYS[way])
        if way == "overlap()":
            self.opt.overlap(self.model)
        self.steps = 0

    def step(self) -> float:
        """Return the seconds of one step()."""
        generator = torch.Generator().manual_seed(self.steps)
        self.steps += 1
        for p in self.model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        began = time.perf_counter()
        self.opt.step()
        taken = time.perf_counter() - began
        self.opt.zero_grad()
        self.opt.wait()
        return taken

    def train(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]

    def image(self) -> bytes:
        self.opt.synchronize()
        return b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())


class Delay:
    """Makes every collective of csd_optim take longer, on whatever thread, and counts those of this one."""

    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0
        gather, exchange = Ranks.gather, Ranks.exchange

        def delayed_exchange(ranks: Ranks, rows: torch.Tensor) -> list[Any]:
            self.count += threading.current_thread() is threading.main_thread()
            out = exchange(ranks, rows)
            time.sleep(self.seconds)
            return out

        def delayed(ranks: Ranks, *values: float, dtype: torch.dtype = torch.int64) -> list[tuple[Any, ...]]:
            self.count += threading.current_thread() is threading.main_thread()
            out = gather(ranks, *values, dtype=dtype)
            time.sleep(self.seconds)
            return out

        Ranks.gather, Ranks.exchange = delayed, delayed_exchange  # type: ignore[method-assign]


def run(rank: int, meeting: Path, arguments: argparse.Namespace) -> Row:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=SIZE)
    delay = Delay()
    ways = {way: Way(way, arguments.params) for way in WAYS}
    for each in ways.values():
        each.train(WARM_UP)
    early = {name: way.image() for name, way in ways.items()}
    seconds: dict[tuple[str, int], list[float]] = {}
    collectives: dict[str, int] = {}
    for _ in range(arguments.runs):
        for name, way in ways.items():
            for n in arguments.ranks:
                delay.seconds = 0.0 if n == SIZE else math.ceil(math.log2(n)) * arguments.latency
                way.step()
                before = delay.count
                taken = way.step()
                collectives[name] = delay.count - before
                seconds.setdefault((name, n), []).append(taken)
    delay.seconds = 0.0
    rows = [
        {"way": way, "ranks": n, "collectives": collectives[way], "params": arguments.params, "seconds": taken}
        for (way, n), taken in seconds.items()
    ]
    late = {name: way.image() for name, way in ways.items()}
    for each in ways.values():
        each.opt.close()
    dist.destroy_process_group()
    return {"early": early, "late": late, "rows": rows}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=1 << 16, help="number of parameters (default 65536)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64], help="numbers of ranks to simulate")
    parser.add_argument("--latency", type=float, default=5e-4, help="seconds of a message (default 0.0005)")
    parser.add_argument("--runs", type=int, default=21, help="timed steps of each kind, at least 5")
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs = 5
    return arguments


if __name__ == "__main__":
    main()
