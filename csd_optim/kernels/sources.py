"""The sources of the kernels: native/gpu/*.h and the headers of native/include/ that these include, as package data."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from cffi import FFI

HEADERS = Path(__file__).parent / "headers"
FOLDERS = HEADERS / "gpu", HEADERS / "include"  # links to native/ in a checkout, copies in an installed package
# A name among the defines: the kernels keep subnormal numbers, which otherwise are zero (native/src/float_mode.h).
KEEPS_SUBNORMALS = "CSD_KEEPS_SUBNORMALS"
# The compilers of GPUs have no system headers. The functions that the kernels use are built in.
SYSTEM_HEADERS = {
    "stdint.h": """
        typedef signed char int8_t; typedef unsigned char uint8_t; typedef short int16_t;
        typedef unsigned short uint16_t; typedef int int32_t; typedef unsigned int uint32_t;
        #ifdef __INT64_TYPE__  // clang: hipRTC may have defined the same types
        typedef __INT64_TYPE__ int64_t; typedef __UINT64_TYPE__ uint64_t;
        #else
        typedef long long int64_t; typedef unsigned long long uint64_t;
        #endif
    """,
    "stddef.h": "",
    "math.h": "",
}
KERNEL = re.compile(r"^KERNEL (\w+)\(", re.M)


@functools.cache
def headers() -> dict[str, str]:
    """Return the texts of all headers by name."""
    return {path.name: path.read_text() for folder in FOLDERS for path in sorted(folder.glob("*.h"))}


def kernels_in(source: str) -> list[str]:
    """Return the names of the kernels that a header defines."""
    return KERNEL.findall(headers()[source])


@functools.cache
def layouts() -> Any:
    """Return a cffi.FFI that knows the structs of arguments: what the headers have between their cdef marks."""
    ffi = FFI()
    hyper = re.search(r"typedef struct csd_hyper \{.*?\} csd_hyper;", headers()["csd.h"], re.S)
    assert hyper, "csd.h has lost csd_hyper"
    ffi.cdef(hyper[0])
    for path in sorted(FOLDERS[0].glob("*.h")):
        for declarations in re.findall(r"/\* cdef \*/(.*?)/\* end of cdef \*/", path.read_text(), re.S):
            ffi.cdef(declarations)
    return ffi


@functools.cache
def _constants() -> Any:
    return layouts().dlopen(None)


def constant(name: str) -> int:
    """Return a constant of an enum between a header's cdef marks."""
    return int(getattr(_constants(), name))


def address(args: Any) -> int:
    """Return the address of a struct of arguments."""
    return int(layouts().cast("uintptr_t", args))


def size(args: Any) -> int:
    """Return the size in bytes of the struct that `args` points to."""
    return int(layouts().sizeof(layouts().typeof(args).item))
