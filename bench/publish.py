"""What opt.publish() costs, and how many bytes a version has.

    python -m bench.publish                       both parts, about ten minutes on two cores
    python -m bench.publish --part cost --params 32e6 --directory /mnt/nvme0
    python -m bench.publish --part bytes --width 1024 --layers 8 --pretrain 40 --pretrain-lr 3e-4

cost     a step with and without it, by turns, with fp32 and 8-bit states: in memory, on a drive, and on one paced to
         2.5 GB/s. Beside them a publisher that keeps a snapshot of the weights and compares it after the step
bytes    a byte-level GPT (that of bench/demo.py, or a larger one) is trained for --pretrain steps, saved to a file, and
         read from it again for each learning rate: bytes per parameter of versions of 1, 8 and 32 steps, against 2 for
         all weights, and how fast they are applied. It is no substitute for a published model. --keep DIR leaves the
         versions, for `python -m bench.studies.zstd`

Every version is compared with the model, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from csd_optim import CSDAdam, Replica
from csd_optim.devices import machine
from csd_optim.publish.encode import form_of
from csd_optim.replica.blocks import BITMAP, BLOCK, DENSE, SPARSE
from csd_optim.replica.reading import changes, opened
from csd_optim.replica.versions import Version, directory_of, numbers, read_version

from .demo import FULL, GPT, Size, batch, loss_of, standard_library
from .step import machine_facts, say, span

Row = dict[str, Any]
TENSOR = 1 << 22  # elements of a parameter of `cost`
STEPS = (1, 8, 32)  # of a version
LRS = (1e-6, 3e-6, 1e-5)


def main() -> None:
    arguments = parse()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    facts = {**machine_facts(), "load_average": os.getloadavg(), "storage": machine.storage(arguments.directory)}
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
        if "cost" in arguments.part:
            for row in cost_rows(Path(place), arguments.params, arguments.runs, arguments.lr):
                say(describe_cost(row))
                rows.append(row)
        if "bytes" in arguments.part:
            width, layers, lr = arguments.width, arguments.layers, arguments.pretrain_lr
            size = Size(width, layers, 8, 64, 8, 0, 0, 0, 12_000_000, lr)
            for row in bytes_rows(arguments.keep or Path(place), size, arguments.pretrain, max(arguments.steps)):
                say(describe_bytes(row))
                rows.append(row)
    facts["load_average_after"] = os.getloadavg()
    if arguments.json:
        json.dump({"schema": "csd_optim.bench.publish/1", "machine": facts, "rows": rows}, sys.stdout, indent=1)
        print()
    if arguments.plot:
        plot(rows, arguments.plot)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the bytes of versions, by learning rate and steps of a version."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in rows if row["what"] == "bytes"]
    figure, axes = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
    for row in rows:
        steps = [int(n) for n in row["steps"]]
        values = [of["bytes_per_param"] for of in row["steps"].values()]
        axes.plot(steps, values, marker="o", label=f"lr {row['lr']:g}")
    axes.axhline(2, color="black", linewidth=0.8, linestyle="--", label="all weights")
    axes.set(xscale="log", ylim=(0, None), xlabel="steps of a version", ylabel="bytes per parameter")
    axes.set_xticks(STEPS, [str(n) for n in STEPS])
    axes.minorticks_off()
    size, before = rows[0]["params"], rows[0]["pretrained_steps"]
    axes.set_title(f"GPT of {size / 1e6:.1f} M parameters, trained for {before} steps")
    axes.legend()
    figure.savefig(path, dpi=110)


# ---- what a step costs -------------------------------------------------------------------------


class Run:
    """Parameters of bf16 around 0.02, as those of language models, and an optimizer; with a publisher or without."""

    def __init__(self, place: Path, device: str, params: int, lr: float, state_dtype: str, *, publishes: bool) -> None:
        torch.manual_seed(0)
        n = max(1, round(params / TENSOR))
        self.model = torch.nn.ParameterList(
            torch.nn.Parameter((0.02 * torch.randn(params // n)).bfloat16()) for _ in range(n)
        )
        self.opt = CSDAdam(self.model.parameters(), lr=lr, devices=device, state_dtype=state_dtype)
        self.pub = self.opt.publish(place / "policy", model=self.model, keep=2) if publishes else None

    def step(self) -> tuple[float, float]:
        """Take a step until it is durable, and published. Returns wall seconds and CPU seconds."""
        for p in self.model.parameters():
            p.grad = torch.randn_like(p)
        start, cpu = time.perf_counter(), time.process_time()
        self.opt.step()
        self.opt.synchronize()
        if self.pub:
            self.pub.wait()
        return time.perf_counter() - start, time.process_time() - cpu


def cost_rows(place: Path, params: int, runs: int, lr: float) -> Iterator[Row]:
    for where, paced in (("ram", ""), ("drive", ""), ("paced", "?read=2.5GB/s&write=2.5GB/s")):
        for state_dtype in ("fp32", "8bit"):
            with tempfile.TemporaryDirectory(dir=place) as inside:
                device = "ram:" if where == "ram" else f"file:{inside}/{{}}{paced}"
                yield {"what": "cost", "where": where, **cost(Path(inside), device, params, runs, lr, state_dtype)}


def cost(place: Path, device: str, params: int, runs: int, lr: float, state_dtype: str) -> Row:
    plain, publishing = (
        Run(place, device.format(f"of-{i}"), params, lr, state_dtype, publishes=bool(i)) for i in range(2)
    )
    assert publishing.pub
    plain.step()  # fills the states; the other one's first step sends everything
    publishing.step()
    replica, held = Replica(place / "policy"), copy.deepcopy(publishing.model)
    replica.load(held)
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "publishing": []}
    snapshot, scans, nbytes = [p.detach().clone() for p in plain.model], [], []
    for i in range(runs):
        for name, run in (("plain", plain), ("publishing", publishing))[:: 1 if i % 2 else -1]:
            times[name].append(run.step())
        scans.append(timed(lambda: snapshot_and_compare(plain.model, snapshot)))
        replica.follow(held)
        nbytes.append(newest(place / "policy").nbytes / params)
    compare(publishing.model, held)
    for run in (plain, publishing):
        run.opt.close()
    return {
        "state_dtype": state_dtype,
        "params": params,
        "seconds": {name: [wall for wall, _ in taken] for name, taken in times.items()},
        "ratio": [b[0] / a[0] for a, b in zip(*times.values(), strict=True)],
        "cpu_ns_per_param": {name: [1e9 * cpu / params for _, cpu in taken] for name, taken in times.items()},
        "bytes_per_param": nbytes,
        "snapshot": {"seconds": scans, "bytes_per_param": 2},
    }


def snapshot_and_compare(model: Any, snapshot: Sequence[torch.Tensor]) -> int:
    """Do what publishers without an optimizer's help do. Returns the number of elements found."""
    found = 0
    for p, was in zip(model, snapshot, strict=True):
        now, before = p.detach().view(torch.int16), was.view(torch.int16)
        at = (now != before).nonzero().view(-1)
        found += len(now[at])
        before[at] = now[at]
    return found


# ---- bytes of a version ------------------------------------------------------------------------


def bytes_rows(place: Path, size: Size, pretrain: int, steps: int) -> Iterator[Row]:
    """Train a model, save it, and follow it from there with each learning rate."""
    text, _, _ = standard_library(size.text_bytes)
    torch.manual_seed(0)
    model = GPT(size).bfloat16()
    generator = torch.Generator().manual_seed(1)
    params = sum(p.numel() for p in model.parameters())
    say(f"training {params / 1e6:.1f} M parameters for {pretrain} steps at {size.lr:g}")
    losses = []
    with CSDAdam(model.parameters(), lr=size.lr, devices="ram:") as opt:
        for i in range(pretrain):
            losses.append(train_step(model, opt, text, size, generator))
            if i % 20 == 0:
                say(f"step {i}: loss {losses[-1]:.3f}")
    place.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), place / "model.pt")
    for lr in LRS:
        model.load_state_dict(torch.load(place / "model.pt"))
        path = place / f"lr-{lr:g}"
        held: dict[str, np.ndarray[Any, Any]] = {}
        generator = torch.Generator().manual_seed(2)
        apply_seconds = []
        with CSDAdam(model.parameters(), lr=lr, weight_decay=0.0, devices="ram:") as opt:
            pub = opt.publish(path, model=model, keep=steps + 2)
            replica = Replica(path)
            replica.load(held)
            for _ in range(steps + 1):
                train_step(model, opt, text, size, generator)
                pub.wait()
                apply_seconds.append(timed(partial(replica.follow, held)))
        for name, p in model.named_parameters():
            wanted = p.detach().view(-1).view(torch.int16).numpy().view(np.uint16)
            if not np.array_equal(held[name], wanted):
                raise SystemExit(f"{name} differs from the model at lr {lr:g}")
        versions = [read_version(path / directory_of(n)) for n in numbers(path)][2:]  # after the first step's
        say(f"lr {lr:g}: {steps} steps, {len(versions)} versions")
        yield {
            "what": "bytes",
            "params": params,
            "pretrained_steps": pretrain,
            "pretrain_lr": size.lr,
            "first_loss": losses[0] if losses else None,
            "last_loss": losses[-1] if losses else None,
            "lr": lr,
            "apply_seconds": median(apply_seconds[1:]),
            "version_bytes": median(v.nbytes for v in versions),
            "steps": {n: union(versions, n, params) for n in STEPS if n <= len(versions)},
        }


def train_step(model: GPT, opt: CSDAdam, text: torch.Tensor, size: Size, generator: torch.Generator) -> float:
    opt.zero_grad()
    loss = loss_of(model, *batch(text, size, generator), torch.float32)
    loss.backward()
    opt.step()
    return loss.item()


def union(versions: Sequence[Version], n: int, params: int) -> Row:
    """Return the mean share of changed elements, and bytes per parameter, of versions of n steps each."""
    changed, nbytes, sparse, groups = 0, 0, 0, len(versions) // n
    for group in (versions[i * n : (i + 1) * n] for i in range(groups)):
        with contextlib.ExitStack() as stack:
            opened_group = [(version, stack.enter_context(opened(version))) for version in group]
            for index, tensor in enumerate(group[0].tensors):
                mask = np.zeros(tensor.numel, bool)
                for version, files in opened_group:
                    for indices, _ in changes(version, files, index):
                        mask[indices] = True
                for first in range(0, len(mask), BLOCK):
                    block = mask[first : first + BLOCK]
                    count = int(block.sum())
                    sizes = {SPARSE: 4 * count, BITMAP: -(-len(block) // 64) * 8 + 2 * count, DENSE: 2 * len(block)}
                    changed, sparse = changed + count, sparse + 4 * count
                    nbytes += sizes[form_of(count, len(block))]
    total = groups * params
    return {"changed": changed / total, "bytes_per_param": nbytes / total, "sparse_only": sparse / total}


# ---- common ------------------------------------------------------------------------------------


def newest(path: Path) -> Version:
    return read_version(path / directory_of(numbers(path)[-1]))


def compare(model: Any, held: Any) -> None:
    same = zip(model.parameters(), held.parameters(), strict=True)
    if not all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in same):
        raise SystemExit("the replica differs from the model")


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def describe_cost(row: Row) -> str:
    seconds = row["seconds"]
    cpu = {name: median(values) for name, values in row["cpu_ns_per_param"].items()}
    text = f"{row['where']:6} {row['state_dtype']}: {span(seconds['plain'], 2)} s, "
    text += f"publishing {span(seconds['publishing'], 2)} s, ratio {span(row['ratio'], 3)}; "
    text += f"CPU {cpu['plain']:.2f} and {cpu['publishing']:.2f} ns/param; {median(row['bytes_per_param']):.3f} B/param"
    return f"{text}; a snapshot's scan {span(row['snapshot']['seconds'], 2)} s and 2 B/param of memory"


def describe_bytes(row: Row) -> str:
    text = f"lr {row['lr']:g}, {row['params'] / 1e6:.1f} M parameters: "
    for n, of in row["steps"].items():
        text += f"{n} steps {of['changed']:.1%}, {of['bytes_per_param']:.3f} B/param; "
    rate = row["params"] / row["apply_seconds"]
    return f"{text}applied at {rate / 1e6:.0f} M params/s, {row['version_bytes'] / row['apply_seconds'] / 1e6:.0f} MB/s"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=["cost", "bytes"], default=["cost", "bytes"])
    parser.add_argument("--params", type=float, default=32e6, help="of `cost` (default 32e6)")
    parser.add_argument("--lr", type=float, default=1e-6, help="of `cost`: how much changes (default 1e-6)")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--width", type=int, default=FULL.width, help="of the GPT")
    parser.add_argument("--layers", type=int, default=FULL.layers)
    parser.add_argument("--pretrain", type=int, default=250, help="steps before")
    parser.add_argument("--pretrain-lr", type=float, default=1e-3, help="their learning rate (default 1e-3)")
    parser.add_argument("--steps", type=int, nargs="+", default=[32], help="steps of `bytes` at each learning rate")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="on the disk to be measured")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the versions of `bytes` there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the bytes of versions")
    parser.add_argument("--quick", action="store_true", help="tiny")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.params, arguments.runs, arguments.pretrain, arguments.steps = 100_000, 3, 2, [8]
        arguments.width, arguments.layers = 64, 1
    arguments.params = int(arguments.params)
    return arguments


if __name__ == "__main__":
    main()
