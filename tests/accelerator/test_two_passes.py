"""Muon with parameters on the accelerator: X leaves and returns through the ring like parameters and gradients.

Oracle: the same on the CPU, to the last bit, with a stand-in for the orthogonalization whose bits are the same on both.
"""

from unittest import mock

import pytest
import torch
from support.on_accelerator import DEVICE, DTYPES, SCRATCH, keep_busy

from csd_optim import CSDMuon
from csd_optim.muon.newton_schulz import Orthogonal

pytestmark = pytest.mark.accelerator

SHAPES = [(64, 64), (40, 100), (3, 24, 40), (70, 90), (5, 7), (120, 60)]
TILE = 1024


def stand_in(_, x):
    """An update that depends on the whole matrix, and takes a while."""
    if x.device.type != "cpu":
        keep_busy()
    return x.flip(-1).mul(0.5) + x.flip(-2).mul(0.25)


def made(device, dtype):
    generator = torch.Generator().manual_seed(1)
    shapes = [*SHAPES, (1500,), (7,)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def trained_with_muon(device, dtype, devices, *, overlaps=False, on_host=(), **options):
    """Train, and return parameters and states. `on_host`: parameters that stay on the CPU."""
    params = made(device, dtype)
    for i in on_host:
        params[i] = torch.nn.Parameter(params[i].detach().cpu())
    matrices, others = params[: len(SHAPES)], params[len(SHAPES) :]
    groups = [{"params": matrices, "lr": 0.02}, {"params": others, "use_muon": False, "lr": 0.01}]
    with (
        mock.patch.object(Orthogonal, "of", stand_in),
        CSDMuon(groups, devices=devices, tile_size=TILE, **options) as opt,
    ):
        if overlaps:
            opt.overlap(torch.nn.ParameterList(params))
        for k in range(4):
            generator = torch.Generator().manual_seed(10 + k)
            for p in opt.param_groups[0]["params"] + opt.param_groups[1]["params"]:
                p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            opt.step()
            opt.zero_grad()
        opt.wait()
        states = [opt.state[p][name].cpu().clone() for p in params for name in opt.state[p]]
        return [p.detach().cpu().clone() for p in params] + states


def assert_bits(found, expected):
    assert [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)] == []


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("devices", SCRATCH, ids=str)
def test_same_bits_as_on_the_cpu(devices, dtype, state_dtype):
    options = {"state_dtype": state_dtype}
    assert_bits(
        trained_with_muon(DEVICE, dtype, devices, **options), trained_with_muon("cpu", dtype, devices, **options)
    )


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.parametrize("on_host", [(0, 3), (1, 2, 6)], ids=str)
def test_some_on_the_host(on_host, state_dtype):
    """Matrices of host and device share tiles."""
    options = {"state_dtype": state_dtype}
    expected = trained_with_muon("cpu", torch.bfloat16, ["file:"], **options)
    assert_bits(trained_with_muon(DEVICE, torch.bfloat16, ["file:"], on_host=on_host, **options), expected)


@pytest.mark.parametrize("devices", [["file:"], ["ram:", "file:"]], ids=str)
def test_overlap(devices):
    assert_bits(
        trained_with_muon(DEVICE, torch.bfloat16, devices, overlaps=True),
        trained_with_muon("cpu", torch.bfloat16, devices),
    )


def test_gradients_in_lower_precision():
    options = {"grad_dtype": torch.bfloat16}
    expected = trained_with_muon("cpu", torch.float32, ["file:"], **options)
    assert_bits(trained_with_muon(DEVICE, torch.float32, ["file:"], **options), expected)


def test_real_orthogonalization_on_the_accelerator():
    """Newton-Schulz itself: the accelerator's result is near the CPU's."""
    x = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    how = Orthogonal(((3.4445, -4.7750, 2.0315),) * 5, 1e-7, torch.bfloat16, 0, ())
    there, here = how.of(x.to(DEVICE)), how.of(x)
    assert there.device.type == torch.device(DEVICE).type
    assert (there.cpu().float() - here.float()).norm() <= 0.03 * here.float().norm()
