"""The output of `csd-optim plan --trainers` for people."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from ..planning import ranks
from .output import console, describe_rates, facts, number, short


def show_ranks(found: dict[str, Any]) -> None:
    """Print a plan with optimizer ranks. `found`: the result of ranks.plan_ranks()."""
    out, r = console(), found["request"]
    chosen = next(row for row in found["ways"] if row["chosen"])
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
    for head in ("seconds", "step", "iteration", "flowing", "lower bound", "busiest"):
        table.add_column(head, justify="left" if head in ("seconds", "busiest") else "right")
    for row in found["ways"]:
        times = (row["step"], row["iteration"], row["iteration_flowing"], row["at_least"])
        bound = ranks.BOUNDS[row["bound"]]
        name = ranks.SHOWN[row["way"]]
        table.add_row(name, *map(_seconds, times), bound, style="bold" if row["chosen"] else None)
    out.print(table)
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("bytes per step", "trainer out", "trainer in", "owner in", "owner out"):
        table.add_column(head, justify="left" if head.startswith("bytes") else "right")
    for row in found["ways"]:
        moved = [row["bytes"].get(link, 0.0) for link in ranks.LINKS]
        cells = [short(n) if n else "" for n in moved]
        table.add_row(ranks.SHOWN[row["way"]], *cells, style="bold" if row["chosen"] else None)
    out.print(table)
    out.print(facts([("route", ranks.SHOWN[chosen["way"]].removeprefix("owners, ")), *_owners_rows(found)]))


def _owners_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows that say how many owners are worth having, and how drives in the trainers compare."""
    enough, even, r = found["enough_owners"], found["break_even"], found["request"]
    least, flowing = (f"from {n} on" if n else f"never (up to {ranks.MOST_OWNERS})" for n in enough.values())
    off = f"{ranks.HIDDEN - 1:.0%}"
    rows = [("hidden", f"owners add less than {off} to an iteration: {least}; as `flowing`: {flowing}")]
    of_owners = f"from {even['owners']} owners on" if even["owners"] else f"never (up to {ranks.MOST_OWNERS} owners)"
    rows.append(("break even", f"owners are as fast as {r['devices']} of these drives in each trainer: {of_owners}"))
    most = ranks.MOST_DRIVES
    local = f"from {n} on" if (n := even["drives_per_trainer"]) else f"never (up to {most})"
    rows.append(("", f"drives in each trainer are as fast as these owners: {local}"))
    return rows


def _link(rate: float | None) -> str:
    return "a link of unlimited rate" if rate is None else f"{rate * 8 / 1e9:g} Gb/s each way"


def _seconds(s: float) -> str:
    return f"{s:.2f}" if s < 1000 else f"{s:.0f}"
