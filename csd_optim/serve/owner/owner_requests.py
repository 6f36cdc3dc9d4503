"""The requests of a session, executed at the owner. Schemas have checked each by itself; nothing here trusts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...bindings import PASS_2
from ...checkpoint import snapshot
from ...checkpoint.files import no_progress
from ...errors import CSDError, CSDRankError
from ...store.format import Record
from ...store.layout import TILE_ELEMS
from ...store.recovery import RanksStore
from ...store.sections import GROUP, SECTIONS
from .. import requests
from ..messages import (
    ROW,
    WIRE_HYPER,
    WIRE_INDEX,
    array,
    dtype_named,
    failure_of,
    number_of,
    refuse,
    unpack_counts,
    unpack_hypers,
    unpack_rows,
)
from ..requests import Answer, Done, Hello, Request, StoreFound, described, op_of, unpacked
from ..wire.keys import Role
from ..wire.schema import msgspec
from .owner_step import Buffers, OwnerStep
from .ownership import Ownership
from .save_place import SavePlace
from .state_writes import StateWrites

MAX_NUMELS = 1 << 47  # fp32 values that join at once
Arrays = Sequence[memoryview]
Reply = tuple[Answer, list[Any]]
DONE: Reply = (Done(), [])
FIELDS = requests.DeviceCounts.__struct_fields__
CHANGES_NOTHING = ("read", "stats", "close")  # requests


class Closed(Exception):
    """The trainer ends the session."""


def check_hello(hello: Hello) -> None:
    """Raise CSDRankError if a request for a session contradicts itself."""
    if hello.trainer >= hello.trainers or hello.here > hello.trainers:
        refuse("the number of a trainer")


def check_attach(hello: Hello, ownership: Ownership) -> None:
    """Raise CSDRankError if an attaching trainer finds another store."""
    if hello.mode == "attach" and ownership.is_open and hello.store != ownership.store_id:
        raise CSDRankError("the optimizer ranks have another store now: start again with resume=True")


def summary_of(store: RanksStore) -> StoreFound:
    """Return the facts about a trainer's store from which trainers choose the step that all resume."""
    return StoreFound(
        path=store.path,
        store=store.store_id.hex(),
        rank=store.rank,
        world_size=store.world_size,
        is_first=store.is_first,
        is_missing=store.is_missing,
        steps=[*store.steps.items()],
    )


class OwnerRequests:
    """The requests of one session. Not thread-safe, except for what OwnerStep does by itself."""

    def __init__(self, ownership: Ownership, role: Role, note_step: Callable[[OwnerStep | None], None]) -> None:
        """`role`: the trainer's. `note_step` is called with the step to which later tiles belong."""
        self.ownership: Ownership = ownership
        self._role, self._note_step = role, note_step
        self._buffers = Buffers(ownership.window)
        self._step: OwnerStep | None = None
        self._writes = StateWrites(ownership)
        self._saving: tuple[Future[Path], SavePlace] | None = None
        self.begins: int = 0  # number of the last BEGIN
        self.most_bytes: int = 0  # the most bytes of a tile's gradients

    @property
    def is_broken(self) -> bool:
        """Whether the session must end, and the next session reopens the store."""
        return self._writes.is_broken

    def execute(self, request: Request, arrays: Arrays) -> Reply:
        """Execute a request. Raises CSDError, Closed."""
        op = op_of(request)
        if request.n_arrays is not None:
            number_of(arrays, request.n_arrays)
        if op not in CHANGES_NOTHING:
            self.ownership.discard_newer()
        work: Callable[[Request, Arrays], Reply] = getattr(self, f"_on_{op}")
        with torch.no_grad():
            return work(request, arrays)

    def end(self) -> None:
        """Undo what the session has left unfinished, after its connections are shut down."""
        if self._step:
            self._undo_step()
        self._writes.end()

    def _undo_step(self) -> None:
        step, self._step = self._step, None
        self._note_step(None)
        if step:
            step.undo()

    @property
    def _engine(self) -> Any:
        return self.ownership.engine

    def _no_step(self) -> None:
        if self._step:
            refuse("a step is under way")

    # ---- parameters ----------------------------------------------------------------

    def _on_extend(self, request: requests.Extend, arrays: Arrays) -> Reply:
        self._no_step()
        engine, sections = self._engine, request.sections
        numels = array(arrays[0], np.dtype(">u8"), "the sizes of parameters")
        if sections[0] != SECTIONS[0] or len({*sections}) != len(sections):
            refuse("the names of states")
        if not len(numels) or numels.max() > MAX_NUMELS or int(numels.sum(dtype=object)) > MAX_NUMELS:
            refuse("the sizes of parameters")
        if request.tile_elems is not None:
            engine.tile_elems = request.tile_elems
        tiles = int(numels.sum(dtype=object)) // (engine.tile_elems or TILE_ELEMS)
        most, most_params = requests.MAX_TILES, requests.MAX_PARAMS
        if tiles > most - len(engine.tiles) or len(numels) > most_params - engine.tiles.n_params:
            refuse(f"more than {most} tiles, for which a larger tile_size helps, or {most_params} parameters")
        if request.first_param != engine.tiles.n_params:
            refuse("new parameters that do not follow those before")
        param_dtype = dtype_named(request.param_dtype)
        sizes = [int(n) for n in numels]
        self.ownership.check_room(sizes, sections, request.codec, param_dtype)
        extent = engine.extend(sizes, sections, codec=request.codec, param_dtype=param_dtype)
        return requests.Extended(tile_elems=extent.tile_elems), [extent.devices.astype(WIRE_INDEX)]

    def _on_free(self, request: requests.Free, arrays: Arrays) -> Reply:
        self._no_step()
        self._engine.committer.before_joining_or_leaving()
        self._engine.free(self._rows(request.rows))
        return DONE

    def _on_discard_newer(self, request: requests.DiscardNewer, arrays: Arrays) -> Reply:
        return DONE  # execute() has done it

    def _on_describe(self, request: requests.Describe, arrays: Arrays) -> Reply:
        self.ownership.describe(described(request.manifest))
        return DONE

    # ---- states between steps ------------------------------------------------------

    def _on_write(self, request: requests.Write, arrays: Arrays) -> Reply:
        self._no_step()
        self._writes.write(request, arrays[0])
        return DONE

    def _rows(self, rows: list[int]) -> list[int]:
        if rows and max(rows) >= self._engine.tiles.n_params:
            refuse(f"parameter {max(rows)}")
        return rows

    def _on_writing(self, request: requests.Writing, arrays: Arrays) -> Reply:
        self._no_step()
        self._writes.open_bracket(self._engine.writing(self._rows(request.rows)))
        return DONE

    def _on_written(self, request: requests.Written, arrays: Arrays) -> Reply:
        self._engine.states.set_counts(self._counts(arrays[0]))
        self._writes.close_bracket()
        return DONE

    def _on_loading(self, request: requests.Loading, arrays: Arrays) -> Reply:
        self._no_step()
        engine, rows = self._engine, self._rows(request.rows)
        record = self._record(request.record, arrays[0])
        self._writes.open_bracket(engine.committer.loading(record), *([engine.writing(rows)] if rows else []))
        return DONE

    def _on_loaded(self, request: requests.Loaded, arrays: Arrays) -> Reply:
        counts = self._counts(arrays[0])
        self.ownership.committer.rounds.highest = self._round(request.round) - 1
        self._engine.states.go_to(request.step, counts=counts)
        self._writes.close_bracket()
        return DONE

    def _counts(self, data: memoryview) -> np.ndarray[Any, Any]:
        return unpack_counts(data, self._engine.tiles.n_params)

    def _on_read(self, request: requests.Read, arrays: Arrays) -> Reply:
        self._no_step()
        engine, sections, first = self._engine, request.sections, request.first
        if request.tile >= len(engine.tiles):
            refuse(f"tile {request.tile}")
        extent = engine.tiles.extent_of(request.tile)
        end = first + request.count
        if end > extent.tile_elems or max(sections) >= len(extent.sections) or len({*sections}) != len(sections):
            refuse("the states to be read")
        begin = first // GROUP * GROUP
        out = [torch.empty(end - begin) if s in sections else None for s in range(len(extent.sections))]
        engine.native.decode(request.tile, begin, end - begin, out)
        return requests.Values(), [state[first - begin :].numpy() for s in sections if (state := out[s]) is not None]

    # ---- a step --------------------------------------------------------------------

    def _on_begin(self, request: requests.Begin, arrays: Arrays) -> Reply:
        self._no_step()
        engine = self._engine
        (rows, hypers, tiles), begin = arrays, request.begin
        if begin <= self.begins:
            refuse(f"step {begin} begins after step {self.begins}")
        if request.step != engine.states.step:
            refuse(f"a step after step {request.step}, and the last one is {engine.states.step}")
        constants = unpack_hypers(array(hypers, WIRE_HYPER, "the constants of a step"))
        listed = array(tiles, WIRE_INDEX, "the tiles of a step").astype(np.uint32)
        n_params = engine.tiles.n_params
        n_rows = 2 * n_params if (listed >= PASS_2).any() else n_params
        table = unpack_rows(array(rows, ROW, "the parameters of a step"), n_rows, len(constants))
        edits = self._writes.enter_edits(table)
        needed = engine.tiles.of_mask(((table["grad"] != 0) | (table["edited"] != 0).any(1))[:n_params])
        if not (listed & ~np.uint32(PASS_2) < len(engine.tiles)).all() or len(np.unique(listed)) != len(listed):
            refuse("the tiles of a step")
        if not np.isin(needed, listed).all():
            refuse("a step without some tiles of its parameters")
        self.begins = begin
        elems = max((e.tile_elems for e in engine.tiles.extents), default=0)
        self._buffers.resize(elems)
        self.most_bytes = 32 * elems + (1 << 16)
        record = Record(user_state=bytes(request.record_bytes))
        if engine.committer.rounds.unconfirmed:
            refuse("a step before all trainers have the last one")
        self.ownership.kept = None
        with engine.lock:
            engine.committer.confirm()
            every = engine.begin(
                table, constants, listed, record, order=request.order, is_speculative=True, kept_alive=edits
            )
            step = self._step = OwnerStep(engine, begin, table, listed, self._buffers)
        try:
            step.push_unsent(every.tolist())
        except BaseException:
            self._undo_step()
            raise
        self._note_step(step)
        return DONE

    def _on_reserve(self, request: requests.Reserve, arrays: Arrays) -> Reply:
        self._engine.committer.reserve(Record(user_state=bytes(request.record_bytes)))
        return DONE

    def _step_of(self, begin: int) -> OwnerStep:
        if self._step is None or begin != self._step.begin:
            raise CSDRankError("that step is not under way")
        return self._step

    def _on_drop(self, request: requests.Drop, arrays: Arrays) -> Reply:
        step = self._step_of(request.begin)
        rows = array(arrays[0], WIRE_INDEX, "parameters without gradients").astype(np.uint32)
        if not (rows < self._engine.tiles.n_params).all():
            refuse("parameters without gradients")
        step.drop(rows)
        return DONE

    def _on_finish(self, request: requests.Finish, arrays: Arrays) -> Reply:
        engine, step = self._engine, self._step_of(request.begin)
        if not request.keep:
            number_of(arrays, 0)
            self._undo_step()
            return requests.Finished(kept=False, step=engine.states.step), []
        try:
            counts, user_state = number_of(arrays, 2)
            record = self._record(request.record, user_state)
            steps = self._counts(counts)  # before the step is kept
            round = self._round(request.round)
        except CSDError:
            self._undo_step()
            raise
        self._step = None
        engine.is_speculative = False
        try:
            step.keep(request.frames)
        except CSDError as e:
            return requests.Finished(kept=False, step=engine.states.step, failed=failure_of(e)), []
        finally:
            self._note_step(None)
        engine.states.set_counts(steps)
        self.ownership.kept = step.rows, True
        failed = None
        self.ownership.committer.rounds.highest = round - 1
        try:
            engine.committer.commit(record)
        except CSDError as e:
            failed = failure_of(e)
        return requests.Finished(kept=True, step=engine.states.step, failed=failed), []

    def _on_take_back(self, request: requests.TakeBack, arrays: Arrays) -> Reply:
        """Undo the last kept step, because the step has failed at another trainer."""
        self._no_step()
        engine, kept = self._engine, self.ownership.kept
        if kept is None or request.step != engine.states.step:
            refuse("to take back a step that is not the last one")
        self.ownership.kept = None
        with engine.lock:
            engine.undo_last(kept[0], had_tiles=kept[1])
        return DONE

    # ---- commits -------------------------------------------------------------------

    def _record(self, record: msgspec.Raw, user_state: memoryview) -> Record:
        return self.ownership.record(unpacked(record), bytes(user_state))

    def _on_commit(self, request: requests.CommitRecord, arrays: Arrays) -> Reply:
        self._no_step()
        counts, user_state = arrays
        record = self._record(request.record, user_state)
        engine, own = self._engine, self._engine.states.step
        step, round = request.step, self._round(request.round)
        if step not in (own, own + 1) or (step > own and self.ownership.trainers == 1):
            refuse("the commit of another step")
        engine.states.go_to(step, counts=self._counts(counts))
        if step > own:  # a step without tiles here, of other trainers or other owners
            self.ownership.kept = np.zeros(0, np.uint32), False
        self.ownership.committer.rounds.highest = round - 1
        engine.committer.commit(record)
        return DONE

    def _round(self, number: int) -> int:
        """Return the number of the next round, which the trainers have chosen together."""
        if number <= (last := self.ownership.committer.rounds.number):
            refuse(f"round {number} after round {last}")
        return number

    def _on_confirm(self, request: requests.Confirm, arrays: Arrays) -> Reply:
        """Make the last step's commit durable. The commit is valid once all trainers have confirmed the same round."""
        self._no_step()
        committer = self.ownership.committer
        committer.confirm()
        return requests.Round(round=committer.rounds.number), []

    def _on_confirmed(self, request: requests.Confirmed, arrays: Arrays) -> Reply:
        self._engine.committer.note_confirmed()
        return DONE

    def _on_wait(self, request: requests.Wait, arrays: Arrays) -> Reply:
        self._no_step()
        self._engine.committer.wait()
        return DONE

    def _on_stats(self, request: requests.Stats, arrays: Arrays) -> Reply:
        engine = self._engine
        engine.native.wait_writes()
        counts = [requests.DeviceCounts(**{f: c.get(f) for f in FIELDS}) for c in engine.committer.stats()]
        return requests.DeviceStats(devices=counts), []

    def _on_save(self, request: requests.Save, arrays: Arrays) -> Reply:
        self._no_step()
        if not self._role.may(Role.ADMIN):
            raise CSDRankError(f"save() needs the key of an admin: your key is accepted as {self._role.value}")
        if self._saving:
            refuse("a snapshot is being made")
        place = SavePlace(self.ownership.allow_save, Path(request.path))
        try:
            with self._engine.lock:
                saving = snapshot.save(self._engine, place.through, no_progress, wait=True).future
        except BaseException as e:
            place.close()
            if isinstance(e, CSDError):
                raise place.as_named(e) from None
            raise
        saving.add_done_callback(lambda _: place.close())
        self._saving = saving, place
        return DONE

    def _on_saved(self, request: requests.Saved, arrays: Arrays) -> Reply:
        if self._saving is None:
            refuse("no snapshot is being made")
        (saving, place), self._saving = self._saving, None
        try:
            saving.result()
        except CSDError as e:
            raise place.as_named(e) from None
        return DONE

    def _on_close(self, request: requests.Close, arrays: Arrays) -> Reply:
        self._no_step()
        self._engine.committer.wait()
        raise Closed
