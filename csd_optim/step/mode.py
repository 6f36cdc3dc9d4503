"""When the steps of an optimizer run: the interface of its modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..errors import CSDError
from ..store.format import Record
from .prepared import PreparedStep
from .spec import Participants, StepSpec


class InStep:
    """The mode without overlap: a step runs from beginning to end within step(). The other modes derive from it."""

    overlaps = False

    @property
    def kind(self) -> int:
        """A number for how steps run and what that still needs, by which ranks tell that they do alike; 0: as here."""
        return 0

    @property
    def under_way(self) -> PreparedStep | None:
        """The step that step() is to take, if it has begun in backward, so that step() only has to end it."""
        return None

    def end_step(self, record: Record | None, *, all_can_undo: bool) -> None:
        """End a step that began in backward. For `record` and `all_can_undo` see LiveStep. Raises what a step raises.

        A collective.
        """
        raise NotImplementedError

    def before_step(self, *, scaled: bool) -> CSDError | None:
        """Get ready, first in step(). Returns why this rank cannot take the step. `scaled`: a GradScaler takes part.

        Raises why the previous step failed, with several ranks on all of them: a collective.
        """
        return None

    def skip(self) -> None:
        """Do without this step, in which some rank has found an overflow."""

    def check(self, taking_part: Participants) -> None:
        """Examine what takes part in a step, before any part of the step uses the engine."""

    def compare(self, spec: StepSpec) -> None:
        """Examine what a step will do, before it changes anything."""

    def can_launch(self, step: PreparedStep | None) -> bool:
        """Return whether launch() can start the step here. `step` None: this rank has nothing to do."""
        return False

    def launch(self, step: PreparedStep | None, record: Record | None, *, all_can: bool) -> bool:
        """Start the step, which then runs concurrently with the program, if all ranks can. Within around_step().

        Returns False if the step has to run within step(). Raises what a step raises. A collective.
        """
        return False

    @contextlib.contextmanager
    def around_step(self) -> Iterator[None]:
        """Return, after the step that is taken inside, as the next two say. Enter it before the engine's lock."""
        try:
            yield
            self.wait_for_unguarded()
        finally:
            self.note_undo()

    def wait_for_unguarded(self) -> None:
        """Return when the parameters whose readers do not wait have arrived. Raises what a step raises.

        Called without the engine's lock, which a failing step takes in order to be undone.
        """

    def note_undo(self) -> None:
        """Note that a step may have failed, and that its undo may not be finished: readers wait for that."""

    def settle(self) -> None:
        """Return when all parameters of this process are those of the last step. Raises why that step failed."""

    def drain(self, *, collective: bool) -> CSDError | None:
        """Return when no step is under way here; with `collective`, on any rank. Raises why one failed.

        Returns why that is not possible on this rank, perhaps on it alone; None if it is.
        """
        return None

    def undo(self) -> None:
        """Undo a step that has begun in backward and changes parameters there, if one is under way."""

    def clear_gradients(self, *, set_to_none: bool) -> bool:
        """Clear gradients, or leave it to the caller. Returns whether this has cleared them."""
        return False

    def close(self) -> None:
        """End the mode, after the step under way: readers no longer wait. Raises why that step failed."""

    def stats(self) -> dict[str, Any] | None:
        """See CSDAdam.stats()."""
        return None
