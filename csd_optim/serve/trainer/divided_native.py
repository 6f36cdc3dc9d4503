"""The native engine of a trainer with several owners: each call goes to the owners concerned."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...bindings import EVENT, PASS_2, TO_AND_FRO, DeviceConfig, ExtentConfig, Push
from ...engine.parts import Ending, Outcome
from ...errors import CSDError, CSDRankError, CSDRuntimeError
from .shares import Places, Share


class DividedNative:
    """The interface of RemoteNative, over the RemoteNative of each share.

    A step is complete once all owners have completed it; if one owner fails, the step is undone on all.
    """

    takes_in_place = True

    def __init__(self, shares: Sequence[Share], changed: threading.Condition) -> None:
        """`changed`: the condition shared by all links."""
        self._shares, self._changed = shares, changed
        self._places = Places(shares)
        self._n_params = 0
        self._in_step: list[Share] = []  # shares with tiles of the step

    # ---- open and close --------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return any(share.native.is_open for share in self._shares)

    def open(self, devices: Sequence[DeviceConfig]) -> None:
        for share in self._shares:
            share.native.open(devices)

    def close(self) -> None:
        for share in self._shares:
            share.native.close()

    def extend(self, config: ExtentConfig) -> list[Any]:
        """Note that owners have new tiles: RemoteDevices.plan() has asked them."""
        self._places = Places(self._shares)
        self._n_params = 1 + max(int(share.parts["param"].max()) for share in self._shares if len(share.parts))
        return []

    def tiles(
        self, first: int, n: int, chunks: int, sections: int
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        return self._shares[0].native.tiles(first, n, chunks, sections)

    # ---- a step ----------------------------------------------------------------------

    def begin(
        self,
        params: np.ndarray[Any, Any],
        hypers: np.ndarray[Any, Any],
        tiles: np.ndarray[Any, Any],
        *,
        order: int = TO_AND_FRO,
    ) -> None:
        self._in_step = []
        try:
            for k, share in enumerate(self._shares):
                if len(here := self._places.at(k, tiles)):
                    has_passes = bool((here >= PASS_2).any())  # else a single row for each parameter
                    own = share.table(params if has_passes else params[: self._n_params], self._n_params)
                    share.native.begin(own, hypers, here, order=order)
                    self._in_step.append(share)
        except BaseException:
            for share in self._in_step:
                with contextlib.suppress(CSDError):  # a lost link: the owner then undoes the step by itself
                    share.native.finish(False)
            raise

    def push(self, tile: int, how: Push | None = None) -> None:
        k, there = self._places.of(tile)
        self._shares[k].native.push(there, how)

    def drop_grads(self, params: Sequence[int]) -> None:
        for share in self._in_step:
            if rows := share.rows_of(params):
                share.native.drop_grads(rows)

    def pull(self) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self.would_pull)
            share = next(share for share in self._in_step if share.native.would_pull)
            return share.number_of(share.native.pull())

    @property
    def would_pull(self) -> bool:
        return any(share.native.would_pull for share in self._in_step)

    def params_ready(self, tiles: np.ndarray[Any, Any], *, wait: bool) -> bool:
        return all(
            s.native.params_ready(self._places.at(k, tiles), wait=wait)
            for k, s in enumerate(self._shares)
            if s in self._in_step
        )

    def finish(self, keep: bool, ending: Ending | None = None) -> Outcome | None:
        failure: BaseException | None = None
        kept: list[Share] = []
        outcome: Outcome | None = None
        if keep:  # no owner completes the step before all tiles have come back from all owners
            try:
                for share in self._in_step:
                    share.native.await_all()
            except BaseException as e:
                failure, keep = e, False
        for share in self._in_step:
            try:
                own = ending and ending._replace(counts=share.counts(ending.counts))
                if ended := share.native.finish(keep, own):
                    kept.append(share)
                    outcome = outcome if outcome and outcome.commit_failure else ended  # the first failure is raised
            except BaseException as e:
                failure, keep = failure or e, False
        if failure:
            for share in self._in_step:  # the step does not count, whatever an unreachable owner says later
                share.native.unanswered = None
            for share in kept:
                try:
                    share.native.take_back_last()
                except CSDError as e:  # the next step finds that the owners' rounds differ
                    share.link.lose(CSDRankError(f"{failure}; and it could not be undone: {e}"))
            raise failure
        return outcome

    def take_back(self) -> None:
        """A no-op: RemoteCommitter.before_undo() has asked the owners."""

    def go_back(self, tiles: np.ndarray[Any, Any]) -> None:
        """A no-op: owners go back by themselves. See RemoteCommitter.loading()."""
        assert not len(tiles)

    def free_tiles(self, tiles: np.ndarray[Any, Any]) -> None:
        """A no-op: see RemoteCommitter.free()."""

    def undone(self) -> list[tuple[int, int]]:
        return [(s.number_of(tile), elems) for s in self._in_step for tile, elems in s.native.undone()]

    # ---- a guess ---------------------------------------------------------------------

    def hold_bytes(self, tile: int) -> int:
        return 0

    def unchanged(self, params: np.ndarray[Any, Any]) -> bool:
        return all(share.native.unchanged(params) for share in self._in_step)

    def release(self, params: np.ndarray[Any, Any], order: np.ndarray[Any, Any]) -> None:
        for share in self._in_step:
            share.native.release(params, order)

    # ---- between steps ---------------------------------------------------------------

    def wait_writes(self) -> None:
        """A no-op: see RemoteNative."""

    def remap(self, *, open: bool) -> None:
        """A no-op: there are no windows."""

    def edited(self, tiles: np.ndarray[Any, Any]) -> None:
        assert not len(tiles)

    def read(self, tile: int, sections: int, elems: int, states: int) -> None:
        k, there = self._places.of(tile)
        self._shares[k].native.read(there, sections, elems, states)

    def decode(self, tile: int, first: int, n: int, states: Sequence[torch.Tensor | None], param: int = 0) -> None:
        k, there = self._places.of(tile)
        self._shares[k].native.decode(there, first, n, states, param)

    def stats(self, device: int) -> dict[str, float]:
        raise CSDRuntimeError("RemoteDevices.current_stats() asks for these")

    def events(self) -> np.ndarray[Any, Any]:
        return np.zeros(0, EVENT)
