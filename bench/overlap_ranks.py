"""The ranks of `python -m bench.overlap --ranks N`: FSDP2 over gloo, each rank with a paced file of its own."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from bench.overlap_training import WARM_UP, Layer, Row, Turns
from bench.ranks import answers_of
from bench.step import say, span
from csd_optim import CSDAdam

LAYERS = 8
TILE = 1 << 15  # elements
MODES: dict[str, Row | None] = {
    "none": None,
    "forward": {},
    "backward": {"backward": True},
    "free_gradients": {"free_gradients": True},
}


class Training(Turns):
    """A rank's model in one mode. `seconds`: those of forward and backward."""

    def __init__(self, arguments: argparse.Namespace, mode: str, seconds: float, place: Path) -> None:
        each = seconds / 3 / LAYERS
        self.model = nn.Sequential(*(Layer(arguments.params // LAYERS, each, 2 * each) for _ in range(LAYERS)))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        pace = f"cache=off&read={arguments.rate}&write={arguments.rate}"
        device = f"file:{place}/{mode}-{dist.get_rank()}?{pace}"
        self.opt = CSDAdam(self.model.parameters(), lr=1e-3, devices=device, tile_size=TILE, overwrite=True)
        if (how := MODES[mode]) is not None:
            self.opt.overlap(self.model, **how)

    def passes(self) -> None:
        self.model(torch.zeros(())).backward()

    def step(self) -> float:
        """Return the seconds of a step()."""
        began = time.perf_counter()
        self.opt.step()
        return time.perf_counter() - began

    def iteration(self) -> None:
        self.passes()
        self.held += self.step()
        self.opt.zero_grad()


def on_ranks(arguments: argparse.Namespace) -> list[Row]:
    """Time the modes by turns. Returns a row for each. Exits if parameters differ."""
    with tempfile.TemporaryDirectory(dir=arguments.directory.absolute()) as directory:
        answers: list[Row] = answers_of(arguments.ranks, measured, Path(directory), arguments)()
    if any(image != answer["images"]["none"] for answer in answers for image in answer["images"].values()):
        raise SystemExit("the parameters are not those of a run without overlap: nothing is reported")
    s, model = ([max(at) for at in zip(*(a[key] for a in answers), strict=True)] for key in ("steps", "passes"))
    say(f"s, a step by itself: {span(s, 3)} s; f + b, forward and backward by themselves: {span(model, 3)} s")
    rows = []
    for mode in MODES:
        turns = [[answer["turns"][mode][i] for answer in answers] for i in range(arguments.runs)]
        seconds = [max(each for each, _ in turn) for turn in turns]
        reachable = max(statistics.median(s), statistics.median(model))
        row: Row = {
            "what": f"{arguments.ranks} ranks, FSDP2",
            "mode": mode,
            "seconds": seconds,
            "step_seconds": [[held for _, held in turn] for turn in turns],
            "model_seconds": model,
            "reachable_seconds": reachable,
            "ratio_to": {"max(f + b, s)": [t / reachable for t in seconds]},
        }
        rows.append(row)
        held = ", ".join(f"{span([turn[rank][1] for turn in turns], 3)}" for rank in range(arguments.ranks))
        say(
            f"{row['what']}, {mode}: {span(seconds, 3)} s an iteration, of which each rank spends {held} in step(); "
            f"{span(row['ratio_to']['max(f + b, s)'], 2)} of max(f + b, s)"
        )
    return rows


def measured(rank: int, place: Path, arguments: argparse.Namespace) -> Row:
    torch.set_num_threads(1)
    meeting = f"file://{place / 'meet'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=arguments.ranks)
    alone = Training(arguments, "none", 0.0, place)
    alone.passes()
    steps = [alone.step() for _ in range(WARM_UP + arguments.runs)][WARM_UP:]
    alone.opt.close()
    share = torch.tensor(statistics.median(steps))
    dist.broadcast(share, 0)
    trainings = {mode: Training(arguments, mode, arguments.times[0] * share.item(), place) for mode in MODES}
    for training in trainings.values():
        for _ in range(WARM_UP):
            training.iteration()
        training.opt.synchronize()
    passes: list[float] = []
    turns: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for _ in range(arguments.runs):
        began = time.perf_counter()
        trainings["none"].passes()
        passes.append(time.perf_counter() - began)
        trainings["none"].opt.zero_grad()
        for mode, training in trainings.items():
            turns[mode].append(training.turn())
    answer: dict[str, Any] = {"steps": steps, "passes": passes, "turns": turns, "images": {}}
    for mode, training in trainings.items():
        whole = [p.full_tensor() for p in training.model.parameters()]  # type: ignore[attr-defined]
        answer["images"][mode] = b"".join(p.detach().numpy().tobytes() for p in whole)
        training.opt.close()
    dist.destroy_process_group()
    return answer
