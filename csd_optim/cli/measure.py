"""Short measurements of how fast cards, memory and the updater are, each on its own.

Only the ratio of a figure such as "70 million parameters per second" to another one says something: to the rate that
the same disk or memory reaches in the same run without computing anything.
"""

from __future__ import annotations

import errno
import statistics
import threading
import time
from collections.abc import Sequence

import numpy as np
import torch

from .. import bindings
from ..bindings import DeviceConfig
from ..devices.smartssd import find as find_card
from ..devices.spec import DeviceSpec
from ..devices.xclbin import find_kernels
from ..engine.placing.engine_rate import HYPERS
from ..engine.placing.tuning import ScratchFile, huge_array
from ..errors import CSDOSError

CARD_BYTES, LEAST_CARD_BYTES = 1 << 30, 48 << 20  # of scratch space on a card's drive


def card_rates(spec: DeviceSpec, free: int) -> dict[str, float]:
    """Return bytes per second between card, drive and host, and the kernel's parameters per second: `csd_card_rates`.

    `spec` has a directory, and `free` bytes are free there. Raises CSDUnavailableError, CSDOSError.
    """
    assert spec.directory is not None
    size = min(CARD_BYTES, free // 4)
    if size < LEAST_CARD_BYTES:
        raise CSDOSError(errno.ENOSPC, f"{spec.directory}: {free / 1e6:.0f} MB are free, measuring takes 200 MB")
    name = find_card(spec.card).name
    program = find_kernels(spec.xclbin)
    card = bindings.card_open(name, program.path, program.kernels, spec.timeout)
    try:
        with ScratchFile(spec.directory, size, spec.block_bytes) as scratch:
            config = DeviceConfig("xrt", scratch.fd, spec.buffers, spec.block_bytes, card, spec.p2p)
            return bindings.card_measure(
                config, scratch.first, scratch.blocks * scratch.block, lambda *_: f"card {name}"
            )
    finally:
        bindings.card_close(card, name)


class Memory:
    """Memory on huge pages whose bandwidth is measured by reading it and writing it back in place."""

    def __init__(self, nbytes: int) -> None:
        self._values = torch.from_numpy(huge_array(nbytes).view(np.float32))
        self._values.fill_(1.0)  # touches every page, so that page faults are not timed

    def rate(self, threads: int) -> float:
        """Return bytes per second of one pass; each byte counts twice, as read and as written."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            start = time.perf_counter()
            self._values.neg_()  # flips one bit of each value: the cheapest operation that reads and writes everything
            return 2 * self._values.nbytes / (time.perf_counter() - start)
        finally:
            torch.set_num_threads(before)


class Updater:
    """The CPU updater alone, on states of `elems` parameters in memory."""

    def __init__(self, elems: int, dtype: torch.dtype) -> None:
        threads = bindings.threads_used()
        self._isa = bindings.isa_used()
        self._hyper = HYPERS
        states = [torch.zeros(elems) for _ in range(3)]
        tensors = [torch.zeros(elems, dtype=dtype), *states, torch.zeros(elems, dtype=dtype)]
        tensors[0].fill_(1e-3)
        self._parts = list(zip(*(t.tensor_split(threads) for t in tensors), strict=True))
        self.elems = elems

    def rate(self) -> float:
        """Update all parameters once, on as many threads as the engine uses. Returns parameters per second."""
        start = time.perf_counter()
        threads = [threading.Thread(target=self._update, args=part, daemon=True) for part in self._parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.elems / (time.perf_counter() - start)

    def _update(
        self, grad: torch.Tensor, master: torch.Tensor, m: torch.Tensor, v: torch.Tensor, param: torch.Tensor
    ) -> None:
        bindings.update(self._hyper, self._isa, grad, (master, m, v), param)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
