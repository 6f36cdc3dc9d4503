"""Helpers of tests with parameters on the accelerator."""

import contextlib
import os
from unittest import mock

import torch
from support import emulated

from csd_optim import accelerator
from csd_optim.accelerator import accelerator_type
from csd_optim.engine.placing import updaters
from csd_optim.kernels import update
from csd_optim.step import staging

DEVICE = accelerator_type()  # "" if there is none; tests that use it are then not run
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SCRATCH = [["file:"], ["ram:"], ["ram:", "file:"], ["file:"] * 3]
# Pinned memory is overwritten by the emulated device when it is allocated: the default `hold`, 1 GB, would take 0.2 s.
BACKWARD = {"backward": True, "hold": "4MB"}
GPU = [["gpu:"], ["gpu:", "file:"]]  # all states on the accelerator, or those of some parameters

if os.environ.get("TORCH_CUDA_SANITIZER"):
    # torch's stream sanitizer takes note of waits for an event, but not of a query that says that it has completed.
    asked = accelerator.has_completed

    def has_completed(event):
        if done := asked(event):
            event.synchronize()
        return done

    accelerator.has_completed = staging.has_completed = has_completed


def leaf(*shape, dtype=torch.float32, device=DEVICE):
    return torch.randn(shape, dtype=dtype, device=device).requires_grad_()


def on_both(rank, schedules, function, *arguments):
    """Compare a function's results on this rank on the CPU with those on the accelerator, under each schedule.

    `schedules`: None on a real device.
    """
    if schedules is not None:
        emulated.load()  # before the first backward, which starts autograd's threads
    expected = function(rank, "cpu", *arguments)
    if schedules is None:
        found = [function(rank, torch.accelerator.current_accelerator().type, *arguments)]
    else:
        found = []
        for name in schedules:
            with emulated.schedule(name):
                found.append(function(rank, "emu", *arguments))
    for one in found:
        assert [k for k, (a, b) in enumerate(zip(one, expected, strict=True)) if not torch.equal(a, b)] == [], arguments


@contextlib.contextmanager
def in_small_pieces(elems=1):
    """Queue updates in pieces: a launch ends with the parameter that reaches so many elements."""
    with mock.patch.object(update, "LAUNCH_ELEMS", elems):
        yield


@contextlib.contextmanager
def launches_fail(after, fails):
    """Call `fails()` in place of each piece of the updates but the first `after` ones."""
    calls = []

    def launching(real):
        return lambda *arguments: fails() if len(calls) >= after else calls.append(real(*arguments))

    with contextlib.ExitStack() as stack:
        for name in ("launch_update", "launch_codes"):
            stack.enter_context(mock.patch.object(updaters, name, launching(getattr(updaters, name))))
        yield


def keep_busy():
    """Give the current stream of a real device some 10 ms of work; the emulated one is as slow as its schedule says."""
    if not emulated.loaded():
        a = torch.ones(4096, 4096, device=DEVICE)
        for _ in range(4):
            a = a @ a
