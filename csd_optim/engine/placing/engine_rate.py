"""Measures the engine without a drive: how fast the CPU alone verifies, updates and checksums tiles."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ... import bindings
from ...bindings import DTYPE_CODES, HYPER, PARAM, TILE_STATE, DeviceConfig, ExtentConfig, Native
from ...devices.backends import DEFAULT_BLOCK, NO_CACHE
from ...devices.spec import DEFAULT_BUFFERS
from ...store.file import StoreFile
from ...store.layout import TILE_ELEMS, plan_extent
from ...store.sections import FP32, SECTIONS, codec_of

ENGINE_ELEMS, ENGINE_STEPS = 1 << 24, 5  # 200 MB of states, 67 MB of gradients and parameters in 16 bits
ADAMW_STEP = (bindings.RULES["adamw"], (1.0, 0.9, 0.1, 0.999, 0.001, 1e-3, 1.0, 1e-8, 1.0))  # of an arbitrary step
HYPERS = np.array([ADAMW_STEP], HYPER)


class EngineWithoutDrive:
    """The engine on a device whose I/O completes immediately: /dev/zero accepts all writes, and nothing needs reading.

    Every tile stays in its own buffer in memory. The engine's threads verify, update and checksum tiles there as with
    any drive, so this measures the engine where drives are not the limit. With `cached` False every step reads its
    tiles, as zeros, which are the right states only until the first update.

    `in_memory`: keep the states as `ram:` does beside other devices: read and written in each step.

    `grad`, `param`: `elems` elements of `dtype`; `hyper`: one element of HYPER; all may be changed between steps.
    `state_dtype`: "8bit" stores codes; for the same bits as an optimizer, pass the number of the step as `seed`.
    `sections`: names of the states of the rule in `hyper`, the master first.
    """

    def __init__(
        self,
        elems: int,
        dtype: torch.dtype,
        *,
        cached: bool = True,
        in_memory: bool = False,
        state_dtype: str = FP32,
        sections: Sequence[str] = SECTIONS[:3],
        tile_elems: int = TILE_ELEMS,
        block_bytes: int = DEFAULT_BLOCK,
    ) -> None:
        self.elems = elems
        self.grad: torch.Tensor = torch.full((elems,), 1e-3, dtype=dtype)
        self.param: torch.Tensor = torch.zeros(elems, dtype=dtype)
        self.hyper: np.ndarray[Any, Any] = HYPERS.copy()
        self._table = np.zeros(1, PARAM)
        self._table["grad"], self._table["param"] = self.grad.data_ptr(), self.param.data_ptr()
        self._table["grad_dtype"] = self._table["param_dtype"] = DTYPE_CODES[dtype]
        self._table["master"] = bindings.IN_SECTION
        param_dtype = None if state_dtype == FP32 else dtype  # only for codes
        codec_options: dict[str, Any] = {"codec": codec_of(state_dtype, sections), "param_dtype": param_dtype}
        extent = plan_extent([elems], 1, sections=sections, tile_elems=tile_elems, **codec_options)
        self.tiles: np.ndarray[Any, Any] = np.arange(extent.n_tiles, dtype=np.uint32)
        # As for an existing store with unknown checksums; nobody reads the windows.
        shape = (extent.n_tiles, extent.chunks, len(extent.slot))
        states, sums = np.zeros(extent.n_tiles, TILE_STATE), np.zeros(shape, np.uint32)
        self._store = StoreFile(None, durable=False) if in_memory else None
        self._fd = os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC)
        cache = 0 if in_memory else extent.n_tiles * extent.slot_bytes if cached else NO_CACHE
        fd = self._store.io_fd if self._store else self._fd
        config = DeviceConfig("ram" if in_memory else "file", fd, DEFAULT_BUFFERS, block_bytes, cache_bytes=cache)
        self._native = Native(lambda *_: "/dev/zero")
        try:
            offset = self._store.allocate(extent.device_bytes(0)) if self._store else 0
            self._native.open([config])
            known = {"states": states, "sum_elems": extent.sum_elems, "sums": sums, **codec_options}
            self._windows = self._native.extend(
                ExtentConfig(extent.tile_elems, extent.n_tiles, len(sections), [offset], extent.pieces, **known)
            )
        except BaseException:
            self.close()
            raise

    def step(self, *, update: bool = True, seed: int = 0) -> None:
        """Run one step until the last state is written. With `update` False tiles are only verified and rewritten."""
        self._table["seed"] = seed
        table = self._table if update else np.zeros(1, PARAM)
        self._native.begin(table, self.hyper, self.tiles)
        for tile in self.tiles.tolist():
            self._native.push(tile)
        self._native.finish(True)
        self._native.wait_writes()

    def close(self) -> None:
        try:
            if self._native.is_open:
                self._native.close()
        finally:
            os.close(self._fd)
            if self._store:
                self._store.close()

    def __enter__(self) -> EngineWithoutDrive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def engine_rate(
    dtype: torch.dtype,
    state_dtype: str = FP32,
    sections: tuple[str, ...] = SECTIONS[:3],
    hyper: tuple[int, tuple[float, ...]] = ADAMW_STEP,
    *,
    in_memory: bool = False,
) -> float:
    """Return how many parameters per second the engine verifies, updates and checksums without drives: best of 5 steps.

    `dtype`: of parameters and gradients; `state_dtype`: CSDAdam's; `sections`, `hyper`: the states of a rule, its
    number and constants; `in_memory`: see EngineWithoutDrive. Measured once per process and number of update threads,
    in a fraction of a second. Raises CSDMemoryError.
    """
    return _engine_rate(dtype, state_dtype, sections, hyper, in_memory, bindings.threads_used())


@functools.cache
def _engine_rate(
    dtype: torch.dtype,
    state_dtype: str,
    sections: tuple[str, ...],
    hyper: tuple[int, tuple[float, ...]],
    in_memory: bool,
    threads: int,
) -> float:
    seconds = []
    options: dict[str, Any] = {"state_dtype": state_dtype, "sections": sections, "in_memory": in_memory}
    with EngineWithoutDrive(ENGINE_ELEMS, dtype, **options) as engine:
        engine.hyper[0] = hyper
        for _ in range(2 + ENGINE_STEPS):  # the first one reads, the second is the first to verify
            start = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - start)
    return ENGINE_ELEMS / min(seconds[2:])
