"""What steps change, recorded by their updates, and put together for a version."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..bindings import Changes, Watch, encode_changes
from ..engine.tiles import Pieces, Tiles
from ..replica.blocks import BLOCK

Array = np.ndarray[Any, Any]
GROUP = 64  # elements that share a check, see csd_watch


class Recording:
    """Records of all steps since the last version, in an unnamed file: they take no memory beyond the page cache."""

    def __init__(self, directory: Path) -> None:
        """`directory`: where there is room for 2 bytes per parameter. Raises OSError."""
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        self._changes = Changes(self._file.fileno())
        self._mark = 0  # the records before the step under way

    def watch(self, number: int, tiles: Tiles, row: int, *, checked: bool) -> Watch:
        """Return a Watch of the parameter with this row, whose records get this number. `checked`: see csd_watch."""
        pieces = Pieces(tiles).of(row)
        inside = (pieces["tile_first"] % GROUP + pieces["elems"] + GROUP - 1) // GROUP
        groups = np.concatenate([np.zeros(1, np.uint64), np.cumsum(inside, dtype=np.uint64)])
        return Watch(self._changes, number, int(pieces["tile"][0]), groups if checked else None)

    def begin(self, *, anew: bool) -> None:
        """Begin a step. `anew`: nothing that was recorded before counts."""
        self._mark = 0 if anew else self._changes.count
        self._changes.rewind(self._mark)

    def undo(self) -> None:
        """Drop what the step under way has recorded."""
        self._changes.rewind(self._mark)

    def clear(self) -> None:
        """Drop all records, and give their space back."""
        self._changes.rewind(0)
        self._mark = 0
        self._file.truncate(0)

    def check(self) -> None:
        """Raise CSDOSError if something could not be recorded."""
        self._changes.list()

    def close(self) -> None:
        self._changes.free()
        self._file.close()

    def blocks(self, sizes: list[int]) -> Iterator[Block]:
        """Yield the blocks in which something has changed, by tensor and then by element.

        `sizes`: the elements of each tensor, by the number of its watch.
        """
        records = self._changes.list()
        first, last = records["first"] // BLOCK, (records["first"] + records["elems"] - 1) // BLOCK
        which = np.arange(len(records))
        touched = np.concatenate([which, which[last > first]])
        blocks = np.concatenate([first, last[last > first]])
        order = np.lexsort((touched, blocks, records["param"][touched]))  # in a block, in the order of the steps
        touched, blocks = touched[order], blocks[order]
        params = records["param"][touched]
        begins = np.flatnonzero(np.diff(params, prepend=-1) | np.diff(blocks.astype(np.int64), prepend=-1))
        mask, values = np.zeros(BLOCK // 64, np.uint64), np.zeros(BLOCK, np.uint16)
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(touched)], strict=True):
            number, at = int(params[begin]), int(blocks[begin]) * BLOCK
            n = min(BLOCK, sizes[number] - at)
            mask[:] = 0
            self._changes.merge(np.ascontiguousarray(records[touched[begin:end]]), at, mask, values[:n])
            yield Block(number, at, mask[: -(-n // 64)], values[:n])


class Block:
    """The changed elements of a block of tensor `number`, which begins at element `first`; until the next one is made.

    `values`: uint16, undefined where nothing has changed.
    """

    def __init__(self, number: int, first: int, mask: Array, values: Array) -> None:
        self.number: int = number
        self.first: int = first
        self.values: Array = values
        self._mask = mask

    @property
    def is_whole(self) -> bool:
        """Whether all of its elements have changed."""
        return int(sum(int(word).bit_count() for word in self._mask)) == len(self.values)

    def encode(self, payload: Array) -> tuple[int, int, int]:
        """See encode_changes()."""
        return encode_changes(self._mask, self.values, payload)
