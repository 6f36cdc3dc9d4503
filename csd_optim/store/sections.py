"""The sections of a tile's slot: their names, places and sizes. For the native engine see native/src/layout.h.

With fp32 states each state is a section. Codes (native/include/codec.h) are stored as

    parameter, correction    the 16-bit parameter, and the master's difference from it. For fp32 parameters: master
    ratio                    codec `8bit`: exp_avg, divided by the square root of exp_avg_sq
    root, exponent           codec `8bit`: that square root; each group of 64 elements shares an exponent.
                             Codec `root`: the square root of the only state, a second moment
    linear, exponent         codec `linear`: the only state, a momentum, in units of a power of two that a group shares
    peak, peak exponent      codec `8bit`, with amsgrad: the same for max_exp_avg_sq
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..bindings import CODECS

PAGE = 4096  # each section begins on a page
GROUP = 64  # elements that share an exponent
CHECKS, CHECK_BYTES = "checks", 4  # see sections_beside_param()
FP32, EIGHT_BIT, ROOT, LINEAR = CODECS
STATE_DTYPES = (FP32, EIGHT_BIT)  # the user's choices; the codec of 8-bit states depends on the rule
# The codec of each rule's 8-bit states; all other rules have fp32 states only.
CODEC_OF_RULE: Mapping[str, str] = {
    "adamw": EIGHT_BIT,
    "adam": EIGHT_BIT,
    "adagrad": ROOT,
    "rmsprop": ROOT,
    "muon": LINEAR,
}
# Sections whose codes are relative to their group.
GROUPED = ("linear", "root", "exponent", "peak", "peak exponent")
SECTIONS = ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")  # AdamW's states; without amsgrad the first three
PARAM_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}  # supported by codes


class Section(NamedTuple):
    name: str
    group_bytes: int  # bytes of 64 elements
    first: int  # byte of the slot at which it begins
    size: int  # bytes, including the zeros up to the next page

    def at(self, elem: int) -> int:
        """Return the byte of the slot at which an element begins.

        In GROUPED sections only for the first element of a group.
        """
        return self.first + elem * self.group_bytes // GROUP

    def bytes_of(self, n: int) -> int:
        """Return the bytes of `n` elements. In GROUPED sections the first element must begin a group."""
        return -(-n * self.group_bytes // GROUP)


def section_sizes(states: Sequence[str], codec: str, param_dtype: torch.dtype | None) -> list[tuple[str, int]]:
    """Return the name of each section, and its bytes per 64 elements."""
    if codec == FP32:
        return [(name, 4 * GROUP) for name in states]
    wide = param_dtype == torch.float32
    master = [("master", 4 * GROUP)] if wide else [("parameter", 2 * GROUP), ("correction", GROUP)]
    moments = [("ratio", GROUP)] * (codec == EIGHT_BIT)
    moments += [("linear" if codec == LINEAR else "root", GROUP), ("exponent", 1)]
    peak = [("peak", GROUP), ("peak exponent", 1)] if len(states) > 3 else []
    return master + moments + peak


def sections_beside_param(states: Sequence[str], codec: str, param_dtype: torch.dtype | None) -> list[tuple[str, int]]:
    """Return what section_sizes() returns for codes in memory whose first section is the parameter itself.

    The section `checks` has a checksum of each group of a 16-bit parameter, which reveals values set from outside.
    """
    sizes = section_sizes(states, codec, param_dtype)[1:]
    return sizes if param_dtype == torch.float32 else [*sizes, (CHECKS, CHECK_BYTES)]


@lru_cache
def slot_of(
    elems: int, states: tuple[str, ...], codec: str = FP32, param_dtype: torch.dtype | None = None
) -> tuple[Section, ...]:
    """Return the sections of a slot of a tile of `elems` elements with these states. `param_dtype`: only with codes."""
    found: list[Section] = []
    for name, group_bytes in section_sizes(states, codec, param_dtype):
        size = -(-elems * group_bytes // (GROUP * PAGE)) * PAGE
        found.append(Section(name, group_bytes, size_of(found), size))
    return tuple(found)


def sections_of(extent: Mapping[str, Any]) -> tuple[Section, ...]:
    """Return the sections of a slot of an extent, as described in a manifest."""
    param_dtype = PARAM_DTYPES.get(extent.get("param_dtype", ""))
    return slot_of(extent["tile_elems"], tuple(extent["sections"]), extent.get("codec", FP32), param_dtype)


def size_of(sections: Sequence[Section]) -> int:
    """Return the bytes of a slot with these sections."""
    return sections[-1].first + sections[-1].size if sections else 0


def elem_bytes(states: Sequence[str], codec: str = FP32, param_dtype: torch.dtype | None = None) -> float:
    """Return the bytes of an element in a slot, without the padding of sections."""
    return sum(group_bytes for _, group_bytes in section_sizes(states, codec, param_dtype)) / GROUP


def codec_supports(codec: str, states: Iterable[str], param_dtype: object) -> bool:
    """Return whether a codec exists and supports these states and this parameter dtype."""
    if codec == FP32:
        return param_dtype is None
    names = tuple(states)
    supported = names in (SECTIONS[:3], SECTIONS) if codec == EIGHT_BIT else len(names) == 2
    return codec in CODECS and supported and param_dtype in PARAM_DTYPES.values()


def codec_of(state_dtype: str, states: Sequence[str]) -> str:
    """Return a codec with the same bytes as these states with `state_dtype`, for a rule with codes."""
    return state_dtype if state_dtype == FP32 or len(states) > 2 else ROOT


def state_dtype_of(codec: str) -> str:
    """Return the state_dtype of states with this codec."""
    return FP32 if codec == FP32 else EIGHT_BIT


def recoded_from(codec: str) -> int:
    """Return the index, counted from the master, of the first state with codes relative to their group (GROUPED)."""
    return SECTIONS.index("exp_avg_sq") if codec == EIGHT_BIT else 1
