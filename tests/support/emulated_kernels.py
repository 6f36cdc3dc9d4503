"""The kernels of native/gpu/ on the emulated accelerator, compiled by g++: see tests/accelerator/emulated/on_cpu.h."""

import ctypes
import hashlib
import itertools
import os
import subprocess

from csd_optim.kernels import sources

from .backends import TESTS

EMULATED = TESTS / "accelerator" / "emulated"
NATIVE = TESTS.parent / "native"
BUILD = TESTS.parent / "build" / "kernels"
# As native/build.py compiles the native engine, with fewer optimisations: it is quicker to compile.
ROUNDING = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# Also ends the process where a GPU would fault, as at an address that is no multiple of the size of what is loaded.
TRAPS = ["-fsanitize=alignment,bounds,shift,integer-divide-by-zero", "-fsanitize-undefined-trap-on-error"]
FLAGS = ["-std=c++17", "-O1", *ROUNDING, *TRAPS, "-shared", "-fPIC", "-Wall", "-Wextra"]


def compiled(source, defines, gpu=NATIVE / "gpu"):
    """Return the path of a header's kernels as a library, built again if its sources have changed.

    `gpu`: where the headers of native/gpu/ are.
    """
    folders = [gpu, NATIVE / "include", NATIVE / "src", EMULATED]
    kernels = "".join(f"RUN({name})" for name in sources.kernels_in(source))
    options = [f'-DCSD_HEADER="{source}"', f"-DCSD_KERNELS={kernels}", *(f"-D{define}" for define in defines)]
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


def changed_headers(folder, **changes):
    """Return a copy of native/gpu/ in `folder` in which a header (without .h) has other text: header=(old, new)."""
    for path in (NATIVE / "gpu").glob("*.h"):
        text = path.read_text()
        if path.stem in changes:
            old, new = changes[path.stem]
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / path.name).write_text(text)
    return folder


class EmulatedProcessor:
    """Queues kernels on a device of the emulated accelerator. `library`: the accelerator's."""

    def __init__(self, library, device):
        self._library, self._device = library, device
        self._seeds = itertools.count()  # another order of threads for each launch

    def load(self, source, defines):
        return self.loaded(compiled(source, defines))

    def loaded(self, path):
        return ctypes.CDLL(str(path)).launch

    def launch(self, module, kernel, args, blocks):
        run, name = ctypes.cast(module, ctypes.c_void_p), kernel.encode()
        arguments, size = ctypes.c_void_p(sources.address(args)), ctypes.c_size_t(sources.size(args))
        self._library.emu_launch(self._device.index, run, name, arguments, size, blocks, next(self._seeds))
