"""Builds `csd_optim._native` (cffi, API mode). The cdef is cut from csd.h itself, so the two cannot drift apart."""

import os
import re
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"
SOURCES = [
    "api",
    "engine",
    "buffers",
    "guess",
    "windows",
    "pool",
    "transfer",
    "updater",
    "topk",
    "changes",
    "crc32c",
    "memory",
    "numa",
    "failure",
    "device_cpu",
    "device_file",
    "device_ram",
    "device_xrt",
    "card",
    "card_kernels",
    "xrt",
    "device_null",
    "device_paced",
]

# setuptools rebuilds the extension only if a source or one of these dependencies is newer.
HEADERS = [
    str(header.relative_to(ROOT))
    for where in ("native/include", "native/src", "hls_kernels")
    for header in sorted((ROOT / where).rglob("*.h"))
]

FLAGS = [
    "-std=c++17",
    "-O3",
    # Line numbers for debugging. Python's own -g would make the compilation a third longer.
    "-g1",
    # No fused multiply-add (division and square root are IEEE's): the same bits on every machine and on an FPGA.
    "-ffp-contract=off",
    # Nothing reads errno or traps of math functions; without these two flags sqrtf is not vectorised.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-pthread",
    *os.environ.get("CSD_OPTIM_CFLAGS", "").split(),
]
LINK_FLAGS = ["-pthread", "-ldl", *os.environ.get("CSD_OPTIM_LDFLAGS", "").split()]


def cdef(header: str) -> str:
    """Return the declarations between the two cdef marks of `header`, the text of csd.h."""
    declarations = re.search(r"/\* cdef:.*?\*/(.*?)/\* end of cdef \*/", header, re.S)
    assert declarations, "csd.h has lost its cdef marks"
    return declarations[1]


ffibuilder = FFI()
ffibuilder.cdef(cdef((NATIVE / "include" / "csd.h").read_text()))
ffibuilder.set_source(
    "csd_optim._native",
    '#include "csd.h"',
    source_extension=".cpp",
    # Relative, because setuptools refuses absolute paths in an sdist; it builds from the project's root.
    sources=[f"native/src/{name}.cpp" for name in SOURCES],
    depends=HEADERS,
    include_dirs=[str(NATIVE / "include"), str(NATIVE / "src")],
    extra_compile_args=FLAGS,
    extra_link_args=LINK_FLAGS,
    py_limited_api=True,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
