"""When the steps of an optimizer run: the interface of its modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..errors import CSDError
from ..store.format import Record
from .spec import Participants, StepSpec
from .travel import Travel


class InStep:
    """The mode without overlap: a step runs from beginning to end within step(). The other modes derive from it."""

    overlaps = False

    @property
    def kind(self) -> int:
        """A number for the mode and what it has still to prepare, equal on all ranks; 0: steps run within step()."""
        return 0

    @property
    def under_way(self) -> Travel | None:
        """The step that has begun in backward, which step() only has to end; None: there is none."""
        return None

    def end_step(self, record: Record | None, *, all_can_undo: bool) -> None:
        """End a step that began in backward. For `record` and `all_can_undo` see LiveStep. Raises what a step raises.

        A collective.
        """
        raise NotImplementedError

    def before_step(self, *, scaled: bool) -> CSDError | None:
        """Get ready at the start of step(). Returns why this rank cannot take the step.

        `scaled`: a GradScaler takes part. Raises why the previous step failed; if there are several ranks, on all of
        them: a collective.
        """
        return None

    def skip(self) -> None:
        """Skip this step, because some rank has found an overflow."""

    def check(self, taking_part: Participants) -> None:
        """Examine what takes part in a step, before any part of the step uses the engine."""

    def compare(self, spec: StepSpec) -> None:
        """Examine what a step will do, before it changes anything."""

    def can_launch(self, travel: Travel | None) -> bool:
        """Return whether launch() can start the step here. `travel` None: this rank has nothing to do."""
        return False

    def launch(self, travel: Travel | None, record: Record | None, *, all_can: bool) -> bool:
        """Start the step, which then runs concurrently with the program, if all ranks can. Within around_step().

        Returns False if the step has to run within step(). Raises what a step raises. A collective.
        """
        return False

    @contextlib.contextmanager
    def around_step(self) -> Iterator[None]:
        """Enclose a step; then call wait_for_unguarded() and note_undo(). Enter it before taking the engine's lock."""
        try:
            yield
            self.wait_for_unguarded()
        finally:
            self.note_undo()

    def wait_for_unguarded(self) -> None:
        """Return when all parameters have arrived whose readers no guard makes wait. Raises what a step raises.

        Called without the engine's lock, which a failing step takes in order to be undone.
        """

    def note_undo(self) -> None:
        """Note that a step may have failed with its undo unfinished: readers of its parameters then wait."""

    def settle(self) -> None:
        """Return when all parameters of this process are those of the last step. Raises why that step failed."""

    def drain(self, *, collective: bool) -> CSDError | None:
        """Return when no step is under way here; with `collective`, on any rank. Raises why a step failed.

        Returns an error that prevents a drain (perhaps on this rank alone), or None.
        """
        return None

    def undo(self) -> None:
        """Undo a step that has begun in backward and changes parameters there, if one is under way."""

    def clear_gradients(self, *, set_to_none: bool) -> bool:
        """Return whether this has cleared the gradients; if not, the caller clears them."""
        return False

    def close(self) -> None:
        """End the mode, after the step under way: readers no longer wait. Raises why that step failed."""

    def stats(self) -> dict[str, Any] | None:
        """See CSDAdam.stats()."""
        return None
