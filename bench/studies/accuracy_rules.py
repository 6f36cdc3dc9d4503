"""What 8-bit states cost the loss with rules other than AdamW. From the project's root:

    python -m bench.studies.accuracy_rules --json result.json      all: an hour on two cores; goes on where it stopped
    python -m bench.studies.accuracy_rules --rules adagrad --dtypes bfloat16 --seeds 1
    python -m bench.studies.accuracy_rules --rules adagrad --lr 0.05       with this learning rate instead of the best
    python -m bench.studies.accuracy_rules --quick                 a few seconds, to see that it works

A byte-level GPT (2 layers, width 32, ReLU, 32 bytes of context) is trained from scratch on the standard library's own
source, 8 pieces per step, with the rule's 8-bit states and with fp32 ones. Everything else is the same in a pair of
runs: initial weights and batches, which the seed gives; the schedule, which warms up and then decays to zero; and the
learning rate, the best for fp32 states out of a few, tried with another seed. *Nudged* is a run with fp32 states whose
initial weights differ by a millionth: differences that are not larger are chaos.

The loss is that of held-out files, in nats per byte. Reported is the mean of its differences to the run with fp32
states and the same seed, with their standard error. Muon is for the matrices of the layers; the others are AdamW's,
whose states are fp32 in all runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

from bench.demo import table
from bench.step import machine_facts, say
from bench.studies.accuracy_tasks import schedule
from bench.studies.accuracy_training import nudged
from bench.studies.gpt import GPT, held_out_loss, loss_of, pieces_of
from csd_optim import CSDAdagrad, CSDMuon, CSDRMSprop
from csd_optim.optim.optimizer import CSDOptimizer

LENGTH, WIDTH, HEADS, LAYERS, BATCH = 32, 32, 2, 2, 8
STEPS, HELD_OUT = 1500, 4096  # steps; pieces that the loss is evaluated on
TUNING_SEED = 100
SCHEMA = "csd_optim.bench.accuracy_rules/1"
VARIANTS = {"fp32": ("fp32", 0.0), "nudged": ("fp32", 1e-6), "8bit": ("8bit", 0.0)}  # state_dtype, nudge
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Learning rates to choose from.
RATES = {"adagrad": (0.02, 0.05, 0.1, 0.2), "rmsprop": (0.002, 0.005, 0.01, 0.02), "muon": (0.005, 0.01, 0.02, 0.04)}

Row = dict[str, Any]


def optimizer_of(rule: str, model: GPT, lr: float, state_dtype: str) -> CSDOptimizer:
    if rule != "muon":
        of = {"adagrad": CSDAdagrad, "rmsprop": CSDRMSprop}[rule]
        return of(model.parameters(), lr=lr, devices="ram:", state_dtype=state_dtype)
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    of_others = {"params": others, "use_muon": False, "lr": 0.005, "betas": (0.9, 0.99), "state_dtype": "fp32"}
    return CSDMuon([{"params": matrices}, of_others], lr=lr, devices="ram:", state_dtype=state_dtype)


def run(rule: str, dtype: str, variant: str, seed: int, lr: float, steps: int, held_out: int) -> Row:
    """Train once. Returns the held-out loss and that of the last tenth of the steps."""
    began, (state_dtype, nudge) = time.perf_counter(), VARIANTS[variant]
    torch.manual_seed(seed)
    model, rng = GPT(LENGTH, WIDTH, LAYERS, HEADS), np.random.default_rng(seed)
    nudged(model, nudge).to(DTYPES[dtype])
    losses = []
    with optimizer_of(rule, model, lr, state_dtype) as optimizer:
        scheduler = schedule(optimizer, steps)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, pieces_of(False, BATCH, LENGTH, rng))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    loss = held_out_loss(model, held_out, LENGTH)
    about = {"rule": rule, "dtype": dtype, "variant": variant, "seed": seed, "lr": lr, "steps": steps}
    training_loss = statistics.fmean(losses[-max(1, steps // 10) :])
    return {**about, "loss": loss, "training_loss": training_loss, "seconds": time.perf_counter() - began}


def jobs(rules: list[str], dtypes: list[str], seeds: int, best: dict[str, float]) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of runs, whole pairs first, so that what is there can be used whenever it is stopped."""
    for seed in range(seeds):
        for rule in rules:
            for dtype in dtypes:
                yield from ((rule, dtype, variant, seed, best[rule]) for variant in VARIANTS)


def summary(runs: list[Row]) -> list[Row]:
    """Return the differences to fp32 states of each variant, over the seeds that have both.

    There is a row for each rule, learning rate and dtype, and one for all dtypes of these.
    """
    found = {(r["rule"], r["lr"], r["dtype"], r["variant"], r["seed"]): r["loss"] for r in runs}
    rows = []
    for rule, lr in dict.fromkeys((r["rule"], r["lr"]) for r in runs):
        for among, variant in itertools.product((*([dtype] for dtype in DTYPES), [*DTYPES]), VARIANTS):
            base = [k for k in found if k[:2] == (rule, lr) and k[2] in among and k[3] == "fp32"]
            pairs = [(found[k], found[other]) for k in base if (other := (*k[:3], variant, k[4])) in found]
            if pairs:
                rows.append({"rule": rule, "lr": lr, "dtypes": among, "variant": variant, **compared(pairs)})
    return rows


def compared(pairs: list[tuple[float, float]]) -> Row:
    """Return mean loss and mean difference of pairs of losses, with its standard error (None for a single pair)."""
    differences = [loss - base for base, loss in pairs]
    error = statistics.stdev(differences) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
    loss = statistics.fmean(loss for _, loss in pairs)
    return {"pairs": len(pairs), "loss": loss, "difference": statistics.fmean(differences), "error": error}


def difference_in(row: Row) -> str:
    """Return the difference in a row of compared() as text."""
    return f"{row['difference']:+.4f}" + (f" ± {row['error']:.4f}" if row["error"] is not None else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", choices=[*RATES], default=[*RATES])
    parser.add_argument("--dtypes", nargs="+", choices=[*DTYPES], default=[*DTYPES])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, help="learning rate; default: the best of a few")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, help="where results are kept; runs that are there are not repeated")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    steps, held_out = (20, 256) if asked.quick else (asked.steps, HELD_OUT)
    kept: Row = json.loads(asked.json.read_text()) if asked.json and asked.json.exists() else {}
    tried, runs = kept.get("tried", []), kept.get("runs", [])

    def once(among: list[Row], rule: str, dtype: str, variant: str, seed: int, lr: float) -> Row:
        wanted = {"rule": rule, "dtype": dtype, "variant": variant, "seed": seed, "lr": lr, "steps": steps}
        if not (done := [r for r in among if wanted.items() <= r.items()]):
            done = [run(rule, dtype, variant, seed, lr, steps, held_out)]
            among += done
            say(f"{rule} {dtype} {variant}, seed {seed}, lr {lr}: {done[0]['loss']:.4f}, {done[0]['seconds']:.0f} s")
            if asked.json:
                found = {
                    "schema": SCHEMA,
                    "machine": machine_facts(),
                    "tried": tried,
                    "runs": runs,
                    "summary": summary(runs),
                }
                asked.json.write_text(json.dumps(found, indent=1) + "\n")
        return done[0]

    torch.set_num_threads(1)
    best = {}
    for rule in asked.rules:
        rates = [asked.lr] if asked.lr else RATES[rule][:1] if asked.quick else RATES[rule]
        losses = {lr: once(tried, rule, "float32", "fp32", TUNING_SEED, lr)["loss"] for lr in rates}
        best[rule] = min(losses, key=lambda lr, of=losses: of[lr])  # type: ignore[misc]
    for job in jobs(asked.rules, asked.dtypes, 1 if asked.quick else asked.seeds, best):
        once(runs, *job)
    made = table("", "rule", "lr", "parameters", "states", "pairs", "loss", "minus fp32 states")
    for r in summary(runs):
        difference = difference_in(r)
        dtypes = "both" if len(r["dtypes"]) > 1 else r["dtypes"][0]
        made.add_row(r["rule"], str(r["lr"]), dtypes, r["variant"], str(r["pairs"]), f"{r['loss']:.4f}", difference)
    Console().print(made)


if __name__ == "__main__":
    main()
