"""Top-K of gradients on an accelerator, by its kernels or on the host: the same bits as on the CPU."""

import pytest
import torch
from support.backends import TILE
from support.comparing import assert_same
from support.on_accelerator import DEVICE, DTYPES, SCRATCH, keep_busy

from csd_optim import CSDAdam
from csd_optim.compression.kernel_check import topk_kernels_of
from csd_optim.step import sparse

pytestmark = pytest.mark.accelerator


def train_topk(devices, place, shapes, topk, *, steps=4, tile_size=TILE, **kwargs):
    """Train parameters of all dtypes, each on the device `place(i)`. Returns them and their states, on the CPU."""
    generator = torch.Generator().manual_seed(1)
    params = [
        torch.randn(shape, generator=generator).to(place(i), DTYPES[i % 3]).requires_grad_()
        for i, shape in enumerate(shapes)
    ]
    optimizer = CSDAdam([{"params": params, "topk": topk}], lr=1e-2, devices=devices, tile_size=tile_size, **kwargs)
    for scale in [1.0, 1024.0, 0.37, 8.0][:steps]:
        for p in params:
            p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype).to(p.device)
        optimizer.grad_scale = torch.tensor(scale)
        optimizer.step()
    for p in params:
        if "residual" in optimizer.state[p]:
            assert optimizer.state[p]["residual"].device == p.device
    return [{key: t.detach().cpu() for key, t in {"param": p, **optimizer.state[p]}.items()} for p in params]


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("devices", SCRATCH, ids=str)
@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "no feedback"])
@pytest.mark.parametrize("topk", [0.01, 0.3, None])
@pytest.mark.parametrize("where", [DEVICE, "both"])
@pytest.mark.usefixtures("way")
def test_topk_has_the_same_bits_as_on_the_cpu(devices, where, topk, feedback):
    shapes = [(), (7,), (40, 100), (2, TILE), (5 * TILE + 3,), (64, 65), (3, 3), (TILE - 1,), (17,)]
    kwargs = {"shapes": shapes, "topk": topk, "error_feedback": feedback}
    expected = train_topk(devices, lambda i: "cpu", **kwargs)
    assert any("residual" in state for state in expected) == bool(topk and feedback)
    assert_same(train_topk(devices, lambda i: DEVICE if where == DEVICE or i % 2 else "cpu", **kwargs), expected)


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.usefixtures("way")
def test_topk_options(grad_dtype, maximize):
    kwargs = {"shapes": [(64, 65), (101, 97), (9,)], "topk": 0.05, "grad_dtype": grad_dtype, "maximize": maximize}
    assert_same(train_topk("file:", lambda i: DEVICE, **kwargs), train_topk("file:", lambda i: "cpu", **kwargs))


@pytest.mark.usefixtures("way")
def test_topk_of_tiles_of_several_blocks():
    kwargs = {
        "shapes": [(300_007,), (1 << 20,), (777, 1001), (2_500_000,)],
        "topk": 0.01,
        "tile_size": None,
        "steps": 2,
    }
    assert_same(train_topk("ram:", lambda i: DEVICE, **kwargs), train_topk("ram:", lambda i: "cpu", **kwargs))


def test_tiles_that_are_not_selected_at_once(monkeypatch):
    """If there are more than fit into memory. The last tiles have more than one parameter."""
    kwargs = {"shapes": [(30 * TILE + 3,), (7,), (64, 65), (9 * TILE,)], "topk": 0.1}
    expected = train_topk(["file:"] * 3, lambda i: "cpu", **kwargs)
    library = topk_kernels_of(torch.device(DEVICE, 0))
    before = library.launches
    assert_same(train_topk(["file:"] * 3, lambda i: DEVICE, **kwargs), expected)
    at_once = library.launches - before
    monkeypatch.setattr(sparse, "BATCH_BYTES", 100_000)
    assert_same(train_topk(["file:"] * 3, lambda i: DEVICE, **kwargs), expected)
    assert library.launches - before > 2 * at_once


def test_topk_of_layouts():
    """Residuals are in the memory order of the parameter, whatever the gradient's is."""

    def final(device):
        generator = torch.Generator().manual_seed(1)

        def randn(*shape):
            return torch.randn(shape, generator=generator).to(device)

        params = [
            randn(120, 100)[::2, ::3].requires_grad_(),
            randn(30, TILE // 8).t().requires_grad_(),
            randn(8, 30, 5, 4).to(memory_format=torch.channels_last).requires_grad_(),
        ]
        optimizer = CSDAdam([{"params": params, "topk": 0.02}], lr=1e-2, devices="ram:", tile_size=TILE)
        for _ in range(3):
            for p in params:
                p.grad = randn(*p.shape)
            optimizer.step()
        return [(key, t.detach().cpu()) for p in params for key, t in [("param", p), *optimizer.state[p].items()]]

    assert_same(final(DEVICE), final("cpu"))


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("devices", SCRATCH, ids=str)
@pytest.mark.parametrize("side_stream", [False, True], ids=["default stream", "side stream"])
@pytest.mark.parametrize("topk", [0.01, 0.3])
@pytest.mark.usefixtures("way")
def test_topk_waits_for_the_gradient_and_has_read_it(devices, side_stream, topk):
    """The gradient is not computed yet when step() is called, and overwritten once it returns. So is the residual."""
    n, steps = 40 * TILE, 3
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(n, generator=generator)
    grads = [torch.randn(n, generator=generator) for _ in range(steps)]

    def optimizer_of(p):
        return CSDAdam([{"params": [p], "topk": topk}], lr=1e-2, devices=devices, tile_size=TILE)

    p, q = start.to(DEVICE).requires_grad_(), start.clone().requires_grad_()
    ours, expected = optimizer_of(p), optimizer_of(q)
    on_gpu = [g.to(DEVICE) for g in grads]
    stream = torch.Stream(DEVICE) if side_stream else torch.accelerator.current_stream()
    stream.wait_stream(torch.accelerator.current_stream())
    owed = []
    with stream:
        p.grad = torch.zeros_like(p)
        for grad in on_gpu:
            keep_busy()
            p.grad.copy_(grad)
            ours.step()
            owed.append(ours.state[p]["residual"].clone())
            p.grad.fill_(float("nan"))
    torch.accelerator.synchronize()
    for grad, residual in zip(grads, owed, strict=True):
        q.grad = grad
        expected.step()
        assert torch.equal(residual.cpu(), expected.state[q]["residual"])
    assert torch.equal(p.detach().cpu(), q.detach())
