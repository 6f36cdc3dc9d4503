"""Builds `csd_optim._emulator` (cffi, API mode): the FPGA's kernels by the host's compiler, and what runs them."""

import os
import runpy
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
EMULATOR = ROOT / "native" / "emulator"
SOURCES = [
    "hls_kernels/csd_adamw_update",
    "hls_kernels/csd_adamw_topk_update",
    "native/emulator/csim",
    "native/emulator/device",
]

# cffi runs this file by its path, so that its neighbour is found by its path too.
cdef = runpy.run_path(str(ROOT / "csd_optim" / "_build_native.py"))["cdef"]

ffibuilder = FFI()
ffibuilder.cdef(cdef((EMULATOR / "emulator.h").read_text()))
ffibuilder.set_source(
    "csd_optim._emulator",
    '#include "emulator.h"',
    source_extension=".cpp",
    # Relative: setuptools refuses absolute paths in an sdist, and builds from the project's root.
    sources=[f"{name}.cpp" for name in SOURCES],
    # hls_kernels/csim holds what Vitis brings along itself.
    include_dirs=[str(ROOT / d) for d in ("native/include", "native/emulator", "hls_kernels", "hls_kernels/csim")],
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        # Each operation of the FPGA rounds on its own, and so does each here.
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-Wno-unknown-pragmas",  # those of HLS
        "-fvisibility=hidden",
        "-pthread",
        *os.environ.get("CSD_OPTIM_CFLAGS", "").split(),
    ],
    extra_link_args=["-pthread", *os.environ.get("CSD_OPTIM_LDFLAGS", "").split()],
    py_limited_api=True,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
