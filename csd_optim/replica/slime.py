"""Directories `weight_vNNNNNN` as slime, miles and SGLang's /pull_weights read them (docs/publish.md)."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CSDOSError, CSDStoreError, CSDValueError
from ..files import appears
from . import zstd
from .blocks import header_of, safetensors_header
from .converted import Converted, VersionKey, key_in, locked, metadata_of, retire
from .patches import is_ascending
from .reading import opened, retried
from .replica import Arrays, apply
from .versions import Tensor, Version, directory_of, read_version, way_to, way_to_newest

Array = np.ndarray[Any, Any]

NAME = re.compile(r"weight_v(\d{6,})")
FULL, DELTA, INDEX = "model.safetensors", "model-00000-of-00001.safetensors", "model.safetensors.index.json"
LARGEST = 1 << 31  # elements of a tensor whose bytes can be numbered with 32 bits
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}


class Follower:
    """Keeps the directories in `out` at the newest version of a folder. Takes the memory of all weights.

    `base`: the directory of a checkpoint, such as the initial checkpoint of the training. Its files other than weights
    (config.json, the tokenizer's) are copied into each full version, because receivers replace their whole checkpoint
    by a full version. The constructor raises CSDValueError if `base` is no directory.
    """

    def __init__(self, directory: Path, out: Path, base: Path | None = None) -> None:
        if base and not base.is_dir():
            raise CSDValueError(f"{base} is no directory of a checkpoint")
        self._directory = directory
        self._out = out
        self._base = base
        self._have: Version | None = None  # version of the weights in memory
        self._written: VersionKey | None = None  # version of the newest directory; `_weights` knows the differences
        self._weights = Weights()

    def follow(self) -> tuple[Path, Version] | None:
        """Write the directory that leads to the newest version.

        Returns (directory, version); None without a newer version.

        The new directory is full if the versions do not continue from the newest directory, or all weights take less
        space than the changes. With a new full directory, all before the previous full one are removed.

        Raises CSDBusyError, CSDOSError, CSDStoreError.
        """
        with locked(self._out):
            existing = _existing(self._out)
            written = _key_of(existing[-1]) if existing else None
            if written is None or written != self._written:  # new, or another process has written here
                self._begin_with(written)
            version = retried(self._directory, self._apply)
            if version.key == written:
                return None
            number = int(existing[-1].name.removeprefix("weight_v")) + 1 if existing else 1
            path = self._out / f"weight_v{number:06d}"
            is_full = self._write(path, version, number)
            self._written = version.key
            self._weights.forget_changes()
            if is_full:
                retire(existing, is_full_directory)
            return path, version

    def _begin_with(self, written: VersionKey | None) -> None:
        """Load the weights of the newest directory's version, if the folder still has it."""
        self._have, self._written, self._weights = None, written, Weights()
        if written is None:
            return
        try:
            version = read_version(self._directory / directory_of(written[0]))
            if version.key == written:
                self._take(way_to(self._directory, version, None))
                self._weights.forget_changes()
        except (CSDOSError, CSDStoreError):  # the version is gone: the next directory is full
            self._have, self._weights = None, Weights()

    def _apply(self) -> Version:
        """Bring the weights in memory to the newest version, and return it."""
        self._take(way_to_newest(self._directory, self._have.key if self._have else None))
        assert self._have is not None
        return self._have

    def _take(self, way: list[Version]) -> None:
        for version in way:
            with opened(version) as files:
                self._weights.prepare(version.tensors)
                before, self._have = self._have, None
                apply(version, files, before, self._weights)
            self._have = version

    def _write(self, path: Path, version: Version, number: int) -> bool:
        """Write a directory. Returns whether it is full."""
        delta = None if self._weights.is_whole else self._delta(version)
        with appears(path, replaces=True) as temporary:
            temporary.mkdir()
            if delta is None:
                self._write_full(temporary, version)
            else:
                _write_delta(temporary, version, number, delta)
        return delta is None

    def _delta(self, version: Version) -> dict[str, tuple[bytes, str]] | None:
        """Return (frame, checksum) of each changed tensor; None if all weights take less space."""
        found, left = {}, sum(2 * t.numel for t in version.tensors)
        for tensor in version.tensors:
            indices, before = self._weights.changed(tensor)
            if not len(indices):
                continue
            values = self._weights.arrays[tensor.name]
            frame = zstd.frame(overwrite(indices, before, values[indices])) if len(values) <= LARGEST else b""
            left -= len(frame)
            if not frame or left < 0:
                return None
            found[tensor.name] = frame, f"{zlib.adler32(values.data):08x}"
        return found

    def _write_full(self, path: Path, version: Version) -> None:
        for file in self._base.iterdir() if self._base else ():
            if file.is_file() and file.suffix not in WEIGHTS and not file.name.endswith(".index.json"):
                shutil.copyfile(file, path / file.name)
        with open(path / FULL, "wb") as to:
            to.write(header_of(version.tensors, metadata_of(version)))
            for tensor in version.tensors:
                to.write(self._weights.arrays[tensor.name].data)


class Weights(Arrays):
    """All weights; and the elements that changed since forget_changes(), with their values then."""

    def __init__(self) -> None:
        super().__init__({})
        self.is_whole: bool = True  # everything has changed
        self._changes: dict[str, list[tuple[Array, Array]]] = {}

    def forget_changes(self) -> None:
        self.is_whole = False
        self._changes.clear()

    def exchange(self, tensor: Tensor, indices: Array, values: Array) -> Array:
        before = super().exchange(tensor, indices, values)
        differ = before != values
        self._changes.setdefault(tensor.name, []).append((indices[differ], before[differ]))
        return before

    def set(self, tensor: Tensor, first: int, values: Array) -> None:
        super().set(tensor, first, values)
        self.is_whole = True

    def changed(self, tensor: Tensor) -> tuple[Array, Array]:
        """Return (indices, values at forget_changes()) of a tensor's elements that have changed at some time."""
        changes = self._changes.get(tensor.name)
        if not changes:
            return np.zeros(0, np.int64), np.zeros(0, np.uint16)
        indices, before = (np.concatenate(parts) for parts in zip(*changes, strict=True))
        if not is_ascending(indices):
            indices, first = np.unique(indices, return_index=True)
            before = before[first]
        return indices, before


def overwrite(indices: Array, before: Array, after: Array) -> bytes:
    """Return the encoding "overwrite": the number of differing bytes, their positions (32 bits each), the bytes."""
    new = np.ascontiguousarray(after).view(np.uint8)
    differ = new != np.ascontiguousarray(before).view(np.uint8)
    positions = (2 * indices[:, None] + np.arange(2)).reshape(-1)[differ].astype("<u4")
    return b"".join((len(positions).to_bytes(4, "little"), positions.tobytes(), new[differ].tobytes()))


def _write_delta(path: Path, version: Version, number: int, delta: dict[str, tuple[bytes, str]]) -> None:
    if delta:
        entries = [(name, "U8", [len(frame)], len(frame)) for name, (frame, _) in delta.items()]
        with open(path / DELTA, "wb") as to:
            to.write(safetensors_header(entries, {name: checksum for name, (_, checksum) in delta.items()}))
            for frame, _ in delta.values():
                to.write(frame)
    metadata = {
        "version": f"{number:06d}",
        "base_version": f"{number - 1:06d}",
        "delta_encoding": "overwrite",
        "compression_format": "zstd",
        "checksum_format": "adler32",
        **metadata_of(version),
    }
    index = {"metadata": metadata, "weight_map": dict.fromkeys(delta, DELTA)}
    (path / INDEX).write_text(json.dumps(index))


def is_full_directory(path: Path) -> bool:
    return (path / FULL).exists()


def _existing(out: Path) -> list[Path]:
    """Return the directories in `out`, by number."""
    found = [(int(match[1]), path) for path in out.iterdir() if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _key_of(path: Path) -> VersionKey | None:
    """Return the version named in a directory; None if there is none, as in a directory of another program."""
    if is_full_directory(path):
        with Converted(path / FULL) as file:
            return file.have
    try:
        metadata = json.loads((path / INDEX).read_bytes())["metadata"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return key_in(metadata)
