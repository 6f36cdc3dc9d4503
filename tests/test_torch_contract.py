"""What torch, and the code people write around an optimizer, expect of one."""

import contextlib
import copy
import gc
import inspect
import os
import pickle
import subprocess
import sys
import textwrap
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import TILE
from torch import nn
from torch.optim import AdamW, lr_scheduler
from torch.optim import optimizer as torch_optimizer

from csd_optim import CSDAdam, CSDError, CSDRuntimeError, CSDTypeError, CSDValueError
from csd_optim.engine.engine import Engine
from csd_optim.params.param_state import ParamState

OWN_OPTIONS = {"devices", "grad_dtype", "max_grad_norm", "overwrite", "tile_size"}
SCRATCH = [["file:"], ["ram:"], ["ram:", "file:"]]


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype).requires_grad_()


def small_model(dtype=torch.float32):
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).to(dtype)


def gradients(params, step):
    """The same random gradients for the same step, whoever asks."""
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def pair_of_models(devices, **kwargs):
    """Equal fp32 models, one trained by CSDAdam, one by AdamW."""
    model = small_model()
    twin = copy.deepcopy(model)
    return model, CSDAdam(model.parameters(), devices=devices, **kwargs), twin, AdamW(twin.parameters(), **kwargs)


def train_beside(ours, reference, steps, start=0, each=lambda optimizer: None):
    for optimizer in (ours, reference):
        for k in range(start, start + steps):
            gradients(params_of(optimizer), k)
            optimizer.step()
            each(optimizer)


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def assert_close(a, b):
    a, b = a.detach().double(), b.detach().double()
    assert ((a - b).abs().max() <= 1e-6 * b.abs().max()).item()


def assert_same_weights(ours, reference):
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        assert_close(p, q)


def everything(optimizer):
    """A copy of parameters and state, to compare bits with later."""
    return [
        t.detach().clone()
        for p in params_of(optimizer)
        for t in (p, *(value for _, value in sorted(optimizer.state[p].items())))
    ]


def assert_same_bits(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def run_script(script, *arguments):
    """A Python process of its own; returns what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


# ---- Constructor ----------------------------------------------------------------


def test_signature_is_adamws_then_ours():
    theirs = list(inspect.signature(AdamW.__init__).parameters.values())
    ours = list(inspect.signature(CSDAdam.__init__).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [(p.name, p.kind, p.default) for p in theirs]
    assert {p.name for p in ours[len(theirs) :]} >= OWN_OPTIONS
    for p in ours[len(theirs) :]:
        assert p.kind is p.KEYWORD_ONLY
        assert p.default is not p.empty


def test_looks_like_adamw():
    ours, reference = CSDAdam([leaf(3)], devices="ram:"), AdamW([leaf(3)])
    assert isinstance(ours, AdamW)
    assert ours.defaults == reference.defaults
    assert ours.param_groups[0].keys() == reference.param_groups[0].keys()
    assert repr(reference).removeprefix("AdamW") in repr(ours)
    assert "ram:" in repr(ours)


def test_works_with_no_argument_but_parameters():
    p = leaf(5)
    optimizer = CSDAdam([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[p]["step"] == 1


def test_devices_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("CSD_OPTIM_DEVICES", "ram:, file:")
    assert "[ram:, file:]" in repr(CSDAdam([leaf(5)]))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"lr": -1},
        {"lr": float("nan")},
        {"lr": torch.tensor(-0.1)},
        {"lr": torch.tensor([1e-3, 1e-3])},
        {"lr": torch.tensor(1e-3), "foreach": True},
        {"betas": (1.0, 0.9)},
        {"betas": (-0.1, 0.9)},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9, torch.tensor(0.9))},
        {"betas": (torch.tensor([0.9, 0.8]), torch.tensor(0.9))},
        {"eps": -1e-8},
        {"weight_decay": -0.5},
        {"fused": True, "foreach": True},
    ],
    ids=str,
)
def test_bad_arguments_in_torchs_words(kwargs):
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        AdamW([leaf(3)], **kwargs)
    with pytest.raises(theirs.type) as ours:
        CSDAdam([leaf(3)], devices="ram:", **kwargs)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("bad", ["tensor", "empty", "set", "not tensors", "non-leaf", "twice", "half named"])
def test_bad_params_in_torchs_words(bad):
    def params():
        p = leaf(3)
        return {
            "tensor": p,
            "empty": [],
            "set": [{"params": {p}}],
            "not tensors": [1.0],
            "non-leaf": [p * 2],
            "twice": [{"params": [p]}, {"params": [p]}],
            "half named": [("a", p), leaf(2)],
        }[bad]

    with pytest.raises((TypeError, ValueError)) as theirs:
        AdamW(params())
    with pytest.raises(theirs.type) as ours:
        CSDAdam(params(), devices="ram:")
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"grad_dtype": torch.float64}, "Invalid grad_dtype: torch.float64"),
        ({"max_grad_norm": 0.0}, "Invalid max_grad_norm: 0.0"),
        ({"max_grad_norm": float("nan")}, "Invalid max_grad_norm: nan"),
        ({"tile_size": 0}, "Invalid tile_size: 0"),
        ({"tile_size": 1.5}, "Invalid tile_size: 1.5"),
        ({"devices": []}, "Invalid devices: []"),
        ({"devices": "tape:"}, "Invalid device: 'tape:'"),
    ],
    ids=str,
)
def test_bad_options_of_ours(kwargs, error):
    with pytest.raises(CSDValueError) as raised:
        CSDAdam([leaf(3)], **kwargs)
    assert isinstance(raised.value, ValueError)
    assert error in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_other_dtypes_are_refused_before_anything_is_touched(tmp_path, dtype):
    directory = tmp_path / "csd"
    with pytest.raises(CSDTypeError, match=f"{dtype}.*0.1.*3") as raised:
        CSDAdam([leaf(3), leaf(3).detach().to(dtype).requires_grad_()], devices=str(directory))
    assert isinstance(raised.value, TypeError)
    assert not directory.exists()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float64, torch.float8_e4m3fn])
def test_frozen_parameters_may_be_anything(devices, dtype):
    """As those of a quantized model under LoRA."""
    frozen = torch.nn.Parameter(torch.zeros(3).to(dtype), requires_grad=False)
    lazy = torch.nn.LazyLinear(2).weight
    p = leaf(3)
    optimizer = CSDAdam([frozen, p, lazy], devices=devices)
    p.grad = torch.ones(3)
    optimizer.step()
    assert list(optimizer.state) == [p]


def test_a_frozen_parameter_that_is_trained_after_all_is_looked_at(devices):
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)
    optimizer = CSDAdam([p], devices=devices)
    p.requires_grad_().grad = torch.ones_like(p)
    with pytest.raises(CSDTypeError, match="float64"):
        optimizer.step()


@pytest.mark.parametrize("name", ["capturable", "differentiable"])
def test_capturable_and_differentiable_are_refused(tmp_path, name):
    with pytest.raises(RuntimeError, match=name):
        CSDAdam([leaf(3)], devices=str(tmp_path / "csd"), **{name: True})
    with pytest.raises(RuntimeError, match=name):
        CSDAdam([{"params": [leaf(3)], name: True}], devices=str(tmp_path / "csd"))
    assert not (tmp_path / "csd").exists()


def test_sparse_gradients_are_refused_before_anything_is_touched(devices):
    dense, sparse = leaf(5), leaf(4, 2)
    optimizer = CSDAdam([dense, sparse], devices=devices)
    before = dense.detach().clone()
    dense.grad = torch.ones_like(dense)
    sparse.grad = torch.eye(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients, please consider SparseAdam instead"):
        optimizer.step()
    assert torch.equal(dense.detach(), before)
    sparse.grad = sparse.grad.to_dense()
    optimizer.step()
    assert optimizer.state[dense]["step"] == 1


def test_a_gradient_of_another_shape_is_refused_before_anything_is_touched(devices):
    p, q = leaf(5), leaf(5)
    optimizer = CSDAdam([p, q], devices=devices)
    train = [torch.ones(5), torch.ones(5)]
    p.grad, q.grad = train
    optimizer.step()
    before = everything(optimizer)
    q.grad.data = torch.ones(7)
    with pytest.raises(ValueError, match="shape"):
        optimizer.step()
    assert_same_bits(everything(optimizer), before)


# ---- Parameter groups -------------------------------------------------------------


@pytest.mark.parametrize("how", ["list", "tensor", "generator", "amsgrad"])
def test_add_param_group_while_training(devices, how):
    first, later = [leaf(5), leaf(2 * TILE)], [leaf(17), leaf(3, 3)]
    if how == "tensor":
        later = later[:1]
    copies = [[p.detach().clone().requires_grad_() for p in params] for params in (first, later)]
    ours, reference = CSDAdam(first, devices=devices), AdamW(copies[0])
    train_beside(ours, reference, 3)

    def group(params):
        if how == "amsgrad":
            return {"params": params, "amsgrad": True}
        return {"params": {"list": params, "tensor": params[0], "generator": (p for p in params)}[how], "lr": 0.1}

    ours.add_param_group(group(later))
    reference.add_param_group(group(copies[1]))
    train_beside(ours, reference, 3, start=3)
    assert_same_weights(ours, reference)
    assert [ours.state[p]["step"].item() for p in params_of(ours)] == [6, 6] + [3] * len(later)
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        ours.add_param_group({"params": first})


def test_named_parameters(devices):
    model = small_model()
    named = list(model.named_parameters())
    optimizer = CSDAdam(named[:2], devices=devices)
    optimizer.add_param_group({"params": iter(named[2:])})
    gradients(model.parameters(), 0)
    optimizer.step()
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["0.weight", "0.bias"],
        ["2.weight", "2.bias"],
    ]
    assert optimizer.state_dict()["param_groups"][1]["param_names"] == ["2.weight", "2.bias"]
    assert all(optimizer.state[p]["step"] == 1 for p in model.parameters())


def test_frozen_parameters_take_no_part(devices):
    model, ours, twin, reference = pair_of_models(devices)
    for m in (model, twin):
        m[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    x = torch.randn(8, 6)
    for m, optimizer in ((model, ours), (twin, reference)):
        for _ in range(3):
            optimizer.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert model[0].weight not in ours.state
    assert set(ours.state) == set(model.parameters()) - {model[0].weight}


def test_thawed_parameters_join(devices):
    _, ours, _, reference = pair_of_models(devices)
    for optimizer in (ours, reference):
        gradients(params_of(optimizer), 0)
        params_of(optimizer)[0].grad = None
        optimizer.step()
    train_beside(ours, reference, 2, start=1)
    assert_same_weights(ours, reference)
    assert [ours.state[p]["step"].item() for p in params_of(ours)] == [2, 3, 3, 3]


def test_a_removed_parameter_stays_as_it_is(devices):
    p, q = leaf(5), leaf(6)
    optimizer = CSDAdam([{"params": [p]}, {"params": [q]}], devices=devices)
    gradients([p, q], 0)
    optimizer.step()
    del optimizer.param_groups[0]
    before = p.detach().clone()
    gradients([p, q], 1)
    optimizer.step()
    assert torch.equal(p.detach(), before)
    assert optimizer.state[q]["step"] == 2


# ---- Training loops ----------------------------------------------------------------


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
    assert optimizer.step() is None  # and without a gradient
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


def test_clip_grad_norm(devices):
    _, ours, _, reference = pair_of_models(devices)
    for optimizer in (ours, reference):
        for k in range(4):
            gradients(params_of(optimizer), k)
            assert nn.utils.clip_grad_norm_(params_of(optimizer), 0.1) > 0.1
            optimizer.step()
    assert_same_weights(ours, reference)


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
    assert_same_bits([p.grad for p in params], before)


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
    """In threads of their own: they share the update threads and nothing else."""

    def train(seed):
        generator = torch.Generator().manual_seed(seed)
        p = torch.randn(20 * TILE, generator=generator).bfloat16().requires_grad_()
        with CSDAdam([p], devices=["file:", "ram:"], tile_size=TILE) as optimizer:
            for _ in range(5):
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
                optimizer.step()
            return everything(optimizer)

    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(train, range(8)))
    for seed, found in enumerate(together):
        assert_same_bits(found, train(seed))


def test_profiler_sees_the_step():
    p = leaf(5)
    optimizer = CSDAdam([p], devices="ram:")
    p.grad = torch.ones_like(p)
    with torch.autograd.profiler.profile() as profile:
        optimizer.step()
    assert "Optimizer.step#CSDAdam.step" in [event.name for event in profile.function_events]


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


@pytest.mark.parametrize("unscale", [False, True], ids=["step unscales", "unscaled before"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_grad_scaler(devices, dtype, unscale):
    if unscale and dtype is torch.float16:
        pytest.skip("torch refuses to unscale fp16 gradients in place")
    p = leaf(TILE + 1, dtype=dtype)
    q = p.detach().to(torch.float32, copy=True).requires_grad_()
    ours, reference = CSDAdam([p], devices=devices), AdamW([q])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
    for k in range(5):
        scale = scaler.get_scale()
        scaler.scale(torch.ones(()))  # makes the scale a tensor, as scaling a loss does
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
            assert_same_bits(everything(optimizer), before)
            assert p._version == version
            assert scaler.get_scale() == scale / 2
    assert optimizer.state[p]["step"] == 1


def test_found_inf_and_grad_scale(devices):
    """The attributes that GradScaler sets around step()."""
    _, ours, _, reference = pair_of_models(devices)
    train_beside(ours, reference, 1)
    before = everything(ours)
    ours.found_inf, ours.grad_scale = torch.tensor(1.0), torch.tensor(8.0)
    gradients(params_of(ours), 1)
    ours.step()
    assert_same_bits(everything(ours), before)
    ours.found_inf = torch.tensor(0.0)
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        q.grad = p.grad / 8
    ours.step()
    reference.step()
    assert_same_weights(ours, reference)


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


# ---- state and state_dict -----------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
def test_state_is_plain(devices, amsgrad):
    """Trainers and checkpointers want a defaultdict of dicts of CPU tensors, and no class of ours."""
    params = [leaf(5), leaf(2, TILE, dtype=torch.bfloat16), leaf(3, dtype=torch.complex64), leaf()]
    optimizer = CSDAdam(params, devices=devices, amsgrad=amsgrad)
    assert optimizer.state_dict()["state"] == {}
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert type(optimizer.state) is defaultdict
    assert set(optimizer.state) == set(params)
    for p, entry in optimizer.state.items():
        assert type(entry) is dict
        extra = {"max_exp_avg_sq"} if amsgrad else set()
        assert set(entry) == {"step", "exp_avg", "exp_avg_sq", "master"} | extra
        assert entry["step"].shape == ()
        for name, value in entry.items():
            assert type(value) is torch.Tensor
            assert not value.requires_grad
            assert value.device.type == "cpu"
            wide = torch.complex64 if p.is_complex() and name != "step" else torch.float32
            assert value.dtype is wide
            assert value.shape == (() if name == "step" else p.shape)


def checkpoint(optimizer, path):
    torch.save(optimizer.state_dict(), path)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("used", [False, True], ids=["fresh optimizer", "used optimizer"])
def test_resumed_run_has_the_bits_of_an_uninterrupted_one(devices, tmp_path, dtype, used):
    model = small_model(dtype)
    start = copy.deepcopy(model.state_dict())
    uninterrupted = CSDAdam(model.parameters(), devices="file:", amsgrad=True)
    for k in range(6):
        gradients(model.parameters(), k)
        uninterrupted.step()
        if k == 2:
            weights = copy.deepcopy(model.state_dict())
            saved = checkpoint(uninterrupted, tmp_path / "saved.pt")

    resumed = small_model(dtype)
    resumed.load_state_dict(start)
    optimizer = CSDAdam(resumed.parameters(), devices=devices, amsgrad=True)
    if used:
        gradients(resumed.parameters(), 99)
        optimizer.step()
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    for k in range(3, 6):
        gradients(resumed.parameters(), k)
        optimizer.step()
    assert_same_bits(everything(optimizer), everything(uninterrupted))


def test_weights_may_be_loaded_after_the_state(devices, tmp_path):
    model, resumed = small_model(torch.bfloat16), small_model(torch.bfloat16)
    uninterrupted = CSDAdam(model.parameters(), devices="file:")
    optimizer = CSDAdam(resumed.parameters(), devices=devices)
    for k in range(3):
        gradients(model.parameters(), k)
        uninterrupted.step()
    optimizer.load_state_dict(checkpoint(uninterrupted, tmp_path / "saved.pt"))
    resumed.load_state_dict(model.state_dict())
    for m, o in ((model, uninterrupted), (resumed, optimizer)):
        gradients(m.parameters(), 3)
        o.step()
    assert_same_bits(everything(optimizer), everything(uninterrupted))


@pytest.mark.parametrize("used", [False, True], ids=["fresh optimizer", "used optimizer"])
def test_a_checkpoint_of_adamw_loads(devices, used):
    model, ours, twin, reference = pair_of_models(devices)
    train_beside(AdamW(model.parameters()), reference, 3)  # the same first steps for both models
    if used:
        weights = copy.deepcopy(model.state_dict())
        gradients(model.parameters(), 99)
        ours.step()
        model.load_state_dict(weights)
    ours.load_state_dict(reference.state_dict())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.state[p]["step"] == 3
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ours.state[p][name], reference.state[q][name])
    train_beside(ours, reference, 3, start=3)
    assert_same_weights(ours, reference)


def test_adamw_loads_a_checkpoint_of_ours(devices):
    _, ours, _, reference = pair_of_models(devices)
    train_beside(ours, reference, 3)
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        q.data.copy_(p)
    reference.load_state_dict(copy.deepcopy(ours.state_dict()))  # it does not copy
    train_beside(ours, reference, 3, start=3)
    assert_same_weights(ours, reference)


def test_fp32_states_are_not_cast_under_16_bit_parameters(devices):
    model, twin = small_model(torch.bfloat16), small_model()
    reference = AdamW(twin.parameters())
    gradients(twin.parameters(), 0)
    reference.step()
    optimizer = CSDAdam(model.parameters(), devices=devices)
    optimizer.load_state_dict(reference.state_dict())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        state, expected = optimizer.state[p], reference.state[q]
        assert torch.equal(state["exp_avg"], expected["exp_avg"])
        assert not torch.equal(expected["exp_avg"], expected["exp_avg"].bfloat16().float())
        assert torch.equal(state["master"], p.detach().float())  # AdamW has none


def test_16_bit_states_widen(devices):
    """A checkpoint of AdamW on bf16 parameters."""
    model, twin = small_model(torch.bfloat16), small_model(torch.bfloat16)
    reference = AdamW(twin.parameters())
    gradients(twin.parameters(), 0)
    reference.step()
    optimizer = CSDAdam(model.parameters(), devices=devices)
    optimizer.load_state_dict(reference.state_dict())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert optimizer.state[p]["exp_avg"].dtype is torch.float32
        assert torch.equal(optimizer.state[p]["exp_avg"], reference.state[q]["exp_avg"].float())


def test_load_state_dict_leaves_its_argument_alone(devices):
    _, ours, _, reference = pair_of_models(devices)
    train_beside(ours, reference, 2)
    saved = reference.state_dict()
    before, groups = copy.deepcopy(saved), copy.deepcopy(saved["param_groups"])
    ours.load_state_dict(saved)
    train_beside(ours, AdamW([leaf(1)]), 2)
    assert saved["param_groups"] == groups
    assert saved["state"].keys() == before["state"].keys()
    for k, entry in saved["state"].items():
        assert entry.keys() == before["state"][k].keys()
        assert_same_bits(list(entry.values()), list(before["state"][k].values()))


def test_step_may_be_a_number_in_a_checkpoint(devices):
    _, ours, _, reference = pair_of_models(devices)
    train_beside(AdamW([p.detach().clone() for p in params_of(ours)]), reference, 4)
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        p.data.copy_(q)
    saved = copy.deepcopy(reference.state_dict())
    for entry in saved["state"].values():
        entry["step"] = 4
    ours.load_state_dict(saved)
    train_beside(ours, reference, 2, start=4)
    assert_same_weights(ours, reference)
    assert ours.state[params_of(ours)[0]]["step"] == 6


def test_loading_its_own_state_dict_changes_nothing(devices):
    """What Accelerate does to every optimizer it prepares."""
    for used in (False, True):
        p = leaf(TILE + 1, dtype=torch.bfloat16)
        optimizer = CSDAdam([p], devices=devices, overwrite=True)
        if used:
            gradients([p], 0)
            optimizer.step()
        before = everything(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        assert_same_bits(everything(optimizer), before)
        gradients([p], 1)
        optimizer.step()
        assert optimizer.state[p]["step"] == 1 + used
        optimizer.close()


def test_a_checkpoint_of_part_of_the_parameters_loads(devices):
    """Some never had a gradient: they have no entry, and start from nothing."""
    _, ours, _, reference = pair_of_models(devices)
    gradients(params_of(reference), 0)
    params_of(reference)[1].grad = None
    reference.step()
    train_beside(ours, AdamW([leaf(1)]), 2)  # what ours had is gone after loading
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        p.data = q.detach().clone()
    ours.load_state_dict(reference.state_dict())
    train_beside(ours, reference, 2, start=1)
    assert [ours.state[p]["step"].item() for p in params_of(ours)] == [3, 2, 3, 3]
    assert_same_weights(ours, reference)


def test_a_checkpoint_of_other_shapes_is_refused_before_anything_is_touched(devices):
    p, q = leaf(5), leaf(6)
    optimizer = CSDAdam([p], devices=devices)
    source = AdamW([q], lr=9.0)
    for o, t in ((optimizer, p), (source, q)):
        gradients([t], 0)
        o.step()
    before = everything(optimizer)
    with pytest.raises(CSDValueError, match="exp_avg"):
        optimizer.load_state_dict(source.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert_same_bits(everything(optimizer), before)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    optimizer.step()
    assert optimizer.state[p]["step"] == 2


@pytest.mark.parametrize("amsgrad", [True, False])
def test_a_checkpoint_turns_amsgrad_on_or_off(devices, amsgrad):
    model = small_model()
    twin = copy.deepcopy(model)
    ours = CSDAdam(model.parameters(), devices=devices, amsgrad=not amsgrad)
    reference = AdamW(twin.parameters(), amsgrad=amsgrad)
    train_beside(ours, reference, 3)
    model.load_state_dict(twin.state_dict())
    ours.load_state_dict(reference.state_dict())
    assert ours.param_groups[0]["amsgrad"] == amsgrad
    train_beside(ours, reference, 3, start=3)
    assert_same_weights(ours, reference)


def test_an_edit_of_the_state_in_place_counts(devices):
    _, ours, _, reference = pair_of_models(devices)
    train_beside(ours, reference, 2)
    for optimizer in (ours, reference):
        for p in params_of(optimizer):
            optimizer.state[p]["exp_avg"].zero_()
            optimizer.state[p]["exp_avg_sq"].mul_(0.5)
            optimizer.state[p]["step"].fill_(7)
    train_beside(ours, reference, 2, start=2)
    assert_same_weights(ours, reference)
    assert ours.state[params_of(ours)[0]]["step"] == 9


def test_replaced_entries_are_adopted(devices):
    _, ours, _, reference = pair_of_models(devices)
    train_beside(ours, reference, 2)
    for optimizer in (ours, reference):
        for p in params_of(optimizer):
            optimizer.state[p]["exp_avg"] = torch.full_like(p, 0.25)
            optimizer.state[p] = {**optimizer.state[p], "exp_avg_sq": torch.ones_like(p)}
    train_beside(ours, reference, 2, start=2)
    assert_same_weights(ours, reference)
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        assert_close(ours.state[p]["exp_avg"], reference.state[q]["exp_avg"])
        assert_close(ours.state[p]["exp_avg_sq"], reference.state[q]["exp_avg_sq"])


@pytest.mark.parametrize("used", [False, True], ids=["fresh optimizer", "used optimizer"])
def test_state_can_be_assigned(devices, used):
    _, ours, _, reference = pair_of_models(devices)
    if used:
        train_beside(ours, reference, 2)
    for optimizer in (ours, reference):
        optimizer.state = defaultdict(
            dict,
            {
                p: {"step": torch.tensor(5.0), "exp_avg": torch.ones_like(p), "exp_avg_sq": torch.ones_like(p)}
                for p in params_of(optimizer)
            },
        )
    train_beside(ours, reference, 2, start=2)
    assert_same_weights(ours, reference)
    assert ours.state[params_of(ours)[0]]["step"] == 7


def test_cleared_state_starts_anew(devices):
    _, ours, _, reference = pair_of_models(devices)
    train_beside(ours, reference, 2)
    for optimizer in (ours, reference):
        optimizer.state.clear()
    train_beside(ours, reference, 2, start=2)
    assert_same_weights(ours, reference)
    assert ours.state[params_of(ours)[0]]["step"] == 2


@pytest.mark.skipif(
    not hasattr(torch.optim, "swap_in_optimizer_params_and_state"), reason="this torch cannot swap parameters in"
)
def test_parameters_and_state_swapped_in_for_a_while(devices):
    _, ours, _, reference = pair_of_models(devices)
    train_beside(ours, reference, 2)
    before = everything(ours)
    other, theirs = ({str(i): p.detach().clone() for i, p in enumerate(params_of(o))} for o in (ours, reference))
    for optimizer, params in ((ours, other), (reference, theirs)):
        saved = copy.deepcopy(optimizer.state_dict())
        with torch.optim.swap_in_optimizer_params_and_state(optimizer, params, saved):
            gradients(params.values(), 2)
            optimizer.step()
    for name, p in other.items():
        assert_close(p, theirs[name])
    assert_same_bits(everything(ours), before)
    train_beside(ours, reference, 2, start=2)
    assert_same_weights(ours, reference)


# ---- Copies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("devices", SCRATCH, ids=str)
@pytest.mark.parametrize("used", [False, True], ids=["fresh optimizer", "used optimizer"])
def test_a_copy_goes_its_own_way(make_copy, devices, used):
    params = [leaf(TILE + 1, dtype=torch.bfloat16), leaf(7)]
    optimizer = CSDAdam(params, devices=devices, lr=0.1, max_grad_norm=5.0, tile_size=TILE)
    if used:
        gradients(params, 0)
        optimizer.step()
    other = make_copy(optimizer)
    before = everything(optimizer)
    assert_same_bits(everything(other), before)
    gradients(params_of(other), 1)
    other.step()
    assert_same_bits(everything(optimizer), before)
    gradients(params, 1)
    optimizer.step()
    assert_same_bits(everything(other), everything(optimizer))


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_on_named_devices_is_not_copied(tmp_path, make_copy):
    p = leaf(3)
    optimizer = CSDAdam([p], devices=str(tmp_path / "csd"))
    with pytest.raises(CSDRuntimeError, match="state_dict"):
        make_copy(optimizer)
    p.grad = torch.ones_like(p)
    optimizer.step()


def test_public_attributes_survive_a_copy():
    optimizer = CSDAdam([leaf(3)], devices="ram:", grad_dtype=torch.float16, max_grad_norm=1.0)
    other = copy.deepcopy(optimizer)
    public = [name for name in vars(optimizer) if not name.startswith("_")]
    assert {"devices", "grad_dtype", "max_grad_norm", "defaults", "param_groups"} <= set(public)
    assert {name for name in vars(other) if not name.startswith("_")} == set(public)
    for name in set(public) - {"param_groups"}:
        assert getattr(other, name) == getattr(optimizer, name)
    assert other._step_supports_amp_scaling


# ---- Writes from outside ----------------------------------------------------------------------


def write_copy(model):
    with torch.no_grad():
        model.weight[:2].copy_(torch.full((2, 9), 5.0))


def write_load_state_dict(model):
    weights = model.state_dict()
    weights["weight"] = weights["weight"].clone()
    weights["weight"][:2] = 5.0
    model.load_state_dict(weights)


def write_foreach(model):
    rows = [model.weight.detach()[0], model.weight.detach()[1]]
    torch._foreach_zero_(rows)
    torch._foreach_add_(rows, 5.0)


def write_data(model):
    data = model.weight.data.clone()
    data[:2] = 5.0
    model.weight.data = data


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("write", [write_copy, write_load_state_dict, write_foreach, write_data])
def test_a_write_to_a_parameter_counts(devices, dtype, write):
    """Where it was written the parameter is the new master; elsewhere the master keeps its low bits."""
    model = nn.Linear(9, 4 * TILE // 9, bias=False).to(dtype)
    p = model.weight
    optimizer = CSDAdam([p], devices=devices, lr=0.01)
    for k in range(3):
        gradients([p], k)
        optimizer.step()
    master = optimizer.state[p]["master"].clone()
    assert torch.equal(master.to(dtype), p.detach())
    assert (dtype is torch.float32) == torch.equal(master, p.detach().float())

    write(model)
    optimizer.param_groups[0]["lr"] = 0.0  # a step that moves no weight
    p.grad = torch.zeros_like(p)
    optimizer.step()
    master[:2] = 5.0
    assert torch.equal(optimizer.state[p]["master"], master)
    assert torch.equal(p.detach(), master.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_converted_in_place(devices, dtype):
    model = small_model()
    optimizer = CSDAdam(model.parameters(), devices=devices)
    for k in range(2):
        gradients(model.parameters(), k)
        optimizer.step()
    reference = AdamW([p.detach().clone().requires_grad_() for p in model.parameters()])
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.to(dtype)  # the masters keep the bits that it drops
    for k in range(2, 5):
        gradients(model.parameters(), k)
        for p, q in zip(model.parameters(), params_of(reference), strict=True):
            q.grad = p.grad.to(torch.float32, copy=True)
        optimizer.step()
        reference.step()
    for p, q in zip(model.parameters(), params_of(reference), strict=True):
        assert p.dtype is dtype
        assert_close(optimizer.state[p]["master"], q)
        assert torch.equal(p.detach(), optimizer.state[p]["master"].to(dtype))


@pytest.mark.parametrize("first", [torch.contiguous_format, torch.channels_last])
def test_a_model_of_another_memory_format(devices, first):
    """model.to(memory_format=...) between steps: the state stays in the order it has."""
    formats = {torch.contiguous_format: torch.channels_last, torch.channels_last: torch.contiguous_format}
    model = nn.Conv2d(3, 8, 3).to(memory_format=first)
    twin = copy.deepcopy(model)
    ours, reference = CSDAdam(model.parameters(), devices=devices), AdamW(twin.parameters())
    train_beside(ours, reference, 2)
    model.to(memory_format=formats[first])
    train_beside(ours, reference, 2, start=2)
    assert_same_weights(ours, reference)
    for p, q in zip(params_of(ours), params_of(reference), strict=True):
        assert_close(ours.state[p]["exp_avg"], reference.state[q]["exp_avg"])


def test_a_parameter_of_another_size_is_refused(devices):
    p = leaf(5)
    optimizer = CSDAdam([p], devices=devices)
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.data = torch.ones(7)
    p.grad = torch.ones(7)
    with pytest.raises(CSDValueError, match=r"\(7,\)"):
        optimizer.step()


def test_a_parameter_of_another_shape_is_refused(devices):
    p = leaf(2, 3)
    optimizer = CSDAdam([p], devices=devices)
    gradients([p], 0)
    optimizer.step()
    p.data = p.data.t().contiguous()
    p.grad = torch.ones_like(p)
    with pytest.raises(CSDValueError, match=r"\(3, 2\)"):
        optimizer.step()


@pytest.mark.parametrize("how", ["clamp", "replace", "numpy"])
def test_fp32_parameters_written_behind_torchs_back(devices, how):
    """An fp32 parameter in host memory is its own master: idioms such as p.data.clamp_() work as with AdamW."""
    if how != "replace" and devices[0].startswith("xrt:"):
        pytest.skip("a card notices only what torch counts")
    model, twin = (small_model() for _ in range(2))
    twin.load_state_dict(model.state_dict())
    ours, reference = CSDAdam(model.parameters(), lr=0.1, devices=devices), AdamW(twin.parameters(), lr=0.1)
    for i in range(4):
        train_beside(ours, reference, 1, start=i)
        for p in (*model.parameters(), *twin.parameters()):
            if how == "clamp":
                p.data.clamp_(-0.05, 0.05)
            elif how == "replace":
                p.data = p.data * 0.5
            else:
                p.detach().numpy()[...] *= 0.5
    assert_same_weights(ours, reference)


@pytest.mark.parametrize("how", ["channels last", "grad_dtype", "beside images"])
def test_fp32_parameters_written_behind_torchs_back_on_other_ways(devices, how):
    if devices[0].startswith("xrt:"):
        pytest.skip("a card notices only what torch counts")
    p = leaf(2, 3, 40, 50) if how == "channels last" else leaf(12000)
    if how == "channels last":
        p = p.detach().to(memory_format=torch.channels_last).requires_grad_()
    q = leaf(1000, dtype=torch.bfloat16)
    options = {"grad_dtype": torch.bfloat16} if how == "grad_dtype" else {}
    options |= {"grad_dtype": torch.float32} if how == "beside images" else {}
    optimizer = CSDAdam([p, q], devices=devices, tile_size=1024, **options)
    gradients([p, q], 0)
    optimizer.step()
    p.data.fill_(5)
    optimizer.step()
    assert p.min() > 4.9
    assert torch.equal(optimizer.state[p]["master"], p)


def test_master_follows_a_parameter_that_was_converted_twice(devices):
    model = nn.Linear(4, 4)
    optimizer = CSDAdam(model.parameters(), devices=devices, lr=0.1)
    for convert in (model.float, model.half, model.float):
        convert()
        for i in range(2):
            gradients(model.parameters(), i)
            optimizer.step()
        for p in model.parameters():
            assert torch.equal(optimizer.state[p]["master"].to(p.dtype), p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_was_replaced_before_a_refused_step(devices, dtype):
    """That the step came to nothing does not make its new value the old one."""
    p = leaf(3000, dtype=dtype)
    optimizer = CSDAdam([p], devices=devices, tile_size=1024)
    gradients([p], 0)
    optimizer.step()
    p.data = torch.full_like(p, 5)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(CSDRuntimeError, match="amsgrad"):
        optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = False
    optimizer.step()
    assert p.min() > 4.9


def test_a_new_parameter_in_the_place_of_an_old_one(devices):
    """The allocator gives memory out again: that is no tie."""
    p, q = leaf(3000), leaf(3000)
    optimizer = CSDAdam([p], devices=devices)
    gradients([p], 0)
    optimizer.step()
    old = p.data
    p.data = p.data.clone()
    q.data = old
    optimizer.add_param_group({"params": [q]})
    gradients([p, q], 1)
    optimizer.step()
    assert optimizer.state[q]["step"] == 1


def test_a_checkpoint_after_one_that_could_not_be_stored(devices, monkeypatch):
    p = leaf(3000)
    optimizer = CSDAdam([p], devices=devices)
    state = {"step": torch.tensor(9.0), "exp_avg": torch.full((3000,), 3.0), "exp_avg_sq": torch.ones(3000)}
    empty = optimizer.state_dict()

    def fails():
        monkeypatch.undo()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(optimizer._engine.windows, "sync", fails)
    with pytest.raises(OSError, match="Input/output"):
        optimizer.load_state_dict({**empty, "state": {0: state}})
    optimizer.load_state_dict(empty)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.state[p]["step"] == 1
    assert not optimizer.state[p]["exp_avg"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_undone_step_leaves_those_alone_that_took_no_part(tmp_path, dtype, monkeypatch):
    p, q = leaf(100, dtype=dtype), leaf(100, dtype=dtype)  # in one tile
    optimizer = CSDAdam([p, q], devices=str(tmp_path))
    gradients([p, q], 0)
    optimizer.step()
    optimizer.param_groups[0]["params"][:] = [p]
    with torch.no_grad():
        q.fill_(7)
    before = p.detach().clone()
    finish = optimizer._engine.finish

    def fails(keep=True):
        finish(keep=False)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(optimizer._engine, "finish", fails)
    with pytest.raises(OSError, match="Input/output"):
        optimizer.step()
    assert torch.equal(p, before)
    assert q.eq(7).all()


def test_close_within_a_step_is_refused(tmp_path, monkeypatch):
    p = leaf(100)
    optimizer = CSDAdam([p], devices=str(tmp_path))
    gradients([p], 0)
    push = optimizer._engine.push

    def closing(tile):
        with pytest.raises(CSDRuntimeError, match="under way"):
            optimizer.close()
        push(tile)

    monkeypatch.setattr(optimizer._engine, "push", closing)
    optimizer.step()
    optimizer.close()


def test_parameters_tied_by_their_data_are_refused(devices):
    a, b = leaf(3000), leaf(3000)
    b.data = a.data
    optimizer = CSDAdam([("a", a), ("b", b)], devices=devices)
    for _ in range(2):
        gradients([a, b], 0)
        with pytest.raises(CSDRuntimeError, match="a and b share their memory"):
            optimizer.step()


def test_a_gradient_with_the_negative_bit(devices):
    a, b = (torch.ones(1, requires_grad=True) for _ in range(2))
    z = torch.complex(a, b).conj()
    (z.imag * 3 + z.real).sum().backward()
    assert b.grad.is_neg()
    twins = [torch.ones(1, requires_grad=True) for _ in range(2)]
    for twin, p in zip(twins, (a, b), strict=True):
        twin.grad = p.grad
    CSDAdam([a, b], devices=devices).step()
    AdamW(twins).step()
    torch.testing.assert_close([a, b], twins)


def test_the_default_device_does_not_matter(devices):
    p = leaf(3000)
    optimizer = CSDAdam([p], devices=devices, grad_dtype=torch.bfloat16, tile_size=1024)
    p.grad = torch.ones_like(p)
    with torch.device("meta"):
        optimizer.step()
    assert optimizer.state[p]["exp_avg"].eq(0.1).all()


def test_state_holds_what_else_people_put_there(devices):
    p = leaf(5)
    optimizer = CSDAdam([p], devices=devices)
    for i in range(3):
        gradients([p], i)
        optimizer.step()
        optimizer.state["global"] = i
        optimizer.state[p]["mine"] = "note"
    assert optimizer.state[p]["step"] == 3
    assert optimizer.state["global"] == 2
    assert optimizer.state[p]["mine"] == "note"


def test_a_group_stays_the_dict_that_was_given(devices):
    group = {"params": [leaf(3)]}
    optimizer = CSDAdam([group], devices=devices)
    assert optimizer.param_groups[0] is group


def test_a_refused_group_is_not_there(devices):
    optimizer = CSDAdam([leaf(3)], devices=devices)
    with pytest.raises(CSDTypeError):
        optimizer.add_param_group({"params": [leaf(3, dtype=torch.float64)]})
    assert len(optimizer.param_groups) == 1


def test_grad_dtype_may_change():
    p = leaf(1000)
    optimizer = CSDAdam([p], devices="file:")
    pushed = []
    for dtype in (None, torch.bfloat16, None):
        optimizer.grad_dtype = dtype
        p.grad = torch.ones_like(p)
        optimizer.step()
        pushed.append(optimizer.stats()["push_bytes"])
    assert pushed == [4000, 2000, 4000]


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("step", torch.ones(3), "has shape"),
        ("exp_avg", torch.ones(5, dtype=torch.complex64), "is torch.complex64"),
        ("master", 1.0, "is a float"),
        ("exp_avg_sq", torch.ones(5, device="meta"), "is on the meta device"),
        ("step", torch.ones((), device="meta"), "is on the meta device"),
    ],
    ids=["shape", "complex", "number", "meta", "meta-step"],
)
def test_a_checkpoint_of_another_kind_is_refused(devices, key, value, what):
    p = leaf(5)
    optimizer = CSDAdam([p], devices=devices)
    gradients([p], 0)
    optimizer.step()
    wrong = copy.deepcopy(optimizer.state_dict())
    wrong["state"][0][key] = value
    before = everything(optimizer)
    with pytest.raises(CSDValueError, match=f"'{key}' of parameter .* {what}"):
        optimizer.load_state_dict(wrong)
    assert_same_bits(everything(optimizer), before)


def test_stats_of_a_step_that_did_nothing():
    p = leaf(1000)
    optimizer = CSDAdam([p], devices="file:")
    gradients([p], 0)
    optimizer.step()
    assert optimizer.stats()["params"] == 1000
    p.grad = None
    optimizer.step()
    stats = optimizer.stats()
    assert (stats["params"], stats["push_bytes"], stats["flash_write_bytes"]) == (0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_places_that_could_not_be_filled_are_filled_again(devices, dtype, monkeypatch):
    """Memory runs out, or a disk's cache cannot be written back and loses what was in it."""
    model = small_model(dtype)
    twin = copy.deepcopy(model).float()
    ours, reference = CSDAdam(model.parameters(), devices=devices), AdamW(twin.parameters())
    fill, calls = ParamState.fill, []

    def failing(bound, *args, **kwargs):
        calls.append(bound)
        if len(calls) == 3:
            for done in calls[:2]:
                done.own_master.fill_(7)
            raise MemoryError
        fill(bound, *args, **kwargs)

    monkeypatch.setattr(Engine, "fills_by_step", lambda *_: False)  # as where parameters have states already
    monkeypatch.setattr(ParamState, "fill", failing)
    gradients(model.parameters(), 0)
    with pytest.raises(MemoryError):
        ours.step()
    assert len(ours.state) == 0
    for i in range(2):
        gradients(model.parameters(), i)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.float()
        ours.step()
        reference.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.state[p]["master"], q.detach(), rtol=1e-6, atol=1e-7)


# ---- Life and death -----------------------------------------------------------------------------


def test_a_closed_optimizer_says_so(devices):
    p = leaf(3)
    with CSDAdam([p], devices=devices) as optimizer:
        p.grad = torch.ones_like(p)
        optimizer.step()
    optimizer.close()  # once more does no harm
    before = p.detach().clone()
    for use in (optimizer.step, optimizer.stats):
        with pytest.raises(CSDRuntimeError, match="closed"):
            use()
    assert torch.equal(p.detach(), before)
    assert "closed" in repr(optimizer)


def test_a_tensor_of_the_state_outlives_the_optimizer(devices):
    p = leaf(TILE + 1)
    optimizer = CSDAdam([p], devices=devices)
    gradients([p], 0)
    optimizer.step()
    exp_avg = optimizer.state[p]["exp_avg"]
    expected = 0.1 * p.grad
    optimizer.close()
    del optimizer
    gc.collect()
    assert_close(exp_avg, expected)


def test_dropped_optimizers_print_nothing(tmp_path):
    script = """
        import sys, torch
        from csd_optim import CSDAdam
        kept = []
        for k, devices in enumerate([None, "ram:", ["ram:", "file:"], sys.argv[1], sys.argv[2]]):
            p = torch.ones(10000, requires_grad=True)
            optimizer = CSDAdam([p], devices=devices)
            p.grad = torch.ones_like(p)
            optimizer.step()
            if k % 2:
                kept.append(optimizer)  # until the interpreter ends
            del optimizer
        try:
            CSDAdam([p], lr=-1)
        except ValueError:
            pass
    """
    assert run_script(script, tmp_path / "a", tmp_path / "b") == ("", "")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}  # scratch stores leave nothing


def test_fork(tmp_path):
    """The child is told; the parent goes on. Both end in good order."""
    script = """
        import os, sys, torch
        from csd_optim import CSDAdam
        p = [torch.ones(10000, requires_grad=True) for _ in range(3)]
        optimizers = [CSDAdam([q], devices=d) for q, d in zip(p, ["ram:", "file:", [sys.argv[1], "file:"]])]
        for q, optimizer in zip(p, optimizers):
            q.grad = torch.ones_like(q)
            optimizer.step()
        child = os.fork()
        if not child:
            for optimizer in optimizers:
                try:
                    optimizer.step()
                except RuntimeError as e:
                    print("child:", e, flush=True)
            sys.exit()
        _, status = os.waitpid(child, 0)
        for optimizer in optimizers:
            optimizer.step()
        print("parent:", status, [o.state[q]["step"].item() for q, o in zip(p, optimizers)])
    """
    out, err = run_script(script, tmp_path / "csd")
    *child, parent = out.splitlines()
    assert len(child) == 3
    assert all(line.startswith("child: this optimizer belongs to process") for line in child)
    assert parent == "parent: 0 [2.0, 2.0, 2.0]"
    assert err == ""


def test_every_error_of_ours_is_a_csd_error():
    for make in (lambda: CSDAdam([leaf(2)], devices="tape:"), lambda: CSDAdam([leaf(2, dtype=torch.float64)])):
        with pytest.raises(CSDError):
            make()


def test_a_failed_constructor_leaves_no_store(tmp_path):
    with contextlib.suppress(ValueError):
        CSDAdam([leaf(2)], devices=[str(tmp_path / "a"), str(tmp_path / "b")], lr=-1)
    assert os.listdir(tmp_path) == []
