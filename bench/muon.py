"""A step of CSDMuon: what its orthogonalization costs, and how much of it the drive hides. From the project's root:

    python -m bench.muon                    12.6 M parameters on a slow device, about five minutes
    python -m bench.muon --quick            seconds, to see that it works

First, ten steps are compared with torch.optim.Muon on fp32 copies: the momentum to 1e-6 of its norm, parameters to
0.5 % of the distance that they have moved (Newton-Schulz in bf16 amplifies the last bits of its input). Then these are
timed by turns, over the matrices of a GPT's blocks in bf16:

    CSDMuon              on a paced file, until all states are written
    without iterations   the same with ns_steps=0: two passes over each tile, and next to nothing between them
    CSDAdam              on a file with the same pace
    torch.optim.Muon     on fp32 parameters in memory
    Newton-Schulz        alone, of the same matrices

With d seconds of the second and o of the last, a step of CSDMuon, s, could take max(d, o). "hidden" is
(d + o - s) / min(d, o): 1 if the shorter one is hidden behind the longer one. The engine's own counters say how many
bytes were read and written. Only ratios mean anything, and they depend on the pace. Newton-Schulz and the updates share
the cores.

With --peer, DeepSpeed's Muon, ZeRO-Infinity with the momentum on NVMe, takes turns with CSDMuon on the same disk, not
paced, over as many square matrices of the same size (peers.py, which says how to install it). DeepSpeed orthogonalizes
in backward, once for each micro-batch; so a backward with one micro-batch is timed, too.

--json prints schema csd_optim.bench.muon/1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import peers
from bench.step import machine_facts, say, span, timed
from csd_optim import CSDAdam, CSDMuon
from csd_optim.cli.benchmark import DTYPES, WARM_UP
from csd_optim.devices import machine
from csd_optim.devices.units import parse_rate
from csd_optim.muon.newton_schulz import JORDAN, flops, newton_schulz
from csd_optim.optim.optimizer import CSDOptimizer

Row = dict[str, Any]
Params = list[torch.nn.Parameter]
NS_STEPS, EPS = 5, 1e-7  # torch's defaults
PEER = "deepspeed-nvme-muon"
VERIFIED_STEPS, MOMENTUM_OFF, PARAMS_OFF = 10, 1e-6, 5e-3
MEASURED = OURS, BARE, ADAM, TORCH, ALONE = (
    "CSDMuon",
    "CSDMuon without iterations",
    "CSDAdam",
    "torch.optim.Muon",
    "Newton-Schulz",
)


def main() -> None:
    arguments = parse()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    shapes = blocks(arguments.blocks, arguments.width)
    load = {"load": os.getloadavg()[0], "torch_threads": arguments.threads}
    facts = {**machine_facts(), **load, "storage": machine.storage(arguments.directory)}
    n = sum(rows * columns for rows, columns in shapes)
    say(f"{n / 1e6:.1f} M bf16 parameters, width {arguments.width}, {arguments.rate} each way, {arguments.runs} runs")
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    momentum, moved = verify()
    say(f"verified against torch.optim.Muon: off by {momentum:.1e} of the momentum, {moved:.2%} of the distance moved")
    result = measured(arguments, shapes)
    if arguments.peer:
        result["rows"].append(peer_row(arguments))
    verified = {"momentum": momentum, "parameters": moved}
    for row in result["rows"]:
        say(describe(row))
    for what, values in result["ratios"].items():
        say(f"{what}: {span(values, 2)}")
    if arguments.json:
        sizes = {"params": n, "width": arguments.width, "rate_bytes_per_second": parse_rate(arguments.rate)}
        found = {"schema": "csd_optim.bench.muon/1", "machine": facts, **sizes, "verified": verified, **result}
        json.dump(found, sys.stdout, indent=1)
        print()


def blocks(number: int, width: int) -> list[tuple[int, int]]:
    """Return the shapes of the matrices in so many of a GPT's blocks."""
    attention, there, back = [(width, width)] * 4, (4 * width, width), (width, 4 * width)
    return [*attention, there, back] * number


def made(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> Params:
    """Return parameters that have gradients, the same for every dtype but for rounding."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(torch.bfloat16).to(dtype)
    return params


def verify() -> tuple[float, float]:
    """Return how far momentum and parameters are off torch's at most, relative to norm and distance moved.

    Raises SystemExit if it is too far, or a parameter is not its rounded master.
    """
    shapes = [(64, 64), (256, 96), (96, 256), (300, 70)]
    params = made(shapes, torch.bfloat16)
    copies = [torch.nn.Parameter(p.detach().float()) for p in params]
    start = [p.detach().clone() for p in copies]
    reference = torch.optim.Muon(copies, lr=0.02)
    momentum = moved = 0.0
    with CSDMuon(params, lr=0.02, devices="file:", ns_dtype="bf16") as opt:
        for step in range(VERIFIED_STEPS):
            generator = torch.Generator().manual_seed(step)
            for p, c in zip(params, copies, strict=True):
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
                c.grad = p.grad.float()
            opt.step()
            reference.step()
        for p, c, began in zip(params, copies, start, strict=True):
            buffer, wanted = opt.state[p]["momentum_buffer"], reference.state[c]["momentum_buffer"]
            master, way = opt.state[p]["master"], (c.detach() - began).norm()
            momentum = max(momentum, float((buffer - wanted).norm() / wanted.norm()))
            moved = max(moved, float((master - c.detach()).norm() / way))
            if not torch.equal(p.detach(), master.to(p.dtype)):
                raise SystemExit("a parameter is not its rounded master: nothing is timed; please report this")
    if not (momentum <= MOMENTUM_OFF and moved <= PARAMS_OFF):
        raise SystemExit(f"the result differs from torch's by {momentum:.1e} and {moved:.2%}: nothing is timed")
    return momentum, moved


def measured(arguments: argparse.Namespace, shapes: Sequence[tuple[int, int]]) -> Row:
    """Time all by turns. Returns `rows` and `ratios`."""
    n = sum(rows * columns for rows, columns in shapes)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
        device = f"file:{place}?scratch=1&cache=off&read={arguments.rate}&write={arguments.rate}"
        how: Row = {"devices": device, "tile_size": arguments.tile}
        ours: dict[str, CSDOptimizer] = {
            OURS: CSDMuon(made(shapes, torch.bfloat16), ns_dtype=arguments.ns_dtype, **how),
            BARE: CSDMuon(made(shapes, torch.bfloat16), ns_dtype=arguments.ns_dtype, ns_steps=0, **how),
            ADAM: CSDAdam(made(shapes, torch.bfloat16), **how),
        }
        theirs = torch.optim.Muon(made(shapes, torch.float32))
        ways: dict[str, Callable[[], Any]] = {name: stepping(opt) for name, opt in ours.items()}
        ways[TORCH] = theirs.step
        matrices = [p.grad for p in ours[OURS].param_groups[0]["params"]]
        ways[ALONE] = lambda: [newton_schulz(x, [JORDAN] * NS_STEPS, EPS, DTYPES[arguments.ns_dtype]) for x in matrices]
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        try:
            for i in range(WARM_UP + arguments.runs):
                for name in ways if i % 2 else reversed(ways):
                    elapsed = timed(ways[name])
                    if i >= WARM_UP:
                        seconds[name].append(elapsed)
            stats = {name: opt.stats() for name, opt in ours.items()}
        finally:
            for opt in ours.values():
                opt.close()
    rows = [{"what": name, "seconds": seconds[name]} for name in seconds]
    for row in rows:
        if counted := stats.get(row["what"]):
            kinds = ("push", "pull", "flash_read", "flash_write")
            row["bytes_per_param"] = {kind: counted[f"{kind}_bytes"] / n for kind in kinds}
    operations = sum(flops(*shape, NS_STEPS) for shape in shapes)
    rows[-1] |= {"dtype": arguments.ns_dtype, "flops_per_second": [operations / s for s in seconds[ALONE]]}
    return {"rows": rows, "ratios": ratios(seconds)}


def peer_row(arguments: argparse.Namespace) -> Row:
    """Time DeepSpeed's Muon and CSDMuon by turns, on the same disk."""
    theirs: list[float] = []
    ours: list[float] = []
    ratios: list[float] = []
    for _ in range(arguments.rounds):
        say(f"running {PEER} ...")
        runs = {"threads": arguments.threads, "timeout": 1800}
        peer = peers.run(PEER, arguments.peer_params, arguments.runs, arguments.directory, **runs)
        if "skipped" in peer:
            return {"what": PEER, "skipped": peer["skipped"]}
        shapes = [(peers.WIDTH, peers.WIDTH)] * (peer["params"] // peers.WIDTH**2)
        with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
            how: Row = {"devices": f"file:{place}?scratch=1&cache=off", "ns_dtype": arguments.ns_dtype}
            with CSDMuon(made(shapes, torch.bfloat16), **how) as opt:
                seconds = [timed(stepping(opt)) for _ in range(WARM_UP + arguments.runs)][WARM_UP:]
                moved = {kind: opt.stats()[f"flash_{kind}_bytes"] / peer["params"] for kind in ("read", "write")}
        theirs += peer["seconds"]
        ours += seconds
        ratios.append(statistics.median(peer["seconds"]) / statistics.median(seconds))
    kinds = (("read", "bytes_read"), ("write", "bytes_written"))
    their_bytes = {kind: peer[key] / peer["params"] for kind, key in kinds}
    return {
        "what": PEER,
        "params": peer["params"],
        "versions": peer["versions"],
        "seconds": theirs,
        "disk_bytes_per_param": their_bytes,
        "our_seconds": ours,
        "our_disk_bytes_per_param": moved,
        "our_speed_over_it": ratios,
    }


def stepping(opt: CSDOptimizer) -> Callable[[], Any]:
    return lambda: (opt.step(), opt.stats())  # stats() waits until all states are written


def ratios(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return ratios of what was measured in the same turn."""
    turns = list(zip(*(seconds[name] for name in MEASURED), strict=True))
    return {
        "a step of CSDMuon, of the longer of both passes and Newton-Schulz": [s / max(d, o) for s, d, _, _, o in turns],
        "hidden, of the shorter of both passes and Newton-Schulz": [(d + o - s) / min(d, o) for s, d, _, _, o in turns],
        "both passes, of a step of CSDAdam": [d / a for _, d, a, _, _ in turns],
        "a step of CSDMuon, of one of CSDAdam": [s / a for s, _, a, _, _ in turns],
        "a step of CSDMuon, of one of torch.optim.Muon": [s / t for s, _, _, t, _ in turns],
    }


def describe(row: Row) -> str:
    if "skipped" in row:
        return f"{row['what']}: skipped, {row['skipped']}"
    parts = [f"{row['what']}: {span(row['seconds'], 3)} s"]
    if moved := row.get("bytes_per_param"):
        parts.append(f"{moved['flash_read']:.2f} B read and {moved['flash_write']:.2f} B written per parameter")
    if moved := row.get("disk_bytes_per_param"):
        parts.append(f"{moved['read']:.1f} B read and {moved['write']:.1f} B written per parameter")
    if ratio := row.get("our_speed_over_it"):
        each = row["our_disk_bytes_per_param"]
        parts.append(f"CSDMuon beside it: {span(row['our_seconds'], 3)} s, {span(ratio, 2)} times as fast")
        parts.append(f"{each['read']:.1f} B read and {each['write']:.1f} B written per parameter")
    if speed := row.get("flops_per_second"):
        parts.append(f"{span([s / 1e12 for s in speed], 3)} TFLOP/s in {row['dtype']}")
    return ", ".join(parts)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=4, help="of a GPT, with 12 width² parameters each")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rate", default="100MB/s", help="of each device, read and written")
    parser.add_argument("--tile", type=int, default=1 << 16, help="elements of a tile")
    parser.add_argument("--ns-dtype", default="bf16", choices=["bf16", "fp32"], help="of Newton-Schulz")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch; 1 on busy cores")
    parser.add_argument("--runs", type=int, default=7, help="turns, at least 5")
    parser.add_argument("--peer", action="store_true", help="DeepSpeed's Muon, too")
    parser.add_argument("--peer-params", type=int, default=1 << 25, help="parameters of that comparison")
    parser.add_argument("--rounds", type=int, default=3, help="turns of DeepSpeed and CSDMuon")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="where the states go")
    parser.add_argument("--quick", action="store_true", help="little matrices")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    arguments = parser.parse_args()
    if arguments.runs < 5:
        parser.error("--runs: at least 5")
    if not hasattr(torch.optim, "Muon"):
        parser.error("this torch has no Muon")
    if arguments.quick:
        arguments.blocks, arguments.width, arguments.tile = 2, 128, 1 << 12
    return arguments


if __name__ == "__main__":
    main()
