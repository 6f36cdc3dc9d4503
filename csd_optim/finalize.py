"""Optimizers that were dropped, or forgotten at exit, are closed without a word: if need be, on a thread."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from .errors import CSDError

if TYPE_CHECKING:
    from .engine.engine import Engine

CLOSE_SECONDS = 5.0  # that a dropped optimizer waits for its last commit, if it cannot know that it may
_threads: set[threading.Thread] = set()


def close_quietly(engine: Engine) -> None:
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
