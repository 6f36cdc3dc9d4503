"""Ctrl-C, and every other signal that Python code handles, is deferred until a step is complete.

While a step waits for other machines the delay is bounded, see interruptible().
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

GRACE = 5.0  # seconds after Ctrl-C before a wait for other machines is given up

_ALL = sorted(signal.valid_signals())
_interrupts: list[list[FrameType | None]] = []  # by deferral of a Ctrl-C that raises: where it has arrived


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Defer the handlers of signals that arrive inside until the context exits. A no-op outside the main thread.

    Python runs signal handlers in the main thread only.
    """
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in _ALL:
                if callable(handler := signal.getsignal(number)):  # otherwise ignored, or the system's default action
                    stack.enter_context(_deferred(number, handler))
        yield


@contextlib.contextmanager
def _deferred(number: int, handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    deferring = True
    arrived: list[FrameType | None] = []
    raises = _raises(handler)

    def defer(signum: int, frame: FrameType | None) -> None:
        # Forwards once the step is over: another handler's exception may prevent this one from being uninstalled.
        arrived.append(frame) if deferring else handler(signum, frame)

    defer.raises = raises  # type: ignore[attr-defined]
    is_interrupt = raises and number == signal.SIGINT
    try:
        _interrupts.extend([arrived] if is_interrupt else [])
        signal.signal(number, defer)
        yield
    finally:
        deferring = False
        signal.signal(number, handler)
        _interrupts[:] = [other for other in _interrupts if other is not arrived]
        if arrived:
            handler(number, arrived[-1])


def raise_deferred() -> None:
    """Raise KeyboardInterrupt if Ctrl-C has arrived and is deferred: for steps that take long, which are undone then.

    A no-op outside the main thread.
    """
    if threading.current_thread() is threading.main_thread() and any(_interrupts):
        raise KeyboardInterrupt


def _raises(handler: Any) -> bool:
    """Return whether this handler raises KeyboardInterrupt on Ctrl-C, now or at the end of a step."""
    return handler is signal.default_int_handler or getattr(handler, "raises", False)


@contextlib.contextmanager
def interruptible(give_up: Callable[[], None]) -> Iterator[None]:
    """Call `give_up` on a background thread, GRACE seconds after Ctrl-C or at a second Ctrl-C.

    For a main thread that blocks in native code, where Python runs no signal handler. Does nothing outside the main
    thread, or if Ctrl-C does not raise KeyboardInterrupt.
    """
    if threading.current_thread() is not threading.main_thread() or not _raises(signal.getsignal(signal.SIGINT)):
        yield
        return
    watcher = _watcher(os.getpid())
    previous_fd = signal.set_wakeup_fd(watcher.write_fd, warn_on_full_buffer=False)
    try:
        with watcher.lock:
            watcher.give_up, watcher.previous_fd = give_up, previous_fd
        yield
    finally:
        with watcher.lock:
            watcher.give_up = watcher.interrupted_at = None
        signal.set_wakeup_fd(previous_fd)


class _Watcher:
    """A process's background thread that receives the numbers of signals as they arrive, through a wakeup pipe."""

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.write_fd, False)
        self.lock = threading.Lock()
        self.give_up: Callable[[], None] | None = None
        self.interrupted_at: float | None = None  # time of the first Ctrl-C
        self.previous_fd = -1  # the wakeup fd installed before, for example asyncio's: signals are forwarded to it
        threading.Thread(target=self._run, daemon=True, name="csd_optim signals").start()

    def _run(self) -> None:
        while True:
            since = self.interrupted_at
            timeout = None if since is None else max(0.0, since + GRACE - time.monotonic())
            numbers = os.read(self._read_fd, 64) if select.select([self._read_fd], [], [], timeout)[0] else b""
            with self.lock, contextlib.suppress(OSError):
                if self.give_up and signal.SIGINT in numbers and self.interrupted_at is None and GRACE:
                    self.interrupted_at = time.monotonic()
                elif self.give_up and (signal.SIGINT in numbers or (not numbers and self.interrupted_at == since)):
                    self.give_up()
                    self.give_up = self.interrupted_at = None
                if numbers and self.previous_fd >= 0:
                    os.write(self.previous_fd, numbers)


@functools.cache
def _watcher(_: int) -> _Watcher:
    return _Watcher()
