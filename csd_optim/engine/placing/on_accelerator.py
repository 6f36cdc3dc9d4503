"""Chooses the parameters whose states `gpu:` keeps in accelerator memory: whole parameters, as many as fit."""

from __future__ import annotations

import errno
import functools
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...accelerator import accelerator_type, on, record_event, wait_for
from ...devices.spec import DeviceSpec
from ...errors import CSDMemoryError, CSDRuntimeError, CSDUnavailableError, CSDValueError
from ...kernels import device_check
from ...kernels.codes import RATIOS
from ...kernels.update import UpdateRow
from ...rates import Rates
from ...store.sections import FP32
from .codes_check import objection_to_codes
from .engine_rate import ADAMW_STEP
from .updaters import AcceleratorUpdater

log: logging.Logger = logging.getLogger("csd_optim")

TIMED_ELEMS = 1 << 22  # elements of an update whose rate is measured: more than caches of accelerators hold
TIMED_SECONDS = 5e-3  # so many seconds of updates are measured at a time
LINK_BYTES = 64 << 20  # bytes that are copied each way to measure the link
ROUNDS = 3


class Joining(NamedTuple):
    """A parameter that takes part in a step for the first time."""

    name: str
    device: torch.device
    elems: int
    param_bytes: int  # bytes per element of the parameter
    nbytes: int  # bytes of its states on the accelerator, with the second copy that undoing a step needs
    in_place: bool  # the parameter is its own master
    codec: str  # of its states


def lacks_kernels(joining: Joining) -> str:
    """Return why the parameter's accelerator cannot update it; "" if it can, or the parameter is on none."""
    if joining.device.type in ("cpu", "meta"):
        return ""
    if joining.codec not in (FP32, *RATIOS):
        return f"no kernel updates codes of kind {joining.codec} there"
    if joining.codec != FP32:
        objection = objection_to_codes(joining.device)
    else:
        kernels = device_check.kernels_of(joining.device)
        objection = "" if kernels.library else kernels.report
    return f"{joining.device} has no kernels, because {objection}" if objection else ""


class OnAccelerator:
    """The states that an engine keeps on accelerators, which are no devices of the native engine.

    `others`: the devices that the user named beside `gpu:`.
    """

    def __init__(self, spec: DeviceSpec, others: Sequence[DeviceSpec]) -> None:
        self.spec = spec
        self.alone: bool = not others
        shares = [1.0 if s.share is None else s.share for s in (spec, *others)]
        self._share = shares[0] / sum(shares)
        self.kernels: dict[str, str] = {}  # by device: what its check has found
        self.params: int = 0  # elements of the parameters whose states are on the accelerator
        self.nbytes: int = 0  # bytes of these states, with the second copies that undoing a step needs

    @property
    def room(self) -> float:
        """Bytes that are still free."""
        return float("inf") if self.spec.room_bytes is None else self.spec.room_bytes - self.nbytes

    def choose(
        self, joining: Sequence[Joining], fraction: float | None = None, already_chosen: Sequence[Joining] = ()
    ) -> list[bool]:
        """Return for each parameter whether its states go to the accelerator.

        `fraction`: at most this part of all elements; None: use the share and room of `gpu:`. `already_chosen`:
        parameters that are not yet counted in `nbytes`.

        Without a device beside `gpu:` all are chosen. Raises CSDRuntimeError, CSDValueError, CSDMemoryError if
        impossible.
        """
        room = self.room - sum(j.nbytes for j in already_chosen)
        if self.alone:
            for j in joining:
                if j.device.type == "cpu":
                    raise CSDRuntimeError(
                        f"parameter {j.name} is on the CPU, and {self.spec} keeps states where the parameter is: name "
                        "a device beside it, such as ram:"
                    )
                if reason := lacks_kernels(j):
                    raise CSDValueError(f"{self.spec} cannot keep the states of {j.name}: {reason}")
            chosen = [True] * len(joining)
        else:
            if fraction is None:
                as_it_fits = self.spec.share is None and self.spec.room_bytes is not None
                fraction = 1.0 if as_it_fits else self._share
            chosen = [False] * len(joining)
            elems_left = fraction * sum(j.elems for j in joining)
            bytes_left = room
            # Largest first, so that little of the accelerator's part is left unused.
            for i in sorted(range(len(joining)), key=lambda i: -joining[i].elems):
                j = joining[i]
                is_eligible = j.elems and j.device.type not in ("cpu", "meta") and not lacks_kernels(j)
                if is_eligible and j.elems <= elems_left and j.nbytes <= bytes_left:
                    chosen[i], elems_left, bytes_left = True, elems_left - j.elems, bytes_left - j.nbytes
        placed = [j for j, is_chosen in zip(joining, chosen, strict=True) if is_chosen]
        if (needed := sum(j.nbytes for j in placed)) > room:
            raise CSDMemoryError(
                f"{needed / 1e9:.3f} GB of states would be on the accelerator, and {self.spec} has room for "
                f"{room / 1e9:.3f} GB: name a device beside it, such as ram:"
            )
        self.kernels |= {str(device): device_check.kernels_of(device).report for device in {j.device for j in placed}}
        elems = sum(j.elems for j in placed)
        log.info("%s gets the states of %.1f M parameters: %.3f GB", self.spec, elems / 1e6, needed / 1e9)
        return chosen

    def rates(self) -> Rates:
        """Return the rates of rates_of(). Raises CSDUnavailableError, CSDMemoryError."""
        return rates_of(self.spec)


def rates_of(spec: DeviceSpec) -> Rates:
    """Return the rates of AdamW's update and of the link, from `spec` or measured on the current accelerator.

    Raises CSDUnavailableError if a rate has to be measured and there is no accelerator, or it has no kernels.
    """
    known = spec.known_update, spec.known_link
    if None in known and not accelerator_type():
        raise CSDUnavailableError(
            errno.ENODEV,
            f"{spec}: there is no accelerator here to be measured; say what is known: gpu:?update=5G/s&link=25GB/s",
        )
    return Rates(update=known[0] or _update_rate(), link=known[1] or _link_rate())


@functools.cache
def _update_rate() -> float:
    """Measure how many 16-bit parameters per second AdamW updates, in the way of a step."""
    device = torch.device(accelerator_type(), torch.accelerator.current_device_index())
    states = [torch.zeros(TIMED_ELEMS, dtype=torch.float32, device=device) for _ in range(3)]
    grad, param = (torch.full((TIMED_ELEMS,), 1e-3, dtype=torch.bfloat16, device=device) for _ in range(2))
    rule, constants = ADAMW_STEP
    updater = AcceleratorUpdater(device, [rule])
    rows = [UpdateRow(grad, torch.bfloat16, states, param, constants)]
    stream, seconds, times = torch.accelerator.current_stream(device), [], 1
    for _ in range(ROUNDS):
        wait_for(record_event(stream))
        start = time.perf_counter()
        for _ in range(times):
            for _ in updater.queue(rule, rows):
                pass
        wait_for(record_event(stream))
        seconds.append((time.perf_counter() - start) / times)
        times = max(1, round(TIMED_SECONDS / seconds[-1]))
    return TIMED_ELEMS / min(seconds)


@functools.cache
def _link_rate() -> float:
    """Measure the link: bytes per second each way, with both ways busy."""
    device = torch.device(accelerator_type(), torch.accelerator.current_device_index())
    on_host = [torch.ones(LINK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
    on_device = [torch.ones(LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams, seconds = (torch.Stream(device), torch.Stream(device)), []
    for _ in range(ROUNDS):
        wait_for(record_event(torch.accelerator.current_stream(device)))
        start = time.perf_counter()
        with on(streams[0]):
            on_host[0].copy_(on_device[0], non_blocking=True)
        with on(streams[1]):
            on_device[1].copy_(on_host[1], non_blocking=True)
        for stream in streams:
            wait_for(record_event(stream))
        seconds.append(time.perf_counter() - start)
    return LINK_BYTES / min(seconds)
