"""States that are edited and parameters that are replaced between steps are committed with the next step."""

import copy

import pytest
import torch
from support.backends import device_strings, named_devices, on_cards
from support.comparing import assert_same
from support.training import (
    Training,
    bf16,
    crashed,
    image,
    model,
    never_stopped,
    parameters,
    resumed,
    train,
)

import csd_optim.step.prepare
from csd_optim import (
    CSDAdam,
    CSDRuntimeError,
)

pytestmark = pytest.mark.cards


# ---- parameters that are replaced --------------------------------------------------------


def test_restore(tmp_path):
    device = named_devices(tmp_path, 1)
    Training(device).steps(4).close()
    training = resumed(device, 4)
    with torch.no_grad():
        for p in training.params.values():
            p.zero_()
    training.opt.param_groups[0]["lr"].fill_(7)
    training.opt.restore()
    assert_same(training.image(), never_stopped(4))
    # New parameter objects, as some trainers create when they move a model.
    others = model(3)
    for group in training.opt.param_groups:
        group["params"] = [others[name] for name in group["param_names"]]
    training.params = others
    training.opt.restore()
    assert_same(training.image(), never_stopped(4))
    assert len(training.opt.state) == len(others) - 2  # `never` and `joined` have no state
    training.step()
    with pytest.raises(CSDRuntimeError, match="before the first step"):
        training.opt.restore()
    assert_same(training.close(), never_stopped(5))


def test_restore_of_parameters_in_another_order(tmp_path):
    [device] = named_devices(tmp_path, 1)
    a, b = parameters((300,), (300,))
    with CSDAdam([a, b], devices=device) as opt:
        train(opt, 2)
    values = a.detach().clone(), b.detach().clone()
    a, b = parameters((300,), (300,))
    with CSDAdam([a, b], devices=device, resume=True) as opt:
        opt.param_groups[0]["params"].reverse()
        opt.restore()
        assert torch.equal(b, values[0])
        assert torch.equal(a, values[1])
        train(opt)
        assert [int(opt.state[p]["step"]) for p in (a, b)] == [3, 3]


@pytest.mark.parametrize("order", ["model, optimizer, state", "optimizer, model, state"])
def test_a_checkpoint_of_an_earlier_step_is_loaded_after_resume(tmp_path, order):
    """As trainers do; some construct (and so resume) the optimizer only after the model is loaded."""
    device = named_devices(tmp_path, 1)
    training = Training(device).steps(3)
    state = copy.deepcopy(training.opt.state_dict())
    weights = {name: p.detach().clone() for name, p in training.params.items()}
    training.step()
    training.close()
    training = resumed(device, 4)
    if order == "optimizer, model, state":
        with torch.no_grad():
            for name, p in training.params.items():
                p.copy_(weights[name])
    training.opt.load_state_dict(state)
    assert_same(training.image(), never_stopped(3))
    training.done = 3
    training.step()
    assert_same(training.close(), never_stopped(4))


@pytest.mark.parametrize("swap", [False, True])
def test_meta_device(tmp_path, swap):
    [device] = named_devices(tmp_path, 1)
    module = torch.nn.Linear(30, 40)
    with CSDAdam(module.parameters(), devices=device) as opt:
        train(opt, 2)
    expected = [p.detach().clone() for p in module.parameters()]
    with torch.device("meta"):
        module = torch.nn.Linear(30, 40)
    opt = CSDAdam(module.parameters(), devices=device, resume=True)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        module.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    opt.param_groups[0]["params"] = [*module.parameters()]
    with pytest.raises(CSDRuntimeError, match=r"restore\(\)"):
        train(opt)
    opt.restore()
    assert all(map(torch.equal, expected, module.parameters()))
    train(opt)
    assert [int(opt.state[p]["step"]) for p in module.parameters()] == [3, 3]
    opt.close()


@pytest.mark.parametrize("meta", [False, True])
def test_the_first_step_after_a_resume_overflows(tmp_path, meta):
    [device] = named_devices(tmp_path, 1)
    with CSDAdam(parameters((300,)), devices=device) as opt:
        train(opt, 2)
    with torch.device("meta" if meta else "cpu"):
        ps = parameters((300,))
    opt = CSDAdam(ps, devices=device, resume=True)
    [p] = opt.param_groups[0]["params"] = parameters((300,))
    opt.found_inf = opt.grad_scale = torch.ones(1)
    train(opt)
    del opt.found_inf, opt.grad_scale
    if meta:
        with pytest.raises(CSDRuntimeError, match=r"restore\(\)"):
            train(opt)
        opt.restore()
    train(opt)
    assert opt.state[p]["step"] == 3
    opt.close()


# ---- edits ---------------------------------------------------------------------------------


def load(opt, p):
    held = copy.deepcopy(opt.state_dict())
    for entry in held["state"].values():
        entry["exp_avg"] *= 0.5
    opt.load_state_dict(held)


def set_parameter(opt, p):
    with torch.no_grad():
        p.mul_(1.5)


EDITS = {
    "exp_avg": lambda opt, p: opt.state[p]["exp_avg"].mul_(0.5),
    "part": lambda opt, p: opt.state[p]["exp_avg"][3:7].fill_(1),
    "exp_avg_sq": lambda opt, p: opt.state[p]["exp_avg_sq"].add_(1),
    "master": lambda opt, p: opt.state[p]["master"].add_(1e-4),
    "step": lambda opt, p: opt.state[p]["step"].fill_(10),
    "assign": lambda opt, p: opt.state[p].__setitem__("exp_avg", torch.ones_like(p, dtype=torch.float32)),
    "parameter": set_parameter,
    "load": load,
}


@pytest.mark.here("compares with masters that are parameters")
@pytest.mark.sampled(together=2)
@pytest.mark.parametrize(
    ("name", "edit_bytes"),
    [("bf16", 16), ("bf16", 1 << 20), ("fp32", 16)],
)
@pytest.mark.parametrize("edit", EDITS)
def test_edits_count_from_the_next_step_on(tmp_path, monkeypatch, edit, name, edit_bytes):
    monkeypatch.setattr(csd_optim.step.prepare, "EDIT_BYTES", edit_bytes)
    device = named_devices(tmp_path, 1)
    # Both of the same kind: on a card an fp32 master can be edited, elsewhere the parameter itself is the master.
    mine, other = Training(device), Training(device_strings("xrt" if on_cards() else "file", tmp_path))
    for training in (mine, other):
        training.steps(3)
        training.opt.synchronize()
        EDITS[edit](training.opt, training.params[name])
    if edit != "load":  # load_state_dict() commits at once
        training = resumed(crashed(device, tmp_path / "crash"), 3)
        assert_same(training.close(), never_stopped(3))
    for training in (mine, other):
        training.steps(1)
    assert_same(mine.image(), other.image())
    mine.close()
    mine = resumed(device, 4)
    assert_same(mine.image(), other.image())
    assert_same(mine.steps(1).close(), other.steps(1).close())


@pytest.mark.parametrize("edit", ["exp_avg", "step"])
@pytest.mark.parametrize("then", ["close", "step"])
@pytest.mark.fp32_states("what is written to states is rounded to codes")
def test_edits_without_a_gradient_are_kept(tmp_path, edit, then):
    device = named_devices(tmp_path, 1)
    training = Training(device).steps(3)
    EDITS[edit](training.opt, training.params["bf16"])
    if then == "step":
        training.step(without=["bf16"])
    expected = training.close()
    training = resumed(device)
    assert_same(training.close(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, bf16])
def test_a_parameter_set_from_outside_without_a_gradient_is_kept(tmp_path, dtype):
    [device] = named_devices(tmp_path, 1)
    p, q = parameters((300,), (20,), dtype=dtype)
    with CSDAdam([p, q], devices=device) as opt:
        train(opt, 2)
        with torch.no_grad():
            q.fill_(7)
        train(opt, only=[p])
    p, q = parameters((300,), (20,), dtype=dtype)
    with CSDAdam([p, q], devices=device, resume=True) as opt:
        assert (q == 7).all()


@pytest.mark.parametrize("then", ["look", "edit"])
def test_an_edit_through_a_tensor_from_before_the_last_step(tmp_path, then):
    """The edit is lost, and does no harm."""
    [device] = named_devices(tmp_path, 1)
    mine, other = Training(device), Training("file:")
    for training in (mine, other):
        p, opt = training.params["fp32"], training.opt
        kept = training.steps(1).opt.state[p]["exp_avg"]
        kept.sum()
        training.steps(1).opt.synchronize()
        if training is mine:
            kept.zero_()
        training.steps(1)
        if then == "edit":
            opt.state[p]["exp_avg_sq"].mul_(2)
            training.steps(1)
    assert_same(mine.close(), other.close())


@pytest.mark.parametrize("edit", ["exp_avg", "step"])
@pytest.mark.fp32_states("what is written to states is rounded to codes")
def test_edits_between_resume_and_close_are_kept(tmp_path, edit):
    [device] = named_devices(tmp_path, 1)
    Training(device).steps(2).close()
    training = resumed(device)
    EDITS[edit](training.opt, training.params["bf16"])
    expected = training.close()
    assert_same(resumed(device).close(), expected)


@pytest.mark.parametrize("how", ["converted", "removed"])
@pytest.mark.fp32_states("a model with 8-bit states is not converted")
def test_a_model_that_changed_while_training_is_the_one_that_resumes(tmp_path, how):
    [device] = named_devices(tmp_path, 1)
    ps = parameters((300,), (20,))
    with CSDAdam(ps, devices=device) as opt:
        train(opt, 2)
        if how == "converted":
            ps[0].grad, ps[0].data = None, ps[0].data.bfloat16()
        else:
            ps = opt.param_groups[0]["params"] = ps[:1]
        train(opt, 1)
        expected = image(opt, dict(enumerate(ps)))
    others = [torch.nn.Parameter(torch.zeros_like(p)) for p in ps]
    with CSDAdam(others, devices=device, resume=True) as opt:
        assert_same(image(opt, dict(enumerate(others))), expected)
