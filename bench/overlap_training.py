"""A training that bench.overlap times by turns, and the layers of a model that pretends to run on an accelerator."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from csd_optim import CSDAdam

Row = dict[str, Any]
LAYERS = 24  # of the model, unless FSDP2 divides it
WARM_UP = 3  # iterations, in which overlap() learns the order of use and how much of a step fits into backward
IN_A_ROW = 4  # iterations of a turn; the first is not timed


class Sleeps(torch.autograd.Function):
    """A layer that sleeps, as if an accelerator computed it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: tuple[float, float]) -> torch.Tensor:
        ctx.save_for_backward(weight)
        began = time.perf_counter()
        forward, ctx.seconds = seconds
        total = weight.sum(dtype=torch.float32)
        sleep_until(began + forward)
        return x + total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        began = time.perf_counter()
        (weight,) = ctx.saved_tensors
        made = weight * 1e-3 + 1e-2
        sleep_until(began + ctx.seconds)
        return grad, made, None


def sleep_until(moment: float) -> None:
    """Sleep until `moment`, of time.perf_counter()."""
    time.sleep(max(0.0, moment - time.perf_counter()))


class Layer(nn.Module):
    """A layer of the pretended model. `forward`, `backward`: its seconds."""

    def __init__(self, elems: int, forward: float, backward: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, elems, dtype=dtype))
        self.seconds = forward, backward

    def forward(self, x: torch.Tensor) -> Any:
        return Sleeps.apply(x, self.weight, self.seconds)  # type: ignore[no-untyped-call]


class Turns:
    """A training that is timed by turns."""

    opt: CSDAdam
    held: float = 0.0  # seconds spent in step() since turn() began

    def iteration(self) -> None:
        """Take one iteration, and count the seconds in step()."""
        raise NotImplementedError

    def turn(self) -> tuple[float, float]:
        """Return the mean seconds of an iteration, and of step() in it."""
        self.iteration()
        began, self.held = time.perf_counter(), 0.0
        for _ in range(IN_A_ROW - 1):
            self.iteration()
        elapsed = time.perf_counter() - began
        self.opt.synchronize()
        return elapsed / (IN_A_ROW - 1), self.held / (IN_A_ROW - 1)
