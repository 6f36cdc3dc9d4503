"""Gradients of every kind for the tests of Top-K and codecs, and residuals for them."""

import math

import numpy as np
import torch

STRIDE = 61  # distance between outliers: a prime, so that they fall into all columns of a matrix


def any_bits(n, dtype, seed=0):
    """Return n numbers with random bits: every kind of number, of very different magnitudes."""
    rng = np.random.default_rng(seed)
    if dtype is torch.float32:
        bits = rng.integers(1 << 32, size=n, dtype=np.uint32).view(np.int32)
    else:
        bits = rng.integers(1 << 16, size=n, dtype=np.uint16).view(np.int16)
    return torch.from_numpy(bits).view(dtype)


def of_all_magnitudes(n):
    """Return n fp32 gradients from 1e-12 to 1e3 and more, some of which are 0, inf and nan."""
    grads = torch.randn(n, generator=torch.Generator().manual_seed(4))
    grads *= 10.0 ** torch.linspace(-12, 3, n)
    grads[5], grads[77], grads[78], grads[400] = torch.inf, torch.nan, 0.0, 1e30
    return grads


def residual_of(grad, scale, seed=1):
    """Return a residual of the gradient's size, unscaled."""
    noise = torch.randn(len(grad), generator=torch.Generator().manual_seed(seed))
    return (noise * grad.float().numpy().std().item() * scale).bfloat16()


def among_others(n, dtype, *, at, large, small=1e-3):
    grad = torch.randn(n, generator=torch.Generator().manual_seed(2)) * small
    grad[at] = torch.as_tensor(large).float()
    return grad.to(dtype)


def kinds(n, dtype):
    generator = torch.Generator().manual_seed(n)
    noise = torch.randn(n, generator=generator)
    between = torch.arange(n) % STRIDE == STRIDE // 2
    sampled = torch.arange(n) % STRIDE == 0
    block = slice(n // 2, n // 2 + 5000)
    yield "normal", noise.to(dtype)
    yield "heavy tails", (noise / torch.rand(n, generator=generator)).to(dtype)
    yield "one value", torch.full((n,), 0.5).to(dtype)
    yield "one value, two signs", (0.5 * noise.sign()).to(dtype)
    yield "two values", torch.where(noise > 1, 2.0, 1.0).to(dtype)
    yield "zero", torch.zeros(n, dtype=dtype)
    yield "minus zero", -torch.zeros(n, dtype=dtype)
    yield "nearly all zero", torch.where(noise > 2.8, noise, 0.0).to(dtype)
    yield "one only", torch.where(torch.arange(n) == n - 1, -1.0, 0.0).to(dtype)
    yield "large ones in some places", torch.where(between, noise + 100, noise).to(dtype)
    yield "large ones in one of 61", torch.where(sampled, noise + 100, noise).to(dtype)
    yield "zero but for one of 61", torch.where(sampled, noise, 0.0).to(dtype)
    yield "one of 61 zero", torch.where(sampled, 0.0, noise).to(dtype)
    yield "a large block", among_others(n, dtype, at=block, large=noise[block] * 1e3)
    yield "ascending", torch.linspace(0, 1, n).to(dtype)
    yield "descending", torch.linspace(1, 0, n).to(dtype)
    yield "subnormal", (noise * 1e-7).to(dtype)
    yield "any bits", any_bits(n, dtype)
    yield "nan", among_others(n, dtype, at=slice(0, n, 3), large=math.nan)
    yield "inf", among_others(n, dtype, at=slice(1, n, 7), large=-math.inf)
    yield "saturated", (noise * 3e38).to(dtype)
