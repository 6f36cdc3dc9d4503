"""Hyperparameters and factors that are no finite numbers: step() refuses them, and nothing has changed.

One step with a learning rate that is NaN would make all parameters NaN, and commit them.
"""

import math

import pytest
import torch
from support.beside import everything, gradients, leaf
from support.comparing import assert_same
from support.optimizers import ADAGRAD, PAIRS

from csd_optim import CSDAdam, CSDValueError

NAN, INF = math.nan, math.inf


def spoiled(value, bad):
    """Return a hyperparameter with `bad` in its place, or in its last place."""
    return (*value[:-1], bad) if isinstance(value, tuple) else bad


@pytest.mark.here("a record that cannot be sent is refused")
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e300, "0.1", torch.tensor(NAN)], ids=str)
@pytest.mark.parametrize("of", PAIRS, ids=str)
def test_a_hyperparameter_is_a_finite_number(of, bad, tmp_path):
    p, late, idle = leaf(50), leaf(7), leaf(3)
    ours = of.ours([{"params": [p]}, {"params": [late]}, {"params": [idle]}], devices=tmp_path / "csd")
    gradients([p], 0)
    ours.step()
    ours.synchronize()
    before = everything(ours)
    gradients([p, late], 1)
    for group in ours.param_groups[:2]:
        for name in of.rule.hyperparameters:
            good = group[name]
            if isinstance(good, bool) and not isinstance(bad, str):
                continue  # any number is true or false
            if isinstance(bad, torch.Tensor) and not isinstance(good, float):
                continue
            group[name] = spoiled(good, bad)
            with pytest.raises(CSDValueError, match=f"Invalid ({name}|hyperparameters) of a parameter group"):
                ours.step()
            group[name] = good
            assert_same(everything(ours), before)
    ours.param_groups[2]["lr"] = bad  # nothing is updated with it
    ours.step()
    ours.synchronize()
    assert ours.committed_step == 2
    assert all(t.isfinite().all() for entry in ours.state.values() for t in entry.values())


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0), (0.9, 2.0), (0.9,), 0.9], ids=str)
def test_what_the_rule_cannot_compute_with(betas):
    p = leaf(5)
    ours = CSDAdam([p], devices="ram:")
    gradients([p], 0)
    ours.step()
    before = everything(ours)
    ours.param_groups[0]["betas"] = betas
    with pytest.raises(CSDValueError, match=r"Invalid hyperparameters of a parameter group: lr=0\.001, betas="):
        ours.step()
    assert_same(everything(ours), before)


def test_what_is_too_large_only_later():
    """Adagrad divides lr by 1 + (t - 1) * lr_decay."""
    p = leaf(5)
    ours = ADAGRAD.ours([p], devices="ram:")
    ours.param_groups[0]["lr_decay"] = -1.0
    gradients([p], 0)
    ours.step()
    before = everything(ours)
    with pytest.raises(CSDValueError, match="division by zero"):
        ours.step()
    assert_same(everything(ours), before)


@pytest.mark.parametrize("devices", ["ram:", "file:"])
def test_gradients_are_clipped_by_a_finite_norm(devices):
    p, q = leaf(50), leaf(9)
    ours = CSDAdam([p, q], devices=devices, lr=torch.tensor(0.1), max_grad_norm=1.0)
    gradients([p, q], 0)
    ours.step()
    before = everything(ours)
    q.grad[3] = NAN
    with pytest.raises(CSDValueError, match=r"multiplied by nan: .* max_grad_norm .* nothing was changed"):
        ours.step()
    assert_same(everything(ours), before)
    q.grad[3] = 0.0
    ours.step()
    assert ours.state[p]["step"] == 2


def test_a_guess_in_backward_with_such_a_learning_rate(tmp_path):
    model = torch.nn.Linear(64, 64)
    ours = CSDAdam(model.parameters(), devices=tmp_path / "csd", tile_size=1024)
    ours.overlap(model, backward=True)

    def backward():
        ours.zero_grad()
        model(torch.ones(2, 64)).sum().backward()

    for _ in range(3):
        backward()
        ours.step()
    ours.wait()
    before = everything(ours)
    for bad in (NAN, "0.1"):
        ours.param_groups[0]["lr"] = bad
        backward()
        with pytest.raises(CSDValueError, match="Invalid lr"):
            ours.step()
        ours.param_groups[0]["lr"] = 0.001
        assert_same(everything(ours), before)
    ours.step()
    ours.synchronize()
    assert ours.committed_step == 4
