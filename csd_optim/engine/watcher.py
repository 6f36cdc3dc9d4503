"""Who is told what the steps of an engine do to parameters, and when that is durable: see publish/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Watcher:
    """An engine calls these methods in this order, on the thread that steps unless they say otherwise. None raises.

    This one wants to know nothing.
    """

    def enter(self, table: np.ndarray[Any, Any], params: Sequence[Any]) -> None:
        """Set `watch` in the table of a plan (dtype PARAM) for the parameters (ParamState) that it watches."""

    def step_begins(self, table: np.ndarray[Any, Any], written: np.ndarray[Any, Any]) -> None:
        """Note that a step has begun on the devices; no tile was pushed yet.

        `written`: tiles whose states were written since the last step (uint32).
        """

    def step_ends(self, *, is_undone: bool) -> None:
        """Note that the step is complete here, or was undone."""

    def no_commit(self, step: int) -> None:
        """Note that a complete step gets no commit, as nothing is durable."""

    def before_commit(self, step: int) -> None:
        """Do what has to be durable before the states of this step are. On any thread; may be repeated."""

    def after_commit(self, step: int) -> None:
        """Note that the states of this step are durable on all devices. On any thread."""

    def params_written(self, params: Sequence[int]) -> None:
        """Note that states of these parameters are written outside of a step."""

    def tiles_written(self, tiles: np.ndarray[Any, Any]) -> None:
        """Note that states in these tiles were written outside of a step."""

    def engine_closed(self) -> None:
        """Note that the engine is closed. On any thread."""
