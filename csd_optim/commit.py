"""A commit: a step becomes the durable one on all devices, or on none, beside the next forward.

copy 0    all tiles and residuals reach the disk, then the first copy of manifest, table and superblock; a crash in
          between finds the new step on some devices, and the one before, in copy 1, on all of them
copy 1    so does the second copy: now what the step before had may be overwritten
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from .errors import CSDOSError
from .store import Staged, StoreFile

InParallel = Callable[[Iterable[Callable[[], Any]]], list[Any]]


class Commit:
    """One commit, to be called until it raises nothing. `stage`: what is to be written to each store.

    It may write, where the commit before has nothing, and is called again if it raises something.
    """

    def __init__(
        self,
        name: str,
        stores: list[StoreFile],
        stage: Callable[[InParallel], list[Staged]],
        done: Callable[[], None],
    ) -> None:
        self.name = name
        self._stores, self._stage, self._done = stores, stage, done
        self._staged: list[Staged] | None = None

    def __call__(self, in_parallel: InParallel) -> None:
        if self._staged is None:
            self._staged = self._stage(in_parallel)
        # A second attempt writes what the first may have written, and the same again.
        pairs = list(zip(self._stores, self._staged, strict=True))
        for copy in range(2):
            in_parallel([functools.partial(store.publish, staged, copy) for store, staged in pairs])
        self._done()


class Background:
    """Runs commits one after another, on threads of its own.

    Only `start()` uses them, and never from a finalizer: the collector may call one while its thread holds locks of
    the pool. What is left to do is done on the thread that waits.
    """

    def __init__(self, n_devices: int) -> None:
        self._pool = ThreadPoolExecutor(1 + n_devices, thread_name_prefix="csd_optim")  # starts threads when needed
        self._commit: Commit | None = None
        self._running: Future[None] | None = None

    def start(self, commit: Commit) -> None:
        """Starts a commit after the one before. Raises what that one raised."""
        self.wait()
        self._commit = commit
        with contextlib.suppress(RuntimeError):  # the interpreter shuts down and has no more threads: wait() does it
            self._running = self._pool.submit(commit, self._in_parallel)

    @property
    def idle(self) -> bool:
        return self._running is None or self._running.done()

    def run(self, commit: Commit) -> None:
        """The same on the calling thread, to the end. Raises CSDOSError."""
        self.wait()
        self._commit = commit
        self.wait()

    def wait(self) -> None:
        """Returns when the last commit is durable. Raises CSDOSError if it is not; every call tries again."""
        if self._commit is None:
            return
        again = self._running is None  # it has failed before
        if self._running:
            wait([self._running])  # an interrupt here leaves it running
            again, self._running = self._running.exception() is not None, None
        if again:
            try:
                self._commit(lambda calls: [call() for call in calls])
            except CSDOSError as e:
                raise CSDOSError(
                    e.errno, f"{self._commit.name} cannot be committed yet: {e.strerror}; the next call tries again"
                ) from e
        self._commit = None

    def _in_parallel(self, calls: Iterable[Callable[[], Any]]) -> list[Any]:
        """All of them, also if one fails; then raises that."""
        futures = [self._pool.submit(call) for call in calls]
        wait(futures)
        return [f.result() for f in futures]

    def close(self) -> None:
        self._pool.shutdown()
