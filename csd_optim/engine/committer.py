"""The committer: decides what becomes of completed steps. This one keeps nothing; durable.py's makes them durable."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..store.format import Record
from ..store.layout import Extent

if TYPE_CHECKING:
    from .engine import Engine


class Committer:
    """An engine's committer, called before and after everything that changes states. This one makes nothing durable."""

    durable = False
    committed_step = 0  # the last step that is durable
    uncommitted = False  # a committed tile has moved to its other slot since the last commit began

    def __init__(self, engine: Engine) -> None:
        # Weak, as the engine owns this: without a cycle it is freed with its last user, not by the garbage collector.
        self._engine: Engine = weakref.proxy(engine)

    # ---- see the methods of Engine that call these -----------------------------

    def describe(self, manifest: dict[str, Any]) -> None:
        pass

    def commit(self, record: Record | None = None) -> None:
        pass

    def confirm(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def all_ranks_or_none(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def loading(self, record: Record | None = None) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def writing(self, params: Sequence[int]) -> Iterator[None]:
        self._engine.remap()
        yield
        self._engine.windows.sync()
        self._engine.windows.write_decoded()

    # ---- called by the engine ----------------------------------------------------

    def before_extend(self) -> None:
        """Prepare for parameters that join, which were no part of the last step."""

    def after_extend(self, extent: Extent, offsets: list[int]) -> None:
        """Note that an extent was added. `offsets`: where it begins in the store of each device (bytes)."""

    def before_step(self, tiles: np.ndarray[Any, Any], record: Record | None) -> np.ndarray[Any, Any]:
        """Prepare for a step over `tiles`; return them with all tiles whose windows were written.

        Raises CSDOSError if the step must not begin.
        """
        written = self._engine.windows.note_written()
        if not len(written):
            return tiles
        return self._engine.in_step_order(np.sort(np.concatenate([tiles, np.setdiff1d(written, tiles)])))

    def reserve(self, record: Record | None) -> None:
        """Allocate space for the commit of the step in flight, so that a full disk fails now and not in the commit.

        `record`: the one to be committed, if it is not that of before_step(). Raises CSDOSError.
        """

    def after_step(self) -> None:
        """Note that a step has completed."""

    def before_undo(self) -> None:
        """Prepare for a completed step to be undone: its commit goes no further."""

    def after_undo(self) -> None:
        """Note that a completed step was undone."""

    def before_keep_residual(self, param: int, residual: torch.Tensor) -> None:
        """Prepare for `residual` to become the residual of a parameter."""

    def after_drop_residual(self, param: int) -> None:
        """Note that the residual of a parameter was dropped."""

    def adopt_residuals(self, residuals: Mapping[int, torch.Tensor]) -> None:
        """Adopt the residuals of the resumed commit, by parameter."""

    def name_tile(self, device: int, tile: int) -> str:
        """Return the names of the parameters in a tile, for messages; "" if they are unknown."""
        return ""

    def before_stats(self) -> None:
        """Wait until the last step and its commit have written everything that stats() counts. Raises CSDOSError."""

    def residual_bytes(self, device: int) -> tuple[int, int]:
        """Return the bytes of residuals written to a device: by the last step with its commit, and in total."""
        return 0, 0

    @property
    def idle(self) -> bool:
        """Whether no background work is in flight that close() would wait for."""
        return True

    def end_copies(self) -> None:
        """Ask those who copy the last commit, such as snapshots, to hurry; wait until all have finished."""

    def before_close(self) -> None:
        """Prepare for the engine to close: this is the last chance to commit. Raises CSDOSError."""

    def close(self) -> None:
        """Stop background work; wait until no other thread uses the engine."""
