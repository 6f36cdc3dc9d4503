"""Optimizers that were dropped, or forgotten at exit, are closed without a word: if need be, on a thread."""

from __future__ import annotations

import contextlib
import threading
from typing import Protocol

from .errors import CSDError

CLOSE_SECONDS = 5.0  # that a dropped optimizer waits for its last commit, if it cannot know that it may
_threads: set[threading.Thread] = set()


class Closable(Protocol):
    """An engine."""

    @property
    def idle(self) -> bool:
        """May close() be called on any thread? It waits for nothing then."""

    def close(self) -> None: ...


def close_quietly(engine: Closable) -> None:
    """The finalizer of an optimizer."""

    def close() -> None:
        with contextlib.suppress(CSDError):
            engine.close()

    if engine.idle:
        return close()
    # The collector may call this on the very thread for which close() waits, or while this one holds what that needs.
    closer = threading.Thread(target=close, name="csd_optim closes")
    try:
        closer.start()
    except RuntimeError:  # the interpreter shuts down: nobody holds anything
        return close()
    _threads.add(closer)
    closer.join(CLOSE_SECONDS)


def wait_for_dropped() -> None:
    """Returns when those are closed that have been dropped so far."""
    for thread in list(_threads):
        thread.join()
        _threads.discard(thread)
