"""Programs that resize parameters, as Gaussian splatting does, and the states that AdamW has with them."""

import copy
import itertools

import pytest
import torch
from torch.nn import Parameter
from torch.optim import AdamW

from csd_optim import CSDAdam, CSDLion, CSDWarning

RESIZED = {8: torch.arange(32) % 3 != 0, 14: torch.cat([torch.arange(21), torch.arange(5)])}  # before these steps


def replaced(opt, group, keep):
    """The Inria code: the entry moves, with a master that it does not know, to a new parameter."""
    old = group["params"][0]
    entry = opt.state.get(old)
    for key in ("exp_avg", "exp_avg_sq"):
        entry[key] = entry[key][keep]
    del opt.state[old]
    group["params"][0] = Parameter(old.detach()[keep])
    opt.state[group["params"][0]] = entry


def by_a_new_entry(opt, group, keep):
    old = group["params"][0]
    entry = opt.state.pop(old)
    group["params"] = [Parameter(old.detach()[keep])]
    states = {key: entry[key][keep] for key in ("exp_avg", "exp_avg_sq")}
    opt.state[group["params"][0]] = {"step": entry["step"], **states}


def in_place(opt, group, keep):
    p = group["params"][0]
    for key in ("exp_avg", "exp_avg_sq"):
        opt.state[p][key] = opt.state[p][key][keep]
    p.data = p.data[keep]


def splats(make, resize, **options):
    torch.manual_seed(1)
    groups = [{"params": [Parameter(torch.randn(32, 3))], "name": "xyz"}, {"params": [Parameter(torch.randn(5))]}]
    opt = make(groups, lr=1e-2, eps=1e-15, **options)
    for step in range(20):
        if step in RESIZED:
            resize(opt, opt.param_groups[0], RESIZED[step])
        [p], [q] = (group["params"] for group in opt.param_groups)
        (p.sin().sum() + p.pow(2).mean() + q.sin().sum()).backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
    return p.detach(), opt


WAYS, DEVICES, DTYPES = (replaced, by_a_new_entry, in_place), ("ram:", "file:?scratch=1", "named"), ("fp32", "8bit")


@pytest.mark.parametrize(("resize", "devices", "state_dtype"), [*itertools.product(WAYS, DEVICES, DTYPES)])
def test_a_resized_parameter_is_updated_as_by_adamw(tmp_path, resize, devices, state_dtype):
    devices = str(tmp_path) if devices == "named" else devices
    right, _ = splats(AdamW, resize)
    ours, opt = splats(CSDAdam, resize, devices=devices, state_dtype=state_dtype)
    assert ours.shape == right.shape == (26, 3)
    assert (ours - right).norm() <= (1e-6 if state_dtype == "fp32" else 2e-2) * right.norm()
    states = copy.deepcopy(opt.state_dict()["state"])
    assert {key: value.shape for key, value in states[0].items() if key != "step"} == dict.fromkeys(
        ("exp_avg", "exp_avg_sq", "master"), (26, 3)
    )
    opt.close()
    if devices == str(tmp_path):
        p = Parameter(torch.zeros(26, 3))
        groups = [{"params": [p], "name": "xyz"}, {"params": [Parameter(torch.zeros(5))]}]
        with CSDAdam(groups, lr=1e-2, eps=1e-15, devices=devices, resume=True, state_dtype=state_dtype) as opt:
            assert torch.equal(p, ours)
            for key, value in opt.state_dict()["state"][0].items():
                assert torch.equal(value, states[0][key]), key


def test_a_residual_that_is_left_behind_is_reported():
    """What Top-K has not sent is lost if it is not resized; what is resized is kept."""
    for is_resized in (False, True):
        p = Parameter(torch.randn(80, 100))
        opt = CSDAdam([p], topk=0.01, devices="ram:")
        p.grad = torch.randn(80, 100)
        opt.step()
        entry, new = opt.state.pop(p), Parameter(p.detach()[:60].clone())
        assert entry["residual"][:60].any()
        for key in ("exp_avg", "exp_avg_sq", *(["residual"] * is_resized)):
            entry[key] = entry[key][:60]
        opt.param_groups[0]["params"], opt.state[new] = [new], entry
        new.grad = torch.zeros(60, 100)
        if is_resized:
            opt.step()
        else:
            with pytest.warns(CSDWarning, match="was resized without its residual"):
                opt.step()
        assert bool(opt.state[new]["residual"].any()) == is_resized
        opt.close()


def test_moments_that_do_not_fit_are_refused():
    for key in ("exp_avg", "master"):
        p = Parameter(torch.ones(8))
        with CSDAdam([p], devices="ram:") as opt:
            p.grad = torch.ones(8)
            opt.step()
            held = copy.deepcopy(opt.state_dict())
            held["state"][0][key] = torch.ones(9)
            with pytest.raises(
                ValueError, match=f"'{key}' of parameter"
            ):  # a checkpoint of another size is one, whatever fits
                opt.load_state_dict(held)
    with CSDLion([p], devices="ram:") as opt:  # master alone
        opt.step()
        opt.state[p] = {"master": torch.ones(9)}
        with pytest.raises(ValueError, match="'master' of parameter"):
            opt.step()
