"""States in 8-bit codes whose groups of 64 elements are others in a new part than they were in the old one.

The code of a root is relative to its group's exponent. So it is decoded, and encoded again in its new group, rounded to
nearest, as is a momentum. All other codes belong to one element each, and are copied: `master` and the ratio of
`exp_avg` to the root keep their bits. A root keeps its value unless a much larger one has joined its group, a momentum
unless a larger one has.
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
    """The states of one new part that are encoded again, decoded, in a nameless file beside a store.

    They take 4 bytes per element each.
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
        """Reserve the file beside a store. Raises CSDOSError: the disk is full."""
        if self.numel:
            with (
                store.wrapping_errors("make room for decoded states"),
                tempfile.TemporaryFile(dir=store.path.parent) as file,
            ):
                os.posix_fallocate(file.fileno(), 0, self.nbytes)
                shape = self._moments, self.numel
                self._values = torch.from_numpy(np.memmap(file, np.float32, "r+", shape=shape))

    def collect(self, tile: Tile, data: memoryview, at: int, to: int, n: int) -> None:
        """Decode elements [at, at + n) of an old tile, which are those from `to` on here. Any thread may call it."""
        before = at % GROUP
        moments = [torch.empty(before + n, dtype=torch.float32, device="cpu") for _ in range(self._moments)]
        tile.decode(data, at - before, [*self._others, *moments])
        for value, moment in zip(self._values, moments, strict=True):
            value[to : to + n] = moment[before:]

    def codes(self, first: int, n: int) -> list[tuple[str, memoryview]]:
        """Return the codes of elements [first, first + n), by the section that they belong to.

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
