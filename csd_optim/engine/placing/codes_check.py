"""Decides at the first use of a device whether its kernel for 8-bit codes makes the codes that the engine makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...bindings import DTYPE_CODES, HYPER, RULES, encode, update_codes
from ...kernels import device_check
from ...kernels.codes import CodesRow, checks_of, launch_codes
from ...kernels.library import KernelLibrary
from ...store.sections import CHECKS, GROUP, SECTIONS, section_sizes

RULE, CODEC, KEY = "amsgrad", "8bit", 0x9E3779B9  # a rule with sections of every kind
NUMBERS = 5000  # more elements than a block has, and no whole groups


def objection_to_codes(device: torch.device) -> str:
    """Return why a device cannot update 8-bit codes; "" if it can. Waits for the device at its first use."""
    kernels = device_check.kernels_of(device)
    if kernels.library is None:
        return kernels.report
    library, defines = kernels.library, kernels.defines
    return library.objection("8-bit states", lambda: _objection(library, defines))


def _objection(library: KernelLibrary, defines: tuple[str, ...]) -> str:
    same = all(_is_same(library, defines, dtype, alone=alone) for dtype in DTYPE_CODES for alone in (True, False))
    return "" if same else "the kernel makes others than the CPU"


def _is_same(library: KernelLibrary, defines: tuple[str, ...], dtype: torch.dtype, *, alone: bool) -> bool:
    """Return whether one step of random codes has the engine's bits. `alone`: the parameter is the first section."""
    generator = torch.Generator("cpu").manual_seed(0)
    fp32: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    numbers = [torch.randn(NUMBERS, **fp32) for _ in range(5)]
    param, grad, states = numbers[0].to(dtype), numbers[1].to(dtype), [numbers[2], *(t.abs() for t in numbers[3:])]
    sizes, groups = section_sizes(SECTIONS, CODEC, dtype), -(-NUMBERS // GROUP)
    codes = [torch.zeros(nbytes * groups, dtype=torch.uint8, device="cpu") for _, nbytes in sizes]
    codes[0] = codes[0].view(dtype)
    codes[0][:NUMBERS] = param
    encode("scalar", [None, *states], dtype, codes, CODEC)
    names = [name for name, _ in sizes]

    def sections() -> dict[str, torch.Tensor]:
        found = dict(zip(names[alone:], [codes[0].view(torch.uint8), *codes[1:]][alone:], strict=True))
        if alone and dtype is not torch.float32:
            found[CHECKS] = torch.from_numpy(checks_of(codes[0])).view(torch.uint8)
        return {name: section.clone() for name, section in found.items()}

    there = {name: section.to(library.device) for name, section in sections().items()}
    updated, nonfinite = param.to(library.device), torch.zeros((), dtype=torch.int64, device=library.device)
    constants = torch.rand(9, **fp32).tolist()
    row = CodesRow(grad.to(library.device), dtype, updated, there, constants, KEY)
    launch_codes(library, RULES[RULE], [row], nonfinite, defines)
    expected = torch.empty(NUMBERS, dtype=dtype, device="cpu")
    update_codes(np.array([(RULES[RULE], constants)], HYPER), "scalar", grad, codes, expected, KEY)
    same = all(torch.equal(there[name].cpu(), section) for name, section in sections().items())
    return same and torch.equal(updated.cpu(), expected)
