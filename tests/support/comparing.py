"""Comparing CSDAdam with torch.optim.AdamW on fp32 copies, and tensors bit by bit."""

import torch
from support.backends import TILE
from support.optimizers import ADAMW

TOLERANCE = 1e-6


def on_host(t):
    """Return an fp32 copy in host memory."""
    return t.detach().to("cpu", torch.complex64 if t.is_complex() else torch.float32, copy=True)


def fp32_copy(p):
    return on_host(p).requires_grad_()


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def relative_difference(a, b):
    """Return the largest difference divided by the largest magnitude."""
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a.detach().cpu(), b.detach()))
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


def assert_same(found, expected, what="images"):
    """Assert that two images are the same: tensors, other values, or dicts and sequences of images."""
    __tracebackhide__ = True
    different = [*_differences(found, expected, "")]
    assert not different, f"{what} differ: {'; '.join(different)}"


def _differences(found, expected, at):
    """Yield where two images differ, as text."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in {**found, **expected}:
            if key in found and key in expected:
                yield from _differences(found[key], expected[key], f"{at}[{key!r}]")
            else:
                yield f"{at}[{key!r}] is in one only"
    elif isinstance(found, list | tuple) and type(found) is type(expected):
        if len(found) != len(expected):
            yield f"{at} {len(found)} and {len(expected)} elements"
        for i, pair in enumerate(zip(found, expected, strict=False)):
            yield from _differences(*pair, f"{at}[{i}]")
    elif isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        if not torch.equal(found, expected):
            yield f"{at} {tuple(found.shape)}"
    elif found != expected:
        yield f"{at} {found} and {expected}"


def bits(t):
    """Return the tensor's bits. All NaNs count as the same, because their payloads may differ."""
    t = torch.where(t.isnan(), torch.full_like(t, float("nan")), t)
    return t.view(torch.int32 if t.dtype is torch.float32 else torch.int16)


def make_pair(params, devices, *, of=ADAMW, tile_size=TILE, grad_dtype=None, max_grad_norm=None, **kwargs):
    """Return CSDAdam over `params` (tensors, or groups of them) and AdamW over fp32 copies; or another pair, `of`."""
    kwargs = {**of.kwargs, **kwargs}
    groups = [g if isinstance(g, dict) else {"params": [g]} for g in params]
    copies = [{**g, "params": [fp32_copy(p) for p in g["params"]]} for g in groups]
    ours = of.ours(
        groups, devices=devices, tile_size=tile_size, grad_dtype=grad_dtype, max_grad_norm=max_grad_norm, **kwargs
    )
    return ours, of.reference(copies, **kwargs)


def randn_like(p):
    """Return random gradients. A single number is kept away from zero: after cancellation, a relative difference means
    nothing.
    """
    return torch.randn_like(p) if p.numel() != 1 else torch.rand_like(p) + 0.5


def set_grads(ours, reference, make=randn_like):
    for p, copy in zip(params_of(ours), params_of(reference), strict=True):
        p.grad = make(p)
        copy.grad = p.grad.detach().resolve_conj().to(copy, copy=True)


def train_pair(ours, reference, steps=10, make=randn_like):
    for _ in range(steps):
        set_grads(ours, reference, make)
        ours.step()
        reference.step()


def assert_matches(ours, reference):
    """Assert that parameter, master and each state are within TOLERANCE, and 16-bit parameters exactly rounded."""
    for p, copy in zip(params_of(ours), params_of(reference), strict=True):
        state, expected = ours.state[p], reference.state[copy]
        assert {value.device for value in state.values()} <= {p.device, torch.device("cpu")}
        assert set(state) - {"master"} == {*expected, "step"}
        assert state["step"] == expected.get("step", state["step"])  # SGD's state has no step
        for name in expected.keys() - {"step"}:
            assert relative_difference(state[name], expected[name]) <= TOLERANCE, name
        assert relative_difference(state["master"], copy) <= TOLERANCE
        assert torch.equal(p.detach().cpu(), state["master"].cpu().to(p.dtype))
