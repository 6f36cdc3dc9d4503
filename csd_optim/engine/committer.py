"""What becomes of a step that is whole: this committer's are gone with the process, those of durable.py stay."""

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
    """Of an engine, which asks it before whatever changes states and tells it afterwards. This one keeps nothing."""

    durable = False
    committed_step = 0  # the last step that is durable
    uncommitted = False  # current slots of committed tiles changed since the last commit began

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = weakref.proxy(engine)  # it owns this, and goes with its last user, not with a collection

    # ---- as of Engine, which passes these on -----------------------------------

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

    # ---- what an engine tells and asks -------------------------------------------

    def before_extend(self) -> None:
        """Something joins that is no part of the step before."""

    def after_extend(self, extent: Extent, offsets: list[int]) -> None:
        """An extent is there, on each device from this byte of the store on."""

    def before_step(self, tiles: np.ndarray[Any, Any], record: Record | None) -> np.ndarray[Any, Any]:
        """A step over these tiles comes next; returns those that it has to take: also what somebody wrote to.

        Raises CSDOSError: it must not.
        """
        written = self._engine.windows.note_written()
        if not len(written):
            return tiles
        return self._engine.flowing(np.sort(np.concatenate([tiles, np.setdiff1d(written, tiles)])))

    def reserve(self, record: Record | None) -> None:
        """Takes the room for the commit of the step under way, while a full disk is only the caller's business.

        `record`: as it will be, if it is not that of before_step(). Raises CSDOSError.
        """

    def after_step(self) -> None:
        """The step is whole."""

    def before_taking_back(self) -> None:
        """The last step will be undone, although it was whole: its commit goes no further."""

    def after_taking_back(self) -> None:
        """It is."""

    def before_keeping(self, param: int, residual: torch.Tensor) -> None:
        """This will be a parameter's residual."""

    def after_dropping(self, param: int) -> None:
        """The parameter has none any more."""

    def adopt_residuals(self, residuals: Mapping[int, torch.Tensor]) -> None:
        """These are those of the commit that was taken up."""

    def name_tile(self, device: int, tile: int) -> str:
        """What messages say of a tile: the parameters in it, if they are known."""
        return ""

    def before_counting(self) -> None:
        """Returns when the last step has written what it writes. Raises CSDOSError."""

    def residual_bytes(self, device: int) -> tuple[int, int]:
        """Written of residuals: in the last step and its commit, and in all."""
        return 0, 0

    @property
    def idle(self) -> bool:
        """Nothing goes on in the background that close() would wait for."""
        return True

    def end_copies(self) -> None:
        """Returns when nobody copies what a commit holds: they are told to hurry."""

    def before_close(self) -> None:
        """The last chance to commit. Raises CSDOSError."""

    def close(self) -> None:
        """Returns when no other thread uses the engine."""
