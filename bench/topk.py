"""The savings and the costs of Top-K. From the project's root:

    python -m bench.topk                          16 M parameters, about two minutes
    python -m bench.topk --quick                  to see that it works
    python -m bench.topk --link 1GB/s --json      another link; everything as JSON

    link       bytes per parameter over the link and to storage, counted where they are moved
    selection  how fast one thread selects gradients on the CPU, compared with a copy of the gradient and with
               torch.topk, which does the same in a more general way (on an accelerator: bench.accelerator)
    step       a step on an emulated CSD with a paced link to the host, Top-K and dense gradients by turns

First the selection is compared with a stable sort, and Top-K steps on a file with those in memory, bit for bit.
--json prints schema csd_optim.bench.topk/1; --plot writes a PNG.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.step import machine_facts, say, span, timed
from csd_optim import bindings
from csd_optim.cli import benchmark
from csd_optim.cli.benchmark import DTYPES, WARM_UP
from csd_optim.compression import dense as compression
from csd_optim.devices.spec import parse_devices
from csd_optim.devices.units import parse_rate

Row = dict[str, Any]
TILE = 1 << 20  # elements, as in a large model
SHARES = (None, 0.1, 0.05, 0.02, 0.01)
# So slow that two cores keep up with it: then the step measures the link.
LINK = "0.4GB/s"


def main() -> None:
    arguments = parse()
    facts = machine_facts()
    say(f"Top-K of {arguments.params / 1e6:.0f} M parameters, {arguments.runs} runs")
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    verify(arguments.directory)
    rows = link_rows(arguments) + selection_rows(arguments) + step_rows(arguments)
    say("")
    for row in rows:
        say(describe(row))
    if arguments.json:
        json.dump({"schema": "csd_optim.bench.topk/1", "machine": facts, "rows": rows}, sys.stdout, indent=1)
        print()
    if arguments.plot:
        plot(rows, facts, arguments.plot)
        say(f"plot: {arguments.plot}")


def verify(directory: Path) -> None:
    """Compare the selection with a stable sort, and Top-K steps on a file with those in memory."""
    torch.manual_seed(0)
    grad = torch.randn(300_007).bfloat16()  # with many ties
    k = bindings.topk_count(0.01, len(grad))
    expected = grad.view(torch.int16).bitwise_and(0x7FFF).sort(descending=True, stable=True).indices[:k].sort().values
    chosen = {
        "the engine": bindings.topk_select(grad, k, torch.bfloat16)[0].long(),
        "compression.select": compression.select(grad, k).nonzero().squeeze(1),
    }
    for name, indices in chosen.items():
        if not torch.equal(indices, expected):
            raise SystemExit(f"{name} does not select what a sort does: nothing is timed")
    states = []
    for device in (f"file:{directory}?scratch=1", "ram:"):
        torch.manual_seed(1)
        with benchmark.make_optimizer(parse_devices(device), 3_000_000, torch.float16, topk=0.01) as opt:
            for _ in range(3):
                opt.step()
            states.append([t.clone() for p in opt.param_groups[0]["params"] for t in (p, *opt.state[p].values())])
    if not all(map(torch.equal, *states)):
        raise SystemExit("a file and memory differ: nothing is timed")
    say(f"verified: {', '.join(chosen)} select what a stable sort does; a file and memory agree bit for bit")


# ------------------------------------------------------------------------------------------------------ parts


def link_rows(arguments: argparse.Namespace) -> list[Row]:
    """Return rows of bytes that the engine counts. States are in memory, which makes no difference on the link."""
    rows = []
    for dtype in ("fp16", "fp32"):
        for share in SHARES:
            with benchmark.make_optimizer(
                parse_devices("ram:"), arguments.params, DTYPES[dtype], topk=share, tile_size=TILE
            ) as opt:
                opt.step()
                stats = opt.stats()
            per_param = {kind: stats[f"{kind}_bytes"] / arguments.params for kind in ("push", "pull")}
            rows.append({"part": "link", "dtype": dtype, "topk": share, "bytes_per_param": per_param})
    return rows


def selection_rows(arguments: argparse.Namespace) -> list[Row]:
    """Time the selection, one tile's part at a time, as in the engine."""
    rows = []
    for name, dtype in DTYPES.items():
        for feedback in (False, True):
            grad = torch.randn(TILE).to(dtype)
            residual = torch.randn(TILE).bfloat16() if feedback else None
            entry = torch.bfloat16 if dtype is torch.float32 else dtype
            k = bindings.topk_count(0.01, TILE)
            copy = torch.empty_like(grad)
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                turns = by_turns(
                    arguments.runs,
                    lambda g=grad, r=residual, d=entry, n=k: bindings.topk_select(g, n, d, r, 1.0),
                    lambda g=grad, c=copy: c.copy_(g),
                    lambda g=grad, n=k: g.abs().topk(n),
                )
            finally:
                torch.set_num_threads(threads)
            rows.append(selection_row("CPU, one thread", name, feedback, turns))
    return rows


def selection_row(where: str, dtype: str, feedback: bool, turns: list[list[float]]) -> Row:
    ours, copies, torch_topk = turns
    return {
        "part": "selection",
        "where": where,
        "dtype": dtype,
        "error_feedback": feedback,
        "elements_per_second": [TILE / s for s in ours],
        "ratio_to": {
            "a copy of the gradient": [c / s for c, s in zip(copies, ours, strict=True)],
            "torch.topk": [t / s for t, s in zip(torch_topk, ours, strict=True)],
        },
    }


def step_rows(arguments: argparse.Namespace) -> list[Row]:
    """Time each variant and the dense step by turns, until all states are written. The link is the slowest part.

    The link is full duplex: gradients go one way, parameters come back the other. So the bytes that come back bound
    the gain of Top-K, which is largest if gradients have more bits than parameters.
    """
    link = parse_rate(arguments.link)
    specs = parse_devices(f"ram:?link={arguments.link}")
    rows = []
    for dtype, grad_dtype in ((torch.float16, None), (torch.float16, torch.float32), (torch.float32, None)):
        dense = benchmark.make_optimizer(specs, arguments.params, dtype, tile_size=TILE, grad_dtype=grad_dtype)
        with dense:
            for feedback in (False, True):
                sparse = benchmark.make_optimizer(
                    specs, arguments.params, dtype, topk=0.01, error_feedback=feedback, tile_size=TILE
                )
                with sparse:
                    ours, theirs = by_turns(
                        arguments.runs, *(lambda o=o: (o.step(), o.stats()) for o in (sparse, dense))
                    )
                    moved = [sparse.stats(), dense.stats()]
                floor = max(moved[0]["push_bytes"], moved[0]["pull_bytes"]) / link
                names = [str(d).removeprefix("torch.") for d in (dtype, grad_dtype or dtype)]
                rows.append(
                    {
                        "part": "step",
                        "what": f"{names[0]} parameters, {names[1]} gradients",
                        "error_feedback": feedback,
                        "params": arguments.params,
                        "link_bytes_per_second": link,
                        "seconds": ours,
                        "dense_seconds": theirs,
                        "bytes_per_param": {k: moved[0][f"{k}_bytes"] / arguments.params for k in ("push", "pull")},
                        "dense_bytes_per_param": {
                            k: moved[1][f"{k}_bytes"] / arguments.params for k in ("push", "pull")
                        },
                        "ratio_to": {
                            "the dense step": [d / s for d, s in zip(theirs, ours, strict=True)],
                            "what the link allows": [floor / s for s in ours],
                        },
                    }
                )
    return rows


# ---------------------------------------------------------------------------------------------------- helpers


def by_turns(runs: int, *calls: Callable[[], Any]) -> list[list[float]]:
    """Time the calls by turns, `runs` times, because the machine's speed drifts. Returns each call's seconds."""
    seconds: list[list[float]] = [[] for _ in calls]
    for i in range(WARM_UP + runs):
        for call, own in zip(calls, seconds, strict=True):
            elapsed = timed(call)
            if i >= WARM_UP:
                own.append(elapsed)
    return seconds


def share_name(share: float | None) -> str:
    return "dense" if share is None else f"Top-K {100 * share:g} %"


def describe(row: Row) -> str:
    if row["part"] == "link":
        moved = ", ".join(f"{kind} {n:.4f}" for kind, n in row["bytes_per_param"].items())
        return f"link, {row['dtype']}, {share_name(row['topk'])}: bytes per parameter: {moved}"
    feedback = ", error feedback" if row["error_feedback"] else ""
    if row["part"] == "selection":
        rates = [r / 1e6 for r in row["elements_per_second"]]
        lines = [f"selection of 1 %, {row['where']}, {row['dtype']}{feedback}: {span(rates, 0)} M elements/s"]
    else:
        moved = row["dense_bytes_per_param"]
        lines = [
            f"step, link of {row['link_bytes_per_second'] / 1e9:g} GB/s, {row['what']}, Top-K 1 %{feedback}: "
            f"{span([1e3 * s for s in row['seconds']], 1)} ms; dense {span([1e3 * s for s in row['dense_seconds']], 1)}"
        ]
    better = {"torch.topk": "times as fast as", "the dense step": "times as fast as"}
    lines += [f"{span(ratio, 2)} {better.get(name, 'of')} {name}" for name, ratio in row["ratio_to"].items()]
    return "\n    ".join(lines)


def plot(rows: list[Row], facts: Row, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    link = [r for r in rows if r["part"] == "link" and r["dtype"] == "fp16"]
    names = [share_name(r["topk"]) for r in link]
    for kind, side in (("push", -0.2), ("pull", 0.2)):
        bars = left.bar(
            [i + side for i in range(len(link))], [r["bytes_per_param"][kind] for r in link], 0.4, label=kind
        )
        left.bar_label(bars, fmt="%.2f", fontsize="x-small")
    left.set_xticks(range(len(link)), names, fontsize="small")
    left.set_title("bytes per fp16 parameter over the link", fontsize="medium")
    left.set_ylim(0, 2.6)  # room for the legend
    left.legend(fontsize="small", loc="upper right", ncols=2)
    steps = [r for r in rows if r["part"] == "step"]
    labels = [r["what"].replace(", ", ",\n") + ("\nerror feedback" if r["error_feedback"] else "") for r in steps]
    gains = [statistics.median(r["ratio_to"]["the dense step"]) for r in steps]
    bars = right.barh(labels, gains, color="tab:blue")
    right.bar_label(bars, fmt="%.2f", padding=3)
    right.set_xlim(0, 1.15 * max(gains))
    right.axvline(1, color="black", linewidth=0.8)
    right.tick_params(axis="y", labelsize="x-small")
    right.invert_yaxis()
    right.set_title(
        f"speed of a step with Top-K 1 %, dense = 1;\nlink of {steps[0]['link_bytes_per_second'] / 1e9:g} GB/s",
        fontsize="medium",
    )
    figure.suptitle(f"{facts['cpu']}, {facts['cores']} cores, {facts['date'][:10]}", fontsize="medium")
    figure.savefig(path, dpi=120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=16 * TILE, help="number of parameters (default 16 Mi)")
    parser.add_argument("--runs", type=int, default=7, help="timed runs, at least 5")
    parser.add_argument("--link", default=LINK, help=f"rate of the step's link (default {LINK})")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="for the file of the verification")
    parser.add_argument("--quick", action="store_true", help="2 M parameters")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    parser.add_argument("--plot", type=Path, help="write a PNG")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.params = 2 * TILE
    arguments.params, arguments.runs = int(arguments.params), max(5, arguments.runs)
    arguments.directory.mkdir(parents=True, exist_ok=True)
    return arguments


if __name__ == "__main__":
    main()
