"""What is in a slot of a tile, and where: asked by all who read or make room. native/src/layout.h tells the engine.

With fp32 states each is a section. With the codec `8bit` (native/include/codec.h) AdamW's states are kept as

    parameter, correction    the master: the 16-bit parameter and what it is away from it. Of fp32 parameters: master
    ratio                    exp_avg, over the root of exp_avg_sq
    root, exponent           that root; a group of 64 elements has an exponent
    peak, peak exponent      the same of max_exp_avg_sq, with amsgrad
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..bindings import CODECS

PAGE = 4096  # each section begins on one
GROUP = 64  # elements that share an exponent
FP32, EIGHT_BIT = CODECS
SECTIONS = ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")  # AdamW's states: all of them, or the first three
PARAM_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}  # that have codes


class Section(NamedTuple):
    name: str
    group_bytes: int  # of 64 elements
    first: int  # byte of the slot
    size: int  # bytes, with the zeros up to the next page

    def at(self, elem: int) -> int:
        """Byte of the slot at which an element begins. In codes it is the first of a group."""
        return self.first + elem * self.group_bytes // GROUP


def _kinds(states: Sequence[str], codec: str, param_dtype: torch.dtype | None) -> list[tuple[str, int]]:
    """Of each section its name, and the bytes of 64 elements."""
    if codec == FP32:
        return [(name, 4 * GROUP) for name in states]
    wide = param_dtype == torch.float32
    master = [("master", 4 * GROUP)] if wide else [("parameter", 2 * GROUP), ("correction", GROUP)]
    moments = [("ratio", GROUP), ("root", GROUP), ("exponent", 1)]
    peak = [("peak", GROUP), ("peak exponent", 1)] if len(states) > 3 else []
    return master + moments + peak


@lru_cache
def slot_of(
    elems: int, states: tuple[str, ...], codec: str = FP32, param_dtype: torch.dtype | None = None
) -> tuple[Section, ...]:
    """The sections of a slot of a tile of `elems` elements with these states. `param_dtype`: of codes."""
    found: list[Section] = []
    for name, group_bytes in _kinds(states, codec, param_dtype):
        size = -(-elems * group_bytes // (GROUP * PAGE)) * PAGE
        found.append(Section(name, group_bytes, size_of(found), size))
    return tuple(found)


def sections_of(extent: Mapping[str, Any]) -> tuple[Section, ...]:
    """The same, of an extent as a manifest has it."""
    param_dtype = PARAM_DTYPES.get(extent.get("param_dtype", ""))
    return slot_of(extent["tile_elems"], tuple(extent["sections"]), extent.get("codec", FP32), param_dtype)


def size_of(sections: Sequence[Section]) -> int:
    """Bytes of a slot that has them."""
    return sections[-1].first + sections[-1].size if sections else 0


def elem_bytes(states: Sequence[str], codec: str = FP32, param_dtype: torch.dtype | None = None) -> float:
    """What an element takes in a slot, without what sections are padded with."""
    return sum(group_bytes for _, group_bytes in _kinds(states, codec, param_dtype)) / GROUP


def takes(codec: str, states: Iterable[str], param_dtype: object) -> bool:
    """Is there such a codec, for these states, of parameters of this dtype? It is AdamW's."""
    if codec == FP32:
        return param_dtype is None
    return codec in CODECS and tuple(states) in (SECTIONS[:3], SECTIONS) and param_dtype in PARAM_DTYPES.values()
