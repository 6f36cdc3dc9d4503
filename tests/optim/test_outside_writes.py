"""Parameters written between steps, in any way: the next step goes on from the written values."""

import copy

import pytest
import torch
from support import far
from support.backends import TILE
from support.beside import (
    assert_close,
    assert_same_weights,
    everything,
    gradients,
    leaf,
    small_model,
    train_beside,
)
from support.comparing import assert_same, params_of
from support.inside import engine_of
from support.states import assumed
from torch import nn
from torch.optim import AdamW

from csd_optim import CSDAdam, CSDRuntimeError, CSDTypeError, CSDValueError
from csd_optim.engine.engine import Engine
from csd_optim.params.param_state import ParamState

OWN_OPTIONS = {"devices", "grad_dtype", "max_grad_norm", "overwrite", "tile_size"}


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


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("write", [write_copy, write_load_state_dict, write_foreach, write_data])
def test_a_write_to_a_parameter_counts(backend, devices, dtype, write):
    """Where it was written the parameter is the new master; elsewhere the master keeps its low bits.

    With codes in memory alone, the parameter becomes the master of the whole group of 64 elements.
    """
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
    if backend == "ram" and assumed() != "fp32" and not far.assumed():
        master.view(-1)[:64] = p.detach().view(-1)[:64]
    assert torch.equal(optimizer.state[p]["master"], master)
    assert torch.equal(p.detach(), master.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.fp32_states("a model with 8-bit states is not converted")
def test_a_model_converted_in_place(devices, dtype):
    model = small_model()
    optimizer = CSDAdam(model.parameters(), devices=devices)
    for k in range(2):
        gradients(model.parameters(), k)
        optimizer.step()
    reference = AdamW([p.detach().clone().requires_grad_() for p in model.parameters()])
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.to(dtype)  # the masters keep the bits that the conversion drops
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
@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_a_model_of_another_memory_format(devices, first):
    """model.to(memory_format=...) between steps: the states keep their memory order."""
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
@pytest.mark.fp32_states("compares with AdamW to its last bits")
@pytest.mark.at_hand("devices that do not reach parameters find only writes that torch counts")
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
@pytest.mark.at_hand("devices that do not reach parameters find only writes that torch counts")
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


@pytest.mark.fp32_states("a model with 8-bit states is not converted")
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
    """The new value still counts as written in the step after the refused one."""
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
    """A new parameter at the address of an old one, as the allocator may reuse memory, is not mistaken for it."""
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


@pytest.mark.here("replaces States.sync()")
def test_a_checkpoint_after_one_that_could_not_be_stored(devices, monkeypatch):
    p = leaf(3000)
    optimizer = CSDAdam([p], devices=devices)
    state = {"step": torch.tensor(9.0), "exp_avg": torch.full((3000,), 3.0), "exp_avg_sq": torch.ones(3000)}
    empty = optimizer.state_dict()

    def fails():
        monkeypatch.undo()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(engine_of(optimizer).states, "sync", fails)
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
    finish = engine_of(optimizer).finish

    def fails(keep=True, **_):
        finish(keep=False)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(engine_of(optimizer), "finish", fails)
    with pytest.raises(OSError, match="Input/output"):
        optimizer.step()
    assert torch.equal(p, before)
    assert q.eq(7).all()


def test_close_within_a_step_is_refused(tmp_path, monkeypatch):
    p = leaf(100)
    optimizer = CSDAdam([p], devices=str(tmp_path))
    gradients([p], 0)
    push = engine_of(optimizer).native.push

    def closing(tile, how=None):
        with pytest.raises(CSDRuntimeError, match="under way"):
            optimizer.close()
        push(tile, how)

    monkeypatch.setattr(engine_of(optimizer).native, "push", closing)
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


@pytest.mark.fp32_states("compares with AdamW to its last bits")
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
    assert_same(everything(optimizer), before)


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
@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_places_that_could_not_be_filled_are_filled_again(devices, dtype, monkeypatch):
    """Memory runs out, or the page cache cannot be written back and loses its data."""
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
        return fill(bound, *args, **kwargs)

    monkeypatch.setattr(Engine, "next_step_fills", lambda *_: False)  # as if the parameters already had states
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
