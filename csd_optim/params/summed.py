"""Gradients that are the sum of several trainers' gradients, which the engine adds up during the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..bindings import DTYPE_CODES, SUMMAND, isa_used, sum_up
from .strides import flat, numel


@dataclass(frozen=True, eq=False)
class Summand:
    """One gradient of such a sum, in host memory. It covers the part of a parameter that this process updates."""

    values: torch.Tensor  # dense, in the memory order of the states; or Top-K entries, see csd_summand: 1-D int32
    entries: torch.dtype | None = None  # dtype of the entries' values, float16 or bfloat16; None: dense
    run_words: int = 0  # words of entries for each `run_elems` elements
    run_elems: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.entries or (torch.float32 if self.values.is_complex() else self.values.dtype)


def table_of(summands: Sequence[Summand]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """Return the engine's table of these summands (dtype SUMMAND). Their tensors must live until it is out of use."""
    rows = [(s.values.data_ptr(), DTYPE_CODES[s.dtype], s.run_words, s.run_elems) for s in summands]
    return np.array(rows, SUMMAND)


def total(summands: Sequence[Summand], like: torch.Tensor) -> torch.Tensor:
    """Return the fp32 sum of `summands`, added in this order, with shape and memory order of `like`; complex if it is.

    `like`: a dense tensor. Raises CSDValueError for malformed entries.
    """
    out = torch.empty_like(like, dtype=torch.complex64 if like.is_complex() else torch.float32, device="cpu")
    if numel(like):
        sum_up(table_of(summands), isa_used(), 0, flat(out))
    return out
