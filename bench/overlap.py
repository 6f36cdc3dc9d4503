"""How much of a step is hidden behind backward and the next forward. From the project's root:

    python -m bench.overlap                   12.6 M parameters on a slow device, about ten minutes
    python -m bench.overlap --quick           half a minute, to see that it works
    python -m bench.overlap --accelerator     parameters and gradients on an accelerator
    python -m bench.overlap --emulated        the same on the tests' emulated accelerator
    python -m bench.overlap --ranks 2         2 M parameters that FSDP2 divides among two ranks

Without an accelerator, a model that takes as long as its step would leave the step no CPU. So the model pretends to run
on one: each layer sleeps for its share of forward (f) and backward (b = 2 f), reads all bytes of its parameter in
forward, and makes a gradient of them. The device is a paced file. Only the times are made up: parameters, gradients and
states are real, and every step is committed.

    none       step() returns when the parameters are there
    forward    overlap(model): step() returns at once, layers wait for their parameters
    backward   overlap(model, backward=True): the step begins in backward, too

s is the time of a step by itself, measured over steps without a model; f + b is measured, too. The three modes are
timed by turns, for several f + b: several iterations in a row, from the end of one step() to that of another. The ratio
is to what could be reached: f + b + s, b + max(f, s), max(f + b, s). Further rows: gradients clipped in each step or in
every other one, so that a step that began in backward must start over; several backward passes per step; little memory
(hold). One row is a small GPT that really computes, on an unpaced disk: model and device share the cores there, so it
only shows that the bits are the same. Nothing is reported unless all modes end with the same parameters. Each row also
has the seconds for which step() blocked the program.

With --ranks each rank has a paced file of its own, and free_gradients=True is a mode, too. An iteration takes as long
as on the slowest rank; all are compared with max(f + b, s), and the time of each rank in step() includes its wait for
the others. The parameters of all modes have to be the same.

On an accelerator only the first rows are timed. The emulated one copies with the CPU: it shows what waits for what, but
no rate of a link.

--json prints schema csd_optim.bench.overlap/1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bench.overlap_training import LAYERS, WARM_UP, Layer, Row, Turns
from bench.step import machine_facts, say, span
from csd_optim import CSDAdam
from csd_optim.accelerator import accelerator_type
from csd_optim.devices import machine

TILE = 1 << 16  # elements
MODES: dict[str, Row | None] = {"none": None, "forward": {}, "backward": {"backward": True}}
TIMES = (1 / 7, 3 / 7, 1.0, 2.0)  # f + b, in units of s
NEVER, ALWAYS = 1e30, 1e-3  # norms to which gradients are clipped


class Training(Turns):
    """One model in one mode. `seconds`: those of forward and of backward."""

    def __init__(self, arguments: argparse.Namespace, mode: str, seconds: float, place: Path, case: Row) -> None:
        passes = case.get("passes", 1)
        each = seconds / 3 / LAYERS / passes
        pace = f"cache=off&read={arguments.rate}&write={arguments.rate}"
        if size := case.get("gpt"):
            from bench.demo import GPT  # not before: it needs matplotlib

            torch.manual_seed(0)
            self.model, pace = GPT(size), "cache=off"
            text = torch.randint(256, (size.batch, size.context + 1), generator=torch.Generator().manual_seed(0))
            self.batch = text[:, :-1], text[:, 1:]
        else:
            self.model = nn.Sequential(*(Layer(arguments.params // LAYERS, each, 2 * each) for _ in range(LAYERS)))
        self.place = "cpu"
        if arguments.accelerator:
            self.place = accelerator_type()
            self.model.to(self.place)
        self.is_gpt, self.passes, self.norms = bool(size), passes, case.get("norms", [])
        self.opt = CSDAdam(self.model.parameters(), lr=1e-3, devices=[f"file:{place}?{pace}"], tile_size=TILE)
        how = MODES[mode]
        if how is not None:
            self.opt.overlap(self.model, **(how | ({"hold": case["hold"]} if "hold" in case and how else {})))
        self.iterations = 0

    def loss(self) -> torch.Tensor:
        if not self.is_gpt:
            return self.model(torch.zeros((), device=self.place))  # type: ignore[no-any-return]
        inputs, targets = self.batch
        return functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    def iteration(self) -> None:
        for _ in range(self.passes):
            self.loss().backward()
        if self.norms:
            norm = self.norms[self.iterations % len(self.norms)]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)
        began = time.perf_counter()
        self.opt.step()
        self.held += time.perf_counter() - began
        self.opt.zero_grad()
        self.iterations += 1

    def passes_alone(self) -> float:
        """Return the seconds of forward and backward without a step beside them."""
        self.opt.synchronize()
        began = time.perf_counter()
        for _ in range(self.passes):
            self.loss().backward()
        elapsed = time.perf_counter() - began
        self.opt.zero_grad()
        return elapsed


def main() -> None:
    arguments = parse()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    if arguments.emulated:
        emulated = importlib.import_module("tests.support.emulated")
        emulated.load()
        emulated.set_schedule("at once")
    facts = {**machine_facts(), "storage": machine.storage(arguments.directory)}
    if arguments.accelerator:
        facts["accelerator"] = "emulated" if arguments.emulated else accelerator_type()
    if arguments.ranks:
        facts["ranks"] = arguments.ranks
    say(f"{arguments.params / 1e6:.1f} M fp32 parameters, {arguments.rate} each way, {arguments.runs} runs")
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    if arguments.ranks:
        from bench import overlap_ranks  # not before: FSDP2 takes seconds

        report(arguments, {"machine": facts, "rows": overlap_ranks.on_ranks(arguments)})
        return
    step = bare(arguments)
    say(f"s, a step by itself: {span(step, 3)} s")
    s = statistics.median(step)
    rows = [row for case in cases(arguments) for row in by_turns(arguments, case, s)]
    report(arguments, {"machine": facts, "step_seconds": step, "rows": rows})


def report(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    if arguments.json:
        json.dump({"schema": "csd_optim.bench.overlap/1", **result}, sys.stdout, indent=1)
        print()


def cases(arguments: argparse.Namespace) -> Iterable[Row]:
    for share in arguments.times:
        yield {"what": f"f + b = {share:.2f} of s", "share": share, "modes": list(MODES)}
    if arguments.accelerator:
        return
    others = ["none", "backward"]
    yield {"what": "clipped in each step", "share": 1.0, "modes": others, "norms": [ALWAYS]}
    from bench.demo import FULL, QUICK

    yield {"what": "a small GPT", "share": 1.0, "modes": list(MODES), "gpt": QUICK if arguments.quick else FULL}
    if not arguments.quick:
        yield {"what": "clipped in every other step", "share": 1.0, "modes": others, "norms": [ALWAYS, NEVER]}
        yield {"what": "clip_grad_norm_ that does not clip", "share": 1.0, "modes": others, "norms": [NEVER]}
        yield {"what": "4 backward passes", "share": 1.0, "modes": others, "passes": 4}
        yield {"what": "hold of a tenth", "share": 1.0, "modes": others, "hold": arguments.params * 8 // 10}


def bare(arguments: argparse.Namespace) -> list[float]:
    """Return the seconds of steps by themselves, one after another."""
    with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
        training = Training(arguments, "none", 0.0, Path(place), {})
        training.loss().backward()
        seconds = []
        for _ in range(WARM_UP + arguments.runs):
            began = time.perf_counter()
            training.opt.step()
            seconds.append(time.perf_counter() - began)
        training.opt.close()
        return seconds[WARM_UP:]


def by_turns(arguments: argparse.Namespace, case: Row, s: float) -> list[Row]:
    """Time the modes of a case by turns. Returns a row for each."""
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        trainings: dict[str, Training] = {}
        for mode in case["modes"]:
            place = Path(directory, mode)
            place.mkdir()
            trainings[mode] = Training(arguments, mode, case["share"] * s, place, case)
        for training in trainings.values():
            for _ in range(WARM_UP):
                training.iteration()
            training.opt.synchronize()
        model: list[float] = []
        seconds: dict[str, list[tuple[float, float]]] = {mode: [] for mode in trainings}
        for _ in range(arguments.runs):
            model.append(trainings["none"].passes_alone())
            for mode, training in trainings.items():
                seconds[mode].append(training.turn())
        verify(trainings)
        # Only the last pass hides anything.
        each = statistics.median(model) / case.get("passes", 1)
        f, b, before = each / 3, each * 2 / 3, statistics.median(model) - each
        ideal = {"none": f + b + s, "forward": b + max(f, s), "backward": max(f + b, s)}
        rows = []
        for mode, training in trainings.items():
            all_seconds, held = map(list, zip(*seconds[mode], strict=True))
            row: Row = {
                "what": case["what"],
                "mode": mode,
                "seconds": all_seconds,
                "step_seconds": held,
                "ratio_to": {},
                "overlap": training.opt.stats().get("overlap"),
            }
            if not training.is_gpt:
                row |= {"model_seconds": model, "reachable_seconds": before + ideal[mode]}
                row["ratio_to"]["what could be reached"] = [t / row["reachable_seconds"] for t in all_seconds]
            if mode != "none":
                row["ratio_to"]["none"] = [t / u for t, (u, _) in zip(all_seconds, seconds["none"], strict=True)]
            rows.append(row)
            say(describe(row))
            training.opt.close()
    return rows


def verify(trainings: dict[str, Training]) -> None:
    """Exit unless all modes have the same parameters."""
    one, *others = trainings.values()
    for other in others:
        pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
        if one.iterations != other.iterations or not all(torch.equal(p, q) for p, q in pairs):
            raise SystemExit("the parameters are not those of a run without overlap: nothing is reported")


def describe(row: Row) -> str:
    parts = [f"{row['what']}, {row['mode']}: {span(row['seconds'], 3)} s an iteration"]
    parts.append(f"{span(row['step_seconds'], 3)} of it in step()")
    parts += [", ".join(f"{span(values, 2)} of {name}" for name, values in row["ratio_to"].items())]
    if row["overlap"] and row["overlap"]["redone"]:
        parts.append(f"begun anew: {row['overlap']['redone']}")
    return "; ".join(filter(None, parts))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=lambda text: int(float(text)), help="12.6 M, or 2.1 M with --ranks")
    parser.add_argument("--rate", help="of a device, read and written: 144MB/s, or 12MB/s with --ranks")
    parser.add_argument("--ranks", type=int, default=0, help="FSDP2 on so many ranks; --times has one value then")
    parser.add_argument("--times", type=float, nargs="+", default=TIMES, help="f + b, in units of s")
    parser.add_argument("--runs", type=int, default=5, help="turns, at least 5")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="where the states go")
    parser.add_argument("--accelerator", action="store_true", help="parameters and gradients on an accelerator")
    parser.add_argument("--emulated", action="store_true", help="the same on the tests' emulated accelerator")
    parser.add_argument("--quick", action="store_true", help="fewer parameters and rows")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    arguments = parser.parse_args()
    if arguments.runs < 5:
        parser.error("--runs: at least 5")
    arguments.params = arguments.params or (1 << 21 if arguments.ranks else LAYERS << 19)
    arguments.rate = arguments.rate or ("12MB/s" if arguments.ranks else "144MB/s")
    if arguments.ranks:
        arguments.times = arguments.times[:1] if arguments.times is not TIMES else [1.0]
    arguments.accelerator |= arguments.emulated
    if arguments.accelerator and not arguments.emulated and not accelerator_type():
        parser.error("--accelerator: torch has no accelerator here")
    if arguments.quick:
        arguments.params, arguments.times = min(arguments.params, (1 << 17) if arguments.ranks else LAYERS << 15), [1.0]
    return arguments


if __name__ == "__main__":
    main()
