"""Builds `csd_optim._emulator` (cffi, API mode): the FPGA's kernels by the host's compiler, and what runs them."""

import runpy
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
EMULATOR = ROOT / "hls_kernels" / "emulator"
KERNELS = sorted(f"hls_kernels/{path.name}" for path in EMULATOR.parent.glob("*.cpp"))
SOURCES = [*KERNELS, "hls_kernels/emulator/csim.cpp", "hls_kernels/emulator/device.cpp"]

# cffi runs this file by its path, so that the other is found by its path too.
native = runpy.run_path(str(ROOT / "native" / "build.py"))

ffibuilder = FFI()
ffibuilder.cdef(native["cdef"]((EMULATOR / "emulator.h").read_text()))
ffibuilder.set_source(
    "csd_optim._emulator",
    '#include "emulator.h"',
    source_extension=".cpp",
    # Relative: setuptools refuses absolute paths in an sdist, and builds from the project's root.
    sources=SOURCES,
    depends=native["HEADERS"],
    # hls_kernels/csim holds what Vitis brings along itself.
    include_dirs=[
        str(ROOT / d)
        for d in ("native/include", "native/src", "hls_kernels/emulator", "hls_kernels", "hls_kernels/csim")
    ],
    extra_compile_args=[*native["FLAGS"], "-Wno-unknown-pragmas"],  # those of HLS
    extra_link_args=native["LINK_FLAGS"],
    py_limited_api=True,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
