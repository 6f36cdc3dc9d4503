"""Newton-Schulz: against torch's and against float64."""

import weakref

import pytest
import torch
from torch.optim import _muon
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from csd_optim.muon import newton_schulz as module
from csd_optim.muon.newton_schulz import JORDAN, fast_dtype, flops, newton_schulz, rate, workspace_bytes

EPS = 1e-7
SHAPES = [(1, 300), (300, 1), (64, 64), (96, 160), (160, 96), (384, 128)]
POLAR = [(8.28721, -23.59589, 17.30039), (4.10706, -2.94785, 0.54484), (3.94869, -2.90890, 0.55182)]


def matrix(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact(x, coefficients):
    """The same in float64."""
    y = x.double()
    y = y.T if y.size(0) > y.size(1) else y
    y = y / y.norm().clamp(min=EPS)
    for a, b, c in coefficients:
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.T if x.size(0) > x.size(1) else y


def apart(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.05), (torch.float32, 0.004)], ids=["bf16", "fp32"])
@pytest.mark.parametrize("coefficients", [[JORDAN] * 5, POLAR], ids=["jordan", "polar"])
def test_against_float64(shape, dtype, most, coefficients):
    if coefficients is POLAR and 1 in shape:
        pytest.skip("rounding errors grow where no other singular value is")
    x = matrix(*shape)
    o = newton_schulz(x, coefficients, EPS, dtype)
    assert o.dtype is torch.bfloat16
    assert o.shape == x.shape
    assert o.is_contiguous()
    assert apart(o, exact(x, coefficients)) < most


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_torch(shape):
    x = matrix(*shape)
    wanted = _muon._zeropower_via_newtonschulz(x, JORDAN, 5, EPS)
    assert apart(newton_schulz(x, [JORDAN] * 5, EPS), wanted) < 0.02  # bf16's own error is 0.01


def test_a_batch_is_its_matrices_one_by_one():
    x = matrix(2, 3, 40, 24)
    o = newton_schulz(x, [JORDAN] * 5, EPS)
    for i in range(2):
        for j in range(3):
            assert torch.equal(o[i, j], newton_schulz(x[i, j], [JORDAN] * 5, EPS))


def test_the_argument_stays():
    x = matrix(32, 48)
    kept = x.clone()
    newton_schulz(x, [JORDAN] * 5, EPS)
    assert torch.equal(x, kept)


def test_powers_of_two_change_no_bit():
    x = matrix(48, 32)
    assert torch.equal(newton_schulz(x * 1024, [JORDAN] * 5, EPS), newton_schulz(x, [JORDAN] * 5, EPS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_no_bit(dtype, to):
    x = matrix(40, 64)
    expected = newton_schulz(x, [JORDAN] * 3, EPS, dtype)
    with torch.autocast("cpu", to):
        assert torch.equal(newton_schulz(x, [JORDAN] * 3, EPS, dtype), expected)


def test_zero_stays_zero():
    assert not newton_schulz(torch.zeros(8, 8).bfloat16(), [JORDAN] * 5, EPS).any()


def test_one_nan_makes_its_matrix_nan_and_no_other():
    x = matrix(2, 16, 24)
    x[0, 3, 5] = torch.nan
    o = newton_schulz(x, [JORDAN] * 5, EPS)
    assert o[0].isnan().all()
    assert o[1].isfinite().all()


def test_flops_are_those_of_the_products():
    assert flops(64, 256, 5) == flops(256, 64, 5) == 5 * (2 * 64 * 256 * 64 + 2 * 64**3 + 2 * 64 * 64 * 256)


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that are made within, while they live."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in given:
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        self.most = max(self.most, self.now)
        return made

    def free(self, nbytes):
        self.now -= nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(256, 512), (512, 256), (16, 128, 256), (16, 256, 128)], ids=str)
def test_workspace_is_enough(shape, dtype):
    x = matrix(*shape)
    with Live() as live:
        newton_schulz(x, [JORDAN] * 3, EPS, dtype)
    assert x.nbytes < live.most <= workspace_bytes(shape, dtype, x.device) + x.nbytes + 4096


CPU = torch.device("cpu")


@pytest.fixture
def asked_anew():
    """Has the CPU asked again for its instructions, before the test and after it."""
    module._has_bf16_instructions.cache_clear()
    yield
    module._has_bf16_instructions.cache_clear()


def test_the_dtype_is_that_of_the_processors_instructions(asked_anew, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert fast_dtype(CPU) is torch.bfloat16
    module._has_bf16_instructions.cache_clear()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert fast_dtype(CPU) is torch.float32
    module._has_bf16_instructions.cache_clear()
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    for name in ("avx512_bf16", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda: False)
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    assert fast_dtype(CPU) is torch.float32


def test_the_dtype_is_not_measured(monkeypatch):
    """Two processes of a run would have other bits, if one of them found the machine busy."""
    monkeypatch.setattr(module, "_seconds", None)
    assert fast_dtype(CPU) in (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_torchs_default_device_does_not_matter(device):
    with torch.device(device):
        assert fast_dtype(CPU) is fast_dtype(torch.device("cpu"))
        assert rate(torch.float32, CPU) > 0
