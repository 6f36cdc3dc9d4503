"""CUDA parameters: gradients and parameters travel through the ring of pinned host buffers.

Oracle: torch.optim.AdamW on fp32 copies in host memory.
"""

import copy

import pytest
import torch
from support.backends import TILE
from support.comparing import params_of
from support.gradients import any_bits, kinds, residual_of
from torch import nn

from csd_optim import CSDAdam
from csd_optim.bindings import topk_count
from csd_optim.compression.selection import feed_back, pack, rounded, select, select_exact

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.serial,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [17, 0, TILE - 1, TILE + 1, 5 * TILE + 3]
SCRATCH = [["file:"], ["ram:"], ["ram:", "file:"], ["file:"] * 3]
TOLERANCE = 1e-6


def leaf(*shape, dtype=torch.float32, device="cuda"):
    return torch.randn(shape, dtype=dtype, device=device).requires_grad_()


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_match_adamw(devices, dtype):
    ours, reference = make_pair([leaf(n, dtype=dtype) for n in SIZES], devices)
    train(ours, reference)
    assert_matches(ours, reference)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(devices, dtype):
    params = [
        torch.randn(12, 10, dtype=dtype, device="cuda")[::2, ::3].requires_grad_(),
        torch.randn(30, TILE // 8, dtype=dtype, device="cuda").t().requires_grad_(),
        torch.randn(8, 3, 5, 4, dtype=dtype, device="cuda").to(memory_format=torch.channels_last).requires_grad_(),
    ]
    ours, reference = make_pair(params, devices)
    train(ours, reference)
    train(ours, reference, make=lambda p: torch.randn(p.shape, dtype=p.dtype, device=p.device))
    assert_matches(ours, reference)


def test_complex(devices):
    ours, reference = make_pair([leaf(TILE + 1, dtype=torch.complex64)], devices)
    train(ours, reference)
    assert_matches(ours, reference)


def test_cpu_and_cuda_parameters_in_one_optimizer(devices):
    """Small ones of either kind share tiles: what is in reach of the engine travels with what is not."""
    params = [
        leaf(n, dtype=dtype, device=device)
        for n in (5, 100, TILE + 1)
        for dtype in DTYPES
        for device in ("cpu", "cuda")
    ]
    ours, reference = make_pair(params, devices)
    train(ours, reference)
    assert_matches(ours, reference)


def test_parameters_move_to_the_gpu_and_back(devices):
    model = nn.Linear(40, 60)
    twin = copy.deepcopy(model)
    ours = CSDAdam(model.parameters(), lr=1e-2, devices=devices, tile_size=TILE)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for device in ("cpu", "cuda", "cpu", "cuda"):
        model.to(device)
        train(ours, reference, steps=2)
    assert_matches(ours, reference)


@pytest.mark.parametrize("devices", SCRATCH, ids=str)
@pytest.mark.parametrize("tile_size", [1024, 3 * TILE, None])
def test_many_tiles_and_devices(devices, tile_size):
    """More tiles than the ring has slots: every slot is used again within a step."""
    params = [leaf(50 * TILE + 7), leaf(20 * TILE, dtype=torch.bfloat16), leaf(TILE, device="cpu")]
    ours, reference = make_pair(params, devices, tile_size=tile_size)
    train(ours, reference, steps=3)
    assert_matches(ours, reference)


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.parametrize("devices", SCRATCH, ids=str)
def test_same_bits_as_on_the_cpu(devices, state_dtype):
    """With 8-bit states also where somebody sets parameters, and torch does not count that."""

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

    assert all(torch.equal(a, b) for a, b in zip(final("cuda"), final("cpu"), strict=True))


def test_grad_dtype_rounds_the_gradient(devices):
    params = [leaf(3 * TILE + 5), leaf(17, device="cpu")]
    ours, reference = make_pair(params, devices, grad_dtype=torch.bfloat16)
    for _ in range(3):
        for p, q in zip(params, params_of(reference), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = fp32_copy(p.grad.bfloat16())
        ours.step()
        reference.step()
    assert_matches(ours, reference)
    assert ours.stats()["push_bytes"] == 2 * (3 * TILE + 5 + 17)


@pytest.mark.parametrize("dtype", DTYPES)
def test_max_grad_norm(devices, dtype):
    ours, reference = make_pair([leaf(100, dtype=dtype), leaf(TILE + 1, dtype=dtype)], devices, max_grad_norm=0.5)
    for _ in range(3):
        for p, q in zip(params_of(ours), params_of(reference), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = fp32_copy(p.grad)
        norm = nn.utils.clip_grad_norm_(params_of(reference), 0.5)
        ours.step()
        reference.step()
        assert ours.stats()["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    # The norm is summed in another order there than here.
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        torch.testing.assert_close(ours.state[p]["master"], q.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_grad_scaler(devices, dtype):
    ours, reference = make_pair([leaf(TILE + 1, dtype=dtype), leaf(9, dtype=dtype)], devices)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**6, growth_interval=1000)
    for overflow in (False, True, False, True, False):
        scale = scaler.get_scale()
        scaler.scale(torch.ones((), device="cuda"))  # makes the scale a tensor, as scaling a loss does
        for p, q in zip(params_of(ours), params_of(reference), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = fp32_copy(p.grad)
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
    """The gradient is not there yet when step() is called, and is overwritten as soon as it has returned."""
    ours, reference = make_pair([leaf(40 * TILE), leaf(40 * TILE, dtype=torch.bfloat16)], devices)
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    grads = [[torch.randn_like(p) for p in params_of(ours)] for _ in range(4)]
    seen = []
    with torch.cuda.stream(stream):
        for p in params_of(ours):
            p.grad = torch.zeros_like(p)
        for step_grads in grads:
            torch.cuda._sleep(20_000_000)  # about 10 ms in which the old gradients are still there
            for p, grad in zip(params_of(ours), step_grads, strict=True):
                p.grad.copy_(grad)
            ours.step()
            seen.append([p.detach().clone() for p in params_of(ours)])  # what the next forward would read
            for p in params_of(ours):
                p.grad.fill_(float("nan"))
    torch.cuda.synchronize()
    for step_grads, params in zip(grads, seen, strict=True):
        for q, grad in zip(params_of(reference), step_grads, strict=True):
            q.grad = fp32_copy(grad)
        reference.step()
        assert_close(params[0], params_of(reference)[0])
        assert torch.isfinite(params[1]).all()
    assert_matches(ours, reference)


def test_a_backward_right_after_the_step(devices):
    """An ordinary training loop, with nothing that waits for the GPU."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).cuda()
    twin = copy.deepcopy(model)
    ours = CSDAdam(model.parameters(), lr=1e-3, devices=devices, tile_size=TILE)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    x, y = torch.randn(128, 64, device="cuda"), torch.randn(128, 8, device="cuda")
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
    train(ours, reference, steps=2)
    with torch.no_grad():
        p[:3] = 5.0
        params_of(reference)[0][:3] = 5.0
    train(ours, reference, steps=1)
    assert_matches(ours, reference)


def test_state_dict_goes_between_cuda_and_cpu(devices):
    """fp32 states load whatever device the checkpoint was read to."""
    p = leaf(TILE + 5, dtype=torch.bfloat16)
    ours, reference = make_pair([p], devices)
    train(ours, reference, steps=2)
    saved = ours.state_dict()
    for entry in saved["state"].values():
        entry.update({name: value.cuda() for name, value in entry.items()})
    other = CSDAdam([p.detach().clone().requires_grad_()], lr=1e-2, devices="file:")
    other.load_state_dict(saved)
    train(other, reference, steps=2)
    assert_matches(other, reference)


# ---- Top-K: selected on the GPU, what is owed stays there -------------------------------------


def train_topk(devices, place, shapes, topk, *, steps=4, tile_size=TILE, **kwargs):
    """Trains parameters of all dtypes, each at `place(i)`; returns them with their states, on the CPU."""
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
    return [(key, t.detach().cpu()) for p in params for key, t in [("param", p), *sorted(optimizer.state[p].items())]]


def assert_same(a, b):
    assert [key for key, _ in a] == [key for key, _ in b]
    for (key, x), (_, y) in zip(a, b, strict=True):
        assert torch.equal(x, y), key


@pytest.mark.parametrize("devices", SCRATCH, ids=str)
@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "no feedback"])
@pytest.mark.parametrize("topk", [0.01, 0.3, None])
@pytest.mark.parametrize("where", ["cuda", "both"])
def test_topk_has_the_same_bits_as_on_the_cpu(devices, where, topk, feedback):
    shapes = [(), (7,), (40, 100), (2, TILE), (5 * TILE + 3,), (64, 65), (3, 3), (TILE - 1,), (17,)]
    kwargs = {"shapes": shapes, "topk": topk, "error_feedback": feedback}
    expected = train_topk(devices, lambda i: "cpu", **kwargs)
    assert ("residual" in dict(expected)) == bool(topk and feedback)
    assert_same(train_topk(devices, lambda i: "cuda" if where == "cuda" or i % 2 else "cpu", **kwargs), expected)


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("maximize", [True, False])
def test_topk_options(grad_dtype, maximize):
    kwargs = {"shapes": [(64, 65), (101, 97), (9,)], "topk": 0.05, "grad_dtype": grad_dtype, "maximize": maximize}
    assert_same(train_topk("file:", lambda i: "cuda", **kwargs), train_topk("file:", lambda i: "cpu", **kwargs))


def test_topk_of_tiles_of_several_blocks():
    kwargs = {
        "shapes": [(300_007,), (1 << 20,), (777, 1001), (2_500_000,)],
        "topk": 0.01,
        "tile_size": None,
        "steps": 2,
    }
    assert_same(train_topk("ram:", lambda i: "cuda", **kwargs), train_topk("ram:", lambda i: "cpu", **kwargs))


def test_topk_of_layouts():
    """What is owed lies in the order of the parameter's memory, whatever that of the gradient is."""

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

    assert_same(final("cuda"), final("cpu"))


@pytest.mark.parametrize("devices", SCRATCH, ids=str)
@pytest.mark.parametrize("side_stream", [False, True], ids=["default stream", "side stream"])
@pytest.mark.parametrize("topk", [0.01, 0.3])
def test_topk_waits_for_the_gradient_and_has_read_it(devices, side_stream, topk):
    """As above: not there yet when step() is called, and overwritten as soon as it has returned; so is what is owed."""
    n, steps = 200 * TILE, 4
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(n, generator=generator)
    grads = [torch.randn(n, generator=generator) for _ in range(steps)]

    def optimizer_of(p):
        return CSDAdam([{"params": [p], "topk": topk}], lr=1e-2, devices=devices, tile_size=4 * TILE)

    p, q = start.cuda().requires_grad_(), start.clone().requires_grad_()
    ours, expected = optimizer_of(p), optimizer_of(q)
    on_gpu = [g.cuda() for g in grads]
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    owed = []
    with torch.cuda.stream(stream):
        p.grad = torch.zeros_like(p)
        for grad in on_gpu:
            torch.cuda._sleep(20_000_000)
            p.grad.copy_(grad)
            ours.step()
            owed.append(ours.state[p]["residual"].clone())
            p.grad.fill_(float("nan"))
    torch.cuda.synchronize()
    for grad, residual in zip(grads, owed, strict=True):
        q.grad = grad
        expected.step()
        assert torch.equal(residual.cpu(), expected.state[q]["residual"])
    assert torch.equal(p.detach().cpu(), q.detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 17, 65537, 299_993])
def test_selection_on_the_gpu(n, dtype):
    """Every function of compression.py, with every kind of gradient: the same bits as on the CPU."""

    def bits(t):
        return t.cpu().view(torch.int16)

    for grad_dtype in DTYPES:
        for name, grad in kinds(n, grad_dtype):
            for scale in (1.0, 0.37, -(2.0**-16), 0.0):
                residual = any_bits(n, torch.bfloat16) if name == "any bits" else residual_of(torch.randn(n), scale)
                values, there = rounded(grad, residual, scale, dtype), (grad.cuda(), residual.cuda(), scale)
                on_gpu = rounded(*there, dtype)
                assert torch.equal(bits(on_gpu), bits(values)), (name, scale)
                for ratio in (0.001, 0.1, 1.0):
                    chosen = select(values, k := topk_count(ratio, n))
                    assert torch.equal(select(on_gpu, k).cpu(), chosen), (name, scale, ratio)
                    assert torch.equal(select_exact(on_gpu, k).cpu(), chosen), (name, scale, ratio)
                sent = select(on_gpu, topk_count(0.1, n))
                chosen = sent.cpu()
                assert torch.equal(pack(sent, on_gpu[sent], n).cpu(), pack(chosen, values[chosen], n))
                feed_back(*there, sent.int(), on_gpu[sent], 5, 3)
                feed_back(grad, residual, scale, chosen, values[chosen], 5, 3)
                assert torch.equal(bits(there[1]), bits(residual)), (name, scale)


def test_selection_needs_little_memory():
    """And nothing of the gradient's size anywhere else."""
    n = 1 << 20
    for _, grad in kinds(n, torch.float32):
        grad, residual = grad.cuda(), torch.zeros(n, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        values = rounded(grad, residual, 1.0, torch.bfloat16)
        sent = select(values, topk_count(0.01, n))
        feed_back(grad, residual, 1.0, sent, values[sent], 0, 1)
        assert torch.cuda.max_memory_allocated() - before <= 32 * n
