"""The undo of a step. If it fails or is interrupted, it is finished before anything reads a parameter of the step.

A parameter is *unknown* from the moment at which an undo begins until its old value is back. The devices keep the old
states in the tiles' other slots, so states are back at once. An old parameter is its rounded master, which has to be
read from the device. If that fails too, the parameter stays unknown, and whatever needs it next tries again.

The old parameters are not kept in memory: the last tile may be the one that fails, so that would take 2 bytes for each
16-bit parameter of a step, where all staging has a fixed size.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..bindings import TORN
from ..distributed.ranks import all_ranks_or_none
from ..engine.engine import Engine
from ..errors import CSDError, CSDTornError, CSDValueError
from ..params.param_state import ParamState
from ..params.state_map import StateMap
from ..params.strides import flat, ordered
from .travel import Travel

NAMED = 3  # the most parameters that a message names


class ParamSpan(NamedTuple):
    """Elements [first, first + n) of a parameter, which begin at element `in_tile` of a tile."""

    param_state: ParamState
    first: int
    in_tile: int
    n: int

    @property
    def needs_it(self) -> bool:
        """Whether an undo restores the elements: not where the parameter is its own only master, which a step keeps."""
        return not (self.param_state.in_place or self.param_state.is_section)


class Undo:
    """The undo of one step, until all its parameters are known again. finish() resumes where it last failed."""

    def __init__(
        self,
        state_map: StateMap,
        travel: Travel,
        *,
        has_begun: bool = True,
        exchanged: bool = False,
        landed: bool | None = None,
        had_tiles: bool = True,
    ) -> None:
        """`has_begun`: there is something to undo here. `landed`: whether it was complete here; None: not ended.

        `had_tiles`: the engine took part in the complete step. `exchanged`: ranks have exchanged new parameters, if
        they share updates; finish() is then a collective that exchanges the restored ones.
        """
        self.engine: Engine = travel.engine
        self.is_done: bool = False
        self._state_map, self._travel, self._landed = state_map, travel, landed
        self._exchanged, self._had_tiles = exchanged and travel.shares_updates, had_tiles
        self._found = not has_begun  # `_in_tiles` and `_on_accelerator` are complete
        self._in_tiles: dict[int, list[ParamSpan]] = {}  # by tile, still to be restored
        self._on_accelerator: list[ParamState] = []  # still to be restored, from masters there
        # Of unknown parameters: torch's count of writes, and the address, when finish() failed.
        self._seen: dict[ParamState, tuple[int, int]] = {}
        self._written: set[ParamState] = set()  # written to or moved by the program since then
        self._overwritten: set[str] = set()  # names of restored parameters among these
        undo_states = self._undo_states if landed is None else self._take_back
        self._stages: list[Callable[[], None]] = [undo_states, self._find, self._restore, self._end]  # repeatable
        if not has_begun:
            self._stages.clear()

    @property
    def is_collective(self) -> bool:
        """Whether all ranks have to call finish(), to exchange parameters: not once a rank is lost."""
        return self._exchanged and not self._travel.gather.is_lost

    @property
    def unknown(self) -> set[ParamState]:
        """The parameters that may not have their old values."""
        if self.is_done:
            return set()
        if self.is_collective or not self._found:
            return {*self._travel.spec.plan.param_states}
        return {*self._on_accelerator, *(span.param_state for spans in self._in_tiles.values() for span in spans)}

    def finish(self) -> None:
        """Return when all parameters have their old values. May be called again after it has raised.

        Raises CSDTornError if some stay unknown, or if the program has written to unknown ones, which is lost now;
        CSDRankError if some stay unknown on another rank. What an accelerator raises leaves the states torn for good.
        """
        now = {state: (state.version_now, state.pointer_now) for state in self._seen}
        self._restore_as_a_whole({state for state, seen in self._seen.items() if seen != now[state]})
        gather, is_collective = self._travel.gather, self.is_collective
        self._seen.clear()
        try:
            with all_ranks_or_none(gather.ranks if is_collective else None):
                self._finish_here()
            if is_collective:
                gather.resend()
                self._overwritten |= {state.name for state in self._written}
            self.is_done = True
        finally:
            for state in self.unknown:  # makes torch refuse a backward through graphs that saved an earlier value
                was_synced = not state.is_dirty
                torch.autograd.graph.increment_version([state.param])
                if was_synced:
                    state.mark_synced()
                self._seen[state] = state.version_now, state.pointer_now
        if self._overwritten:
            raise CSDTornError(
                errno.EIO,
                f"parameters {_listed(sorted(self._overwritten))} have their values from before the failed step again. "
                "What the program wrote to them while these could not be read is lost: write it again",
            )

    def _finish_here(self) -> None:
        try:
            if self._stages:
                self.engine.check_open()
            while self._stages:
                self._stages[0]()
                del self._stages[0]
        except (CSDError, MemoryError, RuntimeError) as e:
            if self.engine.states.torn:
                raise
            text = ((isinstance(e, OSError) and e.strerror) or str(e)).rstrip(".")
            names = _listed(sorted(state.name for state in self.unknown))
            raise CSDTornError(
                (isinstance(e, OSError) and e.errno) or errno.EIO,
                f"a step failed, and parameters {names} are a mix of two steps, because their old values cannot be "
                f"read back: {text}. Until then step(), wait(), save(), `state` and the model's forward raise this",
            ) from e

    # ---- the stages ------------------------------------------------------------------

    def _undo_states(self) -> None:
        undo_states(self._travel)

    def _take_back(self) -> None:
        engine, spec, accelerated = self.engine, self._travel.spec, self._travel.accelerated
        if self._landed:
            try:
                # Residuals have a single copy, and so have states that the accelerator has overwritten.
                if spec.with_residual or not accelerated.undoes:
                    raise CSDValueError("residuals, and states of gpu: alone, have a single copy")
                engine.undo_last(spec.plan.rows, had_tiles=self._had_tiles)
            except CSDValueError as e:
                engine.mark_torn()
                raise CSDTornError(
                    errno.EIO,
                    f"a step has failed at its end on another rank, and cannot be undone here: {e}. Start all ranks "
                    "again, with resume=True or from a snapshot or a checkpoint",
                ) from e
            self._landed = False
        accelerated.undo()

    def _find(self) -> None:
        """Find the parameters that have new values; all others are known from here on."""
        engine, spec = self.engine, self._travel.spec
        self._in_tiles, self._on_accelerator = {}, []
        # All parameters of a step that had ended: the program may have written different values on different ranks
        # since.
        ended = self._landed is not None
        whole = {*(spec.plan.param_states if ended else self._travel.accelerated.changed), *self._written}
        self._add_whole(whole)
        took_part, others = spec.table["grad"] != 0, {state.index for state in whole}
        for tile, elems in engine.native.undone() if len(self._travel.tiles) and not ended else []:
            for row, _, first, in_tile, n in engine.tiles.pieces_of(tile).tolist():
                if took_part[row] and row not in others and in_tile < elems:
                    self._add(tile, ParamSpan(self._state_map.by_index[row], first, in_tile, min(n, elems - in_tile)))
        self._found = True

    def _add(self, tile: int, span: ParamSpan) -> None:
        if span.needs_it:
            self._in_tiles.setdefault(tile, []).append(span)

    def _add_whole(self, params: set[ParamState]) -> None:
        rows = {state.index: state for state in params}
        for tile in self.engine.tiles.of([*rows]).tolist() if rows else []:
            self._in_tiles[tile] = [s for s in self._in_tiles.get(tile, []) if s.param_state not in params]
            for row, _, first, in_tile, n in self.engine.tiles.pieces_of(tile).tolist():
                if row in rows:
                    self._add(tile, ParamSpan(rows[row], first, in_tile, n))
        self._on_accelerator = [*{*self._on_accelerator, *(state for state in params if state.on_accelerator)}]

    def _restore_as_a_whole(self, written: set[ParamState]) -> None:
        """Restore all elements of parameters that the program has written to: else they would be a mix."""
        self._written |= written
        if written and self._found:
            self._add_whole(written)
            if self._restore not in self._stages:
                self._stages.insert(0, self._restore)

    def _restore(self) -> None:
        for tile in [*self._in_tiles]:
            self._restore_tile(tile, self._in_tiles[tile])
            del self._in_tiles[tile]
        for state in self._on_accelerator:
            outside = self._outside_value(state)
            values = self._travel.accelerated.old_param(state) if outside is None else outside
            self._set(state, 0, values, is_outside=outside is not None)
        self._on_accelerator.clear()

    def _restore_tile(self, tile: int, spans: Sequence[ParamSpan]) -> None:
        """Restore the parameters of a tile. Reads masters only, and without windows: see csd_engine_read."""
        masters = None
        for state, first, in_tile, n in spans:
            outside = self._outside_value(state)
            if outside is not None:
                values = outside[first : first + n]
            elif state.decoded:
                values = self.engine.decoded.master(state.index, tile, first, in_tile, n)
            else:
                if masters is None:
                    masters = self.engine.states.read_masters(tile, max(span.in_tile + span.n for span in spans))
                values = masters[in_tile : in_tile + n]
            self._set(state, first, values, is_outside=outside is not None)

    def _set(self, state: ParamState, first: int, values: torch.Tensor, *, is_outside: bool) -> None:
        if state in self._written:
            self._overwritten.add(state.name)
        state.restore(first, values, is_outside=is_outside)

    def _outside_value(self, state: ParamState) -> torch.Tensor | None:
        """Return the value, 1-D, to which the program had set a parameter before the step; None: use the master."""
        value = self._travel.spec.outside_values.get(state.index)
        return None if value is None else flat(ordered(value, state.stride))

    def _end(self) -> None:
        for state in self._travel.spec.written:  # the program's writes before the step are due again
            state.version = -1
        accelerated = self._travel.accelerated
        if self._landed is not None:
            accelerated.end()
        elif accelerated.launched:
            accelerated.wait()  # so that old values are there, on any stream, before the failure is reported


class Rollback:
    """The undo of steps that the devices have lost: sets all parameters to their masters. For one process."""

    is_collective = False

    def __init__(self, engine: Engine, state_map: StateMap) -> None:
        self.engine = engine
        self.is_done: bool = False
        self._state_map = state_map
        self.unknown: set[ParamState] = {*state_map.param_states.values()}

    def finish(self) -> None:
        """Return when all parameters are known. May be called again after it has raised. Raises CSDTornError."""
        engine, states = self.engine, self.engine.states
        try:
            engine.check_open()
            for state in [*self.unknown]:
                engine.decoded.drop([state.index])
                if not state.param.is_meta:
                    state.set_from_master(None)
                self.unknown.discard(state)
        except (CSDError, MemoryError, RuntimeError) as e:
            names = _listed(sorted(state.name for state in self.unknown))
            raise CSDTornError(errno.EIO, f"parameters {names} cannot be read back yet, after {e}") from e
        self._state_map.changes += 1
        states.rolled_back = False
        self.is_done = True


def undo_states(travel: Travel) -> None:
    """Undo a step's states on the devices and on the accelerator, but not its parameters. May be called again.

    Raises CSDTornError if the devices have updated states in place. What an accelerator raises leaves the states torn.
    """
    engine, accelerated = travel.engine, travel.accelerated
    if engine.stepping:  # else finish() has failed, and has undone the devices' states
        with contextlib.suppress(CSDError):  # why the step has failed
            engine.finish(keep=False)
    elif not len(travel.tiles):
        engine.end_without_tiles(keep=False)
    travel.ring.forget()
    if engine.devices.resident and len(travel.tiles) and engine.native.undone():
        engine.mark_torn()
        raise CSDTornError(errno.EIO, f"the step was cut short. {TORN}")
    if accelerated.launched:
        whole = False
        try:
            if accelerated.undoes:
                accelerated.undo()
                whole = True
        finally:  # even if the accelerator fails
            if not whole:
                engine.mark_torn()


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
