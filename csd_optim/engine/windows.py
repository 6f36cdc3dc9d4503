"""The windows: tensors that are memory-mapped onto states. truth.py says when writes to windows take effect."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from itertools import chain
from typing import Any

import torch

from ..store.layout import Extent
from .tiles import Tiles


class Windows:
    """The windows of one engine: a tensor per parameter and section, fp32, mapped onto a slot of the states.

    Writes are noticed by torch's version counters of all tensors that were handed out. Tiles of codes have no windows:
    see decoded.py.
    """

    def __init__(self, tiles: Tiles) -> None:
        self.are_watched: bool = False  # writes have to be noticed, as slots of commits must not change
        self._tiles = tiles
        self._buffers: list[list[Any]] = []  # per extent and section: a buffer that unmaps itself
        self._handed_out: list[tuple[int, torch.Tensor]] = []  # parameter and window, for all windows handed out
        self._known_versions: list[int] = []  # the windows' versions at the last note_known()

    def add(self, buffers: list[Any]) -> None:
        """Add the windows of an extent: see Native.extend()."""
        self._buffers.append(buffers)

    def window(self, extent: Extent, param: int, section: int, dtype: torch.dtype) -> torch.Tensor:
        """Return one state of one parameter: 1-D, fp32, or complex64 over the same bytes.

        `param`: numbered within the extent. Reading the tensor reads the device; for writes see Truth.
        """
        n, start = extent.numels[param], extent.starts[param]
        buffers = self._buffers[self._tiles.extents.index(extent)] if n else []
        count = n // 2 if dtype.is_complex else n
        if buffers:
            window = torch.frombuffer(buffers[section], dtype=dtype, count=count, offset=4 * start)
        else:  # no elements, or freed
            window = torch.empty(count, dtype=dtype, device="meta" if n else "cpu")
        self.watch(extent.first_param + param, window)
        return window

    def watch(self, param: int, tensor: torch.Tensor) -> None:
        """Watch the version counter of a tensor through which the user may write to a parameter's windows."""
        if self.are_watched:
            self._handed_out.append((param, tensor))
            self._known_versions.append(tensor._version)

    def forget(self, params: Collection[int]) -> None:
        """Stop watching the windows of these parameters."""
        kept = [
            (handed, known)
            for handed, known in zip(self._handed_out, self._known_versions, strict=True)
            if handed[0] not in params
        ]
        self._handed_out, self._known_versions = [h for h, _ in kept], [k for _, k in kept]

    def drop(self, extent: int) -> None:
        """Unmap the windows of an extent whose tiles are all freed, once no tensor refers to them."""
        self._buffers[extent] = []

    def keep_alive(self, keeper: object) -> None:
        """Keep `keeper` alive as long as any window is alive."""
        for buffer in chain.from_iterable(self._buffers):
            weakref.finalize(buffer, id, keeper).atexit = False

    @property
    def are_written(self) -> bool:
        """Whether windows were written since note_known()."""
        return self.versions() != self._known_versions

    def written_at(self, versions: list[int]) -> list[int]:
        """Return the parameters whose windows were written since note_known(), up to these versions."""
        known = self._known_versions
        if versions == known:  # the usual case
            return []
        changes = zip(self._handed_out, versions, known, strict=True)
        return [param for (param, _), now, then in changes if now != then]

    def note_known(self, versions: list[int]) -> None:
        """Note that writes up to these versions have been dealt with."""
        self._known_versions = versions

    def versions(self) -> list[int]:
        """Return torch's count of writes to each window that was handed out."""
        return [window._version for _, window in self._handed_out]
