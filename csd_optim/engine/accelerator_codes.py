"""8-bit states in the memory of an accelerator: codes that native/gpu/codes.h updates there.

A parameter's codes have the sections of a tile's slot (store/sections.py), each with whole groups of 64 elements. They
are kept in one of two ways:

alone               the parameter itself is the first section, as on `ram:`, and checksums of its groups reveal values
                    that were set from outside: 3 B per 16-bit parameter, and 5/64 B
beside directories  a copy of what the tiles contain, all sections included: see accelerator_copies.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from ..bindings import decode, encode, isa_used
from ..kernels.codes import checks_of
from ..store.sections import CHECKS, GROUP, section_sizes, sections_beside_param
from .decoded_states import DecodedStates

ALIGN = 64  # bytes: each section can be loaded as vectors


@dataclass(frozen=True)
class CodesLayout:
    """The sections of one parameter's codes. `numel`: its fp32 values. `states`: their names, the master first."""

    numel: int
    states: tuple[str, ...]
    codec: str
    param_dtype: torch.dtype
    alone: bool  # the parameter itself is the first section

    @property
    def groups(self) -> int:
        return -(-self.numel // GROUP)

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """For each section, its first byte and its size in bytes."""
        sizes = sections_beside_param if self.alone else section_sizes
        places, end = {}, 0
        for name, group_bytes in sizes(self.states, self.codec, self.param_dtype):
            places[name] = end, group_bytes * self.groups
            end += -(-group_bytes * self.groups // ALIGN) * ALIGN
        return places

    @property
    def nbytes(self) -> int:
        return max((first + -(-size // ALIGN) * ALIGN for first, size in self.places.values()), default=0)

    def on(self, device: torch.device) -> ParamCodes:
        """Return new codes of states that are zero. Raises torch.OutOfMemoryError."""
        return ParamCodes(self, torch.zeros(self.nbytes, dtype=torch.uint8, device=device))


@dataclass(frozen=True, eq=False)
class ParamCodes:
    """One parameter's codes. Alone, they are complete only together with the parameter."""

    layout: CodesLayout
    memory: torch.Tensor  # uint8, 1-D

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def device(self) -> torch.device:
        return self.memory.device

    @cached_property
    def sections(self) -> dict[str, torch.Tensor]:
        """The bytes of each section by name, in the order of a slot."""
        return {name: self.memory[first : first + size] for name, (first, size) in self.layout.places.items()}

    def start(self, param: torch.Tensor) -> None:
        """Make these the codes of new states: zeros, beside the parameter `param` (1-D, on the same device).

        Checksums need no values: a group without corrections is the same with and without them.
        """
        self.memory.zero_()
        if not self.layout.alone:
            master = next(iter(self.sections.values())).view(self.layout.param_dtype)
            master[: self.layout.numel].copy_(param)

    def whole(self, param: torch.Tensor) -> list[torch.Tensor]:
        """Return the sections of a slot, on the CPU, with the parameter `param` (1-D) as the first one.

        Corrections of values that were set from outside are dropped, as the next step will do.
        """
        assert self.layout.alone
        here = replace(self, memory=self.memory.to("cpu", copy=True))
        first = torch.zeros(GROUP * self.layout.groups, dtype=self.layout.param_dtype, device="cpu")
        first[: self.layout.numel].copy_(param)
        sections = {**here.sections}
        checks = sections.pop(CHECKS, None)
        if checks is not None:
            stale = checks_of(first) != checks.numpy().view(np.uint32)
            sections["correction"].view(-1, GROUP)[torch.from_numpy(stale)] = 0
        return [first, *sections.values()]

    def encoded(self, param: torch.Tensor, states: Mapping[str, torch.Tensor]) -> tuple[ParamCodes, torch.Tensor]:
        """Return these codes on the CPU, with other values of some states (by name), and the parameter with these."""
        layout, whole = self.layout, self.whole(param)
        encode(isa_used(), [states.get(name) for name in layout.states], layout.param_dtype, whole, layout.codec)
        codes = layout.on(torch.device("cpu"))
        sections = {**codes.sections}
        checks = sections.pop(CHECKS, None)
        if checks is not None:
            checks.numpy().view(np.uint32)[:] = checks_of(whole[0])
        for section, values in zip(sections.values(), whole[1:], strict=True):
            section.copy_(values)
        return codes, whole[0][: layout.numel]


class AcceleratorCodes(DecodedStates):
    """The codes of one engine that are on accelerators alone, and their decoded states."""

    def __init__(self, check_open: Callable[[], None]) -> None:
        super().__init__()
        self._check_open = check_open
        self.by_param: dict[int, ParamCodes] = {}  # by parameter, numbered over all extents
        self._in_order: dict[int, Callable[[], torch.Tensor]] = {}  # by parameter: see relocate()

    def check_open(self) -> None:
        self._check_open()

    def _sections(self, param: int) -> Sequence[str]:
        return self.by_param[param].layout.states

    def _numel(self, param: int) -> int:
        return self.by_param[param].layout.numel

    def _decode(self, param: int, wanted: Mapping[str, torch.Tensor]) -> None:
        codes = self.by_param[param]
        layout, whole = codes.layout, codes.whole(self._in_order[param]())
        decode(isa_used(), whole, layout.param_dtype, [wanted.get(n) for n in layout.states], layout.codec)

    def relocate(
        self, param: int, in_place: torch.Tensor | None, in_order: Callable[[], torch.Tensor], *, fresh: bool
    ) -> None:
        self._in_order[param] = in_order

    def is_own_master(self, param: int) -> bool:
        return True

    def write(self, param: int) -> None:
        """Encode what was written to a parameter's states now, if that leaves the parameter as it is; else a step will.

        Drops the decoded states then.
        """
        if not (edits := self.edits(param)):
            return
        codes, now = self.by_param[param], self._in_order[param]()
        if "master" not in edits or torch.equal(edits["master"].to(now.dtype), now.cpu()):
            codes.memory.copy_(codes.encoded(now, edits)[0].memory)
            self.drop([param])

    def forget(self, param: int) -> None:
        """Drop everything about a parameter that has left."""
        self.drop([param])
        self.by_param.pop(param, None)
        self._in_order.pop(param, None)
