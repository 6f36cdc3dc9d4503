"""Updates parameters on an accelerator by kernels, which are compiled from native/include/rules.h."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence

import torch

from ...bindings import DTYPE_CODES
from ...errors import CSDUnavailableError
from ...kernels import device_check
from ...kernels.codes import CODES_DEFINES, CODES_SOURCE, CodesRow, launch_codes
from ...kernels.update import RULE_DEFINES, SOURCE, UpdateRow, in_launches, launch_update


class AcceleratorUpdater:
    """Queues updates on the current stream of one device, as many parameters as possible in one launch."""

    def __init__(self, device: torch.device, rules: Iterable[int], coded: Iterable[int] = ()) -> None:
        """Compile the kernels of all rules. `rules`, `coded`: of parameters with fp32 states, and with codes.

        Raises CSDUnavailableError if the device has no kernels, or a rule cannot be compiled.
        """
        kernels = device_check.kernels_of(device)
        if kernels.library is None:
            raise CSDUnavailableError(errno.ENOTSUP, f"{device} has no kernels, because {kernels.report}")
        # How many gradients were inf or nan.
        self.nonfinite: torch.Tensor = torch.zeros((), dtype=torch.int64, device=device)
        self._library, self._defines = kernels.library, kernels.defines
        for rule in rules:
            self._library.module(SOURCE, (*RULE_DEFINES[rule], *self._defines))
        for rule in coded:
            self._library.module(CODES_SOURCE, (*CODES_DEFINES[rule], *self._defines))

    def prepare(self, grad: torch.Tensor, link_dtype: torch.dtype) -> torch.Tensor:
        """Allocate what the update needs besides, and return the gradient as a row for queue() has it.

        `link_dtype`: the gradient is rounded to it first.
        """
        if grad.device == self.nonfinite.device and grad.dtype in DTYPE_CODES:
            return grad
        return grad.to(self.nonfinite.device, link_dtype)  # the parameter was moved, and its gradient was not

    def queue(self, rule: int, rows: Sequence[UpdateRow]) -> Iterator[int]:
        """Queue one step for `rows`, launch by launch. Yields after each launch the number of its rows."""
        for some in in_launches(rows):
            launch_update(self._library, rule, some, self.nonfinite, self._defines)
            yield len(some)

    def queue_codes(self, rule: int, rows: Sequence[CodesRow]) -> Iterator[int]:
        """As queue(), for parameters with 8-bit states."""
        for some in in_launches(rows, "kCodesRows"):
            launch_codes(self._library, rule, some, self.nonfinite, self._defines)
            yield len(some)
