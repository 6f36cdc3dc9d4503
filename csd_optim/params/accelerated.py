"""Chooses the parameters with states, or copies of states, on the accelerator, and allocates the tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..distributed.sharding import Partition
from ..engine.accelerator_codes import CodesLayout, ParamCodes
from ..engine.accelerator_copies import AcceleratorCopy
from ..engine.engine import Engine
from ..engine.placing.on_accelerator import Joining, lacks_kernels
from ..errors import CSDMemoryError
from ..store.sections import FP32
from .param_state import ParamState
from .strides import flat, numel

# Parameters grouped by the kind of their states: (names of the sections, codec, dtype, rule) → (name, parameter, part).
ByKind = dict[tuple[Any, ...], list[tuple[str, torch.Tensor, Partition]]]


def choose(engine: Engine, by_kind: ByKind) -> dict[int, dict[str, torch.Tensor] | ParamCodes]:
    """Choose new parameters whose states go on the accelerator, and allocate the states.

    Returns, by id of the parameter, the states by name, or codes. Raises CSDMemoryError, and what
    OnAccelerator.choose() raises, before anything is touched.
    """
    states: dict[int, dict[str, torch.Tensor] | ParamCodes] = {}
    if engine.accelerator is None:
        return states
    before: list[Joining] = []
    with _raising_memory_error(engine):
        for (sections, codec, dtype, *_), new in by_kind.items():
            joining = [_joining(engine, name, part.of(p), sections, codec) for name, p, part in new]
            numels = [j.elems for j in joining]
            param_bytes = sum(j.elems * j.param_bytes for j in joining) / max(1, sum(numels))
            fraction = None
            is_near = any(j.device.type not in ("cpu", "meta") for j in joining)  # else there may be nothing to measure
            if is_near and not any(map(lacks_kernels, joining)):
                fraction = engine.accelerator_fraction(numels, sections, param_bytes, codec, dtype)
            chosen = engine.accelerator.choose(joining, fraction, before)
            for (_, p, part), j, is_chosen in zip(new, joining, chosen, strict=True):
                if is_chosen:
                    before.append(j)
                    states[id(p)] = _allocated(part.of(p), sections, j, alone=engine.truth.copies is None)
    return states


def _allocated(
    local: torch.Tensor, sections: Sequence[str], joining: Joining, *, alone: bool
) -> dict[str, torch.Tensor] | ParamCodes:
    """Return new states. `alone`: the devices have none of them."""
    if joining.codec != FP32:
        return _layout(joining.elems, sections, joining.codec, local.dtype, alone=alone).on(joining.device)
    dtype = torch.complex64 if local.is_complex() else torch.float32
    devices = [joining.device] * len(sections)
    if joining.in_place:  # the parameter is its own master
        devices[0] = torch.device("meta")
    return {n: torch.zeros_like(local, dtype=dtype, device=d) for n, d in zip(sections, devices, strict=True)}


def choose_copies(engine: Engine, param_states: Iterable[ParamState]) -> None:
    """Choose which states of a resumed store get copies on the accelerator, and allocate the copies.

    Raises what OnAccelerator.choose() raises, and CSDMemoryError.
    """
    assert engine.accelerator
    without_copy = [state for state in param_states if not state.accelerator_copy]
    codecs = [engine.tiles.extent_with(state.index).codec for state in without_copy]
    joining = [
        _joining(engine, state.name, state.part.of(state.param), state.sections, codec)
        for state, codec in zip(without_copy, codecs, strict=True)
    ]
    chosen = engine.accelerator.choose(joining)
    with _raising_memory_error(engine):
        for state, j, is_chosen in zip(without_copy, joining, chosen, strict=True):
            if is_chosen:
                set_copy(engine, state, _allocated(state.part.of(state.param), state.sections, j, alone=False))


def set_copy(engine: Engine, param_state: ParamState, copy: dict[str, torch.Tensor] | ParamCodes) -> None:
    """Make `copy` the accelerator's copy of a parameter's states."""
    assert engine.truth.copies
    if isinstance(copy, ParamCodes):
        param_state.accelerator_copy = AcceleratorCopy([], copy)
    else:
        param_state.accelerator_copy = AcceleratorCopy([flat(state) for state in copy.values()])
    engine.truth.copies.by_param[param_state.index] = param_state.accelerator_copy


def drop_copy(engine: Engine, param_state: ParamState) -> None:
    """Drop the accelerator's copy of a parameter's states, if there is one."""
    if param_state.accelerator_copy:
        assert engine.truth.copies
        del engine.truth.copies.by_param[param_state.index]
        param_state.accelerator_copy = None


def count(engine: Engine, param_states: Collection[ParamState]) -> None:
    """Tell the engine how many parameters and bytes are on the accelerator."""
    if engine.accelerator:
        there = [state for state in param_states if state.on_accelerator]
        copied = [state for state in param_states if state.accelerator_copy]
        engine.accelerator.params = sum(state.numel for state in (*there, *copied))
        before = sum(state.local.nbytes for state in there if state.codes)  # what an undo needs: see _joining()
        engine.accelerator.nbytes = engine.copies * sum(state.nbytes for state in there) + (engine.copies - 1) * before
        if engine.truth.copies:
            engine.accelerator.nbytes += engine.truth.copies.nbytes


@contextlib.contextmanager
def _raising_memory_error(engine: Engine) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as e:
        assert engine.accelerator
        message = f"{engine.accelerator.spec}: no memory for states on the accelerator: {e}"
        raise CSDMemoryError(message) from None


def _layout(numel: int, sections: Sequence[str], codec: str, dtype: torch.dtype, *, alone: bool) -> CodesLayout:
    return CodesLayout(numel, tuple(sections), codec, torch.float32 if dtype.is_complex else dtype, alone)


def _joining(engine: Engine, name: str, local: torch.Tensor, sections: Sequence[str], codec: str) -> Joining:
    is_coded, elems = codec != FP32, numel(local)
    in_place = not is_coded and engine.devices.resident and local.dtype is torch.float32 and local.is_contiguous()
    nbytes = 4 * elems * (len(sections) - in_place) * engine.copies
    if is_coded:
        alone = engine.truth.copies is None
        nbytes = _layout(elems, sections, codec, local.dtype, alone=alone).nbytes * engine.copies
        nbytes += local.nbytes * (engine.copies - 1)  # a step that can be undone keeps the parameter, too
    return Joining(
        name,
        local.device,
        elems,
        local.element_size() // (2 if local.is_complex() else 1),
        nbytes,
        in_place=in_place,
        codec=codec,
    )
