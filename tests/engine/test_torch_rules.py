"""The update rules in torch operations give the same bits as the native ones, for all kinds of numbers."""

import numpy as np
import pytest
import torch
from support.floats import at_the_edge, awkward, same_bits

from csd_optim import bindings
from csd_optim.bindings import GRAD_SCALE, HYPER, RULE_ROWS, RULES
from csd_optim.engine.placing.torch_rules import Scratch, differing_roundings, update

N = 20_000
SECTIONS = {"amsgrad": 4, "adam_amsgrad": 4, "adamw": 3, "adam": 3, "sgd": 1}
SECTIONS |= {"rmsprop_centered": 3, "rmsprop_momentum": 3, "rmsprop_both": 4, "rmsprop_uncentered": 4}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rule", RULES)
def test_bits(rule, seed):
    generator = torch.Generator().manual_seed(seed)
    c = torch.rand(9, generator=generator).tolist()
    c[GRAD_SCALE] = [1.0, 1024.0][seed]
    hyper = np.array([(RULES[rule], c)], HYPER)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        states = [awkward(N, generator, positive=k > 1) for k in range(SECTIONS.get(rule, 2))]
        grad = awkward(N, generator).to(dtype)
        ours = [state.clone() for state in states]
        bindings.update(hyper, "scalar", grad, states, None)
        update(RULES[rule], hyper["c"][0].tolist(), ours, grad, Scratch.of(N, torch.device("cpu")))
        assert all(map(same_bits, ours, states))
        assert not same_bits(ours[0], awkward(N, generator))


@pytest.mark.parametrize("row", [row for row in RULE_ROWS if row.name in RULES], ids=lambda row: row.name)
def test_bits_at_the_edge_of_subnormal_numbers(row):
    for seed in range(2):
        for constants, states, grad in at_the_edge(row, seed):
            hyper = np.array([(RULES[row.name], constants.tolist())], HYPER)
            ours = [state.clone() for state in states]
            bindings.update(hyper, "scalar", grad, states, None)
            update(RULES[row.name], constants.tolist(), ours, grad, Scratch.of(len(grad), torch.device("cpu")))
            assert all(map(same_bits, ours, states))


def test_the_cpu_rounds_as_it_should():
    assert differing_roundings(torch.device("cpu")) == []
