"""Newton-Schulz orthogonalization of matrices, as torch.optim.Muon computes it."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import CSDValueError

Coefficients = tuple[float, float, float]

JORDAN: Coefficients = (3.4445, -4.7750, 2.0315)  # torch's default
# Values of oneDNN's ONEDNN_MAX_CPU_ISA with which it multiplies bf16 with the CPU's instructions for that.
ISAS_WITH_BF16 = {"ALL", "DEFAULT", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16"}


class Orthogonal(NamedTuple):
    """How a parameter is orthogonalized, and the constants of the pass after that."""

    coefficients: tuple[Coefficients, ...]
    eps: float
    dtype: torch.dtype
    rule: int  # csd_pass_rule
    constants: tuple[float, ...]

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return newton_schulz() of `x`."""
        return newton_schulz(x, self.coefficients, self.eps, self.dtype)


def check_matrix(name: str, p: torch.Tensor, shape: Sequence[int]) -> None:
    """Raise CSDValueError unless a parameter, or the whole that it is a part of (`shape`), can be orthogonalized."""
    if len(shape) not in (2, 3) or p.is_complex():
        raise CSDValueError(
            f"parameter {name} of shape {tuple(shape)} is no real matrix (2-D), and no batch of these (3-D), as Muon's "
            'parameters are: put it in a group with "rule": "adamw"'
        )


def newton_schulz(
    x: torch.Tensor, coefficients: Sequence[Coefficients], eps: float, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Return a matrix, or each matrix of a batch, with all its singular values moved towards 1.

    `x`: shape (..., rows, columns), bf16; it does not change. `coefficients`: (a, b, c) of each iteration
    Y ← a·Y + (b·A + c·A²)·Y, A = Y·Yᵀ. They begin with Y = x / max(‖x‖, eps), transposed if x has more rows than
    columns (K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024). `dtype`: of Y: bf16 as
    in torch.optim.Muon, or fp32.

    Returns bf16 of the same shape, contiguous. A matrix with an inf or a NaN becomes NaN as a whole. On a CPU, matrices
    are computed one by one, so that a result does not depend on the rest of the batch.
    """
    is_tall = x.size(-2) > x.size(-1)
    y = (x.mT if is_tall else x).unsqueeze(0).flatten(0, -3).to(dtype)
    kind = y.device.type
    # A step within torch.autocast would compute in its dtype, and one that goes on behind the program would not.
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext():
        if kind == "cpu":
            y = torch.stack([_orthogonal(matrix, coefficients, eps) for matrix in y])
        else:
            y = _orthogonal(y, coefficients, eps)
    y = y.view(*x.shape[:-2], *y.shape[-2:])
    return (y.mT if is_tall else y).to(torch.bfloat16).contiguous()


def _orthogonal(y: torch.Tensor, coefficients: Sequence[Coefficients], eps: float) -> torch.Tensor:
    """Iterate on a wide matrix, or on a batch of these (3-D)."""
    add = torch.addmm if y.dim() == 2 else torch.baddbmm
    y = y.contiguous()  # row by row, as matrix products may have other bits with another order in memory
    y = y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for a, b, c in coefficients:
        gram = y @ y.mT
        y = add(y, add(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y


def flops(rows: int, columns: int, steps: int) -> int:
    """Return the floating-point operations of newton_schulz() for one matrix, in so many iterations."""
    n, m = sorted((rows, columns))
    return steps * (4 * n * n * m + 2 * n**3)


def workspace_bytes(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> int:
    """Return the most memory that newton_schulz() uses for a matrix or batch, besides its argument and result."""
    n, m = sorted(shape[-2:])
    matrices = math.prod(shape[:-2])
    return dtype.itemsize * (3 * n * m * matrices + 2 * n * n * (1 if device.type == "cpu" else matrices))


def _seconds(n: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return how long newton_schulz() takes for one matrix of n x n: the best of three, after one to warm up."""
    x = torch.randn(n, n, generator=torch.Generator().manual_seed(0), device="cpu").to(device, torch.bfloat16)
    best = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        newton_schulz(x, [JORDAN], 1e-7, dtype)[0, 0].item()  # item() waits for an accelerator
        best = min(best, time.perf_counter() - begin)
    return best


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return bf16, or fp32 where the processor cannot multiply bf16: there torch emulates it, many times as slow.

    This is not measured: it has to be the same in all processes, and after a resume, as the bits depend on it.
    """
    if device.type == "cpu":
        has_bf16 = _has_bf16_instructions()
    elif device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bf16 = True
    return torch.bfloat16 if has_bf16 else torch.float32


@functools.cache
def _has_bf16_instructions() -> bool:
    """Return whether the CPU multiplies matrices of bf16. For x86, torch says; it asks for no others."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper() not in ISAS_WITH_BF16:
        return False
    if any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("avx512_bf16", "amx_tile")):
        return True
    return platform.machine() == "aarch64" and "bf16" in Path("/proc/cpuinfo").read_text().split()


def rate(dtype: torch.dtype, device: torch.device) -> float:
    """Measure newton_schulz() with a matrix of 1024 x 1024: floating-point operations per second."""
    return flops(1024, 1024, 1) / _seconds(1024, dtype, device)
