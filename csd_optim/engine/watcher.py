"""The interface of an observer of steps: of changes to parameters, and of commits. See publish/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class Watcher:
    """A watcher that ignores everything.

    An engine calls the methods in this order, on the stepping thread unless a docstring says otherwise. No method
    raises.
    """

    # Whether this rank lacks something that before_commit() or after_commit() should have done. The committer tells the
    # other ranks, and calls give_up() on all of them. A single process gives up by itself.
    has_failed: bool = False

    @property
    def awaits_vote(self) -> bool:
        """Whether after_commit() is still to be called for the last step, on all ranks: no step may begin before."""
        return False

    def enter(self, table: np.ndarray[Any, Any], params: Sequence[Any]) -> None:
        """Set `watch` in the table of a plan (dtype PARAM) for those of `params` (ParamState) that are watched."""

    def step_begins(self, table: np.ndarray[Any, Any], written: np.ndarray[Any, Any]) -> None:
        """Note that a step has begun on the devices; no tile was pushed yet.

        `written`: tiles whose states were written since the last step (uint32).
        """

    def compares(self, row: int) -> bool:
        """Whether param_arrives() reads the old values of the parameter with this row of the step's table.

        Constant from the plan of a step to its end. On any thread.
        """
        return False

    def param_arrives(self, tile: int, piece: np.ndarray[Any, Any], before: torch.Tensor, after: torch.Tensor) -> None:
        """Note that a piece of a parameter has come back in a staging buffer, and is copied to the parameter next.

        Called only for pieces that come back in a staging buffer; parameters for which compares() is True always do. On
        any thread. `piece`: an array of length 1, dtype PIECE. `before`, `after`: the elements, 1-D, in host memory;
        `before` may be on an accelerator where compares() is False.
        """

    def step_completes(self, step: int) -> None:
        """Do the work of before_commit(), called next, where the end of a step is also the beginning of its commit.

        All parameters of the step have arrived. On any thread.
        """

    def step_ends(self, *, is_undone: bool) -> None:
        """Note that the step of step_begins() is complete here, or was undone."""

    def step_of_others(self) -> None:
        """Note, instead of step_completes() and step_ends(), a step in which only other ranks have updated anything."""

    def step_taken_back(self) -> None:
        """Note that the last complete step is undone on all ranks, perhaps after before_commit()."""

    def no_commit(self, step: int) -> None:
        """Begin the work of before_commit(), for a complete step without a commit, as nothing is durable.

        A single process continues with the work of after_commit(). Several ranks call after_commit() once all have the
        step.
        """

    def join(self) -> None:
        """Return when the work begun by no_commit() is done. On any thread."""

    def before_commit(self, step: int) -> None:
        """Do what has to be durable before the states of this step are. On any thread; may be repeated."""

    def give_up(self) -> None:
        """Note that `has_failed` is True on some rank, and reset it. Called before after_commit(). On any thread."""

    def after_commit(self, step: int) -> None:
        """Note that the states of this step are durable on all devices, of all ranks. On any thread."""

    def params_written(self, params: Sequence[int]) -> None:
        """Note that states of these parameters are written outside of a step."""

    def tiles_written(self, tiles: np.ndarray[Any, Any]) -> None:
        """Note that states in these tiles were written outside of a step."""

    def engine_closed(self) -> None:
        """Note that the engine is closed. On any thread."""
