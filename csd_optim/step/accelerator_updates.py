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
from typing import Any, NamedTuple

import torch

from ..accelerator import on, record_event, wait_for
from ..compression.dense import DenseTopK, sent_buffer
from ..engine.accelerator_codes import ParamCodes
from ..engine.placing.updaters import AcceleratorUpdater
from ..engine.trace import Span
from ..errors import CSDMemoryError
from ..kernels.codes import CodesRow
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
    key: int = 0  # of codes: see CodesRow
    topk: DenseTopK | None = None  # None: the gradient is dense

    @property
    def device(self) -> torch.device:
        return self.source.param.device

    @property
    def index(self) -> int:
        return self.param_state.index

    @property
    def codes(self) -> ParamCodes | None:
        """The states, if they are codes."""
        copy = self.param_state.accelerator_copy
        return copy.codes if copy else self.param_state.codes

    @property
    def states(self) -> list[torch.Tensor]:
        """The memory of the states. Writes change no version counter: the step counts them.

        fp32: one tensor per state, 1-D, the master first.
        """
        state = self.param_state
        if codes := self.codes:
            return [codes.memory]
        if state.accelerator_copy:
            return state.accelerator_copy.states
        return [flat(state.windows[name].data) for name in state.sections]

    def row(self) -> UpdateRow | CodesRow:
        """Return the tensors of the update. The gradient may be on another device, if the parameter was moved."""
        state, source = self.param_state, self.source
        if codes := self.codes:
            param, sections = source.param.data, codes.sections
            return CodesRow(source.grad, source.grad_dtype, param, sections, self.constants, self.key)
        param_or_none = None if state.in_place else source.param.data
        return UpdateRow(source.grad, source.grad_dtype, self.states, param_or_none, self.constants)

    def start(self) -> None:
        """Set the initial states. Devices set initial states when they first update a parameter."""
        if codes := self.codes:
            codes.start(self.source.param)
            return
        master, *others = self.states
        master.copy_(self.source.param)
        for state in others:  # a copy may still have the values of an undone step
            state.zero_()


class Before(NamedTuple):
    """What an undo needs of one parameter. Keeps no gradient alive."""

    param_state: ParamState
    copies: list[tuple[torch.Tensor, torch.Tensor]]  # memory of states and residual, and copies from before the step
    param: torch.Tensor | None  # its copy, if the states are complete together with the parameter alone
    edits: dict[str, torch.Tensor]  # states that the program had written, by name

    @classmethod
    def of(cls, u: AcceleratorUpdate, edits: dict[str, torch.Tensor]) -> Before:
        # A copy needs no backup: the devices have the same states.
        changed = [] if u.param_state.accelerator_copy else u.states
        if u.topk and u.topk.residual is not None:
            changed = [*changed, u.topk.residual]
        param = u.source.param.clone() if u.param_state.codes else None
        return cls(u.param_state, [(now, now.clone()) for now in changed], param, edits)

    def undo(self) -> None:
        state = self.param_state
        for now, kept in self.copies:
            now.copy_(kept)
        if state.accelerator_copy:
            state.accelerator_copy.is_known = False
        if state.codes and state.decoded:
            state.decoded.drop([state.index])
            if self.edits:
                state.decoded.replace(state.index, self.edits)


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

    `undoes`: keep the previous states for undo().
    """

    def __init__(self, updates: Sequence[AcceleratorUpdate] = (), *, undoes: bool = True) -> None:
        self.undoes = undoes
        self.has_updates: bool = bool(updates)
        self.launched: bool = False
        self.params: int = 0  # elements of the parameters whose updates were queued
        self._updates = {u.index: u for u in updates}
        self._rows: dict[int, UpdateRow | CodesRow] = {}  # by row: what allocate() has prepared
        self._before: dict[int, Before] = {}  # by row
        self._coded = [u.param_state for u in updates if u.param_state.codes]
        self._encoded: dict[int, tuple[ParamCodes, torch.Tensor]] = {}  # by row: codes and parameter, with edits
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
            if u.param_state.is_new:
                u.start()
        with _raising_memory_error():
            self._sent = {d: sent_buffer([u.topk for u in here if u.topk], d) for d, here in by_device.items()}
            self._updaters: dict[torch.device, AcceleratorUpdater] = {}
            for device, here in by_device.items():
                rules, coded = ({u.rule for u in here if bool(u.codes) is is_coded} for is_coded in (False, True))
                self._updaters[device] = AcceleratorUpdater(device, rules, coded)
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
        state = u.param_state
        edits = state.decoded.edits(state.index) if state.codes and state.decoded else {}
        with _raising_memory_error():
            if self.undoes:
                self._before[u.index] = Before.of(u, edits)
            if edits and state.codes:
                self._encoded[u.index] = state.codes.encoded(u.source.param, edits)
            row = self._rows[u.index] = u.row()
            if not u.topk:
                grad = self._updaters[u.device].prepare(row.grad, row.link_dtype)
                self._rows[u.index] = row._replace(grad=grad)

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
        """Queue updates part by part: those of one device and rule together, in the order of `updates`.

        Parameters with Top-K come one after another, as they share the memory of the dense gradient.
        """
        alike: dict[tuple[torch.device, int, bool, int], list[AcceleratorUpdate]] = {}
        for u in updates:
            alike.setdefault((u.device, u.rule, u.codes is not None, u.index if u.topk else -1), []).append(u)
        for (device, rule, is_coded, _), some in alike.items():
            rows = [self._row_to_queue(u) for u in some]
            left = iter(zip(some, rows, strict=True))
            updater = self._updaters[device]
            queued = updater.queue_codes(rule, rows) if is_coded else updater.queue(rule, rows)
            for complete in queued:
                event = record_event(torch.accelerator.current_stream(device))
                for u, row in itertools.islice(left, complete):
                    self.params += row.grad.numel()
                    self._events[u.index] = event
                yield

    def _row_to_queue(self, u: AcceleratorUpdate) -> Any:
        """Return an update's tensors, an UpdateRow or CodesRow, once what the update begins with is queued."""
        row = self._rows.pop(u.index)
        if u.index in self._encoded:
            codes, param = self._encoded.pop(u.index)
            u.states[0].copy_(codes.memory)
            u.source.param.data.copy_(param)
        if not u.topk:
            return row
        sent = u.topk.send(row.grad.to(u.device), self._sent[u.device])
        return row._replace(grad=self._updaters[u.device].prepare(sent, sent.dtype), link_dtype=sent.dtype)

    def release_scratch(self) -> list[int]:
        """Free scratch memory and references to gradients, once all is queued. Returns the rows that are updated."""
        rows = [*self._updates]
        self._to_queue = iter(())
        self._updates.clear()
        self._rows.clear()
        self._encoded.clear()
        self._sent.clear()
        self._updaters.clear()
        return rows

    @property
    def changed(self) -> list[ParamState]:
        """The parameters whose states undo() restores."""
        return [before.param_state for before in self._before.values()] if self.launched else []

    def old_param(self, param_state: ParamState) -> torch.Tensor:
        """Return a parameter as it was before the step, 1-D, once undo() has restored its states."""
        before = self._before.get(param_state.index)
        return flat(param_state.master) if before is None or before.param is None else before.param

    def undo(self) -> None:
        """Restore the states from before queue_next(). The caller restores the parameters.

        May run on any thread and stream: waits for everything that was queued. Call wait() afterwards.
        """
        self.wait()
        for before in self._before.values():
            before.undo()

    def wait(self) -> None:
        """Return when everything queued on the accelerators, by anyone, is done."""
        for device in self._devices:
            torch.accelerator.synchronize(device)

    def complete(self) -> None:
        """Note that the step is complete: decoded states of updated parameters are old."""
        for param_state in self._coded:
            if param_state.decoded and param_state.index in self._events:
                param_state.decoded.drop([param_state.index])

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
