"""PyTorch's own optimizer kit over CSDAdam: the AdamW entry of `optim_db` in torch.testing.

The wheel has the inputs, not the tests that use them (test/test_optim.py); those that say something about an optimizer
are written anew here, with AdamW beside it.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from csd_optim import CSDAdam

pytest.importorskip("expecttest", reason="torch.testing._internal needs the package expecttest")
kit = pytest.importorskip("torch.testing._internal.common_optimizers", reason="this torch has no optimizer kit")

INFO = next(info for info in kit.optim_db if info.optim_cls is AdamW)
REFUSED = {
    "capturable": "CSDAdam refuses capturable: its state is not on the parameter's device",
    "differentiable": "CSDAdam refuses differentiable: its update is not on the tape",
}


def optimizer_inputs():
    """The kit's configurations for the CPU with each implementation, and those it keeps for other devices."""
    inputs = kit._get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, INFO)
    inputs += INFO.optim_inputs_func(device="cuda") + INFO.optim_inputs_func(device="mps")
    return {f"{i}: {given.desc}": given.kwargs for i, given in enumerate(inputs)}


INPUTS = optimizer_inputs()
RUN = [pytest.param(kwargs, id=name) for name, kwargs in INPUTS.items() if not any(map(kwargs.get, REFUSED))]
SKIPPED = [
    pytest.param(kwargs, id=name, marks=pytest.mark.skip(reason=REFUSED[refused]))
    for name, kwargs in INPUTS.items()
    for refused in REFUSED
    if kwargs.get(refused)
]
ERRORS = INFO.optim_error_inputs_func("cpu", torch.float32)


def linear_problem():
    """The problem of torch's own tests: a weight, a bias, an input; the loss is the squared output."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(10, 5))
    bias = nn.Parameter(torch.randn(10))
    x = torch.randn(5)
    return weight, bias, lambda: (weight.mv(x) + bias).square().sum()


def descend(make_optimizer, kwargs, steps, scheduler_inputs=()):
    weight, bias, loss = linear_problem()
    optimizer = make_optimizer([weight, bias], **copy.deepcopy(kwargs))  # schedulers write into a tensor lr
    schedulers = [make(optimizer) for make in scheduler_inputs]
    losses = []
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            value = loss()
            value.backward()
            return value

        losses.append(optimizer.step(closure).item())
        for scheduler in schedulers:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*[losses[-1]] * plateau)
    return losses, [weight, bias], optimizer


@pytest.mark.parametrize("kwargs", RUN + SKIPPED)
@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_trains_as_adamw_does(kwargs):
    losses, params, _ = descend(CSDAdam, kwargs, 20)
    expected_losses, expected, _ = descend(AdamW, kwargs, 20)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    torch.testing.assert_close(params, expected, rtol=1e-5, atol=1e-6)
    uphill = kwargs.get("maximize", False)
    assert (losses[-1] > losses[0]) == uphill


@pytest.mark.parametrize("scheduler_inputs", INFO.scheduler_inputs, ids=lambda s: f"{len(s)} schedulers")
@pytest.mark.parametrize("kwargs", RUN)
@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_trains_with_the_kits_schedulers(kwargs, scheduler_inputs):
    losses, _, ours = descend(partial(CSDAdam, devices="ram:"), kwargs, 20, scheduler_inputs)
    expected, _, reference = descend(AdamW, kwargs, 20, scheduler_inputs)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert ours.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    assert ours.param_groups[0]["lr"] < kwargs.get("lr", 1e-3)


@pytest.mark.parametrize("kwargs", RUN)
def test_state_dict_is_the_same_both_times(devices, kwargs):
    """Loaded into another optimizer, it goes on as the first one does, and is saved as it was loaded."""
    _, params, optimizer = descend(partial(CSDAdam, devices=devices), kwargs, 3)
    twins = [p.detach().clone().requires_grad_() for p in params]
    other = CSDAdam(twins, devices="file:", **kwargs)
    other.load_state_dict(optimizer.state_dict())
    saved, loaded = optimizer.state_dict(), other.state_dict()
    assert saved["param_groups"] == loaded["param_groups"]
    assert saved["state"].keys() == loaded["state"].keys()
    for k, entry in saved["state"].items():
        assert entry.keys() == loaded["state"][k].keys()
        assert all(torch.equal(value, loaded["state"][k][name]) for name, value in entry.items())
    for p, q in zip(params, twins, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    optimizer.step()
    other.step()
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))


@pytest.mark.parametrize("kwargs", RUN)
def test_group_hyperparameters_of_the_kit(devices, kwargs):
    """A second group that neither moves nor decays: it stays, the first one goes."""
    weight, bias, loss = linear_problem()
    before = bias.detach().clone()
    groups = [{"params": [weight]}, {"params": [bias], "lr": 0.0}]
    optimizer = CSDAdam(groups, devices=devices, **kwargs)
    start = loss().item()
    for _ in range(5):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert torch.equal(bias.detach(), before)
    assert (loss().item() > start) == kwargs.get("maximize", False)


@pytest.mark.parametrize("given", ERRORS, ids=lambda given: given.optimizer_error_input.desc)
def test_errors_are_those_of_adamw(given):
    params, kwargs = given.optimizer_error_input.params, given.optimizer_error_input.kwargs
    if params is None:
        params = [nn.Parameter(torch.randn(2, 3))]
    if given.error_type is UserWarning:
        with pytest.warns(UserWarning, match=given.error_regex):
            CSDAdam(params, devices="ram:", **kwargs)
        return
    with pytest.raises(given.error_type, match=given.error_regex):
        AdamW(params, **kwargs)
    with pytest.raises(given.error_type, match=given.error_regex):
        CSDAdam(params, devices="ram:", **kwargs)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_skipped_above_is_refused(name):
    with pytest.raises(RuntimeError, match=name):
        CSDAdam([nn.Parameter(torch.randn(3))], devices="ram:", **{name: True})


def test_the_kit_was_not_empty():
    assert len(RUN) >= 15
    assert any(p.values[0].get("amsgrad") for p in RUN)
    assert any(p.values[0].get("maximize") for p in RUN)
    assert len(ERRORS) >= 10
