"""The loops that people write around an optimizer: closures, schedulers, loss scaling, hooks, threads, compilers."""

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.backends import TILE
from support.beside import (
    assert_close,
    assert_same_weights,
    everything,
    gradients,
    leaf,
    pair_of_models,
    small_model,
    train_beside,
)
from support.comparing import assert_same, params_of
from support.optimizers import ADAMW, FULL, rules
from torch import nn
from torch.optim import AdamW, lr_scheduler
from torch.optim import optimizer as torch_optimizer

from csd_optim import CSDAdam

OWN_OPTIONS = {"devices", "grad_dtype", "max_grad_norm", "overwrite", "tile_size"}


# ---- Training loops ----------------------------------------------------------------


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_closure(devices):
    model, ours, twin, reference = pair_of_models(devices)
    x, y = torch.randn(16, 6), torch.randn(16, 2)

    def losses(m, optimizer):
        def closure():
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(m(x), y)
            loss.backward()
            return loss

        with torch.no_grad():
            return [optimizer.step(closure).item() for _ in range(10)]

    found, expected = losses(model, ours), losses(twin, reference)
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] < found[0]


def test_step_returns_none_without_a_closure(devices):
    p = leaf(3)
    optimizer = CSDAdam([p], devices=devices)
    assert optimizer.step() is None  # also without any gradient
    p.grad = torch.ones_like(p)
    assert optimizer.step() is None


def test_zero_grad(devices):
    p = leaf(3)
    optimizer = CSDAdam([p], devices=devices)
    p.grad = torch.ones(3)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(p.grad, torch.zeros(3))
    optimizer.zero_grad()
    assert p.grad is None


@pytest.mark.parametrize(
    ("lr", "make_scheduler"),
    [
        (0.1, lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5)),
        (0.1, lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=10)),  # cycles beta1 as well
        (0.1, lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=7)),
        (torch.tensor(0.1), lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k))),
        (torch.tensor(0.1), lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5)),
    ],
    ids=["StepLR", "OneCycleLR", "CosineAnnealingLR", "LambdaLR of a tensor", "StepLR of a tensor"],
)
@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_schedulers(devices, lr, make_scheduler):
    model, twin = small_model(), small_model()
    twin.load_state_dict(model.state_dict())
    rates = {}
    for m, make in ((model, lambda p, lr: CSDAdam(p, lr, devices=devices)), (twin, AdamW)):
        optimizer = make(m.parameters(), copy.deepcopy(lr))
        scheduler = make_scheduler(optimizer)
        rates[m] = []
        for k in range(8):
            gradients(m.parameters(), k)
            optimizer.step()
            scheduler.step()
            rates[m].append((float(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["betas"]))
    assert rates[model] == rates[twin]
    assert len(set(rates[model])) > 1
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(p, q)


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_clip_grad_norm(devices):
    _, ours, _, reference = pair_of_models(devices)
    for optimizer in (ours, reference):
        for k in range(4):
            gradients(params_of(optimizer), k)
            assert nn.utils.clip_grad_norm_(params_of(optimizer), 0.1) > 0.1
            optimizer.step()
    assert_same_weights(ours, reference)


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_gradient_accumulation(devices):
    model, ours, twin, reference = pair_of_models(devices)
    for m, optimizer in ((model, ours), (twin, reference)):
        generator = torch.Generator().manual_seed(3)
        for _ in range(3):
            for _ in range(4):
                m(torch.randn(8, 6, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_gradients_are_left_as_they_are(devices):
    params = [leaf(5), leaf(TILE + 1, dtype=torch.bfloat16), torch.randn(3, 4).t().requires_grad_()]
    optimizer = CSDAdam(params, devices=devices, grad_dtype=torch.float16, max_grad_norm=0.01)
    gradients(params, 0)
    before = [p.grad.clone() for p in params]
    optimizer.step()
    assert_same([p.grad for p in params], before)


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_tied_weights_are_one_parameter(devices):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x):
            return self.head(self.embedding(x))

    model = Tied()
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embedding.weight
    ours, reference = CSDAdam(model.parameters(), devices=devices), AdamW(twin.parameters())
    x = torch.arange(10)
    for m, optimizer in ((model, ours), (twin, reference)):
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(m(x), x.flip(0)).backward()
            optimizer.step()
    assert len(ours.state) == 1
    assert ours.state[model.head.weight]["step"] == 5
    torch.testing.assert_close(model.head.weight, twin.head.weight, rtol=1e-5, atol=1e-6)


def test_a_step_counts_as_an_in_place_change(devices):
    """A tensor that backward saved and step() changed is an error, not a wrong gradient."""
    p = leaf(2 * TILE)
    optimizer = CSDAdam([p], devices=devices)
    loss = p.square().sum()
    loss.backward(retain_graph=True)
    version = p._version
    optimizer.step()
    assert p._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_compiled_model(devices):
    model, ours, twin, reference = pair_of_models(devices)
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(4, 6)
    for m, optimizer in ((compiled, ours), (twin, reference)):
        for _ in range(3):
            optimizer.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_compiled_step(devices):
    _, ours, _, reference = pair_of_models(devices)
    step = torch.compile(ours.step, backend="eager")
    for k in range(2):
        for optimizer in (ours, reference):
            gradients(params_of(optimizer), k)
        step()
        reference.step()
    assert_same_weights(ours, reference)
    torch._dynamo.reset()


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_several_optimizers_in_one_process(tmp_path):
    pairs = []
    for devices in (["file:"], ["ram:"], [str(tmp_path / "a"), str(tmp_path / "b")], ["file:"]):
        _, ours, _, reference = pair_of_models(devices, lr=0.01 * (1 + len(pairs)))
        pairs.append((ours, reference))
    for k in range(4):
        for ours, reference in pairs:
            train_beside(ours, reference, 1, start=k)
    for ours, reference in pairs:
        assert_same_weights(ours, reference)


def test_optimizers_may_step_at_the_same_time():
    """Each in its own thread: they share only the update threads."""

    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        p = torch.randn(20 * TILE, generator=generator).bfloat16().requires_grad_()
        with CSDAdam([p], devices=["file:", "ram:"], tile_size=TILE) as optimizer:
            for _ in range(5):
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
                optimizer.step()
            return everything(optimizer)

    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(run, range(8)))
    for seed, found in enumerate(together):
        assert_same(found, run(seed))


def test_profiler_sees_the_step():
    p = leaf(5)
    optimizer = CSDAdam([p], devices="ram:")
    p.grad = torch.ones_like(p)
    with torch.autograd.profiler.profile() as profile:
        optimizer.step()
    assert "Optimizer.step#CSDAdam.step" in [event.name for event in profile.function_events]


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_one_optimizer_per_parameter_in_backward(devices):
    if any(not d.endswith(":") for d in devices):
        pytest.skip("one named store cannot serve several optimizers")
    model, twin = small_model(), small_model()
    twin.load_state_dict(model.state_dict())
    optimizers = {p: CSDAdam([p], devices=devices) for p in model.parameters()}

    def step_and_forget(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_and_forget)
    reference = AdamW(twin.parameters())
    x = torch.randn(4, 6)
    for _ in range(3):
        model(x).square().sum().backward()
        assert all(p.grad is None for p in model.parameters())
        reference.zero_grad()
        twin(x).square().sum().backward()
        reference.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# ---- Loss scaling --------------------------------------------------------------------


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize(
    ("of", "dtype", "unscale"),
    [
        *itertools.product([ADAMW], [torch.float16, torch.float32, torch.bfloat16], [False, True]),
        *(pytest.param(*of.values, torch.float16, False, id=of.id, marks=of.marks) for of in rules(FULL)),
    ],
)
@pytest.mark.fp32_states("compares with torch to its last bits")
def test_grad_scaler(devices, of, dtype, unscale):
    if unscale and dtype is torch.float16:
        pytest.skip("torch refuses to unscale fp16 gradients in place")
    p = leaf(TILE + 1, dtype=dtype)
    q = p.detach().to(torch.float32, copy=True).requires_grad_()
    ours, reference = of.ours([p], devices=devices, **of.kwargs), of.reference([q], **of.kwargs)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
    for k in range(5):
        scale = scaler.get_scale()
        scaler.scale(torch.ones(()))  # initializes the scale tensor lazily, as scaling a loss does
        gradients([p], k)
        q.grad = p.grad.to(torch.float32, copy=True)
        p.grad = (p.grad * scale).to(dtype)  # a power of two: exact
        if unscale:
            scaler.unscale_(ours)
        scaler.step(ours)
        scaler.update()
        reference.step()
    assert scaler.get_scale() == 2.0**8
    assert_close(ours.state[p]["master"], q)
    assert torch.equal(p.detach(), ours.state[p]["master"].to(dtype))
    assert not hasattr(ours, "found_inf")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_step_that_overflows_changes_nothing(devices, dtype):
    p, q = leaf(TILE + 1, dtype=dtype), leaf(7, dtype=dtype)
    optimizer = CSDAdam([p, q], devices=devices)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    for bad in (float("inf"), float("nan"), None):
        scaler.scale(torch.ones(()))
        gradients([p, q], 0)
        if bad is not None:
            q.grad[3] = bad
        before, version, scale = everything(optimizer), p._version, scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.stats()["skipped"] == (bad is not None)
        if bad is not None:
            assert_same(everything(optimizer), before)
            assert p._version == version
            assert scaler.get_scale() == scale / 2
    assert optimizer.state[p]["step"] == 1


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_found_inf_and_grad_scale(devices):
    """The attributes that GradScaler sets around step()."""
    _, ours, _, reference = pair_of_models(devices)
    train_beside(ours, reference, 1)
    before = everything(ours)
    ours.found_inf, ours.grad_scale = torch.tensor(1.0), torch.tensor(8.0)
    gradients(params_of(ours), 1)
    ours.step()
    assert_same(everything(ours), before)
    ours.found_inf = torch.tensor(0.0)
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        q.grad = p.grad / 8
    ours.step()
    reference.step()
    assert_same_weights(ours, reference)


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_max_grad_norm_is_of_unscaled_gradients(devices):
    p = leaf(50, dtype=torch.float16)
    q = p.detach().to(torch.float32, copy=True).requires_grad_()
    ours, reference = CSDAdam([p], devices=devices, max_grad_norm=0.1), AdamW([q])
    p.grad = torch.randn_like(p) * 16
    q.grad = p.grad.float() / 16
    norm = nn.utils.clip_grad_norm_([q], 0.1)
    ours.found_inf, ours.grad_scale = torch.tensor(0.0), torch.tensor(16.0)
    ours.step()
    reference.step()
    assert ours.stats()["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
    assert_close(ours.state[p]["exp_avg"], reference.state[q]["exp_avg"])


# ---- Hooks -----------------------------------------------------------------------------


def test_step_hooks_run_once_each(devices):
    p = leaf(3)
    optimizer = CSDAdam([p], devices=devices)
    p.grad = torch.ones_like(p)
    calls = []

    def called(name):
        return lambda o, args, kwargs: calls.append((name, o is optimizer, optimizer.state[p].get("step", 0) + 0))

    handles = [
        torch_optimizer.register_optimizer_step_pre_hook(called("global pre")),
        torch_optimizer.register_optimizer_step_post_hook(called("global post")),
        optimizer.register_step_pre_hook(called("pre")),
        optimizer.register_step_post_hook(called("post")),
    ]
    try:
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    optimizer.step()
    assert calls == [("global pre", True, 0), ("pre", True, 0), ("post", True, 1), ("global post", True, 1)]


def test_a_step_pre_hook_may_replace_the_arguments():
    p = leaf(3)
    optimizer = CSDAdam([p], devices="ram:")
    optimizer.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: "replaced"), {}))
    assert optimizer.step(lambda: "given") == "replaced"


def test_state_dict_hooks(devices):
    p = leaf(3)
    optimizer = CSDAdam([p], devices=devices)
    p.grad = torch.ones_like(p)
    optimizer.step()
    calls = []
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("pre"))
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("first pre"), prepend=True)
    optimizer.register_state_dict_post_hook(lambda o, d: {**d, "more": 1})
    optimizer.register_state_dict_post_hook(lambda o, d: calls.append(sorted(d)), prepend=True)
    assert optimizer.state_dict()["more"] == 1
    assert calls == ["first pre", "pre", ["param_groups", "state"]]


@pytest.mark.fp32_states("what is written to states is rounded to codes")
def test_load_state_dict_hooks(devices):
    p, q = leaf(3), leaf(3)
    source = AdamW([q])
    q.grad = torch.ones_like(q)
    source.step()
    optimizer = CSDAdam([p], devices=devices)
    calls = []

    def double(_, d):
        entry = {**d["state"][0], "exp_avg": 2 * d["state"][0]["exp_avg"]}
        return {**d, "state": {0: entry}}

    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.register_load_state_dict_pre_hook(lambda o, d: calls.append("first pre"), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append(o.state[p]["exp_avg"][0].item()))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("first post"), prepend=True)
    optimizer.load_state_dict(source.state_dict())
    assert calls == ["first pre", "first post", pytest.approx(0.2)]
    assert torch.equal(optimizer.state[p]["exp_avg"], 2 * source.state[q]["exp_avg"])
