"""What 8-bit states and Top-K cost the loss over a long training from scratch. From the project's root:

    python -m bench.studies.pretraining --json result.json --plot result.png    three seeds of a small GPT: hours
    python -m bench.studies.pretraining --size large --seeds 1 --variants adamw 8bit --steps 2000
    python -m bench.studies.pretraining --quick                                 half a minute, to see that it works

A byte-level GPT is trained from scratch on the standard library's own source: `small` has 0.7 M parameters and `large`
25 M. AdamW has fp32 parameters; CSDAdam has bf16 parameters, and its states on this disk. Everything else is the same
in all runs of a seed: initial weights and batches, the learning rate, which warms up and then falls to a tenth along a
cosine, and clipping to a norm of 1. *Nudged* is AdamW again, from weights that differ by a millionth: what is not
larger is chaos. Reported is the loss on held-out files, in nats per byte, and its differences to AdamW with the same
seed.

Each training is done in parts, by turns: after a part, the optimizer is closed and the model forgotten. CSDAdam goes on
with `resume=True`, with the losses so far in `user_state`; AdamW from a torch.save file. A call that was killed goes on
in the same way, from the last step that is durable (AdamW: from its last part). First it is verified that a training in
parts has the losses of one that was not interrupted, to the last bit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib import pyplot as plt
from rich.console import Console
from torch import nn

from bench.demo import table
from bench.step import machine_facts, say
from bench.studies.accuracy_rules import compared, difference_in
from bench.studies.accuracy_training import nudged
from bench.studies.gpt import GPT, held_out_loss, loss_of, pieces_of
from csd_optim import CSDAdam

SCHEMA = "csd_optim.bench.pretraining/1"
EVALUATED, EVALUATED_LAST = 512, 4096  # held-out pieces at each mark and at the end
TILE = 1 << 20  # elements: Top-K chooses among all of a parameter, as in a large model's tiles
Row = dict[str, Any]


class Size(NamedTuple):
    length: int  # bytes of context
    width: int
    layers: int
    heads: int
    batch: int
    lr: float
    steps: int
    marks: int  # how often the held-out loss is taken
    parts: int


SIZES = {
    "tiny": Size(32, 32, 1, 2, 4, 2e-3, 40, 4, 2),
    "small": Size(64, 128, 3, 4, 8, 2e-3, 4000, 40, 4),
    "large": Size(64, 512, 8, 8, 4, 4e-4, 2000, 40, 10),
}


@dataclass(frozen=True)
class Variant:
    name: str
    options: dict[str, Any] | None = None  # of CSDAdam; None: torch.optim.AdamW
    nudge: float = 0.0  # relative change of each initial weight


VARIANTS = {
    "adamw": Variant("AdamW, fp32"),
    "nudged": Variant("AdamW, nudged", nudge=1e-6),
    "fp32": Variant("CSDAdam, fp32 states", {}),
    "8bit": Variant("8-bit states", {"state_dtype": "8bit"}),
    "topk": Variant("Top-K 1 %", {"topk": 0.01}),
    "both": Variant("8-bit states, Top-K 1 %", {"state_dtype": "8bit", "topk": 0.01}),
}
COLOURS = dict(zip(VARIANTS, ("black", "tab:gray", "tab:blue", "tab:purple", "tab:green", "tab:pink"), strict=True))


def rate(size: Size, step: int) -> float:
    """Return the learning rate of a step: warm-up over 5 % of the steps, then a cosine that ends at a tenth."""
    warm = 0.05 * size.steps
    along = max(step - warm, 0) / (size.steps - warm)
    return size.lr * min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * along))


class Training:
    """A training that has been begun, or is taken up again where it stopped.

    `done` is what must survive a stop: the number of steps, the training losses since the last mark, the mean loss
    before each mark, the held-out loss at each, seconds, and how often it was begun.
    """

    def __init__(self, size: Size, variant: Variant, seed: int, directory: Path) -> None:
        self.size, self.seed, self.saved = size, seed, directory.with_suffix(".pt")
        directory.parent.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(seed)
        self.model = GPT(size.length, size.width, size.layers, size.heads)
        self.params = list(self.model.parameters())
        self.optimizer: torch.optim.AdamW | CSDAdam
        self.done: Row = {"step": 0, "recent": [], "losses": [], "held_out": [], "seconds": 0.0, "begun": 0}
        if variant.options is not None:
            self.model.bfloat16()
            again = {"devices": str(directory), "resume": directory.exists()}
            self.optimizer = CSDAdam(self.params, weight_decay=0.1, tile_size=TILE, **again, **variant.options)
            self.done = self.optimizer.user_state or self.done
            assert self.done["step"] == self.optimizer.committed_step
        else:
            nudged(self.model, variant.nudge)
            self.optimizer = torch.optim.AdamW(self.params, weight_decay=0.1, fused=True)
            if self.saved.exists():
                kept = torch.load(self.saved)
                self.model.load_state_dict(kept["model"])
                self.optimizer.load_state_dict(kept["optimizer"])
                self.done = kept["done"]
        self.done["begun"] += 1

    def until(self, last: int) -> None:
        """Train until `last` steps are done."""
        size, done = self.size, self.done
        for step in range(done["step"], last):
            began = time.perf_counter()
            if step % (size.steps // size.marks) == 0:  # before the step, so that it is committed with it
                done["losses"].append(statistics.fmean(done["recent"]) if done["recent"] else None)
                done["recent"] = []
                done["held_out"].append(held_out_loss(self.model, EVALUATED, size.length))
            for group in self.optimizer.param_groups:
                group["lr"] = rate(size, step)
            rng = np.random.default_rng((self.seed, step))
            loss = loss_of(self.model, pieces_of(False, size.batch, size.length, rng))
            loss.backward()
            nn.utils.clip_grad_norm_(self.params, 1.0)
            done["recent"].append(loss.item())
            done["step"] = step + 1
            if isinstance(self.optimizer, CSDAdam):
                self.optimizer.user_state = done
            self.optimizer.step()
            self.optimizer.zero_grad()
            done["seconds"] += time.perf_counter() - began

    def stop(self) -> None:
        if isinstance(self.optimizer, CSDAdam):
            self.optimizer.close()
        else:
            kept = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "done": self.done}
            torch.save(kept, whole := self.saved.with_suffix(".tmp"))
            whole.replace(self.saved)


def train(size: Size, name: str, seed: int, directory: Path, last: int) -> Row:
    """Go on with a training until `last` of its steps are done. Returns its row."""
    training = Training(size, VARIANTS[name], seed, directory)
    try:
        training.until(last)
        done = {k: v for k, v in training.done.items() if k != "recent"}
        if last == size.steps:
            done["loss"] = held_out_loss(training.model, EVALUATED_LAST, size.length)
    finally:
        training.stop()
    return {"variant": name, "seed": seed, "params": sum(p.numel() for p in training.params), **done}


def verify_parts(variants: list[str], directory: Path) -> None:
    """Compare trainings in two parts with uninterrupted ones. Raises SystemExit if a loss differs by a bit."""
    size = SIZES["tiny"]
    for name in variants:
        rows = []
        for parts in (1, size.parts):
            shutil.rmtree(directory, ignore_errors=True)
            for part in range(parts):
                row = train(size, name, 0, directory / "store", size.steps * (part + 1) // parts)
            rows.append((row["losses"], row["held_out"], row["loss"]))
        shutil.rmtree(directory)
        if rows[0] != rows[1]:
            raise SystemExit(f"{name}: in parts, its losses are others; nothing is reported")


def summary(runs: list[Row]) -> list[Row]:
    """Return for each variant how the final loss of finished runs differs from AdamW's with the same seed."""
    finished = {(r["variant"], r["seed"]): r["loss"] for r in runs if "loss" in r}
    rows = []
    for name in dict.fromkeys(variant for variant, _ in finished):
        seeds = [s for variant, s in finished if variant == name and ("adamw", s) in finished]
        if seeds:
            rows.append({"variant": name, **compared([(finished["adamw", s], finished[name, s]) for s in seeds])})
    return rows


def plot(runs: list[Row], size: Size, path: Path) -> None:
    """Write the held-out losses over time, and their differences to AdamW's: mean and range of the seeds."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    by_name: dict[str, dict[int, list[float]]] = {}
    for r in runs:
        by_name.setdefault(r["variant"], {})[r["seed"]] = r["held_out"]
    for name, of_seeds in by_name.items():
        length = min(len(v) for v in of_seeds.values())
        losses = np.array([v[:length] for v in of_seeds.values()])
        steps = size.steps // size.marks * np.arange(length)
        style = {"color": COLOURS[name], "lw": 1.3}
        left.plot(steps, losses.mean(0), label=VARIANTS[name].name, **style)
        left.fill_between(steps, losses.min(0), losses.max(0), color=COLOURS[name], alpha=0.15, lw=0)
        shared = [s for s in of_seeds if s in by_name.get("adamw", {})] if name != "adamw" else []
        if shared:
            length = min(min(len(of_seeds[s]), len(by_name["adamw"][s])) for s in shared)
            apart = np.array([np.subtract(of_seeds[s][:length], by_name["adamw"][s][:length]) for s in shared])
            right.plot(steps[:length], apart.mean(0), **style)
            right.fill_between(steps[:length], apart.min(0), apart.max(0), color=COLOURS[name], alpha=0.15, lw=0)
    right.axhline(0, color="black", lw=0.8)
    left.set(title="loss on held-out files", xlabel="steps", ylabel="nats per byte")
    right.set(title="minus AdamW's, same seed: mean and range", xlabel="steps", ylabel="nats per byte")
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parts(size: Size, variants: list[str], seeds: int) -> Iterator[tuple[int, str, int]]:
    """Yield seed, variant and the step to reach, so that all variants of a seed are at the same step by turns."""
    for seed in range(seeds):
        for part in range(size.parts):
            yield from ((seed, name, size.steps * (part + 1) // size.parts) for name in variants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*SIZES], default="small")
    parser.add_argument("--variants", nargs="+", choices=[*VARIANTS], default=[*VARIANTS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="default: that of the size")
    parser.add_argument("--threads", type=int, default=1, help="threads of forward and backward")
    parser.add_argument("--directory", type=Path, default=Path("build/pretraining"), help="of stores and checkpoints")
    parser.add_argument("--quick", action="store_true", help="the size `tiny`, one seed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG")
    asked = parser.parse_args()
    name, seeds = ("tiny", 1) if asked.quick else (asked.size, asked.seeds)
    size = SIZES[name]
    size = size._replace(steps=asked.steps or size.steps)
    if size.steps % size.marks:
        parser.error(f"--steps must be a multiple of {size.marks}")
    torch.set_num_threads(asked.threads)
    verify_parts(asked.variants, asked.directory / f"verified-{os.getpid()}")
    say("verified: training in parts gives the bits of training without a stop")
    rows: dict[tuple[str, int], Row] = {}
    for seed, variant, last in parts(size, asked.variants, seeds):
        at = asked.directory / f"{name}-{size.steps}-{variant}-{seed}"
        row = rows[variant, seed] = train(size, variant, seed, at, last)
        if row["step"] == last:  # else an earlier call has done more than this part
            say(f"{variant}, seed {seed}: step {last}, {row['held_out'][-1]:.4f}, {row['seconds']:.0f} s")
        runs = list(rows.values())
        if asked.json:
            about = {"schema": SCHEMA, "machine": machine_facts(), "size": {"name": name, **size._asdict()}}
            asked.json.write_text(json.dumps({**about, "runs": runs, "summary": summary(runs)}, indent=1) + "\n")
    made = table("", "", "seeds", "held-out loss, nats per byte", "minus AdamW's")
    for r in summary(runs):
        difference = difference_in(r) if r["variant"] != "adamw" else ""
        made.add_row(VARIANTS[r["variant"]].name, str(r["pairs"]), f"{r['loss']:.4f}", difference)
    Console().print(made)
    if asked.plot:
        plot(runs, size, asked.plot)


if __name__ == "__main__":
    main()
