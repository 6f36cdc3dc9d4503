"""Parameters on an accelerator: gradients and parameters travel through the ring of pinned host buffers.

Oracle: torch.optim.AdamW on fp32 copies in host memory. The device is real where there is one, else emulated (see
tests/accelerator/emulated/), and then each test is run under several schedules of its streams.
"""

import copy

import pytest
import torch
from support.backends import TILE
from support.comparing import TOLERANCE, assert_matches, make_pair, on_host, params_of, relative_difference, train_pair
from support.on_accelerator import DEVICE, DTYPES, SCRATCH, keep_busy, leaf
from torch import nn

from csd_optim import CSDAdam

pytestmark = pytest.mark.accelerator

SIZES = [17, 0, TILE - 1, TILE + 1, 5 * TILE + 3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_match_adamw(devices, dtype):
    ours, reference = make_pair([leaf(n, dtype=dtype) for n in SIZES], devices)
    train_pair(ours, reference)
    assert_matches(ours, reference)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(devices, dtype):
    params = [
        torch.randn(12, 10, dtype=dtype, device=DEVICE)[::2, ::3].requires_grad_(),
        torch.randn(30, TILE // 8, dtype=dtype, device=DEVICE).t().requires_grad_(),
        torch.randn(8, 3, 5, 4, dtype=dtype, device=DEVICE).to(memory_format=torch.channels_last).requires_grad_(),
    ]
    ours, reference = make_pair(params, devices)
    train_pair(ours, reference)
    train_pair(ours, reference, make=lambda p: torch.randn(p.shape, dtype=p.dtype, device=p.device))
    assert_matches(ours, reference)


def test_complex(devices):
    ours, reference = make_pair([leaf(TILE + 1, dtype=torch.complex64)], devices)
    train_pair(ours, reference)
    assert_matches(ours, reference)


def test_parameters_of_host_and_device_in_one_optimizer(devices):
    """Small parameters on host and device share tiles, so that the host's gradients travel through the ring, too."""
    params = [
        leaf(n, dtype=dtype, device=device)
        for n in (5, 100, TILE + 1)
        for dtype in DTYPES
        for device in ("cpu", DEVICE)
    ]
    ours, reference = make_pair(params, devices)
    train_pair(ours, reference)
    assert_matches(ours, reference)


def test_parameters_move_to_the_gpu_and_back(devices):
    model = nn.Linear(40, 60)
    twin = copy.deepcopy(model)
    ours = CSDAdam(model.parameters(), lr=1e-2, devices=devices, tile_size=TILE)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for device in ("cpu", DEVICE, "cpu", DEVICE):
        model.to(device)
        train_pair(ours, reference, steps=2)
    assert_matches(ours, reference)


@pytest.mark.parametrize("devices", SCRATCH, ids=str)
@pytest.mark.parametrize("tile_size", [1024, 3 * TILE, None])
def test_many_tiles_and_devices(devices, tile_size):
    """More tiles than the ring has slots: every slot is used again within a step."""
    params = [leaf(50 * TILE + 7), leaf(20 * TILE, dtype=torch.bfloat16), leaf(TILE, device="cpu")]
    ours, reference = make_pair(params, devices, tile_size=tile_size)
    train_pair(ours, reference, steps=3)
    assert_matches(ours, reference)


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.parametrize("devices", SCRATCH, ids=str)
def test_same_bits_as_on_the_cpu(devices, state_dtype):
    """With 8-bit states, also when parameters are set in a way that does not change torch's version counter."""

    def final(device):
        generator = torch.Generator().manual_seed(1)
        params = [
            torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
            for shape in [(), (1,), (5, 7), (2, TILE), *((n,) for n in SIZES)]
            for dtype in DTYPES
        ]
        optimizer = CSDAdam(params, devices=devices, tile_size=TILE, state_dtype=state_dtype)
        for step in range(4):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).to(device, p.dtype)
                if step == 2 and state_dtype == "8bit":
                    p.data.mul_(0.5)
            optimizer.step()
        return [t.detach().cpu().clone() for p in params for t in (p, *optimizer.state[p].values())]

    assert all(torch.equal(a, b) for a, b in zip(final(DEVICE), final("cpu"), strict=True))


def test_grad_dtype_rounds_the_gradient(devices):
    params = [leaf(3 * TILE + 5), leaf(17, device="cpu")]
    ours, reference = make_pair(params, devices, grad_dtype=torch.bfloat16)
    for _ in range(3):
        for p, q in zip(params, params_of(reference), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = on_host(p.grad.bfloat16())
        ours.step()
        reference.step()
    assert_matches(ours, reference)
    assert ours.stats()["push_bytes"] == 2 * (17 + (0 if devices[0].startswith("gpu:") else 3 * TILE + 5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_max_grad_norm(devices, dtype):
    ours, reference = make_pair([leaf(100, dtype=dtype), leaf(TILE + 1, dtype=dtype)], devices, max_grad_norm=0.5)
    for _ in range(3):
        for p, q in zip(params_of(ours), params_of(reference), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = on_host(p.grad)
        norm = nn.utils.clip_grad_norm_(params_of(reference), 0.5)
        ours.step()
        reference.step()
        assert ours.stats()["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    # The accelerator sums the norm in another order than the CPU.
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        torch.testing.assert_close(ours.state[p]["master"].cpu(), q.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_grad_scaler(devices, dtype):
    ours, reference = make_pair([leaf(TILE + 1, dtype=dtype), leaf(9, dtype=dtype)], devices)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**6, growth_interval=1000)
    for overflow in (False, True, False, True, False):
        scale = scaler.get_scale()
        scaler.scale(torch.ones((), device=DEVICE))  # creates the scale's tensor, as scaling a loss does
        for p, q in zip(params_of(ours), params_of(reference), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = on_host(p.grad)
            p.grad *= scale  # a power of two: exact
        if overflow:
            params_of(ours)[1].grad[4] = float("inf")
        before = [p.detach().clone() for p in params_of(ours)]
        scaler.step(ours)
        scaler.update()
        assert scaler.get_scale() == (scale / 2 if overflow else scale)
        if overflow:
            assert all(torch.equal(a, p) for a, p in zip(before, params_of(ours), strict=True))
        else:
            reference.step()
    assert_matches(ours, reference)
    assert ours.state[params_of(ours)[0]]["step"] == 3


@pytest.mark.parametrize("devices", SCRATCH, ids=str)
@pytest.mark.parametrize("side_stream", [False, True], ids=["default stream", "side stream"])
def test_no_gradient_is_lost_between_kernels(devices, side_stream):
    """The gradient is not computed yet when step() is called, and is overwritten as soon as it returns."""
    ours, reference = make_pair([leaf(40 * TILE), leaf(40 * TILE, dtype=torch.bfloat16)], devices)
    stream = torch.Stream(DEVICE) if side_stream else torch.accelerator.current_stream()
    grads = [[torch.randn_like(p) for p in params_of(ours)] for _ in range(4)]
    stream.wait_stream(torch.accelerator.current_stream())
    seen = []
    with stream:
        for p in params_of(ours):
            p.grad = torch.zeros_like(p)
        for step_grads in grads:
            keep_busy()  # the old gradients are still there
            for p, grad in zip(params_of(ours), step_grads, strict=True):
                p.grad.copy_(grad)
            ours.step()
            seen.append([p.detach().clone() for p in params_of(ours)])  # what the next forward would read
            for p in params_of(ours):
                p.grad.fill_(float("nan"))
    torch.accelerator.synchronize()
    for step_grads, params in zip(grads, seen, strict=True):
        for q, grad in zip(params_of(reference), step_grads, strict=True):
            q.grad = on_host(grad)
        reference.step()
        assert relative_difference(params[0], params_of(reference)[0]) <= TOLERANCE
        assert torch.isfinite(params[1]).all()
    assert_matches(ours, reference)


def test_a_backward_right_after_the_step(devices):
    """An ordinary training loop in which nothing waits for the GPU."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(DEVICE)
    twin = copy.deepcopy(model)
    ours = CSDAdam(model.parameters(), lr=1e-3, devices=devices, tile_size=TILE)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    x, y = torch.randn(128, 64, device=DEVICE), torch.randn(128, 8, device=DEVICE)
    losses = {}
    for m, optimizer in ((model, ours), (twin, reference)):
        losses[m] = []
        for _ in range(20):
            optimizer.zero_grad(set_to_none=False)
            loss = nn.functional.mse_loss(m(x), y)
            loss.backward()
            optimizer.step()
            losses[m].append(loss.detach())
    torch.testing.assert_close(torch.stack(losses[model]), torch.stack(losses[twin]), rtol=1e-3, atol=1e-5)
    assert losses[model][-1] < losses[model][0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_write_to_a_parameter_counts(devices, dtype):
    p = leaf(TILE + 5, dtype=dtype)
    ours, reference = make_pair([p], devices)
    train_pair(ours, reference, steps=2)
    with torch.no_grad():
        p[:3] = 5.0
        params_of(reference)[0][:3] = 5.0
    train_pair(ours, reference, steps=1)
    assert_matches(ours, reference)


def test_state_dict_goes_between_host_and_device(devices):
    """fp32 states load from any device to which the checkpoint was read."""
    p = leaf(TILE + 5, dtype=torch.bfloat16)
    ours, reference = make_pair([p], devices)
    train_pair(ours, reference, steps=2)
    saved = ours.state_dict()
    for entry in saved["state"].values():
        entry.update({name: value.to(DEVICE) for name, value in entry.items()})
    other = CSDAdam([p.detach().clone().requires_grad_()], lr=1e-2, devices="file:")
    other.load_state_dict(saved)
    train_pair(other, reference, steps=2)
    assert_matches(other, reference)
