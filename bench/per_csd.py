"""What each device can do, part by part, and how much of that a step reaches. From the project's root:

    python -m bench.per_csd                       the disk below build/bench, and memory
    python -m bench.per_csd /mnt/nvme0 /mnt/nvme1 xrt:0 "file:/mnt/nvme0?read=300MB/s&update=30M/s"
    python -m bench.per_csd --quick               tiny, to see that it works

Each device is measured by itself, on unnamed scratch space of 48 bytes per parameter (stores there are not touched):

    drive     direct reads, writes and both at once, with several request sizes and queue depths
    P2P, DMA  of a SmartSSD: between drive and card, and between host and card
    updater   alone: the CPU's, or the card's kernel
    step      first compared with torch.optim.AdamW, then timed until all states are written

The slowest part bounds a step in which everything overlaps; the ratio to it says how well the pipeline hides the rest.
If a device is paced, so are its parts. --json prints schema csd_optim.bench.per_csd/1, --plot writes a PNG.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from bench.step import machine_facts, say
from csd_optim.bindings import IO_DEPTH
from csd_optim.cli import benchmark
from csd_optim.cli.measure import card_rates, spread
from csd_optim.cli.output import span
from csd_optim.devices import machine
from csd_optim.devices.smartssd import with_directory
from csd_optim.devices.spec import DeviceSpec, parse_device
from csd_optim.engine.placing import tuning

Row = dict[str, Any]
KINDS: tuple[tuning.Kind, ...] = ("read", "write", "mixed")
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)  # bytes of a request
DEPTHS = (1, 2, 4, IO_DEPTH, 2 * IO_DEPTH)  # requests in flight
STATE = benchmark.DISK_BYTES // 2  # bytes of state per parameter
MEANINGLESS = "its card is emulated: its times mean nothing"


def main() -> None:
    arguments = parse()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    facts = {
        **machine_facts(),
        "params": arguments.params,
        "dtype": arguments.dtype,
        "runs": arguments.runs,
    }
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    rows = []
    for device in arguments.devices or [str(arguments.directory), "ram:"]:
        rows.append(measure(with_directory(parse_device(device)), arguments))
        say("\n" + describe(rows[-1]))
    if arguments.json:
        json.dump({"schema": "csd_optim.bench.per_csd/1", "machine": facts, "rows": rows}, sys.stdout, indent=1)
        print()
    if arguments.plot:
        plot(rows, facts, arguments.plot)
        say(f"plot: {arguments.plot}")


def measure(spec: DeviceSpec, arguments: argparse.Namespace) -> Row:
    """Return all measurements of a device. Raises CSDError: no room, the device fails, or the result is not torch's."""
    found = benchmark.bench([spec], arguments.params, arguments.dtype, arguments.runs, lambda _: None)
    row = {
        "device": str(spec),
        "backend": spec.backend,
        "emulated": found["emulated"],
        **({"note": MEANINGLESS} if found["emulated"] else {}),
        "storage": found["devices"][0].get("storage"),
        "direct_io": found["devices"][0].get("direct_io"),
        "p2p": found["devices"][0]["p2p"],
        "largest_relative_difference": found["largest_relative_difference"],
        "sweep": sweep(spec, arguments) if spec.directory else [],
        "parts": parts(spec, found),
        "step_seconds": found["step_seconds"],
        "params_per_second": found["params_per_second"],
    }
    if row["parts"]:
        row["slowest"] = min(row["parts"], key=lambda name: row["parts"][name]["params_per_second"])
        bound = row["parts"][row["slowest"]]["params_per_second"]
        row["ratio_to_slowest"] = {k: v / bound for k, v in row["params_per_second"].items()}
        if row["slowest"] in ("mixed", "memory") and math.isinf(spec.pace.mixed):
            row["ratio_to_slowest"] = found[
                "ratio_to_limit"
            ]  # each step is compared with the rate measured right after it
    return row


def sweep(spec: DeviceSpec, arguments: argparse.Namespace) -> list[Row]:
    """Measure the drive as the host sees it, without any pace, for each request size and queue depth."""
    assert spec.directory is not None
    rows = []
    size = min(arguments.sweep_bytes, machine.storage(spec.directory)["free_bytes"] // 4)
    with tuning.ScratchFile(spec.directory, size, max(arguments.sizes)) as file:
        file.fill()
        for block in arguments.sizes:
            file.set_block(block)
            for depth in arguments.depths:
                for kind in KINDS:
                    rates = [tuning.rate([file], kind, arguments.sweep_seconds, depth) for _ in range(arguments.runs)]
                    rows.append({"kind": kind, "block_bytes": block, "depth": depth, "bytes_per_second": spread(rates)})
    return rows


def parts(spec: DeviceSpec, found: Row) -> dict[str, Row]:
    """Return the parts that a parameter passes in a step, with medians of bytes and of parameters per second."""
    pushed, pulled = (found["bytes_per_param"][kind] for kind in ("push", "pull"))
    rates: dict[str, tuple[float, float]] = {}  # rate, and how many units of it a parameter takes
    if spec.directory:
        device = found["devices"][0]
        rates = {kind: (device[f"{kind}_bytes_per_second"]["median"], STATE) for kind in KINDS}
        # Measured right after each step: the speed of a shared drive drifts.
        rates["mixed"] = found["limits"]["disk"]["bytes_per_second"]["median"], 2 * STATE
    if spec.card:
        assert spec.directory is not None
        card = card_rates(spec, machine.storage(spec.directory)["free_bytes"])
        if card["drive_to_card"]:  # otherwise states go through the host, at the rates measured above
            rates = {"P2P to card": (card["drive_to_card"], STATE), "P2P from card": (card["card_to_drive"], STATE)}
        rates["DMA to card"] = card["to_card"], pushed
        rates["DMA from card"] = card["from_card"], pulled
        rates["kernel"] = card["kernel"], 1
    elif spec.backend != "null":
        rates["updater"] = found["updater"]["params_per_second"]["median"], 1
    if spec.backend == "ram":
        rates["memory"] = found["limits"]["memory"]["bytes_per_second"]["median"], benchmark.MEMORY_BYTES
    pace = spec.pace
    for name, most, each in (
        ("read", pace.read, STATE + pushed * pace.flash_grads),
        ("write", pace.write, STATE),
        ("mixed", pace.mixed, 2 * STATE),
        ("updater", pace.update, 1),
        ("link to device", pace.link, STATE if pace.on_host else 0 if pace.flash_grads else pushed),
        ("link from device", pace.link, STATE if pace.on_host else pulled),
    ):
        if each and not math.isinf(most):
            rates[name] = min(most, rates.get(name, (most, each))[0]), each
    return {
        name: {"rate": rate, "per_param": each, "params_per_second": rate / each}
        for name, (rate, each) in rates.items()
    }


# ------------------------------------------------------------------------------------------------ showing


def describe(row: Row) -> str:
    lines = [f"{row['device']}" + (f" ({MEANINGLESS})" if row["emulated"] else "")]
    if row["sweep"]:
        depths, sizes = (sorted({r[key] for r in row["sweep"]}) for key in ("depth", "block_bytes"))
        lines.append("drive, GB/s            " + "".join(f"{f'{d} in flight':>14}" for d in depths))
        for kind in KINDS:
            for block in sizes:
                rates = [
                    r["bytes_per_second"]["median"] / 1e9
                    for r in row["sweep"]
                    if (r["kind"], r["block_bytes"]) == (kind, block)
                ]
                lines.append(f"{kind:>6}, {block >> 10:>5} KiB each " + "".join(f"{rate:14.2f}" for rate in rates))
    for name, part in row["parts"].items():
        unit = (
            f"{part['rate'] / 1e9:8.2f} GB/s, {part['per_param']:5.2f} B each:" if part["per_param"] != 1 else " " * 24
        )
        lines.append(f"{name:>18} {unit} {part['params_per_second'] / 1e6:7.0f} Mparam/s")
    difference = row["largest_relative_difference"]
    verified = "keeps nothing to verify" if difference is None else f"verified, off AdamW's by {difference:.1e} at most"
    lines.append(f"{'step':>18} {span(row['params_per_second'], 1e6, 'Mparam/s', 0)}; {verified}")
    if "slowest" in row:
        lines.append(f"{'that is':>18} {span(row['ratio_to_slowest'], 1, '', 3)} of the slowest part, {row['slowest']}")
    return "\n".join(lines)


def plot(rows: list[Row], facts: Row, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heights = [len(row["parts"]) + 2 for row in rows]
    figure, axes = plt.subplots(
        len(rows), figsize=(8, 0.35 * sum(heights) + 1), height_ratios=heights, layout="constrained", squeeze=False
    )
    for axis, row in zip(axes.flat, rows, strict=True):
        names = [*row["parts"], "step"]
        rates = [p["params_per_second"] / 1e6 for p in row["parts"].values()]
        step = {k: v / 1e6 for k, v in row["params_per_second"].items()}
        spread = [
            [0.0] * len(rates) + [step["median"] - step["min"]],
            [0.0] * len(rates) + [step["max"] - step["median"]],
        ]
        colours = ["tab:orange" if name == row.get("slowest") else "tab:gray" for name in names[:-1]] + ["tab:blue"]
        bars = axis.barh(names, [*rates, step["median"]], color=colours, xerr=spread, capsize=3)
        axis.bar_label(bars, fmt="%.0f", label_type="center", color="white")
        axis.invert_yaxis()
        axis.set_title(row["device"] + (f": {MEANINGLESS}" if row["emulated"] else ""), fontsize="medium")
    figure.suptitle(
        f"Million parameters per second, part by part: {facts['cpu']}, {facts['cores']} cores, {facts['date'][:10]}",
        fontsize="medium",
    )
    figure.savefig(path, dpi=120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("devices", nargs="*", help="as in CSDAdam(devices=...)")
    parser.add_argument("--params", type=float, default=5e7, help="number of parameters (default 5e7)")
    parser.add_argument("--dtype", choices=tuple(benchmark.DTYPES), default="fp16", help="of parameters and gradients")
    parser.add_argument("--runs", type=int, default=5, help="runs of each measurement, at least 5")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="used if no device is named")
    parser.add_argument("--quick", action="store_true", help="3 M parameters, few requests")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    parser.add_argument("--plot", type=Path, help="write a PNG")
    arguments = parser.parse_args()
    arguments.sizes, arguments.depths = SIZES, DEPTHS
    arguments.sweep_bytes, arguments.sweep_seconds = 1 << 30, 0.25  # size of the file, seconds of each measurement
    if arguments.quick:
        arguments.sizes, arguments.depths = SIZES[1:3], (1, IO_DEPTH)
        arguments.sweep_bytes, arguments.sweep_seconds = 64 << 20, 0.01
        arguments.params = min(3e6, arguments.params)
    arguments.params, arguments.runs = int(arguments.params), max(5, arguments.runs)
    return arguments


if __name__ == "__main__":
    main()
