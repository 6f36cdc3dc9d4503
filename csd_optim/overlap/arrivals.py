"""The interface by which guards wait for parameters under way; and the stand-in for a hook in a copy of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Protocol

import torch


class Arrivals(Protocol):
    """The parameters under way."""

    active: bool  # wait() has to be called: a step is under way, or the order of use is recorded

    def wait(self, params: Iterable[torch.Tensor]) -> None:
        """Return when `params` have arrived, for all threads and streams; raise the error of a step that failed.

        Called only while `active`, on any thread: with all parameters of a module when the module is entered, and with
        single parameters when they are read. May get the same parameters repeatedly, and only the optimizer's.
        """

    def settle(self) -> None:
        """Return when all parameters have arrived; raise the error of a failed step, even before other ranks know."""

    def remove_if_dropped(self) -> bool:
        """Return whether the optimizer is gone; if so, remove the guards, which nothing else can do any more."""


class NoArrivals:
    """Arrivals that never wait: for removed guards that are still referenced."""

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
