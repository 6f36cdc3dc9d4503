"""Loads and launches compiled kernels on a GPU: the driver's functions for modules, from torch's own libraries.

Written for GPUs of NVIDIA and AMD. Not yet run on AMD's.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cffi import FFI

from ..accelerator import on_device
from ..errors import CSDUnavailableError
from .nvrtc import Compiler, function_of
from .sources import address

THREADS = 256  # kThreads of gpu.h
# HIP has the same functions: with the prefix hip, and hipModuleLaunchKernel for cuLaunchKernel. It needs no ONLY_CUDA.
FUNCTIONS = """
int cuModuleLoadData(void **, const void *);
int cuModuleGetFunction(void **, void *, const char *);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                   void **);
"""
ONLY_CUDA = """
int cuCtxGetCurrent(void **);
int cuCtxSetCurrent(void *);
"""


def _amd_names(text: str) -> str:
    return text.replace("cuLaunchKernel", "hipModuleLaunchKernel").replace("cuModule", "hipModule")


def _library() -> str:
    """Return the path of torch's library that depends on the compiler and the driver's library."""
    path = Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"
    if not path.exists():
        raise CSDUnavailableError(errno.ENOENT, f"this torch has no compiler of kernels: {path} is missing")
    return str(path)


@functools.cache
def _compiler() -> Compiler:
    return Compiler(_library(), is_amd=bool(torch.version.hip))


class Gpu:
    """Runs kernels on one GPU. Modules belong to the context of this device. Raises CSDUnavailableError."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ffi = FFI()
        self._is_amd = bool(torch.version.hip)
        self._ffi.cdef(_amd_names(FUNCTIONS) if self._is_amd else FUNCTIONS + ONLY_CUDA)
        path = _library()
        try:
            self._lib: Any = self._ffi.dlopen(path)  # finds functions of the libraries that it depends on, too
        except OSError as e:
            raise CSDUnavailableError(errno.ENOENT, f"no driver for kernels: {e}") from None
        self._functions: dict[tuple[Any, str], Any] = {}
        self._context = self._ffi.new("void **")

    def load(self, source: str, defines: Sequence[str]) -> Any:
        """Return a module of kernels."""
        image = self._image(source, defines)
        module = self._ffi.new("void **")
        with on_device(self._device):
            torch.cuda.current_stream(self._device).synchronize()  # now this thread has the device's context
            if not self._is_amd:
                self._call("cuCtxGetCurrent", self._context)
            self._call("cuModuleLoadData", module, self._ffi.from_buffer(image))
        return module[0]

    def _image(self, source: str, defines: Sequence[str]) -> bytes:
        compiler = _compiler()
        if self._is_amd:
            target = torch.cuda.get_device_properties(self._device).gcnArchName
            return compiler.compile(source, target, defines).image
        major, minor = torch.cuda.get_device_capability(self._device)
        wanted = 10 * major + minor
        if wanted in compiler.architectures:
            return compiler.compile(source, f"sm_{wanted}", defines).image
        older = [known for known in compiler.architectures if known < wanted]
        if not older:
            raise CSDUnavailableError(errno.ENOTSUP, f"torch's NVRTC does not compile for sm_{wanted}")
        # A GPU that is newer than this NVRTC: the driver compiles PTX for it.
        return compiler.compile(source, f"compute_{older[-1]}", defines, ptx=True).image

    def launch(self, module: Any, kernel: str, args: Any, blocks: int) -> None:
        """Queue a kernel on the device's current stream."""
        parameters = self._ffi.new("void *[]", [self._ffi.cast("void *", address(args))])
        with on_device(self._device):
            stream = self._ffi.cast("void *", torch.cuda.current_stream(self._device).cuda_stream)
            if not self._is_amd:  # a thread that has not used CUDA yet has no context
                self._call("cuCtxSetCurrent", self._context[0])
            function, none = self._function(module, kernel), self._ffi.NULL
            self._call("cuLaunchKernel", function, blocks, 1, 1, THREADS, 1, 1, 0, stream, parameters, none)

    def _function(self, module: Any, kernel: str) -> Any:
        key = module, kernel
        if key not in self._functions:
            function = self._ffi.new("void **")
            self._call("cuModuleGetFunction", function, module, kernel.encode())
            self._functions[key] = function[0]
        return self._functions[key]

    def _call(self, name: str, *args: Any) -> None:
        if rc := function_of(self._lib, _amd_names(name) if self._is_amd else name)(*args):
            raise CSDUnavailableError(errno.EIO, f"{name} failed on {self._device}: error {rc}")
