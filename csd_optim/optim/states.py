"""The states of an optimizer, which are on devices: `state`, state dicts and snapshots."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..checkpoint import files
from ..checkpoint import snapshot as checkpoint
from ..checkpoint import state_dict as stored
from ..checkpoint.resume_from import make_own_stores
from ..devices.spec import DeviceSpec
from ..distributed.ranks import Ranks, all_ranks_or_none
from ..distributed.sharding import whole_of
from ..engine.engine import Engine
from ..engine.load import Load
from ..errors import CSDValueError
from ..grad_modes import no_autograd, writable
from ..params.decoded_entry import DecodedEntry
from ..params.memory_warnings import DECODED, FETCHED, warn_if_large
from ..params.state_map import StateMap
from ..publish.publisher import Publisher, PublishOptions, check_engine
from ..serve.trainer.address import Owners
from ..signals import defer_signals
from ..step.mode import InStep
from ..step.steps import Steps
from ..store.format import Record
from .kernels import check_kernels
from .loaded import as_ours, complete_groups


class StatesOnDevices(Optimizer):
    """The methods of an optimizer that deal with states."""

    param_groups: list[dict[str, Any]]
    grad_dtype: torch.dtype | None
    user_state: dict[str, Any]
    _ranks: Ranks | None
    _options: dict[str, Any]
    _owners: Owners | None
    _engine: Engine | None
    _state_map: StateMap
    _steps: Steps
    _mode: InStep
    _warns_of_saving: bool = False  # about saving on one rank alone, in the next step that ranks divide
    _consolidated_hook: RemovableHandle | None  # puts all ranks' states into state_dict()

    def _make_stores(
        self, old: checkpoint.Paths, specs: Sequence[DeviceSpec], make_way: Callable[[], None]
    ) -> list[dict[str, Any]]:
        """Make the stores on these devices from `old` ones: see make_own_stores()."""
        if self._owners:
            raise CSDValueError(
                "resume_from makes stores in directories of this process, and serve:// has an owner: run csd-optim "
                "reshard on the owner's machine (docs/optimizer-ranks.md)"
            )
        check_kernels([spec for spec in specs if spec.directory], self.param_groups, self._state_map)
        tile_elems = self._options["tile_size"]
        return make_own_stores(old, specs, self.param_groups, self._state_map, self._ranks, tile_elems, make_way)

    # ---- with no step in flight --------------------------------------------------------

    def _settled_engine(self) -> Engine:
        """Return the engine once no step is in flight: to change states, or to save the states of all ranks.

        A collective if overlap() is on. Raises CSDRuntimeError if the engine is closed or belongs to another process,
        or the error with which the step in flight failed. Call Steps.finish_undo() next.
        """
        assert self._engine is not None
        self._engine.check_open()
        if failure := self._mode.drain(collective=True):
            raise failure
        return self._engine

    @contextlib.contextmanager
    def _settled(self, *, collective: bool = False) -> Iterator[Engine]:
        """Yield the locked engine without a step in flight: no other thread can launch one.

        `collective`: all ranks call it, and none has a step in flight.
        """
        assert self._engine is not None
        engine = self._engine
        while True:
            engine.check_open()
            self._settle(collective=collective)
            with engine.lock:
                landed = engine.completed_event is None or engine.completed_event.is_set()
                if landed and not engine.is_speculative and not self._steps.undoing:  # a step may fail while we wait
                    yield engine
                    return

    def _settle(self, *, collective: bool = False) -> None:
        """Return once no step is in flight or half undone on this rank; with `collective`, on any rank.

        Raises CSDOSError if a step failed, CSDTornError if the step cannot be undone yet.
        """
        failure = self._mode.drain(collective=collective)
        engine = self._engine
        together = bool(collective and engine and (engine.durable or self._mode.overlaps))
        with engine.committer.all_ranks_or_none() if engine and together else contextlib.nullcontext():
            if failure:
                raise failure
            self._steps.finish_undo(collective=together)

    # ---- torch's contract --------------------------------------------------------------

    @property  # type: ignore[override]
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """A plain dict of plain tensors. Reading it first waits until all states are written to devices."""
        engine = self._engine
        if engine is not None and engine.replaced:
            engine.check_open()
        self._steps.finish_undo()
        if self._steps.in_flight and engine is not None and not engine.closed:
            with self._settled():
                engine.states.remap()
                self._steps.in_flight = False
        return self._state_map.state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self._state_map.state = value

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, as in torch. 8-bit states are decoded, which takes as much memory as fp32 states."""
        state_dict = super().state_dict()
        decoded = {k: {**entry} for k, entry in state_dict["state"].items() if isinstance(entry, DecodedEntry)}
        if not decoded:
            return state_dict
        tensors = (t for entry in decoded.values() for t in entry.values() if isinstance(t, torch.Tensor))
        is_far = self._engine is not None and self._engine.devices.states_on_demand
        warn_if_large(sum(t.nbytes for t in tensors), FETCHED if is_far else DECODED)
        return {**state_dict, "state": {**state_dict["state"], **decoded}}

    @no_autograd()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's checkpoints and ours into the devices, without casts. A missing ``master`` is the parameter.

        Raises CSDValueError, before anything is touched, if shapes do not fit or the state dict is of another
        optimizer. With named directories or overlap(), all ranks call this, and the load is durable on all ranks or on
        none.
        """
        engine = self._settled_engine()
        with defer_signals(), self._whole_load(engine) as load:
            with engine.committer.all_ranks_or_none():
                self._steps.finish_undo(collective=engine.durable)
                self._check_and_load(engine, state_dict)
            # Some trainers load the model before they construct the optimizer. The resume has then overwritten the
            # loaded parameters with the store's; parameters not written to since get the loaded masters' values below.
            resume = self._steps.resume
            resumed = resume.unwritten() if resume.pending else []
            with load(self._steps.record()):
                if engine.durable:
                    self._state_map.describe(engine, self.param_groups)
                self._state_map.adopt(engine, self.param_groups, self.grad_dtype, loaded=True)
        if resume.pending:
            resumed = [self._state_map.param_states[id(state.param)] for state in resumed]
            resume.set_from_masters(engine, self.param_groups, resumed, self.grad_dtype)

    @contextlib.contextmanager
    def _whole_load(self, engine: Engine) -> Iterator[Callable[..., AbstractContextManager[Load]]]:
        """Yield Committer.loading(). If the body raises, everything is as before, not only states."""
        loads: list[Load] = []

        @contextlib.contextmanager
        def loading(*record: Record | None) -> Iterator[Load]:
            with engine.committer.loading(*record) as load:
                loads.append(load)
                yield load

        put_back, groups = self._state_map.saved(), self.param_groups
        values = [dict(group) for group in groups]
        tensors = [(value, value.clone()) for group in values for value in group.values() if torch.is_tensor(value)]
        with engine.lock:
            try:
                yield loading
            except BaseException:
                if not any(load.stands for load in loads):
                    self.param_groups = groups
                    for group, before in zip(groups, values, strict=False):
                        group.clear()
                        group.update(before)
                    for tensor, value in tensors:
                        writable(tensor).copy_(value)
                    put_back(engine, groups)
                raise

    def _check_and_load(self, engine: Engine, state_dict: dict[str, Any]) -> None:
        """Put a state dict into `state` and `param_groups`. Changes nothing if the state dict does not fit."""
        self._steps.record()  # raises if it cannot be committed
        self._forget_consolidated()
        rule_of = self._state_map.rule_of
        handle = self.register_load_state_dict_pre_hook(lambda _, d: as_ours(d, self.param_groups, rule_of))
        kept = self._state_map.state, self.param_groups
        try:
            super().load_state_dict(state_dict)
            complete_groups(self.param_groups, kept[1], rule_of, type(self).__name__)
            self._state_map.check(self.param_groups)
        except BaseException:
            self._state_map.state, self.param_groups = kept  # refused: undo everything
            raise
        finally:
            handle.remove()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Make writes to the tensors of ``state`` inside this context go to the devices directly.

        Outside, writes stay in memory on named devices until the next step. That suits an edit, but not a read of a
        whole checkpoint into these tensors, as by torch.distributed.checkpoint::

            with optimizer.loading():
                dcp.load(state, checkpoint_id=...)

        At the end everything is durable, or nothing: if anything raises, states, step counts and ``param_groups`` are
        as before. If devices keep one copy of states, as ``ram:`` does, an error loses the states that were being
        loaded, and the next step raises CSDTornError until they are loaded again. No step is possible inside. With
        named directories or overlap(), all ranks call this, and an error is raised on all ranks.
        """
        engine = self._settled_engine()
        with engine.committer.all_ranks_or_none():
            self._steps.finish_undo(collective=engine.durable)
        _ = self.state  # the first read after a step closes all windows
        with self._whole_load(engine) as load, load():
            with no_autograd():
                self._state_map.fill(engine)
            with engine.writing([state.index for state in self._state_map.param_states.values()]):
                yield

    @no_autograd()
    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Make state_dict() of rank `to` hold the whole states of all ranks, as torch's does, until the next step().

        A collective, for torch.save() on one rank and for trainers that know the method from ZeroRedundancyOptimizer.
        Rank `to` needs memory for all states, the other ranks for the largest state. States of FSDP1 stay as they are.

        `to=None`: back to the default, by which each rank's state_dict() has that rank's part.
        """
        self._warns_of_saving = False  # the caller knows
        self._forget_consolidated()
        if to is None:
            return
        whole: dict[int, dict[str, Any]] = {}
        self._settle(collective=True)
        with all_ranks_or_none(self._ranks):
            own = self.state_dict()["state"]
        for k, entry in own.items():
            for name, value in entry.items():
                value = whole_of(value) if hasattr(value, "full_tensor") else value
                if self._ranks and self._ranks.rank == to:
                    whole.setdefault(k, {})[name] = value
        if whole:
            self._show_consolidated(whole)

    def _show_consolidated(self, states: dict[int, dict[str, Any]]) -> None:
        def put(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            # Return copies: a caller may replace the keys, as torch.distributed.checkpoint does.
            return {**state_dict, "state": {k: {**entry} for k, entry in states.items()}}

        self._consolidated_hook = self.register_state_dict_post_hook(put, prepend=True)

    def _forget_consolidated(self) -> None:
        if self._consolidated_hook:
            self._consolidated_hook.remove()
            self._consolidated_hook = None

    # ---- commit and resume -------------------------------------------------------------

    @property
    def committed_step(self) -> int:
        """The last step that is durable on all devices, from which a resume would continue now; 0 if there is none."""
        return self._engine.states.committed_step if self._engine else 0

    def synchronize(self) -> None:
        """Return once the last step is durable; at once without named directories. Raises CSDOSError.

        With named directories or overlap(), all ranks call this: the step is then complete and durable on all ranks, or
        an error is raised on all.
        """
        with self._settled(collective=True) as engine:
            engine.wait()

    @no_autograd()
    def restore(self) -> None:
        """Set parameters and hyperparameters again to the values of the step that was resumed.

        Call this if parameters were replaced (some trainers do so when they move a model), or their values changed,
        after the construction of the optimizer. A no-op if no store was resumed. Raises CSDRuntimeError after a step(),
        CSDStoreError if the parameters no longer fit the store.
        """
        engine = self._settled_engine()
        self._steps.finish_undo()
        with engine.lock:
            self._steps.resume.restore(engine, self.param_groups, self.grad_dtype)

    def _adopt_store(self) -> None:
        engine, steps = self._settled_engine(), self._steps
        given = steps.initial_groups.of(self.param_groups)
        found = steps.resume.adopt_store(engine, self.param_groups, given, self.grad_dtype)
        if found:
            record, self.user_state = found
            steps.trained_seconds = record.seconds

    # ---- snapshots ---------------------------------------------------------------------

    @no_autograd()
    def save(self, path: str | os.PathLike[str], *, wait: bool = True, progress: bool = False) -> Future[Path]:
        """Make a snapshot of the named directories: `path/device-0`, `path/device-1` ..., each a store.

        With several ranks all call this, and each makes `path/rank-0/device-0` and so on, all of the same step.

        The snapshot holds the last step, with its hyperparameters and `user_state`, and works like the original: resume
        it or load() it. `path` must not exist, and appears as a whole or not at all. On a file system with reflinks
        this takes no time and no space. Elsewhere the states are copied, 12 bytes per parameter; with wait=False
        training goes on meanwhile, and the step after the next waits for the copy. `progress` shows a bar on stderr.

        Returns a future of the path, which is done if wait=True. Raises CSDStoreExistsError, CSDStoreError if a state
        is damaged, CSDOSError, CSDRuntimeError if there is nothing to save; with wait=False some of these through the
        future.
        """
        with defer_signals(), self._settled(collective=True) as engine:
            engine.committer.confirm()
            with engine.committer.all_ranks_or_none():
                if self._state_map.unfilled or not self._state_map.intact():
                    self._state_map.adopt(engine, self.param_groups, self.grad_dtype)
                bar = files.progress_bar if progress else files.no_progress
                saving = checkpoint.save(engine, Path(path), bar, wait=wait)
        if wait:
            with engine.committer.all_ranks_or_none():
                saving.wait()
        return saving.future

    @no_autograd()
    def publish(
        self,
        path: str | os.PathLike[str],
        model: torch.nn.Module,
        *,
        every: int = 1,
        keep: int = 32,
        full_every: int = 200,
        dtype: str | None = None,
    ) -> Publisher:
        """Publish the weights of `model` in a folder, as versions: from now on after each step, once it is committed.

        A version contains exactly the elements that differ from the version before it; Replica and `csd-optim follow`
        read versions. `every`: steps per version. `full_every`: versions per full version. `keep`: the number of
        versions that stay at least; the last full version stays with all its successors. `dtype`: "bf16" publishes fp32
        parameters, rounded to bfloat16; None refuses fp32 parameters.

        With several ranks all call this, with a folder that all can access. Each rank writes its part of the model; a
        DDP wrapper of the model counts as the wrapped module.

        The first version has the present weights, unless the folder's newest version has the same bits, as after a
        resume. No step fails if a version cannot be written: see Publisher.error.

        Raises CSDValueError for unsuitable devices and options, CSDTypeError for a parameter that is not of 16 bits,
        CSDBusyError if another process publishes there, CSDOSError.
        """
        options = PublishOptions(every, keep, full_every, dtype)
        settle = weakref.WeakMethod(self.synchronize)
        with defer_signals(), self._settled(collective=True) as engine:
            check_engine(engine, self._ranks, options)
            engine.wait()
            publisher = Publisher(engine, self._state_map, self._ranks, model, Path(path), options, settle)
            engine.states.watcher = publisher
            self._state_map.changes += 1  # makes a new plan, with watches
        return publisher

    @staticmethod
    def load(path: checkpoint.Paths) -> dict[str, Any]:
        """Return a store or snapshot as a state dict for load_state_dict(), torch's or ours, and for torch.save().

        `path`: a snapshot, the directory of a store of one device, or a list of the directories of several devices.
        Beside the states there is ``master``, the parameter in fp32, and an entry ``csd_optim`` with names, dtypes,
        step and ``user_state``. The tensors are memory-mapped from the files: they take memory only when written to,
        and as long as any of them is alive, no optimizer can train on that store. All data is read and checked once.

        Raises CSDStoreError if the store is missing, damaged or incomplete, CSDBusyError if it is in use, CSDOSError.
        """
        return stored.load(path)
