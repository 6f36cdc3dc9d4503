"""The kernels of one device, and the types of devices that have kernels."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..errors import CSDUnavailableError
from .driver import Gpu

log: logging.Logger = logging.getLogger("csd_optim")


class Processor(Protocol):
    """What runs the kernels of one device."""

    def load(self, source: str, defines: Sequence[str]) -> Any:
        """Compile a source, and return it as a module of kernels. Raises CSDUnavailableError."""

    def launch(self, module: Any, kernel: str, args: Any, blocks: int) -> None:
        """Queue a kernel on the device's current stream."""


class KernelLibrary:
    """The kernels of one device. Compiles a source at its first use, under a lock."""

    def __init__(self, device: torch.device, processor: Processor) -> None:
        self.device = device
        self.launches: int = 0
        self._processor = processor
        self._lock = threading.Lock()
        self._modules: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._checking = threading.Lock()
        self._objections: dict[str, str] = {}  # by the purpose of kernels: why these cannot be used; "": they can

    def launch(self, source: str, kernel: str, defines: Sequence[str], args: Any, blocks: int) -> None:
        """Launch a kernel on the device's current stream. Allocates nothing on the device and waits for nothing.

        `source`: a header of native/gpu/. `defines`: macros, "NAME" or "NAME=value"; see also KEEPS_SUBNORMALS of
        sources.py. `args`: pointer to a struct of sources.layouts(), which is copied. The caller keeps tensors alive as
        for any operation on that stream.

        Raises CSDUnavailableError if the source cannot be compiled.
        """
        self._processor.launch(self.module(source, defines), kernel, args, blocks)
        self.launches += 1

    def module(self, source: str, defines: Sequence[str]) -> Any:
        """Return a compiled source. Compile what is launched while a graph is captured before the capture begins."""
        key = source, tuple(defines)
        with self._lock:
            if key not in self._modules:
                self._modules[key] = self._processor.load(*key)
            return self._modules[key]

    def objection(self, purpose: str, check: Callable[[], str]) -> str:
        """Return why the kernels for a purpose cannot be used; "" if they can.

        `check` finds this out, at the first call, and may raise CSDUnavailableError. An objection is logged.
        """
        with self._checking:
            if purpose not in self._objections:
                try:
                    found = check()
                except CSDUnavailableError as e:
                    found = reason(e)
                self._objections[purpose] = found
                if found:
                    log.warning("the kernels for %s on %s cannot be used: %s", purpose, self.device, found)
            return self._objections[purpose]


def reason(error: CSDUnavailableError) -> str:
    return str(error.strerror)[:300]  # a compiler may have much to say


Maker = Callable[[torch.device], KernelLibrary]
# ROCm's devices are of type "cuda", too.
_makers: dict[str, Maker] = {"cuda": lambda device: KernelLibrary(device, Gpu(device))}
_libraries: dict[torch.device, KernelLibrary] = {}
_lock = threading.Lock()


def register(device_type: str, make: Maker) -> None:
    """Say how the kernels of a device of this type are made, from now on."""
    with _lock:
        _makers[device_type] = make
        for device in [d for d in _libraries if d.type == device_type]:
            del _libraries[device]


def library_of(device: torch.device) -> KernelLibrary | None:
    """Return the kernels of a device; None if there are no kernels for this type of device.

    Raises CSDUnavailableError if the compiler or the driver is missing.
    """
    if device.type not in _makers:
        return None
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    with _lock:
        if device not in _libraries:
            _libraries[device] = _makers[device.type](device)
        return _libraries[device]
