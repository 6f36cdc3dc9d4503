"""What a step does on the accelerator: it updates parameters whose states are there, one after another.

All of it is queued on the streams that are current, behind the backward pass and before whatever the program queues
next: as with an optimizer of torch's, nobody has to wait. So it goes on beside the tiles of the devices; and it is
queued bit by bit while these travel, as a thread that only queues does not feed them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..accelerator import wait_for
from ..engine.on_accelerator import CHUNK
from ..engine.torch_rules import Scratch, update
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

    @property
    def states(self) -> list[torch.Tensor]:
        """1-D fp32, the master first."""
        return [flat(self.param_state.windows[name]) for name in self.param_state.sections]


class NearUpdates:
    """Of one step, which is not launched yet. All the memory that it needs it takes now. Raises CSDMemoryError.

    `exact`: see torch_rules.Scratch. `undoes`: the states as they are now are kept, for undo().
    """

    def __init__(self, updates: Sequence[NearUpdate], *, exact: bool, undoes: bool) -> None:
        self.updates: Sequence[NearUpdate] = updates
        self.undoes = undoes
        self.launched: bool = False
        self.params: int = sum(u.param_state.numel for u in updates)
        self._what = f"{len(updates)} parameters"
        largest: dict[torch.device, int] = {}
        for u in updates:
            largest[u.source.param.device] = max(largest.get(u.source.param.device, 0), u.param_state.numel)
        for u in updates:
            if u.param_state.is_new:  # what it begins as, which other devices find when they update it
                u.states[0].copy_(u.source.param)
        try:
            self._scratch = {d: Scratch.of(min(n, CHUNK), d, exact=exact) for d, n in largest.items()}
            self._nonfinite = {d: torch.zeros((), dtype=torch.int64, device=d) for d in largest}
            self._before = [[state.clone() for state in u.states] for u in updates] if undoes else []
            self._rounded = {
                d: torch.empty(min(largest[d], CHUNK), dtype=dtype, device=d)
                for d, dtype in {u.source.param.device: u.source.grad_dtype for u in updates if u.is_rounded}.items()
            }
            for u in updates:
                for grad in self._grads(u):
                    self._nonfinite[grad.device] += grad.isfinite().logical_not().sum()
        except torch.OutOfMemoryError as e:
            raise CSDMemoryError(f"no memory for a step on the accelerator: {e}") from None
        self._times = {d: (torch.Event(d, enable_timing=True), torch.Event(d, enable_timing=True)) for d in largest}
        self._began = 0.0

    def launch(self, *, timed: bool = False) -> Iterator[None]:
        """Queues a chunk for each that is asked for. `timed`: waits for backward before, to know when it begins."""
        self.launched = True
        for device, (first, _) in self._times.items():
            first.record(torch.accelerator.current_stream(device))
            if timed:
                wait_for(first)
        self._began = time.perf_counter()
        for u in self.updates:
            yield from self._update(u)
        for device, (_, last) in self._times.items():
            last.record(torch.accelerator.current_stream(device))

    def _grads(self, u: NearUpdate) -> Iterator[torch.Tensor]:
        """Its gradient in chunks, rounded as it would travel. Each until the next is asked for."""
        for grad in torch.split(u.source.grad, CHUNK):
            yield self._rounded[grad.device][: len(grad)].copy_(grad) if u.is_rounded else grad

    def _update(self, u: NearUpdate) -> Iterator[None]:
        param = u.source.param.data
        in_chunks = (torch.split(t, CHUNK) for t in (param, *u.states))
        chunks = zip(self._grads(u), *in_chunks, strict=True)
        for grad, here, *states in chunks:
            update(u.rule, u.constants, states, grad, self._scratch[param.device].first(len(here)))
            if not u.param_state.in_place:
                here.copy_(states[0])
            yield

    def undo(self) -> None:
        """States are as they were before it was launched; parameters are the caller's business."""
        for u, before in zip(self.updates, self._before, strict=True):
            for state, kept in zip(u.states, before, strict=True):
                state.copy_(kept)

    def end(self) -> None:
        """The step is whole: memory that it took is free again, and gradients are the program's."""
        self.updates, self._before = (), []
        self._scratch.clear()
        self._rounded.clear()

    @property
    def span(self) -> tuple[str, float, float]:
        """What it is, and when, if it was launched `timed`: of time.perf_counter(). Waits until it is done."""
        seconds = self.seconds
        return self._what, self._began, min(time.perf_counter(), self._began + (seconds or float("inf")))

    @property
    def seconds(self) -> float:
        """That the busiest accelerator took; 0: it does not tell. Waits until it is done."""
        taken = 0.0
        for first, last in self._times.values():
            wait_for(last)
            with contextlib.suppress(RuntimeError):  # events of a back end that has no time
                taken = max(taken, first.elapsed_time(last) / 1e3)
        return taken

    def counted(self) -> dict[str, Any]:
        """For stats(): waits until it is done."""
        nonfinite = sum(int(n) for n in self._nonfinite.values())
        return {"params": self.params, "nonfinite_grads": nonfinite, "seconds": self.seconds}
