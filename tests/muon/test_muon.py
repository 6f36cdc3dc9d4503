"""CSDMuon: against torch.optim.Muon on fp32 copies, and against itself bit for bit."""

import contextlib
import copy
import math
import os
import signal
from unittest import mock

import pytest
import torch
from support.backends import device_strings

from csd_optim import CSDAdam, CSDMemoryError, CSDMuon, CSDRuntimeError, CSDValueError
from csd_optim.step import two_passes

TILE = 1024  # elements
SHAPES = [(64, 64), (40, 100), (100, 40), (1, 300), (3, 5), (70, 90), (8, 8), (3, 24, 40), (60, 20)]
MUON = getattr(torch.optim, "Muon", None)
needs_muon = pytest.mark.skipif(MUON is None, reason="this torch has no Muon")


def model(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def rest():
    generator = torch.Generator().manual_seed(2)
    return [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in (1500, 7)]


def set_grads(params, step):
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def image(opt):
    params = [p for group in opt.param_groups for p in group["params"]]
    return [p.detach().clone() for p in params] + [
        opt.state[p][name].clone() for p in params for name in opt.state[p] if name != "step"
    ]


def assert_equal(a, b):
    assert len(a) == len(b)
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert torch.equal(x, y), i


def both(devices="file:", dtype=torch.float32, **options):
    """A CSDMuon with matrices by Muon and vectors by AdamW."""
    matrices, others = model(dtype), rest()
    groups = [{"params": matrices, "lr": 0.02}, {"params": others, "use_muon": False, "lr": 0.01}]
    return CSDMuon(groups, devices=devices, **{"tile_size": TILE, **options}), matrices + others


def after(steps, devices="file:", **options):
    opt, params = both(devices, **options)
    with opt:
        for k in range(steps):
            set_grads(params, k)
            opt.step()
        return image(opt)


# ---- against torch ---------------------------------------------------------------------


@needs_muon
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_torchs(tmp_path, backend, nesterov, adjust, dtype):
    shapes = [shape for shape in SHAPES if len(shape) == 2]
    params = model(dtype, shapes)
    copies = [torch.nn.Parameter(p.detach().float().clone()) for p in params]
    start = [p.detach().clone() for p in copies]
    arguments = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust}
    reference = MUON(copies, **arguments)
    devices = device_strings(backend, tmp_path)
    with CSDMuon(params, **arguments, ns_dtype="bf16", devices=devices, tile_size=TILE) as opt:  # as torch's
        assert isinstance(opt, MUON)
        for k in range(10):
            set_grads(params, k)
            for p, c in zip(params, copies, strict=True):
                c.grad = p.grad.float()
            opt.step()
            reference.step()
        for p, c, began in zip(params, copies, start, strict=True):
            momentum, wanted = opt.state[p]["momentum_buffer"], reference.state[c]["momentum_buffer"]
            assert (momentum - wanted).norm() <= 1e-6 * wanted.norm()
            master, moved = opt.state[p]["master"], c.detach() - began
            away = (master - c.detach()).abs()
            if min(p.shape) > 1:  # of a vector, O is the vector itself, in bf16: its rounding is all of the difference
                assert away.norm() <= 0.005 * moved.norm()
            assert away.max() <= 0.1 * moved.square().mean().sqrt()
            assert torch.equal(p.detach(), master.to(dtype))


def test_groups_with_use_muon_false_are_adamws():
    opt, params = both()
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params[len(SHAPES) :]]
    reference = torch.optim.AdamW(copies, lr=0.01)
    with opt:
        assert opt.param_groups[1]["rule"] == "adamw"
        assert {
            **opt.param_groups[1],
            **{"weight_decay": 0.01, "eps": 1e-8, "betas": (0.9, 0.999)},
        } == opt.param_groups[1]
        for k in range(5):
            set_grads(params, k)
            for p, c in zip(params[len(SHAPES) :], copies, strict=True):
                c.grad = p.grad.clone()
            opt.step()
            reference.step()
        for p, c in zip(params[len(SHAPES) :], copies, strict=True):
            torch.testing.assert_close(p, c, rtol=1e-6, atol=1e-6)


def test_a_batch_is_its_matrices():
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(4, 30, 50, generator=generator)
    gradients = [torch.randn(4, 30, 50, generator=generator) for _ in range(3)]
    batch, single = torch.nn.Parameter(whole.clone()), [torch.nn.Parameter(m.clone()) for m in whole]
    with CSDMuon([batch], devices="ram:") as a, CSDMuon(single, devices="ram:") as b:
        for g in gradients:
            batch.grad = g
            for p, part in zip(single, g, strict=True):
                p.grad = part.clone()
            a.step()
            b.step()
    assert torch.equal(batch, torch.stack([*single]))


def test_a_transposed_parameter_is_its_matrix():
    values = torch.randn(40, 60, generator=torch.Generator().manual_seed(6))
    strided = torch.nn.Parameter(values.t().contiguous().t())
    plain = torch.nn.Parameter(values.clone())
    with CSDMuon([strided], devices="ram:") as a, CSDMuon([plain], devices="ram:") as b:
        for k in range(3):
            set_grads([strided], k)
            plain.grad = strided.grad.contiguous()
            a.step()
            b.step()
        assert torch.equal(strided, plain)
        assert torch.equal(a.state[strided]["momentum_buffer"], b.state[plain]["momentum_buffer"])


# ---- against itself --------------------------------------------------------------------


@pytest.mark.parametrize("tile", [256, 4096, 1 << 20])
def test_bits_depend_on_no_tile_size_and_no_back_end(tmp_path, backend, tile):
    assert_equal(after(4, device_strings(backend, tmp_path), tile_size=tile), after(4))


def test_a_step_reads_and_writes_each_half_once():
    params = model(torch.bfloat16, [(512, 512)] * 4)
    with CSDMuon(params, devices="file:?cache=off", tile_size=1 << 15) as opt:
        for k in range(3):
            set_grads(params, k)
            opt.step()
        stats = opt.stats()
    n = 4 * 512 * 512
    assert stats["flash_read_bytes"] == 8 * n
    assert stats["flash_write_bytes"] == 8 * n


def test_accumulated_gradients_are_orthogonalized_once():
    one, two = model(), model()
    with CSDMuon(one, devices="ram:") as a, CSDMuon(two, devices="ram:") as b:
        for k in range(3):
            set_grads(one, 2 * k)
            first = [p.grad for p in one]
            set_grads(one, 2 * k + 1)
            for p, q, g in zip(one, two, first, strict=True):
                p.grad = p.grad + g
                q.grad = p.grad.clone()
            a.step()
            b.step()
        assert_equal(image(a), image(b))


def test_a_loss_scale_changes_no_bit():
    plain = after(3, max_grad_norm=1.0)
    opt, params = both(max_grad_norm=1.0)
    with opt:
        for k in range(3):
            set_grads(params, k)
            for p in params:
                p.grad *= 1024
            opt.grad_scale, opt.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
            opt.step()
        assert_equal(image(opt), plain)
        opt.found_inf = torch.tensor(1.0)
        opt.step()
        assert_equal(image(opt), plain)


def test_closure_frozen_and_late_parameters():
    opt, params = both()
    with opt:
        set_grads(params, 0)
        params[1].grad = None  # no gradient at first
        before = params[1].detach().clone()
        assert opt.step(lambda: 5) == 5
        assert torch.equal(params[1], before)
        set_grads(params, 1)
        opt.step()
        assert opt.state[params[1]]["step"] == 1
        assert opt.state[params[0]]["step"] == 2
        params[0].requires_grad_(False)
        params[0].grad = None
        before = params[0].detach().clone()
        set_grads(params[1:], 2)
        opt.step()
        assert torch.equal(params[0], before)


def test_late_parameters_that_share_a_tile_over_many_groups():
    """Those of the first and of the last group, whose X are in memory together with all between them."""

    def states_with(tile_size):
        params = model(shapes=[(30, 30), *[(128, 80)] * 9, (30, 30)])
        with CSDMuon(params, lr=0.02, tile_size=tile_size) as opt:
            for k in range(3):
                set_grads(params, k)
                if k == 0:
                    params[0].grad = params[-1].grad = None
                opt.step()
            return image(opt)

    assert_equal(states_with(TILE), states_with(1 << 17))


@pytest.mark.parametrize("what", ["momentum_buffer", "parameter"])
def test_what_the_program_writes_counts(what):
    """As if it had been so from the beginning."""
    opt, params = both()
    with opt:
        set_grads(params, 0)
        opt.step()
        kept = copy.deepcopy(opt.state_dict())
        values = [p.detach().clone() for p in params]
        p = params[5]
        if what == "parameter":
            with torch.no_grad():
                p.mul_(2)
        else:
            opt.state[p][what].mul_(2)
        set_grads(params, 1)
        opt.step()
        found = image(opt)
    other, others = both()
    with other:
        with torch.no_grad():
            for p, value in zip(others, values, strict=True):
                p.copy_(value)
            if what == "parameter":
                others[5].mul_(2)
        if what == "parameter":
            del kept["state"][5]["master"]
        else:
            kept["state"][5][what] *= 2
        other.load_state_dict(kept)
        set_grads(others, 1)
        other.step()
        assert_equal(image(other), found)


class Weighted(torch.nn.Module):
    """The sum of all parameters, each weighted by what is to be its gradient."""

    def __init__(self, params):
        super().__init__()
        self.params = torch.nn.ParameterList(params)

    def forward(self, weights):
        return sum((p.float() * w.float()).sum() for p, w in zip(self.params, weights, strict=True))


@pytest.mark.parametrize("backward", [False, True])
def test_overlap_changes_no_bit(tmp_path, backend, backward):
    matrices, others = model(torch.bfloat16), rest()
    module, stand_ins = Weighted(matrices + others), model(torch.bfloat16) + rest()
    groups = [{"params": matrices, "lr": 0.02}, {"params": others, "use_muon": False, "lr": 0.01}]
    with CSDMuon(groups, devices=device_strings(backend, tmp_path), tile_size=TILE) as opt:
        opt.overlap(module, backward=backward)
        early = 0
        for k in range(4):
            set_grads(stand_ins, k)
            loss = module([p.grad for p in stand_ins])
            opt.synchronize()  # a step begins in backward once the last one is durable
            loss.backward()
            opt.step()
            opt.zero_grad()
            if backward:
                early += opt.stats()["overlap"]["early_params"]
                assert not opt.stats()["overlap"]["redone"]
        assert bool(early) is backward
        opt.wait()
        found = image(opt)
    assert_equal(found, after(4, dtype=torch.bfloat16))


def test_resumes(tmp_path):
    opt, params = both(tmp_path / "csd")
    with opt:
        for k in range(3):
            set_grads(params, k)
            opt.step()
        found = image(opt)
    opt, params = both(tmp_path / "csd", resume=True)
    with opt:
        assert_equal(image(opt), found)
        set_grads(params, 3)
        opt.step()
        assert_equal(image(opt), after(4))


# ---- steps that fail between the passes --------------------------------------------------


@contextlib.contextmanager
def failing(at, error):
    """Raise `error`, or call it, in the orthogonalization of this parameter, counted from 0."""
    real, calls = two_passes.InTwoPasses.orthogonalize, 0

    def orthogonalize(p):
        nonlocal calls
        calls += 1
        if calls == at + 1:
            if callable(error):
                error()
            else:
                raise error
        real(p)

    with mock.patch.object(two_passes.InTwoPasses, "orthogonalize", orthogonalize):
        yield


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("at", range(0, len(SHAPES), 3))
@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_failure_between_the_passes_leaves_the_step_before(tmp_path, backend, at, state_dtype, dtype):
    """With tiles so small that parameters of earlier groups have been written."""
    options = {"state_dtype": state_dtype, "dtype": dtype}
    opt, params = both(device_strings(backend, tmp_path), tile_size=64, **options)
    with opt:
        for k in range(2):
            set_grads(params, k)
            opt.step()
        before = image(opt)
        set_grads(params, 2)
        with failing(at, torch.OutOfMemoryError("no room")), pytest.raises(torch.OutOfMemoryError):
            opt.step()
        assert_equal(image(opt), before)
        opt.step()
        assert_equal(image(opt), after(3, **options))


def test_ctrl_c_between_matrices():
    opt, params = both(tile_size=64)
    with opt:
        set_grads(params, 0)
        opt.step()
        before = image(opt)
        set_grads(params, 1)
        with failing(3, lambda: os.kill(os.getpid(), signal.SIGINT)), pytest.raises(KeyboardInterrupt):
            opt.step()
        assert_equal(image(opt), before)
        opt.step()
        assert_equal(image(opt), after(2))


def test_too_little_memory_is_said_before_anything_is_changed():
    opt, params = both()
    with opt:
        set_grads(params, 0)
        opt.step()
        before = image(opt)
        set_grads(params, 1)
        little = mock.patch.object(two_passes, "available_memory", return_value=1000)
        with little, pytest.raises(CSDMemoryError, match="orthogonalizing the matrices"):
            opt.step()
        assert_equal(image(opt), before)
        opt.step()
        assert_equal(image(opt), after(2))


# ---- arguments ---------------------------------------------------------------------------


def matrix():
    return torch.nn.Parameter(torch.ones(4, 4))


@pytest.mark.parametrize(
    ("groups", "options", "said"),
    [
        ([torch.nn.Parameter(torch.ones(4))], {}, "no real matrix"),
        ([torch.nn.Parameter(torch.ones(2, 2, 2, 2))], {}, "no real matrix"),
        ([torch.nn.Parameter(torch.ones(2, 2).to(torch.complex64))], {}, "no real matrix"),
        ([matrix()], {"topk": 0.1}, "topk"),
        ([{"params": [matrix()], "topk": 0.1}], {}, "topk"),
        ([{"params": [matrix()], "use_muon": False, "rule": "muon"}], {}, "use_muon"),
        ([{"params": [matrix()], "betas": (0.9, 0.9), "use_muon": True}], {}, "betas"),
        ([matrix()], {"ns_steps": 100}, "ns_steps"),
        ([matrix()], {"ns_coefficients": (1, 2)}, "ns_coefficients"),
        ([matrix()], {"ns_coefficients": [(1, 2, 3)] * 4}, "ns_coefficients"),
        ([matrix()], {"adjust_lr_fn": "no"}, "adjust_lr_fn"),
        ([matrix()], {"ns_dtype": "fp16"}, "ns_dtype"),
        ([matrix()], {"lr": -1.0}, "learning rate"),
        ([matrix()], {"momentum": -1.0}, "momentum"),
        ([matrix()], {"weight_decay": math.nan}, "weight decay"),
        ([matrix()], {"devices": ["gpu:", "file:"]}, "muon"),
    ],
)
def test_refuses(groups, options, said):
    with pytest.raises((CSDValueError, CSDRuntimeError), match=said):
        CSDMuon(groups, **options)


@pytest.mark.parametrize("shape", [(5,), (3, 4, 5, 6)], ids=str)
def test_frozen_parameters_that_are_no_matrices_cannot_join_later(shape):
    params = model(shapes=[(8, 8), shape])
    params[1].requires_grad_(False)
    with CSDMuon(params) as opt:
        set_grads(params[:1], 0)
        opt.step()
        params[1].requires_grad_(True)
        set_grads(params, 1)
        before = image(opt)
        with pytest.raises(CSDValueError, match="no real matrix"):
            opt.step()
        assert_equal(image(opt), before)
        params[1].grad = None
        opt.step()
        assert opt.state[params[0]]["step"] == 2


def test_coefficients_of_each_iteration():
    same = [(3.4445, -4.7750, 2.0315)] * 5
    assert_equal(after(2, ns_coefficients=same), after(2))
    assert any(
        not torch.equal(a, b) for a, b in zip(after(2, ns_coefficients=[(2, -1.5, 0.5)] * 5), after(2), strict=True)
    )


def test_ns_dtype_is_shown():
    opt, params = both(ns_dtype="fp32")
    with opt:
        set_grads(params, 0)
        opt.step()
        assert opt.stats()["ns_dtype"] == "fp32"
    with CSDAdam(rest()) as other:
        assert "ns_dtype" not in other.stats()


@needs_muon
def test_state_dicts_go_both_ways():
    shapes = [(30, 40), (40, 30)]
    params, copies = model(shapes=shapes), model(shapes=shapes)
    theirs = MUON(copies, lr=0.02)
    with CSDMuon(params, lr=0.02, devices="ram:") as ours:
        for k in range(2):
            set_grads(params, k)
            set_grads(copies, k)
            ours.step()
            theirs.step()
        again = MUON(model(shapes=shapes), lr=0.5)
        again.load_state_dict(ours.state_dict())
        assert again.param_groups[0]["lr"] == 0.02
        for p, q in zip(params, again.param_groups[0]["params"], strict=True):
            assert torch.equal(again.state[q]["momentum_buffer"], ours.state[p]["momentum_buffer"])
        with CSDMuon(model(shapes=shapes), lr=0.5, devices="ram:") as loaded:
            loaded.load_state_dict(theirs.state_dict())
            assert loaded.param_groups[0]["lr"] == 0.02
            for p, q in zip(copies, loaded.param_groups[0]["params"], strict=True):
                assert torch.equal(loaded.state[q]["momentum_buffer"], theirs.state[p]["momentum_buffer"])
                assert loaded.state[q]["step"] == 1
