"""The emulated accelerator of tests/accelerator/emulated/ as torch.device("emu"): built once, loaded into the process.

Once loaded, torch.accelerator and pinned memory use it: a process has it from then on, or never.
"""

import contextlib
import ctypes
import os
import subprocess
import types
from pathlib import Path

import torch

from csd_optim import accelerator
from csd_optim.kernels.library import KernelLibrary, register

from .backends import TESTS
from .emulated_kernels import EmulatedProcessor

SOURCES = TESTS / "accelerator" / "emulated"
WRITTEN_FOR = "2.13"  # the version of torch: it uses interfaces that torch may change
# When queued work runs: only when the host waits for it ("late"), at once, or that of some streams before others'.
ORDERS = ("late", "at once", "side first", "main first", "random")
POLL_SECONDS = accelerator.POLL_SECONDS  # what the host sleeps between two looks at an event of a real device
_library = None


def missing():
    """Return why the accelerator cannot be emulated here, "" if it can."""
    if torch.__version__.startswith(f"{WRITTEN_FOR}."):
        return ""
    return f"the emulated accelerator is written for torch {WRITTEN_FOR}; this is {torch.__version__}"


def build():
    """Return the path of the library, built again if a source is newer. Raises CalledProcessError."""
    library = TESTS.parent / "build" / f"emulated-{torch.__version__}.so"
    sources = [*SOURCES.glob("*.h"), SOURCES / "emulated.cpp"]
    if library.exists() and library.stat().st_mtime > max(s.stat().st_mtime for s in sources):
        return library
    library.parent.mkdir(exist_ok=True)
    there = Path(torch.__file__).parent
    made = library.with_suffix(f".{os.getpid()}")
    include = [f"-isystem{there / 'include' / part}" for part in (".", "torch/csrc/api/include")]
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-attributes"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    libraries = [f"-L{there / 'lib'}", f"-Wl,-rpath,{there / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, *flags, abi, *include, SOURCES / "emulated.cpp", "-o", made, *libraries], check=True)
    made.rename(library)
    return library


def load():
    """Make it the accelerator of this process."""
    global _library
    if _library is not None:
        return
    path = str(build())
    torch.ops.load_library(path)
    _library = ctypes.CDLL(path)
    _library.emu_schedule.argtypes = [ctypes.c_int, ctypes.c_uint64]
    for name in ("emu_pending", "emu_launched", "emu_waited"):
        getattr(_library, name).restype = ctypes.c_uint64
    torch.utils.rename_privateuse1_backend("emu")
    module = types.ModuleType("torch.emu")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 2
    module.current_device = torch.accelerator.current_device_index
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None  # random numbers come from the CPU's generators
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    torch._register_device_module("emu", module)
    register("emu", lambda device: KernelLibrary(device, EmulatedProcessor(_library, device)))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    accelerator.POLL_SECONDS = 0  # each look runs a piece of the work: while the host sleeps, nothing happens


def loaded():
    return _library is not None


@contextlib.contextmanager
def schedule(name):
    """Run what is queued inside the context by this schedule: one of ORDERS, or "random=SEED"."""
    set_schedule(name)
    try:
        yield
    finally:
        set_schedule("late")


def set_schedule(name):
    """Use this schedule from now on. Everything queued so far has run when this returns."""
    order, _, seed = name.partition("=")
    _library.emu_schedule(ORDERS.index(order), int(seed or 1))


@contextlib.contextmanager
def processor(make):
    """Inside the context, `make(library, device)` is what compiles and launches kernels of a device."""
    register("emu", lambda device: KernelLibrary(device, make(_library, device)))
    try:
        yield
    finally:
        register("emu", lambda device: KernelLibrary(device, EmulatedProcessor(_library, device)))


@contextlib.contextmanager
def capturing():
    """Pretend inside the context that a graph is captured: streams say so, and the host must not wait."""
    _library.emu_capture(True)
    try:
        yield
    finally:
        _library.emu_capture(False)


def pending():
    """Return the number of kernels and copies that are queued and have not run yet."""
    return _library.emu_pending()


def counts():
    """Return counts so far: what was put into streams, and how often the host waited for one."""
    return _library.emu_launched(), _library.emu_waited()
