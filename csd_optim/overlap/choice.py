"""Checks of the arguments of overlap(), and the choice of the mode in which steps run from then on."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from ..accelerator import is_on_accelerator
from ..devices.units import parse_bytes
from ..errors import CSDValueError, CSDWarning, users_stacklevel
from ..params.groups import members
from ..step.mode import InStep
from ..step.steps import Steps
from .guards.fsdp import is_fsdp1
from .in_backward import StepsInBackward, check_can_free
from .overlap import Overlap
from .together import check_ranks, has_other_hook


def hold_bytes(hold: str | int | None, *, backward: bool, free_gradients: bool) -> int:
    """Return the bytes of `hold`, see CSDOptimizer.overlap(). Raises CSDValueError."""
    if backward and free_gradients:
        raise CSDValueError("free_gradients=True runs the step in backward by itself: leave out backward=True")
    return parse_bytes(("512MB" if free_gradients else "1GB") if hold is None else str(hold))


def choose(
    steps: Steps, model: torch.nn.Module | None, nbytes: int, *, backward: bool, free_gradients: bool
) -> Callable[[], InStep]:
    """Check that the options are possible, and allocate `hold`, of `nbytes`. Returns a function that makes the mode.

    Call it when no step is in flight. Raises what CSDOptimizer.overlap() raises.
    """
    engine = steps.engine
    if engine.accelerator and engine.accelerator.alone:
        backward = False  # no gain: on the accelerator the step is queued behind backward in any case
    if model is None:
        return InStep
    if steps.ranks:
        check_ranks(steps.arguments, model, backward=backward, free_gradients=free_gradients)
        if backward and has_other_hook(steps.arguments, model):
            warnings.warn(
                "DistributedDataParallel has another communication hook than csd_optim.push: no step begins in "
                "backward, as with overlap(model)",
                CSDWarning,
                users_stacklevel(),
            )
            backward = False
    if (backward or free_gradients) and engine.devices.resident:
        raise CSDValueError(
            f"overlap({'backward' if backward else 'free_gradients'}=True) undoes steps, which takes a second copy "
            "of the states: ram:, null: and gpu: alone have none"
        )
    if free_gradients:
        check_can_free(steps)
    hold: torch.Tensor | None = None
    if backward:
        pinned = any(is_on_accelerator(p) for _, _, p in members(steps.groups))
        hold = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    if any(map(is_fsdp1, model.modules())):
        warnings.warn(
            "overlap() hides nothing of FSDP1's parameters, which arrive within step(): use fully_shard",
            CSDWarning,
            users_stacklevel(),
        )
    return lambda: StepsInBackward(steps, model, nbytes) if free_gradients else Overlap(steps, model, hold)
