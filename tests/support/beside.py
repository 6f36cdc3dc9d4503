"""A small model trained by CSDAdam, and the same one trained by torch.optim.AdamW."""

import copy
import subprocess
import sys
import textwrap

import torch
from support.comparing import params_of
from torch import nn
from torch.optim import AdamW

from csd_optim import CSDAdam

SCRATCH = [["file:"], ["ram:"], ["ram:", "file:"]]


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype).requires_grad_()


def small_model(dtype=torch.float32):
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).to(dtype)


def gradients(params, step):
    """Give the parameters random gradients that depend only on the step."""
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def pair_of_models(devices, **kwargs):
    """Return two equal fp32 models, one trained by CSDAdam, one by AdamW."""
    model = small_model()
    twin = copy.deepcopy(model)
    return model, CSDAdam(model.parameters(), devices=devices, **kwargs), twin, AdamW(twin.parameters(), **kwargs)


def train_beside(ours, reference, steps, start=0, each=lambda optimizer: None):
    for optimizer in (ours, reference):
        for k in range(start, start + steps):
            gradients(params_of(optimizer), k)
            optimizer.step()
            each(optimizer)


def assert_close(a, b):
    a, b = a.detach().double(), b.detach().double()
    assert ((a - b).abs().max() <= 1e-6 * b.abs().max()).item()


def assert_same_weights(ours, reference):
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        assert_close(p, q)


def everything(optimizer):
    """Return a copy of parameters and state, to compare bits with later."""
    return [
        t.detach().clone()
        for p in params_of(optimizer)
        for t in (p, *(value for _, value in sorted(optimizer.state[p].items())))
    ]


def run_script(script, *arguments):
    """Run a script in a Python process of its own. Returns what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr
