"""The kernels of native/gpu/ on the emulated accelerator, compiled by g++: see tests/accelerator/emulated/on_cpu.h."""

import ctypes
import hashlib
import itertools
import os
import subprocess

from csd_optim.kernels import sources
from csd_optim.kernels.library import KernelLibrary

from .backends import TESTS

EMULATED = TESTS / "accelerator" / "emulated"
NATIVE = TESTS.parent / "native"
BUILD = TESTS.parent / "build" / "kernels"
# As native/build.py compiles the native engine, with fewer optimisations: it is quicker to compile.
ROUNDING = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS = ["-std=c++17", "-O1", *ROUNDING, "-shared", "-fPIC", "-Wall", "-Wextra"]


def compiled(source, defines, changed=(), options=()):
    """Return the path of a header's kernels as a library, built again if its sources have changed.

    `changed`: a folder with a changed copy of native/gpu/. `options`: more options of the compiler.
    """
    folders = [*changed, NATIVE / "gpu", NATIVE / "include", NATIVE / "src", EMULATED]
    kernels = "".join(f"RUN({name})" for name in sources.kernels_in(source))
    options = [*options, f'-DCSD_HEADER="{source}"', f"-DCSD_KERNELS={kernels}", *(f"-D{define}" for define in defines)]
    digest = hashlib.sha256(repr((FLAGS, options)).encode())
    for folder in folders:
        for header in sorted([*folder.glob("*.h"), *folder.glob("emulate.cpp")]):
            digest.update(header.read_bytes())
    path = BUILD / f"{source.removesuffix('.h')}-{digest.hexdigest()[:20]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(f".{os.getpid()}")
        include = [f"-I{folder}" for folder in folders]
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, *FLAGS, *include, *options, EMULATED / "emulate.cpp", "-o", made], check=True)
        made.rename(path)
    return path


class EmulatedProcessor:
    """Queues kernels on a device of the emulated accelerator. `library`: the accelerator's; `how`: see compiled()."""

    def __init__(self, library, device, **how):
        self._library, self._device, self._how = library, device, how
        self._seeds = itertools.count()  # another order of threads for each launch

    def load(self, source, defines):
        return ctypes.CDLL(str(compiled(source, defines, **self._how))).launch

    def launch(self, module, kernel, args, blocks):
        run, name = ctypes.cast(module, ctypes.c_void_p), kernel.encode()
        arguments, size = ctypes.c_void_p(sources.address(args)), ctypes.c_size_t(sources.size(args))
        self._library.emu_launch(self._device.index, run, name, arguments, size, blocks, next(self._seeds))


def maker(library, **how):
    """Return what csd_optim.kernels.library.register() takes."""
    return lambda device: KernelLibrary(device, EmulatedProcessor(library, device, **how))
