"""States in memory beside a drive, and where `auto` puts them. From the project's root:

    python -m bench.placement                 8 M parameters on paced drives, about two minutes
    python -m bench.placement --quick         a few seconds, to see that it works

Drives are paced far below the disk's rate, so that times do not depend on what else the disk does: bytes really move,
only the clock is made up. Memory (`ram:`) is not paced. All ways are timed by turns, one step each, from the moment
when gradients are there until all states are written:

    drive           all states on the drive
    half in ram     equal shares: half in memory, half on the drive
    auto, 2/3 fit   `auto`, with room in memory for two thirds of the states: at best a third of the drive's time
    1/3 ... in ram  other divisions, to see that none is faster
    auto, cache     the drive keeps all states, memory for two thirds of them is its cache, every step is durable
    2 drives        equal shares on two drives, one of which is three times as fast
    auto, 2 drives  the same drives, with states placed by `auto`

Nothing is reported unless all ways have the same parameters and states, to the last bit. Each ratio is that of one
turn, to `drive`, or of `auto, 2 drives` to `2 drives`; beside it is the ratio that bytes and rates alone would give.

--json prints schema csd_optim.bench.placement/1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.step import machine_facts, say, span
from csd_optim import CSDAdam
from csd_optim.devices import machine
from csd_optim.devices.units import parse_rate

Row = dict[str, Any]
TILE = 1 << 16  # elements
WARM_UP = 2  # steps: states are created, and read for the first time
SLOTS = 24  # bytes of states per parameter, in two slots
GOAL = 1.9  # with half of the states in memory, a step should be this many times as fast as on the drive alone


def main() -> None:
    arguments = parse()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    facts = {
        **machine_facts(),
        "storage": machine.storage(arguments.directory),
        "params": arguments.params,
        "mixed": arguments.mixed,
    }
    say(f"{arguments.params / 1e6:.1f} M bf16 parameters, a drive of {arguments.mixed / 1e6:.0f} MB/s")
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    rows = measure(arguments)
    for row in rows:
        say(describe(row))
    half = next(row for row in rows if row["what"] == "half in ram")["times_as_fast"]
    met = "met" if statistics.median(half) >= GOAL else "missed"
    say(f"goal, half in ram: {GOAL} times as fast as the drive alone: {met}")
    if arguments.json:
        json.dump({"schema": "csd_optim.bench.placement/1", "machine": facts, "goal": GOAL, "rows": rows}, sys.stdout)
        print()


def ways(arguments: argparse.Namespace, directory: str) -> dict[str, tuple[list[str], str, float]]:
    """Return for each way its devices, the way that it is compared with, and the largest possible speed-up."""
    drive, durable = (f"file:{directory}{name}?mixed={arguments.mixed}B/s" for name in ("", "/durable"))
    drive += "&cache=off&scratch=1"
    third = f"file:{directory}?mixed={arguments.mixed / 3}B/s&cache=off&scratch=1"
    room = f"ram:?room={int(SLOTS * arguments.params * 2 / 3)}"
    found: dict[str, tuple[list[str], str, float]] = {
        "drive": ([drive], "drive", 1),
        "half in ram": (["ram:", drive], "drive", 2),
        "auto, 2/3 fit": (["auto", room, drive], "drive", 3),
        "auto, cache": (["auto", room, durable], "drive", 2),
        "2 drives": ([f"{drive}&share=1", f"{third}&share=1"], "2 drives", 1),
        "auto, 2 drives": (["auto", drive, third], "2 drives", 2),
    }
    for part in (1 / 3, 0.6):
        found[f"{part:.2f} in ram"] = ([f"ram:?share={part}", f"{drive}&share={1 - part}"], "drive", 1 / (1 - part))
    return found


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Time all ways by turns. Raises SystemExit if their results differ."""
    torch.manual_seed(0)
    start, grad = (torch.randn(arguments.params).bfloat16() for _ in range(2))
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory, contextlib.ExitStack() as stack:
        params, opts, how = {}, {}, ways(arguments, directory)
        for name, (devices, _, _) in how.items():
            params[name] = torch.nn.Parameter(start.clone())
            opt = CSDAdam([params[name]], devices=devices, tile_size=min(TILE, arguments.params // 96))
            opts[name] = stack.enter_context(opt)
        seconds: dict[str, list[float]] = {name: [] for name in how}
        for i in range(WARM_UP + arguments.runs):
            for name, opt in opts.items():
                params[name].grad = grad
                begin = time.perf_counter()
                opt.step()
                opt.stats()  # waits until all states are written
                if i >= WARM_UP:
                    seconds[name].append(time.perf_counter() - begin)
                opt.synchronize()
        for name, (devices, beside, at_most) in how.items():
            for key, state in opts["drive"].state[params["drive"]].items():
                if not torch.equal(state, opts[name].state[params[name]][key]):
                    raise SystemExit(f"{name}: {key} differs from the drive alone: nothing is reported")
            stats = opts[name].stats()
            rows.append(
                {
                    "what": name,
                    "devices": [device.replace(directory, "DIRECTORY") for device in devices],
                    "shares": [d["params"] / arguments.params for d in stats["devices"]],
                    "seconds": seconds[name],
                    "predicted": stats.get("placement", {}).get("seconds"),
                    "beside": beside,
                    "times_as_fast": [a / b for a, b in zip(seconds[beside], seconds[name], strict=True)],
                    "at_most": at_most,
                }
            )
    return rows


def describe(row: Row) -> str:
    shares = " + ".join(f"{share:.2f}" for share in row["shares"])
    predicted = f", predicted {1e3 * row['predicted']:.0f}" if row["predicted"] else ""
    return (
        f"{row['what']:>14} {shares:>12}: {span([1e3 * s for s in row['seconds']], 0)} ms{predicted}; "
        f"{span(row['times_as_fast'], 2)} times as fast as {row['beside']}, at most {row['at_most']:.2f}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=8e6, help="number of parameters (default 8e6)")
    parser.add_argument("--mixed", type=parse_rate, default=300e6, help="of the drive, read and written together")
    parser.add_argument("--runs", type=int, default=9, help="timed steps, at least 5")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="where the states go")
    parser.add_argument("--quick", action="store_true", help="few parameters")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    arguments = parser.parse_args()
    arguments.params = int(4e5 if arguments.quick else arguments.params)
    arguments.runs = max(5, arguments.runs)
    return arguments


if __name__ == "__main__":
    main()
