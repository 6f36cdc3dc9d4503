"""The compiler of the kernels: NVRTC, or hipRTC for AMD's GPUs, as a library. Neither needs a GPU.

torch/lib/libcaffe2_nvrtc.so depends on the compiler and on the driver's library, and its run path finds both wherever
torch has them. Opening it is enough, for any version of torch and CUDA.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from cffi import FFI

from ..errors import CSDUnavailableError
from .sources import KEEPS_SUBNORMALS, SYSTEM_HEADERS, headers

# hipRTC has the same functions: FUNCTIONS with the prefix hiprtc, and Code for CUBIN. It has none of ONLY_NVRTC.
FUNCTIONS = """
int nvrtcCreateProgram(void **, const char *, const char *, int, const char *const *, const char *const *);
int nvrtcCompileProgram(void *, int, const char *const *);
int nvrtcGetProgramLogSize(void *, size_t *);
int nvrtcGetProgramLog(void *, char *);
int nvrtcGetCUBINSize(void *, size_t *);
int nvrtcGetCUBIN(void *, char *);
int nvrtcDestroyProgram(void **);
"""
ONLY_NVRTC = """
int nvrtcGetPTXSize(void *, size_t *);
int nvrtcGetPTX(void *, char *);
int nvrtcGetNumSupportedArchs(int *);
int nvrtcGetSupportedArchs(int *);
"""
# Each operation is rounded by itself, to nearest: no fused multiply-add, exact quotients and roots.
NVIDIA_OPTIONS = [
    "--std=c++17",
    "--device-as-default-execution-space",
    "--fmad=false",
    "--prec-div=true",
    "--prec-sqrt=true",
]
AMD_OPTIONS = ["-std=c++17", "-ffp-contract=off"]


class Compiled(NamedTuple):
    image: bytes
    log: str


class Compiler:
    """Compiles the kernels for GPUs of NVIDIA, or with `is_amd` of AMD. Raises CSDUnavailableError if it cannot."""

    def __init__(self, library: str, *, is_amd: bool = False) -> None:
        self._ffi = FFI()
        self._is_amd = is_amd
        self._ffi.cdef(_amd_names(FUNCTIONS) if is_amd else FUNCTIONS + ONLY_NVRTC)
        try:
            self._lib: Any = self._ffi.dlopen(library)
        except OSError as e:
            raise CSDUnavailableError(errno.ENOENT, f"no compiler of kernels: {e}") from None

    def compile(
        self, source: str, target: str, defines: Sequence[str], *, ptx: bool = False, options: Sequence[str] = ()
    ) -> Compiled:
        """Compile a header of native/gpu/ for an architecture, such as sm_90 or gfx90a; with `ptx` to PTX."""
        ffi, program = self._ffi, self._ffi.new("void **")
        files = headers() | SYSTEM_HEADERS
        strings = [self._text(text) for text in (*files, *files.values())]  # alive until compiled
        names, texts = (ffi.new("char *[]", half) for half in (strings[: len(files)], strings[len(files) :]))
        self._call(
            "nvrtcCreateProgram", program, self._wrapped(source), self._text(f"{source}.cu"), len(files), texts, names
        )
        try:
            given = [self._text(option) for option in (*self._options(target, defines), *options)]
            rc = self._function("nvrtcCompileProgram")(program[0], len(given), ffi.new("char *[]", given))
            log = bytes(self._get("ProgramLog", program)).rstrip(b"\0").decode(errors="replace")
            if rc:
                raise CSDUnavailableError(errno.ENOEXEC, f"{source} cannot be compiled for {target}: {log or rc}")
            return Compiled(self._get("PTX" if ptx else "CUBIN", program), log)
        finally:
            self._call("nvrtcDestroyProgram", program)

    @functools.cached_property
    def architectures(self) -> list[int]:
        """The compute capabilities that NVRTC knows, ascending, such as 90 for sm_90."""
        count = self._ffi.new("int *")
        self._call("nvrtcGetNumSupportedArchs", count)
        known = self._ffi.new("int[]", count[0])
        self._call("nvrtcGetSupportedArchs", known)
        return sorted(known)

    def _options(self, target: str, defines: Sequence[str]) -> list[str]:
        keeps = KEEPS_SUBNORMALS in defines
        macros = [f"-D{define}" for define in defines]
        if self._is_amd:
            flush = "-fno-gpu-flush-denormals-to-zero" if keeps else "-fgpu-flush-denormals-to-zero"
            return [f"--offload-arch={target}", *AMD_OPTIONS, flush, *macros]
        return [f"--gpu-architecture={target}", *NVIDIA_OPTIONS, f"--ftz={str(not keeps).lower()}", *macros]

    def _wrapped(self, source: str) -> Any:
        include = f'#include "{source}"\n'
        if self._is_amd:  # clang has no option like --device-as-default-execution-space
            force = "#pragma clang force_cuda_host_device"
            include = f"{force} begin\n{include}{force} end\n"
        return self._text(include)

    def _get(self, what: str, program: Any) -> bytes:
        size = self._ffi.new("size_t *")
        self._call(f"nvrtcGet{what}Size", program[0], size)
        image = self._ffi.new("char[]", max(size[0], 1))
        self._call(f"nvrtcGet{what}", program[0], image)
        return bytes(self._ffi.buffer(image, size[0]))

    def _text(self, text: str) -> Any:
        return self._ffi.new("char[]", text.encode())

    def _function(self, name: str) -> Any:
        return function_of(self._lib, _amd_names(name) if self._is_amd else name)

    def _call(self, name: str, *args: Any) -> None:
        if rc := self._function(name)(*args):
            raise CSDUnavailableError(errno.EIO, f"{name} failed: error {rc}")


def function_of(library: Any, name: str) -> Any:
    """Return a function of a library that cffi has opened. Raises CSDUnavailableError if the library lacks it."""
    try:
        return getattr(library, name)
    except AttributeError:
        raise CSDUnavailableError(errno.ENOSYS, f"torch's compiler of kernels or driver has no {name}") from None


def _amd_names(text: str) -> str:
    return text.replace("nvrtcGetCUBIN", "hiprtcGetCode").replace("nvrtc", "hiprtc")
