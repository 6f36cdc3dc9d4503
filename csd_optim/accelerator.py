"""Memory, streams and events of torch's accelerator (CUDA, ROCm, XPU, NPU, MPS), through torch's generic API.

A process has one kind of accelerator; torch.accelerator and pinned memory refer to that kind.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Any

import torch

from .errors import CSDRuntimeError

# Interval at which wait_for() polls an event. Copying a tile takes about as long.
POLL_SECONDS = 20e-6


def is_on_accelerator(t: torch.Tensor) -> bool:
    """Return whether the tensor is in an accelerator's memory, which the CPU cannot access."""
    return not (t.is_cpu or t.is_meta)


def is_accelerator(device: torch.device) -> bool:
    """Return whether `device` is of the type of this process's accelerator."""
    current = torch.accelerator.current_accelerator()
    return current is not None and current.type == device.type


def accelerator_type() -> str:
    """Return the type of the process's accelerator, such as "cuda"; "" if it has none, whatever torch was built for."""
    current = torch.accelerator.current_accelerator(check_available=True)
    return current.type if current else ""


def on(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that queues work on `stream`, or on the current stream if it is None.

    A torch.Stream stores the previously current stream in itself, so two threads must not enter the same one at a time.
    """
    return contextlib.nullcontext() if stream is None else stream


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which `device` is the current device."""
    if device.index is None or not is_accelerator(device):
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


def record_event(stream: Any) -> Any:
    """Return a new event, recorded on the stream behind everything queued there so far."""
    event = torch.Event(stream.device)
    event.record(stream)
    return event


def has_completed(event: Any) -> bool:
    """Return whether everything that the event is recorded behind has completed. Does not wait."""
    return bool(event.query())


def wait_for(event: Any) -> None:
    """Wait until the event has completed. Polls, because event.synchronize() would spin on a core that updates need."""
    while not has_completed(event):
        pause()


def pause() -> None:
    """Sleep between two looks at what the accelerator has completed."""
    time.sleep(POLL_SECONDS)


def is_captured(device: torch.device) -> bool:
    """Return whether the current stream of `device` is being captured in a graph; False if not is_accelerator()."""
    if not is_accelerator(device):
        return False
    stream = torch.accelerator.current_stream(device)
    return bool(getattr(stream, "is_capturing", bool)())  # torch 2.9 has no is_capturing


def check_not_capturing(tensors: Iterable[torch.Tensor]) -> None:
    """Raise CSDRuntimeError if the current stream of these tensors' accelerator is being captured in a graph."""
    far = next((t for t in tensors if is_on_accelerator(t)), None)
    if far is not None and is_captured(far.device):
        raise CSDRuntimeError(
            "step() cannot be captured in a graph: devices and host take part in it. Capture forward and backward, "
            "and call step() after the replay"
        )
