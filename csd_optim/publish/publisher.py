"""Publisher: writes versions of the weights.

A version is written before its step is committed, and named afterwards.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from ..distributed.ranks import Ranks, all_ranks_or_none
from ..engine.engine import Engine
from ..engine.watcher import Watcher
from ..errors import CSDError, CSDOSError, CSDRuntimeError, CSDValueError, CSDWarning
from ..params.param_state import ParamState
from ..params.state_map import StateMap
from ..threads import running_pool
from .chain import Chain
from .folder import Folder, VersionShare
from .recording import Recording
from .tracked import own_share, tensors_of
from .watching import Watching
from .writer import ShareWriter

Array = np.ndarray[Any, Any]
ELSEWHERE = "another rank could not write its share"


@dataclass(frozen=True)
class PublishOptions:
    """See opt.publish()."""

    every: int
    keep: int
    full_every: int
    dtype: str | None


class Publisher(Watcher):
    """Publishes a model's weights as versions in a folder, for Replica and `csd-optim follow`. See opt.publish().

    Nothing here makes a step fail. If a version cannot be written, there is a warning, and `error` has the reason until
    the next version, a full one, is published.

    Each of several ranks writes its share of a version before it commits the step. The vote that confirms the commit
    also tells whether each rank has written its share: so all ranks agree on which versions exist and when a full
    version is due, and rank 0 names the version.
    """

    def __init__(
        self,
        engine: Engine,
        state_map: StateMap,
        ranks: Ranks | None,
        model: torch.nn.Module,
        path: Path,
        options: PublishOptions,
        settle: Callable[[], Callable[[], None] | None],
    ) -> None:
        """Publishes the present model as a full version, unless the newest version has the same bits.

        `settle`: returns a function that waits until the last step is durable; None if the optimizer is gone. A
        collective. Raises CSDBusyError, CSDOSError, CSDTypeError, CSDValueError; CSDRankError if another rank failed.
        """
        self.path: Path = path
        self.error: str = ""
        self._engine, self._state_map, self._ranks, self._options = engine, state_map, ranks, options
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._settle = settle
        self._leads = ranks is None or ranks.rank == 0
        # Whether a thread of the publisher names versions. Else after_commit() runs in the background already.
        self._names_behind = ranks is not None or not engine.devices.records_changes
        self._is_complete = False  # between step_completes() and step_ends()
        self._named: tuple[int, int] | None = None  # number and step of the newest version
        # The same on all ranks:
        self._run = ""
        self._number = 1  # of the next version
        self._base = 0  # number of the next version's base
        self._last_full = 0  # the number of the last full version
        self._needs_full = True
        self._is_full = False  # the version under way is a full one
        self._unconfirmed: int | None = None  # the last step, if it has a version and is not confirmed
        # Of this rank:
        self._due: int | None = None  # a step whose share is still to be written
        self._has_written = False  # the share of the last step
        self._has_failed = False  # see Watcher
        self._failure = ""  # why there is no version, if this rank is the cause
        self._working: Future[None] | None = None  # work begun by no_commit()
        self._naming: Future[None] | None = None  # of the last version, on rank 0 of several ranks
        self._closed = False
        with all_ranks_or_none(ranks):
            tensors = tensors_of(self._model, state_map.part_of, as_bf16=options.dtype == "bf16")
            for tracked in tensors:
                tracked.has_changed()  # takes the checksum
        self._tracked = own_share(tensors, ranks)
        self._tensors = [t.tensor for t in tensors]
        with contextlib.ExitStack() as stack:
            try:
                self._open(stack)
                self._begin()
            except OSError as e:
                if isinstance(e, CSDError):
                    raise
                raise CSDOSError(e.errno, f"cannot publish in {path}: {e.strerror}") from e
            stack.pop_all()

    # ---- what users ask ------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The number of the newest version, or None. On ranks other than 0: as of the last wait()."""
        return self._named and self._named[0]

    @property
    def step(self) -> int | None:
        """The step whose weights the newest version has, or None. On ranks other than 0: as of the last wait()."""
        return self._named and self._named[1]

    def arrays(self) -> list[Array]:
        """Return the arrays that this publisher keeps in memory: sums of groups of elements that updates need."""
        return [array for tracked in self._tracked if tracked.watch for array in tracked.watch.arrays()]

    def wait(self) -> None:
        """Return when the version of the last step, if any, is published, or `error` says why not.

        A collective. Raises CSDOSError if the step failed, or cannot be committed.
        """
        if settle := self._settle():
            settle()
        self.join()
        with all_ranks_or_none(self._ranks) as votes:
            votes.mine = self._has_failed
        # If no states are durable, the step is not confirmed yet.
        self.after_commit(self._engine.states.step, has_failed=any(votes.all))
        self._end_naming()
        with all_ranks_or_none(self._ranks) as votes:
            votes.mine = self._named, self._failure
        if self._ranks:
            self._named = votes.all[0][0]
            failures = [f"rank {rank}: {failure}" for rank, (_, failure) in enumerate(votes.all) if failure]
            self.error = "; ".join(failures) or self.error

    def close(self) -> None:
        """Publish the last step's version, and then nothing more. The versions stay. A collective.

        opt.close() also ends publishing, but is no collective: with several ranks, wait() for the last version first.
        """
        if self._closed or self._engine.closed:
            return
        self.wait()
        with self._engine.lock:
            if self._engine.stepping:
                raise CSDRuntimeError("a step is under way: close() the publisher when it is complete")
            self._engine.states.watcher = Watcher()
            self._state_map.changes += 1  # makes a new plan, without watches
            self.engine_closed()

    def engine_closed(self) -> None:
        if not self._closed:
            self._closed = True
            self.join()
            self._pool.shutdown()
            self._recording.close()
            self._folder.close()

    # ---- the beginning -------------------------------------------------------------

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Open the folder, check that all ranks see it, and open a file for records there. A collective."""
        rank, size = (self._ranks.rank, self._ranks.size) if self._ranks else (0, 1)
        with all_ranks_or_none(self._ranks) as votes:
            self._pool = running_pool(1, "csd_optim publish")
            stack.callback(self._pool.shutdown)
            self._folder = Folder(self.path, rank, size)
            stack.callback(self._folder.close)
            votes.mine = self._folder.make_mark() if self._leads and self._ranks else None
        with all_ranks_or_none(self._ranks):
            if self._ranks and not self._folder.has_mark(votes.all[0]):
                raise CSDValueError(
                    f"rank {rank} does not see in {self.path} what rank 0 writes there: publish() needs a folder on a "
                    "file system that all ranks share"
                )
            self._recording = Recording(self.path)
            stack.callback(self._recording.close)
        self._watching = Watching(self._engine, self._recording, self._tracked, self._model)
        self._writer = ShareWriter(self._folder, self._recording, self._tracked)
        self._chain = Chain(self._folder, self._tensors)

    def _begin(self) -> None:
        """Continue the chain if the newest version has the model's bits; otherwise begin a new run. A collective."""
        with all_ranks_or_none(self._ranks) as votes:
            votes.mine = [(t.index, t.checksum) for t in self._tracked]
        sums = [part for of_rank in votes.all for part in of_rank]
        with all_ranks_or_none(self._ranks) as votes:
            if self._leads:
                votes.mine = self._chain.find(self._engine.states.step, sums, durable=self._engine.durable)
        self._run, self._number, self._base, self._last_full = votes.all[0]
        self._needs_full = not self._last_full
        if self._base:
            self._named = self._base, self._engine.states.step
            return
        with all_ranks_or_none(self._ranks):
            self._write(self._engine.states.step, is_full=True)
        with all_ranks_or_none(self._ranks) as votes:
            if self._leads:
                self._name(self._number, self._number)
            votes.mine = self._named
        self._named = votes.all[0]
        self._last_full, self._base, self._needs_full = self._number, self._number, False
        self._number += 1

    # ---- steps: see Watcher --------------------------------------------------------

    def enter(self, table: Array, params: Sequence[ParamState]) -> None:
        self._watching.enter(table, params)

    def step_begins(self, table: Array, written: Array) -> None:
        self._begin_step()
        self._watching.step_begins(table, written)

    def _begin_step(self) -> None:
        self.join()
        is_due = (self._engine.states.step + 1) % self._options.every == 0
        self._is_full = is_due and (self._needs_full or self._number - self._last_full >= self._options.full_every)
        self._watching.begin(anew=self._needs_full or self._is_full, is_whole=self._is_full)
        self._is_complete = False

    def compares(self, row: int) -> bool:
        return self._watching.compares(row)

    def param_arrives(self, tile: int, piece: Array, before: torch.Tensor, after: torch.Tensor) -> None:
        self._watching.param_arrives(tile, piece, before, after)

    def step_completes(self, step: int) -> None:
        self._keep()
        self._is_complete = True
        self.before_commit(step)

    def step_ends(self, *, is_undone: bool) -> None:
        is_complete, self._is_complete = self._is_complete, False
        if is_undone and is_complete:
            self.step_taken_back()
        elif is_undone:
            self._watching.undo()
        elif not is_complete:
            self._keep()

    def _keep(self) -> None:
        self._note_kept()
        try:
            self._watching.keep()
        except CSDError as e:
            self._fail(self._engine.states.step + 1, e)

    def step_of_others(self) -> None:
        self._begin_step()
        self._note_kept()

    def _note_kept(self) -> None:
        step = self._engine.states.step + 1
        self._watching.in_step.clear()
        self._due = self._unconfirmed = step if step % self._options.every == 0 else None

    def step_taken_back(self) -> None:
        self.join()
        self._watching.take_back()
        self._due, self._unconfirmed, self._has_written = None, None, False
        with contextlib.suppress(OSError):  # then _write() fails, too, which all ranks learn
            self._folder.remove(self._number)

    def params_written(self, params: Sequence[int]) -> None:
        self._watching.params_written(params)

    def tiles_written(self, tiles: Array) -> None:
        self._watching.tiles_written(tiles)

    # ---- commits -------------------------------------------------------------------

    def no_commit(self, step: int) -> None:
        if self._unconfirmed == step:
            self._working = self._submit(self.before_commit if self._ranks else self._publish, step)

    def _publish(self, step: int) -> None:
        self.before_commit(step)
        self.after_commit(step)

    def _submit(self, work: Callable[..., None], *arguments: int) -> Future[None] | None:
        """Run work in the background, after all earlier work; at interpreter shutdown, run it here."""
        try:
            return self._pool.submit(work, *arguments)
        except RuntimeError:
            self._end_naming()
            work(*arguments)
            return None

    def join(self) -> None:
        if self._working:
            wait([self._working])

    def _end_naming(self) -> None:
        if self._naming:
            wait([self._naming])

    @property
    def has_failed(self) -> bool:
        return self._has_failed

    def before_commit(self, step: int) -> None:
        self._end_naming()  # a finished share implies that its base is named
        if self._due == step and not self._has_failed:
            try:
                self._write(step, is_full=self._is_full)
            except Exception as e:  # training continues after any error
                self._fail(step, e)

    def after_commit(self, step: int, *, has_failed: bool = False) -> None:
        if has_failed:
            self._give_up()
        if self._unconfirmed != step:
            return
        number, self._number, self._unconfirmed = self._number, self._number + 1, None
        has_written, self._has_written = self._has_written, False
        if not has_written:
            if self._leads:
                self._naming = self._submit(self._discard, number)
            return
        self._base = number
        if self._is_full:
            self._last_full, self._needs_full = number, False
        with contextlib.suppress(OSError):  # the space is given back after the next version
            self._recording.clear()
        if not self._names_behind:
            self._name_or_fail(number, step, self._last_full)
        elif self._leads:
            self._naming = self._submit(self._name_or_fail, number, step, self._last_full)
        else:
            self._failure = self.error = ""

    def _fail(self, step: int, e: Exception) -> None:
        """Note that this process has no share of a step's version, and free the share's space."""
        self._due, self._has_written = None, False
        with contextlib.suppress(OSError):
            self._folder.remove(self._number)
        self._note_failure(step, e)
        if not self._ranks:
            self._give_up()

    def _note_failure(self, step: int, e: Exception) -> None:
        """Record and warn why a version is not published. Other ranks learn of it before the next step."""
        self._has_failed, is_first = True, not self._failure
        self._failure = self.error = str((isinstance(e, OSError) and e.strerror) or e or type(e).__name__)
        if is_first:
            with contextlib.suppress(CSDWarning):  # where warnings are errors
                warnings.warn(
                    f"the weights of step {step} were not published in {self.path}: {self.error}. Training goes on, "
                    "and a full version is made as soon as that works",
                    CSDWarning,
                    stacklevel=1,
                )

    def _give_up(self) -> None:
        """Make the next version a full one, as some rank has no share of this version. Called on all ranks alike."""
        self._due, self._has_written, self._has_failed, self._needs_full = None, False, False, True
        self.error = self.error or ELSEWHERE
        with contextlib.suppress(OSError):
            self._recording.clear()

    # ---- versions ------------------------------------------------------------------

    def _write(self, step: int, *, is_full: bool) -> None:
        """Write this process's share of the version of a step. Raises OSError, CSDTypeError."""
        share = VersionShare(
            self._run,
            self._number,
            step,
            None if is_full else self._base,
            self._folder.rank,
            self._folder.ranks,
            self._chain.model,
        )
        self._writer.write(share, self._watching.in_step)
        self._due, self._has_written = None, True

    def _name_or_fail(self, number: int, step: int, last_full: int) -> None:
        try:
            self._name(number, last_full)
        except Exception as e:
            self._note_failure(step, e)
            if not self._names_behind:
                self._give_up()
            self._discard(number)

    def _name(self, number: int, last_full: int) -> None:
        """Let readers see a version. All ranks have written their shares. Raises OSError, CSDStoreError."""
        version = self._chain.name(self._run, number)
        self._named, self._failure, self.error = (number, version.step), "", ""
        with contextlib.suppress(OSError):  # leftovers are removed after the next version
            self._folder.retire(self._options.keep, last_full)

    def _discard(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._folder.discard(number)


def check_engine(engine: Engine, ranks: Ranks | None, options: PublishOptions) -> None:
    """Raise CSDValueError if publish() is not possible with these options, or updates on these devices.

    A collective.
    """
    with all_ranks_or_none(ranks):
        if min(options.every, options.keep, options.full_every) < 1 or options.dtype not in (None, "bf16"):
            raise CSDValueError('every, keep and full_every are at least 1, and dtype is None or "bf16"')
        for spec in engine.devices.named:
            if not spec.kind.updated_by_cpu:
                raise CSDValueError(
                    f"publish() needs devices that the CPU updates, and {spec} is none: its updates record nothing"
                )
        if type(engine.states.watcher) is not Watcher:
            raise CSDValueError("this optimizer publishes already: close() that publisher first")
    if ranks and (difference := ranks.first_difference([("arguments", options), ("durable", engine.durable)])):
        raise CSDValueError(f"the ranks do not publish alike: {difference}")
