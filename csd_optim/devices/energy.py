"""Joules used by this machine, as counted by its processors: RAPL in Linux's powercap tree.

https://docs.kernel.org/power/powercap/powercap.html says how the counters read and wrap. A zone `package-N` is a
processor, or a die of it. Its subzones `core` and `uncore` are parts of it, and not added; `dram`, its memory, is not
in it. `psys` counts packages again, as do the zones of `intel-rapl-mmio`. AMD's processors are in the same tree,
without `dram`.

Drives are not in it. The kernel shows no draw of an NVMe drive, and the table of its power states, for which root can
ask it, has upper bounds only: `csd-optim plan` takes the watts of drives as inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .sysfs import text_of

POWERCAP = Path("/sys/class/powercap")


@dataclass
class Zone:
    """A counter of microjoules. `wraps_at`: the most it counts to; `last`: its value at the last reading."""

    name: str
    counter: Path
    wraps_at: int
    last: int

    def used(self) -> int:
        """Return the microjoules since the last call. Raises OSError, or ValueError if it shows no number."""
        now = int(self.counter.read_text())
        used, self.last = now - self.last, now
        return used if used >= 0 else used + self.wraps_at


def zones_of(powercap: Path) -> tuple[list[Zone], str | None]:
    """Return the zones of all packages, and of their memory where it can be read; or none, and why.

    Since Linux 5.10 only root may read the counters.
    """
    found = []
    for zone in sorted(powercap.glob("intel-rapl:*")):  # subzones are listed beside their zones
        name, counter = text_of(zone / "name"), zone / "energy_uj"
        if not name.startswith("package-") and name != "dram":
            continue
        try:
            wraps_at = int((zone / "max_energy_range_uj").read_text())
            found.append(Zone(name, counter, wraps_at, int(counter.read_text())))
        except (OSError, ValueError) as e:
            if name != "dram":
                return [], f"cannot read the counter of {zone}: {getattr(e, 'strerror', None) or e}"
    if all(zone.name == "dram" for zone in found):
        return [], f"no energy counter of a processor (RAPL) in {powercap}"
    return found, None


class EnergyMeter:
    """Joules of all packages and their memory from begin() to end(), once per step.

    A counter wraps after 65 kJ or 262 kJ, at 200 W 5 or 20 minutes: of a longer time between two calls whole turns are
    lost.
    """

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self._powercap = powercap
        self._zones: list[Zone] | None = None  # looked for in the first step
        self._problem: str | None = "no step was made yet"
        self._joules = {"step": 0.0, "steps": 0.0, "training": 0.0}

    def begin(self) -> None:
        """Note that a step begins. What was used since the last one counts for the training."""
        if self._zones is None:
            self._zones, self._problem = zones_of(self._powercap)
        else:
            self._joules["training"] += self._used()

    def end(self) -> None:
        """Note that the step is done."""
        used = self._joules["step"] = self._used()
        self._joules["steps"] += used
        self._joules["training"] += used

    def _used(self) -> float:
        try:
            return sum(zone.used() for zone in self._zones or ()) / 1e6
        except (OSError, ValueError) as e:
            self._zones, self._problem = [], f"an energy counter can no longer be read: {e}"
            return 0.0

    def describe(self) -> dict[str, Any]:
        """Return `machine_joules`: of the last `step`, of all `steps`, and of the `training`, from the beginning of the
        first step to the end of the last. None without counters; `problem` says why. `domains`: what was added.
        """
        return {
            "machine_joules": None if self._problem else dict(self._joules),
            "domains": [zone.name for zone in self._zones or ()],
            "problem": self._problem,
        }
