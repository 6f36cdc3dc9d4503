"""The update kernels give the same bits as the native engine, on the emulated accelerator and on real ones."""

import numpy as np
import pytest
import torch
from support.floats import awkward, same_bits
from support.on_accelerator import DEVICE, DTYPES

from csd_optim import bindings
from csd_optim.bindings import GRAD_SCALE, HYPER, RULE_ROWS, RULES
from csd_optim.kernels.library import library_of
from csd_optim.kernels.update import UpdateRow, launch_update

pytestmark = pytest.mark.accelerator
SIZES = [1, 3, 4, 5, 1023, 1025, 4095, 4099, 8193]


def constants(generator, scale=1.0):
    c = torch.rand(9, generator=generator).tolist()
    c[GRAD_SCALE] = scale
    return c


def cut(t, shift):
    """Return a copy of `t` on the device, in the midst of a larger tensor: misaligned unless `shift` is 0 or 4."""
    return torch.full((len(t) + 8,), 7.0, dtype=t.dtype, device=DEVICE)[shift : shift + len(t)].copy_(t)


@pytest.mark.parametrize("rule", ["adamw"])
def test_bits(rule):
    library = library_of(torch.device(DEVICE))
    generator = torch.Generator().manual_seed(1)
    count = torch.zeros((), dtype=torch.int64, device=DEVICE)
    rows, expected, nonfinite = [], [], 0
    sections = next(row.updated for row in RULE_ROWS if row.name == rule)
    for i, n in enumerate(SIZES):
        for dtype in DTYPES:
            c = constants(generator, [1.0, 1024.0][i % 2])
            states = [awkward(n, generator, positive=k > 1) for k in range(sections)]
            grad = awkward(n, generator).to(dtype)
            param = torch.zeros(n, dtype=DTYPES[i % 3])
            there = [cut(t, i % 5) for t in states]
            rows.append(UpdateRow(cut(grad, i % 2), dtype, there, cut(param, i % 2), c))
            bindings.update(np.array([(RULES[rule], c)], HYPER), "scalar", grad, states, param)
            nonfinite += int((~grad.isfinite()).sum())
            expected.append([*states, param])
    launch_update(library, RULES[rule], rows, count, ())
    for row, tensors in zip(rows, expected, strict=True):
        for ours, theirs in zip([*row.states, row.param], tensors, strict=True):
            assert same_bits(ours.cpu(), theirs)
    assert count.item() == nonfinite
