"""Ctrl-C, and other signals that programs turn into exceptions, wait until a step is whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Handlers of signals that arrive within run at the end. Python runs handlers in the main thread only."""
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in HELD:
                stack.enter_context(_held(number))
        yield


@contextlib.contextmanager
def _held(number: signal.Signals) -> Iterator[None]:
    handler = signal.getsignal(number)
    if not callable(handler):  # ignored, or the system's own business
        yield
        return
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
