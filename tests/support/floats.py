"""How a thread treats floating-point numbers, and numbers that show it."""

import ctypes
import math
import platform

import torch

LIBM = ctypes.CDLL("libm.so.6")
NEAREST, UPWARD = 0, 0x400000 if platform.machine() == "aarch64" else 0x800  # fenv.h


def set_floats(how):
    """Sets how this thread treats subnormals and rounds: "flush", "upward", or the default for anything else."""
    torch.set_flush_denormal(how == "flush")
    LIBM.fesetround(UPWARD if how == "upward" else NEAREST)


def small_grads(n, dtype):
    """Normal numbers, among them many whose squares, averages and residuals are subnormal."""
    return (torch.randn(n, dtype=torch.float64) * 10.0 ** torch.randint(-37, -2, (n,))).to(dtype)


def awkward(n, generator, *, positive=False):
    """Return numbers of every magnitude, among them subnormal numbers, zeros of both signs, infinities and NaN."""
    x = torch.randint(-(1 << 31), 1 << 31, (n,), generator=generator).to(torch.int32).view(torch.float32).clone()
    x[: n // 2] = torch.randn(n // 2, generator=generator)
    x[n // 2 : 3 * n // 4] *= 1e-30
    x[::97], x[1::97] = 0.0, -0.0
    return x.abs() if positive else x


def bits(t):
    """Return the bits of `t`, with one NaN for all, as devices may choose the payload."""
    whole = {2: torch.int16, 4: torch.int32}[t.itemsize]
    return torch.where(t.isnan(), torch.full((), math.nan, dtype=t.dtype), t).view(whole)


def same_bits(a, b):
    """Return whether all bits are equal; all NaNs count as equal."""
    return torch.equal(bits(a), bits(b))
