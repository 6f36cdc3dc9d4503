"""Top-K and error feedback. Oracle: the definitions of docs/topk.md in plain torch, then torch.optim.AdamW.

Sent values and residuals are compared bit for bit, states and parameters as in test_adamw.py.
"""

import copy
import ctypes
import io
import math

import numpy as np
import pytest
import torch
from support import far
from support.backends import TILE
from support.comparing import fp32_copy, params_of, relative_difference
from support.inside import idle_engine_of, state_map_of
from support.states import assumed

from csd_optim import CSDAdam, CSDError, CSDTornError, bindings
from csd_optim.bindings import Push
from csd_optim.compression.policy import ratios

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HALVES = [torch.float16, torch.bfloat16]
BLOCK = 1 << 16
INF_BITS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}


def selected(values, k):
    """Indices of the k largest magnitudes of 16-bit values: ties by index, zeros never, nan above all."""
    bits = values.view(torch.int16).numpy() & 0x7FFF  # radix sort, as they have 16 bits
    bits = np.minimum(bits, INF_BITS[values.dtype] + 1)
    chosen = np.sort(np.argsort(-bits, kind="stable")[:k])
    return torch.from_numpy(chosen[bits[chosen] > 0])


def rounded_at_random(x, first, step):
    """Rounds fp32 to bf16 stochastically: adds a hash of element and step to the 16 bits that are cut off."""
    h = (np.arange(first, first + len(x), dtype=np.uint64) + step * 0x9E3779B9).astype(np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = (h ^ h >> np.uint32(shift)) * np.uint32(factor)
    h ^= h >> np.uint32(16)
    bits = x.numpy().view(np.uint32).astype(np.uint64) + (h & np.uint32(0xFFFF))
    return torch.from_numpy((bits >> 16).astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def owed_and_sent(grad, residual, scale, dtype, k, first=0, step=1):
    """For one part: the sent values (dense, 16 bits), and the new residual."""
    scale = torch.tensor(scale, dtype=torch.float32)
    owed = grad.float() if residual is None else grad.float() + residual.float() * (1 / scale)
    largest = torch.finfo(dtype).max
    values = torch.where(owed.isfinite(), owed.clamp(-largest, largest), owed).to(dtype)
    sent = torch.zeros_like(values)
    chosen = selected(values, k)
    sent[chosen] = values[chosen]
    return sent, None if residual is None else rounded_at_random((owed - sent.float()) * scale, first, step)


class Oracle:
    """AdamW on fp32 copies of `opt`'s parameters, with the gradients that Top-K sends."""

    def __init__(self, opt, share, *, feedback=True, entry_dtype=None, **kwargs):
        self.opt, self.share, self.feedback, self.entry_dtype = opt, share, feedback, entry_dtype
        self.copies = {p: fp32_copy(p) for p in params_of(opt)}
        groups = [{**group, "params": [self.copies[p] for p in group["params"]]} for group in opt.param_groups]
        self.adamw = torch.optim.AdamW(groups, **kwargs)
        self.residuals = {p: torch.zeros(p.numel(), dtype=torch.bfloat16) for p in self.copies}
        self.sent_elems = 0

    def share_of(self, p):
        return self.share if p.dim() >= 2 and p.numel() >= 4096 else 1.0

    def step(self, scale=1.0):
        """Call this after a step of `opt`; takes the same gradients. `scale`: the factor applied to them."""
        engine, bounds = idle_engine_of(self.opt), state_map_of(self.opt).by_index
        self.sent_elems = 0
        for p, reference in self.copies.items():
            reference.grad = None if p.grad is None else p.grad.float() * scale
        for tile in range(len(engine.tiles)):
            for row, _, first, _, n in engine.tiles.pieces_of(tile).tolist():
                p = bounds[row].param
                share = self.share_of(p)
                if p.grad is None or share >= 0.5:
                    continue
                dtype = self.entry_dtype or (p.dtype if p.dtype in HALVES else torch.bfloat16)
                grad = p.grad.flatten()[first : first + n]
                residual = self.residuals[p][first : first + n] if self.feedback else None
                k = max(1, round(share * n))
                sent, rest = owed_and_sent(grad, residual, scale, dtype, k, first, int(self.opt.state[p]["step"]))
                assert sent.count_nonzero() <= k
                self.sent_elems += int(sent.count_nonzero())
                if rest is not None:
                    residual.copy_(rest)
                self.copies[p].grad.view(-1)[first : first + n] = sent.float() * scale
        self.adamw.step()

    def check(self):
        """Compares with `opt`. With 8-bit states only residuals and parameters: the states are not AdamW's."""
        for p in self.copies:
            state = self.opt.state[p]
            if self.feedback and self.share_of(p) < 0.5:
                assert torch.equal(state["residual"].flatten(), self.residuals[p])
            else:
                assert "residual" not in state
            assert torch.equal(p.detach(), state["master"].to(p.dtype))
            if assumed() != "fp32":
                continue
            for name, expected in self.adamw.state[self.copies[p]].items():
                assert relative_difference(state[name], expected) <= 1e-6, name
            assert relative_difference(state["master"], self.copies[p]) <= 1e-6


def parameters(dtype=torch.float32):
    """Matrices over several tiles, a small matrix (sent dense), and parameters with one dimension (sent dense)."""
    shapes = [(64, 65), (7,), (101, 97), (3, 3), (8192,)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def set_grads(params, step=None):
    for p in params:
        p.grad = torch.randn(p.shape).to(p.dtype)


def make(devices, dtype=torch.float32, **kwargs):
    kwargs = {"lr": 1e-2, "topk": 0.01, "tile_size": TILE, **kwargs}
    return CSDAdam(parameters(dtype), devices=devices, **kwargs)


def image(opt):
    """Copies of everything that a step changes, for bitwise comparison."""
    state = [opt.state[p][key].clone() for p in params_of(opt) for key in sorted(opt.state[p])]
    return [p.detach().clone() for p in params_of(opt)] + state


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- what is computed ------------------------------------------------------------------


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feedback", [True, False])
def test_ten_steps(devices, dtype, feedback):
    opt = make(devices, dtype, error_feedback=feedback)
    oracle = Oracle(opt, 0.01, feedback=feedback, lr=1e-2)
    for _ in range(10):
        set_grads(params_of(opt))
        opt.step()
        oracle.step()
    oracle.check()
    owed = sum(2 * p.numel() for p in params_of(opt) if oracle.share_of(p) < 0.5)
    assert opt.stats()["residual_bytes"] == feedback * owed


@pytest.mark.parametrize("share", [0.001, 0.1, 0.49])
def test_shares(devices, share):
    opt = make(devices, topk=share)
    oracle = Oracle(opt, share, lr=1e-2)
    for _ in range(3):
        set_grads(params_of(opt))
        opt.step()
        oracle.step()
    oracle.check()


@pytest.mark.parametrize("kwargs", [{"amsgrad": True}, {"weight_decay": 0.5, "betas": (0.5, 0.9), "eps": 1e-3}])
def test_options_of_adamw(devices, kwargs):
    opt = make(devices, **kwargs)
    oracle = Oracle(opt, 0.01, **{"lr": 1e-2, **kwargs})
    for _ in range(5):
        set_grads(params_of(opt))
        opt.step()
        oracle.step()
    oracle.check()


def test_maximize(devices):
    opt = make(devices, maximize=True)
    oracle = Oracle(opt, 0.01, lr=1e-2)
    for group in oracle.adamw.param_groups:
        group["maximize"] = False
    for _ in range(5):
        set_grads(params_of(opt))
        opt.step()
        oracle.step(scale=-1.0)
    oracle.check()


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_travel_in_grad_dtype(devices, dtype, grad_dtype):
    """They share tiles with dense gradients that are sent as images, because these have to be rounded."""
    opt = make(devices, dtype, grad_dtype=grad_dtype)
    entry = next((d for d in (grad_dtype, dtype) if d in HALVES), torch.bfloat16)
    oracle = Oracle(opt, 0.01, entry_dtype=entry, lr=1e-2)
    for _ in range(3):
        set_grads(params_of(opt))
        for p in params_of(opt):
            p.grad = p.grad.to(grad_dtype).to(dtype)  # so that dense gradients are not changed by rounding
        opt.step()
        oracle.step()
    oracle.check()


@pytest.mark.parametrize("share", [None, 1.0, 0.5])
def test_dense_to_the_bit(devices, share):
    images = []
    for kwargs in ({"topk": share}, {"topk": None}):
        torch.manual_seed(0)
        opt = make([d.replace("csd", f"csd{len(images)}") for d in devices], torch.bfloat16, **kwargs)
        for _ in range(3):
            set_grads(params_of(opt))
            opt.step()
        images.append((image(opt), opt.stats()["push_bytes"]))
        opt.close()
    assert same(images[0][0], images[1][0])
    assert images[0][1] == images[1][1] == sum(2 * p.numel() for p in parameters())


@pytest.mark.parametrize("dtype", HALVES)
def test_all_entries_are_all_gradients(devices, dtype):
    """Every element as an entry: the sparse path gives the bits of the dense one."""
    images = []
    for owes in (True, False):
        torch.manual_seed(0)
        opt = make([d.replace("csd", f"csd{owes}") for d in devices], dtype, topk=None)
        for _ in range(3):
            set_grads(params_of(opt))
            large = [b for b in state_map_of(opt).by_index if b.param.dim() == 2 and b.param.numel() > 4096]
            for bound in large if owes else ():
                state_map_of(opt).add_residual(idle_engine_of(opt), bound)  # zeros, but then all is sent as entries
            opt.step()
            sent_as_entries = opt.stats()["push_bytes"] > 4 * sum(b.numel for b in large)
            assert not large or sent_as_entries == owes
        images.append(image(opt))
        opt.close()
    assert same(*images)


def test_no_two_ways_of_computing_differ(monkeypatch):
    """Instruction sets, numbers of threads and of devices: the same tiles give the same bits."""
    images, used = [], bindings.isa_used()
    try:
        for isa in bindings.isas():
            for threads in (1, 3):
                bindings.isa_use(isa)
                bindings.threads_use(threads)
                for devices in (["ram:"], ["file:"], ["file:", "ram:", "file:"]):
                    torch.manual_seed(0)
                    with make(devices, torch.float16, topk=0.05) as opt:
                        for _ in range(3):
                            set_grads(params_of(opt))
                            opt.step()
                        images.append(image(opt))
    finally:
        bindings.isa_use(used)
        bindings.threads_use(2)
    assert all(same(images[0], other) for other in images[1:])


def test_a_part_of_several_blocks(devices):
    """Indices are local to blocks of 65536 elements of the tile; parameters begin anywhere in them."""
    torch.manual_seed(1)
    params = [torch.randn(n, 1).requires_grad_() for n in (5000, 70001, 130003, 4096)]
    opt = CSDAdam(params, lr=1e-2, devices=devices, topk=0.01, tile_size=3 * BLOCK)
    oracle = Oracle(opt, 0.01, lr=1e-2)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape) * torch.rand(p.shape) ** 9
        opt.step()
        oracle.step()
    oracle.check()


@pytest.mark.parametrize("kind", ["ties", "zeros", "none", "one", "sample"])
def test_gradients_of_few_values(devices, kind):
    params = [torch.randn(300, 400).requires_grad_()]
    opt = CSDAdam(params, lr=1e-2, devices=devices, topk=0.01, tile_size=128 * 1024)
    oracle = Oracle(opt, 0.01, lr=1e-2)
    for _ in range(3):
        g = torch.zeros(300 * 400)
        if kind == "ties":
            g = torch.randint(-2, 3, g.shape).float()
        elif kind == "zeros":
            g[torch.randperm(len(g))[:100]] = torch.randn(100)
        elif kind == "one":
            g.fill_(-1.0)
        elif kind == "sample":  # all large values at the positions of a regular sample
            g = torch.rand(g.shape)
            g[(torch.arange(4096) * len(g)) // 4096] += 100
        params[0].grad = g.view(300, 400)
        opt.step()
        oracle.step()
    oracle.check()


@pytest.mark.fp32_states("codes keep no inf or nan in exp_avg")
def test_nonfinite_gradients_are_sent_first_and_counted(devices):
    params = [torch.randn(300, 400).requires_grad_()]
    opt = CSDAdam(params, lr=1e-2, devices=devices, topk=0.01, error_feedback=False)
    params[0].grad = torch.randn(300, 400)
    where = [(0, 0), (17, 399), (299, 399)]
    for at, value in zip(where, (math.inf, -math.inf, math.nan), strict=True):
        params[0].grad[at] = value
    opt.step()
    assert opt.stats()["nonfinite_grads"] == 3
    broken = ~opt.state[params[0]]["exp_avg"].isfinite()
    assert broken.nonzero().tolist() == sorted(map(list, where))


@pytest.mark.fp32_states("what is written to states is rounded to codes")
def test_what_is_finite_stays_finite_on_the_link(devices):
    """Gradient plus residual may exceed fp16: the largest finite value is sent, and the rest stays in the residual."""
    p = torch.zeros(64, 128, dtype=torch.float16, requires_grad=True)
    opt = CSDAdam([p], lr=1e-3, devices=devices, topk=1 / 8192, tile_size=8192)
    p.grad = torch.full_like(p, 60000)
    opt.step()
    first, second = opt.state[p]["residual"].flatten()[:2].tolist()
    assert first == 0  # it was sent
    assert second in (59904, 60160)  # 60000 in bf16
    opt.step()
    assert opt.state[p]["exp_avg"].flatten()[1] == pytest.approx(0.1 * 65504)
    assert opt.state[p]["residual"].flatten()[1].item() == pytest.approx(60000 + second - 65504, rel=2**-7)
    assert opt.stats()["nonfinite_grads"] == 0


@pytest.mark.fp32_states("what is written to states is rounded to codes")
def test_nothing_is_lost_but_time():
    """A constant gradient arrives completely: sent values and residual add up to the sum of the gradients."""
    p = torch.zeros(100, 100, requires_grad=True)
    opt = CSDAdam([p], lr=0.0, betas=(0.0, 0.0), devices="ram:", topk=0.01)
    g, arrived = torch.randn(100, 100), torch.zeros(100, 100)
    for _ in range(300):
        p.grad = g.clone()
        opt.step()
        arrived += opt.state[p]["exp_avg"]  # beta1 is zero: this is what the device received
    owed = opt.state[p]["residual"].float()
    lost = arrived + owed - 300 * g
    assert abs((lost * g.sign()).sum() / (300 * g.abs()).sum()) < 1e-3  # rounding is unbiased
    assert lost.abs().max() < 15  # out of hundreds: residuals reach 100, where bf16 has steps of 0.5
    assert arrived.count_nonzero() > 5000  # over the steps, far more than one percent were sent


# ---- torch's ways of stepping ------------------------------------------------------------


def test_parameters_without_gradient_keep_what_they_are_owed(devices):
    opt = make(devices)
    params = params_of(opt)
    for step in range(6):
        set_grads(params)
        if step % 2:
            params[0].grad = None
            before = opt.state[params[0]]["residual"].clone()
        opt.step()
        if step % 2:
            assert torch.equal(before, opt.state[params[0]]["residual"])
            assert opt.state[params[0]]["step"] == (step + 1) // 2


def test_an_undone_step_owes_nothing_new(backend, devices, monkeypatch):
    opt = make(devices)
    set_grads(params_of(opt))
    opt.step()
    before, engine = image(opt), idle_engine_of(opt)
    push, calls = engine.native.push, []

    def fails(tile, how=None):
        calls.append(tile)
        if len(calls) == len(engine.tiles) - 1:
            raise InterruptedError
        push(tile, how)

    monkeypatch.setattr(engine.native, "push", fails)
    set_grads(params_of(opt))
    in_place = backend == "ram" and not far.assumed()  # there is one copy of the states, so a step cannot be undone
    with pytest.raises(CSDTornError if in_place else InterruptedError):
        opt.step()
    monkeypatch.undo()
    after = image(opt)
    if in_place:
        owed = [i for i, t in enumerate(before) if t.dtype is torch.bfloat16]
        before, after = ([images[i] for i in owed] for images in (before, after))
    assert same(before, after)


class Scaler:
    """Sets the attributes that GradScaler sets around step()."""

    def __init__(self, opt):
        self.opt = opt

    def step(self, scale, found_inf=0.0):
        self.opt.grad_scale, self.opt.found_inf = torch.tensor(scale), torch.tensor(found_inf)
        try:
            self.opt.step()
        finally:
            del self.opt.grad_scale, self.opt.found_inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_loss_scale_that_changes(devices, dtype):
    """The residual is in the units of the update, so the gradients' scale may change from step to step."""
    opt = make(devices, dtype)
    oracle = Oracle(opt, 0.01, lr=1e-2)
    for scale in (1024.0, 512.0, 512.0, 4.0, 2048.0):
        set_grads(params_of(opt))
        for p in params_of(opt):
            p.grad *= scale / 16
        Scaler(opt).step(scale)
        oracle.step(scale=1 / scale)
    oracle.check()


def test_a_skipped_step_changes_nothing(devices):
    opt = make(devices)
    for step in range(3):
        set_grads(params_of(opt))
        before = image(opt) if step == 1 else None
        Scaler(opt).step(16.0, found_inf=float(step == 1))
        if before:
            assert same(before, image(opt))


def test_clipping(devices):
    """Clipping uses the norm of the original gradients, before residuals are added and elements are left out."""
    opt = make(devices, max_grad_norm=1.0)
    oracle = Oracle(opt, 0.01, lr=1e-2)
    for step in range(5):
        set_grads(params_of(opt))
        for p in params_of(opt):
            p.grad *= 10.0 ** (step - 3)
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in params_of(opt)))
        opt.step()
        assert opt.stats()["grad_norm"] == pytest.approx(norm, rel=1e-5)
        oracle.step(scale=float(np.float32(min(1.0, 1.0 / (opt.stats()["grad_norm"] + 1e-6)))))
    oracle.check()


def test_a_scale_of_zero_leaves_residuals_alone(devices):
    opt = make(devices, max_grad_norm=1.0)
    set_grads(params_of(opt))
    opt.step()
    before = [opt.state[p]["residual"].clone() for p in params_of(opt) if "residual" in opt.state[p]]
    set_grads(params_of(opt))
    params_of(opt)[0].grad[0, 0] = math.inf  # the norm is inf: everything is scaled to nothing
    opt.step()
    assert same(before, [opt.state[p]["residual"] for p in params_of(opt) if "residual" in opt.state[p]])


def test_strides(devices):
    """The residual has the states' memory order, whatever order gradients and parameters have."""
    images = []
    for strided in (False, True):
        torch.manual_seed(0)
        p = torch.randn(96, 80).requires_grad_()
        grads = [torch.randn(96, 80) for _ in range(3)]
        opt = CSDAdam([p], lr=1e-2, devices=[d.replace("csd", f"csd{strided}") for d in devices], topk=0.01)
        for g in grads:
            p.grad = g.t().contiguous().t() if strided else g
            opt.step()
        images.append(image(opt))
        opt.close()
    assert same(*images)


def test_complex_parameters_go_dense(devices):
    p = torch.randn(80, 80, dtype=torch.complex64, requires_grad=True)
    opt = CSDAdam([{"params": [p], "topk": 0.01}], devices=devices)
    p.grad = torch.randn_like(p)
    opt.step()
    assert opt.stats()["push_bytes"] == 8 * p.numel()


@pytest.mark.parametrize("given_up", ["error_feedback", "topk"])
def test_an_undone_step_gives_up_nothing_that_is_owed(devices, monkeypatch, given_up):
    p = torch.randn(64, 64, requires_grad=True)
    opt = CSDAdam([p], devices=devices, topk=0.01)
    set_grads([p])
    opt.step()
    owed = opt.state[p]["residual"].clone()
    setattr(opt, given_up, None if given_up == "topk" else False)

    def fails(*_):
        raise InterruptedError

    with monkeypatch.context() as m:
        m.setattr(idle_engine_of(opt).native, "push", fails)
        with pytest.raises(InterruptedError):
            opt.step()
    assert torch.equal(opt.state[p]["residual"], owed)
    opt.step()
    assert "residual" not in opt.state[p]


def test_dense_again_at_a_scale_of_zero_owes_as_before(devices):
    p = torch.randn(64, 64, requires_grad=True)
    opt = CSDAdam([p], devices=devices, topk=0.01, max_grad_norm=1.0)
    set_grads([p])
    opt.step()
    owed = opt.state[p]["residual"].clone()
    opt.topk = None
    set_grads([p])
    p.grad[0, 0] = math.inf  # the norm is inf: everything is scaled to nothing
    opt.step()
    assert torch.equal(opt.state[p]["residual"], owed)


def test_giving_up_what_many_are_owed_looks_at_the_state_once(monkeypatch):
    opt = CSDAdam([torch.randn(64, 64, requires_grad=True) for _ in range(9)], devices="ram:", topk=0.01)
    set_grads(params_of(opt))
    opt.step()
    opt.topk = None
    looks, remember = [], state_map_of(opt).remember
    monkeypatch.setattr(state_map_of(opt), "remember", lambda: looks.append(remember()))
    opt.step()
    assert len(looks) == 1
    assert not any("residual" in opt.state[p] for p in params_of(opt))


# ---- which parameters are sparse, and when -----------------------------------------------


def test_groups_decide_for_all_they_have(devices):
    a, b, c, d = (torch.randn(s).requires_grad_() for s in ((64, 64), (64, 64), (64, 64), (5000,)))
    groups = [{"params": [a]}, {"params": [b], "topk": None}, {"params": [c, d], "topk": 0.25}]
    opt = CSDAdam(groups, devices=devices, topk=0.01, tile_size=1 << 16)
    set_grads([a, b, c, d])
    opt.step()
    assert [("residual" in opt.state[p]) for p in (a, b, c, d)] == [True, False, True, True]
    large = {p: (opt.state[p]["residual"].float() - p.grad).abs() < p.grad.abs() / 100 for p in (a, c, d)}
    assert [int(large[p].sum()) for p in (a, c, d)] == [4096 - 41, 3072, 3750]  # elements that were not sent
    opt.param_groups[1]["topk"] = 0.5  # read every step; from 0.5 on all are sent dense
    opt.param_groups[0]["topk"] = None
    set_grads([a, b, c, d])
    opt.step()
    assert "residual" not in opt.state[b]


@pytest.mark.fp32_states("what is written to states is rounded to codes")
def test_dense_again_sends_what_is_owed(devices):
    p = torch.zeros(100, 100, requires_grad=True)
    opt = CSDAdam([p], lr=0.0, betas=(0.0, 0.0), devices=devices, topk=0.01)
    first, second = torch.randn(100, 100), torch.randn(100, 100)
    p.grad = first
    opt.step()
    opt.topk = None
    p.grad = second
    opt.step()
    assert opt.stats()["push_bytes"] > 4 * 9000  # all, as entries
    arrived = opt.state[p]["exp_avg"]
    was_sent = (arrived - second).abs() < 0.02 * (first.abs() + second.abs())
    assert torch.allclose(arrived[~was_sent], (first + second)[~was_sent], rtol=0.02, atol=0.02)
    assert 90 < was_sent.sum() < 400  # one percent, and some others that had hardly any residual
    assert "residual" not in opt.state[p]
    third = torch.randn(100, 100)
    p.grad = third
    opt.step()
    assert opt.stats()["push_bytes"] == 4 * 100 * 100
    assert torch.equal(opt.state[p]["exp_avg"], third)


@pytest.mark.parametrize("grad_dtype", [None, torch.bfloat16], ids=["engine", "images"])
def test_where_all_is_sent_nothing_is_kept_to_feed_back(devices, grad_dtype):
    p, beside = torch.zeros(64, 64, requires_grad=True), torch.zeros(16, requires_grad=True)
    opt = CSDAdam([p, beside], devices=devices, topk=0.01, grad_dtype=grad_dtype)
    set_grads([p, beside])
    opt.step()
    residual = opt.state[p]["residual"]
    before = residual.clone()
    opt.topk = None
    set_grads([p, beside])
    opt.step()
    assert opt.stats()["push_bytes"] > 4 * 4000  # as entries
    assert torch.equal(residual, before)


def test_warmup():
    opt = make("ram:", topk=0.01, topk_warmup=3, error_feedback=False)
    dense = sum(4 * p.numel() for p in params_of(opt))
    pushed = []
    for _ in range(9):
        set_grads(params_of(opt))
        opt.step()
        pushed.append(opt.stats()["push_bytes"])
    assert pushed[:3] == [dense] * 3
    assert dense > pushed[3] > pushed[4] > pushed[5]
    assert len(set(pushed[5:])) == 1


def test_the_schedule_of_the_warmup():
    def share(step, warmup=10, topk=0.01):
        return ratios([torch.empty(64, 64)], np.array([False]), [0], [{}], np.array([step]), topk, warmup)[0]

    assert [share(t) for t in (1, 10)] == [0, 0]  # dense
    assert share(11) == 0  # 0.01 ** 0.1 = 0.63: still dense
    assert share(15) == pytest.approx(0.1)
    assert share(20) == share(21) == share(10**6) == pytest.approx(0.01)


@pytest.mark.parametrize("topk", [0, -0.1, 1.5, "1%", True, math.nan, float("inf")])
def test_shares_that_are_none(topk):
    with pytest.raises(ValueError, match="Invalid topk"):
        CSDAdam([torch.zeros(2, 2, requires_grad=True)], topk=topk)
    with pytest.raises(ValueError, match="Invalid topk of group 0"):
        CSDAdam([{"params": [torch.zeros(2, 2, requires_grad=True)], "topk": topk}])


@pytest.mark.parametrize("feedback", ["no", None, 0])
def test_feedback_that_is_neither_true_nor_false(feedback):
    with pytest.raises(ValueError, match="Invalid error_feedback"):
        CSDAdam([torch.zeros(2, 2, requires_grad=True)], error_feedback=feedback)


@pytest.mark.parametrize("warmup", [-1, 1.5, None, True])
def test_warmups_that_are_none(warmup):
    with pytest.raises(ValueError, match="Invalid topk_warmup"):
        CSDAdam([torch.zeros(2, 2, requires_grad=True)], topk_warmup=warmup)


def test_a_group_that_goes_wrong_later_is_refused_before_anything_changes(devices):
    opt = make(devices)
    set_grads(params_of(opt))
    opt.step()
    before = image(opt)
    opt.param_groups[0]["topk"] = 7
    with pytest.raises(ValueError, match="Invalid topk of group 0"):
        opt.step()
    assert same(before, image(opt))


# ---- bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_on_the_link(devices, dtype):
    """At 1 % an element costs at most 0.045 bytes, with tiles of the size that large models have."""
    p = torch.randn(1024, 1024).to(dtype).requires_grad_()
    opt = CSDAdam([p], devices=devices, topk=0.01, tile_size=1 << 20)
    p.grad = torch.randn(1024, 1024).to(dtype)
    opt.step()
    pushed = opt.stats()["push_bytes"]
    # 10486 entries in 16 blocks: at most 60 bytes of padding each.
    assert 4 * (10486 + 16) <= pushed <= 4 * (10486 + 16) + 16 * 60
    assert pushed / p.numel() <= 0.045


def test_a_step_leaves_no_entries_in_memory():
    class InUse(ctypes.Structure):  # struct mallinfo2
        _fields_ = [("counts", ctypes.c_size_t * 10)]

    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("needs glibc 2.33")
    libc.mallinfo2.restype = InUse
    p = torch.zeros(1024, 1024, dtype=torch.bfloat16, requires_grad=True)
    opt = CSDAdam([p], devices="ram:", topk=0.001, tile_size=1 << 16)
    p.grad = torch.randn_like(p)
    in_use = []
    for share in (0.001, 0.4):
        opt.topk = share
        for _ in range(2):
            opt.step()
        counts = libc.mallinfo2().counts
        in_use.append(counts[4] + counts[7])  # hblkhd, uordblks
    assert in_use[1] - in_use[0] < 1 << 20  # the entries take 1.7 MB


# ---- the state -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dict", "file", "deepcopy"])
def test_a_state_dict_has_what_is_owed(how):
    opt, other = make("ram:", torch.bfloat16), make("file:", torch.bfloat16)
    for _ in range(3):
        set_grads(params_of(opt))
        opt.step()
    state = opt.state_dict()
    if how == "file":
        torch.save(state, file := io.BytesIO())
        file.seek(0)
        state = torch.load(file, weights_only=True)
    if how == "deepcopy":
        other = copy.deepcopy(opt)
    else:
        with torch.no_grad():
            for p, q in zip(params_of(other), params_of(opt), strict=True):
                p.copy_(q)
        other.load_state_dict(state)
    for _ in range(3):
        set_grads(params_of(opt))
        for p, q in zip(params_of(other), params_of(opt), strict=True):
            p.grad = q.grad.clone()
        opt.step()
        other.step()
    assert same(image(opt), image(other))


def test_adamw_takes_our_state_and_we_take_adamws():
    opt = make("ram:")
    set_grads(params_of(opt))
    opt.step()
    adamw = torch.optim.AdamW(parameters(), lr=1e-2)
    adamw.load_state_dict(copy.deepcopy(opt.state_dict()))
    for p in adamw.param_groups[0]["params"]:
        p.grad = torch.randn_like(p)
    adamw.step()
    state = copy.deepcopy(adamw.state_dict())
    for entry in state["state"].values():
        entry.pop("residual", None), entry.pop("master", None)
    opt.load_state_dict(state)  # now there are no residuals
    assert all(not opt.state[p]["residual"].any() for p in params_of(opt) if "residual" in opt.state[p])
    set_grads(params_of(opt))
    opt.step()


def test_a_group_keeps_its_share_when_a_state_is_loaded():
    p = torch.randn(64, 64, requires_grad=True)
    opt = CSDAdam([{"params": [p], "topk": 0.05}], devices="ram:")
    opt.load_state_dict(torch.optim.AdamW([torch.zeros(64, 64, requires_grad=True)]).state_dict())
    assert opt.param_groups[0]["topk"] == 0.05


def test_without_feedback_nothing_is_owed(devices):
    opt = make(devices)
    set_grads(params_of(opt))
    opt.step()
    opt.error_feedback = False
    set_grads(params_of(opt))
    opt.step()
    assert not any("residual" in opt.state[p] for p in params_of(opt))


def test_what_is_owed_has_the_wrong_shape():
    opt = make("ram:")
    set_grads(params_of(opt))
    opt.step()
    state = copy.deepcopy(opt.state_dict())
    state["state"][0]["residual"] = torch.zeros(3)
    before = image(opt)
    with pytest.raises(ValueError, match=r"state 'residual' of parameter 0\.0 has shape"):
        opt.load_state_dict(state)
    assert same(before, image(opt))


def test_a_residual_is_taken_in_where_there_was_none(devices):
    p = torch.zeros(64, 64, requires_grad=True)
    opt = CSDAdam([p], lr=0.0, betas=(0.0, 0.0), devices=devices)
    p.grad = torch.zeros(64, 64)
    opt.step()
    opt.state[p]["residual"] = torch.ones(64, 64)
    opt.step()
    assert torch.equal(opt.state[p]["exp_avg"], torch.ones(64, 64))  # the gradient that was in the residual


def test_complex_parameters_are_owed_nothing():
    """With a residual from a state dict, the engine would read past its end: they have twice as many values."""
    p = torch.zeros(80, 80, dtype=torch.complex64, requires_grad=True)
    opt = CSDAdam([p], devices="ram:")
    set_grads([p])
    opt.step()
    state = copy.deepcopy(opt.state_dict())
    state["state"][0]["residual"] = torch.zeros(80, 80, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"state 'residual' of parameter 0\.0 is not possible"):
        opt.load_state_dict(state)


# ---- entries from outside: malformed ones are an error, never a stray write ------------------


def entries(*blocks):
    """Blocks of (index, value) in the layout of csd_kernel.h."""
    words = []
    for block in blocks:
        block = [len(block), *(i | v << 16 for i, v in block)]
        words += block + [0] * (-len(block) % 16)
    return np.array(words, np.uint32)


def push_entries(opt, words):
    """Takes a step whose gradients are the given entries."""
    engine = idle_engine_of(opt)
    params = params_of(opt)
    table = np.zeros(engine.tiles.n_params, bindings.PARAM)
    for row, p in zip(table, params, strict=True):
        code = bindings.DTYPE_CODES[torch.bfloat16]
        row["grad"], row["param"], row["grad_dtype"], row["param_dtype"] = p.data_ptr(), p.data_ptr(), code, code
    table["topk"][0], table["topk_dtype"] = 0.01, bindings.DTYPE_CODES[torch.bfloat16]
    hypers = np.array([(0, (1, 0.0, 1.0, 0.0, 1.0, 0, 1, 1, 1))], bindings.HYPER)  # moments are the gradient
    image_bytes = 4 * engine.tiles.extents[0].tile_elems
    grad, param = torch.zeros(image_bytes, dtype=torch.uint8), torch.zeros(image_bytes, dtype=torch.uint8)
    engine.begin(table, hypers, np.arange(len(engine.tiles), dtype=np.uint32))
    try:
        engine.native.push(0, Push((grad.data_ptr(), param.data_ptr()), entries=(words.ctypes.data, len(words))))
        engine.native.pull()
        engine.finish()
    except BaseException:
        engine.finish(keep=False) if engine.stepping else None
        raise


@pytest.fixture
def pushed(devices):
    """One tile with a sparse parameter of 70000 elements and a dense one of 100 after it."""
    params = [torch.zeros(700, 100, dtype=torch.bfloat16), torch.zeros(100, dtype=torch.bfloat16)]
    opt = CSDAdam([p.requires_grad_() for p in params], lr=1e-3, devices=devices[:1], tile_size=71680)
    for p in params:
        p.grad = torch.zeros_like(p)
    opt.step()
    assert len(idle_engine_of(opt).tiles) == 1
    return opt


ONE = 0x3F80  # 1.0 in bfloat16


@pytest.mark.at_hand("gives the engine addresses of parameters")
def test_entries_from_outside(pushed):
    push_entries(pushed, entries([(0, ONE), (65535, ONE)], [(7, ONE), (70000 - BLOCK - 1, ONE)]))
    got = pushed.state[params_of(pushed)[0]]["exp_avg"].flatten()
    assert got.nonzero().flatten().tolist() == [0, 65535, BLOCK + 7, 69999]
    assert (got[got != 0] == 1).all()


MALFORMED = {
    "a count beyond the words": np.array([17] + [0] * 15, np.uint32),
    "a block is missing": entries([(0, ONE)]),
    "a block too many": entries([], [], []),
    "words too many": np.concatenate([entries([], []), np.zeros(16, np.uint32)]),
    "out of order": entries([(5, ONE), (4, ONE)], []),
    "twice": entries([(5, ONE), (5, ONE)], []),
    "beyond the tile": entries([], [(71680 - BLOCK, ONE)]),
    "in a dense parameter": entries([], [(70000 - BLOCK + 5, ONE)]),
    "between parameters": entries([], [(71000 - BLOCK, ONE)]),
    "a count of 2**32 - 1": np.array([2**32 - 1] + [0] * 15, np.uint32),
    "half a word": entries([], [])[:17],
}


@pytest.mark.parametrize("words", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.at_hand("gives the engine addresses of parameters")
def test_malformed_entries_are_refused(pushed, words):
    before = image(pushed)
    with pytest.raises(CSDError, match=r"entries of tile 0 are malformed|has not completed the update"):
        push_entries(pushed, words)
    assert same(before, image(pushed))
    push_entries(pushed, entries([(0, ONE)], []))  # the next step works


@pytest.mark.here("a tile with entries is an image")
def test_entries_and_no_sparse_parameter(pushed):
    engine = idle_engine_of(pushed)
    table = np.zeros(engine.tiles.n_params, bindings.PARAM)
    engine.begin(table, np.zeros(1, bindings.HYPER), np.arange(1, dtype=np.uint32))
    words, room = entries([], []), torch.zeros(4 * 71680, dtype=torch.uint8)
    with pytest.raises(CSDError, match="no sparse gradients"):
        engine.native.push(0, Push((room.data_ptr(), room.data_ptr()), entries=(words.ctypes.data, len(words))))
    engine.finish(keep=False)


@pytest.mark.parametrize("bad", [{"topk": -0.5}, {"topk": 1.5}, {"topk": math.nan}, {"topk": 0.1, "topk_dtype": 0}])
@pytest.mark.at_hand("gives the engine addresses of parameters")
def test_a_table_that_is_wrong(pushed, bad):
    engine = idle_engine_of(pushed)
    table = np.zeros(engine.tiles.n_params, bindings.PARAM)
    table["grad"] = table["param"] = params_of(pushed)[0].data_ptr()
    for name, value in bad.items():
        table[name] = value
    with pytest.raises(CSDError, match="Top-K of parameter 0"):
        engine.begin(table, np.zeros(1, bindings.HYPER), np.arange(1, dtype=np.uint32))


# ---- how many are sent -------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "n", "k"), [(0.01, 0, 0), (0.01, 1, 1), (0.01, 149, 1), (0.01, 151, 2), (0.5, 5, 2)])
def test_count(ratio, n, k):
    assert bindings.topk_count(ratio, n) == k


def test_count_does_not_stumble_over_decimals():
    """0.29 * 100 is 28.999999999999996, and 0.07 * 100 is 7.000000000000001."""
    assert [bindings.topk_count(p / 100, 100) for p in range(1, 101)] == list(range(1, 101))
