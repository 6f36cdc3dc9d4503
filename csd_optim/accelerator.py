"""The accelerator that torch has (CUDA, ROCm, XPU, NPU, MPS), by torch's generic names: its memory, streams, events.

There is one kind per process: torch.accelerator and pinned memory mean that one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .errors import CSDRuntimeError

# Between two looks at an event. A copy of a tile takes about as long.
POLL_SECONDS = 20e-6


def is_far(t: torch.Tensor) -> bool:
    """Does it lie in an accelerator's memory, which the CPU does not reach?"""
    return not (t.is_cpu or t.is_meta)


def is_ours(device: torch.device) -> bool:
    """Is it the process's accelerator?"""
    there = torch.accelerator.current_accelerator()
    return there is not None and there.type == device.type


def kind() -> str:
    """The name of the process's accelerator; "" if it has none."""
    there = torch.accelerator.current_accelerator()
    return there.type if there else ""


def on(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """What is called within is queued on this stream; None: on the current one.

    A torch.Stream keeps the stream that was current before in itself: two threads must not be on the same one.
    """
    return contextlib.nullcontext() if stream is None else stream


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Makes it the current one of its kind. torch.accelerator.device_index does that from torch 2.8 on."""
    if device.index is None or not is_ours(device):
        yield
        return
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(device.index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def recorded(stream: Any) -> Any:
    """An event: what is queued on the stream by now."""
    event = torch.Event(stream.device)
    event.record(stream)
    return event


def wait_for(event: Any) -> None:
    """Returns when the event has happened. Sleeps until then: event.synchronize() takes a core, which updates need."""
    while not event.query():
        time.sleep(POLL_SECONDS)


def is_captured(device: torch.device) -> bool:
    """Is the stream that is current there being captured in a graph? False of devices that are not ours."""
    if not is_ours(device):
        return False
    stream = torch.accelerator.current_stream(device)
    return bool(getattr(stream, "is_capturing", bool)())  # torch 2.7 does not say


def check_not_capturing(tensors: Iterable[torch.Tensor]) -> None:
    """Raises CSDRuntimeError if the stream that is current for one of these is being captured in a graph."""
    far = next((t for t in tensors if is_far(t)), None)
    if far is not None and is_captured(far.device):
        raise CSDRuntimeError(
            "step() cannot be captured in a graph: devices and host take part in it. Capture forward and backward, "
            "and call step() after the replay"
        )
