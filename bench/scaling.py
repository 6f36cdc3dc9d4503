"""How a training step scales with the number of devices: first the published systems, then CSDAdam on the same testbed.
From the project's root:

    python -m bench.scaling                     GPT-2 4.0 B on 1 to 10 emulated SmartSSDs, about ten minutes
    python -m bench.scaling --quick             two devices, in half a minute, to see that it works

The testbed is that of Smart-Infinity (HPCA'24): ten SmartSSDs behind one link of 8 GB/s, and an A5000. Devices are
paced at its rates, all scaled by the same factor: there are fewer parameters, and the clock runs --speed times faster.
States and gradients are real bytes in real files, moved by the real engine; only the clock is made up.

    base           ZeRO-Infinity on a RAID0 of plain drives: the host updates, and the states cross the link
    su_o, su_o_c   Smart-Infinity, dense and with the largest 1 % of the gradients
    csdadam, csdadam_topk               the same two on our own data path
    csdadam_8bit, csdadam_8bit_topk     the same with 8-bit states
    csdadam_8bit_overlap                8-bit states, and the step begins in backward and ends in the next forward

base is one device with the rates of all drives together, as a host sees an md array. The published systems overlap
nothing, so their devices have one buffer. DeepSpeed reads, updates and writes a sub-group before it begins the next one
(their configuration sets neither pipeline_read nor pipeline_write). Smart-Infinity has one set of buffers per drive,
and all drives wait for each other after every sub-group: here each such round is a step over one sub-group of every
drive. Their fp32 gradients go through flash. Backward writes them to a file, and takes as long as drives or link would
need for that, less the part that backward hides. The engine reads them from there at the drive's rate (flash_grads=1).

CSDAdam sends fp16 gradients over the link, and reads, updates and writes at the same time. Its step counts until all
states are on the drive, although step() returns earlier. With 8-bit states a card reads and writes 5.016 B: the
parameter is part of the states on its drive. (A plain drive does not read that part.) The rate at which a SmartSSD
reads and writes together is not published. The default of --mixed is what fio reaches with reads alone; 2.2 GB/s would
make both at once no faster than one after the other.

With overlap the model is that of bench.overlap: 24 layers that sleep for their share of forward and backward. Up to
16 GB of host memory hold updated states before step(). An iteration counts from the end of one step() to that of the
next, and the last one until all states are on the drives.

First, every point must have the bits of an unpaced run, on an engine that agrees with torch.optim.AdamW and whose 8-bit
states are the same on a disk and in memory. Then base and Smart-Infinity must come within 15 % of the published
figures, and unpaced steps must take only a small part of the time of paced ones. If any of that fails, nothing is
claimed about CSDAdam.

--json prints schema csd_optim.bench.scaling/1, with seconds of the testbed; --plot writes a PNG.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.overlap_training import LAYERS, Layer
from bench.step import machine_facts, say, span, verify_codes
from csd_optim import CSDAdam
from csd_optim.cli import benchmark
from csd_optim.devices import machine
from csd_optim.devices.spec import parse_devices
from csd_optim.devices.units import parse_rate
from csd_optim.store.layout import plan_extent
from csd_optim.store.sections import FP32, elem_bytes

Row = dict[str, Any]

# The testbed. Rates are decimal; the paper's are in GiB/s (2.78 and 1.63 of P2P).
PARAMS = 4.0e9
FORWARD, BACKWARD = 0.67, 4.1  # seconds; backward with compressed gradients, which take hardly any time to write
HIDDEN = 1 / 3  # share of the gradients' writing time that backward hides, by the published phases of 4.0, 8.4, 33 B
LINK = 8e9  # bytes per second each way, as measured on the testbed
READ, WRITE = 2.98e9, 1.75e9  # P2P, with one synchronous request
MIXED = "3.5GB/s"  # both at once: fio reads 3.52, and writes 3.28, with many requests in flight
# A plain drive through libaio: "about 3 GB/s". Only the 2.4 are fitted, so that base takes the published 53.8 s with
# one drive. They lie between the synchronous 1.75 and the 3.28 that fio reaches.
HOST_READ, HOST_WRITE = 3.0e9, 2.4e9
HOST_UPDATE = 1.4e9  # parameters per second: DeepSpeed's CPU Adam
KERNEL, TOPK_KERNEL = 552e6, 260e6  # Smart-Infinity's kernels, as measured on the testbed
OUR_KERNEL = 275e6  # 56 bytes per parameter over the card's 15.4 GB/s of memory; no bitstream of ours was timed
OUR_CODES_KERNEL = 590e6  # the same with 8-bit states: 26 bytes
HOLD = 4  # bytes of host memory per parameter for a step that begins in backward: as much as it can use

DEVICES = (1, 2, 4, 6, 8, 10)
PUBLISHED = {  # speed-up over base with one drive, A5000
    "base": (1, 1.55, 2.23, 2.26, 2.26, 2.27),
    "su_o": (0.81, 1.48, 2.55, 2.92, 3.25, 3.63),
    "su_o_c": (0.89, 1.62, 2.80, 3.45, 3.75, 4.42),
}
WAVES = 20  # sub-groups per device, or of the array
TILES = 60  # per device of CSDAdam; a real one has hundreds, and fills its pipeline in a smaller share of the time
GRAIN = 1024  # elements: the smallest tile
WARM_UP = 1
WARM_UP_OVERLAP = 3  # iterations, in which overlap() learns the order of use and how much fits into backward
COLOURS = ("tab:gray", "tab:orange", "tab:red", "tab:blue", "tab:cyan", "tab:green", "limegreen", "black")
TOLERANCE = 0.15  # largest relative deviation from published figures
MOST_REAL = 0.2  # an unpaced step may take at most this share of the paced one's time


@dataclass(frozen=True)
class Variant:
    """A system of the figure. `rates`: of one device, per second on the testbed. Bytes are per parameter."""

    label: str
    rates: dict[str, float]
    options: str = ""
    dtype: torch.dtype = torch.float32
    topk: float | None = None
    state_dtype: str = "fp32"
    raid: bool = False  # all drives are one device
    waves: bool = False  # all devices wait for each other
    overlap: bool = False  # the step overlaps with backward and the next forward
    flash_write: float = 0.0  # gradient bytes that backward writes to flash


SMART = {"read": READ, "write": WRITE, "link": LINK}
SERIAL = "buffers=1&flash_grads=1"
OURS = SMART | {"update": OUR_KERNEL}
CODED = SMART | {"update": OUR_CODES_KERNEL}
VARIANTS = {
    "base": Variant(
        "BASE: RAID0, CPU update",
        {"read": HOST_READ, "write": HOST_WRITE, "link": LINK, "update": HOST_UPDATE},
        f"{SERIAL}&host=1",
        raid=True,
        flash_write=4,
    ),
    "su_o": Variant("Smart-Infinity SU+O", SMART | {"update": KERNEL}, SERIAL, waves=True, flash_write=4),
    "su_o_c": Variant(
        "Smart-Infinity SU+O+C, 1 %", SMART | {"update": TOPK_KERNEL}, SERIAL, topk=0.01, waves=True, flash_write=0.08
    ),
    "csdadam": Variant("CSDAdam", OURS, dtype=torch.float16),
    "csdadam_topk": Variant("CSDAdam, Top-K 1 %", OURS, dtype=torch.float16, topk=0.01),
    "csdadam_8bit": Variant("CSDAdam, 8-bit states", CODED, dtype=torch.float16, state_dtype="8bit"),
    "csdadam_8bit_topk": Variant(
        "CSDAdam, 8-bit states, Top-K 1 %", CODED, dtype=torch.float16, topk=0.01, state_dtype="8bit"
    ),
    "csdadam_8bit_overlap": Variant(
        "CSDAdam, 8-bit states, overlap", CODED, dtype=torch.float16, state_dtype="8bit", overlap=True
    ),
}
GOALS = {"csdadam": {1: 1, 10: 3}, "csdadam_8bit": {1: 2.5, 10: 4.5}}  # speed-up over base with as many devices


def main() -> None:
    arguments = parse()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    facts = {
        **machine_facts(),
        "storage": machine.storage(arguments.directory),
        "model_params": PARAMS,
        "params": arguments.params,
        "rates": {name: variant.rates for name, variant in VARIANTS.items()},
        "mixed": arguments.mixed,
    }
    say(f"GPT-2 4.0 B, emulated with {arguments.params / 1e6:.1f} M parameters, {arguments.runs} runs")
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    plain = parse_devices(f"file:{arguments.directory}?scratch=1")
    for dtype in (torch.float32, torch.float16):
        difference = benchmark.verify(plain, dtype)
        say(f"verified {dtype} against torch.optim.AdamW: largest relative difference {difference:.1e}")
    verify_codes(plain)

    rows = []
    for devices in arguments.devices:
        for name in VARIANTS:
            rows.append(measure(name, devices, arguments))
            say(describe(rows[-1]))
    judge(rows)
    claims = claim(rows)
    worst = max((r for r in rows if "published" in r), key=lambda r: abs(r["deviation"]))
    say("\n" + table(rows))
    say(f"largest deviation: {worst['variant']}, {worst['devices']} devices, {100 * worst['deviation']:+.0f} %")
    for c in claims["claims"]:
        factor = f"{c['times_as_fast_as_base']:.2f} times as fast as base with as many (goal: {c['goal']})"
        say(f"{c['variant']}, {c['devices']} devices: {factor}")
    for why in claims["why_not"]:
        say(f"nothing is claimed: {why}")
    if arguments.json:
        json.dump(
            {"schema": "csd_optim.bench.scaling/1", "machine": facts, "rows": rows, **claims}, sys.stdout, indent=1
        )
        print()
    if arguments.plot:
        plot(rows, facts, arguments.plot)
        say(f"plot: {arguments.plot}")


# ------------------------------------------------------------------------------------------------ measuring


def measure(name: str, devices: int, arguments: argparse.Namespace) -> Row:
    """Measure one point of the figure. Raises SystemExit if the pace changes a bit of the result."""
    # With few devices each has more work, so the clock may run faster. With 8-bit states it runs half as fast: reads
    # and writes take less than half the time, but the CPU's update takes longer.
    speed = arguments.speed * max(1.0, 4 / devices) / (1 if VARIANTS[name].state_dtype == FP32 else 2)
    plain, _, expected = train(name, devices, arguments, None)
    step, iteration, result = train(name, devices, arguments, speed)
    if not (len(expected) == len(result) and all(map(torch.equal, expected, result))):
        raise SystemExit(f"{name}, {devices} devices: paced devices have another result: nothing is reported")
    return {
        "variant": name,
        "devices": devices,
        "seconds": speed * statistics.median(iteration),
        "update_seconds": speed * statistics.median(step),
        "runs": [speed * s for s in iteration],
        "speed": speed,
        "real_share": statistics.median(plain) / statistics.median(step),
    }


def train(
    name: str, devices: int, arguments: argparse.Namespace, speed: float | None
) -> tuple[list[float], list[float], list[torch.Tensor]]:
    """Train. Returns the seconds of each optimizer step and of each iteration, and the result. `speed` None: unpaced.

    With overlap a step has no time of its own: both are the seconds of iterations.
    """
    variant, params = VARIANTS[name], arguments.params
    if variant.overlap:
        return train_with_overlap(variant, devices, arguments, speed)
    drives = 1 if variant.raid else devices
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        tensors = [
            torch.nn.Parameter(t.clone())
            for t in torch.randn(params).to(variant.dtype).chunk(WAVES if variant.waves else 1)
        ]
        if variant.flash_write:  # the engine reads gradients from a file
            grads = torch.from_file(f"{directory}/gradients", shared=True, size=params, dtype=variant.dtype)
        else:
            grads = torch.empty(params, dtype=variant.dtype)
        parts = grads.chunk(len(tensors))
        tile = params // (drives * (WAVES if variant.flash_write else TILES))
        opt = CSDAdam(
            [{"params": tensors, "topk": variant.topk}],
            devices=[device(variant, devices, arguments, directory, speed, tile)] * drives,
            error_feedback=False,
            tile_size=tile,
            state_dtype=variant.state_dtype,
        )

        def backward() -> None:
            rate = min(LINK, devices * variant.rates["write"])
            start = time.perf_counter()
            grads.normal_()
            hold(start, BACKWARD + (1 - HIDDEN) * PARAMS * variant.flash_write / rate, speed)

        def update() -> None:
            for wave, part in zip(tensors, parts, strict=True):
                wave.grad = part
                if variant.waves:
                    opt.step()
                    opt.stats()  # waits until all states are written
                    wave.grad = None
            if not variant.waves:
                opt.step()
                opt.stats()

        steps, iterations = [], []
        with opt:
            for i in range(WARM_UP + arguments.runs):
                start = time.perf_counter()
                if speed and i >= WARM_UP:
                    hold(start, FORWARD, speed)
                    backward()
                else:
                    grads.normal_()
                middle = time.perf_counter()
                update()
                end = time.perf_counter()
                if i >= WARM_UP:
                    steps.append(end - middle)
                    iterations.append(end - start)
            result = [t.detach().clone() for p in tensors for t in (p, *opt.state[p].values())]
    return steps, iterations, result


def train_with_overlap(
    variant: Variant, devices: int, arguments: argparse.Namespace, speed: float | None
) -> tuple[list[float], list[float], list[torch.Tensor]]:
    forward, backward = (seconds / speed / LAYERS if speed else 0.0 for seconds in (FORWARD, BACKWARD))
    model = nn.Sequential(*(Layer(arguments.params // LAYERS, forward, backward, variant.dtype) for _ in range(LAYERS)))
    tile, count = arguments.params // (devices * TILES), WARM_UP_OVERLAP + arguments.runs
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        opt = CSDAdam(
            model.parameters(),
            devices=[device(variant, devices, arguments, directory, speed, tile)] * devices,
            tile_size=tile,
            state_dtype=variant.state_dtype,
        )
        with opt:
            opt.overlap(model, backward=True, hold=HOLD * arguments.params)
            ends = [time.perf_counter()]
            for i in range(count):
                model(torch.zeros(())).backward()
                opt.step()
                opt.zero_grad()
                if i == count - 1:
                    opt.stats()  # waits until all states are written
                ends.append(time.perf_counter())
            result = [t.detach().clone() for p in model.parameters() for t in (p, *opt.state[p].values())]
    iterations = [end - begin for begin, end in itertools.pairwise(ends)][WARM_UP_OVERLAP:]
    return iterations, iterations, result


def device(
    variant: Variant, devices: int, arguments: argparse.Namespace, directory: str, speed: float | None, tile: int
) -> str:
    """Return the device string, with rates scaled to the parameters and the clock of this run. `tile`: elements."""
    # cache=off: buffers would save so small a model many reads, but a real one few, and other systems have no cache.
    options = f"file:{directory}?scratch=1&cache=off&{variant.options}"
    if speed is None:
        return options
    rates = dict(variant.rates)
    if variant.raid:
        rates |= {kind: devices * rates[kind] for kind in ("read", "write")}
    if not variant.flash_write:  # variants with gradients on flash never read and write at once
        rates["mixed"] = arguments.mixed
    rates |= {kind: padding(tile, variant) * rate for kind, rate in rates.items() if kind in ("read", "write", "mixed")}
    reduced = {kind: rate * arguments.params / PARAMS * speed / 1e6 for kind, rate in rates.items()}
    return options + "".join(f"&{kind}={rate}{'M/s' if kind == 'update' else 'MB/s'}" for kind, rate in reduced.items())


def padding(tile: int, variant: Variant) -> float:
    """Return by which factor whole pages per section enlarge a tile. For real tiles, which are larger, it is 1.00."""
    param_dtype = None if variant.state_dtype == FP32 else variant.dtype
    extent = plan_extent([tile], 1, tile_elems=tile, codec=variant.state_dtype, param_dtype=param_dtype)
    return extent.slot_bytes / extent.tile_elems / elem_bytes(extent.sections, variant.state_dtype, param_dtype)


def hold(start: float, seconds: float, speed: float | None) -> None:
    """Sleep until `seconds` of the testbed's time after `start`. `speed`: of the clock; None: return at once."""
    if speed:
        time.sleep(max(0.0, start + seconds / speed - time.perf_counter()))


# ------------------------------------------------------------------------------------------------ judging


def judge(rows: list[Row]) -> None:
    """Add to each row the speed-up over base with one device, and its deviation from the published one."""
    base = next(r["seconds"] for r in rows if r["variant"] == "base" and r["devices"] == 1)
    for row in rows:
        row["speedup"] = base / row["seconds"]
        if row["variant"] in PUBLISHED:
            row["published"] = PUBLISHED[row["variant"]][DEVICES.index(row["devices"])]
            row["deviation"] = row["speedup"] / row["published"] - 1


def claim(rows: list[Row]) -> dict[str, Any]:
    """Return the claims about CSDAdam compared with base, or the reasons why none is made."""
    why_not = [
        f"{r['variant']} with {r['devices']} devices is {100 * r['deviation']:+.0f} % off the published figure"
        for r in rows
        if abs(r.get("deviation", 0)) > TOLERANCE
    ]
    why_not += [
        f"{r['variant']} with {r['devices']} devices takes {100 * r['real_share']:.0f} % of its "
        "time without a pace; choose a smaller --speed"
        for r in rows
        if r["real_share"] > MOST_REAL
    ]
    seconds = {(r["variant"], r["devices"]): r["seconds"] for r in rows}
    claims = [
        {
            "variant": name,
            "devices": n,
            "times_as_fast_as_base": seconds["base", n] / seconds[name, n],
            "goal": goal,
        }
        for ours, goals in GOALS.items()
        for n, goal in goals.items()
        for name in (ours, f"{ours}_topk", f"{ours}_overlap")
        if (name, n) in seconds
    ]
    return {"claims": [] if why_not else claims, "why_not": why_not}


def describe(row: Row) -> str:
    return (
        f"{row['variant']}, {row['devices']} devices: {span(row['runs'], 2)} s, update {row['update_seconds']:.2f} s, "
        f"{len(row['runs'])} runs, {row['speed']:.0f} times as fast; without a pace the update takes "
        f"{100 * row['real_share']:.0f} % of that, and gives the same bits"
    )


def table(rows: list[Row]) -> str:
    """Return a table of speed-ups over base with one device; published ones in brackets."""
    devices = list(dict.fromkeys(r["devices"] for r in rows))
    lines = ["| devices | " + " | ".join(map(str, devices)) + " |", "|---" * (len(devices) + 1) + "|"]
    for name in VARIANTS:
        cells = [
            f"{r['speedup']:.2f}" + (f" ({r['published']:.2f})" if "published" in r else "")
            for r in rows
            if r["variant"] == name
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: list[Row], facts: Row, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    colours = dict(zip(VARIANTS, COLOURS, strict=True))
    for name, variant in VARIANTS.items():
        mine = [r for r in rows if r["variant"] == name]
        devices = [r["devices"] for r in mine]
        style = ":" if variant.overlap else "--" if name.endswith("_topk") else "-"
        axis.plot(devices, [r["speedup"] for r in mine], style, marker="o", label=variant.label, color=colours[name])
        if name in PUBLISHED:
            axis.plot(devices, [r["published"] for r in mine], "x", color=colours[name], markersize=9)
    axis.plot([], [], "x", color="black", markersize=9, label="published")
    axis.set(xlabel="devices", ylabel="speed-up over BASE with one drive", xticks=list(DEVICES), ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small", ncols=2, loc="upper left")
    axis.set_ylim(0, 1.35 * axis.get_ylim()[1])  # above the lines
    axis.set_title(
        f"GPT-2 4.0 B on emulated SmartSSDs, paced like the published testbed, {facts['date'][:10]}", fontsize="medium"
    )
    figure.savefig(path, dpi=120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--runs", type=int, default=5, help="timed iterations, at least 5")
    parser.add_argument("--speed", type=float, default=6, help="speed of the clock with four devices or more")
    parser.add_argument("--mixed", type=parse_rate, default=MIXED, help="rate of a drive, read and written together")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="where the states go")
    parser.add_argument("--quick", action="store_true", help="1 and 2 devices, and a clock ten times as fast")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    parser.add_argument("--plot", type=Path, help="write a PNG")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.devices, arguments.speed = [1, 2], 60
    arguments.devices = sorted({1, *arguments.devices})  # all are compared with one device
    arguments.runs = max(5, arguments.runs)
    # So that each device has the same number of whole tiles, for every number of devices.
    arguments.params = GRAIN * WAVES * math.lcm(*arguments.devices)
    return arguments


if __name__ == "__main__":
    main()
