"""The changes from one version to a later one, tensor by tensor, for engines that take patches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .reading import Files, changes, index_of, opened, whole
from .versions import Tensor, Version, way_to

if TYPE_CHECKING:
    from typing_extensions import Self

Array = np.ndarray[Any, Any]
LARGEST = {"BF16": 0x7F80, "F16": 0x7C00}  # the bits of infinity: above them, without the sign, are NaNs


@dataclass(frozen=True)
class Patch:
    """New values of a tensor. `indices`: flat, int64, unique; None: `values` has all elements.

    `values`: 16 bits as uint16.

    With torch: torch.from_numpy(values).view(torch.bfloat16), or float16 where `dtype` is F16; or to_torch().
    `version`: the number of the version after this patch.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    indices: Array | None
    values: Array
    version: int

    @property
    def has_nan(self) -> bool:
        return bool(((self.values & 0x7FFF) > LARGEST[self.dtype]).any())

    def to_torch(self) -> dict[str, Any]:
        """Return the patch with torch's types: the fields of vLLM's CheckpointWeightPatch.

        name, shape, dtype, values (flat), indices (flat, int32 if large enough; None: `values` has all elements).
        """
        import torch

        dtype = torch.bfloat16 if self.dtype == "BF16" else torch.float16
        values = torch.from_numpy(np.ascontiguousarray(self.values).view(np.int16)).view(dtype)
        indices = None if self.indices is None else torch.from_numpy(self.indices.astype(index_dtype(self.shape)))
        return {"name": self.name, "shape": self.shape, "dtype": dtype, "values": values, "indices": indices}


def index_dtype(shape: Sequence[int]) -> np.dtype[Any]:
    """Return int32 if large enough for flat indices of this shape, otherwise int64."""
    return np.dtype("<i4" if math.prod(shape) <= 1 << 31 else "<i8")


class Patches(contextlib.ExitStack):
    """The patches along `way`, a list from way_to_newest(). A context, within which the files are open.

    `whole_if_nan`: a tensor with a NaN among its new values comes as a whole.
    """

    def __init__(self, directory: Path, way: Sequence[Version], *, whole_if_nan: bool = False) -> None:
        super().__init__()
        self._directory = directory
        self._way = way
        self._whole_if_nan = whole_if_nan
        self._files: list[Files] = []
        self._from_full: tuple[Sequence[Version], list[Files]] | None = None

    def __enter__(self) -> Self:
        """Raises CSDOSError, CSDStoreError."""
        try:
            self._files = self._open(self._way)
        except BaseException:
            self.close()
            raise
        return self

    def _open(self, way: Sequence[Version]) -> list[Files]:
        return [self.enter_context(opened(version)) for version in way]

    def of(self, tensor: Tensor) -> Patch | None:
        """Return the patch of a tensor of the last version; None if the tensor has not changed."""
        patch = _patch(tensor, self._way, self._files)
        if patch is None or patch.indices is None or not (self._whole_if_nan and patch.has_nan):
            return patch
        if self._from_full is None:
            way = way_to(self._directory, self._way[-1], None)
            self._from_full = way, self._open(way)
        return _patch(tensor, *self._from_full)


def _patch(tensor: Tensor, way: Sequence[Version], files: Sequence[Files]) -> Patch | None:
    values: Array | None = None
    indices: list[Array] = []  # of single elements, with values in `parts`
    parts: list[Array] = []
    for version, of_version in zip(way, files, strict=True):
        if version.is_full:
            values = np.zeros(tensor.numel, np.uint16)
            for first, some in whole(version, of_version, tensor):
                values[first : first + len(some)] = some
            continue
        for at, some in changes(version, of_version, index_of(version, tensor)):
            if values is not None:
                values[at] = some
            else:
                indices.append(at)
                parts.append(some)
    number = way[-1].number
    if values is None and not indices:
        return None
    if values is not None:
        return Patch(tensor.name, tensor.dtype, tensor.shape, None, values, number)
    every, new = np.concatenate(indices), np.concatenate(parts)
    if not is_ascending(every):
        every, last = np.unique(every[::-1], return_index=True)  # of equal indices, the latest counts
        new = new[::-1][last]
    return Patch(tensor.name, tensor.dtype, tensor.shape, every, new, number)


def is_ascending(indices: Array) -> bool:
    """Return whether indices are strictly ascending, as in a single version, so that they need no sorting."""
    return bool((indices[1:] > indices[:-1]).all())
