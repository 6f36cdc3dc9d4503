"""Decides at the first use of a device whether its kernels select what the engine selects."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..bindings import DTYPE_CODES, ELEMS_PER_BLOCK
from ..kernels import device_check
from ..kernels.library import KernelLibrary
from .kernel_selection import KernelSelection
from .selection import HostSelection, Part, TopK

NUMBERS = 2000  # per part, normal ones and as many with random bits


def topk_kernels_of(device: torch.device) -> KernelLibrary | None:
    """Return the kernels of a device; None if gradients on it are selected on the host.

    Waits for the device at its first use, when the kernels are compiled and tried.
    """
    library = None if device.type == "cpu" else device_check.kernels_of(device).library
    if library is None:
        return None
    return None if library.objection("Top-K", lambda: _objection(library)) else library


def _objection(library: KernelLibrary) -> str:
    """Return why the kernels cannot be used; "" if they select the same entries as the engine, and owe the same."""
    expected = _parts()
    spread = torch.empty(sum(len(part.grad) for part in expected), dtype=torch.int16, device="cpu")
    ours_spread = spread.to(library.device)
    ours = [replace(part, grad=part.grad.to(library.device)) for part in expected]
    for part, other in zip(ours, expected, strict=True):
        part.residual = None if other.residual is None else other.residual.to(library.device)
    by_kernels = KernelSelection(library, {0: (ELEMS_PER_BLOCK, ours)})
    by_kernels.spread(ours_spread)
    by_kernels.feed_back()
    by_engine = HostSelection({0: (ELEMS_PER_BLOCK, expected)})
    by_engine.spread(spread)
    by_engine.feed_back()
    row, entries = by_kernels.rows[0].cpu(), by_engine.rows[0][:-1]
    same = int(row[-1]) == len(entries) and torch.equal(row[: len(entries)], entries)
    same = same and torch.equal(ours_spread.cpu(), spread)
    for part, other in zip(ours, expected, strict=True):
        if part.residual is not None and other.residual is not None:
            same = same and torch.equal(part.residual.cpu().view(torch.int16), other.residual.view(torch.int16))
    return "" if same else "the kernels select others"


def _parts() -> list[Part]:
    """Return parts with numbers of every magnitude, but without nan, whose bits are the device's."""
    generator, parts = torch.Generator("cpu").manual_seed(0), list[Part]()

    def numbers(dtype: torch.dtype) -> torch.Tensor:
        any_bits = torch.randint(-(1 << 31), 1 << 31, (NUMBERS,), generator=generator, device="cpu").to(torch.int32)
        usual = torch.randn(NUMBERS, generator=generator, dtype=torch.float32, device="cpu")
        t = torch.cat([any_bits.view(torch.float32), usual]).to(dtype)
        return t.masked_fill_(t.isfinite().logical_not(), 0.5)

    for grad_dtype in DTYPE_CODES:
        for dtype in (torch.float16, torch.bfloat16):
            topk, at = TopK(0.1, dtype, None, 0.37, 1), 2 * NUMBERS * len(parts)
            parts.append(Part(topk, numbers(grad_dtype), numbers(torch.bfloat16), at, at))
    return parts
