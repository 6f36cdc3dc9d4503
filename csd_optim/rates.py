"""The rates of a device, as planning and placement know them, and as an emulated one keeps to them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """How fast a device is, or how fast an emulated one may be at most (`csd_pace`). math.inf: no limit."""

    read: float = math.inf  # bytes per second from flash, without writes
    write: float = math.inf
    mixed: float = math.inf  # bytes per second, read plus written, when both happen at once
    update: float = math.inf  # parameters per second; a host's rate counts instead if it updates
    on_host: bool = False  # the host updates, as with a plain drive: states cross the link, gradients do not
    link: float = math.inf  # bytes per second each way, both ways busy; emulated devices that name it share one
    latency: float = 0.0  # seconds before the first byte of a read or write; only emulated
    flash_grads: bool = False  # gradients are read from the drive and do not cross the link; only emulated

    @staticmethod
    def in_turn(read: float, write: float, update: float = math.inf, on_host: bool = False) -> Rates:
        """Return a device that reads and writes at once no faster than in turn: cautious, and true of most drives."""
        return Rates(read, write, 2 / (1 / read + 1 / write), update, on_host)

    def seconds(self, params: float, read: float, written: float) -> float:
        """Return a lower bound on the time that the device takes to update `params` elements and move so many bytes.

        The link is left out, because other devices may share it.
        """
        return max(params / self.update, read / self.read, written / self.write, (read + written) / self.mixed)

    @property
    def params_per_second(self) -> float:
        """Upper bound on the update rate with three fp32 states; math.inf if there is no limit."""
        slowest = self.seconds(1, 12, 12)
        return 1 / slowest if slowest else math.inf


UNPACED = Rates()
