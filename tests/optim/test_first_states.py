"""A step with lr 0 and zero gradients where there are no states creates them, and is none: it is not committed."""

import copy
from dataclasses import replace

import pytest
import torch
from support.optimizers import ADAGRAD, ADAM, ADAMW, LION, RMSPROP, SGD
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Linear, Parameter
from torch.optim import AdamW

from csd_optim import CSDSGD, CSDAdam, CSDMuon

OF = [
    replace(ADAMW, kwargs={"amsgrad": True}),
    ADAM,
    replace(SGD, kwargs={"momentum": 0.9, "dampening": 0.5}),
    replace(ADAGRAD, kwargs={"initial_accumulator_value": 0.5}),
    replace(RMSPROP, kwargs={"centered": True}),
    replace(LION, kwargs={"weight_decay": 0.1}),
]


def loop(model, opt, until):
    used = [*range(opt.committed_step, until)]
    for _ in used:
        model(torch.ones(2, 8)).square().sum().backward()
        opt.step()
        opt.zero_grad()
    return used


@pytest.mark.filterwarnings("ignore:there is no store")
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}, {"max_grad_norm": 1.0}], ids=str)
def test_a_resumed_loop_uses_each_batch_once(tmp_path, options, overlaps):
    used = []
    for until in (0, 3, 6):
        torch.manual_seed(0)
        model = Linear(8, 8)
        with CSDAdam(model.parameters(), devices=str(tmp_path), resume=True, **options) as opt:
            if overlaps:
                opt.overlap(model)
            get_optimizer_state_dict(model, opt)
            used += loop(model, opt, until)
            opt.synchronize()
            assert opt.committed_step == until
            assert opt.state[model.weight]["step"] == until + 1  # as AdamW's
    assert used == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("devices", ["ram:", "file:?scratch=1", "named"])
@pytest.mark.parametrize("of", OF, ids=str)
def test_states_are_those_of_torch(tmp_path, of, devices):
    """Also after the first real step, which is then the second one, as in torch."""
    runs = []
    for make, options in ((of.ours, {"devices": str(tmp_path) if devices == "named" else devices}), (of.reference, {})):
        torch.manual_seed(0)
        model = Linear(4, 4)
        opt = make(model.parameters(), lr=0.01, **options, **of.kwargs)
        before = model.weight.detach().clone()
        get_optimizer_state_dict(model, opt)
        assert torch.equal(model.weight, before)
        for _ in range(3):
            runs.append([model.weight.detach().clone(), {**copy.deepcopy(opt.state[model.weight])}])
            model(torch.ones(2, 4)).square().sum().backward()
            opt.step()
            opt.zero_grad()
    for (ours, our_state), (theirs, their_state) in zip(runs[:3], runs[3:], strict=True):
        torch.testing.assert_close(ours, theirs)
        for key, value in their_state.items():
            if key != "step" or of.reference is not torch.optim.Adagrad:  # it has states from the start: no such step
                torch.testing.assert_close(our_state[key], value, check_dtype=False)


def test_what_is_a_step_counts(tmp_path):
    """Gradients that are not zero, as when a warm-up begins at lr 0; a rate; decay that is added to zero gradients."""
    p = Parameter(torch.ones(4))
    for name, make, gradient in (
        ("warm-up", lambda d: CSDAdam([p], lr=0.0, devices=d), torch.ones(4)),
        ("nan", lambda d: CSDAdam([p], lr=0.0, devices=d), torch.full((4,), float("nan"))),
        ("rate", lambda d: CSDAdam([p], lr=0.1, devices=d), torch.zeros(4)),
        ("decay", lambda d: CSDSGD([p], lr=0.0, momentum=0.9, weight_decay=0.1, devices=d), torch.zeros(4)),
    ):
        with make(str(tmp_path / name)) as opt:
            p.grad = gradient
            opt.step()
            opt.synchronize()
            assert opt.committed_step == 1, name
            p.grad = torch.zeros(4)
            opt.param_groups[0]["lr"] = 0.0
            opt.step()  # there are states already
            opt.synchronize()
            assert opt.committed_step == 2, name


def test_it_is_no_step_with_several_groups_and_muon(tmp_path):
    matrix, bias = Parameter(torch.ones(4, 4)), Parameter(torch.ones(4))
    groups = [{"params": [matrix], "lr": 0.0}, {"params": [bias], "use_muon": False, "lr": 0.0}]
    with CSDMuon(groups, devices=str(tmp_path)) as opt:
        matrix.grad, bias.grad = torch.zeros(4, 4), torch.zeros(4)
        opt.step()
        assert opt.stats()["params"] == 0
        opt.synchronize()
        assert opt.committed_step == 0
        assert not opt.state[matrix]["momentum_buffer"].any()
        opt.step()
        opt.synchronize()
        assert opt.committed_step == 1  # now there are states


def test_a_checkpoint_is_loaded_right_after_it():
    """set_optimizer_state_dict() also takes such a step, and then loads."""
    held = None
    for make in (AdamW, CSDAdam):
        torch.manual_seed(0)
        model = Linear(8, 8)
        opt = make(model.parameters(), lr=0.1)
        if make is AdamW:
            for _ in range(3):
                model(torch.ones(2, 8)).square().sum().backward()
                opt.step()
                opt.zero_grad()
            held = get_optimizer_state_dict(model, opt)
        else:
            set_optimizer_state_dict(model, opt, held)
            assert opt.state[model.weight]["step"] == 3
            assert torch.equal(opt.state[model.weight]["exp_avg"], held["state"]["weight"]["exp_avg"])
