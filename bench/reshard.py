"""csd-optim reshard, 1 rank to 3 and 3 to 2, compared with `cp` of the same bytes. From the project's root:

    python -m bench.reshard                           100 M parameters
    python -m bench.reshard --directory /mnt/nvme0/bench --params 1e9
    python -m bench.reshard --quick                   tiny, to see that it works

A run takes the three by turns: `cp` of a file as large as the states that the stores hold (12 bytes per parameter), and
its flush; the stores of 3 ranks, from that of a process alone; the stores of 2 ranks, from these 3. Whatever is read is
evicted from the page cache before, and what is written counts when it is durable. Reshard reads back what it has
written, for the checksums of the new tiles, and allocates the second slot of each tile; `cp` does neither.

In the first run, all states of the new stores are compared with those of the first one. In each, all checksums are.
The new stores of all ranks are on one disk, and are made by one process.

--json prints schema csd_optim.bench.reshard/1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.step import machine_facts, say, span
from csd_optim import CSDAdam
from csd_optim.checkpoint.export import export_torch
from csd_optim.checkpoint.reshard import reshard
from csd_optim.checkpoint.verify import verify
from csd_optim.devices import machine
from csd_optim.store.format import FILE_NAME

BYTES = 12  # per parameter: master and two moments, in fp32
WIDTH = 1000  # rows have no whole groups or pages


def main() -> None:
    arguments = parse()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    facts = {**machine_facts(), "load_average": os.getloadavg(), "storage": machine.storage(arguments.directory)}
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
        rows = measure(Path(place), arguments.params, arguments.runs)
    for row in rows:
        say(describe(row))
    facts["load_average_after"] = os.getloadavg()
    if arguments.json:
        json.dump({"schema": "csd_optim.bench.reshard/1", "machine": facts, "rows": rows}, sys.stdout, indent=1)
        print()


def measure(place: Path, params: int, runs: int) -> list[dict[str, Any]]:
    one, three, two = ([place / f"of-{n}-{rank}" for rank in range(n)] for n in (1, 3, 2))
    params = make_store(one[0], params)
    plain, copied = place / "plain", place / "copied"
    fill(plain, BYTES * params)
    wanted = states_of(one, place)
    seconds: dict[str, list[float]] = {"cp": [], "1 to 3": [], "3 to 2": []}
    for i in range(runs):
        evict([plain])
        seconds["cp"].append(timed(partial(copy, plain, copied)))
        for name, old, new in (("1 to 3", one, three), ("3 to 2", three, two)):
            evict(old)
            to = [str(new[0]).removesuffix("0") + "{rank}"]
            seconds[name].append(timed(partial(reshard, old, to, len(new))))
            if any(verdict.damage or verdict.unchecked for verdict in verify(new)):
                raise SystemExit(f"{name}: the new stores are damaged")
            if i == 0:
                compare(name, states_of(new, place), wanted)
        copied.unlink()
        for path in (*three, *two):
            shutil.rmtree(path)
    return [
        {
            "what": what,
            "params": params,
            "bytes": BYTES * params,
            "seconds": taken,
            "bytes_per_second": BYTES * params / median(taken),
            "ratio_to_cp": [t / cp for t, cp in zip(taken, seconds["cp"], strict=True)],
        }
        for what, taken in seconds.items()
    ]


def make_store(path: Path, params: int) -> int:
    """Make the store of a process alone after a step; return the number of its parameters, a few more at most."""
    torch.manual_seed(0)
    matrix = torch.nn.Parameter(torch.randn(-(-params // WIDTH), WIDTH, dtype=torch.bfloat16))
    vector = torch.nn.Parameter(torch.randn(WIDTH, dtype=torch.bfloat16))
    with CSDAdam([matrix, vector], devices=[path]) as opt:
        for p in (matrix, vector):
            p.grad = torch.randn(p.shape, dtype=p.dtype)
        opt.step()
        opt.synchronize()
    return matrix.numel() + vector.numel()


def fill(path: Path, size: int) -> None:
    """Write a file of bytes that no file system can compress or leave out."""
    block = os.urandom(1 << 24)
    with path.open("wb") as file:
        for first in range(0, size, len(block)):
            file.write(block[: size - first])
        os.fsync(file.fileno())


def copy(path: Path, to: Path) -> None:
    subprocess.run(["cp", "--reflink=never", "--sparse=never", path, to], check=True)
    flush(to)


def flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def evict(paths: Sequence[Path]) -> None:
    for path in paths:
        flush(path / FILE_NAME if path.is_dir() else path)


def states_of(stores: Sequence[Path], place: Path) -> dict[Any, Any]:
    """Return the states of all parameters, in a mapped file that has no name any more."""
    [file] = export_torch([*stores], place / "exported.pt")
    state: dict[Any, Any] = torch.load(file, mmap=True)["state"]
    file.unlink()
    return state


def compare(name: str, found: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    same = found.keys() == wanted.keys() and all(
        found[k].keys() == wanted[k].keys() and all(torch.equal(found[k][key], wanted[k][key]) for key in wanted[k])
        for k in wanted
    )
    if not same:
        raise SystemExit(f"{name}: the new stores have other states than the old one")


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def describe(row: dict[str, Any]) -> str:
    text = f"{row['what']:8} {row['bytes'] / 1e9:.2f} GB  {span(row['seconds'], 2)} s  "
    text += f"{row['bytes_per_second'] / 1e6:.0f} MB/s"
    return text + (f"  {span(row['ratio_to_cp'], 2)} times cp" if row["what"] != "cp" else "")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1e8, help="number of parameters (default 1e8)")
    parser.add_argument("--runs", type=int, default=5, help="at least 5")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="on the disk to be measured")
    parser.add_argument("--quick", action="store_true", help="100 000 parameters")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    arguments = parser.parse_args()
    arguments.params = 100_000 if arguments.quick else int(arguments.params)
    if arguments.runs < 5:
        parser.error("--runs is at least 5: a median of fewer says little")
    return arguments


if __name__ == "__main__":
    main()
