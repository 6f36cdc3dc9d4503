"""Parameters under way, as whoever reads them sees it; and what a hook becomes in a copy of its model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Protocol

import torch


class Arrivals(Protocol):
    """The parameters under way."""

    active: bool  # whether wait() has to be called: a step is under way, or the order of use is noted. Plain attribute

    def wait(self, params: Iterable[torch.Tensor]) -> None:
        """Return when `params` have arrived, for all threads and streams; raise the error of a step that failed.

        Called only while `active`: with all parameters of a module when it is entered, and with single ones when they
        are read. The same ones may come repeatedly; all belong to the optimizer. Any thread may call this.
        """

    def settle(self) -> None:
        """Return when all have arrived; raise the error of a step that failed, even before other ranks know of it."""

    def remove_if_dropped(self) -> bool:
        """Remove the guards if their optimizer is gone, and nothing else can. Returns whether it is."""


class NoArrivals:
    """Arrivals that never wait: for guards that have been removed, but are still referenced."""

    active = False

    def wait(self, params: Iterable[torch.Tensor]) -> None:
        pass

    def settle(self) -> None:
        pass

    def remove_if_dropped(self) -> bool:
        return False


# Copies and pickles of our hooks become this: a function that takes any arguments and returns None. Unpickling it does
# not import csd_optim.
NO_OP: tuple[Any, ...] = getattr, (contextlib.nullcontext(), "__exit__")
