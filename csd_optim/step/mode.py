"""When an optimizer's steps are made: what it asks of each way."""

from __future__ import annotations

from typing import Any

from ..store.format import Record
from .prepare import Participants, PreparedStep


class InStep:
    """Within step(), to the end: without overlap. The other ways derive from this one."""

    overlaps = False  # on all ranks, or on none

    @property
    def under_way(self) -> bool:
        """Has the step that is asked for now begun in backward, so that step() only has to end it?"""
        return False

    def end_step(self, record: Record | None) -> None:
        """Ends that. `record`: for its commit. Raises what a step raises."""
        raise NotImplementedError

    def before_step(self, *, skips: bool, scaled: bool) -> None:
        """step() is called. `skips`: it will do nothing; `scaled`: a GradScaler takes part.

        Raises what made the step before fail, among ranks on all of them: a collective.
        """

    def check(self, taking_part: Participants) -> None:
        """To be called before anything of a step uses the engine."""

    def compare(self, step: PreparedStep) -> None:
        """To be called with a step that has changed nothing yet."""

    def launch(self, step: PreparedStep | None, record: Record | None) -> bool:
        """Makes the step, which goes on while the program does; arrive_at_once() is to follow. False: it cannot.

        `step` None: this rank has nothing to do. Raises what a step raises. A collective.
        """
        return False

    def arrive_at_once(self) -> None:
        """Returns when the parameters have arrived that nobody would wait for. Raises what a step raises.

        Not within the engine's lock, which a step that fails takes to be undone.
        """

    def settle(self) -> None:
        """Returns when all parameters of this process are those of the last step. Raises what made that fail."""

    def come_to_rest(self, *, meets: bool) -> None:
        """Returns when no step is under way here; with `meets`, a collective, on any rank. Raises what made it fail."""

    def clears(self, *, set_to_none: bool) -> bool:
        """Before gradients are cleared. Returns whether it has done that itself."""
        return False

    def end(self) -> None:
        """Nobody waits any more. Not while a step is under way."""

    def close(self) -> None:
        """Ends it, with what is under way. Raises what made that fail."""

    def stats(self) -> dict[str, Any] | None:
        """See CSDAdam.stats()."""
        return None
