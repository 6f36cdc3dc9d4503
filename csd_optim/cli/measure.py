"""How fast cards, memory, the updater and the engine are, each on its own: short measurements.

A figure such as "70 million parameters per second" says little by itself; beside the rate that the same disk or the
same memory reaches with nothing to compute, measured in the same run, it does.
"""

from __future__ import annotations

import errno
import functools
import os
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .. import bindings
from ..bindings import DTYPE_CODES, HYPER, PARAM, TILE_STATE, DeviceConfig
from ..devices.backends import DEFAULT_BLOCK
from ..devices.smartssd import find as find_card
from ..devices.spec import DEFAULT_BUFFERS, DeviceSpec
from ..devices.xclbin import find_kernels
from ..engine.tuning import Scratch, huge_array
from ..errors import CSDOSError
from ..store.layout import TILE_ELEMS, plan_extent
from ..store.sections import FP32, SECTIONS

CARD_BYTES, LEAST_CARD_BYTES = 1 << 30, 48 << 20  # of scratch space on a card's drive
ENGINE_ELEMS, ENGINE_STEPS = 1 << 24, 5  # 200 MB of states, 67 MB of gradients and parameters in 16 bits
ADAMW_STEP = (bindings.RULES["adamw"], (1.0, 0.9, 0.1, 0.999, 0.001, 1e-3, 1.0, 1e-8, 1.0))  # constants of some step
HYPERS = np.array([ADAMW_STEP], HYPER)


def card_rates(spec: DeviceSpec, free: int) -> dict[str, float]:
    """Bytes per second between card, drive and host, parameters per second of its kernel; see `csd_card_rates`.

    `spec`: with a directory, of which `free` bytes are free. Raises CSDUnavailableError, CSDOSError.
    """
    assert spec.directory is not None
    size = min(CARD_BYTES, free // 4)
    if size < LEAST_CARD_BYTES:
        raise CSDOSError(errno.ENOSPC, f"{spec.directory}: {free / 1e6:.0f} MB are free, measuring takes 200 MB")
    name = find_card(spec.card).name
    card = bindings.card_open(name, find_kernels(spec.xclbin), spec.timeout)
    try:
        with Scratch(spec.directory, size, spec.block_bytes) as scratch:
            config = DeviceConfig("xrt", scratch.fd, spec.buffers, spec.block_bytes, card, spec.p2p)
            return bindings.card_measure(
                config, scratch.first, scratch.blocks * scratch.block, lambda *_: f"card {name}"
            )
    finally:
        bindings.card_close(card, name)


class Memory:
    """Some memory on huge pages, to be read and written back in place."""

    def __init__(self, nbytes: int) -> None:
        self._values = torch.from_numpy(huge_array(nbytes).view(np.float32))
        self._values.fill_(1.0)  # touches every page: faults are not bandwidth

    def rate(self, threads: int) -> float:
        """Bytes per second of one pass; a byte counts twice, once read and once written."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            start = time.perf_counter()
            self._values.neg_()  # one bit of each value: nothing to compute
            return 2 * self._values.nbytes / (time.perf_counter() - start)
        finally:
            torch.set_num_threads(before)


class Updater:
    """The updater alone, on states of `elems` parameters in memory."""

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
        """Parameters per second of one update of all of them, on the engine's number of threads."""
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


class AtOnce:
    """The engine on a device that completes at once: /dev/zero takes what is written, and nothing needs to be read.

    Every tile stays in its buffer, one beside the other in memory; there it is verified, updated and summed, by the
    engine's own threads, as on any drive. So this is how fast the engine is when drives are not the limit. Not `kept`:
    every step reads, and gets zeros, which are right until the first update.

    `grad`, `param`: `elems` elements of `dtype`; `hyper`: one element of HYPER; all may be changed between steps.
    `state_dtype`: "8bit" keeps codes; who wants an optimizer's bits gives the number of the step as `seed`. `sections`:
    names of the states, the master first, of the rule in `hyper`.
    """

    def __init__(
        self,
        elems: int,
        dtype: torch.dtype,
        *,
        kept: bool = True,
        state_dtype: str = FP32,
        sections: Sequence[str] = SECTIONS[:3],
        tile_elems: int = TILE_ELEMS,
        block_bytes: int = DEFAULT_BLOCK,
    ) -> None:
        self.elems = elems
        self.grad, self.param = torch.full((elems,), 1e-3, dtype=dtype), torch.zeros(elems, dtype=dtype)
        self.hyper = HYPERS.copy()
        self._table = np.zeros(1, PARAM)
        self._table["grad"], self._table["param"] = self.grad.data_ptr(), self.param.data_ptr()
        self._table["grad_dtype"] = self._table["param_dtype"] = DTYPE_CODES[dtype]
        self._table["master"] = bindings.IN_SECTION
        param_dtype = None if state_dtype == FP32 else dtype  # of codes
        how: dict[str, Any] = {"codec": state_dtype, "param_dtype": param_dtype}
        extent = plan_extent([elems], 1, sections=sections, tile_elems=tile_elems, **how)
        self.tiles = np.arange(extent.n_tiles, dtype=np.uint32)
        # As of a store that is there already, whose sums nobody knows: its windows are not looked at.
        shape = (extent.n_tiles, extent.chunks, len(extent.slot))
        states, sums = np.zeros(extent.n_tiles, TILE_STATE), np.zeros(shape, np.uint32)
        self._fd = os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC)
        cache = extent.n_tiles * extent.slot_bytes if kept else -1
        config = DeviceConfig("file", self._fd, DEFAULT_BUFFERS, block_bytes, cache_bytes=cache)
        self._engine = None
        try:
            self._engine = bindings.engine_create([config], self._name)
            self._windows = bindings.engine_extend(
                self._engine, extent.tile_elems, extent.n_tiles, len(sections), [0], extent.pieces, self._name,
                states=states, sum_elems=extent.sum_elems, sums=sums, **how,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def step(self, *, update: bool = True, seed: int = 0) -> None:
        """One step, until the last state is written. Not `update`: tiles pass through, verified."""
        self._table["seed"] = seed
        table = self._table if update else np.zeros(1, PARAM)
        bindings.engine_begin(self._engine, table, self.hyper, self.tiles, self._name)
        for tile in self.tiles.tolist():
            bindings.engine_push(self._engine, tile, 0, 0, 0, 0, self._name)
        bindings.engine_finish(self._engine, True, self._name)
        bindings.engine_wait_writes(self._engine, self._name)

    def close(self) -> None:
        try:
            if self._engine is not None:
                bindings.engine_close(self._engine, self._name)
        finally:
            self._engine = None
            os.close(self._fd)

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _name(*_: int) -> str:
        return "/dev/zero"


def engine_rate(
    dtype: torch.dtype,
    state_dtype: str = FP32,
    sections: tuple[str, ...] = SECTIONS[:3],
    hyper: tuple[int, tuple[float, ...]] = ADAMW_STEP,
) -> float:
    """Parameters per second that the engine's threads verify, update and sum: the best of a few steps, without drives.

    `dtype`: of parameters and gradients; `state_dtype`: CSDAdam's; `sections`, `hyper`: states, number and constants of
    a rule. Measured once per process and number of update threads, in a fraction of a second. Raises CSDMemoryError.
    """
    return _engine_rate(dtype, state_dtype, sections, hyper, bindings.threads_used())


@functools.cache
def _engine_rate(
    dtype: torch.dtype, state_dtype: str, sections: tuple[str, ...], hyper: tuple[int, tuple[float, ...]], threads: int
) -> float:
    seconds = []
    with AtOnce(ENGINE_ELEMS, dtype, state_dtype=state_dtype, sections=sections) as engine:
        engine.hyper[0] = hyper
        for _ in range(2 + ENGINE_STEPS):  # the first one reads, the second is the first to verify
            start = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - start)
    return ENGINE_ELEMS / min(seconds[2:])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
