"""The content of a version's files: blocks of changed elements, whole tensors, and checksums (docs/publish-format.md).

Values are 16 bits, as NumPy's uint16: NumPy has no bfloat16, and only bits are compared.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CSDOSError, CSDStoreError
from ..files import read, sha256_of
from .versions import File, Tensor

Array = np.ndarray[Any, Any]

MAGIC = b"CSDDELT1"
BLOCK = 1 << 16  # elements of a block; the last one of a slice may have fewer
HEADER = struct.Struct("<8sIIQQ32x")  # magic, number of rows, 0, offset of the table, step
ROW = np.dtype(
    [("slice", "<u4"), ("count", "<u4"), ("first", "<u8"), ("elems", "<u4"), ("kind", "<u4"), ("payload", "<u8")]
)
SPARSE, BITMAP, DENSE = range(3)
ALIGN = 8  # of payloads, in bytes
CHUNK = 1 << 20  # elements or bytes processed at a time

_ODD = np.uint32(0x9E3779B1)


def weights(indices: Array) -> Array:
    """Return the weights of a tensor's elements in its checksum, uint32."""
    found: Array = ((indices.astype(np.uint32) + np.uint32(1)) * _ODD) | np.uint32(1)
    return found


def checksum(values: Array, first: int = 0) -> int:
    """Return the checksum of a tensor, or the part for elements from `first` on: the sum of value times weight.

    Modulo 2^32: so a tensor's checksum is the sum of its parts' checksums, and can be updated when elements change.
    """
    total = 0
    for i in range(0, len(values), CHUNK):
        some = values[i : i + CHUNK]
        at = np.arange(first + i, first + i + len(some), dtype=np.uint64)
        total += int((some.astype(np.uint32) * weights(at)).sum(dtype=np.uint32))
    return total % (1 << 32)


def change_of_checksum(indices: Array, before: Array, after: Array) -> int:
    """Return the change of a checksum when these elements (uint16) change."""
    difference = after.astype(np.uint32) - before.astype(np.uint32)
    return int((difference * weights(indices)).sum(dtype=np.uint32))


class Reader:
    """An open file of a version, with its SHA-256 verified. Readable even if the version is removed meanwhile."""

    def __init__(self, file: File) -> None:
        """Raises CSDOSError, or CSDStoreError if the file is damaged."""
        self.path: Path = file.path
        with self._wrapping_errors():
            self._fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._verify(file)
        except BaseException:
            self.close()
            raise

    def _verify(self, file: File) -> None:
        with self._wrapping_errors():
            found = sha256_of(self._fd)
        if found != (file.nbytes, file.sha256):
            raise CSDStoreError(f"{self.path} is damaged: it has not the SHA-256 that its manifest says")

    @contextlib.contextmanager
    def _wrapping_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise CSDOSError(e.errno, f"cannot read {self.path}: {e.strerror}") from e

    def read(self, n: int, at: int) -> bytes:
        """Return `n` bytes from byte `at` on. Raises CSDStoreError if the file ends too early, CSDOSError."""
        with self._wrapping_errors():
            data = read(self._fd, n, at)
        if len(data) < n:
            raise CSDStoreError(f"{self.path} ends too early")
        return data

    def close(self) -> None:
        os.close(self._fd)


class DeltaFile(Reader):
    """A file of blocks of changed elements. `rows`: an entry (dtype ROW) per block, by slice and then by element."""

    def __init__(self, file: File) -> None:
        super().__init__(file)
        self.slices: tuple[tuple[int, int, int], ...] = file.slices
        try:
            magic, n, _, table, _ = HEADER.unpack(self.read(HEADER.size, 0))
            if magic != MAGIC:
                raise CSDStoreError(f"{self.path} is no file of changed elements")
            self.rows: Array = np.frombuffer(self.read(n * ROW.itemsize, table), ROW)
            if n and int(self.rows["slice"].max()) >= len(self.slices):
                raise CSDStoreError(f"{self.path} has blocks of slices that its manifest does not name")
        except BaseException:
            self.close()
            raise
        self._begins = np.searchsorted(self.rows["slice"], np.arange(len(self.slices) + 1))

    def changes(self, slice: int) -> Iterator[tuple[Array, Array]]:
        """Yield a slice's changed elements, in parts: indices in the tensor (int64, ascending), values (uint16)."""
        first_of_slice, elems_of_slice = self.slices[slice][1:]
        indices: list[Array] = []
        values: list[Array] = []
        for row in self.rows[self._begins[slice] : self._begins[slice + 1]]:
            first, elems = int(row["first"]), int(row["elems"])
            if elems > BLOCK or first + elems > elems_of_slice:
                raise CSDStoreError(f"{self.path} has a block that is no part of its slice")
            inside, bits = self._block(int(row["kind"]), int(row["count"]), elems, int(row["payload"]))
            indices.append(inside + (first_of_slice + first))
            values.append(bits)
            if sum(map(len, values)) >= CHUNK:
                yield np.concatenate(indices), np.concatenate(values)
                indices, values = [], []
        if indices:
            yield np.concatenate(indices), np.concatenate(values)

    def _block(self, kind: int, count: int, elems: int, at: int) -> tuple[Array, Array]:
        """Return (indices in the block (int64), values) of a block's changed elements."""
        if kind == SPARSE:
            entries = np.frombuffer(self.read(4 * count, at), "<u4")
            inside, values = (entries & 0xFFFF).astype(np.int64), (entries >> 16).astype(np.uint16)
        elif kind == BITMAP:
            n = -(-elems // 64) * 8
            bits = np.unpackbits(np.frombuffer(self.read(n, at), np.uint8), bitorder="little")
            inside, values = np.flatnonzero(bits), np.frombuffer(self.read(2 * count, at + n), "<u2")
        elif kind == DENSE:
            inside, values = np.arange(elems), np.frombuffer(self.read(2 * elems, at), "<u2")
        else:
            raise CSDStoreError(f"{self.path} has a block of kind {kind}, which this program does not know")
        if len(inside) != len(values) or (len(inside) and int(inside[-1]) >= elems) or (np.diff(inside) <= 0).any():
            raise CSDStoreError(f"{self.path} has a block that contradicts itself")
        return inside, values


class TensorFile(Reader):
    """A safetensors file of whole tensors, or of some of their rows, as in `slices`."""

    def __init__(self, file: File) -> None:
        super().__init__(file)
        self.slices: tuple[tuple[int, int, int], ...] = file.slices
        try:
            _, self._at = parse_tensors(self)
        except BaseException:
            self.close()
            raise

    def values(self, tensor: Tensor) -> Iterator[tuple[int, Array]]:
        """Yield the values of a tensor (uint16) in parts, each with the index of its first element.

        Raises CSDStoreError if the file has no such tensor.
        """
        yield from read_values(self, tensor, self._at)

    def rows(self, tensor: Tensor, first: int, n: int) -> Iterator[tuple[int, Array]]:
        """As values(), for `n` elements of a tensor from `first` on, which the file has under the tensor's name."""
        shape = self._at.get(tensor.name, ("", [], 0))[1]
        if math.prod(shape) != n:
            raise CSDStoreError(f"{self.path} has not the {n} elements of {tensor.name} that its manifest says")
        for i, values in read_values(self, replace(tensor, shape=tuple(shape)), self._at):
            yield first + i, values


def read_values(file: Reader, tensor: Tensor, at: dict[str, tuple[str, list[int], int]]) -> Iterator[tuple[int, Array]]:
    """As TensorFile.values(). `at`: from parse_tensors()."""
    dtype, shape, begin = at.get(tensor.name, ("", [], 0))
    if (dtype, tuple(shape)) != (tensor.dtype, tensor.shape):
        raise CSDStoreError(f"{file.path} has no tensor {tensor.name} of dtype {tensor.dtype}, shape {tensor.shape}")
    for first in range(0, tensor.numel, CHUNK):
        n = min(CHUNK, tensor.numel - first)
        yield first, np.frombuffer(file.read(2 * n, begin + 2 * first), "<u2")


def parse_tensors(file: Reader) -> tuple[dict[str, str], dict[str, tuple[str, list[int], int]]]:
    """Return the metadata of a safetensors file, and by tensor its dtype, shape and offset in the file."""
    try:
        size = int.from_bytes(file.read(8, 0), "little")
        if size > 1 << 30:
            raise ValueError("its header is too long")
        header = json.loads(file.read(size, 8))
        metadata = header.pop("__metadata__", {})
        at = {name: (t["dtype"], t["shape"], 8 + size + t["data_offsets"][0]) for name, t in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CSDStoreError(f"{file.path} is no safetensors file: {e}") from e
    return metadata, at


def header_of(tensors: Sequence[Tensor], metadata: dict[str, str]) -> bytes:
    """Return the header of a safetensors file with the data of these tensors in order, without gaps."""
    entries = [(t.name, t.dtype, t.shape, 2 * t.numel) for t in tensors]
    return safetensors_header(entries, {"format": "pt", **metadata})


def safetensors_header(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: dict[str, str]) -> bytes:
    """Return the header of a safetensors file. `tensors`: the name, dtype, shape and bytes of each."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        begin, end = end, end + nbytes
        entries[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header
