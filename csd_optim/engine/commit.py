"""A commit: a step becomes the durable one on all devices, or on none, beside the next forward.

copy 0    all tiles and residuals reach the disk (after a flush that failed: are read back from there, see proof.py),
          then the first copy of manifest, table and superblock; a crash in between finds the new step on some devices,
          and the one before, in copy 1, on all of them
copy 1    so does the second copy: now what the step before had may be overwritten

Of a step that several ranks make together, copy 1 waits until the ranks have told each other that all of them have
copy 0: see DurableEngine.confirm().
"""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from ..errors import CSDLostError, CSDOSError
from ..store.file import Staged, StoreFile
from .proof import prove

InParallel = Callable[[Iterable[Callable[[], Any]]], list[Any]]
Work = Callable[[InParallel], None]


class Commit:
    """One commit: `prepare()`, and then `complete()`, each to be called until it raises nothing.

    `stage`: what is to be written to each store. It may write, where the commit before has nothing, and is called
    again if it raises something.
    """

    def __init__(self, stores: list[StoreFile], stage: Callable[[InParallel], list[Staged]]) -> None:
        self._stores, self._stage = stores, stage
        self._staged: list[Staged] = []
        self._prepared = False

    def prepare(self, in_parallel: InParallel) -> None:
        """Raises CSDLostError if a flush has failed and something is not there: then every call does."""
        if self._prepared:  # copy 1 may be half written by now: copy 0 is all that there is
            return
        if lost := next((store.lost for store in self._stores if store.lost), ""):
            raise CSDLostError(errno.EIO, lost)
        if not self._staged:
            self._staged = self._stage(in_parallel)
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

    def _in_parallel(self, calls: Iterable[Callable[[], Any]]) -> list[Any]:
        """All of them, also if one fails; then raises that."""
        futures = [self._pool.submit(call) for call in calls]
        wait(futures)
        return [f.result() for f in futures]

    def close(self) -> None:
        self._pool.shutdown()
