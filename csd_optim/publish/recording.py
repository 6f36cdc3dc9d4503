"""Records of the elements that steps change, written by updates, and combined for a version."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..bindings import BLOCK as BLOCK_ROW
from ..bindings import Changes, Watch
from ..engine.tiles import Tiles
from ..replica.blocks import BLOCK

Array = np.ndarray[Any, Any]
GROUP = 64  # elements per check, see csd_watch
BLOCKS = 32  # encoded at a time


class Recording:
    """Records of all steps since the last version, in an unnamed file, so that they take only page cache."""

    def __init__(self, directory: Path) -> None:
        """`directory`: with room for 2 bytes per parameter. Raises OSError."""
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        self._changes = Changes(self._file.fileno())
        self._mark = 0  # number of records before the step under way

    def watch(self, number: int, first: int, tiles: Tiles, row: int, *, checked: bool) -> Watch:
        """Return a Watch of the parameter with this row. `number`: identifies the parameter in records.

        `first`: see Watch. `checked`: see csd_watch.
        """
        pieces = tiles.by_param.of(row)
        inside = (pieces["tile_first"] % GROUP + pieces["elems"] + GROUP - 1) // GROUP
        groups = np.concatenate([np.zeros(1, np.uint64), np.cumsum(inside, dtype=np.uint64)])
        return Watch(self._changes, number, first, int(pieces["tile"][0]), groups if checked else None)

    def begin(self, *, anew: bool) -> None:
        """Begin a step. `anew`: drop all earlier records."""
        self._mark = 0 if anew else self._changes.count
        self._changes.rewind(self._mark)

    def undo(self) -> None:
        """Drop the records of the step under way."""
        self._changes.rewind(self._mark)

    def clear(self) -> None:
        """Drop all records, and give their space back."""
        self._changes.rewind(0)
        self._mark = 0
        self._file.truncate(0)

    def check(self) -> None:
        """Raise CSDOSError if a record could not be written."""
        self._changes.list()

    def close(self) -> None:
        self._changes.free()
        self._file.close()

    def encoded(self, runs: Sequence[tuple[int, int]], without: Sequence[int] = ()) -> Iterator[Encoded]:
        """Yield the changed blocks, some at a time, ordered by tensor and element.

        `runs`: by number of a watch, the tensor's first element in this process, from which blocks count, and the
        number of elements here. `without`: numbers of tensors to leave out.
        """
        records = self._changes.list()
        records = records[~np.isin(records["param"], [*without])]
        firsts, elems = np.array(runs, np.uint64).reshape(-1, 2).T
        records["first"] -= firsts[records["param"]]
        first, last = records["first"] // BLOCK, (records["first"] + records["elems"] - 1) // BLOCK
        touched = np.concatenate([np.arange(len(records)), np.flatnonzero(last > first)])
        at = np.concatenate([first, last[last > first]])
        order = np.lexsort((touched, at, records["param"][touched]))  # within a block by step
        touched, at, numbers = touched[order], at[order], records["param"][touched[order]].astype(np.int64)
        is_first = np.ones(len(at), bool)
        is_first[1:] = (np.diff(numbers) != 0) | (at[1:] != at[:-1])
        begins = np.flatnonzero(is_first)
        payload = np.empty(BLOCKS * (2 * BLOCK + BLOCK // 8 + 16), np.uint8)
        for i in range(0, len(begins), BLOCKS):
            some = begins[i : i + BLOCKS]
            end = begins[i + BLOCKS] if i + BLOCKS < len(begins) else len(at)
            blocks = np.zeros(len(some), BLOCK_ROW)
            blocks["first"], blocks["record"] = at[some] * BLOCK, some - some[0]
            blocks["elems"] = np.minimum(BLOCK, elems[numbers[some]] - blocks["first"])
            used = self._changes.encode(records[touched[some[0] : end]], blocks, payload)
            yield Encoded(numbers[some], blocks, payload[:used])


class Encoded(NamedTuple):
    """Blocks in the format of a version. Valid until the next blocks are made."""

    numbers: Array  # numbers of the blocks' tensors
    blocks: Array  # dtype BLOCK of bindings.py
    payload: Array  # uint8
