"""When the last step of an engine began and ended, and the trace if the user asks for one."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .. import settings
from .parts import NativeEngine
from .trace import Span, Trace


class Timeline:
    """The last step of one engine: times of time.perf_counter()."""

    def __init__(self, native: NativeEngine) -> None:
        self.began: float = 0.0  # 0: no step yet
        self.ended: float = 0.0  # 0: not ended
        self.is_undone: bool = False
        self.model_spans: list[Span] | None = [] if settings.trace() else None  # forward and backward
        self.is_traced: bool = bool(settings.trace())
        self.accelerator_spans: list[Span] = []  # updates on the accelerator, if traced
        self._native = native
        self._trace: Trace | None = None
        self._is_written = True

    def open(self, devices: Sequence[str]) -> None:
        """Begin a trace of these devices if settings ask for one. Raises CSDOSError."""
        if path := settings.trace():
            self._trace = Trace(path, devices)
            self._native.events()  # the first call makes the native engine record events

    def begin(self, step: int) -> None:
        """Note that a step begins after `step` completed ones."""
        self.write(step)
        self.began, self.ended, self.is_undone, self._is_written = time.perf_counter(), 0.0, False, False

    def end(self, *, is_undone: bool = False) -> None:
        self.ended, self.is_undone = time.perf_counter(), is_undone

    def write(self, step: int) -> None:
        """Write the last step to the trace, once all states are written, so that all events are known."""
        if self._trace and not self._is_written:
            self._native.wait_writes()
            name = "undone" if self.is_undone else f"step {step}"
            events, end = self._native.events(), self.ended or time.perf_counter()
            self._trace.step(name, self.began, end, events, self.model_spans or [], self.accelerator_spans)
            self._is_written = True

    def close(self) -> None:
        if self._trace:
            self._trace.close()
