"""Publisher: listens to steps and commits, and has versions of the weights made of them.

A version is written before its step is committed, and named afterwards: see pending.py.
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
from .folder import Folder
from .pending import NextVersion, PendingVersion, VersionPhase
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
        model = model.module if isinstance(model, DistributedDataParallel) else model
        self._settle = settle
        self._leads = ranks is None or ranks.rank == 0
        # Whether a thread of the publisher names versions. Else after_commit() runs in the background already.
        self._names_behind = ranks is not None or not engine.devices.records_changes
        self._named: tuple[int, int] | None = None  # number and step of the newest version
        self._version: PendingVersion | None = None  # of the step under way or the last step, until it is confirmed
        self.has_failed: bool = False
        self._failure = ""  # why there is no version, if this rank is the cause
        self._working: Future[None] | None = None  # work begun by no_commit()
        self._naming: Future[None] | None = None  # of the last version, on rank 0 of several ranks
        self._closed = False
        with all_ranks_or_none(ranks):
            tensors = tensors_of(model, state_map.part_of, as_bf16=options.dtype == "bf16")
            for tracked in tensors:
                tracked.has_changed()  # takes the checksum
        self._tracked = own_share(tensors, ranks)
        with contextlib.ExitStack() as stack:
            try:
                with all_ranks_or_none(ranks) as votes:
                    self._pool = running_pool(1, "csd_optim publish")
                    stack.callback(self._pool.shutdown)
                    self._folder = Folder(path, *((ranks.rank, ranks.size) if ranks else ()))
                    stack.callback(self._folder.close)
                    votes.mine = self._folder.make_mark() if ranks and self._leads else None
                with all_ranks_or_none(ranks):
                    if ranks and not self._folder.has_mark(votes.all[0]):
                        raise CSDValueError(
                            f"rank {ranks.rank} does not see in {path} what rank 0 writes there: publish() needs a "
                            "folder on a file system that all ranks share"
                        )
                    self._recording = Recording(path)
                    stack.callback(self._recording.close)
                self._watching = Watching(engine, self._recording, self._tracked, model)
                self._chain = Chain(self._folder, [t.tensor for t in tensors])
                self._writer = ShareWriter(self._folder, self._recording, self._tracked, self._chain.model)
                self._next = self._begin()  # the same on all ranks
            except OSError as e:
                if isinstance(e, CSDError):
                    raise
                raise CSDOSError(e.errno, f"cannot publish in {path}: {e.strerror}") from e
            stack.pop_all()

    def _begin(self) -> NextVersion:
        """Continue the chain if the newest version has the model's bits; otherwise begin a new run. A collective."""
        step = self._engine.states.step
        with all_ranks_or_none(self._ranks) as votes:
            votes.mine = [(t.index, t.checksum) for t in self._tracked]
        sums = [part for of_rank in votes.all for part in of_rank]
        with all_ranks_or_none(self._ranks) as votes:
            if self._leads:
                votes.mine = self._chain.find(step, sums, durable=self._engine.durable)
        run, number, newest, last_full = votes.all[0]
        following = NextVersion(run, number, newest if last_full else 0, last_full)
        if newest:
            self._named = newest, step
            return following
        version = following.begin(step, self._options.full_every)
        version.enter(VersionPhase.DUE)
        with all_ranks_or_none(self._ranks):
            self._write(version)
        version.enter(VersionPhase.CONFIRMED)
        with all_ranks_or_none(self._ranks) as votes:
            if self._leads:
                self._name(version)
            votes.mine = self._named
        self._named = votes.all[0]
        return following.after(version)

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
        if self._ranks:  # if no states are durable, the step is not confirmed yet
            with self._engine.lock:
                self._engine.committer.exchange_ballots(self._ranks)
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

    # ---- steps: see Watcher --------------------------------------------------------

    def enter(self, table: Array, params: Sequence[ParamState]) -> None:
        self._watching.enter(table, params)

    def step_begins(self, table: Array, written: Array) -> None:
        self._begin_step()
        self._watching.step_begins(table, written)

    def _begin_step(self) -> None:
        self.join()
        if self.has_failed and not self._ranks:
            self.give_up()
        step = self._engine.states.step + 1
        is_due = step % self._options.every == 0
        self._version = self._next.begin(step, self._options.full_every) if is_due else None
        is_full = self._version is not None and self._version.base is None
        self._watching.begin(anew=is_full or not self._next.base, is_whole=is_full)

    @property
    def awaits_vote(self) -> bool:
        return self._ranks is not None and self._version is not None and not self._watching.is_recording

    def compares(self, row: int) -> bool:
        return self._watching.compares(row)

    def param_arrives(self, tile: int, piece: Array, before: torch.Tensor, after: torch.Tensor) -> None:
        self._watching.param_arrives(tile, piece, before, after)

    def step_completes(self, step: int) -> None:
        self._keep()
        self.before_commit(step)

    def step_ends(self, *, is_undone: bool) -> None:
        if is_undone and self._watching.is_recording:
            self._version = None
            self._watching.undo()
        elif is_undone:  # after step_completes()
            self.step_taken_back()
        elif self._watching.is_recording:
            self._keep()

    def _keep(self) -> None:
        if self._version and self._version.phase is VersionPhase.UNDER_WAY:
            self._version.enter(VersionPhase.DUE)
        try:
            self._watching.keep()
        except CSDError as e:
            self._fail(self._engine.states.step + 1, self._version, e)

    def step_of_others(self) -> None:
        self._begin_step()
        self._keep()

    def step_taken_back(self) -> None:
        self.join()
        self._watching.take_back()
        self._version = None
        with contextlib.suppress(OSError):  # then _write() fails, too, which all ranks learn
            self._folder.remove(self._next.number)

    def params_written(self, params: Sequence[int]) -> None:
        self._watching.params_written(params)

    def tiles_written(self, tiles: Array) -> None:
        self._watching.tiles_written(tiles)

    # ---- commits -------------------------------------------------------------------

    def no_commit(self, step: int) -> None:
        if self._version and self._version.step == step:
            self._working = self._submit(self.before_commit if self._ranks else self._publish, step)

    def _publish(self, step: int) -> None:
        self.before_commit(step)
        self.after_commit(step)

    def _submit(self, work: Callable[..., None], argument: Any) -> Future[None] | None:
        """Run work in the background, after all earlier work; at interpreter shutdown, run it here."""
        try:
            return self._pool.submit(work, argument)
        except RuntimeError:
            self._end_naming()
            work(argument)
            return None

    def join(self) -> None:
        if self._working:
            wait([self._working])

    def _end_naming(self) -> None:
        if self._naming:
            wait([self._naming])

    def before_commit(self, step: int) -> None:
        self._end_naming()  # a finished share implies that its base is named
        version = self._version
        if version and version.step == step and version.phase is VersionPhase.DUE and not self.has_failed:
            try:
                self._write(version)
            except Exception as e:  # training continues after any error
                self._fail(step, version, e)

    def give_up(self) -> None:
        if self._version:
            self._version.enter(VersionPhase.GIVEN_UP)
        self._next = self._next._replace(base=0)
        self.has_failed = False
        self.error = self.error or ELSEWHERE
        self._watching.drop()

    def after_commit(self, step: int) -> None:
        version = self._version
        if version is None or version.step != step:
            return
        is_written = version.phase is VersionPhase.WRITTEN
        version.enter(VersionPhase.CONFIRMED if is_written else VersionPhase.GIVEN_UP)
        self._version, self._next = None, self._next.after(version)
        if not is_written:
            if self._leads:
                self._naming = self._submit(self._folder.discard, version.number)
            return
        self._watching.drop()
        if not self._names_behind:
            self._name_or_fail(version)
        elif self._leads:
            self._naming = self._submit(self._name_or_fail, version)
        else:
            self._failure = self.error = ""

    def _fail(self, step: int, version: PendingVersion | None, e: Exception) -> None:
        """Give up a step's version, if it has one, and warn why. Other ranks learn of it before the next step."""
        if version:
            version.enter(VersionPhase.GIVEN_UP)
            with contextlib.suppress(OSError):  # the share's space
                self._folder.remove(version.number)
        self.has_failed, is_first = True, not self._failure
        self._failure = self.error = str((isinstance(e, OSError) and e.strerror) or e or type(e).__name__)
        if is_first:
            with contextlib.suppress(CSDWarning):  # where warnings are errors
                warnings.warn(
                    f"the weights of step {step} were not published in {self.path}: {self.error}. Training goes on, "
                    "and a full version is made as soon as that works",
                    CSDWarning,
                    stacklevel=1,
                )

    # ---- versions ------------------------------------------------------------------

    def _write(self, version: PendingVersion) -> None:
        """Write this process's share of a version. Raises OSError, CSDTypeError."""
        self._writer.write(version, self._watching.in_step)
        version.enter(VersionPhase.WRITTEN)

    def _name_or_fail(self, version: PendingVersion) -> None:
        try:
            self._name(version)
        except Exception as e:
            self._fail(version.step, version, e)
            self._folder.discard(version.number)

    def _name(self, version: PendingVersion) -> None:
        """Let readers see a version. All ranks have written their shares. Raises OSError, CSDStoreError."""
        self._chain.name(version.run, version.number)
        self._named, self._failure, self.error = (version.number, version.step), "", ""
        with contextlib.suppress(OSError):  # leftovers are removed after the next version
            self._folder.retire(self._options.keep, version.last_full)
        version.enter(VersionPhase.NAMED)


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
