"""What a step does on the accelerator: it updates parameters whose states are there, one after another.

All of it is queued on the streams that are current, behind the backward pass and before whatever the program queues
next: as with an optimizer of torch's, nobody has to wait. So it goes on beside the tiles of the devices; and within
step() it is queued bit by bit while these travel, as a thread that only queues does not feed them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..accelerator import on, recorded, wait_for
from ..engine.on_accelerator import CHUNK
from ..engine.torch_rules import Scratch, update
from ..engine.trace import Span
from ..errors import CSDMemoryError
from ..params.grad_source import GradSource
from ..params.param_state import ParamState
from ..params.strides import flat


@dataclass
class NearUpdate:
    """Of one parameter."""

    param_state: ParamState
    source: GradSource
    rule: int
    constants: Sequence[float]

    @property
    def is_rounded(self) -> bool:
        """Is its gradient to have the optimizer's grad_dtype, which is another?"""
        return self.source.grad.dtype is not self.source.grad_dtype


def _states(param_state: ParamState) -> list[torch.Tensor]:
    """1-D fp32, the master first. What is written to them torch does not count; whose step it is does."""
    if param_state.copy:
        return param_state.copy.states
    return [flat(param_state.windows[name].data) for name in param_state.sections]


@contextlib.contextmanager
def _taking_memory() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as e:
        raise CSDMemoryError(f"no memory for a step on the accelerator: {e}") from None


def parameters_of_new(updates: Sequence[NearUpdate]) -> dict[int, torch.Tensor]:
    """Copies of parameters, by row, that devices have nothing of yet: an undone step gives them back.

    Raises CSDMemoryError.
    """
    with _taking_memory():
        new = [u.param_state for u in updates if u.param_state.is_new]
        return {b.index: b.local.detach().clone() for b in new}


class Queued:
    """Updates that were queued together: between two events on each accelerator."""

    def __init__(self, params: int, devices: Sequence[torch.device], *, timed: bool) -> None:
        """`timed`: waits for what was queued before, to know when it begins."""
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
        """That an accelerator took; 0: it does not tell. Waits until it is done."""
        if device not in self._events:
            return 0.0
        first, last = self._events[device]
        wait_for(last)
        try:
            return float(first.elapsed_time(last)) / 1e3
        except RuntimeError:  # events of a back end that has no time
            return 0.0

    @property
    def span(self) -> Span:
        """What it is, and when, if it was `timed`: of time.perf_counter(). Waits until it is done."""
        seconds = max(self.seconds(d) for d in self._events) or float("inf")
        return f"{self._params} parameters", self._began, min(time.perf_counter(), self._began + seconds)


class NearUpdates:
    """Of one step, nothing of which is queued yet. Raises CSDMemoryError.

    To be followed by get_ready() and launch(); or, where gradients come one by one, by take() of each.

    `exact`: see torch_rules.Scratch. `undoes`: the states as they are before are kept, for undo().
    """

    def __init__(self, updates: Sequence[NearUpdate], *, exact: bool, undoes: bool) -> None:
        self.undoes = undoes
        self.launched: bool = False
        self.params: int = 0  # elements of those that were queued
        self._updates = {u.param_state.index: u for u in updates}
        self._before: list[tuple[ParamState, list[torch.Tensor]]] = []
        self._queued: list[Queued] = []
        self.events: dict[int, Any] = {}  # by row, of those that were queued: after which it is updated
        self.commit_bytes: int = 0  # of states that went to the host, for directories to keep
        largest: dict[torch.device, int] = {}
        for u in updates:
            largest[u.source.param.device] = max(largest.get(u.source.param.device, 0), u.param_state.numel)
        self._devices = [*largest]
        self._streams = {d: torch.accelerator.current_stream(d) for d in largest}  # whose memory it takes
        for u in updates:
            if u.param_state.is_new:  # what it begins as, which other devices find when they update it
                master, *others = _states(u.param_state)
                master.copy_(u.source.param)
                for state in others:  # a copy may have something from a step that was undone
                    state.zero_()
        with _taking_memory():
            self._scratch = {d: Scratch.of(min(n, CHUNK), d, exact=exact) for d, n in largest.items()}
            self._nonfinite = {d: torch.zeros((), dtype=torch.int64, device=d) for d in largest}
            self._rounded = {
                d: torch.empty(min(largest[d], CHUNK), dtype=dtype, device=d)
                for d, dtype in {u.source.param.device: u.source.grad_dtype for u in updates if u.is_rounded}.items()
            }

    @property
    def rows(self) -> Collection[int]:
        """Of its parameters; none any more when all is queued."""
        return self._updates.keys()

    def get_ready(self) -> None:
        """Takes the rest of the memory that launch() needs. Raises CSDMemoryError."""
        for u in self._updates.values():
            self._get_ready(u)

    def _get_ready(self, u: NearUpdate) -> None:
        with _taking_memory():
            if self.undoes:
                # Of a copy there is another one.
                before = [] if u.param_state.copy else [state.clone() for state in _states(u.param_state)]
                self._before.append((u.param_state, before))
            for grad in self._grads(u):
                self._nonfinite[grad.device] += grad.isfinite().logical_not().sum()

    def launch(self, *, timed: bool = False) -> Iterator[None]:
        """Queues a chunk for each that is asked for. `timed`: see Queued."""
        self.launched = True
        queued = Queued(len(self._updates), self._devices, timed=timed)
        for u in self._updates.values():
            yield from self._update(u)
        queued.end()
        self._queued.append(queued)

    def take(self, row: int, grad: torch.Tensor, *, timed: bool = False) -> None:
        """Queues the update of one parameter, with this gradient (of the parameter's shape). Raises CSDMemoryError.

        Backward may make gradients on several streams; updates share memory, and so they are on one.
        """
        u = self._updates[row]
        u = dataclasses.replace(u, source=dataclasses.replace(u.source, grad=flat(grad)))
        made_on, stream = torch.accelerator.current_stream(grad.device), self._streams[grad.device]
        stream.wait_stream(made_on)
        with on(stream):
            self._get_ready(u)
            self.launched = True
            queued = Queued(1, [grad.device], timed=timed)
            for _ in self._update(u):
                pass
            queued.end()
        made_on.wait_stream(stream)  # whose memory the gradient is
        self._queued.append(queued)

    def _grads(self, u: NearUpdate) -> Iterator[torch.Tensor]:
        """Its gradient in chunks, rounded as it would travel. Each until the next is asked for.

        They come to the parameter's device, if somebody has moved that and left the gradient where it was.
        """
        device = u.source.param.device
        for grad in torch.split(u.source.grad, CHUNK):
            yield self._rounded[device][: len(grad)].copy_(grad) if u.is_rounded else grad.to(device)

    def _update(self, u: NearUpdate) -> Iterator[None]:
        param = u.source.param.data
        self.params += u.param_state.numel
        in_chunks = (torch.split(t, CHUNK) for t in (param, *_states(u.param_state)))
        chunks = zip(self._grads(u), *in_chunks, strict=True)
        for grad, here, *states in chunks:
            update(u.rule, u.constants, states, grad, self._scratch[param.device].first(len(here)))
            if not u.param_state.in_place:
                here.copy_(states[0])
            yield
        self.events[u.param_state.index] = recorded(torch.accelerator.current_stream(param.device))

    def all_queued(self) -> list[int]:
        """Memory that this takes is free again, and gradients are the program's. Returns the rows of its parameters."""
        rows = [*self._updates]
        self._updates.clear()
        self._scratch.clear()
        self._rounded.clear()
        return rows

    @property
    def changed(self) -> list[ParamState]:
        """Those that undo() puts back."""
        return [param_state for param_state, _ in self._before] if self.launched else []

    def undo(self) -> None:
        """States are as they were before it was launched; parameters are the caller's business.

        On whatever thread and stream: waits for what was queued, and is to be followed by wait().
        """
        self.wait()
        for param_state, before in self._before:
            if param_state.copy:
                param_state.copy.is_known = False
                continue
            for state, kept in zip(_states(param_state), before, strict=True):
                state.copy_(kept)

    def wait(self) -> None:
        """Returns when all has happened that anybody has queued."""
        for device in self._devices:
            torch.accelerator.synchronize(device)

    def end(self) -> None:
        """Nobody undoes it any more: memory that it took is free again."""
        self.all_queued()
        self._before.clear()

    @property
    def spans(self) -> list[Span]:
        """What was queued, if it was `timed`. Waits until it is done."""
        return [queued.span for queued in self._queued]

    def counted(self) -> dict[str, Any]:
        """For stats(): waits until it is done. `seconds`: of the busiest accelerator; 0: it does not tell."""
        seconds = max(sum(queued.seconds(d) for queued in self._queued) for d in self._devices)
        nonfinite = sum(int(n) for n in self._nonfinite.values())
        done = {"params": self.params, "nonfinite_grads": nonfinite, "seconds": seconds}
        return done | {"commit_bytes": self.commit_bytes}
