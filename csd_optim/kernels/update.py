"""Launches of the update kernel, each for several parameters of one rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..bindings import DTYPE_CODES, RULE_ROWS, RULES
from .library import KernelLibrary
from .sources import constant, layouts

SOURCE = "update.h"
# By the number of a rule: the macros by which its kernel is compiled.
RULE_DEFINES = {
    RULES[row.name]: (f"CSD_NUMBER={RULES[row.name]}", f"CSD_RULE={row.type}", f"CSD_SECTIONS={row.updated}")
    for row in RULE_ROWS
    if row.name in RULES
}


@dataclass
class UpdateRow:
    """One parameter, or a part of it: 1-D contiguous tensors of one length on the kernels' device."""

    grad: torch.Tensor
    link_dtype: torch.dtype  # the gradient is rounded to it first
    states: Sequence[torch.Tensor]  # fp32, the master first
    param: torch.Tensor | None  # receives the rounded master; None: the master is the parameter
    constants: Sequence[float]  # as in csd_hyper


def update(
    library: KernelLibrary, rule: int, rows: Sequence[UpdateRow], nonfinite: torch.Tensor, defines: Sequence[str] = ()
) -> None:
    """Queue one step of a rule for all `rows`, in as few launches as their number allows.

    `nonfinite`: an int64 on the device, to which the number of gradients is added that are inf or nan. `defines`: how
    the device is made to treat subnormal numbers.
    """
    most = constant("kRows")
    rows = [row for row in rows if row.grad.numel()]
    for first in range(0, len(rows), most):
        args, blocks = _arguments(rule, rows[first : first + most], nonfinite)
        library.launch(SOURCE, "update", (*RULE_DEFINES[rule], *defines), args, blocks)


def _arguments(rule: int, rows: Sequence[UpdateRow], nonfinite: torch.Tensor) -> tuple[Any, int]:
    """Return the arguments of a launch and its number of blocks."""
    ffi = layouts()
    block_elems = constant("kBlockElems")
    args = ffi.new("UpdateArgs *", {"rows": len(rows)})
    args.nonfinite = ffi.cast("uint64_t *", nonfinite.data_ptr())
    blocks = 0
    for row, to in zip(rows, args.row, strict=False):
        to.n = row.grad.numel()
        to.grad = ffi.cast("void *", row.grad.data_ptr())
        to.state = [ffi.cast("float *", state.data_ptr()) for state in row.states]
        to.param = ffi.NULL if row.param is None else ffi.cast("void *", row.param.data_ptr())
        to.hyper = {"rule": rule, "c": list(row.constants)}
        to.first = blocks
        to.grad_dtype, to.link_dtype = DTYPE_CODES[row.grad.dtype], DTYPE_CODES[row.link_dtype]
        to.param_dtype = DTYPE_CODES[torch.float32 if row.param is None else row.param.dtype]
        blocks += -(-to.n // block_elems)
    return args, blocks
