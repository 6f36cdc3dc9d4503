"""Numerical results. Oracle: torch's optimizer on fp32 copies of the parameters, given the same gradients.

Most tests are about AdamW; the other rules (support/optimizers.py) are tested where they differ.

Compared with torch: largest difference over largest magnitude, for the parameter and each state separately. Compared
with ourselves (threads, instruction sets, tiles, devices, other settings of the process): every bit. Subnormal numbers
count as zero, as in torch after set_flush_denormal(True). The oracle has that setting only in tests where it matters,
because users rarely set it.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from support.backends import TILE
from support.comparing import (
    assert_matches,
    assert_same,
    bits,
    make_pair,
    params_of,
    randn_like,
    set_grads,
    train_pair,
)
from support.floats import LIBM, NEAREST, UPWARD, set_floats, small_grads
from support.forked import printed
from support.optimizers import ADAM, PAIRS, RMSPROP, SGD, other_rules, rules
from support.topk_oracle import part

from csd_optim import CSDAdam, bindings
from csd_optim.compression.selection import HostSelection

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HALVES = [torch.float16, torch.bfloat16]
SIZES = [1, 15, 16, 17, 31, 33, TILE - 1, TILE, TILE + 1, 3 * TILE + 5]
TESTS = Path(__file__).parent
STATES = ["exp_avg", "exp_avg_sq"]

pytestmark = pytest.mark.fp32_states("compares with AdamW to its last bits")


# ---- Beside torch ------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_ten_steps_of_awkward_sizes(devices, dtype):
    params = [torch.randn(n, dtype=dtype, requires_grad=True) for n in SIZES]
    ours, reference = make_pair(params, devices)
    train_pair(ours, reference)
    assert_matches(ours, reference)


@pytest.mark.parametrize("numel", SIZES)
def test_a_size_alone(devices, numel):
    ours, reference = make_pair([torch.randn(numel, dtype=torch.bfloat16, requires_grad=True)], devices)
    train_pair(ours, reference, steps=3)
    assert_matches(ours, reference)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"betas": (0.0, 0.999)},
        {"betas": (0.9, 0.0)},
        {"betas": (0.5, 0.9)},
        {"amsgrad": True},
        {"maximize": True},
        {"amsgrad": True, "maximize": True, "weight_decay": 0.3},
        {"weight_decay": 0.0},
        {"weight_decay": 0.3},
        {"lr": 0.0},
        {"lr": 1.0},
        {"lr": torch.tensor(3e-3)},
        {"eps": 1e-3},
        {"eps": 0.0},
        {"foreach": True},
        {"fused": True},
    ],
    ids=str,
)
def test_hyperparameters(devices, dtype, kwargs):
    params = [torch.randn(n, dtype=dtype, requires_grad=True) for n in (17, TILE + 1)]
    ours, reference = make_pair(params, devices, **kwargs)
    train_pair(ours, reference)
    assert_matches(ours, reference)


def test_betas_may_be_tensors(devices):
    params = [torch.randn(TILE + 1, requires_grad=True)]
    ours, reference = make_pair(params, devices, betas=(0.75, 0.875))  # exact in fp32
    ours.param_groups[0]["betas"] = (torch.tensor(0.75), torch.tensor([0.875]))  # AdamW itself took them late
    train_pair(ours, reference)
    assert_matches(ours, reference)


@pytest.mark.sampled(together=1)
@pytest.mark.parametrize("of", other_rules())
def test_other_rules(devices, of):
    """All dtypes, a parameter that joins late, a gradient of zeros, groups with their own hyperparameters."""
    dtypes = [*DTYPES, torch.complex64]
    params = [torch.randn(n, dtype=dtypes[i % 4], requires_grad=True) for i, n in enumerate((17, TILE + 1, 1, 40, 7))]
    groups = [
        {"params": params[:3]},
        {"params": params[3:], "lr": torch.tensor(0.02), "weight_decay": 0.2, "maximize": True},
    ]
    ours, reference = make_pair(groups, devices, of=of)
    for k in range(10):
        set_grads(ours, reference, torch.zeros_like if k == 7 else randn_like)
        if k < 2:
            params[1].grad = params_of(reference)[1].grad = None
        for optimizer in (ours, reference):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + k)
            optimizer.step()
    assert_matches(ours, reference)


@pytest.mark.parametrize("of", rules([RMSPROP]))
def test_rmsprop_whose_averages_are_no_longer_asked_for(devices, of):
    """A state that is switched off stays bitwise unchanged, whatever the positions of the other sections."""
    params = [torch.randn(n, requires_grad=True) for n in (30, TILE + 5, 40, 50)]
    both, centered = {"momentum": 0.9, "centered": True}, {"momentum": 0.0, "centered": True}
    momentum = {"momentum": 0.9, "centered": False}
    before = [both, both, centered, momentum]
    groups = [{"params": [p], **switches} for p, switches in zip(params, before, strict=True)]
    ours, reference = make_pair(groups, devices, of=of)
    train_pair(ours, reference, steps=2)
    for optimizer in (ours, reference):
        for k, after in enumerate((momentum, centered, {"centered": False}, {"momentum": 0.0})):
            optimizer.param_groups[k].update(after)
    train_pair(ours, reference, steps=2)
    assert_matches(ours, reference)
    kept = ours.state[params[0]]["grad_avg"].clone()
    ours.param_groups[2]["momentum"] = 0.5
    set_grads(ours, reference)
    with pytest.raises(RuntimeError, match=r"momentum was turned on after the state of parameter 2\.0 was made"):
        ours.step()
    assert torch.equal(ours.state[params[0]]["grad_avg"], kept)


@pytest.mark.parametrize("of", rules([SGD]))
def test_sgd_whose_momentum_is_switched_off_and_on(devices, of):
    params = [torch.randn(n, dtype=torch.bfloat16, requires_grad=True) for n in (30, TILE + 5)]
    ours, reference = make_pair(params, devices, of=of, momentum=0.9, dampening=0.5)
    for momentum, nesterov in ((0.9, False), (0.0, False), (0.8, False), (0.8, True)):
        for optimizer in (ours, reference):
            optimizer.param_groups[0]["momentum"] = momentum
            optimizer.param_groups[1].update(momentum=momentum, nesterov=nesterov)
        train_pair(ours, reference, steps=2)
    assert_matches(ours, reference)


@pytest.mark.parametrize("of", rules([ADAM]))
def test_adam_whose_groups_decay_as_adamw_does(devices, of):
    groups = [
        {"params": [torch.randn(30, requires_grad=True)]},
        {"params": [torch.randn(31, requires_grad=True)], "decoupled_weight_decay": True},
    ]
    ours, reference = make_pair(groups, devices, of=of, weight_decay=0.3)
    train_pair(ours, reference)
    assert_matches(ours, reference)


def test_amsgrad_keeps_the_largest(devices):
    """With shrinking gradients the divisor is the running maximum, not exp_avg_sq."""
    ours, reference = make_pair([torch.randn(100, requires_grad=True)], devices, amsgrad=True, betas=(0.9, 0.5))
    for scale in (10.0, 1.0, 0.1, 0.1):
        train_pair(ours, reference, steps=1, make=lambda p, scale=scale: scale * torch.randn_like(p))
    assert_matches(ours, reference)
    state = ours.state[params_of(ours)[0]]
    assert (state["max_exp_avg_sq"] > state["exp_avg_sq"]).all()


def test_groups_with_hyperparameters_of_their_own(devices):
    def params(*sizes):
        return [torch.randn(n, dtype=torch.bfloat16, requires_grad=True) for n in sizes]

    groups = [
        {"params": params(5, TILE), "lr": 1e-2},
        {"params": params(33), "weight_decay": 0.0, "betas": (0.8, 0.95)},
        {"params": []},
        {"params": params(100, 1), "amsgrad": True, "eps": 1e-6},
        {"params": params(3 * TILE), "maximize": True},
    ]
    ours, reference = make_pair(groups, devices, lr=1e-3)
    train_pair(ours, reference)
    assert_matches(ours, reference)


def test_hyperparameters_are_read_every_step(devices):
    lr = torch.tensor(1e-2)
    ours, reference = make_pair([torch.randn(50, requires_grad=True)], devices, lr=lr)
    for optimizer in (ours, reference):
        assert optimizer.param_groups[0]["lr"] is lr
    for k in range(4):
        lr.fill_(10.0**-k)
        for optimizer in (ours, reference):
            optimizer.param_groups[0]["betas"] = (0.5 + 0.1 * k, 0.9)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * k
        train_pair(ours, reference, steps=1)
    assert_matches(ours, reference)


def test_dtypes_together(devices):
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.complex64]
    params = [torch.randn(300 + i, dtype=dtypes[i % 4], requires_grad=True) for i in range(12)]
    ours, reference = make_pair(params, devices)
    train_pair(ours, reference)
    assert_matches(ours, reference)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("shape", [(), (3, 5), (TILE + 1,)])
def test_complex(devices, shape, amsgrad):
    ours, reference = make_pair(
        [torch.randn(shape, dtype=torch.complex64, requires_grad=True)], devices, amsgrad=amsgrad
    )
    train_pair(ours, reference)
    assert_matches(ours, reference)


def test_complex_with_a_conjugate_gradient(devices):
    ours, reference = make_pair([torch.randn(40, dtype=torch.complex64, requires_grad=True)], devices)
    train_pair(ours, reference, make=lambda p: torch.randn_like(p).conj())
    assert_matches(ours, reference)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_and_one_element(devices, dtype):
    params = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in [(), (0,), (1, 1), (3, 0, 2), (7,)]]
    ours, reference = make_pair(params, devices)
    train_pair(ours, reference)
    assert_matches(ours, reference)


def test_only_empty_parameters(devices):
    ours, reference = make_pair([torch.randn(0, 3, requires_grad=True)], devices)
    train_pair(ours, reference, steps=2)
    assert_matches(ours, reference)


def strided(dtype):
    return torch.randn(12, 10, dtype=dtype)[::2, ::3]


def transposed(dtype):
    return torch.randn(30, TILE // 8, dtype=dtype).t()


def channels_last(dtype):
    return torch.randn(8, 3, 5, 4, dtype=dtype).to(memory_format=torch.channels_last)


def permuted_3d(dtype):
    return torch.randn(4, 5, 6, dtype=dtype).permute(2, 0, 1)


LAYOUTS = [strided, transposed, channels_last, permuted_3d]


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(devices, layout, dtype):
    params = [layout(dtype).requires_grad_(), torch.randn(9, dtype=dtype, requires_grad=True)]
    ours, reference = make_pair(params, devices)
    train_pair(ours, reference)
    assert_matches(ours, reference)
    for name in STATES:  # in the same memory order as AdamW's
        assert ours.state[params[0]][name].stride() == torch.zeros_like(params[0]).stride()


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_contiguous_gradients_of_other_layouts(devices, layout, dtype):
    """Parameter and gradient need not agree in memory order."""
    params = [layout(dtype).requires_grad_()]
    ours, reference = make_pair(params, devices)
    train_pair(ours, reference, make=lambda p: torch.randn(p.shape, dtype=p.dtype))
    assert_matches(ours, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expanded_gradient(devices, dtype):
    """The gradient that `p.sum().backward()` leaves: one number with stride 0."""
    ours, reference = make_pair([torch.randn(6, TILE, dtype=dtype, requires_grad=True)], devices)
    train_pair(ours, reference, steps=3, make=lambda p: torch.randn((), dtype=p.dtype).expand(p.shape))
    assert_matches(ours, reference)


def test_untouched_elements_between_a_strided_view(devices):
    base = torch.randn(12, 10)
    before = base.clone()
    ours, reference = make_pair([base[::2, ::3].requires_grad_()], devices)
    train_pair(ours, reference, steps=2)
    inside = torch.zeros_like(base, dtype=torch.bool)
    inside[::2, ::3] = True
    assert torch.equal(base[~inside], before[~inside])
    assert not torch.equal(base[inside], before[inside])


@pytest.mark.sampled(together=2)
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_gradients_of_another_dtype(devices, dtype, grad_dtype):
    """For example fp32 gradients, with bits that 16 bits cannot hold, for bf16 parameters."""
    params = [torch.randn(n, dtype=dtype, requires_grad=True) for n in (17, TILE + 1)]
    for p in params:
        p.grad_dtype = grad_dtype
    ours, reference = make_pair(params, devices)
    train_pair(ours, reference, make=lambda p: torch.randn(p.shape, dtype=grad_dtype))
    assert_matches(ours, reference)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_gradient_every_bit_stays(devices, dtype):
    params = [torch.randn(100, dtype=dtype, requires_grad=True) for _ in range(3)]
    ours, reference = make_pair(params, devices)
    for k in range(6):
        set_grads(ours, reference)
        if k % 2:
            before = [t.clone() for t in (params[1].detach(), *ours.state[params[1]].values())]
            params[1].grad = params_of(reference)[1].grad = None
        ours.step()
        reference.step()
        if k % 2:
            now = (params[1].detach(), *ours.state[params[1]].values())
            assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    assert [ours.state[p]["step"].item() for p in params] == [6, 3, 6]
    assert_matches(ours, reference)


def test_a_first_gradient_comes_late(devices):
    params = [torch.randn(n, dtype=torch.bfloat16, requires_grad=True) for n in (40, TILE + 3, 7)]
    ours, reference = make_pair(params, devices)
    for k in range(5):
        set_grads(ours, reference)
        for optimizer in (ours, reference):
            for p in params_of(optimizer)[k + 1 :]:
                p.grad = None
        ours.step()
        reference.step()
    assert_matches(ours, reference)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_zero_gradient_still_decays(devices, dtype):
    p = torch.ones(33, dtype=dtype, requires_grad=True)
    ours, reference = make_pair([p], devices, lr=0.5, weight_decay=0.25)
    train_pair(ours, reference, steps=2, make=torch.zeros_like)
    assert_matches(ours, reference)
    assert torch.equal(p.detach(), torch.full_like(p, 0.875**2))
    assert ours.state[p]["step"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_gradients(devices, dtype):
    """1e20 squared overflows fp32; (1 - beta2) * g * g, multiplied in this order as torch does, does not."""
    ours, reference = make_pair([torch.randn(TILE + 1, dtype=dtype, requires_grad=True)], devices)
    train_pair(ours, reference, make=lambda p: 1e20 * torch.sign(torch.randn_like(p)))
    assert_matches(ours, reference)
    assert torch.isfinite(ours.state[params_of(ours)[0]]["exp_avg_sq"]).all()


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("of", rules(PAIRS))
def test_overflow_goes_where_it_goes_in_torch(devices, of, value):
    p = torch.randn(40, requires_grad=True)
    ours, reference = make_pair([p], devices, of=of)
    (theirs,) = params_of(reference)
    set_grads(ours, reference)
    p.grad[3] = theirs.grad[3] = value
    ours.step()
    reference.step()
    torch.testing.assert_close(p, theirs, rtol=1e-6, atol=0, equal_nan=True)
    bad = torch.arange(40) == 3
    assert (p.isfinite() | bad).all()
    assert all(value.isfinite()[~bad].all() for name, value in ours.state[p].items() if name != "step")


def test_masters_keep_what_16_bits_cannot(devices):
    """Steps smaller than half a unit in the parameter's last place add up."""
    p = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    ours, reference = make_pair([p], devices, lr=1e-4, weight_decay=0.0)
    train_pair(ours, reference, steps=1, make=torch.ones_like)
    assert torch.equal(p.detach(), torch.ones_like(p))
    train_pair(ours, reference, steps=39, make=torch.ones_like)
    assert torch.equal(p.detach(), params_of(reference)[0].detach().to(p.dtype))
    assert (p < 1).all()


# ---- Our own options -----------------------------------------------------------


def final_bits(devices, *, dtypes=(*DTYPES, torch.complex64), steps=4, tile_size=TILE, grads=None, **kwargs):
    """Trains the same parameters of several sizes and dtypes each time; returns all parameters and states."""
    generator = torch.Generator().manual_seed(1)

    def randn(shape, dtype):
        return torch.randn(shape, dtype=dtype, generator=generator)

    shapes = [(3 * TILE + 5,), (17,), (5, 7), (0,), (2, TILE), ()]
    params = [randn(s, dtypes[i % len(dtypes)]).requires_grad_() for i, s in enumerate(shapes)]
    with CSDAdam(params, lr=1e-2, devices=devices, tile_size=tile_size, **kwargs) as optimizer:
        for _ in range(steps):
            for p in params:
                grad = randn(p.shape, p.dtype)
                p.grad = grads(grad) if grads else grad
            optimizer.step()
        return [t.detach().clone() for p in params for t in (p, *optimizer.state[p].values())]


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_grad_dtype_is_as_if_the_gradient_had_been_rounded(devices, dtype, grad_dtype):
    pushed = final_bits(devices, dtypes=[dtype], grad_dtype=grad_dtype)
    rounded = final_bits(["ram:"], dtypes=[dtype], grads=lambda g: g.to(grad_dtype).to(g.dtype))
    assert_same(pushed, rounded)


def test_grad_dtype_with_layouts_and_neighbours(devices):
    """In one tile, the gradients of some parameters are rounded, and those of their neighbours need no rounding."""
    params = [layout(dtype).requires_grad_() for layout in LAYOUTS for dtype in (torch.float32, torch.bfloat16)]
    ours, reference = make_pair(params, devices, grad_dtype=torch.bfloat16)
    train_pair(ours, reference, make=lambda p: torch.randn_like(p).bfloat16().to(p.dtype))
    assert_matches(ours, reference)


def test_grad_dtype_halves_the_push(devices):
    p = torch.randn(TILE, requires_grad=True)
    with CSDAdam([p], devices=devices, grad_dtype=torch.bfloat16) as optimizer:
        p.grad = torch.randn_like(p)
        optimizer.step()
        stats = optimizer.stats()
    assert (stats["push_bytes"], stats["pull_bytes"]) == (2 * TILE, 4 * TILE)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_grad_norm", [0.5, 1e4])
def test_max_grad_norm_is_clip_grad_norm_in_fp32(devices, dtype, max_grad_norm):
    params = [torch.randn(n, dtype=dtype, requires_grad=True) for n in (100, TILE + 1)]
    ours, reference = make_pair(params, devices, max_grad_norm=max_grad_norm)
    for _ in range(5):
        set_grads(ours, reference)
        norm = torch.nn.utils.clip_grad_norm_(params_of(reference), max_grad_norm)
        unclipped = [p.grad.clone() for p in params]
        ours.step()
        reference.step()
        assert ours.stats()["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
        assert_same([p.grad for p in params], unclipped)
    assert_matches(ours, reference)


def test_max_grad_norm_spans_groups_and_complex(devices):
    groups = [
        {"params": [torch.randn(10, dtype=torch.complex64, requires_grad=True)]},
        {"params": [torch.randn(10, dtype=torch.bfloat16, requires_grad=True)], "lr": 1e-2},
    ]
    ours, reference = make_pair(groups, devices, max_grad_norm=0.1)
    set_grads(ours, reference)
    torch.nn.utils.clip_grad_norm_(params_of(reference), 0.1)
    ours.step()
    reference.step()
    assert_matches(ours, reference)


# ---- The same bits, whatever computes them ----------------------------------------


@pytest.fixture
def expected():
    return final_bits(["ram:"])


def test_bits_do_not_depend_on_back_end(devices, expected):
    assert_same(final_bits(devices), expected)


def test_bits_do_not_depend_on_the_run(devices):
    assert_same(final_bits(devices, overwrite=True), final_bits(devices, overwrite=True))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bits_do_not_depend_on_threads(devices, expected, restored, threads):
    bindings.threads_use(threads)
    assert bindings.threads_used() == threads
    assert_same(final_bits(devices), expected)


def test_bits_do_not_depend_on_who_updates_a_small_step(devices, restored):
    """The update threads, or the thread that pushes, for which subnormal numbers are not zero."""

    def grads(g):
        return torch.complex(grads(g.real), grads(g.imag)) if g.is_complex() else small_grads(g.numel(), g.dtype)

    images = []
    for elems in (0, 1 << 30):
        bindings.small_step_use(elems)
        torch.manual_seed(0)
        images.append(final_bits(devices, overwrite=True, grads=lambda g: grads(g).view(g.shape)))
    assert_same(*images)


@pytest.mark.parametrize("isa", bindings.isas())
def test_bits_do_not_depend_on_the_instruction_set(devices, expected, restored, isa):
    bindings.isa_use(isa)
    assert bindings.isa_used() == isa
    assert_same(final_bits(devices), expected)


@pytest.mark.parametrize("tile_size", [1, TILE // 2, 3 * TILE, 1 << 16, None])
def test_bits_do_not_depend_on_tile_size(devices, expected, tile_size):
    assert_same(final_bits(devices, tile_size=tile_size), expected)


@pytest.mark.parametrize("n", [2, 3, 7])
@pytest.mark.parametrize("device", ["file:", "ram:", "file:?buffers=3&block=4096"])
def test_bits_do_not_depend_on_the_number_of_devices(expected, device, n):
    assert_same(final_bits([device] * n), expected)


def test_bits_with_amsgrad_do_not_depend_on_back_end(devices):
    assert_same(final_bits(devices, amsgrad=True), final_bits(["ram:"] * 2, amsgrad=True))


BEFORE = ["nothing", "flush", "upward"]

# Changes the floating-point settings before the first thread is created, so that threads inherit them; then trains with
# and without Top-K. Prints all bits: parameters, states, residuals.
TRAIN = """
import sys, torch
from csd_optim import CSDAdam
from support.floats import set_floats, small_grads

def train(steps, **kwargs):
    torch.manual_seed(0)
    opt = CSDAdam([torch.nn.Parameter(torch.randn(64, 80)) for _ in range(2)], devices=["ram:"], **kwargs)
    for _ in range(steps):
        for p in opt.param_groups[0]["params"]:
            p.grad = small_grads(p.numel(), torch.float32).view(p.shape)
        opt.step()
    return [t for p in opt.param_groups[0]["params"] for t in (p, *opt.state[p].values())]

set_floats(sys.argv[1])
train(1)
set_floats("nothing" if sys.argv[1] == "upward" else sys.argv[1])  # the step's constants are the caller's own
for t in train(6) + train(6, topk=0.1, betas=(0.5, 0.9)):
    print(t.detach().reshape(-1).view(torch.uint8).numpy().tobytes().hex())
"""


def test_bits_do_not_depend_on_who_made_the_first_thread():
    """Threads inherit the rounding mode and the treatment of subnormal numbers."""
    runs = [printed(TRAIN, how) for how in BEFORE]
    assert len(runs[0]) > 10**5
    assert runs[0] == runs[1] == runs[2]


def test_bits_do_not_depend_on_the_calling_thread():
    """Updater and selection alone: neither depends on the thread's floating-point settings, nor changes them."""
    n = 4096
    grad, residual = small_grads(n, torch.float32), small_grads(n, torch.bfloat16)
    before = [torch.randn(n), small_grads(n, torch.float32), small_grads(n, torch.float32).abs()]
    constants = hyper()
    results = []
    for how in BEFORE:
        states, param = [t.clone() for t in before], torch.empty(n, dtype=torch.bfloat16)
        set_floats(how)
        try:
            bindings.update(constants, "scalar", grad, states, param)
            owed = residual.clone()
            selection = HostSelection({0: (n, [part(grad, torch.bfloat16, 1 / 3, owed, scale=3.0)])})
            selection.feed_back()
            assert LIBM.fegetround() == (UPWARD if how == "upward" else NEAREST)
            assert (torch.tensor(1e-40) * 1 == 0) == (how == "flush")
        finally:
            set_floats("nothing")
        results.append([*states, param, *selection.rows.values(), owed])
    for other in results[1:]:
        assert_same(other, results[0])


def test_moments_fade_to_zero_as_in_torch():
    """With zero gradients moments halve until they would be subnormal; then they become zero, at the same step."""
    kwargs = {"lr": 1e-2, "betas": (0.5, 0.5)}  # all products are exact
    p = torch.randn(100, requires_grad=True)
    ours, reference = make_pair([p], ["ram:"], **kwargs)
    copy = params_of(reference)[0]
    for step in range(150):
        set_grads(ours, reference, torch.randn_like if step < 3 else torch.zeros_like)
        ours.step()
        torch.set_flush_denormal(True)
        try:
            reference.step()
        finally:
            torch.set_flush_denormal(False)
        if step > 110:
            for name in STATES:
                assert torch.equal(ours.state[p][name] == 0, reference.state[copy][name] == 0)
    assert all((reference.state[copy][name] == 0).all() for name in STATES)


# ---- The updater alone ---------------------------------------------------------------

UPDATED = {row.name: row.updated for row in bindings.RULE_ROWS if not row.of_pass}  # number of sections


def hyper(rule="adamw", **changes):
    """Constants of a third step with lr 1e-2, after `changes`; other rules use the same numbers as their constants."""
    lr, beta1, beta2, t = 1e-2, 0.9, 0.999, 3
    values = {
        "decay": 1 - lr * 0.1,
        "beta1": beta1,
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "step_size": lr / (1 - beta1**t),
        "inv_sqrt_bias2": (1 - beta2**t) ** -0.5,
        "eps": 1e-8,
        "grad_scale": 1.0,
        **changes,
    }
    return np.array([(bindings.RULES[rule], (*values.values(),))], bindings.HYPER)


def flushed(t):
    """Replaces fp32 subnormals by zeros of the same sign."""
    return torch.where(t.abs() < torch.finfo(torch.float32).tiny, t * 0, t)


def extremes(n, dtype=torch.float32, nan=True):
    """Random numbers, among them denormals, infinities, both zeros, huge ones and nan."""
    x = torch.randn(n, dtype=torch.float64)
    x[1::7] *= 1e-39
    x[2::7] *= 1e-7  # denormal in fp16
    x[3::7] *= 1e19
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan") if nan else 1.0], dtype=torch.float64)
    x[5::11] = special.repeat(n)[: len(x[5::11])]
    return x.to(dtype)


@pytest.mark.sampled(together=2)
@pytest.mark.skipif(len(bindings.isas()) == 1, reason="this CPU has one instruction set to compare")
@pytest.mark.parametrize(
    ("rule", "grad_dtype", "param_dtype"),
    [
        *itertools.product(("adamw", "amsgrad"), DTYPES, DTYPES),
        *((rule, torch.bfloat16, torch.float16) for rule in UPDATED if rule not in ("adamw", "amsgrad")),
    ],
)
def test_instruction_sets_agree_at_every_length_and_offset(rule, grad_dtype, param_dtype):
    room, sections = 80, UPDATED[rule]
    inputs = [
        extremes(room, grad_dtype),
        *(extremes(room) for _ in range(sections)),
        torch.full((room,), 7.0, dtype=param_dtype),
    ]
    for i in (3, 4):
        if i < len(inputs) - 1:
            inputs[i] = inputs[i].abs()  # squares are not negative; nan and inf stay among them
    constants = hyper(rule=rule, grad_scale=-0.37)
    for length in range(68):
        for offset in (0, 1, 7):
            results = {}
            for isa in bindings.isas():
                tensors = [t.clone() for t in inputs]
                # The gradient defines the length; the other tensors are longer, so that a write past the end shows.
                grad, *sections, param = (t[offset:] for t in tensors)
                bindings.update(constants, isa, grad[:length], sections, param)
                results[isa] = tensors
            for before, after in zip(inputs, results["scalar"], strict=True):
                assert torch.equal(bits(before[:offset]), bits(after[:offset]))
                assert torch.equal(bits(before[offset + length :]), bits(after[offset + length :]))
            for isa, found in results.items():
                for ours, scalar in zip(found, results["scalar"], strict=True):
                    assert torch.equal(bits(ours), bits(scalar)), (isa, length, offset)


@pytest.mark.parametrize("isa", bindings.isas())
def test_updater_without_a_parameter(isa):
    """Without an output for the rounded master, the states are the same."""
    runs = []
    for param in (None, torch.empty(100)):
        torch.manual_seed(1)
        states = [torch.randn(100), torch.randn(100), torch.rand(100)]
        bindings.update(hyper(), isa, torch.randn(100), states, param)
        runs.append(states)
    assert_same(*runs)


@pytest.mark.parametrize("isa", bindings.isas())
@pytest.mark.parametrize("dtype", HALVES)
def test_every_16_bit_gradient_widens_as_in_torch(dtype, isa):
    grad = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    n = grad.numel()
    exp_avg = torch.full((n,), -0.0)  # with beta1 = 0 exp_avg becomes the gradient; -0 + x is x, even for x = -0
    constants = hyper(beta1=0.0, one_minus_beta1=1.0)
    bindings.update(constants, isa, grad, (torch.zeros(n), exp_avg, torch.zeros(n)), None)
    assert torch.equal(bits(exp_avg), bits(flushed(grad.float())))


def fp32_around(dtype):
    """Every 16-bit number, every midpoint between two of them, and the fp32 neighbours of both; and random bits."""
    halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    exact = halves.double()
    # The number after the largest finite one would be one unit away; the midpoint before it rounds to infinity.
    ordered = exact[exact.isfinite()].unique()
    ends = ordered[-1:] + (ordered[-1:] - ordered[-2:-1]) / 2
    midpoints = torch.cat([(ordered[:-1] + ordered[1:]) / 2, ends, -ends])
    x = torch.cat([exact, midpoints]).float()
    up, down = (torch.nextafter(x, torch.tensor(limit)) for limit in (float("inf"), -float("inf")))
    random = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    return torch.cat([x, up, down, random])


@pytest.mark.parametrize("isa", bindings.isas())
@pytest.mark.parametrize("dtype", HALVES)
def test_masters_round_as_in_torch(dtype, isa):
    """Ties to even, subnormals of fp16, overflow to infinity, nan stays nan."""
    master = fp32_around(dtype)
    n = master.numel()
    before, param = flushed(master), torch.empty(n, dtype=dtype)
    constants = hyper(decay=1.0, step_size=0.0, eps=1.0)  # a step that changes nothing
    bindings.update(constants, isa, torch.zeros(n), (master, torch.zeros(n), torch.zeros(n)), param)
    assert torch.equal(bits(master), bits(before))
    assert torch.equal(bits(param), bits(before.to(dtype)))
