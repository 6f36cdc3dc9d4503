"""Gradients that are the sum of several: those of trainers, which the engine adds up while it updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..bindings import DTYPE_CODES, SUMMAND, isa_used, sum_up
from .strides import flat, numel


@dataclass(frozen=True, eq=False)
class Summand:
    """One of them, of all elements of what this process updates of a parameter; in host memory."""

    values: torch.Tensor  # dense, with the memory order of the state; or entries, as csd_summand has them: 1-D int32
    entries: torch.dtype | None = None  # of their values: float16 or bfloat16
    run_words: int = 0  # of entries: so many for each `run_elems` elements
    run_elems: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.entries or (torch.float32 if self.values.is_complex() else self.values.dtype)


def table_of(summands: Sequence[Summand]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """As the engine knows them (dtype SUMMAND): the tensors have to live as long as it is used."""
    rows = [(s.values.data_ptr(), DTYPE_CODES[s.dtype], s.run_words, s.run_elems) for s in summands]
    return np.array(rows, SUMMAND)


def total(summands: Sequence[Summand], like: torch.Tensor) -> torch.Tensor:
    """Their fp32 sum, in their order, with the shape and memory order of `like`, which is dense; complex if that is.

    Raises CSDValueError for entries that are malformed.
    """
    out = torch.empty_like(like, dtype=torch.complex64 if like.is_complex() else torch.float32, device="cpu")
    if numel(like):
        sum_up(table_of(summands), isa_used(), 0, flat(out))
    return out
