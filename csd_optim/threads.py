"""Threads: a pool whose threads all run from the start, the error of a system that refuses one, and what wakes them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from .errors import CSDRuntimeError

POLL_SECONDS = 0.1  # between two looks at a Flag whose lock an interrupt has left locked


class Flag:
    """Set by one thread, and awaited by others.

    Ctrl-C may interrupt whoever waits, at any instruction. Waiting for a future, or an event, could then leave its lock
    locked, and nobody else would get on. Here the lock beside the flag only spares polling.
    """

    def __init__(self) -> None:
        self.is_set: bool = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        if not self.is_set:
            self.is_set = True
            self._lock.release()

    def wait(self) -> None:
        while not self.is_set:
            if self._lock.acquire(timeout=POLL_SECONDS):
                self._lock.release()


class SharedCondition(threading.Condition):
    """A condition that makes more conditions on its lock: each wakes only its own waiters."""

    def __init__(self) -> None:
        self._shared = threading.RLock()
        super().__init__(self._shared)

    def condition(self) -> threading.Condition:
        return threading.Condition(self._shared)


def running_pool(n: int, name: str) -> ThreadPoolExecutor:
    """Return a pool of `n` threads that have all started. Raises CSDRuntimeError if the system refuses one.

    ThreadPoolExecutor itself starts threads when work is submitted, and queues the work first: if a thread cannot be
    started, submit() raises although the work may run later.
    """
    pool, all_run = ThreadPoolExecutor(n, thread_name_prefix=name), threading.Barrier(n + 1)
    try:
        for _ in range(n):
            pool.submit(all_run.wait)
        all_run.wait()
    except BaseException as e:
        all_run.abort()
        pool.shutdown()
        if isinstance(e, RuntimeError):
            raise _refused(e) from e
        raise
    return pool


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises CSDRuntimeError if the system refuses it."""
    try:
        thread.start()
    except RuntimeError as e:
        raise _refused(e) from e


def _refused(e: RuntimeError) -> CSDRuntimeError:
    return CSDRuntimeError(f"{e}: raise the limit on processes (ulimit -u, or pids.max of the container)")
