"""A commit: a step becomes the durable one on all devices, or on none, beside the next forward.

copy 0    all tiles and residuals reach the disk (after a flush that failed: are read back from there, see proof.py),
          then the first copy of manifest, table and superblock; a crash in between finds the new step on some devices,
          and the one before, in copy 1, on all of them
copy 1    so does the second copy: now what the step before had may be overwritten

Of a step that several ranks make together, copy 1 waits until the ranks have told each other that all of them have
copy 0: see Engine.confirm().
"""

from __future__ import annotations

import contextlib
import errno
import functools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import CSDLostError, CSDOSError
from ..store.file import Staged, StoreFile
from ..store.format import Record, Superblock, pack_table, pack_tiles
from .proof import prove
from .residuals import Residuals, Spaces

if TYPE_CHECKING:
    from .engine import Engine

InParallel = Callable[[Iterable[Callable[[], Any]]], list[Any]]
Work = Callable[[InParallel], None]


@dataclass
class CommitJob:
    """What a commit carries, as it was when the commit began; made on the thread of who commits.

    Of the engine itself `stage()` looks only at the tiles, which nobody moves on before the commit has come to its end.
    """

    engine: Engine
    residuals: Residuals
    stores: dict[int, StoreFile]  # by device: the durable ones
    superblock: Superblock  # of device 0, without its regions
    manifests: dict[int, bytes]  # by device; empty: those that are there stay
    extents_on: dict[int, list[dict[str, Any]]]  # by device: as manifests have them
    steps: np.ndarray[Any, Any]  # `step` of each parameter
    record: Record
    new_residuals: dict[int, torch.Tensor]  # by parameter: those to be written
    after: dict[torch.device, Any]  # events on accelerators, by which these are as they are to be written
    spaces: Spaces  # of the others; of all of them, when the commit is staged

    @property
    def step(self) -> int:
        return self.superblock.step

    def stage(self, in_parallel: InParallel) -> list[Staged]:
        """What is to be written to each store. Writes residuals, where the commit before has nothing.

        On the thread of the commit; to be called again if it raises something.
        """
        engine = self.engine
        engine.check_whole()
        if engine.windows.open.any():
            engine.windows.sync()  # before their sums are taken: what these say is on the disk then
            engine.remap()  # what is committed is not to be written to
        else:
            engine.wait_writes()
        tiles = [engine.tiles_of(extent) for extent in engine.extents]
        if self.new_residuals:
            write = self.residuals.write
            for written in in_parallel(
                [functools.partial(write, d, store, self.new_residuals, self.after) for d, store in self.stores.items()]
            ):
                self.spaces.update(written)
        written_bytes = engine.written_bytes()
        staged = []
        for d, store in self.stores.items():
            parts = [
                pack_tiles(about, states[extent.devices == d], sums[extent.devices == d])
                for extent, about, (states, sums) in zip(engine.extents, self.extents_on[d], tiles, strict=True)
            ]
            here = [self.spaces[param] for param in sorted(self.spaces) if self.residuals.rooms[param].device == d]
            table = pack_table(parts, self.steps, replace(self.record, written_bytes=written_bytes[d]), here)
            staged.append(store.stage(replace(self.superblock, device=d), self.manifests.get(d), table))
        return staged


class Commit:
    """One commit: `prepare()`, and then `complete()`, each to be called until it raises nothing."""

    def __init__(self, job: CommitJob) -> None:
        self.job = job
        self._stores = [*job.stores.values()]
        self._staged: list[Staged] = []
        self._prepared = False

    def prepare(self, in_parallel: InParallel) -> None:
        """Raises CSDLostError if a flush has failed and something is not there: then every call does."""
        if self._prepared:  # copy 1 may be half written by now: copy 0 is all that there is
            return
        if lost := next((store.lost for store in self._stores if store.lost), ""):
            raise CSDLostError(errno.EIO, lost)
        if not self._staged:
            self._staged = self.job.stage(in_parallel)
        in_parallel([functools.partial(prove, *pair) for pair in self._pairs() if pair[0].in_doubt])
        self._publish(0, in_parallel)
        self._prepared = True

    def complete(self, in_parallel: InParallel) -> None:
        self._publish(1, in_parallel)

    def _publish(self, copy: int, in_parallel: InParallel) -> None:
        # A second attempt writes what the first may have written, and the same again.
        in_parallel([functools.partial(store.publish, staged, copy) for store, staged in self._pairs()])

    def _pairs(self) -> Iterable[tuple[StoreFile, Staged]]:
        return zip(self._stores, self._staged, strict=True)


class Background:
    """Runs commits, or parts of them, one after another, on threads of its own.

    Only `start()` uses them, and never from a finalizer: the collector may call one while its thread holds locks of
    the pool. What is left to do is done on the thread that waits.
    """

    def __init__(self, n_devices: int) -> None:
        self._pool = ThreadPoolExecutor(1 + n_devices, thread_name_prefix="csd_optim")  # starts threads when needed
        self._work: Work | None = None
        self._name = ""
        self._running: Future[None] | None = None

    def start(self, name: str, work: Work) -> None:
        """Starts `work`, to be called until it raises nothing, after the one before. Raises what that one raised."""
        self.wait()
        self._name, self._work = name, work
        with contextlib.suppress(RuntimeError):  # the interpreter shuts down and has no more threads: wait() does it
            self._running = self._pool.submit(work, self._in_parallel)

    @property
    def idle(self) -> bool:
        return self._running is None or self._running.done()

    def run(self, name: str, work: Work) -> None:
        """The same on the calling thread, to the end. Raises CSDOSError."""
        self.wait()
        self._name, self._work = name, work
        self.wait()

    def wait(self) -> None:
        """Returns when the last work is done. Raises CSDOSError if it is not; every call tries again."""
        if self._work is None:
            return
        again = self._running is None  # it has failed before
        if self._running:
            wait([self._running])  # an interrupt here leaves it running
            again, self._running = self._running.exception() is not None, None
        if again:
            try:
                self._work(lambda calls: [call() for call in calls])
            except CSDLostError:
                raise
            except CSDOSError as e:
                raise CSDOSError(
                    e.errno, f"{self._name} cannot be committed yet: {e.strerror}; the next call tries again"
                ) from e
        self._work = None

    def forget(self) -> None:
        """Waits until nothing is going on, whatever becomes of that: nobody tries again."""
        if self._running:
            wait([self._running])
        self._work = self._running = None

    def _in_parallel(self, calls: Iterable[Callable[[], Any]]) -> list[Any]:
        """All of them, also if one fails; then raises that."""
        futures = [self._pool.submit(call) for call in calls]
        wait(futures)
        return [f.result() for f in futures]

    def close(self) -> None:
        self._pool.shutdown()


@dataclass(frozen=True)
class Pin:
    """Somebody copies what a commit holds: it is not to be overwritten meanwhile."""

    sequence: float  # of the commit; what follows a later one writes over it
    done: Future[Any]
    wanted: threading.Event = field(default_factory=threading.Event)  # somebody waits for it
