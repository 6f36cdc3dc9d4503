"""What an owner owns: an engine on its devices, opened for a trainer's session, and kept open between sessions."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...devices.spec import DeviceSpec
from ...distributed.ranks import RanksElsewhere
from ...engine.commit.durable import DurableCommitter
from ...engine.engine import Engine
from ...engine.open_engine import open_engine
from ...errors import CSDError, CSDOSError, CSDRankError, CSDStoreError, CSDStoreExistsError
from ...params.manifest import digest_of_entries
from ...store.check import check_param, check_record, check_rules, require
from ...store.format import DIVIDED, FILE_NAME, Record
from ...store.layout import plan_extent
from ...store.recovery import RanksStore
from ...store.sections import FP32
from ..messages import extent_fields, name_of_dtype, refuse
from ..requests import ExtentFields, Welcome, packed

WINDOW, LEAST_WINDOW = 16, 4  # tiles with gradients or parameters in an owner's memory: of all trainers, of each


class Ownership:
    """An owner's engine for one trainer. Used by one thread at a time."""

    def __init__(
        self,
        specs: Sequence[DeviceSpec],
        allow_save: Sequence[Path] = (),
        max_model: int | None = None,
        trainer: int = 0,
        trainers: int = 1,
        here: int = 1,
    ) -> None:
        """`specs`: the owner's devices. `allow_save`: directories below which trainers may request snapshots.

        `max_model`: bytes of states that all trainers together may have here; see check_room(). `here`: the number of
        trainers with states here.
        """
        self._max_model = max_model
        self._devices = specs
        self.trainer: int = trainer
        self.trainers: int = trainers
        self.here: int = here
        self._specs = [part_of(spec, trainer, trainers) for spec in specs] if trainers > 1 else specs
        self._ranks = RanksElsewhere(trainer, trainers) if trainers > 1 else None
        self.opening: threading.Lock = threading.Lock()  # held while a session of this trainer is granted
        self.allow_save: list[Path] = [path.absolute() for path in allow_save]
        self._engine: Engine | None = None
        self._checked = False  # all states were read and verified since this process opened the store
        self._has_newer = False  # the stores may have commits after the one that was resumed
        # Memory may differ from the store by unfinished work: the next session reopens the store.
        self.in_doubt: bool = False
        self.rule: str | None = None  # of the described model
        # Of the last kept step, which may be taken back: its parameters, and whether any tiles are here.
        self.kept: tuple[np.ndarray[Any, Any], bool] | None = None
        self._model = ""  # digest_of_entries() of the described model

    def of(self, trainer: int, trainers: int, here: int) -> Ownership:
        """Return the same owner's engine for another trainer, not opened yet. `here`: see above."""
        return Ownership(self._devices, self.allow_save, self._max_model, trainer, trainers, here)

    @property
    def window(self) -> int:
        """The number of tiles for which a session has buffers."""
        return max(LEAST_WINDOW, WINDOW // self.here)

    @property
    def is_open(self) -> bool:
        return self._engine is not None

    @property
    def has_states(self) -> bool:
        """Whether the engine is open and has states, which closing it could lose."""
        return self._engine is not None and bool(self._engine.tiles.n_params or self._engine.states.committed_step)

    @property
    def engine(self) -> Engine:
        """The engine of the session. Raises CSDRankError if there is none yet."""
        if self._engine is None:
            raise CSDRankError("no store is open: say HELLO first")
        return self._engine

    @property
    def committer(self) -> DurableCommitter:
        committer = self.engine.committer
        assert isinstance(committer, DurableCommitter)
        return committer

    @property
    def store_id(self) -> str:
        return self.committer.store_id.hex()

    def check(self, mode: str, model: str) -> None:
        """Check a request for a session before the present session is ended.

        `model`: see digest_of_entries(). Raises CSDStoreExistsError, CSDStoreError.
        """
        engine = self._engine
        check_others(self._devices, self.trainers)
        if engine and mode == "resume" and "" not in (model, self._model) and model != self._model:
            raise CSDStoreError("the optimizer ranks have the states of another model")
        if engine and mode == "new" and self.has_states:
            raise CSDStoreExistsError(
                17,
                f"the optimizer ranks have states, of step {engine.states.committed_step}: go on with resume=True, or "
                "erase them with overwrite=True",
            )

    def open(
        self,
        mode: str,
        tile_elems: int | None,
        store_id: bytes,
        choose: Callable[[RanksStore], int | None] | None = None,
    ) -> None:
        """Open the engine for a session. Raises what open_engine() raises, and CSDStoreError if a state is damaged.

        `store_id`: for a new store. `choose`: asks the trainers for the step that all resume, see recover().
        """
        if mode == "attach" and self._engine and not self.in_doubt:
            return
        if mode == "attach" and self.trainers > 1:  # other owners may have steps that are lost here
            raise CSDRankError(
                "the optimizer ranks have been restarted, or go back to what they had committed: start all trainers "
                "again with resume=True"
            )
        self.close(commit=mode in ("resume", "attach") and not self.in_doubt)
        opened_as: Any = "resume" if mode == "attach" else mode
        self.rule, self._model = None, ""
        if self._ranks:
            for spec in self._specs:
                _make_directory(spec)
        engine = open_engine(self._specs, mode=opened_as, tile_elems=tile_elems, ranks=self._ranks, choose=choose)
        try:
            if not engine.recovered:
                assert isinstance(engine.committer, DurableCommitter)
                engine.committer.store_id = store_id
            if engine.recovered:
                if not self._checked:
                    engine.committer.check_recovered()
                manifest = engine.recovered[0].manifest
                self.rule = manifest.get("rule")
                self._model = _digest_of(manifest)
        except BaseException:
            engine.abandon()
            raise
        self._engine, self._checked, self.in_doubt = engine, True, False
        self._has_newer = bool(engine.recovered)
        if mode == "attach":
            self.discard_newer()

    def check_new(self, asked: Set[int]) -> None:
        """Raise CSDStoreExistsError if new states would lie beside another training's.

        `asked`: trainers of this training, which may have states here.
        """
        if others := [k for k in self.others_here() if k not in asked]:
            raise CSDStoreExistsError(
                17,
                f"the optimizer rank has the states of rank {others[0]} of {self.trainers}, and is asked to make those "
                f"of rank {self.trainer}: name the optimizer ranks in the order in which they were named before, with "
                "resume=True, or use other directories",
            )

    def others_here(self) -> list[int]:
        """Return the trainers, of the same number of trainers, that have states here."""
        directories = [spec.directory for spec in self._devices if spec.directory]

        def has_states(trainer: int) -> bool:
            return any(_size_of(d / name_of(trainer, self.trainers) / FILE_NAME) for d in directories)

        return [*filter(has_states, range(self.trainers))]

    def discard_newer(self) -> None:
        """Discard what is newer than the commit that was resumed, before anything changes. Raises CSDOSError."""
        if self._has_newer:
            self.committer.discard_newer()
            self._has_newer = False

    def close(self, *, commit: bool = True) -> None:
        """Close the engine. `commit`: everything in memory; raises CSDOSError if that fails."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if commit:
            engine.close()
            return
        committer = engine.committer
        assert isinstance(committer, DurableCommitter)
        # Complete the commit of the last kept step. Begin no other commit, which could contain half a load.
        with contextlib.suppress(CSDError):
            committer.background.wait()
        engine.abandon()

    def close_when_granted(self) -> None:
        """Close the engine once no session is being granted. Raises CSDOSError."""
        with self.opening:
            self.close(commit=not self.in_doubt)

    def check_room(
        self, numels: Sequence[int], sections: Sequence[str], codec: str, param_dtype: torch.dtype | None
    ) -> None:
        """Raise CSDRankError if these parameters would make this trainer's states exceed its part of `max_model`.

        Counts the bytes of tiles on devices, in both slots, to the end of the last tile. Raises CSDValueError as
        plan_extent().
        """
        if self._max_model is None:
            return
        engine = self.engine
        wanted = plan_extent(
            numels,
            len(self._specs),
            sections=sections,
            codec=codec,
            param_dtype=param_dtype,
            tile_elems=engine.tile_elems,
        )
        nbytes = sum(e.slots * e.slot_bytes * e.n_tiles for e in (*engine.tiles.extents, wanted))
        if nbytes * self.here > self._max_model:
            raise CSDRankError(
                f"the states of all trainers' parameters would take {nbytes * self.here} bytes, and the optimizer "
                f"ranks allow {self._max_model}: start them with a larger --max-model, or use state_dtype='8bit'"
            )

    # ---- what trainers learn ---------------------------------------------------------

    def welcome(self) -> tuple[Welcome, list[Any]]:
        """Return the answer to a HELLO."""
        engine = self.engine
        states, found = engine.states, [*engine.recovered]
        record = states.record
        of_store: dict[str, Any] = {}
        if found:
            contents = found[0]
            left_out = ("extents", "tiles", "features", "rank", "world_size")
            manifest = {k: v for k, v in contents.manifest.items() if k not in left_out}
            of_store = {"path": contents.path, "manifest": packed(manifest), "record": packed(head_of(record))}
            of_store["extents"] = [ExtentFields(**extent_fields(e)) for e in engine.tiles.extents]
        welcome = Welcome(
            store=self.store_id,
            step=states.step,
            devices=[str(spec) for spec in engine.devices.specs],
            tbw=[spec.tbw_bytes or 0 for spec in engine.devices.specs],
            recovered=bool(found),
            window=self.window,
            **of_store,
        )
        devices = np.concatenate([np.zeros(0, np.uint32), *(e.devices for e in engine.tiles.extents)])
        return welcome, [states.all_steps().astype(">u4"), devices.astype(">u4"), record.user_state]

    def commit_fields(self) -> dict[str, int]:
        """Return the progress of commits, which is part of each answer and of news."""
        background = self.committer.background
        ended = background.ended  # read first: a commit may begin and end meanwhile
        begun = max(background.begun, ended)
        return {"committed": self.committer.states.committed_step, "begun_commits": begun, "ended_commits": ended}

    # ---- what trainers say -------------------------------------------------------------

    def describe(self, manifest: dict[str, Any]) -> None:
        """Take over the description of the parameters. Raises CSDRankError if it does not fit the states."""
        engine = self.engine
        params, waiting = manifest["params"], manifest["waiting"]
        numels = [
            (e, n, start)
            for e, x in enumerate(engine.tiles.extents)
            for n, start in zip(x.numels, x.starts, strict=True)
        ]
        try:
            require(len(params) == len(numels), f"{len(params)} parameters")
            for p, place in zip(params, numels, strict=True):
                check_param(p, len(engine.devices.specs))
                require((p["extent"], p["numel"], p["start"]) == place, "a parameter's place")
                extent = engine.tiles.extents[p["extent"]]
                dtype = "float32" if p["dtype"] == "complex64" else p["dtype"]
                right = extent.codec == FP32 or p["group"] < 0 or dtype == name_of_dtype(extent.param_dtype)
                require(right, f"the dtype of parameter {p['name']}")
            for p in waiting:
                check_param(p, len(engine.devices.specs), is_waiting=True)
            for p in _whole_params(manifest):
                check_param(p, len(engine.devices.specs))
            check_rules(manifest, [extent.sections for extent in engine.tiles.extents])
        except (CSDStoreError, KeyError, TypeError) as e:
            refuse(str(e))
        engine.committer.describe(manifest)
        self.rule, self._model = manifest.get("rule"), _digest_of(manifest)

    def record(self, fields: dict[str, Any], user_state: bytes) -> Record:
        """Return a received record. Raises CSDRankError if the record cannot be stored."""
        if {*fields} != {"groups", "given", "seconds"}:
            refuse("the fields of the record")
        record = Record(fields["groups"], fields["given"], user_state, fields["seconds"])
        try:
            check_record(vars(record), self.rule)
        except (CSDStoreError, KeyError, TypeError) as e:
            refuse(f"the record: {e}")
        return record


def _whole_params(manifest: dict[str, Any]) -> list[Any]:
    """Return the parameters of the trainer, which may have several owners."""
    params: list[Any] = manifest.get(DIVIDED, manifest)["params"]
    return params


def _digest_of(manifest: dict[str, Any]) -> str:
    """Return digest_of_entries() of the trainer's parameters."""
    return digest_of_entries((*_whole_params(manifest), *manifest["waiting"]))


def part_of(spec: DeviceSpec, trainer: int, trainers: int) -> DeviceSpec:
    """Return the device for one of several trainers: a directory of its own below that of `spec`."""
    if spec.directory is None:
        return spec
    directory = spec.directory / name_of(trainer, trainers)
    return replace(spec, directory=directory, text=spec.text.replace(str(spec.directory), str(directory), 1))


def name_of(trainer: int, trainers: int) -> str:
    """Return the name of the directory with the states of a trainer."""
    return f"rank-{trainer}-of-{trainers}"


def check_others(specs: Sequence[DeviceSpec], trainers: int) -> None:
    """Raise CSDStoreError if there are states of another number of trainers."""
    for spec in specs:
        if spec.directory is None and trainers > 1:
            raise CSDStoreError(f"{spec} keeps the states of one trainer, and these are {trainers}")
        if spec.directory is None:
            continue
        several = [path for path in spec.directory.glob("rank-*-of-*") if not path.name.endswith(f"-of-{trainers}")]
        others = [spec.directory, *several] if trainers > 1 else several
        # An engine without states has an empty file.
        if found := next((path for path in others if _size_of(path / FILE_NAME)), None):
            raise CSDStoreError(
                f"the optimizer ranks have states in {found} of another number of trainers than {trainers}: start as "
                f"many as before, or make stores of {trainers} with csd-optim reshard, and move the others away"
            )


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _make_directory(spec: DeviceSpec) -> None:
    assert spec.directory
    try:
        spec.directory.mkdir()
    except FileExistsError:
        pass
    except OSError as e:
        raise CSDOSError(e.errno, f"cannot make {spec.directory}: {e.strerror}") from e


def head_of(record: Record) -> dict[str, Any]:
    return {"groups": record.groups, "given": record.given, "seconds": record.seconds}
