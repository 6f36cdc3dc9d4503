"""Plans with optimizer ranks (owners): how long an iteration takes with them, and how many owners are enough.

    python -m bench.ranks_plan --params 7B --devices 4 --trainers 8 --owners 2

--devices, --drive, --csd and --cpu describe the hardware of each owner, as for `csd-optim plan`. docs/plan.md explains
the model (bench/ranks_model.py). --json prints schema csd_optim.bench.ranks_plan/2.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rich import box
from rich.table import Table
from typer import BadParameter

from bench import ranks_model
from bench.ranks_model import Fleet, parse_link, plan_ranks
from csd_optim.cli.benchmark import DTYPES
from csd_optim.cli.commands import count
from csd_optim.cli.optimizers import described
from csd_optim.cli.output import console, describe_rates, facts, number, short
from csd_optim.devices.units import parse_rate
from csd_optim.engine.placing.engine_rate import engine_rate
from csd_optim.errors import CSDValueError
from csd_optim.optim.rules import NAMED
from csd_optim.planning import advice, model


def main() -> None:
    parser, arguments = parse()
    try:
        found = planned(arguments)
    except (CSDValueError, BadParameter) as e:
        parser.error(str(e))
    if arguments.json:
        print(json.dumps({"schema": "csd_optim.bench.ranks_plan/2", **found}))
    else:
        show(found)


def planned(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the plan for these arguments. Raises CSDValueError or typer's BadParameter."""
    states = arguments.state_dtype
    optimizer, sections, hyper = described(arguments.optimizer, states)
    if NAMED[optimizer.rule].orthogonal:
        raise CSDValueError(f"Invalid optimizer: {arguments.optimizer!r}; the model has no steps of two passes")
    smartssd = model.smartssd(states, len(sections))
    rate = parse_rate(arguments.cpu, "") if arguments.cpu else math.inf
    r = advice.PlanRequest(
        count(arguments.params),
        arguments.devices,
        model.Host(rate, link=parse_rate(arguments.link) if arguments.link else math.inf),
        on="csd" if arguments.csd else "drive",
        drive=advice.parse_rates(arguments.drive, model.DRIVES, model.DRIVES["gen4"]),
        csd=advice.parse_rates(arguments.csd or "smartssd", {"smartssd": smartssd}, smartssd),
        optimizer=optimizer,
        cpu_measured=not arguments.cpu,
        **{name: getattr(arguments, name) for name in ("dtype", "state_dtype", "forward", "backward", "accumulate")},
    )
    advice.check(r)
    if not arguments.cpu:
        r = replace(r, host=replace(r.host, update=engine_rate(DTYPES[r.dtype], states, sections, hyper)))
    links = parse_link(arguments.trainer_link), parse_link(arguments.owner_link)
    return plan_ranks(r, Fleet(arguments.trainers, arguments.owners, *links))


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", required=True, metavar="N", help="of the model: 7B ...")
    parser.add_argument("--trainers", type=int, required=True)
    parser.add_argument("--owners", type=int, default=1, help="optimizer ranks, each with these devices")
    parser.add_argument("--trainer-link", default="100Gb/s", help="rate of a trainer's network link, each way")
    parser.add_argument("--owner-link", default="100Gb/s", help="rate of an owner's network link, each way")
    parser.add_argument("--devices", type=int, default=1, help="of each owner")
    for name in ("drive", "csd", "link", "cpu", "optimizer", "state-dtype", "dtype"):
        defaults = {"drive": "gen4", "optimizer": "CSDAdam", "state-dtype": "fp32", "dtype": "bf16"}
        parser.add_argument(f"--{name}", default=defaults.get(name), help="as for csd-optim plan")
    parser.add_argument("--forward", type=float, default=0.0, help="seconds of a trainer, per batch")
    parser.add_argument("--backward", type=float, default=0.0, help="seconds of a trainer, per batch")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per step")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    return parser, parser.parse_args()


def show(found: dict[str, Any]) -> None:
    """Print a plan with optimizer ranks. `found`: the result of plan_ranks()."""
    out, r = console(), found["request"]
    kind = {"drive": "plain drives", "csd": "CSDs"}[r["on"]]
    states = "" if r["state_dtype"] == "fp32" else " with 8-bit states"
    out.print(
        f"{number(r['params'])} {r['dtype']} parameters of {r['optimizer']}{states}: {r['trainers']} trainers, "
        f"{r['owners']} owners. All times are predicted (docs/plan.md).",
        style="bold",
    )
    drives = kind[:-1] if r["devices"] == 1 else kind
    cpu = f"{r['cpu'] / 1e9:.2f} G parameters/s, {'measured here' if r['cpu_measured'] else 'as given'}"
    out.print(
        facts(
            [
                ("trainers", f"{_link(r['trainer_link'])}; forward {r['forward']:g} s, backward {r['backward']:g} s"),
                ("owners", f"{_link(r['owner_link'])}; {r['devices']} {drives} each, {describe_rates(r['device'])}"),
                ("CPU", f"{cpu}, on each machine that has drives"),
            ]
        )
    )
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("seconds", "step", "iteration", "lower bound", "busiest"):
        table.add_column(head, justify="left" if head in ("seconds", "busiest") else "right")
    for row in found["ways"]:
        times = (row["step"], row["iteration"], row["at_least"])
        table.add_row(ranks_model.SHOWN[row["way"]], *map(_seconds, times), ranks_model.BOUNDS[row["bound"]])
    out.print(table)
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("bytes per step", "trainer out", "trainer in", "owner in", "owner out"):
        table.add_column(head, justify="left" if head.startswith("bytes") else "right")
    for row in found["ways"]:
        moved = [row["bytes"].get(link, 0.0) for link in ranks_model.LINKS]
        cells = [short(n) if n else "" for n in moved]
        table.add_row(ranks_model.SHOWN[row["way"]], *cells)
    out.print(table)
    out.print(facts(_owners_rows(found)))


def _owners_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows that say how many owners are worth having, and how drives in the trainers compare."""
    enough, local = (_both(found[name].values()) for name in ("enough_owners", "drives_per_trainer"))
    return [
        ("enough", f"owners add less than {ranks_model.HIDDEN - 1:.0%} to an iteration: {enough}"),
        ("break even", f"drives in each trainer are as fast as these owners: {local}"),
    ]


def _both(numbers: Iterable[int | None]) -> str:
    plain, hook = (f"from {n} on" if n else "never" for n in numbers)
    return plain if plain == hook else f"{plain}; with csd_optim.push {hook}"


def _link(rate: float | None) -> str:
    return "a link of unlimited rate" if rate is None else f"{rate * 8 / 1e9:g} Gb/s each way"


def _seconds(s: float) -> str:
    return f"{s:.2f}" if s < 1000 else f"{s:.0f}"


if __name__ == "__main__":
    main()
