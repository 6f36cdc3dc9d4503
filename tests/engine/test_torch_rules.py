"""The update rules in torch operations give the same bits as the native ones, for all kinds of numbers."""

import numpy as np
import pytest
import torch

from csd_optim import bindings
from csd_optim.bindings import GRAD_SCALE, HYPER, RULES
from csd_optim.engine.placing.torch_rules import Scratch, differing_roundings, update

N = 20_000
SECTIONS = {"amsgrad": 4, "adam_amsgrad": 4, "adamw": 3, "adam": 3, "sgd": 1}
SECTIONS |= {"rmsprop_centered": 3, "rmsprop_momentum": 3, "rmsprop_both": 4, "rmsprop_uncentered": 4}


def awkward(generator, *, positive=False):
    """Return numbers of every magnitude, among them subnormal numbers, zeros of both signs, infinities and NaN."""
    x = torch.randint(-(1 << 31), 1 << 31, (N,), generator=generator).to(torch.int32).view(torch.float32).clone()
    x[: N // 2] = torch.randn(N // 2, generator=generator)
    x[N // 2 : 3 * N // 4] *= 1e-30
    x[::97], x[1::97] = 0.0, -0.0
    return x.abs() if positive else x


def same_bits(a, b):
    """Return whether all bits are equal; all NaNs count as equal, as devices may choose the payload."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(7.0).view(torch.int32), b.nan_to_num(7.0).view(torch.int32)
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rule", RULES)
def test_bits(rule, seed):
    generator = torch.Generator().manual_seed(seed)
    c = torch.rand(9, generator=generator).tolist()
    c[GRAD_SCALE] = [1.0, 1024.0][seed]
    hyper = np.array([(RULES[rule], c)], HYPER)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        states = [awkward(generator, positive=k > 1) for k in range(SECTIONS.get(rule, 2))]
        grad = awkward(generator).to(dtype)
        ours = [state.clone() for state in states]
        bindings.update(hyper, "scalar", grad, states, None)
        update(RULES[rule], hyper["c"][0].tolist(), ours, grad, Scratch.of(N, torch.device("cpu")))
        assert all(map(same_bits, ours, states))
        assert not same_bits(ours[0], awkward(generator))


def test_the_cpu_rounds_as_it_should():
    assert differing_roundings(torch.device("cpu")) == []
