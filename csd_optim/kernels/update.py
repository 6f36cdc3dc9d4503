"""Launches of the update kernel, each for several parameters of one rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from ..bindings import DTYPE_CODES, RULE_ROWS, RULES
from .library import KernelLibrary
from .sources import constant, layouts

SOURCE = "update.h"
LAUNCH_ELEMS = 1 << 26  # a launch ends with the parameter that reaches this: what waits for one need not wait for many
# By the number of a rule: the macros by which its kernel is compiled.
RULE_DEFINES = {
    RULES[row.name]: (f"CSD_NUMBER={RULES[row.name]}", f"CSD_RULE={row.type}", f"CSD_SECTIONS={row.updated}")
    for row in RULE_ROWS
    if row.name in RULES
}


class UpdateRow(NamedTuple):
    """One parameter, or a part of it: 1-D contiguous tensors of one length on the kernels' device."""

    grad: torch.Tensor
    link_dtype: torch.dtype  # the gradient is rounded to it first
    states: Sequence[torch.Tensor]  # fp32, the master first
    param: torch.Tensor | None  # receives the rounded master; None: the master is the parameter
    constants: Sequence[float]  # as in csd_hyper


class AnyRow(Protocol):
    """What rows of all kernels have: see UpdateRow."""

    @property
    def grad(self) -> torch.Tensor: ...
    @property
    def link_dtype(self) -> torch.dtype: ...
    @property
    def param(self) -> torch.Tensor | None: ...
    @property
    def constants(self) -> Sequence[float]: ...


Row = TypeVar("Row", bound=AnyRow)


def in_launches(rows: Sequence[Row], name: str = "kRows") -> Iterator[Sequence[Row]]:
    """Split rows of one rule into launches of kRows each, or of fewer if these have LAUNCH_ELEMS elements.

    `name`: the constant for another kernel than update().
    """
    first, elems, most = 0, 0, constant(name)
    for i, row in enumerate(rows):
        elems += row.grad.numel()
        if i + 1 - first == most or elems >= LAUNCH_ELEMS:
            yield rows[first : i + 1]
            first, elems = i + 1, 0
    if first < len(rows):
        yield rows[first:]


def launch_update(
    library: KernelLibrary, rule: int, rows: Sequence[UpdateRow], nonfinite: torch.Tensor, defines: Sequence[str]
) -> None:
    """Queue one step of a rule in one launch, for at most kRows parameters.

    `nonfinite`: an int64 on the device, to which the number of gradients is added that are inf or nan. `defines`: how
    the kernels treat subnormal numbers as zero (device_check.py).
    """
    args, blocks = arguments("UpdateArgs", rule, rows, nonfinite)
    for row, to in zip(rows, args.row, strict=False):
        to.state = [layouts().cast("float *", state.data_ptr()) for state in row.states]
    library.launch(SOURCE, "update", (*RULE_DEFINES[rule], *defines), args, blocks)


def arguments(struct: str, rule: int, rows: Sequence[Row], nonfinite: torch.Tensor) -> tuple[Any, int]:
    """Return the arguments of a launch, with the fields that rows of all kernels have, and its number of blocks."""
    ffi, block_elems = layouts(), constant("kBlockElems")
    args = ffi.new(f"{struct} *")
    args.rows = len(rows)
    args.nonfinite = ffi.cast("uint64_t *", nonfinite.data_ptr())
    blocks = 0
    for row, to in zip(rows, args.row, strict=False):
        to.n = row.grad.numel()
        to.grad = ffi.cast("void *", row.grad.data_ptr())
        to.param = ffi.NULL if row.param is None else ffi.cast("void *", row.param.data_ptr())
        to.hyper = {"rule": rule, "c": list(row.constants)}
        to.first = blocks
        to.grad_dtype, to.link_dtype = DTYPE_CODES[row.grad.dtype], DTYPE_CODES[row.link_dtype]
        to.param_dtype = DTYPE_CODES[torch.float32 if row.param is None else row.param.dtype]
        blocks += -(-to.n // block_elems)
    return args, blocks
