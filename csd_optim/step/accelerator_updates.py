"""Accelerator updates: the part of a step that runs on the accelerator, for parameters with states in its memory.

The updates are queued on the current streams, behind the backward pass and before whatever the program queues next, so
nothing has to wait for them, as with torch's optimizers. They run concurrently with the tiles of the devices. Within
step() they are queued bit by bit while tiles travel, because a thread that is busy queueing cannot feed the devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..accelerator import on, record_event, wait_for
from ..engine.placing.updaters import AcceleratorUpdater, updater_of
from ..engine.trace import Span
from ..errors import CSDMemoryError
from ..kernels.update import UpdateRow
from ..params.grad_source import GradSource
from ..params.param_state import ParamState
from ..params.strides import flat


@dataclass
class AcceleratorUpdate:
    """The update of one parameter."""

    param_state: ParamState
    source: GradSource
    rule: int
    constants: Sequence[float]

    @property
    def device(self) -> torch.device:
        return self.source.param.device

    def row(self) -> UpdateRow:
        """Return the tensors of the update. The gradient may be on another device, if the parameter was moved."""
        state, source = self.param_state, self.source
        param = None if state.in_place else source.param.data
        return UpdateRow(source.grad, source.grad_dtype, _states(state), param, self.constants)


def _states(param_state: ParamState) -> list[torch.Tensor]:
    """Return the states, 1-D fp32, master first. Writes change no version counter: the step counts them."""
    if param_state.accelerator_copy:
        return param_state.accelerator_copy.states
    return [flat(param_state.windows[name].data) for name in param_state.sections]


@contextlib.contextmanager
def _raising_memory_error() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as e:
        raise CSDMemoryError(f"no memory for a step on the accelerator: {e}") from None


def parameters_of_new(updates: Sequence[AcceleratorUpdate]) -> dict[int, torch.Tensor]:
    """Return copies, by row, of the parameters that have no states yet, from which an undo restores them.

    Raises CSDMemoryError.
    """
    with _raising_memory_error():
        new = [u.param_state for u in updates if u.param_state.is_new]
        return {state.index: state.local.detach().clone() for state in new}


class Queued:
    """Updates that were queued together, enclosed by two events on each accelerator."""

    def __init__(self, params: int, devices: Sequence[torch.device], *, timed: bool) -> None:
        """`timed`: wait for everything queued before, so that the time of the beginning is known."""
        self._params = params
        self._events = {d: (torch.Event(d, enable_timing=True), torch.Event(d, enable_timing=True)) for d in devices}
        for device, (first, _) in self._events.items():
            first.record(torch.accelerator.current_stream(device))
            if timed:
                wait_for(first)
        self._began = time.perf_counter()

    def end(self) -> None:
        for device, (_, last) in self._events.items():
            last.record(torch.accelerator.current_stream(device))

    def seconds(self, device: torch.device) -> float:
        """Return the seconds that an accelerator took, 0 if it has no timers. Waits until the updates are done."""
        if device not in self._events:
            return 0.0
        first, last = self._events[device]
        wait_for(last)
        try:
            return float(first.elapsed_time(last)) / 1e3
        except RuntimeError:  # a back end whose events have no timers
            return 0.0

    @property
    def span(self) -> Span:
        """Name, begin and end (time.perf_counter()), valid if `timed`. Waits until the updates are done."""
        seconds = max(self.seconds(d) for d in self._events) or float("inf")
        return f"{self._params} parameters", self._began, min(time.perf_counter(), self._began + seconds)


class AcceleratorUpdates:
    """The updates of one step on the accelerator. The constructor queues nothing, and may raise CSDMemoryError.

    Then call allocate() and begin(), and queue_next() until all updates are queued, or queue_all(); or launch_one()
    with each gradient, if gradients arrive one by one. Without `updates` all methods do nothing.

    `exact`: see updater_of(). `undoes`: keep the previous states for undo().
    """

    def __init__(self, updates: Sequence[AcceleratorUpdate] = (), *, exact: bool = True, undoes: bool = True) -> None:
        self.undoes = undoes
        self.has_updates: bool = bool(updates)
        self.launched: bool = False
        self.params: int = 0  # elements of the parameters whose updates were queued
        self._updates = {u.param_state.index: u for u in updates}
        self._rows: dict[int, UpdateRow] = {}  # by row: what allocate() has prepared
        self._before: list[tuple[ParamState, list[torch.Tensor]]] = []
        self._queued: list[Queued] = []
        self._to_queue: Iterator[None] = iter(())  # queues one part per next()
        self._events: dict[int, Any] = {}  # by row: the event after which a queued row is updated
        self.commit_bytes: int = 0  # bytes of states copied to the host, to be stored in directories
        by_device: dict[torch.device, list[AcceleratorUpdate]] = {}
        for u in updates:
            by_device.setdefault(u.device, []).append(u)
        self._devices = [*by_device]
        self._streams = {d: torch.accelerator.current_stream(d) for d in by_device}  # scratch memory is theirs
        for u in updates:
            if u.param_state.is_new:  # initial states; other devices make theirs when they first update a parameter
                master, *others = _states(u.param_state)
                master.copy_(u.source.param)
                for state in others:  # a copy may still have the values of an undone step
                    state.zero_()
        with _raising_memory_error():
            self._updaters: dict[torch.device, AcceleratorUpdater] = {}
            for device, here in by_device.items():
                rounded = [u.source.grad_dtype for u in here if u.source.grad.dtype is not u.source.grad_dtype]
                largest, rounds_to = max(u.param_state.numel for u in here), rounded[0] if rounded else None
                self._updaters[device] = updater_of(device, {u.rule for u in here}, largest, rounds_to, exact=exact)
        self._nonfinite = [updater.nonfinite for updater in self._updaters.values()]

    @property
    def rows(self) -> Collection[int]:
        """The rows that are updated; empty after release_scratch()."""
        return self._updates.keys()

    def allocate(self) -> None:
        """Allocate the rest of the memory that begin() and queue_all() need. Raises CSDMemoryError."""
        for u in self._updates.values():
            self._allocate(u)

    def _allocate(self, u: AcceleratorUpdate) -> None:
        with _raising_memory_error():
            if self.undoes:
                # A copy needs no backup: the devices have the same states.
                before = [] if u.param_state.accelerator_copy else [state.clone() for state in _states(u.param_state)]
                self._before.append((u.param_state, before))
            self._rows[u.param_state.index] = self._updaters[u.device].prepare(u.row())

    def begin(self, *, timed: bool) -> None:
        """Get ready to queue the updates, on the streams that are current then. `timed`: see Queued."""
        if self.has_updates:
            self._to_queue = self._queue(timed=timed)

    def queue_next(self) -> None:
        """Queue one part of the updates, if some are left."""
        next(self._to_queue, None)

    def queue_all(self) -> None:
        """Queue all updates that are left."""
        for _ in self._to_queue:
            pass

    def event(self, row: int) -> Any:
        """Return the event after which a row is updated. Queues updates up to this row's if necessary."""
        if row not in self._events:
            for _ in self._to_queue:
                if row in self._events:
                    break
        return self._events[row]

    def _queue(self, *, timed: bool) -> Iterator[None]:
        self.launched = True
        queued = Queued(len(self._updates), self._devices, timed=timed)
        yield from self._update([*self._updates.values()])
        queued.end()
        self._queued.append(queued)

    def launch_one(self, row: int, grad: torch.Tensor, *, timed: bool = False) -> None:
        """Queue the update of one parameter with this gradient (of the parameter's shape). Raises CSDMemoryError.

        Backward may produce gradients on several streams. All updates run on one stream, as they share scratch memory.
        """
        u = self._updates[row]
        u = dataclasses.replace(u, source=dataclasses.replace(u.source, grad=flat(grad)))
        made_on, stream = torch.accelerator.current_stream(grad.device), self._streams[grad.device]
        stream.wait_stream(made_on)
        with on(stream):
            self._allocate(u)
            self.launched = True
            queued = Queued(1, [grad.device], timed=timed)
            for _ in self._update([u]):
                pass
            queued.end()
        made_on.wait_stream(stream)  # the gradient's memory belongs to this stream
        self._queued.append(queued)

    def _update(self, updates: Sequence[AcceleratorUpdate]) -> Iterator[None]:
        """Queue updates part by part: those of one device and rule together, in the order of `updates`."""
        alike: dict[tuple[torch.device, int], list[int]] = {}
        for u in updates:
            alike.setdefault((u.device, u.rule), []).append(u.param_state.index)
        for (device, rule), indices in alike.items():
            rows = [self._rows.pop(index) for index in indices]
            left = iter(zip(indices, rows, strict=True))
            for complete in self._updaters[device].queue(rule, rows):
                event = record_event(torch.accelerator.current_stream(device)) if complete else None
                for index, row in itertools.islice(left, complete):
                    self.params += row.grad.numel()
                    self._events[index] = event
                yield

    def release_scratch(self) -> list[int]:
        """Free scratch memory and references to gradients, once all is queued. Returns the rows that are updated."""
        rows = [*self._updates]
        self._to_queue = iter(())
        self._updates.clear()
        self._rows.clear()
        self._updaters.clear()
        return rows

    @property
    def changed(self) -> list[ParamState]:
        """The parameters whose states undo() restores."""
        return [param_state for param_state, _ in self._before] if self.launched else []

    def undo(self) -> None:
        """Restore the states from before queue_next(). The caller restores the parameters.

        May run on any thread and stream: waits for everything that was queued. Call wait() afterwards.
        """
        self.wait()
        for param_state, before in self._before:
            if param_state.accelerator_copy:
                param_state.accelerator_copy.is_known = False
                continue
            for state, kept in zip(_states(param_state), before, strict=True):
                state.copy_(kept)

    def wait(self) -> None:
        """Return when everything queued on the accelerators, by anyone, is done."""
        for device in self._devices:
            torch.accelerator.synchronize(device)

    def end(self) -> None:
        """Free all memory: the updates can no longer be undone."""
        self.release_scratch()
        self._before.clear()

    @property
    def spans(self) -> list[Span]:
        """The spans of all queued updates, valid if `timed`. Waits until the updates are done."""
        return [queued.span for queued in self._queued]

    def counters(self) -> dict[str, Any]:
        """Return counters for stats(), when all is done. `seconds`: of the busiest accelerator, 0 without timers."""
        seconds = max((sum(queued.seconds(d) for queued in self._queued) for d in self._devices), default=0.0)
        nonfinite = sum(int(n) for n in self._nonfinite)
        done = {"params": self.params, "nonfinite_grads": nonfinite, "seconds": seconds}
        return done | {"commit_bytes": self.commit_bytes}


NO_UPDATES = AcceleratorUpdates()
