"""The kernels as GPUs get them: compiled by NVRTC and by clang, which need no GPU, and looked at."""

import re
import subprocess

import pytest
from support.backends import TESTS
from support.gpu_sources import ARCHITECTURES, PACKAGE, SOURCES, clang, compiled_as, nvrtc

from csd_optim.errors import CSDUnavailableError
from csd_optim.kernels.sources import FOLDERS, KEEPS_SUBNORMALS, SYSTEM_HEADERS, kernels_in

pytestmark = pytest.mark.ci
all_sources = pytest.mark.parametrize(("source", "defines"), SOURCES, ids=[compiled_as(*s) for s in SOURCES])
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
# One operation of PTX on fp32 numbers, such as add.rn.ftz.f32.
OPERATIONS = re.compile(r"\b((?:add|sub|mul|div|sqrt|fma|mad|rcp|ex2|lg2|sin|cos|tanh)\.[\w.]*f32)\b")


@pytest.fixture
def compiler():
    if nvrtc() is None:
        pytest.skip(f"{PACKAGE} is not installed: `make ci` installs it")
    return nvrtc()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@all_sources
def test_nothing_is_spilled(source, defines, architecture, compiler):
    """All values of a thread stay in its registers."""
    log = compiler.compile(source, architecture, defines, options=["--ptxas-options=-v"]).log
    assert SPILLS.findall(log) == [("0", "0", "0")] * len(kernels_in(source)), log


@all_sources
def test_operations(source, defines, compiler):
    """Each operation is rounded to nearest by itself: no fused multiply-add, no approximation, flushed as asked."""
    ptx = compiler.compile(source, "compute_80", defines, ptx=True).image.decode()
    ending = ".rn.f32" if KEEPS_SUBNORMALS in defines else ".rn.ftz.f32"
    found = set(OPERATIONS.findall(ptx))
    assert found, "no arithmetic at all"
    assert found <= {f"{name}{ending}" for name in ("add", "sub", "mul", "div", "sqrt", "rcp")}
    assert sorted(re.findall(r"\.entry (\w+)\(", ptx)) == sorted(kernels_in(source))


def test_what_cannot_be_compiled(compiler):
    """The error says what the compiler says."""
    with pytest.raises(CSDUnavailableError, match=r"update.h cannot be compiled for sm_90: (.|\n)*CSD_NUMBER"):
        compiler.compile("update.h", "sm_90", ["CSD_RULE=SGD", "CSD_SECTIONS=1"])


@all_sources
def test_for_amd(source, defines, tmp_path):
    """clang compiles the kernels for an AMD GPU, on which they have not run yet."""
    if not clang():
        pytest.skip("clang is not installed")
    program = tmp_path / "kernels.hip"
    force = "#pragma clang force_cuda_host_device"
    program.write_text(f'#include "hip.h"\n{force} begin\n#include "{source}"\n{force} end\n')
    flags = ["-x", "hip", "--cuda-device-only", "--offload-arch=gfx90a", "-nogpuinc", "-nogpulib", "-S", "-O3"]
    flags += ["-std=c++17", "-ffp-contract=off", "-o", str(tmp_path / "kernels.s")]
    keeps = KEEPS_SUBNORMALS in defines
    flags += [f"-f{'no-' if keeps else ''}gpu-flush-denormals-to-zero", *(f"-D{define}" for define in defines)]
    for name, text in SYSTEM_HEADERS.items():
        (tmp_path / name).write_text(text)
    include = ["-nostdinc", *(f"-I{folder}" for folder in (TESTS / "kernels", tmp_path, *FOLDERS))]
    subprocess.run([clang(), *flags, *include, program], check=True)
    assembly = (tmp_path / "kernels.s").read_text()
    assert re.findall(r"\.private_segment_fixed_size: (\d+)", assembly) == ["0"] * len(kernels_in(source))
    # Denormal mode of fp32: 0 flushes operands and results, 3 keeps them.
    assert set(re.findall(r"\.amdhsa_float_denorm_mode_32 (\d)", assembly)) == {"3" if keeps else "0"}
