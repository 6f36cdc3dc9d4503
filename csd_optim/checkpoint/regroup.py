"""Converts 8-bit states to a new part where the groups of 64 elements have other boundaries.

The code of a root (of exp_avg_sq) or of a momentum is relative to its group, so these are decoded, and encoded again in
the new group, rounded to nearest. All other codes belong to one element each, and are copied: `master` and the ratio of
`exp_avg` to the root keep their bits. A root keeps its value unless a much larger root joins its group, a momentum
unless a larger one does.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

import numpy as np
import torch

from ..bindings import encode, isa_used
from ..store.file import StoreFile
from ..store.reader import Tile
from ..store.sections import GROUP, GROUPED, Section, recoded_from, slot_of

FLOAT = 4  # bytes


class Regroup:
    """The decoded states of one new part that have to be encoded again, in a nameless file beside a store.

    Each state takes 4 bytes per element.
    """

    def __init__(self, numel: int, states: Sequence[str], codec: str, dtype: torch.dtype) -> None:
        """`states`, `codec`, `dtype`: of the part's extent."""
        self.numel = numel
        self._states, self._codec, self._dtype = tuple(states), codec, dtype
        self._others: list[None] = [None] * recoded_from(codec)  # states whose codes are copied
        self._moments = len(states) - len(self._others)
        self._values = torch.empty(self._moments, 0)

    @property
    def nbytes(self) -> int:
        return FLOAT * self._moments * self.numel

    def allocate(self, store: StoreFile) -> None:
        """Reserve the file beside a store. Raises CSDOSError if the disk is full."""
        if self.numel:
            with (
                store.wrapping_errors("make room for decoded states"),
                tempfile.TemporaryFile(dir=store.path.parent) as file,
            ):
                os.posix_fallocate(file.fileno(), 0, self.nbytes)
                shape = self._moments, self.numel
                self._values = torch.from_numpy(np.memmap(file, np.float32, "r+", shape=shape))

    def collect(self, tile: Tile, data: memoryview, at: int, to: int, n: int) -> None:
        """Decode elements [at, at + n) of an old tile into elements from `to` on. Any thread may call this."""
        before = at % GROUP
        moments = [torch.empty(before + n, dtype=torch.float32, device="cpu") for _ in range(self._moments)]
        tile.decode(data, at - before, [*self._others, *moments])
        for value, moment in zip(self._values, moments, strict=True):
            value[to : to + n] = moment[before:]

    def codes(self, first: int, n: int) -> list[tuple[str, memoryview]]:
        """Return the codes of elements [first, first + n) as (section, codes).

        `first`: the beginning of a group.
        """
        sections: tuple[Section, ...] = slot_of(n, self._states, self._codec, self._dtype)
        codes = [torch.zeros(section.size, dtype=torch.uint8, device="cpu") for section in sections]
        moments = [value[first : first + n].contiguous() for value in self._values]
        encode(isa_used(), [*self._others, *moments], self._dtype, codes, self._codec)
        return [
            (section.name, code.numpy().data[: section.bytes_of(n)])
            for section, code in zip(sections, codes, strict=True)
            if section.name in GROUPED
        ]
