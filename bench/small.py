"""Steps of small models, where a step is all overhead, beside torch's AdamW. From the project's root:

    python -m bench.small                     about three minutes
    python -m bench.small --quick             a few steps, to see that it works
    python -m bench.small --models scalar     one model; --ours file: one place of the states
    python -m bench.small --tell bench/results/FIGURES.json docs/performance.md    writes the table of these figures

    scalar        one parameter with one element, as the temperature of soft actor-critic
    actor-critic  12 tensors, two networks of three layers
    1000 tensors  of 64 elements
    GAN           two optimizers, each of 8 tensors, which step by turns: a step is one of each
    2 ranks       the actor-critic on two processes over gloo, sharded among them or not (sharded=False)

Gradients are given; they lie at other addresses in each step, as after zero_grad(). States are in scratch files
(`file:`), in memory (`ram:`), or in a named directory, where each step is committed. torch's AdamW runs beside them
with foreach=True and fused=True, and, on two ranks, one collective: all_to_all of half the parameters. Rows of steps of
each take turns in one run. A time is that of step() alone, divided by the steps in the row; on two ranks, that of the
slower one. CPU time is that of all threads of a process until everything is written, less the time in which the bench
hands out gradients; on two ranks, the mean. torch computes on one thread.

First each model trains a few steps everywhere. Nothing is timed unless the parameters are the same to the last bit
wherever CSDAdam keeps the states, and those of torch up to rounding.

--json prints schema csd_optim.bench.small/1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.ranks import answers_of
from bench.step import machine_facts, say, span
from bench.tables import put
from csd_optim import CSDAdam
from csd_optim.cli.benchmark import TOLERANCE, VERIFIED_STEPS
from csd_optim.devices import machine

Row = dict[str, Any]
Shapes = list[tuple[int, ...]]


def layers(*widths: int) -> Shapes:
    """Return the shapes of the weights and biases of linear layers between these widths."""
    return [shape for n, m in itertools.pairwise(widths) for shape in ((m, n), (m,))]


ACTOR_CRITIC = layers(64, 80, 80, 8) + layers(64, 80, 80, 1)
MODELS: dict[str, list[Shapes]] = {  # the parameters of each optimizer
    "scalar": [[()]],
    "actor-critic": [ACTOR_CRITIC],
    "1000 tensors": [[(64,)] * 1000],
    "GAN": [layers(32, 64, 64, 64, 100), layers(100, 64, 64, 64, 1)],
    "2 ranks": [ACTOR_CRITIC],
}
PLACES = ("file:", "ram:", "directory")
TORCH: dict[str, dict[str, Any]] = {"AdamW, foreach": {"foreach": True}, "AdamW, fused": {"fused": True}}
BEGIN, END = "<!-- begin: bench.small -->\n", "<!-- end: bench.small -->\n"
COLLECTIVE = "one collective"
SIZE = 2  # ranks
GRADIENTS = 2  # sets of gradients, which take turns
ROWS_OF = {"1000 tensors": 10, "directory": 4}  # so many times fewer steps in a row, as they take longer
ATOL = 1e-6  # of elements near zero, where rounding to fp32 is no longer relative to the element


class Contender:
    """A model with its optimizers: torch's, or CSDAdam with the states in one place."""

    def __init__(self, model: str, make: Callable[[list[torch.nn.Parameter]], Any]) -> None:
        generator = torch.Generator().manual_seed(0)

        def tensors() -> list[list[torch.Tensor]]:
            return [[torch.randn(shape, generator=generator) for shape in shapes] for shapes in MODELS[model]]

        self.params = [[torch.nn.Parameter(p) for p in of_one] for of_one in tensors()]
        self.grads = [tensors() for _ in range(GRADIENTS)]
        self.opts = [make(params) for params in self.params]
        self.steps = 0

    def row(self, steps: int) -> tuple[float, float]:
        """Take steps; return the seconds of step(), and of CPU time, of each."""
        held = given = 0.0
        cpu = time.process_time()
        for _ in range(steps):
            grads = self.grads[self.steps % GRADIENTS]
            self.steps += 1
            for opt, params, of_one in zip(self.opts, self.params, grads, strict=True):
                began = time.perf_counter()
                for p, g in zip(params, of_one, strict=True):
                    p.grad = g
                ready = time.perf_counter()
                opt.step()
                held += time.perf_counter() - ready
                given += ready - began
        for opt in self.opts:
            if isinstance(opt, CSDAdam):
                opt.stats()  # waits until all states are written
                opt.synchronize()  # and committed
        return held / steps, max(0.0, time.process_time() - cpu - given) / steps

    def image(self) -> list[torch.Tensor]:
        return [p.detach().clone() for params in self.params for p in params]

    def close(self) -> None:
        for opt in self.opts:
            if isinstance(opt, CSDAdam):
                opt.close()


class Collective:
    """The exchange of half of the parameters between two ranks."""

    def __init__(self, model: str) -> None:
        n = sum(torch.Size(shape).numel() for shapes in MODELS[model] for shape in shapes) // SIZE
        self.mine, self.theirs = torch.zeros(SIZE * n), torch.zeros(SIZE * n)

    def row(self, steps: int) -> tuple[float, float]:
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            dist.all_to_all_single(self.theirs, self.mine)
        return (time.perf_counter() - began) / steps, (time.process_time() - cpu) / steps

    def close(self) -> None: ...


def contenders(model: str, place: Path, arguments: argparse.Namespace) -> dict[str, Contender]:
    """Make torch's and our contenders for a model. `place`: a directory of this process, for named devices."""

    def of_torch(options: dict[str, Any]) -> Contender:
        return Contender(model, lambda params: torch.optim.AdamW(params, **options))

    def ours(name: str, **options: Any) -> Contender:
        def make(params: list[torch.nn.Parameter]) -> CSDAdam:
            devices = {"file:": f"file:{arguments.directory}?scratch=1", "ram:": "ram:"}.get(name)
            return CSDAdam(params, devices=devices or tempfile.mkdtemp(dir=place), **options)

        return Contender(model, make)

    made = {name: of_torch(options) for name, options in TORCH.items()}
    for name in arguments.ours:
        if model == "2 ranks":
            made[f"{name}, sharded"] = ours(name, sharded=True)
            made[f"{name}, sharded=False"] = ours(name, sharded=False)
        else:
            made[name] = ours(name)
    return made


def verify(model: str, made: dict[str, Contender]) -> float:
    """Train all contenders a few steps. Return the largest difference from torch, of what rounding would explain.

    Raises SystemExit if parameters differ where CSDAdam has its states elsewhere, or from torch's by more than that.
    """
    for contender in made.values():
        contender.row(VERIFIED_STEPS)
    images = {name: contender.image() for name, contender in made.items()}
    reference = images[next(iter(TORCH))]
    largest, one = 0.0, None
    for name, image in images.items():
        if name in TORCH:
            continue
        one = one or image
        if not all(map(torch.equal, image, one)):
            raise SystemExit(f"{model}: the parameters with {name} are not those elsewhere: nothing is timed")
        for p, q in zip(image, reference, strict=True):
            largest = max(largest, float(((p - q).abs() / (ATOL + TOLERANCE * q.abs())).max()))
    if largest > 1:
        raise SystemExit(f"{model}: the parameters are not torch's ({largest:.1f} times what rounding explains)")
    return largest


def measured(rank: int, model: str, place: Path, arguments: argparse.Namespace) -> Row:
    """Verify and time a model in this process. Returns, by contender, the times of rows of steps."""
    torch.set_num_threads(1)
    ranks = model == "2 ranks"
    if ranks:
        dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=SIZE)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as own:
        made = contenders(model, Path(own), arguments)
        difference = verify(model, made)
        turns: dict[str, Contender | Collective] = {**made, **({COLLECTIVE: Collective(model)} if ranks else {})}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
        for run in range(arguments.runs):
            for name in [*turns] if run % 2 else [*reversed(turns)]:  # alternating: order may matter
                if ranks:
                    dist.barrier()
                fewer = ROWS_OF.get(model, 1) * ROWS_OF.get(name.partition(",")[0], 1)
                times[name].append(turns[name].row(max(2, arguments.steps // fewer)))
        for each in turns.values():
            each.close()
    if ranks:
        dist.destroy_process_group()
    return {"difference": difference, "times": times}


def rows_of(model: str, answers: Sequence[Row]) -> list[Row]:
    """Return a row for each contender. `answers`: of the ranks, or of the only process."""
    rows = []
    for name in answers[0]["times"]:
        by_run = [*zip(*(answer["times"][name] for answer in answers), strict=True)]
        rows.append(
            {
                "model": model,
                "what": name,
                "seconds": [max(held for held, _ in of_ranks) for of_ranks in by_run],
                "cpu_seconds": [statistics.mean(cpu for _, cpu in of_ranks) for of_ranks in by_run],
                "ratio_to": {},
            }
        )
    seconds = {row["what"]: row["seconds"] for row in rows}
    for row in rows:
        for name in (*TORCH, COLLECTIVE):
            if name in seconds and row["what"] not in (*TORCH, COLLECTIVE):
                row["ratio_to"][name] = [a / b for a, b in zip(row["seconds"], seconds[name], strict=True)]
    return rows


def describe(row: Row) -> str:
    per_second = [1 / s for s in row["seconds"]]
    parts = [f"{row['model']}, {row['what']}  {span(per_second, 0)} steps/s, {span(in_ms(row['seconds']), 3)} ms"]
    parts.append(f"{span(in_ms(row['cpu_seconds']), 3)} ms of CPU")
    parts += [f"{span(ratio, 2)} times {name}" for name, ratio in row["ratio_to"].items()]
    return "; ".join(parts)


def in_ms(seconds: list[float]) -> list[float]:
    return [1e3 * s for s in seconds]


def table(rows: Sequence[Row]) -> str:
    """Return the table of docs/performance.md: medians, and the least and the most of the ratios."""
    columns = ("model", "optimizer", "steps/s", "CPU time of a step, ms", *(f"times {name}" for name in TORCH))
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        what = row["what"].replace("file:", "`file:`").replace("ram:", "`ram:`")
        per_second, cpu = 1 / statistics.median(row["seconds"]), statistics.median(in_ms(row["cpu_seconds"]))
        ratios = [span(row["ratio_to"][name], 1) if name in row["ratio_to"] else "" for name in TORCH]
        lines.append(f"| {' | '.join([row['model'], what, f'{per_second:.0f}', f'{cpu:.2f}', *ratios])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    arguments = parse()
    if arguments.tell:
        figures, page = arguments.tell
        return put(page, table(json.loads(Path(figures).read_text())["rows"]), BEGIN, END)
    arguments.directory.mkdir(parents=True, exist_ok=True)
    storage = machine.storage(arguments.directory)
    facts = {**machine_facts(), "load": os.getloadavg()[0], "storage": storage, "steps": arguments.steps}
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    rows: list[Row] = []
    for model in arguments.models:
        numels = [torch.Size(shape).numel() for shapes in MODELS[model] for shape in shapes]
        with tempfile.TemporaryDirectory() as place:
            answers = answers_of(SIZE if model == "2 ranks" else 1, measured, model, Path(place), arguments)()
        say(
            f"{model}: {len(numels)} tensors, {sum(numels)} elements, the same bits everywhere, and torch's up to "
            f"{max(answer['difference'] for answer in answers):.2f} of what rounding explains"
        )
        rows += rows_of(model, answers)
        for row in rows:
            if row["model"] == model:
                row |= {"tensors": len(numels), "elements": sum(numels)}
                say(f"  {describe(row)}")
    if arguments.json:
        json.dump({"schema": "csd_optim.bench.small/1", "machine": facts, "rows": rows}, sys.stdout, indent=1)
        print()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ours", nargs="+", choices=PLACES, default=list(PLACES), help="where CSDAdam's states are")
    parser.add_argument("--steps", type=int, default=200, help="in a row; fewer of 1000 tensors, and with commits")
    parser.add_argument("--runs", type=int, default=7, help="rows of each, at least 5")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="on the disk to be measured")
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    parser.add_argument("--tell", nargs=2, metavar=("JSON", "PAGE"), help="only put the table of figures into a page")
    arguments = parser.parse_args()
    if arguments.runs < 5:
        parser.error("--runs: at least 5")
    if arguments.quick:
        arguments.steps, arguments.runs = 20, 5
    return arguments


if __name__ == "__main__":
    main()
