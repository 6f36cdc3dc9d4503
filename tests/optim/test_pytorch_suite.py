"""PyTorch's own optimizer test kit, applied to ours: the `optim_db` entries of the optimizers that ours replace.

The wheel of torch has the inputs (torch.testing) but not the tests that use them (test/test_optim.py). The tests that
concern an optimizer's behaviour are written anew here, with torch's optimizer beside ours. CSDAdam runs on every back
end, the others on a file.
"""

import copy
from functools import partial

import pytest
import torch
from support.optimizers import ADAGRAD, ADAM, ADAMW, RMSPROP, SGD, rules
from torch import nn

pytest.importorskip("expecttest", reason="torch.testing._internal needs the package expecttest")
kit = pytest.importorskip("torch.testing._internal.common_optimizers", reason="this torch has no optimizer kit")

PAIRS = [ADAMW, ADAM, SGD, ADAGRAD, RMSPROP]
INFO = {of.name: next(info for info in kit.optim_db if info.optim_cls is of.reference) for of in PAIRS}
REFUSED = {
    "capturable": "ours refuse capturable: their state is not on the parameter's device",
    "differentiable": "ours refuse differentiable: their update is not on the tape",
}


def optimizer_inputs(info):
    """The kit's configurations: those for the CPU with each implementation, and those for other devices."""
    inputs = kit._get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info)
    inputs += info.optim_inputs_func(device="cuda") + info.optim_inputs_func(device="mps")
    return {f"{i}: {given.desc}": given.kwargs for i, given in enumerate(inputs)}


INPUTS = optimizer_inputs(INFO["CSDAdam"])
RUN = [pytest.param(kwargs, id=name) for name, kwargs in INPUTS.items() if not any(map(kwargs.get, REFUSED))]
SKIPPED = [
    pytest.param(ADAMW, kwargs, id=name, marks=pytest.mark.skip(reason=REFUSED[refused]))
    for name, kwargs in INPUTS.items()
    for refused in REFUSED
    if kwargs.get(refused)
]


def inputs_of_others():
    """The other optimizers' configurations, without those that differ only in torch's implementation."""
    for param in rules(PAIRS[1:]):
        (of,), seen = param.values, []
        for name, kwargs in optimizer_inputs(INFO[of.name]).items():
            own = {key: value for key, value in kwargs.items() if key not in (*REFUSED, "foreach", "fused")}
            if not any(map(kwargs.get, REFUSED)) and repr(own) not in seen:
                seen.append(repr(own))
                yield pytest.param(of, own, id=f"{of} {name}", marks=param.marks)


OTHERS = [*inputs_of_others()]
ALL = [*(pytest.param(ADAMW, *param.values, id=param.id) for param in RUN), *OTHERS]
ERRORS = [
    pytest.param(of, given, id=f"{of} {given.optimizer_error_input.desc}")
    for of in PAIRS
    for given in INFO[of.name].optim_error_inputs_func("cpu", torch.float32)
]


def linear_problem():
    """The problem from torch's own tests: a weight, a bias and an input; the loss is the squared output."""
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


@pytest.mark.parametrize(("of", "kwargs"), ALL + SKIPPED)
@pytest.mark.fp32_states("compares with torch to its last bits")
def test_trains_as_torchs_does(of, kwargs):
    losses, params, _ = descend(of.ours, kwargs, 20)
    expected_losses, expected, _ = descend(of.reference, kwargs, 20)
    assert losses == pytest.approx(expected_losses, rel=1e-5, abs=1e-9 * losses[0])
    torch.testing.assert_close(params, expected, rtol=1e-5, atol=1e-6)
    uphill = kwargs.get("maximize", False)
    assert (losses[-1] > losses[0]) == uphill


@pytest.mark.parametrize(
    "scheduler_inputs", INFO["CSDAdam"].scheduler_inputs, ids=lambda inputs: f"{len(inputs)} schedulers"
)
@pytest.mark.parametrize(("of", "kwargs"), ALL)
@pytest.mark.fp32_states("compares with torch to its last bits")
def test_trains_with_the_kits_schedulers(of, kwargs, scheduler_inputs):
    losses, _, ours = descend(partial(of.ours, devices="ram:"), kwargs, 20, scheduler_inputs)
    expected, _, reference = descend(of.reference, kwargs, 20, scheduler_inputs)
    assert losses == pytest.approx(expected, rel=1e-5, abs=1e-9 * losses[0])
    assert ours.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    assert ours.param_groups[0]["lr"] < kwargs.get("lr", reference.defaults["lr"])


def a_state_dict_is_the_same_both_times(of, devices, kwargs):
    """After loading, a second optimizer goes on like the first, and saves an equal state dict."""
    _, params, optimizer = descend(partial(of.ours, devices=devices), kwargs, 3)
    twins = [p.detach().clone().requires_grad_() for p in params]
    other = of.ours(twins, devices="file:", **kwargs)
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


@pytest.mark.sampled(together=1)
@pytest.mark.parametrize("kwargs", RUN)
def test_state_dict_is_the_same_both_times(devices, kwargs):
    a_state_dict_is_the_same_both_times(ADAMW, devices, kwargs)


@pytest.mark.parametrize(("of", "kwargs"), OTHERS)
@pytest.mark.fp32_states("of rules that 8 bits do not keep")
def test_checkpoints_go_to_torch_and_back(of, kwargs):
    """Between torch and ours, both ways, and between ours: each goes on like the optimizer that was saved."""
    a_state_dict_is_the_same_both_times(of, "file:", kwargs)
    for first, then in ((of.reference, of.ours), (of.ours, of.reference)):
        _, params, optimizer = descend(first, kwargs, 3)
        twins = [p.detach().clone().requires_grad_() for p in params]
        other = then(twins, **kwargs)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for _ in range(3):
            for p, q in zip(params, twins, strict=True):
                p.grad = torch.randn_like(p)
                q.grad = p.grad.clone()
            optimizer.step()
            other.step()
        torch.testing.assert_close(twins, params, rtol=1e-6, atol=1e-6)
        own, its = (o.state[next(iter(o.state))] if o.state else {} for o in (optimizer, other))
        for name in own.keys() & its.keys() - {"master", "step"}:  # torch takes these over unchanged
            torch.testing.assert_close(own[name], its[name], rtol=1e-5, atol=1e-6)


def only_the_first_group_moves(of, devices, kwargs):
    """The second group has no learning rate and no decay: it stays the same, and the first one changes."""
    weight, bias, loss = linear_problem()
    before = bias.detach().clone()
    groups = [{"params": [weight]}, {"params": [bias], "lr": 0.0}]
    optimizer = of.ours(groups, devices=devices, **kwargs)
    start = loss().item()
    for _ in range(5):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert torch.equal(bias.detach(), before)
    assert (loss().item() > start) == kwargs.get("maximize", False)


@pytest.mark.sampled(together=1)
@pytest.mark.parametrize("kwargs", RUN)
def test_group_hyperparameters_of_the_kit(devices, kwargs):
    only_the_first_group_moves(ADAMW, devices, kwargs)


@pytest.mark.parametrize(("of", "kwargs"), OTHERS)
@pytest.mark.fp32_states("of rules that 8 bits do not keep")
def test_group_hyperparameters_of_other_optimizers(of, kwargs):
    only_the_first_group_moves(of, "file:", kwargs)


@pytest.mark.parametrize(("of", "given"), ERRORS)
def test_errors_are_torchs(of, given):
    params, kwargs = given.optimizer_error_input.params, given.optimizer_error_input.kwargs
    if params is None:
        params = [nn.Parameter(torch.randn(2, 3))]
    if issubclass(given.error_type, Warning):
        with pytest.warns(given.error_type, match=given.error_regex):
            of.ours(params, devices="ram:", **kwargs)
        return
    with pytest.raises(given.error_type, match=given.error_regex):
        of.reference(params, **kwargs)
    with pytest.raises(given.error_type, match=given.error_regex):
        of.ours(params, devices="ram:", **kwargs)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("of", PAIRS, ids=str)
def test_what_is_skipped_above_is_refused(of, name):
    if name not in of.reference([nn.Parameter(torch.randn(3))]).defaults:
        pytest.skip(f"{of.name} has no {name}")
    with pytest.raises(RuntimeError, match=name):
        of.ours([nn.Parameter(torch.randn(3))], devices="ram:", **{name: True})


def test_the_kit_was_not_empty():
    assert len(RUN) >= 15
    assert any(p.values[0].get("amsgrad") for p in RUN)
    assert any(p.values[0].get("maximize") for p in RUN)
    for of, least in ((ADAM, 5), (SGD, 8), (ADAGRAD, 6), (RMSPROP, 8)):
        assert sum(p.values[0] is of for p in OTHERS) >= least
    assert len(ERRORS) >= 35
