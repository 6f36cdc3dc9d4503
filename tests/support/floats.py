"""How a thread treats floating-point numbers, and numbers that show it."""

import ctypes
import math
import platform

import torch

from csd_optim.bindings import GRAD_SCALE
from csd_optim.kernels.edge import EDGE_DIVIDEND, EDGE_DIVISOR, edge_factors

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


EPS = {"adamw": 7, "adam": 7, "adagrad": 2, "rmsprop": 5}  # index of eps among the constants of rules that divide


def at_the_edge(row, seed):
    """Yield constants, states and a gradient whose products or quotients are just below 2^-126: see edge.py.

    `row`: the rule's row of RULE_ROWS. First the scaled gradient is there, and nothing is between it and a state; then
    the products of states with constants; then the quotient of a rule that has one.
    """
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.tensor(factors, dtype=torch.float64) for factors in edge_factors(16, seed))
    signs = torch.tensor([1.0, -1.0])
    zeros = torch.zeros(2)
    for small, scale in zip(x, y, strict=True):
        constants = torch.ones(9)
        constants[GRAD_SCALE] = scale * 2.0**63
        yield constants, [zeros.clone() for _ in range(row.updated)], (signs * small * 2.0**-63).float()
    for _ in range(8):
        pairs = torch.randint(len(y), (9,), generator=generator)
        of = pairs[torch.randint(9, (row.updated + 1, 128), generator=generator)]
        *states, grad = (x[of] * 2.0**-63 * torch.randint(-1, 2, of.shape, generator=generator)).float()
        yield (y[pairs] * 2.0**63).float(), [state.clone() for state in states], grad.clone()
    if row.rule in EPS:
        constants = torch.ones(9)
        constants[EPS[row.rule]] = EDGE_DIVISOR
        yield constants, [zeros.clone() for _ in range(row.updated)], signs * EDGE_DIVIDEND


def bits(t):
    """Return the bits of `t`, with one NaN for all, as devices may choose the payload."""
    whole = {2: torch.int16, 4: torch.int32}[t.itemsize]
    return torch.where(t.isnan(), torch.full((), math.nan, dtype=t.dtype), t).view(whole)


def same_bits(a, b):
    """Return whether all bits are equal; all NaNs count as equal."""
    return torch.equal(bits(a), bits(b))
