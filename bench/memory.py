"""The memory of a training per parameter of its model, with and without gradients freed in backward. From the project's
root:

    python -m bench.memory                    up to 1.6 B parameters: some minutes, and 16 GB of disk
    python -m bench.memory --quick            one small model, to see that it works

A GPT in bf16, with 8-bit states in a named directory, takes a few steps, each time in a process of its own:

    none    gradients stay in p.grad, as in torch
    free    overlap(model, free_gradients=True): the step runs in backward

Peak resident memory (VmHWM) is reported (parameters, gradients, activations, buffers, Python and torch, but not the
page cache), and its growth in bytes per parameter, from the smallest model to the largest. With `free`, the largest
model is trained once more in a process limited to what it should need, 2 bytes per parameter and --allowance for the
rest; with `none` the same limit must make it fail, as a test of the limit. The limit is RLIMIT_DATA: it counts the
private writable memory of a process, not the page cache, needs no privileges, and makes allocations beyond it fail.
After the last step, all modes must have the same parameters, or nothing is reported.

--json prints schema csd_optim.bench.memory/1.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from bench.demo import GPT, Size
from bench.step import machine_facts, say
from csd_optim import CSDAdam
from csd_optim.devices import machine
from csd_optim.devices.units import parse_bytes

Row = dict[str, Any]
MODES = ("none", "free")
CONTEXT = 16  # tokens: few, so that activations take hardly any memory
SECONDS = 3600  # for one process


def main() -> None:
    arguments = parse()
    if arguments.child:
        json.dump(train(arguments), sys.stdout)
        return
    arguments.directory.mkdir(parents=True, exist_ok=True)
    facts = {**machine_facts(), "storage": machine.storage(arguments.directory)}
    say(f"a GPT of width {arguments.width}, {arguments.steps} steps")
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    rows: list[Row] = []
    for layers in arguments.layers:
        same = [measured(arguments, mode, layers) for mode in MODES[: 1 if arguments.quick else 2]]
        verify(same)
        rows += same
    limit = 2 * rows[-1]["params"] + arguments.allowance
    limited = [measured(arguments, "free", arguments.layers[-1], limit)]
    verify([rows[-1], *limited])
    if not arguments.quick:
        limited.append(measured(arguments, "none", arguments.layers[-1], limit))
    small, large = rows[:2], rows[-2:]
    slopes = {} if arguments.quick else {a["mode"]: slope(a, b) for a, b in zip(small, large, strict=True)}
    for name, grows in slopes.items():
        say(f"{name}: {grows:.2f} bytes per parameter")
    rows += limited
    if arguments.json:
        result = {"schema": "csd_optim.bench.memory/1", "machine": facts, "bytes_per_param": slopes, "rows": rows}
        json.dump(result, sys.stdout, indent=1)
        print()


def slope(small: Row, large: Row) -> float:
    """Return the growth of memory in bytes per additional parameter."""
    return float((large["peak_bytes"] - small["peak_bytes"]) / (large["params"] - small["params"]))


def verify(rows: list[Row]) -> None:
    if len({row["checksum"] for row in rows}) != 1 or any(row["failed"] for row in rows):
        said = "; ".join(f"{row['mode']}: {row['failed'] or row['checksum']}" for row in rows)
        raise SystemExit(f"the parameters are not the same, or a process failed: nothing is reported. {said}")


def measured(arguments: argparse.Namespace, mode: str, layers: int, limit: int = 0) -> Row:
    """Run a training in a process of its own. `limit`: of its memory, in bytes; 0 for none."""
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        options = [f"--child={mode}", f"--directory={directory}", f"--limit={limit}", f"--layers={layers}"]
        options += [f"--width={arguments.width}", f"--steps={arguments.steps}"]
        command = [sys.executable, "-m", "bench.memory", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    row: Row = {"mode": mode, "layers": layers, "limit_bytes": limit, "failed": "", "checksum": None}
    if done.returncode:
        row["failed"] = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    else:
        row |= json.loads(done.stdout)
    say(describe(row))
    return row


def train(arguments: argparse.Namespace) -> Row:
    """Train, in the process that is measured."""
    if arguments.limit:
        resource.setrlimit(resource.RLIMIT_DATA, (arguments.limit, arguments.limit))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    heads = max(1, arguments.width // 64)
    model = GPT(Size(arguments.width, arguments.layers[0], heads, CONTEXT, 1, 0, 0, 0, 0, 0.0))
    opt = CSDAdam(model.parameters(), lr=1e-4, devices=[arguments.directory / "csd"], state_dtype="8bit")
    if arguments.child == "free":
        opt.overlap(model, free_gradients=True)
    seconds = []
    for _ in range(arguments.steps):
        began = time.perf_counter()
        text = torch.randint(256, (1, CONTEXT + 1))
        functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        opt.step()
        opt.zero_grad()
        seconds.append(time.perf_counter() - began)
    opt.synchronize()
    checksum = 0
    for p in model.parameters():
        checksum = zlib.crc32(p.detach().view(torch.uint8).numpy().data, checksum)  # type: ignore[arg-type]
    buffers = opt.stats()["buffer_bytes"]
    opt.close()
    return {
        "params": sum(p.numel() for p in model.parameters()),
        "peak_bytes": peak(),
        "buffer_bytes": buffers,
        "seconds": seconds,
        "checksum": checksum,
    }


def peak() -> int:
    """Return this process's peak resident bytes. Not ru_maxrss: a forked process inherits its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10


def describe(row: Row) -> str:
    where = f", limited to {row['limit_bytes'] / 2**30:.2f} GiB" if row["limit_bytes"] else ""
    if row["failed"]:
        return f"{row['mode']}, {row['layers']} layers{where}: {row['failed']}"
    return (
        f"{row['mode']}, {row['params'] / 1e9:.2f} B parameters{where}: {row['peak_bytes'] / 2**30:.2f} GiB, "
        f"{row['peak_bytes'] / row['params']:.2f} B per parameter, {min(row['seconds']):.1f} s a step"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1664)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48], help="layers of each model, ascending")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--allowance", type=parse_bytes, default="2GiB", help="the limit beyond 2 bytes per parameter")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="where the states go")
    parser.add_argument("--quick", action="store_true", help="one small model")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.width, arguments.layers = 128, [1]
    return arguments


if __name__ == "__main__":
    main()
