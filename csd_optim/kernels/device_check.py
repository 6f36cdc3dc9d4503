"""Decides at the first use of a device whether its kernels have the native engine's bits, and how it gets them.

Each operation is tried on random operands, and on operands whose product or quotient is just below 2^-126, where
processors differ in what they take for a subnormal number: see native/gpu/soft.h.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import bindings
from ..bindings import DTYPE_CODES, HYPER, RULES
from ..errors import CSDUnavailableError
from .edge import EDGE_DIVIDEND, EDGE_DIVISOR, edge_factors
from .library import KernelLibrary, library_of, reason
from .sources import KEEPS_SUBNORMALS
from .update import UpdateRow, launch_update

log: logging.Logger = logging.getLogger("csd_optim")

EXACT, SOFT = "exact", "exact with soft flush"
# How the kernels of rules treat subnormal numbers as zero: by the processor, or by soft.h. The defines of each way.
WAYS = {EXACT: (), SOFT: ("CSD_SOFT", KEEPS_SUBNORMALS)}
RULE = "amsgrad"  # has every operation of the rules
RANDOM = 4096  # random numbers per dtype
PAIRS = 16  # products per interval of edge_factors()


class DeviceKernels(NamedTuple):
    """What the check of a device found."""

    library: KernelLibrary | None  # None: kernels cannot be used
    defines: tuple[str, ...]  # for the sources of rules
    report: str  # a key of WAYS, or why kernels cannot be used


_found: dict[KernelLibrary | str, DeviceKernels] = {}
_lock = threading.Lock()


def kernels_of(device: torch.device) -> DeviceKernels:
    """Return the kernels of a device, checked at its first use, when this waits for the device."""
    with _lock:
        library = _library_or_why(device)
        if library not in _found:
            _found[library] = found = _check(library)
            is_rejected = isinstance(library, KernelLibrary) and found.library is None
            log.log(logging.WARNING if is_rejected else logging.INFO, "kernels on %s: %s", device, found.report)
        return _found[library]


def _library_or_why(device: torch.device) -> KernelLibrary | str:
    try:
        return library_of(device) or f"there are none for accelerators of type {device.type}"
    except CSDUnavailableError as e:
        return reason(e)


def _check(library: KernelLibrary | str) -> DeviceKernels:
    if isinstance(library, str):
        return DeviceKernels(None, (), library)
    rows = [*_random_rows(), *_rows_at_the_edge()]
    try:
        for report, defines in WAYS.items():
            if _differing(library, defines, rows) == 0:
                return DeviceKernels(library, defines, report)
    except CSDUnavailableError as e:
        return DeviceKernels(None, (), reason(e))
    return DeviceKernels(None, (), "the device rounds otherwise than the CPU")


def _differing(library: KernelLibrary, defines: Sequence[str], rows: Sequence[UpdateRow]) -> int:
    """Return how many numbers the kernel makes other than the native engine does."""
    nonfinite = torch.zeros((), dtype=torch.int64, device=library.device)
    there, expected = ([_copy(row, device) for row in rows] for device in (library.device, torch.device("cpu")))
    launch_update(library, RULES[RULE], there, nonfinite, defines)
    for row in expected:
        hyper = np.array([(RULES[RULE], list(row.constants))], HYPER)
        bindings.update(hyper, "scalar", row.grad, row.states, row.param)
    different = int(nonfinite.item()) - sum(int(row.grad.isfinite().logical_not().sum()) for row in expected)
    for ours, row in zip(there, expected, strict=True):
        for a, b in zip([*ours.states, ours.param], [*row.states, row.param], strict=True):
            if a is not None and b is not None:
                different += int((_bits(a.cpu()) != _bits(b)).sum())
    return different


def _copy(row: UpdateRow, device: torch.device) -> UpdateRow:
    grad, *states = (t.to(device, copy=True) for t in (row.grad, *row.states))
    return row._replace(grad=grad, states=states, param=None if row.param is None else row.param.to(device, copy=True))


def _bits(t: torch.Tensor) -> torch.Tensor:
    """Return the bits, with one nan for all: which one results is up to the device."""
    one = t.masked_fill(t.isnan(), math.nan)
    return one.view(torch.int32 if t.dtype is torch.float32 else torch.int16)


def _random_rows() -> Iterator[UpdateRow]:
    """Yield numbers of every magnitude: subnormal ones, both zeros, infinities and nan among them."""
    generator = torch.Generator("cpu").manual_seed(0)
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever the program's defaults are

    def numbers() -> torch.Tensor:
        any_bits = torch.randint(-(1 << 31), 1 << 31, (RANDOM // 2,), generator=generator, device="cpu")
        any_bits, usual = any_bits.to(torch.int32), torch.randn(RANDOM // 2, generator=generator, **fp32)
        usual[::9], usual[1::9], usual[2::9] = 0.0, -0.0, usual[2::9] * 1e-30
        return torch.cat([any_bits.view(torch.float32), usual])

    for dtype in DTYPE_CODES:
        states = [numbers(), numbers(), numbers().abs(), numbers().abs()]
        grad, param = numbers().to(dtype), torch.zeros(RANDOM, dtype=dtype, device="cpu")
        yield UpdateRow(grad, dtype, states, param, torch.rand(9, generator=generator, **fp32).tolist())


def _rows_at_the_edge() -> Iterator[UpdateRow]:
    """Yield gradients g that become 0 + g * scale, and then 0 - that / eps, just below 2^-126."""

    def row(grad: float, scale: float, eps: float) -> UpdateRow:
        states = [torch.zeros(4, dtype=torch.float32, device="cpu") for _ in range(4)]
        grads = torch.tensor([grad, -grad, grad, -grad], dtype=torch.float32, device="cpu")
        constants = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, eps, scale]  # in the order of adamw.h
        return UpdateRow(grads, torch.float32, states, None, constants)

    yield from (row(x, y, 1.0) for x, y in zip(*edge_factors(PAIRS), strict=True))
    yield row(EDGE_DIVIDEND, 1.0, EDGE_DIVISOR)
