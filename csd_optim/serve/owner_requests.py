"""The requests of a session, executed at the owner. messages.py checks their content; nothing here trusts them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..bindings import AS_PUSHED, PASS_2, SAME_ORDER, TO_AND_FRO
from ..checkpoint import snapshot
from ..checkpoint.files import no_progress
from ..errors import CSDError, CSDRankError
from ..store.format import Record
from ..store.layout import TILE_ELEMS, Extent
from ..store.recovery import RanksStore
from ..store.sections import FP32, GROUP, SECTIONS
from .control import MESSAGE_BYTES
from .messages import (
    CHUNK,
    MODES,
    PROTOCOL,
    ROW,
    WIRE_HYPER,
    WIRE_INDEX,
    Fields,
    array,
    dtype_named,
    error_of,
    number_of,
    refuse,
    unpack_counts,
    unpack_hypers,
    unpack_rows,
)
from .owner_step import Buffers, OwnerStep
from .ownership import Ownership
from .save_place import SavePlace
from .session import Role

MAX_RECORD = MESSAGE_BYTES  # bytes of a record
MAX_NUMELS = 1 << 47  # fp32 values that join at once
MAX_TILE_ELEMS = 1 << 26  # the most that trainers may choose: the owner has memory for WINDOW tiles
MAX_TILES, MAX_PARAMS = 1 << 22, 1 << 20  # of a model
MAX_TRAINERS = 1 << 12
ID_BYTES = 16  # of a store's identity
Reply = tuple[dict[str, Any], list[Any]]
DONE: Reply = ({}, [])
CHANGES_NOTHING = ("read", "stats", "close")  # requests


class Closed(Exception):
    """The trainer ends the session."""


class Hello(NamedTuple):
    """A request for a session."""

    trainer: int
    trainers: int
    here: int  # the number of trainers with states at this owner
    token: str  # the same for all trainers of a training
    mode: str
    model: str  # see digest_of_entries()
    tile_elems: int | None
    who: str
    store: str  # the identity of the store to attach to; in other modes, for a new store
    step: int  # the trainer's last step

    def check_attach(self, ownership: Ownership) -> None:
        """Raise CSDRankError if an attaching trainer finds another store."""
        if self.mode == "attach" and ownership.is_open and self.store != ownership.store_id:
            raise CSDRankError("the optimizer ranks have another store now: start again with resume=True")


def check_hello(fields: Fields) -> Hello:
    """Return a request for a session. Raises CSDRankError if it is malformed."""
    if fields.text("op") != "hello":
        refuse("it is no HELLO")
    if (theirs := fields.integer("protocol")) != PROTOCOL:
        raise CSDRankError(f"trainers speak protocol {theirs} and optimizer ranks {PROTOCOL}: install the same version")
    trainers = fields.integer("trainers", 1, MAX_TRAINERS)
    trainer = fields.integer("trainer", 0, trainers - 1)
    try:
        is_id = len(bytes.fromhex(fields.text("store"))) == ID_BYTES
    except ValueError:
        is_id = False
    if not is_id:
        refuse("the identity of a store")
    tile_elems = fields.integer("tile_elems", 0, MAX_TILE_ELEMS) or None
    attaches = fields.text("mode", MODES) == "attach"
    return Hello(
        trainer,
        trainers,
        fields.integer("here", 1, trainers),
        fields.text("token"),
        fields.text("mode"),
        fields.text("model"),
        tile_elems,
        fields.text("who"),
        fields.text("store"),
        fields.integer("step") if attaches else 0,
    )


def summary_of(store: RanksStore) -> dict[str, Any]:
    """Return the facts about a trainer's store from which trainers choose the step that all resume."""
    return {
        "path": store.path,
        "store": store.store_id.hex(),
        "rank": store.rank,
        "world_size": store.world_size,
        "is_first": store.is_first,
        "is_missing": store.is_missing,
        "steps": [*store.steps.items()],
    }


class OwnerRequests:
    """The requests of one session. Not thread-safe, except for what OwnerStep does by itself."""

    def __init__(self, ownership: Ownership, role: Role, note_step: Callable[[OwnerStep | None], None]) -> None:
        """`role`: the trainer's. `note_step` is called with the step to which later frames belong."""
        self.ownership: Ownership = ownership
        self._role, self._note_step = role, note_step
        self._buffers = Buffers(ownership.window)
        self._step: OwnerStep | None = None
        self._brackets = contextlib.ExitStack()  # of writing() and loading()
        self._bracketed = False  # `_brackets` is open
        self.is_broken: bool = False  # the session must end, and the next session reopens the store
        # By row and section: states written for the next step, and the number of elements that have arrived.
        self._edits: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}
        self._saving: tuple[Future[Path], SavePlace] | None = None
        self.begins: int = 0  # number of the last BEGIN
        self.most_bytes: int = 0  # the most bytes of a frame

    def execute(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        """Execute a request. Raises CSDError, Closed."""
        op = fields.text("op")
        work: Callable[[Fields, Sequence[memoryview]], Reply] | None = getattr(self, f"_on_{op}", None)
        if work is None or not op.isidentifier():
            refuse(f"the operation {op!r}")
        if op not in CHANGES_NOTHING:
            self.ownership.discard_newer()
        with torch.no_grad():
            return work(fields, arrays)

    def end(self) -> None:
        """Undo what the session has left unfinished, after its connections are shut down."""
        ownership = self.ownership
        if self._step:
            self._undo_step()
        try:
            self._brackets.__exit__(CSDRankError, CSDRankError("the session has ended"), None)
        except CSDError:
            ownership.in_doubt = True

    def _undo_step(self) -> None:
        step, self._step = self._step, None
        self._note_step(None)
        if step:
            step.undo()

    @property
    def _engine(self) -> Any:
        return self.ownership.engine

    def _extent(self, row: int) -> tuple[Extent, int]:
        """Return the extent of a parameter, and the parameter's number in it. Raises CSDRankError."""
        tiles = self._engine.tiles
        if not 0 <= row < tiles.n_params:
            refuse(f"parameter {row}")
        extent = tiles.extent_with(row)
        return extent, row - extent.first_param

    def _no_step(self) -> None:
        if self._step:
            refuse("a step is under way")

    # ---- parameters ----------------------------------------------------------------

    def _on_extend(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        self._no_step()
        engine = self._engine
        numels = array(number_of(arrays, 1)[0], np.dtype(">u8"), "the sizes of parameters")
        sections, codec = fields.texts("sections"), fields.text("codec")
        valid = 0 < len(sections) <= 4 and all(s.isidentifier() for s in sections) and sections[0] == SECTIONS[0]
        if not valid or len({*sections}) != len(sections):
            refuse("the names of states")
        if not len(numels) or numels.max() > MAX_NUMELS or int(numels.sum(dtype=object)) > MAX_NUMELS:
            refuse("the sizes of parameters")
        if not fields.is_null("tile_elems"):
            engine.tile_elems = fields.integer("tile_elems", 1, MAX_TILE_ELEMS)
        some = int(numels.sum(dtype=object)) // (engine.tile_elems or TILE_ELEMS)
        if some > MAX_TILES - len(engine.tiles) or len(numels) > MAX_PARAMS - engine.tiles.n_params:
            refuse(f"more than {MAX_TILES} tiles, for which a larger tile_size helps, or {MAX_PARAMS} parameters")
        if fields.integer("first_param") != engine.tiles.n_params:
            refuse("new parameters that do not follow those before")
        param_dtype = dtype_named(fields.text("param_dtype"))
        sizes = [int(n) for n in numels]
        self.ownership.check_room(sizes, sections, codec, param_dtype)
        extent = engine.extend(sizes, sections, codec=codec, param_dtype=param_dtype)
        return {"tile_elems": extent.tile_elems}, [extent.devices.astype(WIRE_INDEX)]

    def _on_free(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        self._no_step()
        self._engine.committer.before_joining_or_leaving()
        self._engine.free(self._rows(fields))
        return DONE

    def _on_discard_newer(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        return DONE  # execute() has done it

    def _on_describe(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        self.ownership.describe(fields.object("manifest"))
        return DONE

    # ---- states between steps ------------------------------------------------------

    def _on_write(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        self._no_step()
        row = fields.integer("row")
        extent, i = self._extent(row)
        section = fields.integer("section", 0, len(extent.sections) - 1)
        (data,) = number_of(arrays, 1)
        values = torch.from_numpy(array(data, np.dtype("<f4"), "a state").astype(np.float32))
        first = fields.integer("first", 0, extent.numels[i])
        if not 0 < len(values) <= min(CHUNK, extent.numels[i] - first):
            refuse(f"{len(values)} values of a state")
        state = self._state_within(row, section) if self._bracketed else self._edit(row, section, first, len(values))
        state[first : first + len(values)] = values
        return DONE

    def _state_within(self, row: int, section: int) -> torch.Tensor:
        """Return the tensor of a state, for writes within writing() or loading()."""
        engine, (extent, i) = self._engine, self._extent(row)
        if extent.codec == FP32:
            window: torch.Tensor = engine.windows.window(extent, i, section, torch.float32)
            return window
        state: torch.Tensor = engine.decoded.state(row, extent.sections[section])
        return state

    def _edit(self, row: int, section: int, first: int, n: int) -> torch.Tensor:
        """Return the tensor of a state for the next step, for a write to elements [first, first + n)."""
        extent, i = self._extent(row)
        state, written = self._edits.get((row, section)) or (torch.empty(extent.numels[i], dtype=torch.float32), 0)
        if first == 0:
            written = 0
        if first != written:
            refuse("a state in pieces that do not follow one another")
        self._edits[row, section] = state, first + n
        return state

    def _enter_edits(self, table: np.ndarray[Any, Any]) -> list[torch.Tensor]:
        """Let a step begin with the states written since the last step. Returns their tensors, to be kept alive."""
        edits, self._edits = self._edits, {}
        for (row, section), (state, written) in edits.items():
            if written != len(state):
                refuse("a state that was not written to its end")
            table["edited"][row, section] = state.data_ptr()
        return [state for state, _ in edits.values()]

    def _rows(self, fields: Fields) -> list[int]:
        return fields.integers("rows", 0, self._engine.tiles.n_params - 1)

    def _on_writing(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        self._no_step()
        self._open_bracket(self._engine.writing(self._rows(fields)))
        return DONE

    def _open_bracket(self, *contexts: AbstractContextManager[Any]) -> None:
        """Enter contexts that the session may never leave: until then its writes are in memory only."""
        if self._bracketed:
            refuse("states are being written already")
        self._bracketed = self.ownership.in_doubt = True
        for context in contexts:
            self._brackets.enter_context(context)

    def _on_written(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        self._engine.states.set_counts(self._counts(number_of(arrays, 1)[0]))
        self._close_brackets()
        return DONE

    def _on_loading(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        self._no_step()
        engine, rows = self._engine, self._rows(fields)
        record = self._record(fields, number_of(arrays, 1)[0])
        self._open_bracket(engine.committer.loading(record), *([engine.writing(rows)] if rows else []))
        return DONE

    def _on_loaded(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        engine = self._engine
        counts, step = self._counts(number_of(arrays, 1)[0]), fields.integer("step", 0, 1 << 53)
        self.ownership.committer.rounds.highest = self._round(fields) - 1
        engine.states.go_to(step, counts=counts)
        self._close_brackets()
        return {"step": engine.states.step}, []

    def _close_brackets(self) -> None:
        if not self._bracketed:
            refuse("no states are being written")
        brackets, self._brackets, self._bracketed = self._brackets, contextlib.ExitStack(), False
        try:
            brackets.close()
        except BaseException:  # perhaps only some states are written
            self.is_broken = True
            raise
        self.ownership.in_doubt = False

    def _counts(self, data: memoryview) -> np.ndarray[Any, Any]:
        return unpack_counts(data, self._engine.tiles.n_params)

    def _on_read(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        self._no_step()
        engine = self._engine
        tile = fields.integer("tile", 0, len(engine.tiles) - 1)
        extent = engine.tiles.extent_of(tile)
        sections = fields.integers("sections", 0, len(extent.sections) - 1)
        first = fields.integer("first", 0, extent.tile_elems - 1)
        n = fields.integer("count", 1, extent.tile_elems - first)
        if not 0 < len(sections) <= len(extent.sections) or len({*sections}) != len(sections):
            refuse("the states to be read")
        begin = first // GROUP * GROUP
        out = [torch.empty(first + n - begin) if s in sections else None for s in range(len(extent.sections))]
        engine.native.decode(tile, begin, first + n - begin, out)
        return {}, [state[first - begin :].numpy() for s in sections if (state := out[s]) is not None]

    # ---- a step --------------------------------------------------------------------

    def _on_begin(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        self._no_step()
        engine = self._engine
        rows, hypers, tiles = number_of(arrays, 3)
        begin = fields.integer("begin", 1)
        if begin <= self.begins:
            refuse(f"step {begin} begins after step {self.begins}")
        if fields.integer("step") != engine.states.step:
            refuse(f"a step after step {fields.integer('step')}, and the last one is {engine.states.step}")
        order = fields.integer("order")
        if order not in (TO_AND_FRO, SAME_ORDER, AS_PUSHED):
            refuse(f"the order {order}")
        constants = unpack_hypers(array(hypers, WIRE_HYPER, "the constants of a step"))
        listed = array(tiles, WIRE_INDEX, "the tiles of a step").astype(np.uint32)
        n_params = engine.tiles.n_params
        n_rows = 2 * n_params if (listed >= PASS_2).any() else n_params
        table = unpack_rows(array(rows, ROW, "the parameters of a step"), n_rows, len(constants))
        edits = self._enter_edits(table)
        needed = engine.tiles.of_mask(((table["grad"] != 0) | (table["edited"] != 0).any(1))[:n_params])
        if not (listed & ~np.uint32(PASS_2) < len(engine.tiles)).all() or len(np.unique(listed)) != len(listed):
            refuse("the tiles of a step")
        if not np.isin(needed, listed).all():
            refuse("a step without some tiles of its parameters")
        self.begins = begin
        elems = max((e.tile_elems for e in engine.tiles.extents), default=0)
        self._buffers.resize(elems)
        self.most_bytes = 32 * elems + (1 << 16)
        record = Record(user_state=bytes(fields.integer("record_bytes", 0, MAX_RECORD)))
        if engine.committer.rounds.unconfirmed:
            refuse("a step before all trainers have the last one")
        self.ownership.kept = None
        with engine.lock:
            engine.committer.confirm()
            every = engine.begin(table, constants, listed, record, order=order, is_speculative=True, kept_alive=edits)
            step = self._step = OwnerStep(engine, begin, table, listed, self._buffers)
        try:
            step.push_unsent(every.tolist())
        except BaseException:
            self._undo_step()
            raise
        self._note_step(step)
        return DONE

    def _on_reserve(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        self._engine.committer.reserve(Record(user_state=bytes(fields.integer("record_bytes", 0, MAX_RECORD))))
        return DONE

    def _step_of(self, fields: Fields) -> OwnerStep:
        if self._step is None or fields.integer("begin") != self._step.begin:
            raise CSDRankError("that step is not under way")
        return self._step

    def _on_drop(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        step = self._step_of(fields)
        rows = array(number_of(arrays, 1)[0], WIRE_INDEX, "parameters without gradients").astype(np.uint32)
        if not (rows < self._engine.tiles.n_params).all():
            refuse("parameters without gradients")
        step.drop(rows)
        return DONE

    def _on_finish(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        engine, step = self._engine, self._step_of(fields)
        frames = fields.integer("frames")
        if not fields.flag("keep"):
            self._undo_step()
            return {"kept": False, "step": engine.states.step}, []
        try:
            counts, user_state = number_of(arrays, 2)
            record = self._record(fields, user_state)
            steps = self._counts(counts)  # before the step is kept
            round = self._round(fields)
        except CSDError:
            self._undo_step()
            raise
        self._step = None
        engine.is_speculative = False
        try:
            step.keep(frames)
        except CSDError as e:
            return {"kept": False, "step": engine.states.step, "failed": error_of(e)}, []
        finally:
            self._note_step(None)
        engine.states.set_counts(steps)
        self.ownership.kept = step.rows, True
        answer: dict[str, Any] = {"kept": True, "step": engine.states.step}
        self.ownership.committer.rounds.highest = round - 1
        try:
            engine.committer.commit(record)
        except CSDError as e:
            answer["failed"] = error_of(e)
        return answer, []

    def _on_take_back(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        """Undo the last kept step, because the step has failed at another trainer."""
        self._no_step()
        engine, kept = self._engine, self.ownership.kept
        if kept is None or fields.integer("step") != engine.states.step:
            refuse("to take back a step that is not the last one")
        self.ownership.kept = None
        with engine.lock:
            engine.undo_last(kept[0], had_tiles=kept[1])
        return DONE

    # ---- commits -------------------------------------------------------------------

    def _record(self, fields: Fields, user_state: memoryview) -> Record:
        return self.ownership.record(fields.object("record"), bytes(user_state))

    def _on_commit(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        self._no_step()
        counts, user_state = number_of(arrays, 2)
        record = self._record(fields, user_state)
        engine, own = self._engine, self._engine.states.step
        step, round = fields.integer("step"), self._round(fields)
        if step not in (own, own + 1) or (step > own and self.ownership.trainers == 1):
            refuse("the commit of another step")
        engine.states.go_to(step, counts=self._counts(counts))
        if step > own:  # a step without tiles here, of other trainers or other owners
            self.ownership.kept = np.zeros(0, np.uint32), False
        self.ownership.committer.rounds.highest = round - 1
        engine.committer.commit(record)
        return DONE

    def _round(self, fields: Fields) -> int:
        """Return the number of the next round, which the trainers have chosen together."""
        return fields.integer("round", self.ownership.committer.rounds.number + 1)

    def _on_confirm(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        """Make the last step's commit durable. The commit is valid once all trainers have confirmed the same round."""
        self._no_step()
        committer = self.ownership.committer
        committer.confirm()
        return {"round": committer.rounds.number}, []

    def _on_confirmed(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        self._engine.committer.note_confirmed()
        return DONE

    def _on_wait(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        self._no_step()
        self._engine.committer.wait()
        return DONE

    def _on_stats(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        engine = self._engine
        engine.native.wait_writes()
        return {"devices": [_plain(counts) for counts in engine.committer.stats()]}, []

    def _on_save(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        self._no_step()
        if not self._role.may(Role.ADMIN):
            raise CSDRankError(f"save() needs the key of an admin: your key is accepted as {self._role.value}")
        if self._saving:
            refuse("a snapshot is being made")
        place = SavePlace(self.ownership.allow_save, Path(fields.text("path")))
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

    def _on_saved(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        if self._saving is None:
            refuse("no snapshot is being made")
        (saving, place), self._saving = self._saving, None
        try:
            saving.result()
        except CSDError as e:
            raise place.as_named(e) from None
        return DONE

    def _on_close(self, fields: Fields, arrays: Sequence[memoryview]) -> Reply:
        self._no_step()
        self._engine.committer.wait()
        raise Closed


def _plain(counts: dict[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in counts.items() if v is None or isinstance(v, (str, int, float, bool))}
