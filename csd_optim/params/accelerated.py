"""Chooses the parameters with states, or copies of states, on the accelerator, and allocates the tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..distributed.sharding import Partition
from ..engine.accelerator_copies import AcceleratorCopy
from ..engine.engine import Engine
from ..engine.placing.on_accelerator import Joining
from ..errors import CSDMemoryError
from ..store.sections import FP32
from .param_state import ParamState
from .strides import flat, numel

# Parameters grouped by the kind of their states: (names of the sections, codec, dtype, rule) → (name, parameter, part).
ByKind = dict[tuple[Any, ...], list[tuple[str, torch.Tensor, Partition]]]


def choose(engine: Engine, by_kind: ByKind) -> dict[int, dict[str, torch.Tensor]]:
    """Choose new parameters whose states go on the accelerator, and allocate the states.

    Returns, by id of the parameter, the states by name. Raises CSDMemoryError, and what OnAccelerator.choose() raises,
    before anything is touched.
    """
    states: dict[int, dict[str, torch.Tensor]] = {}
    if engine.accelerator is None:
        return states
    before: list[Joining] = []
    with _raising_memory_error(engine):
        for (sections, codec, *_), new in by_kind.items():
            joining = [_joining(engine, name, part.of(p), sections, codec != FP32) for name, p, part in new]
            numels = [j.elems for j in joining]
            param_bytes = sum(j.elems * j.param_bytes for j in joining) / max(1, sum(numels))
            fraction = engine.accelerator_fraction(numels, sections, param_bytes) if codec == FP32 else None
            chosen = engine.accelerator.choose(joining, fraction, before)
            for (_, p, part), j, is_chosen in zip(new, joining, chosen, strict=True):
                if is_chosen:
                    before.append(j)
                    states[id(p)] = _allocated(part.of(p), sections, j)
    return states


def _allocated(local: torch.Tensor, sections: Sequence[str], joining: Joining) -> dict[str, torch.Tensor]:
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
    joining = [
        _joining(engine, state.name, state.part.of(state.param), state.sections, state.is_coded)
        for state in without_copy
    ]
    chosen = engine.accelerator.choose(joining)
    with _raising_memory_error(engine):
        for state, is_chosen in zip(without_copy, chosen, strict=True):
            if is_chosen:
                device = state.part.of(state.param).device
                copy = [torch.empty(state.numel, dtype=torch.float32, device=device) for _ in state.sections]
                set_copy(engine, state, copy)


def set_copy(engine: Engine, param_state: ParamState, copy: Iterable[torch.Tensor]) -> None:
    """Make `copy` the accelerator's copy of a parameter's states."""
    assert engine.truth.copies
    param_state.accelerator_copy = AcceleratorCopy([flat(state) for state in copy])
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
        engine.accelerator.nbytes = engine.copies * sum(state.nbytes for state in there)
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


def _joining(engine: Engine, name: str, local: torch.Tensor, sections: Sequence[str], is_coded: bool) -> Joining:
    in_place = engine.devices.resident and local.dtype is torch.float32 and local.is_contiguous()
    return Joining(
        name,
        local.device,
        numel(local),
        local.element_size() // (2 if local.is_complex() else 1),
        4 * numel(local) * (len(sections) - in_place) * engine.copies,
        in_place=in_place,
        is_coded=is_coded,
    )
