"""How a thread treats floating-point numbers, and numbers that show it."""

import ctypes
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
