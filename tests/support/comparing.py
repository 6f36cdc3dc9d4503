"""CSDAdam's parameters beside those of torch.optim.AdamW on fp32 copies, and bits beside bits."""

import torch


def fp32_copy(p):
    wide = torch.complex64 if p.is_complex() else torch.float32
    return p.detach().to(wide, copy=True).requires_grad_()


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def relative_difference(a, b):
    """Largest difference over largest magnitude."""
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a.detach(), b.detach()))
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


def assert_same_bits(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def bits(t):
    """The tensor's bits; every nan counts as the same, for its payload may differ."""
    t = torch.where(t.isnan(), torch.full_like(t, float("nan")), t)
    return t.view(torch.int32 if t.dtype is torch.float32 else torch.int16)
