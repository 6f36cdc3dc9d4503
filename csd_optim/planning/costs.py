"""The costs of a plan: dollars for memory, drives and their wear, and joules per step.

Prices and watts are inputs. The tables here are the only place with defaults, each with date and source, and a plan
lists the defaults that it has used. In 2026 prices of memory and flash rose by half and more within a quarter: give
today's prices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import CSDValueError


@dataclass(frozen=True)
class Assumed:
    """A default value. `as_of`: date of the source, or "undated"; "" for a mere assumption."""

    value: float
    unit: str
    what: str
    as_of: str
    source: str

    @property
    def text(self) -> str:
        """The value with its unit."""
        dollars, unit = ("$", self.unit[1:]) if self.unit.startswith("$") else ("", f" {self.unit}")
        return f"{dollars}{self.value:g}{unit}"


_RDIMM = "middle of $27 to $37 for server RDIMMs, as TrendForce and Counterpoint report"
_H100 = "an H100 of 80 GB costs $25,000 to $30,000: awesomeagents.ai/hardware/nvidia-h100"
_NVME = "twice a consumer drive of 2 TB, $300 to $480: thorstenmeyerai.com/?p=9018"
_CARD = "SmartSSD, in Smart-Infinity (HPCA 2024); no longer made, the rest was listed at $517 in 2025"
_D5_P5316 = "data sheet of the D5-P5316, a PCIe 4.0 drive: most in writes, and idle"
_CONTEXT = "80 W of an idle H200 (api.serialalice.pt/alice-benchmark), 26 to 50 W of a CUDA context (arXiv 2605.23918)"

PRICES = {
    "dram": Assumed(32, "$/GB", "DRAM", "2026-Q2", _RDIMM),
    "gpu": Assumed(340, "$/GB", "GPU memory", "2026-Q1", _H100),
    "drive": Assumed(780, "$", "a drive", "2026", _NVME),
    "capacity": Assumed(4, "TB", "its size", "", "the drive of that price"),
    "tbw": Assumed(2400, "TB", "its endurance", "", "600 TB for each TB, as consumer drives usually have"),
}
CARD_PRICES = PRICES | {  # of SmartSSDs
    "drive": Assumed(2400, "$", "a CSD", "2024", _CARD),
    "capacity": Assumed(3.84, "TB", "its size", "2024", _CARD),
    "tbw": Assumed(7008, "TB", "its endurance", "", "written once a day for five years"),
}
WATTS = {
    "cpu": Assumed(150, "W", "CPU", "", "a server's processor that updates states and moves them"),
    "drive": Assumed(25, "W", "busy drive", "undated", _D5_P5316),
    "idle": Assumed(5, "W", "idle drive", "undated", _D5_P5316),
    "dram": Assumed(0.1, "W/GB", "DRAM", "", "6 W for a module of 64 GB"),
    "gpu": Assumed(120, "W", "waiting GPU", "2026-Q2", _CONTEXT),
}


def parse_costs(text: str, option: str, known: Mapping[str, Assumed]) -> dict[str, float]:
    """Parse `dram=11,drive=600` into numbers in the units of `known`. Raises CSDValueError."""
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if name not in known or name in found or not 0 <= number < math.inf:
            units = ", ".join(f"{n} ({of.unit})" for n, of in known.items())
            raise CSDValueError(f"Invalid {option}: {part!r}; write NAME=NUMBER, of {units}")
        found[name] = number
    return found


def costs_of(
    prices: Mapping[str, float],
    watts: Mapping[str, float],
    *,
    on_csd: bool,
    devices: int,
    state_bytes: float,
    stored_bytes: float,
    written_bytes: float,
    step: float,
    iteration: float,
) -> dict[str, Any]:
    """Return dollars, joules per step, and the assumptions for both. `prices`, `watts`: the given ones.

    `state_bytes`: of all states, once, as in memory. `stored_bytes`: on each device. `written_bytes`: to each device in
    a step. `step`, `iteration`: seconds; devices are busy in a step, and idle in the rest of an iteration.
    """
    defaults = {"prices": CARD_PRICES if on_csd else PRICES, "watts": WATTS}
    given = {"prices": prices, "watts": watts}
    price, watt = (
        {n: given[kind].get(n, default.value) for n, default in table.items()} for kind, table in defaults.items()
    )
    return {
        "dollars": {
            "dram": price["dram"] * state_bytes / 1e9,
            "gpu_memory": price["gpu"] * state_bytes / 1e9,
            "drives": price["drive"] * devices,
            "wear_of_1000_steps": price["drive"] * devices * 1000 * written_bytes / (1e12 * price["tbw"]),
        },
        "drives_are_large_enough": stored_bytes <= 1e12 * price["capacity"],
        "joules_per_step": {
            "cpu": watt["cpu"] * step,
            "drives": devices * (watt["drive"] * step + watt["idle"] * (iteration - step)),
            "waiting_gpu": watt["gpu"] * step,
        },
        "dram_watts": watt["dram"] * state_bytes / 1e9,
        "tbw_bytes": 1e12 * price["tbw"],
        "assumed": [
            {"option": kind, "name": name, "text": default.text, **asdict(default)}
            for kind, table in defaults.items()
            for name, default in table.items()
            if name not in given[kind]
        ],
    }


def describe_assumed(assumed: list[dict[str, Any]]) -> str:
    """Return the assumptions as text, with dates. `assumed`: from costs_of()."""
    dated = ((a, f" ({a['as_of']})" if a["as_of"] else "") for a in assumed)
    return ", ".join(f"{a['what']} {a['text']}{date}" for a, date in dated)
