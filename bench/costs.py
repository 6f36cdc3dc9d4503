"""Money and time of a step with the states in DRAM and on drives, for models of 7 and 70 B: the figure of docs/plan.md.

    python -m bench.costs --plot costs.png

Everything is predicted, as `csd-optim plan` does, and nothing is measured: --cpu, --drive, --prices and --watts are the
inputs, with the defaults of that page. --json prints schema csd_optim.bench.costs/1.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from csd_optim.cli.output import console, money
from csd_optim.devices.units import parse_rate
from csd_optim.errors import CSDValueError
from csd_optim.planning import advice, costs, model
from csd_optim.rates import Rates
from csd_optim.store.sections import EIGHT_BIT, FP32

Row = dict[str, Any]
MODELS = (7 * 10**9, 70 * 10**9)
STATES = {FP32: "fp32", EIGHT_BIT: "8 bits"}
DRIVES = (2, 4)
MEMORY = Rates(math.inf, math.inf, math.inf, on_host=True)  # nothing but the CPU limits a step on states in DRAM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", default="1.4G/s", help="parameters per second that the CPU updates")
    parser.add_argument("--drive", default="gen4", help="as for csd-optim plan; also --prices and --watts")
    parser.add_argument("--prices", default="")
    parser.add_argument("--watts", default="")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        found = compare(arguments.cpu, arguments.drive, arguments.prices, arguments.watts)
    except CSDValueError as e:
        parser.error(str(e))
    if arguments.json:
        print(json.dumps({"schema": "csd_optim.bench.costs/1", **found}, indent=1))
    else:
        show(found)
    if arguments.plot:
        plot(found, arguments.plot)


def compare(cpu: str, drive: str, prices: str, watts: str) -> dict[str, Any]:
    """Return a row for each model and place of its states, and what was assumed. Raises CSDValueError."""
    request = advice.PlanRequest(
        params=1,
        devices=1,
        host=model.Host(update=parse_rate(cpu, ""), gpu_link=25e9),
        drive=advice.parse_rates(drive, model.DRIVES, model.DRIVES["gen4"]),
        prices=costs.parse_costs(prices, "--prices", costs.PRICES),
        watts=costs.parse_costs(watts, "--watts", costs.WATTS),
    )
    rows = []
    for params in MODELS:
        for states in STATES:
            r = replace(request, params=params, state_dtype=states)
            rows += [row(replace(r, drive=MEMORY), 0), *(row(replace(r, devices=n), n) for n in DRIVES)]
    described = f"{request.drive.mixed / 1e9:.1f} GB/s"
    return {
        "rows": rows,
        "cpu": request.host.update,
        "drive": described,
        "assumed": advice.plan(request)["costs"]["assumed"],
    }


def row(r: advice.PlanRequest, drives: int) -> Row:
    """Return what a plan says of dollars, seconds and joules. `drives`: 0 stands for states in DRAM."""
    found = advice.plan(r)
    step = next(p["step"] for p in found["predictions"] if p["chosen"])
    cost = found["costs"]
    joules = cost["joules_per_step"]
    held = joules["drives"] if drives else cost["dram_watts"] * step
    return {
        "params": r.params,
        "states": r.state_dtype,
        "drives": drives,
        "dollars": cost["dollars"]["drives" if drives else "dram"],
        "wear_of_1000_steps": cost["dollars"]["wear_of_1000_steps"] if drives else 0.0,
        "step_seconds": step,
        "joules_per_step": joules["cpu"] + held,
        "large_enough": not drives or cost["drives_are_large_enough"],
    }


def place(r: Row) -> str:
    where = f"{r['drives']} drives" if r["drives"] else "DRAM"
    return f"{where}, {STATES[r['states']]}"


def seconds(s: float) -> str:
    return f"{s:.1f} s" if s < 10 else f"{s:.0f} s"


def show(found: dict[str, Any]) -> None:
    made = Table(box=box.SIMPLE_HEAD)
    for head in ("model", "states", "money", "wear of 1000 steps", "a step", "energy of a step"):
        made.add_column(head, justify="left" if head in ("model", "states") else "right")
    for r in found["rows"]:
        wear = money(r["wear_of_1000_steps"]) if r["drives"] else ""
        size, joules = f"{r['params'] / 1e9:.0f} B", f"{r['joules_per_step'] / 1e3:.1f} kJ"
        made.add_row(size, place(r), money(r["dollars"]), wear, seconds(r["step_seconds"]), joules)
    out = console()
    out.print(made)
    out.print(f"Predicted, with a CPU that updates {found['cpu'] / 1e9:.2f} G parameters/s. Assumed: ", end="")
    out.print(costs.describe_assumed(found["assumed"]))


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw bars of money and time, one row of axes per model. `found`: of compare()."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    blue, orange = "#1f5fa8", "#e8871e"
    figure, axes = plt.subplots(len(MODELS), 2, figsize=(9, 5.4), layout="constrained", sharey="row")
    for both, params in zip(axes, MODELS, strict=True):
        of = [r for r in found["rows"] if r["params"] == params][::-1]  # the first bar is drawn lowest
        names, colours = [place(r) for r in of], [blue if r["drives"] else orange for r in of]
        texts = [money(r["dollars"]) for r in of], [seconds(r["step_seconds"]) for r in of]
        for axis, key, text in zip(both, ("dollars", "step_seconds"), texts, strict=True):
            bars = axis.barh(names, [r[key] for r in of], color=colours, height=0.7)
            axis.bar_label(bars, text, padding=3, fontsize=9)
            axis.margins(x=0.16)
            axis.spines[["top", "right"]].set_visible(False)
            axis.xaxis.set_major_formatter("{x:,g}")
            axis.tick_params(axis="y", length=0)
        both[0].set_title(f"{params / 1e9:.0f} B parameters", loc="left", fontweight="bold")
    dates = sorted({a["as_of"] for a in found["assumed"] if a["option"] == "prices" and a["as_of"]})
    prices = f"prices of {dates[-1][:4]}" if dates else "prices as given"
    cpu = f"a CPU that updates {found['cpu'] / 1e9:.2g} G parameters/s"
    figure.suptitle(f"AdamW states, predicted: {prices}, drives of {found['drive']}, {cpu}", fontsize=10)
    axes[-1][0].set_xlabel("price of what holds the states, $")
    axes[-1][1].set_xlabel("a step, seconds")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
