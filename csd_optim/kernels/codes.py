"""Launches of the kernel that updates 8-bit codes, each for several parameters of one rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..bindings import RULE_ROWS, RULES
from .library import KernelLibrary
from .sources import layouts
from .update import RULE_DEFINES, arguments

CODES_SOURCE = "codes.h"
CHECKED = 64  # elements for each checksum: kGroup of codec.h
RATIOS = {"8bit": 1, "root": 0}  # by the codec of a rule's codes: whether they have a section `ratio`
# By the number of a rule with such codes: the macros by which its kernel is compiled.
CODES_DEFINES = {
    RULES[row.name]: (*RULE_DEFINES[RULES[row.name]], f"CSD_RATIO={RATIOS[row.codec]}")
    for row in RULE_ROWS
    if row.name in RULES and row.codec in RATIOS
}
# The fields of the kernel's CodesRow by the name of a section. A row has one of the first two, or none.
FIELDS = {
    "parameter": "section",
    "master": "section",
    "checks": "checks",
    "correction": "correction",
    "ratio": "ratio",
    "root": "root",
    "exponent": "exponent",
    "peak": "peak",
    "peak exponent": "peak_exponent",
}


class CodesRow(NamedTuple):
    """One parameter with codes: 1-D contiguous tensors on the kernels' device."""

    grad: torch.Tensor
    link_dtype: torch.dtype  # the gradient is rounded to it first
    param: torch.Tensor  # of as many elements as `grad`; updated in place
    sections: Mapping[str, torch.Tensor]  # uint8, by the keys of FIELDS: see CodesRow of codes.h
    constants: Sequence[float]  # as in csd_hyper
    key: int  # of the first element, for the stochastic rounding: 32 bits


def launch_codes(
    library: KernelLibrary, rule: int, rows: Sequence[CodesRow], nonfinite: torch.Tensor, defines: Sequence[str]
) -> None:
    """Queue one step of a rule in one launch, for at most kCodesRows parameters. See launch_update()."""
    args, blocks = arguments("CodesArgs", rule, rows, nonfinite)
    for row, to in zip(rows, args.row, strict=False):
        to.key = row.key
        for name, section in row.sections.items():
            setattr(to, FIELDS[name], layouts().cast("void *", section.data_ptr()))
    library.launch(CODES_SOURCE, "update_codes", (*CODES_DEFINES[rule], *defines), args, blocks)


def checks_of(params: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the checksum of each group of 16-bit parameters (1-D, whole groups, on the CPU), as codes.h does."""
    pairs = params.view(torch.int16).numpy().view(np.uint32).reshape(-1, CHECKED // 2)
    weights: np.ndarray[Any, Any] = np.arange(1, CHECKED // 2 + 1, dtype=np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # mix_bits() of hash.h
        weights = (weights ^ weights >> shift) * np.uint32(factor)
    sums: np.ndarray[Any, Any] = (pairs * (weights ^ weights >> 16 | 1)).sum(1, dtype=np.uint32)
    return sums
