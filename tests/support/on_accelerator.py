"""Helpers of tests with parameters on the accelerator."""

import torch
from support import emulated

from csd_optim.accelerator import accelerator_type

DEVICE = accelerator_type()  # "" if there is none; tests that use it are then not run
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SCRATCH = [["file:"], ["ram:"], ["ram:", "file:"], ["file:"] * 3]
NEAR = [["gpu:"], ["gpu:", "file:"]]  # all states on the accelerator, or those of some parameters


def leaf(*shape, dtype=torch.float32, device=DEVICE):
    return torch.randn(shape, dtype=dtype, device=device).requires_grad_()


def keep_busy():
    """Give the current stream of a real device some 10 ms of work; the emulated one is as slow as its schedule says."""
    if not emulated.loaded():
        a = torch.ones(4096, 4096, device=DEVICE)
        for _ in range(4):
            a = a @ a
