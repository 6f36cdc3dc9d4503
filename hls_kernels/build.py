"""Builds `csd_optim._emulator` (cffi, API mode): the FPGA's kernels, compiled for the host, and the emulated card."""

import runpy
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
EMULATOR = ROOT / "hls_kernels" / "emulator"
KERNELS = sorted(f"hls_kernels/{path.name}" for path in EMULATOR.parent.glob("*.cpp"))
SOURCES = [*KERNELS, "hls_kernels/emulator/csim.cpp", "hls_kernels/emulator/device.cpp"]

# cffi runs this file by its path, outside of any package, so load the other build script by its path too.
native = runpy.run_path(str(ROOT / "native" / "build.py"))

ffibuilder = FFI()
ffibuilder.cdef(native["cdef"]((EMULATOR / "emulator.h").read_text()))
ffibuilder.set_source(
    "csd_optim._emulator",
    '#include "emulator.h"',
    source_extension=".cpp",
    # Relative, because setuptools refuses absolute paths in an sdist; it builds from the project's root.
    sources=SOURCES,
    depends=native["HEADERS"],
    # hls_kernels/csim replaces headers that come with Vitis.
    include_dirs=[
        str(ROOT / d)
        for d in ("native/include", "native/src", "hls_kernels/emulator", "hls_kernels", "hls_kernels/csim")
    ],
    extra_compile_args=[*native["FLAGS"], "-Wno-unknown-pragmas"],  # g++ does not know the HLS pragmas
    extra_link_args=native["LINK_FLAGS"],
    py_limited_api=True,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
