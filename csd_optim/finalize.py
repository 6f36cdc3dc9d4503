"""Closes optimizers silently when they are garbage-collected or still open at exit; on a thread where needed."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from .errors import CSDError

CLOSE_SECONDS = 5.0  # at most this long does the finalizer block on the thread that closes a busy engine
_threads: set[threading.Thread] = set()


class Closable(Protocol):
    """What the finalizer needs of an engine."""

    @property
    def idle(self) -> bool:
        """Whether close() may be called on any thread, because it has nothing to wait for."""

    def close(self) -> None: ...


def call_at_end(owner: object, function: Callable[..., None], *arguments: Any) -> weakref.finalize[Any, Any]:
    """Return a finalizer: it calls `function` once `owner` is garbage-collected, or at exit, last made first.

    weakref registers its own exit function only once, and a process that multiprocessing forks has lost it: from Python
    3.13 on such a process begins by forgetting all exit functions, and runs those that it registers itself.
    """
    finalizer = weakref.finalize(owner, function, *arguments)
    atexit.register(finalizer)  # does nothing once the finalizer was called or detached
    return finalizer


def close_quietly(engine: Closable) -> None:
    """Close the engine of a dropped optimizer, whose finalizer this is, and ignore any CSDError."""

    def close() -> None:
        with contextlib.suppress(CSDError):
            engine.close()

    if engine.idle:
        return close()
    # The garbage collector may run this on the very thread that close() waits for, or while this thread holds a lock
    # that the other one needs.
    closer = threading.Thread(target=close, name="csd_optim closes")
    try:
        closer.start()
    except RuntimeError:  # the interpreter is shutting down, so no other thread holds a lock
        return close()
    _threads.add(closer)
    closer.join(CLOSE_SECONDS)


def wait_for_dropped() -> None:
    """Wait until all optimizers dropped so far are closed."""
    for thread in list(_threads):
        thread.join()
        _threads.discard(thread)
