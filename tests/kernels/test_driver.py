"""How kernels are compiled, loaded and launched on a GPU: which functions of torch's libraries are called, and how."""

import ctypes
import os
import subprocess
import threading
from types import SimpleNamespace

import pytest
import torch
from support.backends import TESTS

from csd_optim import CSDUnavailableError
from csd_optim.kernels import driver
from csd_optim.kernels.device_check import kernels_of
from csd_optim.kernels.driver import THREADS, Gpu
from csd_optim.kernels.library import KernelLibrary
from csd_optim.kernels.sources import KEEPS_SUBNORMALS, headers, layouts

RULE = ("CSD_NUMBER=4", "CSD_RULE=SGD", "CSD_SECTIONS=1")
MACROS = "-DCSD_NUMBER=4 -DCSD_RULE=SGD -DCSD_SECTIONS=1"
EXACT = "--std=c++17 --device-as-default-execution-space --fmad=false --prec-div=true --prec-sqrt=true"
COMPILES = f"compile --gpu-architecture=sm_90 {EXACT} --ftz=true {MACROS}"
COMPILED = ['create #include "update.h"', "", COMPILES, "destroy"]


class Stub:
    """A stand-in for torch's library: what was called in it, and a device whose kernels it has."""

    def __init__(self, directory, monkeypatch, capability=(9, 0), *, is_amd=False):
        path = directory / "stub.so"
        options = ["-std=c++17", "-O0", "-shared", "-fPIC", *(["-DAMD"] if is_amd else [])]
        subprocess.run([os.environ.get("CXX", "g++"), *options, TESTS / "kernels/stub.cpp", "-o", path], check=True)
        self._library = ctypes.CDLL(str(path))
        self._library.stub_notes.restype = ctypes.c_char_p
        stream = SimpleNamespace(cuda_stream=77, synchronize=lambda: None)
        monkeypatch.setattr(driver, "_library", lambda: str(path))
        monkeypatch.setattr(torch.version, "hip", "6" if is_amd else None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName="gfx90a:xnack-")
        )
        driver._compiler.cache_clear()
        device = torch.device("cuda", 0)
        self.kernels = KernelLibrary(device, Gpu(device))

    def calls(self, fails=""):
        """Return the calls since the last time. From now on this one fails."""
        found = self._library.stub_notes().decode().splitlines()
        self._library.stub_fails(fails.encode())
        return found


@pytest.fixture(autouse=True)
def no_compiler():
    yield
    driver._compiler.cache_clear()


def launch(kernels, defines=RULE, rows=3):
    args = layouts().new("UpdateArgs *")
    args.rows = rows
    kernels.launch("update.h", "update", defines, args, 5)


def test_nvidia(tmp_path, monkeypatch):
    stub = Stub(tmp_path, monkeypatch)
    launch(stub.kernels)
    first = [*COMPILED, "load image"]
    assert stub.calls() == [*first, "context", "function update", f"launch 5 1 1 {THREADS} 1 1 0 77 3"]
    other = threading.Thread(target=launch, args=(stub.kernels,), kwargs={"rows": 2})
    other.start()
    other.join()
    assert stub.calls() == ["context", f"launch 5 1 1 {THREADS} 1 1 0 77 2"]
    stub.kernels.module("update.h", (*RULE, KEEPS_SUBNORMALS))
    assert f"compile --gpu-architecture=sm_90 {EXACT} --ftz=false {MACROS} -D{KEEPS_SUBNORMALS}" in stub.calls()
    assert stub.kernels.launches == 2


def test_a_gpu_that_is_newer_than_the_compiler(tmp_path, monkeypatch):
    """The driver gets PTX for the newest architecture that the compiler knows."""
    stub = Stub(tmp_path, monkeypatch, capability=(12, 0))
    stub.kernels.module("update.h", RULE)
    assert stub.calls() == [line.replace("sm_90", "compute_90") for line in COMPILED] + ["load ptx"]


def test_a_gpu_that_is_older_than_the_compiler(tmp_path, monkeypatch):
    stub = Stub(tmp_path, monkeypatch, capability=(7, 0))
    with pytest.raises(CSDUnavailableError, match="torch's NVRTC does not compile for sm_70"):
        stub.kernels.module("update.h", RULE)


def test_amd(tmp_path, monkeypatch):
    """The same functions by HIP's names."""
    stub = Stub(tmp_path, monkeypatch, is_amd=True)
    launch(stub.kernels)
    calls = stub.calls()
    force = "#pragma clang force_cuda_host_device"
    assert calls[:3] == [f"create {force} begin", '#include "update.h"', f"{force} end"]
    options = "--offload-arch=gfx90a:xnack- -std=c++17 -ffp-contract=off -fgpu-flush-denormals-to-zero"
    assert calls[4:6] == [f"compile {options} {MACROS}", "destroy"]
    assert calls[6:] == ["load image", "function update", f"launch 5 1 1 {THREADS} 1 1 0 77 3"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("create", "nvrtcCreateProgram failed: error 7"),
        ("compile", "update.h cannot be compiled for sm_90: complaint"),
        ("load", "cuModuleLoadData failed on cuda:0: error 7"),
        ("function", "cuModuleGetFunction failed on cuda:0: error 7"),
        ("launch", "cuLaunchKernel failed on cuda:0: error 7"),
    ],
)
def test_calls_that_fail(call, message, tmp_path, monkeypatch):
    """The error says which call failed, and the next attempt begins anew."""
    stub = Stub(tmp_path, monkeypatch)
    stub.calls(fails=call)
    with pytest.raises(CSDUnavailableError, match=message):
        launch(stub.kernels)
    stub.calls()
    launch(stub.kernels)
    assert stub.calls()[-1].startswith("launch")


def test_a_torch_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    found = kernels_of(torch.device("cuda", 0))
    missing = tmp_path / "torch/lib/libcaffe2_nvrtc.so"
    assert found == (None, (), f"this torch has no compiler of kernels: {missing} is missing")


def test_a_library_without_a_compiler(tmp_path, monkeypatch):
    path = tmp_path / "empty.so"
    subprocess.run([os.environ.get("CXX", "g++"), "-shared", "-x", "c++", "/dev/null", "-o", path], check=True)
    monkeypatch.setattr(driver, "_library", lambda: str(path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(CSDUnavailableError, match="has no nvrtcGetNumSupportedArchs"):
        Gpu(torch.device("cuda", 0)).load("update.h", RULE)


def test_the_threads_of_a_block():
    assert f"constexpr uint32_t kThreads = {THREADS};" in headers()["gpu.h"]
