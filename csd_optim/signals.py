"""Ctrl-C, and every other signal that Python code handles, waits until a step is whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_ALL = sorted(signal.valid_signals())


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Handlers of signals that arrive within run at the end. Python runs handlers in the main thread only."""
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in _ALL:
                if callable(handler := signal.getsignal(number)):  # else ignored, or the system's own business
                    stack.enter_context(_held(number, handler))
        yield


@contextlib.contextmanager
def _held(number: int, handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    holding = True
    arrived: list[FrameType | None] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        # Forwards once the step is over: another handler's exception may come before this one is taken out again.
        arrived.append(frame) if holding else handler(signum, frame)

    try:
        signal.signal(number, hold)
        yield
    finally:
        holding = False
        signal.signal(number, handler)
        if arrived:
            handler(number, arrived[-1])
