"""The kernel that updates 8-bit codes gives the same bits as the native engine."""

import pytest
import torch
from support.code_cases import CASES, SIZES, differing
from support.on_accelerator import DEVICE

from csd_optim.kernels.device_check import WAYS
from csd_optim.kernels.library import library_of
from csd_optim.kernels.sources import layouts

pytestmark = pytest.mark.accelerator


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits(case, way):
    different, compared = differing(library_of(torch.device(DEVICE)), WAYS[way], case)
    assert different == []
    assert compared > 10 * sum(SIZES)


@pytest.mark.soak
@pytest.mark.one_schedule
@pytest.mark.parametrize("case", CASES, ids=str)
def test_many_bits(case):
    different, compared = differing(library_of(torch.device(DEVICE)), (), case, [300_007, 65_536], 6)
    assert different == []
    assert compared > 10_000_000


def test_the_arguments_of_a_launch_fit():
    assert layouts().sizeof("CodesArgs") <= 4096 < layouts().sizeof("CodesArgs") + layouts().sizeof("CodesRow")
