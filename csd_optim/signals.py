"""Ctrl-C, and every other signal that Python code handles, waits until a step is whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_ALL = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Signals that arrive within are handled at the end. Python handles signals in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    handlers = {number: h for number in _ALL if callable(h := signal.getsignal(number))}
    try:
        for number in handlers:
            signal.signal(number, lambda *what: arrived.append(what))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for which, frame in arrived:
            handlers[signal.Signals(which)](which, frame)
