"""Trains a small GPT three times, side by side: with CSDAdam on emulated CSDs, with fp32 states and with 8-bit states,
and with torch.optim.AdamW.

    python bench/demo.py                  about two minutes on two cores, into build/demo/
    python bench/demo.py --devices 2 --steps 100 --out DIR --json
    python bench/demo.py --cards --devices 2        on SmartSSDs; with `csd-optim emu --devices 2 --` before, emulated

All three start from the same weights and see the same batches: bytes of the Python standard library's own source, which
every machine has. Weights are bf16. AdamW keeps fp32 masters and moments in memory. CSDAdam keeps them in files, one
directory per emulated CSD; the third training keeps them as 8-bit codes. The demo shows the loss curves, the bytes that
moved, and the host memory that each needs.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from csd_optim import CSDAdam
from csd_optim.devices.machine import machine
from csd_optim.devices.spec import days_left

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "demo"
SEED = 0
# Bytes per parameter and step that ZeRO-Infinity's published data path moves over the interconnect: fp32 gradient and
# states (16 B) are read from storage, and states and gradients (16 B) written to it.
ZERO_INFINITY = {"read": 16.0, "written": 16.0}
STATE_BYTES = 12  # master, exp_avg, exp_avg_sq in fp32
LARGE = 7e9  # parameters of the large model in the memory table
RATED = 600e12  # bytes: the endurance rating of a usual 1 TB drive
FULL_TILE_BYTES = 12 << 20  # a large model's tile, of 1 Mi elements, which fills a buffer
BUFFERS = 8  # per device
CODES_SHARE = 5 / 12  # size of 8-bit states relative to fp32 states
NAMES = {"csdadam": "CSDAdam", "csdadam_8bit": "CSDAdam, 8-bit", "adamw": "AdamW"}
CSDADAM = ("csdadam", "csdadam_8bit")


@dataclass(frozen=True)
class Size:
    """One size of the experiment."""

    width: int
    layers: int
    heads: int
    context: int  # bytes of text that a prediction sees
    batch: int
    steps: int
    validations: int  # how often the validation loss is computed
    validation_batches: int
    text_bytes: int  # most bytes of source that are read
    lr: float


FULL = Size(256, 4, 4, 64, 16, 200, 10, 8, 12_000_000, 1e-3)
QUICK = Size(64, 2, 2, 32, 8, 20, 2, 2, 1_000_000, 2e-3)


# ---- text and model ------------------------------------------------------------


def source_files(folder: Path) -> list[Path]:
    """Return Python files below `folder`, without tests, in an order that depends only on names and mixes packages."""
    skipped = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
    files = []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped]
        files += [Path(where, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda f: zlib.crc32(f.relative_to(folder).as_posix().encode()))


def standard_library(limit: int) -> tuple[Tensor, Tensor, int]:
    """Read the standard library's sources. Returns training text, validation text (other files), number of files."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[bool, bytearray] = {False: bytearray(), True: bytearray()}
    n = total = 0
    for n, file in enumerate(source_files(folder), 1):  # in mixed order, so that a limit takes a bit of everything
        data = file.read_bytes()
        texts[n % 10 == 0] += data  # every tenth file is for validation
        total += len(data)
        if total >= limit:
            break
    if total < 200_000:
        sys.exit(f"there is hardly any Python source in {folder}; the demo needs a Python with its standard library")
    train, validation = (torch.frombuffer(texts[v], dtype=torch.uint8) for v in (False, True))
    return train, validation, n


def batch(text: Tensor, size: Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random windows of `text`, and the same one byte later: (inputs, targets), each [batch, context]."""
    starts = torch.randint(len(text) - size.context, (size.batch, 1), generator=generator)
    windows = text[starts + torch.arange(size.context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


class Block(nn.Module):
    """Attention, then a perceptron of two layers, each with a residual connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, width // self.heads)
        q, k, v = (s.transpose(1, 2) for s in qkv.unbind(2))  # each [b, heads, t, width / heads]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A transformer that predicts the next byte."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # Weights that add to the residual stream start smaller, because 2 * layers of them do.
                scale = (2 * size.layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(p, std=0.02 * scale)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.byte(inputs) + self.position.weight[: inputs.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss_of(model: GPT, inputs: Tensor, targets: Tensor, compute: torch.dtype) -> Tensor:
    """Return the cross-entropy in nats per byte. Weights are bf16; `compute` is the dtype of the computation."""
    weights = {name: p.to(compute) for name, p in model.named_parameters()}
    logits = torch.func.functional_call(model, weights, (inputs,))
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def validation_loss(model: GPT, batches: list[tuple[Tensor, Tensor]], compute: torch.dtype) -> float:
    return statistics.fmean(loss_of(model, *b, compute).item() for b in batches)


def fastest_dtype(model: GPT, example: tuple[Tensor, Tensor]) -> tuple[torch.dtype, float]:
    """Return bf16 or fp32, whichever this processor trains the model in faster, and how many times faster."""
    seconds: dict[torch.dtype, list[float]] = {torch.bfloat16: [], torch.float32: []}
    for _ in range(5):  # by turns, so that a disturbance affects both
        for dtype, runs in seconds.items():
            start = time.perf_counter()
            loss_of(model, *example, dtype).backward()
            runs.append(time.perf_counter() - start)
    model.zero_grad()
    best = min(seconds, key=lambda d: min(seconds[d]))
    return best, max(map(min, seconds.values())) / min(seconds[best])


class AdamWOnMasters:
    """The usual mixed precision in memory: AdamW on fp32 masters of a 16-bit model."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        self.params = params
        self.masters = [p.detach().float().clone().requires_grad_() for p in params]
        self.adamw = torch.optim.AdamW(self.masters, lr=lr, weight_decay=0.1, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for master, p in zip(self.masters, self.params, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        self.adamw.step()
        for master, p in zip(self.masters, self.params, strict=True):
            p.copy_(master)

    def state_bytes(self) -> int:
        """Return the bytes of the masters and of all tensors in AdamW's state."""
        states = [t for entry in self.adamw.state.values() for t in entry.values()]
        return sum(t.untyped_storage().nbytes() for t in self.masters + states)


# ---- training --------------------------------------------------------------------


@dataclass
class Row:
    """One step of each optimizer, by name: losses in nats per byte, and seconds."""

    step: int
    loss: dict[str, float]
    seconds: dict[str, float]  # CSDAdam's end when all states have reached their devices


@dataclass
class Validation:
    step: int  # steps done
    loss: dict[str, float]


def train(
    size: Size,
    models: dict[str, GPT],
    optimizers: dict[str, CSDAdam | AdamWOnMasters],
    texts: tuple[Tensor, Tensor],
    compute: torch.dtype,
) -> Iterator[tuple[Row, Validation | None, dict[str, Any]]]:
    """Train all models one step at a time. Yields each step's losses, its validation if any, CSDAdam's statistics."""

    def schedule(step: int) -> float:
        warm_up = max(1, size.steps // 10)
        return min(1.0, (step + 1) / warm_up) * (0.55 + 0.45 * math.cos(math.pi * step / size.steps))

    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(o.adamw if isinstance(o, AdamWOnMasters) else o, schedule)
        for o in optimizers.values()
    ]
    random = torch.Generator().manual_seed(SEED)
    held_out = [batch(texts[1], size, random) for _ in range(size.validation_batches)]
    every = max(1, size.steps // size.validations)
    for step in range(1, size.steps + 1):
        inputs, targets = batch(texts[0], size, random)
        row, stats = Row(step, {}, {}), {}
        for name, optimizer in optimizers.items():
            loss = loss_of(models[name], inputs, targets, compute)
            models[name].zero_grad()
            loss.backward()
            start = time.perf_counter()
            optimizer.step()
            if isinstance(optimizer, CSDAdam):
                stats[name] = optimizer.stats()  # waits for the last write
            row.seconds[name] = time.perf_counter() - start
            row.loss[name] = loss.item()
        for scheduler in schedulers:
            scheduler.step()
        validation = None
        if step % every == 0 or step == size.steps:
            validation = Validation(step, {name: validation_loss(m, held_out, compute) for name, m in models.items()})
        yield row, validation, stats


# ---- what is shown ------------------------------------------------------------------


def smooth(values: list[float], span: int) -> list[float]:
    """Return the exponential moving average over about `span` steps, unbiased from the first value on."""
    keep, mean, weight, out = 1 - 1 / span, 0.0, 0.0, []
    for v in values:
        mean, weight = keep * mean + (1 - keep) * v, keep * weight + (1 - keep)
        out.append(mean / weight)
    return out


def plot(rows: list[Row], validations: list[Validation], title: str, path: Path) -> None:
    """Plot the loss curves (top) and their differences (bottom)."""
    blue, green, orange, grey = "#1f5fa8", "#2a8f3c", "#e8871e", "#666666"
    steps = [r.step for r in rows]
    span = max(2, len(rows) // 30)
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 1.2), layout="constrained"
    )
    # A broad line below and broken lines on top stay visible where the curves coincide, which is everywhere.
    lines = {
        "adamw": ("AdamW, in memory", {"color": orange, "lw": 6, "alpha": 0.5}),
        "csdadam_8bit": ("CSDAdam, 8-bit states, on CSDs", {"color": green, "lw": 3, "ls": (0, (1, 1))}),
        "csdadam": ("CSDAdam, on CSDs", {"color": blue, "lw": 1.4, "ls": (0, (4, 3))}),
    }
    marks = {
        "adamw": {"marker": "o", "ms": 10, "mfc": "none", "mec": orange, "mew": 2},
        "csdadam_8bit": {"marker": "+", "ms": 9, "mec": green, "mew": 2},
        "csdadam": {"marker": "x", "ms": 6, "mec": blue, "mew": 2},
    }
    at = [v.step for v in validations]
    for name, (label, line) in lines.items():
        upper.plot(steps, smooth([r.loss[name] for r in rows], span), label=label, **line)
    for name, mark in marks.items():
        validated = [v.loss[name] for v in validations]
        upper.plot(at, validated, ls="none", label=f"{NAMES[name]}, validation", **mark)
    upper.set_ylabel("loss, nats per byte (training smoothed)")
    upper.set_title(title, fontsize=11)
    upper.legend(frameon=False)
    lower.axhline(0, color=grey, lw=0.8)
    for name, colour in (("csdadam_8bit", green), ("csdadam", blue)):
        away = [r.loss[name] - r.loss["adamw"] for r in rows]
        lower.plot(steps, away, color=colour, lw=0.9, alpha=0.8, label=f"{NAMES[name]}, each training batch")
        lower.plot(at, [v.loss[name] - v.loss["adamw"] for v in validations], ls="none", **marks[name])
    largest = max(abs(r.loss[name] - r.loss["adamw"]) for r in rows for name in CSDADAM)
    reach = max(0.02, 1.3 * largest)
    lower.set_ylim(-reach, reach)
    lower.set_ylabel("loss minus AdamW's")
    lower.set_xlabel("step")
    lower.legend(frameon=False, ncols=2, fontsize=9)
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    upper.set_xlim(0, 1.01 * len(rows))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def megabytes(n: float) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def table(title: str, *heads: str) -> Table:
    """Return an empty table: the first column left-aligned, for names; the others right-aligned, for figures."""
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for i, head in enumerate(heads):
        made.add_column(head, justify="right" if i else "left")
    return made


def loss_table(report: dict[str, Any]) -> Table:
    made = table("Loss", "", "training", "validation", "minus AdamW's", "step, median")
    final = report["final"]
    for name in ("adamw", *CSDADAM):
        validation = final["validation"][name]
        difference = f"{validation - final['validation']['adamw']:+.4f}" if name in CSDADAM else ""
        milliseconds = f"{1e3 * report['optimizer_seconds'][name]:.1f} ms"
        made.add_row(NAMES[name], f"{final['train'][name]:.4f}", f"{validation:.4f}", difference, milliseconds)
    return made


def traffic_table(report: dict[str, Any]) -> Table:
    made = table("Bytes per parameter and step", "", "link push", "link pull", "flash read", "flash write")
    for name, label in (("csdadam", "CSDAdam, measured"), ("csdadam_8bit", "with 8-bit states")):
        measured = report["optimizers"][name]["bytes_per_parameter"]
        made.add_row(label, *(f"{measured[k]:.2f}" for k in ("push", "pull", "flash_read", "flash_write")))
    into, out = (f"{ZERO_INFINITY[k]:.2f}" for k in ("written", "read"))
    made.add_row("ZeRO-Infinity, published", into, out, out, into)
    return made


def device_table(report: dict[str, Any]) -> Table:
    made = table("CSDs, median", "device", "parameters", "Mparam/s", "read GB/s", "write GB/s", "direct I/O")
    for name in CSDADAM:
        measured = report["optimizers"][name]
        together = {**measured["together"], "device": "together" if name == "csdadam" else "8-bit states"}
        for d in [*(measured["devices"] if name == "csdadam" else ()), together]:
            if d["device"] == "together":
                made.add_section()
            rates = (d["params_per_second"] / 1e6, d["read_bytes_per_second"] / 1e9, d["write_bytes_per_second"] / 1e9)
            figures = (f"{rates[0]:.1f}", f"{rates[1]:.2f}", f"{rates[2]:.2f}")
            where = Path(d["device"]).name.partition("?")[0]
            made.add_row(where, f"{d['params']:,}", *figures, "yes" if d["direct_io"] else "no")
    return made


def memory_table(report: dict[str, Any]) -> Table:
    memory = report["host_memory_bytes"]
    made = table("Host memory of the optimizer", "", "AdamW", "CSDAdam", "8-bit states")
    for kind, label in (("here", "this model, measured"), ("large", f"{LARGE / 1e9:.0f} B parameters, computed")):
        made.add_row(label, *(megabytes(memory[kind][name]) for name in ("adamw", *CSDADAM)))
    return made


def measure(rows: list[Row], validations: list[Validation], stats: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the tables. Medians leave out the first two steps, which create the files."""
    steady = slice(2, None) if len(stats) > 4 else slice(None)
    tail = max(1, len(rows) // 20)
    seconds = {name: statistics.median(r.seconds[name] for r in rows[steady]) for name in NAMES}
    return {
        "parameters": stats[-1]["csdadam"]["params"],
        "optimizers": {name: measure_devices([s[name] for s in stats[steady]], seconds[name]) for name in CSDADAM},
        "optimizer_seconds": seconds,
        "final": {
            "train": {name: statistics.fmean(r.loss[name] for r in rows[-tail:]) for name in NAMES}
            | {"over_steps": tail},
            "validation": validations[-1].loss,
        },
    }


def measure_devices(stats: list[dict[str, Any]], step: float) -> dict[str, Any]:
    """Return what the devices of one CSDAdam did. `step`: seconds of a step."""

    def median_rate(device: int, kind: str) -> float:
        devices = [s["devices"][device] for s in stats]
        return statistics.median(d[f"flash_{kind}_bytes"] / max(d["seconds"][kind], 1e-9) for d in devices)

    last = stats[-1]
    n = last["params"]
    return {
        "bytes_per_parameter": {k: last[f"{k}_bytes"] / n for k in ("push", "pull", "flash_read", "flash_write")},
        "together": {
            "direct_io": all(d["direct_io"] for d in last["devices"]),
            "params": n,
            "params_per_second": n / step,
            "read_bytes_per_second": last["flash_read_bytes"] / step,
            "write_bytes_per_second": last["flash_write_bytes"] / step,
        },
        "devices": [
            {
                "device": d["device"],
                "direct_io": d["direct_io"],
                "params": d["params"],
                "params_per_second": d["params"] / step,
                "read_bytes_per_second": median_rate(i, "read"),
                "write_bytes_per_second": median_rate(i, "write"),
            }
            for i, d in enumerate(last["devices"])
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, help=f"training steps ({FULL.steps})")
    parser.add_argument("--devices", type=int, default=4, metavar="N", help="CSDs (4)")
    parser.add_argument("--cards", action="store_true", help="SmartSSDs instead of files updated by the CPU")
    parser.add_argument("--compute", choices=("bfloat16", "float32"), help="dtype to compute in (the faster one here)")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="where files go")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps: seconds, for tests")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout, everything else on stderr"
    )
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    if options.steps is not None:
        size = Size(**{**asdict(size), "steps": options.steps})
    if size.steps < 1 or options.devices < 1:
        parser.error("--steps and --devices are at least 1")
    out = sys.stderr if options.json else sys.stdout
    console = Console(file=out, highlight=False, width=None if out.isatty() else 100)  # rich would assume 80
    say = console.print
    started = time.perf_counter()

    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        parser.error(f"--out {options.out}: {e.strerror}")
    again = options.out == OUT or (options.out / "loss.png").exists()
    if not again and any(options.out.glob("*csd*/*.store")):
        parser.error(f"--out {options.out} holds stores that are not of a demo; choose another directory")
    shown = options.out.relative_to(Path.cwd()) if options.out.is_relative_to(Path.cwd()) else options.out
    train_text, validation_text, files = standard_library(size.text_bytes)
    torch.manual_seed(SEED)
    first = GPT(size).bfloat16()
    models = {name: copy.deepcopy(first) for name in NAMES}
    if options.compute:
        compute, why = getattr(torch, options.compute), "as asked for"
    else:
        compute, faster = fastest_dtype(first, batch(train_text, size, torch.Generator().manual_seed(SEED)))
        why = f"{faster:.1f} times as fast here"
    params = sum(p.numel() for p in first.parameters())
    here = machine()
    compute_name = str(compute).removeprefix("torch.")
    say(f"[bold]csd_optim demo[/]: one GPT, three optimizers, {size.steps} steps side by side")
    say(f"  machine  {here['cpu']}, {here['cores']} cores; torch {here['torch']}")
    say(f"  model    {params / 1e6:.2f} M bf16 parameters, computed in {compute_name}, {why}")
    say(f"  text     {files} files of Python's standard library, {len(train_text) / 1e6:.1f} MB to train on,")
    say(f"           {len(validation_text) / 1e6:.1f} MB of other files to validate on")
    emulated = bool(os.environ.get("XCL_EMULATION_MODE"))
    if options.cards:
        devices = {name: [f"xrt:{i}?scratch=1" for i in range(options.devices)] for name in CSDADAM}
        what = f"{options.devices} SmartSSDs{', emulated by the Xilinx runtime' * emulated}"
        say(f"  CSDAdam  {what}: xrt:0 to xrt:{options.devices - 1}, in scratch files")
        say("           and once more, with 8-bit states")
    else:
        # cache=off: buffers would hold all states of so small a model, and none would ever be read.
        folders = {"csdadam": "csd", "csdadam_8bit": "8bit-csd"}
        devices = {
            name: [f"file:{options.out}/{folder}{i}?cache=off" for i in range(options.devices)]
            for name, folder in folders.items()
        }
        what = f"{options.devices} emulated CSDs"
        say(f"  CSDAdam  {what}: directories {shown}/csd*")
        say(f"           with 8-bit states: directories {shown}/8bit-csd*")
    say("  AdamW    torch.optim.AdamW on fp32 masters, in memory")

    adamw = AdamWOnMasters(list(models["adamw"].parameters()), size.lr)
    rows: list[Row] = []
    validations: list[Validation] = []
    stats: list[dict[str, Any]] = []
    columns = (
        TextColumn("training"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss: {task.fields[losses]}"),
        TimeRemainingColumn(),
    )

    def csdadam(name: str, **chosen: Any) -> CSDAdam:
        named = models[name].named_parameters()
        return CSDAdam(named, lr=size.lr, weight_decay=0.1, devices=devices[name], overwrite=again, **chosen)

    with (
        csdadam("csdadam") as csd,
        csdadam("csdadam_8bit", state_dtype="8bit") as coded,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        optimizers = {"csdadam": csd, "csdadam_8bit": coded, "adamw": adamw}
        began = time.perf_counter()
        bar = progress.add_task("", total=size.steps, losses="")
        for row, validation, stat in train(size, models, optimizers, (train_text, validation_text), compute):
            rows.append(row)
            stats.append(stat)
            if validation:
                validations.append(validation)
            losses = "  ".join(f"{label.split()[-1]} {row.loss[name]:.3f}" for name, label in NAMES.items())
            progress.update(bar, advance=1, losses=losses)
        trained = time.perf_counter() - began

    report: dict[str, Any] = {
        "schema": "csd_optim.demo/1",
        "machine": here,
        "settings": {**asdict(size), "devices": options.devices, "compute": compute_name, "seed": SEED},
        **measure(rows, validations, stats),
        "wear": {
            name: {
                "bytes_per_step": stats[-1][name]["flash_write_bytes"],
                "written_bytes": stats[-1][name]["written_bytes"],
                "rated_bytes": RATED,
                "days": days_left(int(RATED), stats[-1][name]["written_bytes"], trained),
            }
            for name in CSDADAM
        },
        "published_bytes_per_parameter": {"zero_infinity": ZERO_INFINITY},
        "host_memory_bytes": {
            "here": {name: stats[-1][name]["buffer_bytes"] for name in CSDADAM} | {"adamw": adamw.state_bytes()},
            "large": {
                "csdadam": options.devices * BUFFERS * FULL_TILE_BYTES,
                "csdadam_8bit": options.devices * BUFFERS * FULL_TILE_BYTES * CODES_SHARE,
                "adamw": LARGE * STATE_BYTES,
            },
        },
        "rows": [asdict(r) for r in rows],
        "validations": [asdict(v) for v in validations],
        "png": str(options.out / "loss.png"),
    }
    title = f"GPT of {params / 1e6:.1f} M parameters: AdamW in memory, and CSDAdam with its states on {what}"
    plot(rows, validations, title, options.out / "loss.png")
    report["seconds"] = time.perf_counter() - started

    wear = report["wear"]["csdadam"]
    notes = {
        loss_table: "At the end, in nats per byte, training over the last steps. A step of the optimizer ends "
        "when its last state is stored.",
        traffic_table: "push: into the device, pull: out of it. flash: 12 B of fp32 states, or of 8-bit states "
        f"{5 if options.cards else 3} B read and 5 B written, and the padding of the last tile.",
        device_table: "They share one disk, which serves them in turns: GB/s of a device while it has requests "
        f"waiting, of all together over the whole step. Wear: {megabytes(wear['written_bytes'])} written, "
        f"{megabytes(wear['bytes_per_step'])} a step; at this rate, a drive rated for "
        f"{RATED / 1e12:.0f} TB would last {wear['days']:,.0f} days. With 8-bit states: "
        f"{megabytes(report['wear']['csdadam_8bit']['bytes_per_step'])} a step.",
        memory_table: f"AdamW: {STATE_BYTES} B per parameter. CSDAdam: {BUFFERS} tile buffers a device, at most 12 MiB "
        "each, or 5 MiB.",
    }
    for make, note in notes.items():
        say()
        say(make(report))
        say(note)
    say()
    real = "These CSDs are emulated: here the flash bytes also went through the host; with real ones only the link "
    real += "bytes would."
    if options.cards and emulated:
        real += " And a CPU did the work of the FPGAs: times and rates mean nothing."
    say(
        "A model this small fits in memory many times over: there AdamW is the better choice. But its state grows with "
        f"the model, and the buffers of CSDAdam do not. {real if emulated or not options.cards else ''}"
    )
    say(f"\n  loss curves     {shown}/loss.png", soft_wrap=True)
    if not options.cards:
        command = Path(sys.executable).with_name("csd-optim")  # not on everybody's PATH
        command = command.relative_to(Path.cwd()) if command.is_relative_to(Path.cwd()) else command
        say(f"  inside a store  {command} inspect {shown}/csd0", soft_wrap=True)
    say()
    final = report["final"]["validation"]
    away = {name: abs(final[name] - final["adamw"]) for name in CSDADAM}
    flash = {}
    for name in CSDADAM:
        t = report["optimizers"][name]["bytes_per_parameter"]
        flash[name] = t["flash_read"] + t["flash_write"]
    t = report["optimizers"]["csdadam"]["bytes_per_parameter"]
    say(
        f"[bold]Shown in {report['seconds']:.0f} s:[/] with its state in files on {what}, "
        f"CSDAdam trained this model to within {away['csdadam']:.4f} nats per byte of AdamW's validation loss, moving "
        f"{t['push']:.0f} B to and {t['pull']:.0f} B from the devices per parameter and step, and "
        f"{flash['csdadam']:.0f} B to and from flash. With 8-bit states it came within {away['csdadam_8bit']:.4f}, and "
        f"{flash['csdadam_8bit']:.0f} B."
    )
    if options.json:
        json.dump(report, sys.stdout)
        print()


if __name__ == "__main__":
    main()
