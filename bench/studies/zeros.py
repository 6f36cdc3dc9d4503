"""Parameters whose gradients stay zero: an embedding, of which each step uses only few rows. From the project's root:

    python -m bench.studies.zeros                         4000 steps of 2 M parameters in memory, about two minutes
    python -m bench.studies.zeros --quick                 to see that it works
    python -m bench.studies.zeros --at 20000 --json       at another step; everything as JSON

Rows are drawn by Zipf's law, like words: most of them rarely. Without a gradient, a moment decays into the subnormal
numbers and stays there, and processors compute ten times slower with those. CSDAdam flushes them to zero.

    CSDAdam                       in memory
    torch                         torch.optim.AdamW(fused=True)
    torch, set_flush_denormal     the same, with its threads set to flush subnormal numbers, as CSDAdam's do

Each is timed at some steps, by turns with an optimizer of the same kind and size whose gradients are never zero: the
ratio says how much of that rate is left. First CSDAdam is compared with torch.optim.AdamW. --json prints schema
csd_optim.bench.zeros/1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import torch

from bench.step import machine_facts, say, span, timed, verify
from csd_optim import CSDAdam, bindings
from csd_optim.cli import benchmark
from csd_optim.devices.spec import parse_devices

Row = dict[str, Any]
WIDTH = 512  # elements of a row
DRAWN = 32  # rows per step, some more than once; the rarest row comes back after about a thousand steps
OURS, TORCH, FLUSHED = CONTENDERS = ("CSDAdam", "torch", "torch, set_flush_denormal")


def main() -> None:
    arguments = parse()
    facts = machine_facts()
    say(f"an embedding of {arguments.rows} x {WIDTH}, {arguments.runs} runs at each of the steps {arguments.at}")
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    in_own_process(verify, parse_devices("ram:"), "fp32")
    rows: list[Row] = []
    for name in CONTENDERS:
        rows += in_own_process(contend, arguments, name)
        for row in rows[-len(arguments.at) :]:
            say(describe(row))
    if arguments.json:
        json.dump({"schema": "csd_optim.bench.zeros/1", "machine": facts, "rows": rows}, sys.stdout, indent=1)
        print()


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in a forked process and return its result.

    Threads inherit the flush mode when they start, and keep it. So each contender needs threads of its own, and this
    process must have none when it forks.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(function(*arguments)))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:  # the process has printed the reason
        process.join()
        raise SystemExit(process.exitcode) from None


def contend(arguments: argparse.Namespace, contender: str) -> list[Row]:
    """Run all steps of one contender, timing some of them. Returns a row for each timed step."""
    bindings.threads_use(arguments.threads)
    torch.set_flush_denormal(contender == FLUSHED)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    shape = (arguments.rows, WIDTH)
    embedding, dense = (torch.nn.Parameter(torch.randn(shape)) for _ in range(2))
    zipf = 1 / torch.arange(1, arguments.rows + 1)
    embedding.grad, dense.grad = torch.zeros(shape), torch.randn(shape)
    ours, beside = (optimizer(contender, p) for p in (embedding, dense))

    def step() -> float:
        """Return the seconds of the optimizer's step alone."""
        drawn = torch.multinomial(zipf, DRAWN, replacement=True)
        embedding.grad[drawn] = torch.randn(DRAWN, WIDTH)
        elapsed = timed(ours.step)
        embedding.grad[drawn] = 0
        return elapsed

    rows, done = [], 0
    for at in arguments.at:
        for _ in range(at - done - 1):
            step()
        timed(beside.step)  # warm-up
        pairs = [(step(), timed(beside.step)) for _ in range(arguments.runs)]
        done = at - 1 + arguments.runs
        seconds, dense_seconds = (list(each) for each in zip(*pairs, strict=True))
        states = [ours.state[embedding][name] for name in ("exp_avg", "exp_avg_sq")]
        rows.append(
            {
                "what": contender,
                "step": at,
                "params": embedding.numel(),
                "seconds": seconds,
                "dense_seconds": dense_seconds,
                "bytes": benchmark.MEMORY_BYTES * embedding.numel(),
                "subnormal": sum(map(subnormal, states)) / len(states),
                "ratio_to": {"its dense rate": [d / s for s, d in pairs]},
            }
        )
    return rows


def optimizer(name: str, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    if name == OURS:
        return CSDAdam([parameter], devices=["ram:"])
    return torch.optim.AdamW([parameter], fused=True)


def subnormal(state: torch.Tensor) -> float:
    """Return the share of subnormal numbers, found by their bits: comparisons may flush them to zero."""
    bits = state.view(torch.int32) & 0x7FFFFFFF
    return float(((bits > 0) & (bits < 0x00800000)).double().mean())


def describe(row: Row) -> str:
    """Return a row as text: medians (minimum to maximum)."""
    rate, gigabytes, dense = (
        [row[amount] / s / scale for s in row[seconds]]
        for amount, scale, seconds in (
            ("params", 1e6, "seconds"),
            ("bytes", 1e9, "seconds"),
            ("params", 1e6, "dense_seconds"),
        )
    )
    ratios = row["ratio_to"]["its dense rate"]
    return (
        f"{row['what']}, step {row['step']}: {span(rate, 0)} Mparam/s, {span(gigabytes, 1)} GB/s, "
        f"{len(rate)} runs; dense {span(dense, 0)}\n"
        f"    {span(ratios, 2)} of its dense rate; {row['subnormal']:.1%} of the moments are subnormal"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096, help="rows of the embedding (default 4096)")
    parser.add_argument(
        "--at", type=int, nargs="+", default=[100, 1000, 4000], help="steps that are timed (default 100 1000 4000)"
    )
    parser.add_argument("--runs", type=int, default=15, help="timed steps at each, at least 5")
    parser.add_argument("--threads", type=int, default=2, help="update threads (default 2)")
    parser.add_argument("--quick", action="store_true", help="256 rows, steps 20 and 100")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.at = 256, [20, 100]
    arguments.at, arguments.runs = sorted(arguments.at), max(5, arguments.runs)
    if any(b - a < arguments.runs for a, b in zip([0, *arguments.at], arguments.at, strict=False)):
        parser.error(f"--at: each of the steps must be at least --runs ({arguments.runs}) after the one before")
    return arguments


if __name__ == "__main__":
    main()
