"""Parameters on the accelerator, beside torch.optim.AdamW on fp32 copies in host memory."""

import torch
from support import emulated
from support.backends import TILE
from support.comparing import params_of

from csd_optim import CSDAdam
from csd_optim.accelerator import kind

DEVICE = kind()  # "" where there is none; then tests that use it are not run
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SCRATCH = [["file:"], ["ram:"], ["ram:", "file:"], ["file:"] * 3]
TOLERANCE = 1e-6


def leaf(*shape, dtype=torch.float32, device=DEVICE):
    return torch.randn(shape, dtype=dtype, device=device).requires_grad_()


def keep_busy():
    """Some 10 ms of work for the current stream of a real device; the emulated one is as slow as its schedule says."""
    if not emulated.loaded():
        a = torch.ones(4096, 4096, device=DEVICE)
        for _ in range(4):
            a = a @ a


def fp32_copy(t):
    wide = torch.complex64 if t.is_complex() else torch.float32
    return t.detach().to("cpu", wide, copy=True)


def make_pair(params, devices, tile_size=TILE, **kwargs):
    reference = torch.optim.AdamW([fp32_copy(p).requires_grad_() for p in params], lr=1e-2)
    return CSDAdam(params, lr=1e-2, devices=devices, tile_size=tile_size, **kwargs), reference


def train(ours, reference, steps=5, make=torch.randn_like):
    for _ in range(steps):
        for p, q in zip(params_of(ours), params_of(reference), strict=True):
            p.grad = make(p)
            q.grad = fp32_copy(p.grad)
        ours.step()
        reference.step()


def assert_close(a, b):
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a.detach().cpu(), b.detach()))
    if b.numel():
        assert (a.double() - b.double()).abs().max() <= TOLERANCE * b.double().abs().max()


def assert_matches(ours, reference):
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        state, expected = ours.state[p], reference.state[q]
        assert all(value.device.type == "cpu" for value in state.values())
        assert state["step"] == expected["step"]
        assert_close(state["exp_avg"], expected["exp_avg"])
        assert_close(state["exp_avg_sq"], expected["exp_avg_sq"])
        assert_close(state["master"], q)
        assert torch.equal(p.detach().cpu(), state["master"].to(p.dtype))
