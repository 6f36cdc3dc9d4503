"""Who is told what the steps of an engine do to parameters, and when that is durable: see publish/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


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

    def compares(self, row: int) -> bool:
        """Whether param_arrives() reads the old values of the parameter with this row of the step's table.

        The same from the plan of a step to its end. On any thread.
        """
        return False

    def param_arrives(self, tile: int, piece: np.ndarray[Any, Any], before: torch.Tensor, after: torch.Tensor) -> None:
        """Note that a piece of a parameter has come back in an image, and is copied to the parameter next.

        Not called of pieces that need no image, which are never among those that it compares(). On any thread.
        `piece`: an array of one, dtype PIECE. `before`, `after`: its elements, 1-D, in host memory; `before` may be on
        an accelerator unless it compares() them.
        """

    def step_completes(self, step: int) -> None:
        """Do what before_commit() does, where the end of a step is also the beginning of its commit: that comes next.

        All parameters of the step have arrived. On any thread.
        """

    def step_ends(self, *, is_undone: bool) -> None:
        """Note that the step is complete here, or was undone."""

    def step_of_others(self) -> None:
        """Note that a step is complete in which only other ranks have updated anything, instead of these two."""

    def step_taken_back(self) -> None:
        """Note that the last complete step, even if before_commit() was called, is undone on all ranks."""

    def no_commit(self, step: int) -> None:
        """Begin what before_commit() does, for a complete step that gets no commit, as nothing is durable.

        One process goes on with what after_commit() does. Several ranks call that once all have the step.
        """

    def join(self) -> None:
        """Return when what no_commit() has begun is done. On any thread."""

    def before_commit(self, step: int) -> None:
        """Do what has to be durable before the states of this step are. On any thread; may be repeated."""

    @property
    def has_failed(self) -> bool:
        """Whether before_commit() has failed here since the ranks last told each other, as they confirm a step."""
        return False

    def after_commit(self, step: int, *, has_failed: bool = False) -> None:
        """Note that the states of this step are durable on all devices, of all ranks. On any thread.

        `has_failed`: on any rank.
        """

    def params_written(self, params: Sequence[int]) -> None:
        """Note that states of these parameters are written outside of a step."""

    def tiles_written(self, tiles: np.ndarray[Any, Any]) -> None:
        """Note that states in these tiles were written outside of a step."""

    def engine_closed(self) -> None:
        """Note that the engine is closed. On any thread."""
