"""Parameters on an accelerator: rates of the link, of Top-K selection, and of a step. From the project's root:

    python -m bench.accelerator                         300 M parameters, some minutes
    python -m bench.accelerator --quick                 to see that it works
    python -m bench.accelerator --directory /mnt/nvme0  on this drive
    python -m bench.accelerator --emulated              on the tests' emulated accelerator, whose rates mean nothing

    link       a tile's gradients copied from and to pinned memory: each way alone, and both at once on two streams
    selection  up to 256 tiles with error feedback, as in a step, compared with a copy of their gradients (in bytes per
               second, by calculation) and with torch.topk (in elements per second)
    step       on `ram:` and on a file, dense and with Top-K 1 %, compared with parameters in host memory; and on
               `gpu:`, compared with `ram:` for parameters on the accelerator

First, steps with parameters on the accelerator are compared with steps on the CPU, bit for bit. --json prints schema
csd_optim.bench.accelerator/1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.step import machine_facts, say, span, timed
from csd_optim import CSDAdam, bindings
from csd_optim.accelerator import accelerator_type
from csd_optim.compression.kernel_check import topk_kernels_of
from csd_optim.compression.kernel_selection import KernelSelection
from csd_optim.compression.selection import HostSelection, Part, Tiles, TopK

Row = dict[str, Any]
TILE = 1 << 20  # elements
TENSOR = 1 << 26
SELECTED = 256  # tiles whose selection is timed, as many as a step of 268 M parameters has
PASSES = 4  # times that selection and feedback read gradients and residuals; residuals are written once
WARM_UP = 2


def main() -> None:
    arguments = parse()
    device = torch.device(accelerator_type(), torch.accelerator.current_device_index())
    facts = {**machine_facts(), "accelerator": name_of(device), "torch": torch.__version__}
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    verify(device, arguments.directory)
    rows = link_rows(device, arguments) + selection_rows(device, arguments) + step_rows(device, arguments)
    for row in rows:
        say(f"{row['what']}: {span([r / 1e9 for r in row['rates']], 2)} {row['unit']}")
        for name, ratios in row.get("ratio_to", {}).items():
            say(f"    {span(ratios, 2)} of {name}")
    if arguments.json:
        json.dump({"schema": "csd_optim.bench.accelerator/1", "machine": facts, "rows": rows}, sys.stdout, indent=1)
        print()


def name_of(device: torch.device) -> str:
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else str(device)


def optimizer_on(place: torch.device | str, params: int, devices: str, topk: float | None) -> CSDAdam:
    """Return a CSDAdam over `params` random bf16 elements on `place`, with gradients; the values depend on no place."""
    generator = torch.Generator().manual_seed(1)
    tensors = []
    for first in range(0, params, TENSOR):
        value, grad = torch.randn(2, min(TENSOR, params - first), generator=generator).bfloat16()
        tensors.append(value.to(place).requires_grad_())
        tensors[-1].grad = grad.to(place)
    return CSDAdam([{"params": tensors, "topk": topk}], devices=devices, tile_size=min(TILE, params))


def cases(directory: Path) -> list[tuple[str, str, float | None]]:
    """Return for each case the devices for parameters on the accelerator, those for host memory, and Top-K's share."""
    on_both = [(d, d, topk) for d in ("ram:", f"file:{directory}?scratch=1") for topk in (None, 0.01)]
    return [*on_both, ("gpu:", "ram:", None)]


def verify(device: torch.device, directory: Path) -> None:
    for devices, of_host, topk in cases(directory):
        found = []
        for place, on in ((device, devices), ("cpu", of_host)):
            with optimizer_on(place, 3_000_000, on, topk) as opt:
                for _ in range(3):
                    opt.step()
                p = opt.param_groups[0]["params"][0]
                found.append([t.detach().cpu().clone() for _, t in [("", p), *sorted(opt.state[p].items())]])
        if not all(map(torch.equal, *found)):
            raise SystemExit(f"{devices}, topk={topk}: bits differ from the CPU's: nothing is timed")
    say("verified: steps on ram: and a file, dense and with Top-K, and on gpu: have the bits of the CPU")


def by_turns(runs: int, *calls: Callable[[], Any]) -> list[list[float]]:
    """Time the calls in turn, `runs` times. Returns each call's seconds until the accelerator is done."""
    seconds: list[list[float]] = [[] for _ in calls]
    for i in range(WARM_UP + runs):
        for call, own in zip(calls, seconds, strict=True):
            torch.accelerator.synchronize()
            elapsed = timed(lambda c=call: (c(), torch.accelerator.synchronize()))
            if i >= WARM_UP:
                own.append(elapsed)
    return seconds


def link_rows(device: torch.device, arguments: argparse.Namespace) -> list[Row]:
    n = 4 * arguments.tile
    down, up = (torch.empty(n, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    there, back = (torch.zeros(n, dtype=torch.uint8, device=device) for _ in range(2))
    streams = torch.Stream(device), torch.Stream(device)

    def copies(*ways: int) -> None:
        for _ in range(arguments.copies):
            for way in ways:
                with streams[way]:
                    if way:
                        back.copy_(up, non_blocking=True)
                    else:
                        down.copy_(there, non_blocking=True)

    moved = n * arguments.copies
    names = ("link, to the host", "link, to the device", "link, both ways at once, each")
    turns = by_turns(arguments.runs, lambda: copies(0), lambda: copies(1), lambda: copies(0, 1))
    return [
        {"part": "link", "what": name, "unit": "GB/s", "rates": [moved / s for s in seconds]}
        for name, seconds in zip(names, turns, strict=True)
    ]


def selection_rows(device: torch.device, arguments: argparse.Namespace) -> list[Row]:
    tile, rows, library = arguments.tile, list[Row](), topk_kernels_of(device)
    selected = min(SELECTED, max(8, arguments.params // tile))
    n = selected * tile

    def select(tiles: Tiles) -> None:
        selection = HostSelection(tiles) if library is None else KernelSelection(library, tiles)
        selection.feed_back()

    for dtype in (torch.float32, torch.bfloat16):
        grad = torch.randn(n, device=device).to(dtype)
        residual, copy = torch.zeros(n, dtype=torch.bfloat16, device=device), torch.empty_like(grad)
        per_copy = (PASSES * (dtype.itemsize + 2) + 2) / (2 * dtype.itemsize)  # bytes, as a multiple of the copy's
        topk, k = TopK(0.01, torch.bfloat16, None, 1.0, 1), bindings.topk_count(0.01, tile)
        parts = zip(grad.split(tile), residual.split(tile), range(0, n, tile), strict=True)
        tiles = {first // tile: (tile, [Part(topk, g, r, first, 0)]) for g, r, first in parts}
        ours, copies, torchs = by_turns(
            arguments.runs,
            lambda t=tiles: select(t),
            lambda g=grad, c=copy: c.copy_(g),
            lambda g=grad, n=k: g.view(selected, -1).abs().topk(n, dim=-1),
        )
        rows.append(
            {
                "part": "selection",
                "what": f"selection and feedback, {dtype}".replace("torch.", "") + ("" if library else ", on the host"),
                "unit": "G elements/s",
                "rates": [n / s for s in ours],
                "ratio_to": {
                    "a copy": [per_copy * c / s for c, s in zip(copies, ours, strict=True)],
                    "torch.topk's speed": [t / s for t, s in zip(torchs, ours, strict=True)],
                },
            }
        )
    return rows


def step_rows(device: torch.device, arguments: argparse.Namespace) -> list[Row]:
    rows = []
    for devices, of_host, topk in cases(arguments.directory):
        there = optimizer_on(device, arguments.params, devices, topk)
        here = optimizer_on("cpu", arguments.params, of_host, topk)
        with there, here:
            ours, host = by_turns(arguments.runs, *(lambda o=o: (o.step(), o.stats()) for o in (there, here)))
        what = "dense" if topk is None else "Top-K 1 %"
        rows.append(
            {
                "part": "step",
                "what": f"step, {devices.partition(':')[0]}, {what}",
                "unit": "G parameters/s",
                "params": arguments.params,
                "rates": [arguments.params / s for s in ours],
                "ratio_to": {"the speed in host memory": [h / s for h, s in zip(host, ours, strict=True)]},
            }
        )
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=3e8, help="number of parameters (default 3e8)")
    parser.add_argument("--runs", type=int, default=7, help="timed runs, at least 5")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="on the drive to be timed")
    parser.add_argument("--quick", action="store_true", help="300 000 parameters, small tiles")
    parser.add_argument("--emulated", action="store_true", help="on the tests' emulated accelerator")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    arguments = parser.parse_args()
    if arguments.emulated:
        emulated = importlib.import_module("tests.support.emulated")
        emulated.load()
        emulated.set_schedule("at once")
    if not torch.accelerator.is_available():
        parser.error("torch has no accelerator here")
    arguments.tile, arguments.copies = (4096, 2) if arguments.quick else (TILE, 50)
    arguments.params, arguments.runs = int(3e5 if arguments.quick else arguments.params), max(5, arguments.runs)
    arguments.directory.mkdir(parents=True, exist_ok=True)
    return arguments


if __name__ == "__main__":
    main()
