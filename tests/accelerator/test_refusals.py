"""Uses of an accelerator that are not supported are refused with a clear message, before anything is changed."""

import pytest
import torch
from support import emulated
from support.on_accelerator import DEVICE, leaf

from csd_optim import CSDAdam, CSDRuntimeError

pytestmark = [pytest.mark.accelerator, pytest.mark.one_schedule]


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "with a loss scale"])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}, {"topk": 0.1}], ids=str)
def test_a_step_is_not_captured(emulated_only, options, scaled):
    p = leaf(5000)
    optimizer = CSDAdam([p], devices="file:", **options)
    if scaled:
        optimizer.found_inf, optimizer.grad_scale = torch.zeros((), device=DEVICE), torch.ones((), device=DEVICE)
    for capturing in (False, True, False):
        p.grad = torch.ones_like(p)
        before = optimizer.state[p]["step"].item() if optimizer.state else 0
        if capturing:
            with emulated.capturing(), pytest.raises(CSDRuntimeError, match=r"step\(\) cannot be captured in a graph"):
                optimizer.step()
            assert optimizer.state[p]["step"] == before
        else:
            optimizer.step()
            assert optimizer.state[p]["step"] == before + 1


def test_another_kind_of_accelerator(emulated_only):
    """A process has only one kind of accelerator: parameters on another kind are refused."""

    class Elsewhere(torch.nn.Parameter):
        device = torch.device("xpu", 0)
        is_cpu = False

    with pytest.raises(CSDRuntimeError, match=r"on xpu:0, such as .*: it takes those on the CPU and on emu"):
        CSDAdam([Elsewhere(torch.ones(3))], devices="file:")
