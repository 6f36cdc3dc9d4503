"""The native engine of a trainer whose states are with an owner: calls become requests or frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...bindings import AS_PUSHED, EVENT, PARAM, PASS_2, TILE_STATE, TO_AND_FRO, DeviceConfig, ExtentConfig, Push
from ...engine.parts import Ending, Outcome
from ...engine.tiles import Tiles
from ...errors import CSDError, CSDRankError, CSDRuntimeError
from ...store.format import Record
from ..messages import CHUNK, WIRE_INDEX, number_of, pack_counts, pack_hypers, pack_rows, raise_failure, refuse
from ..tile_image import FrameLayout, places, view
from .link import Link, Travelling
from .tiles_in_flight import TilesInFlight


def parts_of(record: Record) -> tuple[dict[str, Any], bytes]:
    """Return a record in wire format: JSON, and `user_state`."""
    return {"groups": record.groups, "given": record.given, "seconds": record.seconds}, record.user_state


class RemoteNative:
    """Implements NativeEngine of engine/parts.py; see bindings.Native for the methods.

    Every tile with a gradient is pushed with images, which may leave out tensors in host memory that travel in their
    own dtype. Owners push the other tiles themselves.
    """

    takes_in_place = True

    def __init__(self, link: Link) -> None:
        self._link = link
        self.window: int = 1  # number of tiles for which the owner has buffers
        self.tiles_of_engine: Tiles = Tiles()  # set once the engine exists
        self.step: Callable[[], int] = int  # returns the number of completed steps; set once the engine exists
        self.begins: int = 0  # number of the last BEGIN
        self.unanswered: Ending | None = None  # of a step whose FINISH was not answered: see settle()
        self.owner_step: int = 0  # the last step that counts at the owner
        self.record_bytes: int = 0  # size of the record for the step's commit
        self._is_open = False
        self._stepping = False
        self._layout = FrameLayout(np.zeros(0, PARAM))  # of the step
        self._in_flight: TilesInFlight | None = None
        self._pushed: dict[int, tuple[list[memoryview], int, list[memoryview]]] = {}  # by tile: out, words, back
        self._travelling: list[int] = []  # tiles of the step, and second passes, that are sent and come back
        self._undone: list[int] = []

    # ---- open and close --------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def is_stepping(self) -> bool:
        """Whether a step is under way: the owner then answers no other requests."""
        return self._stepping

    def open(self, devices: Sequence[DeviceConfig]) -> None:
        self._is_open = True

    def close(self) -> None:
        self._is_open = False

    def extend(self, config: ExtentConfig) -> list[Any]:
        """Return no windows: there are none. RemoteDevices.plan() has already asked the owner."""
        return []

    def tiles(
        self, first: int, n: int, chunks: int, sections: int
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        return np.zeros(n, TILE_STATE), np.zeros((n, chunks, sections), np.uint32)

    # ---- a step ----------------------------------------------------------------------

    def begin(
        self,
        params: np.ndarray[Any, Any],
        hypers: np.ndarray[Any, Any],
        tiles: np.ndarray[Any, Any],
        *,
        order: int = TO_AND_FRO,
    ) -> None:
        self.send_edits(params)
        has_grad = params["grad"] != 0
        rows = np.flatnonzero(has_grad | (params["edited"] != 0).any(1))
        self.begins += 1
        travelling = np.isin(tiles & ~np.uint32(PASS_2), self.tiles_of_engine.of_mask(has_grad))
        self._layout, self._pushed, self._undone = FrameLayout(params), {}, []
        self._travelling = tiles[travelling].tolist()
        in_flight = TilesInFlight(
            self.begins,
            self._travelling,
            as_pushed=order == AS_PUSHED,
            window=self.window,
            changed=self._link.changed,
            may_leave=self._link.may_leave,
        )
        self._link.travel(Travelling(in_flight, self._outgoing, self._returning))
        try:
            answer = self._link.request(
                "begin",
                pack_rows(params, rows),
                pack_hypers(hypers),
                tiles.astype(WIRE_INDEX),
                begin=self.begins,
                step=self.step(),
                order=order,
                record_bytes=self.record_bytes,
            )
        except BaseException:
            self._link.travel(None)
            raise
        self._link.note_committed(answer.fields)  # the owner has waited for the last step's commit
        self._in_flight, self._stepping = in_flight, True

    def send_edits(self, params: np.ndarray[Any, Any]) -> None:
        """Send the states that the program has written: `edited` of the step's table has their addresses."""
        first_rows = params[: self.tiles_of_engine.n_params]
        for row in np.flatnonzero((first_rows["edited"] != 0).any(1)).tolist():
            extent = self.tiles_of_engine.extent_with(row)
            numel = extent.numels[row - extent.first_param]
            for section, address in enumerate(params["edited"][row].tolist()):
                if address:
                    self.write(row, section, view(address, 4 * numel))

    def write(self, row: int, section: int, state: memoryview) -> None:
        """Write one state of a parameter, little-endian fp32, for the step that begins or within writing()."""
        for first in range(0, len(state) // 4, CHUNK):
            part = state[4 * first : 4 * (first + CHUNK)]
            self._link.request("write", part, row=row, section=section, first=first)

    def push(self, tile: int, how: Push | None = None) -> None:
        in_flight = self._step_in_flight()
        if not in_flight.travels(tile):
            return  # without gradients: the owner pushes the tile itself
        assert how
        assert how.images[1]
        assert how.grads is None
        assert not how.hold
        assert not how.states
        here = self.tiles_of_engine.pieces_of(tile)
        from_, to = places(here, how.images, how.in_place)
        out = self._layout.outgoing(here, from_, to)
        address, words = how.entries
        if words:
            out.append(view(address, 4 * words))
        self._pushed[tile] = out, words, self._layout.returning(here, to)
        in_flight.push(tile)

    def _outgoing(self, tile: int) -> tuple[list[memoryview], int]:
        out, words, _ = self._pushed[tile]
        return out, words

    def _returning(self, tile: int) -> list[memoryview]:
        return self._pushed[tile][2]

    def _step_in_flight(self) -> TilesInFlight:
        if self._in_flight is None or not self._stepping:
            raise CSDRuntimeError("no step is under way")
        return self._in_flight

    def drop_grads(self, params: Sequence[int]) -> None:
        self._link.request("drop", np.array(params, WIRE_INDEX), begin=self.begins)
        self._layout.drop(params)

    def pull(self) -> int:
        return self._step_in_flight().pull()

    @property
    def would_pull(self) -> bool:
        """Whether pull() would not wait."""
        return self._step_in_flight().would_pull

    def await_all(self) -> None:
        """Return when all tiles of the step have come back. Raises what a step raises."""
        in_flight = self._step_in_flight()
        in_flight.are_back(in_flight.all_tiles, wait=True)

    def params_ready(self, tiles: np.ndarray[Any, Any], *, wait: bool) -> bool:
        return self._step_in_flight().are_back(tiles, wait=wait)

    def finish(self, keep: bool, ending: Ending | None = None) -> Outcome | None:
        in_flight = self._step_in_flight()
        failure: BaseException | None = None
        outcome: Outcome | None = None
        try:
            if keep:
                self.await_all()
        except BaseException as e:
            failure, keep = e, False
        in_flight.stop()
        self._undone = in_flight.began_to_return
        fields = {"begin": self.begins, "step": self.step(), "keep": keep, "frames": in_flight.frames}
        try:
            if keep:
                assert ending
                outcome = self._keep(ending, fields)
            elif not self._link.is_lost:  # else the owner undoes the step by itself
                self._link.request("finish", **fields)
        except CSDError as e:
            failure = failure or e
        finally:
            self._stepping = False
            self._link.travel(None)
            self._pushed = {}
        if failure:
            raise failure
        return outcome

    def _keep(self, ending: Ending, fields: dict[str, Any]) -> Outcome:
        """Have the owner complete and commit the step. Raises CSDError if the step is undone."""
        head, user_state = parts_of(ending.record)
        arrays, fields = (pack_counts(ending.counts), user_state), fields | {"round": ending.round, "record": head}
        self.unanswered, commit_failure = ending, None
        try:
            answer = self._link.request("finish", *arrays, **fields).fields
        except CSDError as e:
            if isinstance(e, CSDRankError) and self._link.is_lost:
                return self._resolve(ending, e)
            self.unanswered = None  # an error of the owner
            raise
        self.unanswered = None
        self._link.note_committed(answer)
        if answer.failed:
            try:
                raise_failure(answer.failed)
            except CSDError as e:
                if not answer.kept:
                    raise
                commit_failure = e
        self.owner_step = ending.step
        return Outcome(ending.record, commit_failure)

    def _resolve(self, ending: Ending, lost: CSDRankError) -> Outcome:
        """Ask the owner, once, whether a step counts whose FINISH was not answered. Raises if it does not count."""
        try:
            self._link.attach()
        except CSDError:
            raise CSDRankError(f"{lost}; it is not known yet whether step {ending.step} counts") from lost
        if self.owner_step != ending.step:
            raise lost
        return Outcome(ending.record)  # all parameters of the step have arrived

    def settle(self, there: int) -> Ending | None:
        """Take note of the owner's step as a lost link is taken up again: it decides whether an unanswered step counts.

        Returns the ending of that step if it counts; all its parameters have arrived.
        """
        ending, self.unanswered = self.unanswered, None
        if ending is None or ending.step != there:
            return None
        self.owner_step = there
        return ending

    def take_back(self) -> None:
        """A no-op: RemoteCommitter.before_undo() has asked the owner."""

    def take_back_last(self) -> None:
        """Have the owner undo the last step that counts there."""
        self._link.request("take_back", begin=self.begins, step=self.owner_step)
        self.owner_step -= 1

    def go_back(self, tiles: np.ndarray[Any, Any]) -> None:
        """A no-op: owners go back by themselves. See RemoteCommitter.loading()."""
        assert not len(tiles)

    def free_tiles(self, tiles: np.ndarray[Any, Any]) -> None:
        """A no-op: see RemoteCommitter.free()."""

    def undone(self) -> list[tuple[int, int]]:
        """Return the tiles with new parameters, which come from the last pass."""
        last = {tile & ~PASS_2: tile for tile in sorted(self._travelling)}
        back = [tile & ~PASS_2 for tile in self._undone if last[tile & ~PASS_2] == tile]
        return [(tile, self.tiles_of_engine.elems_of(tile)) for tile in back]

    # ---- a guess ---------------------------------------------------------------------

    def hold_bytes(self, tile: int) -> int:
        return 0  # images hold the parameters back

    def unchanged(self, params: np.ndarray[Any, Any]) -> bool:
        self._step_in_flight().are_back(np.zeros(0, np.uint32), wait=False)  # raises if the step has failed
        return True  # the caller compares images

    def release(self, params: np.ndarray[Any, Any], order: np.ndarray[Any, Any]) -> None:
        self._step_in_flight()

    # ---- between steps ---------------------------------------------------------------

    def wait_writes(self) -> None:
        """A no-op: an owner answers a request only after the reads for it."""

    def remap(self, *, open: bool) -> None:
        """A no-op: there are no windows."""

    def edited(self, tiles: np.ndarray[Any, Any]) -> None:
        assert not len(tiles)

    def read(self, tile: int, sections: int, elems: int, states: int) -> None:
        nbytes = 4 * self.tiles_of_engine.elems_of(tile)
        for section in range(sections):
            self._read(tile, 0, elems, {section: states + section * nbytes})

    def decode(self, tile: int, first: int, n: int, states: Sequence[torch.Tensor | None], param: int = 0) -> None:
        self._read(tile, first, n, {s: state.data_ptr() for s, state in enumerate(states) if state is not None})

    def _read(self, tile: int, first: int, n: int, to: dict[int, int]) -> None:
        """Copy elements [first, first + n) of some states of a tile to addresses, by section: fp32."""
        sections = [*to]
        for begin in range(first, first + n, CHUNK // 4):
            count = min(CHUNK // 4, first + n - begin)
            arrays = self._link.request("read", tile=tile, first=begin, count=count, sections=sections).arrays
            for address, found in zip(to.values(), number_of(arrays, len(to)), strict=True):
                if len(found) != 4 * count:
                    refuse("the states of a tile")
                view(address + 4 * (begin - first), 4 * count)[:] = found

    def stats(self, device: int) -> dict[str, float]:
        raise AssertionError("RemoteDevices.current_stats() asks for these")

    def events(self) -> np.ndarray[Any, Any]:
        return np.zeros(0, EVENT)
