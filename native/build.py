"""Builds `csd_optim._native` (cffi, API mode). The cdef is cut from the header itself: they cannot drift apart."""

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
    "summands",
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

# An extension that is newer than its sources is not built again; nor would it be when only one of these is edited.
HEADERS = [
    str(header.relative_to(ROOT))
    for where in ("native", "hls_kernels")
    for header in sorted((ROOT / where).rglob("*.h"))
]

FLAGS = [
    "-std=c++17",
    "-O3",
    # Lines for who debugs. With all that Python's own -g asks for, it takes a third longer to compile.
    "-g1",
    # The same bits on every machine, and on an FPGA: no fused multiply-add, IEEE division and square root.
    "-ffp-contract=off",
    # errno and traps of the mathematics are not looked at; without this sqrtf is not vectorised.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-pthread",
    *os.environ.get("CSD_OPTIM_CFLAGS", "").split(),
]
LINK_FLAGS = ["-pthread", "-ldl", *os.environ.get("CSD_OPTIM_LDFLAGS", "").split()]


def cdef(header: str) -> str:
    """The declarations of csd.h between its two cdef marks."""
    declarations = re.search(r"/\* cdef:.*?\*/(.*?)/\* end of cdef \*/", header, re.S)
    assert declarations, "csd.h has lost its cdef marks"
    return declarations[1]


ffibuilder = FFI()
ffibuilder.cdef(cdef((NATIVE / "include" / "csd.h").read_text()))
ffibuilder.set_source(
    "csd_optim._native",
    '#include "csd.h"',
    source_extension=".cpp",
    # Relative: setuptools refuses absolute paths in an sdist, and builds from the project's root.
    sources=[f"native/src/{name}.cpp" for name in SOURCES],
    depends=HEADERS,
    include_dirs=[str(NATIVE / "include"), str(NATIVE / "src")],
    extra_compile_args=FLAGS,
    extra_link_args=LINK_FLAGS,
    py_limited_api=True,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
