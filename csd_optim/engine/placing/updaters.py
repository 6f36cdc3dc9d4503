"""How an accelerator updates parameters: by kernels made from native/include/rules.h, or else by torch operations."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from ...bindings import DTYPE_CODES
from ...kernels import device_check
from ...kernels.codes import CODES_DEFINES, CODES_SOURCE, CodesRow, launch_codes
from ...kernels.device_check import DeviceKernels
from ...kernels.update import RULE_DEFINES, SOURCE, UpdateRow, in_launches, launch_update
from .torch_rules import Scratch, differing_roundings, update

CHUNK = 1 << 22  # elements updated at a time by torch operations: 100 MB of scratch, and enough to hide launches


class AcceleratorUpdater(Protocol):
    """Queues updates on the current stream of one device."""

    nonfinite: torch.Tensor  # int64: how many gradients were inf or nan

    def prepare(self, grad: torch.Tensor, link_dtype: torch.dtype) -> torch.Tensor:
        """Allocate what the update needs besides, and return the gradient as a row for queue() has it.

        `link_dtype`: the gradient is rounded to it first.
        """

    def queue(self, rule: int, rows: Sequence[UpdateRow]) -> Iterator[int]:
        """Queue one step for `rows`, part by part. Yields after each part how many more rows are complete."""

    def queue_codes(self, rule: int, rows: Sequence[CodesRow]) -> Iterator[int]:
        """As queue(), for parameters with 8-bit states."""


class KernelUpdater:
    """Updates parameters by kernels, as many as possible in one launch. Compiles the kernels of all rules.

    `rules`, `coded`: of parameters with fp32 states, and with codes.
    """

    def __init__(
        self, device: torch.device, kernels: DeviceKernels, rules: Iterable[int], coded: Iterable[int]
    ) -> None:
        assert kernels.library
        self.nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        self._library, self._defines = kernels.library, kernels.defines
        for rule in rules:
            self._library.module(SOURCE, (*RULE_DEFINES[rule], *self._defines))
        for rule in coded:
            self._library.module(CODES_SOURCE, (*CODES_DEFINES[rule], *self._defines))

    def prepare(self, grad: torch.Tensor, link_dtype: torch.dtype) -> torch.Tensor:
        if grad.device == self.nonfinite.device and grad.dtype in DTYPE_CODES:
            return grad
        return grad.to(self.nonfinite.device, link_dtype)  # the parameter was moved, and its gradient was not

    def queue(self, rule: int, rows: Sequence[UpdateRow]) -> Iterator[int]:
        for some in in_launches(rows):
            launch_update(self._library, rule, some, self.nonfinite, self._defines)
            yield len(some)

    def queue_codes(self, rule: int, rows: Sequence[CodesRow]) -> Iterator[int]:
        for some in in_launches(rows, "kCodesRows"):
            launch_codes(self._library, rule, some, self.nonfinite, self._defines)
            yield len(some)


class TorchUpdater:
    """Updates parameters by torch operations, in chunks. Arguments as those of updater_of()."""

    def __init__(self, device: torch.device, numel: int, rounds_to: torch.dtype | None, *, exact: bool) -> None:
        n = min(numel, CHUNK)
        self.nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        self._scratch = Scratch.of(n, device, exact=exact)
        self._rounded = torch.empty(n if rounds_to else 0, dtype=rounds_to, device=device)

    def prepare(self, grad: torch.Tensor, link_dtype: torch.dtype) -> torch.Tensor:
        for chunk in self._chunks_of_grad(grad, link_dtype):
            self.nonfinite += chunk.isfinite().logical_not().sum()
        return grad

    def queue(self, rule: int, rows: Sequence[UpdateRow]) -> Iterator[int]:
        for row in rows:
            param = row.states[0] if row.param is None else row.param
            in_chunks = (torch.split(t, CHUNK) for t in (param, *row.states))
            left = len(param)
            for grad, here, *states in zip(self._chunks_of_grad(row.grad, row.link_dtype), *in_chunks, strict=True):
                update(rule, row.constants, states, grad, self._scratch.first(len(here)))
                if row.param is not None:
                    here.copy_(states[0])
                left -= len(here)
                yield int(left == 0)

    def queue_codes(self, rule: int, rows: Sequence[CodesRow]) -> Iterator[int]:
        raise NotImplementedError  # without kernels such parameters have their states elsewhere

    def _chunks_of_grad(self, whole: torch.Tensor, link_dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Yield the gradient in chunks, rounded and on this device. Each is valid until the next one is requested."""
        for grad in torch.split(whole, CHUNK):
            if grad.dtype is link_dtype:
                yield grad.to(self.nonfinite.device)
            else:
                yield self._rounded[: len(grad)].copy_(grad)


def updater_of(
    device: torch.device,
    rules: Iterable[int],
    numel: int,
    rounds_to: torch.dtype | None,
    *,
    exact: bool,
    coded: Iterable[int] = (),
) -> AcceleratorUpdater:
    """Return what updates parameters of up to `numel` elements by these rules on a device.

    `rules`, `coded`: of parameters with fp32 states, and with codes, for which there have to be kernels.
    `rounds_to`: the dtype to which gradients of other dtypes are rounded, if there are any. `exact`: without kernels,
    compute in fp64 what fp32 operations may round otherwise. Raises CSDUnavailableError if a rule cannot be compiled.
    """
    kernels = device_check.kernels_of(device)
    if kernels.library:
        return KernelUpdater(device, kernels, rules, coded)
    return TorchUpdater(device, numel, rounds_to, exact=exact)


def report_on(device: torch.device) -> str:
    """Return how a device updates parameters, for stats(). See device_check.DeviceKernels.report."""
    kernels = device_check.kernels_of(device)
    return kernels.report if kernels.library else f"torch operations instead of kernels: {kernels.report}"


def differences(device: torch.device) -> list[str]:
    """Return the operations that a device rounds otherwise than the CPU; none if kernels are used there."""
    return [] if device_check.kernels_of(device).library else _differing_roundings(device)


@functools.cache
def _differing_roundings(device: torch.device) -> list[str]:
    return differing_roundings(device)
