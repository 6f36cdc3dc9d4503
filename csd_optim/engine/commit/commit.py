"""A commit makes a step durable on all devices or on none, in the background of the next forward.

It publishes two copies of manifest, table and superblock, one after the other:
copy 0    is written after all tiles and residuals are on the disk (after a failed flush, they are read back first, see
          proof.py). After a crash in between, some devices have the new step, and all have the previous one in copy 1
copy 1    is written after copy 0 is on all disks; from then on the slots of the previous step may be overwritten

When several ranks commit a step together, each writes copy 1 only after the ranks have told each other that all have
copy 0: see rounds.py.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ...errors import CSDLostError, CSDOSError, CSDRuntimeError
from ...store.file import Staged, StoreFile
from ...store.format import Record, Superblock, pack_table, pack_tiles
from ...threads import Flag, running_pool
from ..parts import Space
from ..states import States
from .proof import prove
from .residuals import Residuals, Spaces

InParallel = Callable[[Iterable[Callable[[], Any]]], list[Any]]
Work = Callable[[InParallel], None]


@dataclass(frozen=True)
class Replaced:
    """What the beginning of a commit has replaced, for DurableCommitter to restore if the commit is withdrawn."""

    record: Record
    round: int
    step: int
    committed_steps: np.ndarray[Any, Any]
    residual_versions: dict[int, int]
    loose: np.ndarray[Any, Any]  # as Truth.loose
    manifests_written: bool


@dataclass
class CommitJob:
    """What a commit contains, captured when the commit began, on the thread that began it.

    Of the states, `stage()` reads only the tiles, which do not move before the commit has completed.
    """

    states: States
    residuals: Residuals
    stores: dict[int, StoreFile]  # by device: the durable ones
    written_before: list[int]  # by device: bytes written before the device was opened
    superblock: Superblock  # for device 0, without its regions
    manifests: dict[int, bytes]  # by device; empty: the stores keep the manifests that they have
    extents_on: dict[int, list[dict[str, Any]]]  # by device: the extents as in the manifests
    steps: np.ndarray[Any, Any]  # `step` of each parameter
    record: Record
    new_residuals: dict[int, torch.Tensor]  # by parameter: the residuals to be written
    ready_events: dict[torch.device, Any]  # by accelerator: an event after which its residuals are ready
    spaces: Spaces  # of the unchanged residuals; stage() adds the written ones
    freed: frozenset[Space]  # space of parameters that have left, no longer named from this commit on

    @property
    def step(self) -> int:
        return self.superblock.step

    def stage(self, in_parallel: InParallel) -> list[Staged]:
        """Write residuals, to space that the previous commit does not use; return what each store has to publish.

        Runs on the thread of the commit; may be called again after an error.
        """
        states = self.states
        states.check_whole()
        if states.truth.open.any():
            states.sync()  # before checksums are taken, which vouch for the data on the disk
            states.remap()  # closes the windows: committed slots must not be written
        else:
            states.native.wait_writes()
        extents = states.tiles.extents
        tiles = [states.slots_of(extent) for extent in extents]
        if self.new_residuals:
            writes = [
                functools.partial(self.residuals.write, d, store, self.new_residuals, self.ready_events)
                for d, store in self.stores.items()
            ]
            for written in in_parallel(writes):
                self.spaces.update(written)
        counts = states.stats(self.residuals.bytes_on)
        written_bytes = [int(c["total_write_bytes"]) for c in counts] or self.written_before
        staged = []
        for d, store in self.stores.items():
            tables = [
                pack_tiles(entry, slots[extent.devices == d], sums[extent.devices == d])
                for extent, entry, (slots, sums) in zip(extents, self.extents_on[d], tiles, strict=True)
            ]
            spaces = [self.spaces[param] for param in sorted(self.spaces) if self.residuals.rooms[param].device == d]
            table = pack_table(tables, self.steps, replace(self.record, written_bytes=written_bytes[d]), spaces)
            staged.append(store.stage(replace(self.superblock, device=d), self.manifests.get(d), table))
            if self.superblock.devices > 1 or self.superblock.round:
                store.stay()
        return staged


class Commit:
    """One commit: `prepare()` and then `complete()`. Call each again until it returns without an exception."""

    def __init__(self, job: CommitJob, replaced: Replaced) -> None:
        self.job: CommitJob = job
        self.replaced: Replaced = replaced
        self._stores = [*job.stores.values()]
        self._staged: list[Staged] = []
        self.prepared: Flag = Flag()  # copy 0 is durable on all devices

    def prepare(self, in_parallel: InParallel) -> None:
        """Stage the commit and publish copy 0.

        Raises CSDLostError, in this and every later call, if a flush has failed and data is missing on the disk, or if
        a store's file was removed.
        """
        if self.prepared.is_set:  # copy 1 may be half written by now, so copy 0 is the only valid copy: leave it alone
            return
        for store in self._stores:
            store.check_not_lost()
        if not self._staged:
            self._staged = self.job.stage(in_parallel)
        in_parallel([functools.partial(prove, *pair) for pair in self._pairs() if pair[0].in_doubt])
        self._publish(0, in_parallel)
        self.prepared.set()

    def complete(self, in_parallel: InParallel) -> None:
        self._publish(1, in_parallel)

    def _publish(self, copy: int, in_parallel: InParallel) -> None:
        """Write one copy to each store. Raises CSDRuntimeError if a store has a later commit, which has to stay."""
        sequence = self.job.superblock.sequence
        if any(store.current and store.current.sequence > sequence for store in self._stores):
            raise CSDRuntimeError(f"the commit of step {self.job.step} is out of date: a later one was published")
        # A second attempt writes the same bytes again, so it does not matter how far the first one got.
        in_parallel([functools.partial(store.publish, staged, copy) for store, staged in self._pairs()])

    def _pairs(self) -> Iterable[tuple[StoreFile, Staged]]:
        return zip(self._stores, self._staged, strict=True)


class Background:
    """Runs commits, or parts of them, one after another on background threads.

    The constructor starts the threads, so that no commit fails for lack of a thread, and raises CSDRuntimeError if the
    system refuses. Only `start()` uses them. No finalizer may call `start()`: the garbage collector may run a finalizer
    on a thread that holds locks of the pool. `wait()` does remaining work on the calling thread.
    """

    def __init__(self, n_devices: int) -> None:
        self._pool = running_pool(1 + n_devices, "csd_optim")
        self._work: Work | None = None
        self._name = ""
        self._running: Flag | None = None  # the work on the pool, until it has ended
        self._holds_steps = True  # a step must not begin before the work is done
        self._to_retry = False  # the work has failed, or was never started
        # The number of commits, or halves of rounds, that start() has begun; and that have ended.
        self.begun: int = 0
        self.ended: int = 0
        self.on_progress: Callable[[], None] = lambda: None  # called on any thread when more is durable, or has ended

    def start(self, name: str, work: Work, *, holds_steps: bool = True) -> None:
        """Wait for the previous work, then start `work`, which is retried until it succeeds. Raises as wait().

        `holds_steps`: see wait_for_step().
        """
        self.wait()
        self._name, self._work, self._holds_steps = name, work, holds_steps
        self._to_retry, self._running = True, Flag()
        try:
            self._pool.submit(self._run, work, self._running)
        except RuntimeError:  # at interpreter shutdown pools take no work: wait() runs it
            self._running = None
        else:
            self.begun += 1

    def _run(self, work: Work, running: Flag) -> None:
        with contextlib.suppress(BaseException):  # wait() tries again, and raises if that fails, too
            work(self._in_parallel)
            self._to_retry = False
        self.ended += 1
        running.set()
        self.on_progress()

    def wait_for_step(self) -> None:
        """As wait(), before a step; does not wait for work that does not hold steps."""
        if self._holds_steps or self.idle:
            self.wait()

    def _await(self) -> None:
        """Return when no work is running on the pool."""
        if self._running:
            self._running.wait()

    @property
    def idle(self) -> bool:
        return self._running is None or self._running.is_set

    def run(self, name: str, work: Work) -> None:
        """Run `work` on the calling thread, after the previous work. Raises CSDOSError."""
        self.wait()
        self._name, self._work, self._holds_steps, self._to_retry = name, work, True, True
        self.wait()

    def wait(self) -> None:
        """Wait until the last work is done. Raises CSDOSError if it failed; every call tries again."""
        if self._work is None:
            return
        self._await()  # an interrupt (KeyboardInterrupt) here leaves the work running
        if self._to_retry:
            try:
                self._work(lambda calls: [call() for call in calls])
            except CSDLostError:
                raise
            except CSDOSError as e:
                raise CSDOSError(
                    e.errno, f"{self._name} cannot be committed yet: {e.strerror}; the next call tries again"
                ) from e
        self._work, self._to_retry = None, False

    def succeeds(self) -> bool:
        """Wait for the end of the last work, and return whether it has succeeded. Does not retry. On any thread."""
        self._await()
        return not self._to_retry

    def discard(self) -> None:
        """Wait until no work is running, and forget failed work, which is then not retried."""
        self._await()
        self._work, self._to_retry = None, False

    def _in_parallel(self, calls: Iterable[Callable[[], Any]]) -> list[Any]:
        """Run all calls, even if some fail, and return their results. At the end raises the first failure."""
        futures = [self._pool.submit(call) for call in calls]
        wait(futures)
        return [f.result() for f in futures]

    def close(self) -> None:
        self._pool.shutdown()


@dataclass(frozen=True)
class Pin:
    """Protects the slots of a commit from being overwritten while somebody, such as a snapshot, copies them."""

    sequence: float  # of the commit; the steps after a later commit overwrite its slots
    done: Future[Any]  # completes when the copy is finished
    hurry: threading.Event = field(default_factory=threading.Event)  # set when somebody waits for the copy


class Pins:
    """All copies of commits under way."""

    def __init__(self) -> None:
        self._pins: list[Pin] = []

    def __bool__(self) -> bool:
        return bool(self._pins)

    def add(self, pin: Pin) -> None:
        self._pins.append(pin)

    def wait_before(self, sequence: float) -> None:
        """Wait until no copy reads the slots that are overwritten after the commit with this sequence."""
        for pin in self._pins:
            if sequence > pin.sequence:
                pin.hurry.set()
                wait([pin.done])
        self._pins = [pin for pin in self._pins if not pin.done.done()]

    def end(self) -> None:
        """Ask all copies to hurry, and wait until they have finished."""
        for pin in (pins := [*self._pins]):
            pin.hurry.set()
        wait([pin.done for pin in pins])
