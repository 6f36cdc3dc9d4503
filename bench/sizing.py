"""The tables of docs/sizing.md: which models fit a machine, and what their steps take. `make tables` writes them there.

    python -m bench.sizing                      prints them
    python -m bench.sizing docs/sizing.md       puts them between the two marks in a file

Everything is predicted, as `csd-optim plan` does. What a core updates is taken from a file of bench/results.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from bench.tables import main
from csd_optim.planning.advice import PlanRequest, plan
from csd_optim.planning.model import DRIVES, Host
from csd_optim.store.sections import EIGHT_BIT, FP32

BEGIN, END = "<!-- begin: bench.sizing -->\n", "<!-- end: bench.sizing -->\n"
RATES_OF_A_CORE = Path(__file__).parent / "results" / "ceiling-8bit-xeon-2-cores-2026-11-28.json"
MODELS = (1, 7, 13, 34, 70)  # billions of parameters
STATES = {FP32: "fp32", EIGHT_BIT: "8 bits"}
IN_FLIGHT = 512e6  # bytes of gradients with overlap(free_gradients=True): `hold`
LEAST = 0.1  # the share of a card's memory that activations need, at the least: small batches, checkpointing


@dataclass(frozen=True)
class Machine:
    """Cards that divide parameters and gradients among themselves, and drives that divide the states."""

    title: str
    cards: int
    memory: float  # bytes on each card
    drives: tuple[int, ...]
    drive: str

    def fits(self, params: float) -> str:
        """Return whether bf16 parameters and gradients fit the cards, and what is left there for activations."""
        for gradients, how in ((2 * params, ""), (IN_FLIGHT, " with `free_gradients`")):
            left = self.memory - (2 * params + gradients) / self.cards
            if left >= LEAST * self.memory:
                return f"yes{how}: {left / 1e9:.0f} GB left"
        return f"no: {2 * params / self.cards / 1e9:.0f} GB of parameters"


MACHINES = (
    Machine("One card with 24 GB, Gen4 drives", 1, 24e9, (1, 2), "gen4"),
    Machine("8 cards with 80 GB, FSDP2, Gen5 drives", 8, 80e9, (4, 8), "gen5"),
)
GPU_LINK = 25e9  # bytes per second each way and card: PCIe 4.0 x16, as `csd-optim plan` assumes


def rates_of_a_core() -> dict[str, float]:
    """Return how many parameters a measured core verifies, updates and checksums in a second, by state_dtype."""
    measured = json.loads(RATES_OF_A_CORE.read_text())
    (one,) = (row for row in measured["rows"] if row["threads"] == 1)
    (codec,) = (row for row in measured["codec"] if row["isa"] == measured["machine"]["isa"])
    rate = one["params"] / statistics.median(one["engine"]["seconds"])
    return {FP32: rate, EIGHT_BIT: rate * statistics.median(codec["ratio"])}


def rows(machine: Machine, params: float) -> list[str]:
    """Return a row for each number of drives and kind of states, or one row if the model does not fit."""
    model, fits, rates = f"| {params / 1e9:.0f} B", machine.fits(params), rates_of_a_core()
    if fits.startswith("no"):
        return [f"{model} | {fits} | | | | | | |"]
    found = []
    for drives in machine.drives:
        for states, name in STATES.items():
            host = Host(update=math.inf, gpu_link=machine.cards * GPU_LINK)
            drive = DRIVES[machine.drive]
            planned = plan(PlanRequest(int(params), drives, host, drive=drive, state_dtype=states))
            (step,) = (row["step"] for row in planned["predictions"] if row["chosen"])
            space = planned["capacity_bytes_per_device"] / 1e9
            written = 1000 * planned["wear"]["bytes_per_step_and_device"] / 1e12
            cores = math.ceil(params / step / rates[states])
            cells = fits, drives, name, f"{space:,.0f} GB", f"{step:.1f}", cores, f"{written:.1f} TB"
            found.append(f"{model} | {' | '.join(map(str, cells))} |")
    return found


def tables() -> str:
    found = []
    for machine in MACHINES:
        found += [
            f"## {machine.title}",
            "",
            "Every figure is predicted.",
            "",
            "| model | fits (predicted) | drives | states | space on each (predicted) | seconds a step (predicted) "
            "| cores (predicted) | written to each in 1000 steps (predicted) |",
            "|---|---|---|---|---|---|---|---|",
            *(row for billions in MODELS for row in rows(machine, billions * 1e9)),
            "",
        ]
    return "\n".join(["", *found])


if __name__ == "__main__":
    main(tables, BEGIN, END)
