"""The accuracy that Top-K gradients and 8-bit states cost in fine-tunings that converge. From the project's root:

    python -m bench.studies.accuracy --json result.json --plot result.png    the whole table: two hours on two cores
    python -m bench.studies.accuracy --tasks cloze digits --seeds 1
    python -m bench.studies.accuracy --tasks long falling --variants 8-bit   a long run; gradients that fall tenfold
    python -m bench.studies.accuracy --variants "sgd-momentum, ours" "lion, ours"     others, each beside torch's
    python -m bench.studies.accuracy --quick                                 half a minute, to see that it works

A small byte-level transformer is pre-trained once as a masked language model and kept below build/. From it each task
is fine-tuned with torch.optim.AdamW on fp32 parameters, and with CSDAdam on bf16 parameters (2 B each way per
parameter): dense, and with Top-K, with and without error feedback; with 8-bit states, dense and with Top-K. Where
torchao is installed, its plain 8-bit AdamW on fp32 parameters is another row. All else is the same: initial weights and
batches (given by the seed), schedule, learning rate, betas of 0.9 and 0.999. Nothing is downloaded: the text is the
Python standard library's own source, and held-out examples come from other files than the training text.

    cloze    which of six keywords was masked
    kind     what the marked text is: a comment, a string, a docstring, a name defined, called, or otherwise used
    para     whether the second piece is the first one, rotated and with upper and lower case swapped, or another text
    digits   scikit-learn's handwritten digits; a perceptron, trained from scratch, with another split for each seed
    long     digits for 10000 steps: long before the end everything is learnt, and gradients vanish
    falling  digits for 6000 steps; from the middle on the loss is multiplied by 0.1. In each batch a tenth of the
             labels is drawn at random, so that gradients do not vanish by themselves

CSDAdam runs with its defaults: matrices of at least 4096 elements are sparse, embeddings too; biases, norms and the
last layer are dense. Only the tile size is set, as large as the model, so that Top-K chooses among all elements of a
parameter. A large model's tiles have a million elements; by default so small a model would be cut into smaller ones.

Beside the loss stands the drift, |w - w_ref| / |w_ref - w_0|: how far the final weights (for CSDAdam the masters) are
from AdamW's with the same seed, in units of how far AdamW moved them. The loss alone would hide weights that went
astray. Some drift is chaos: compare "AdamW fp32, nudged", whose initial weights differ by a millionth, and dense
CSDAdam, which differs by its bf16 parameters. The last two tasks show the drift over time, and the mean of
sqrt(exp_avg_sq).

First, dense CSDAdam is compared with AdamW step by step; 8-bit states likewise, within a tolerance; and the bytes
pushed by Top-K with the promised number.

Beside this file: accuracy_tasks.py (data and models), accuracy_training.py (variants, one training, what is verified)
and accuracy_plot.py.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import sklearn
import torch
from rich.console import Console
from rich.table import Table

from bench.demo import table
from bench.step import machine_facts, say
from bench.studies.accuracy_plot import plot
from bench.studies.accuracy_tasks import FULL, QUICK, TASKS, examples_of, pretrained
from bench.studies.accuracy_training import (
    ADAMW,
    OTHERS,
    QUICK_VARIANTS,
    TILE,
    TORCHAO,
    VARIANTS,
    Job,
    Row,
    drifts,
    reference_of,
    run,
    verify_bytes,
    verify_codes,
    verify_dense,
)

OVER_TIME = ("marks", "drift_over_time", "mean_root")  # lists with a figure per mark, if there are several


def summary(runs: list[Row], held_out: dict[str, int]) -> list[Row]:
    """Return a row for each task and variant, averaged over the seeds.

    Differences are to reference_of() with the same seed, in percentage points. `held_out`: the number of held-out
    examples of each task; `held_out_noise` is the standard error, in points, that it alone gives one accuracy.
    """
    found = {(r["task"], r["variant"], r["seed"]): r for r in runs}
    rows = []
    for task, variant in dict.fromkeys((r["task"], r["variant"]) for r in runs):
        seeds = sorted(seed for t, v, seed in found if (t, v) == (task, variant))
        own = [found[task, variant, seed] for seed in seeds]
        references = [found[task, reference_of(variant), seed] for seed in seeds]
        share = statistics.fmean(r["accuracy"] for r in own) / 100
        rows.append(
            {
                "task": task,
                "variant": variant,
                "seeds": seeds,
                "accuracy": [r["accuracy"] for r in own],
                "difference": [r["accuracy"] - a["accuracy"] for r, a in zip(own, references, strict=True)],
                "held_out_noise": 100 * math.sqrt(share * (1 - share) / held_out[task]),
                "training_loss": statistics.fmean(r["training_loss"] for r in own),
                "loss_difference": [
                    r["training_loss"] - a["training_loss"] for r, a in zip(own, references, strict=True)
                ],
                "drift": [r["drift"] for r in own],
                **{k: [r[k] for r in own] for k in OVER_TIME if k in own[0]},
                "link_bytes_per_param": {
                    k: statistics.fmean(r["link_bytes_per_param"][k] for r in own)
                    for k in own[0]["link_bytes_per_param"]
                },
            }
        )
    return rows


def mean_and_spread(values: list[float], sign: str = "", digits: str = ".2f") -> str:
    spread = f" ± {statistics.stdev(values):{digits}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}{digits}}" + spread


def accuracy_tables(rows: list[Row]) -> Iterator[Table]:
    for task in dict.fromkeys(r["task"] for r in rows):
        noise = max(r["held_out_noise"] for r in rows if r["task"] == task)
        title = f"{task} (by its held-out examples alone, one accuracy has a standard error of {noise:.2f})"
        moved = "B pushed", "B pulled"
        made = table(title, "", *moved, "loss", "minus torch's", "drift", "accuracy, %", "minus torch's, points")
        for row in (r for r in rows if r["task"] == task):
            cells = [f"{b:.3f}" for b in row["link_bytes_per_param"].values()] or ["", ""]
            cells.append(f"{row['training_loss']:.3g}")
            cells.append(mean_and_spread(row["loss_difference"], "+", ".1g"))
            cells.append(mean_and_spread(row["drift"]))
            cells.append(mean_and_spread(row["accuracy"]))
            cells.append(mean_and_spread(row["difference"], "+"))
            if row["variant"] == reference_of(row["variant"]):  # what the others are compared with
                cells[3] = cells[4] = cells[6] = ""
            made.add_row(row["variant"], *cells)
        yield made


def one_thread() -> None:
    """Compute on one thread: workers share the cores, and sums must not depend on the number of threads."""
    torch.set_num_threads(1)


def main() -> None:
    arguments = parse()
    size = QUICK if arguments.quick else FULL
    chosen = [v for v in VARIANTS + OTHERS if v.name in arguments.variants]
    variants = [replace(v, length=arguments.length * v.length) for v in chosen]
    began = time.perf_counter()
    one_thread()
    facts = {
        **machine_facts(),
        "numpy": np.__version__,
        "scikit-learn": sklearn.__version__,
        "back end": "ram:",
        **({"torchao": importlib.metadata.version("torchao")} if any(v.torchao for v in variants) else {}),
    }
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    arguments.directory.mkdir(parents=True, exist_ok=True)
    encoder, masked_loss = pretrained(size, arguments.directory)
    say(f"pre-trained to {masked_loss:.3f} nats per masked byte")

    verified: Row = {"dense": {}, "8bit": {}, "bytes": []}
    for task in arguments.tasks:
        verified["dense"][task] = verify_dense(task, size, encoder)
        if any(v.state_dtype != "fp32" for v in variants):
            verified["8bit"][task] = verify_codes(task, size, encoder)
        verified["bytes"] += [verify_bytes(task, v, size, encoder) for v in variants if v.topk]
    say(
        f"verified: dense is AdamW to {max(verified['dense'].values()):.1e} after 10 steps; "
        f"8-bit states drift {max(verified['8bit'].values(), default=math.nan):.3f} in them; "
        f"{len(verified['bytes'])} Top-K steps pushed what they promise"
    )

    jobs: list[Job] = [
        (t, s, v, size, encoder) for s in range(arguments.seeds) for t in arguments.tasks for v in variants
    ]
    runs: list[Row] = []
    context = multiprocessing.get_context("forkserver")
    # Imports that take seconds: once here, not in each worker.
    context.set_forkserver_preload(["bench.demo", "sklearn.datasets", "torch._dynamo"])
    with ProcessPoolExecutor(arguments.workers, mp_context=context, initializer=one_thread) as workers:
        for done in as_completed([workers.submit(run, job, not arguments.resume) for job in jobs]):
            runs.append(done.result())
            at = f"{len(runs)}/{len(jobs)} after {time.perf_counter() - began:.0f} s"
            say("{at}: {task}, seed {seed}, {variant}: {accuracy:.2f} %".format(at=at, **runs[-1]))
    order = {(t, s, v.name): i for i, (t, s, v, *_) in enumerate(jobs)}
    runs.sort(key=lambda r: order[r["task"], r["seed"], r["variant"]])
    by_name = {v.name: v for v in variants}
    for job, done_run in zip(jobs, runs, strict=True):
        over_time = drifts(job, by_name[reference_of(job[2].name)])
        done_run["drift"] = over_time[-1]
        if len(over_time) > 1:
            done_run["drift_over_time"] = over_time

    rows = summary(runs, {task: len(examples_of(task, 0, size)[1][1]) for task in arguments.tasks})
    console = Console(file=sys.stdout if arguments.json != "-" else sys.stderr, highlight=False, width=140)
    for made in accuracy_tables(rows):
        console.print(made)
    report = {
        "schema": "csd_optim.bench.accuracy/1",
        "machine": facts,
        "settings": {**asdict(size), "seeds": arguments.seeds, "length": arguments.length, "tile_elems": TILE},
        "masked_loss": masked_loss,
        "verified": verified,
        "rows": rows,
        "runs": runs,
        "seconds": sum(r["seconds"] for r in runs),
    }
    if arguments.json == "-":
        print(json.dumps(report, indent=1))
    elif arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="default: all")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=[v.name for v in VARIANTS + OTHERS],
        metavar="NAME",
        help="variants to train (default: all except other optimizers)",
    )
    parser.add_argument("--seeds", type=int, help="runs of everything (3)")
    parser.add_argument("--length", type=float, default=1.0, help="train this many times as long")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes of one thread each (cores)")
    parser.add_argument(
        "--directory", type=Path, default=Path("build/accuracy"), help="keeps the pre-trained model and finished runs"
    )
    parser.add_argument("--resume", action="store_true", help="reuse the finished runs of an interrupted call")
    parser.add_argument("--quick", action="store_true", help="cloze and digits, one seed, five variants, few steps")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write everything to FILE, or to stdout")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG")
    arguments = parser.parse_args()
    arguments.tasks = arguments.tasks or (["cloze", "digits"] if arguments.quick else TASKS)
    installed = importlib.util.find_spec("torchao") is not None
    if TORCHAO.name in (arguments.variants or ()) and not installed:
        parser.error(f"{TORCHAO.name}: pip install torchao")
    usual = QUICK_VARIANTS if arguments.quick else [v for v in VARIANTS if installed or not v.torchao]
    arguments.variants = arguments.variants or [v.name for v in usual]
    arguments.variants += {ADAMW.name, *map(reference_of, arguments.variants)}  # what they are compared with
    arguments.seeds = arguments.seeds or (1 if arguments.quick else 3)
    return arguments


if __name__ == "__main__":
    main()
