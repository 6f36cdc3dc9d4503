"""The folder of versions, for its writers: versions appear as a whole, and old versions are removed.

Each process (rank) writes a file with its share of a version, and then a description of the share, `VersionShare`, into
a directory that readers ignore. Once all shares are there, rank 0 writes the manifest and names the directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import CSDOSError, CSDStoreError
from ..files import lock_folder, rename, sync, write_file
from ..replica.versions import FORMAT, MANIFEST, Tensor, Version, directory_of, numbers, read_version

PENDING = re.compile(r"\.v(\d{10,})\.pending")
MARK = ".mark"
WHOLE, CHANGED = "model", "delta"  # files of whole tensors, and of changed elements


@dataclass(frozen=True)
class VersionShare:
    """The share of one of `ranks` processes in a version. `files`: on the disk, as in the manifest."""

    run: str
    number: int
    step: int
    base: int | None  # number of the base version, in the same run; None for a full version
    rank: int
    ranks: int
    model: str  # a digest of all tensors' names, dtypes and shapes
    checksums: Sequence[tuple[int, int]] = ()  # (index of a tensor, sum over this share's elements)
    files: Sequence[dict[str, Any]] = ()


class Folder:
    """A folder of versions, locked against other writers until close(). Methods raise OSError.

    All ranks call begin(), add() and remove(); only rank 0 calls the other methods. The constructor raises CSDBusyError
    if another process publishes there, and CSDOSError.
    """

    def __init__(self, path: Path, rank: int = 0, ranks: int = 1) -> None:
        """Rank 0 makes and locks the folder; other ranks expect it to exist."""
        self.path: Path = path
        self.rank: int = rank
        self.ranks: int = ranks
        self._lock = -1 if rank else lock_folder(path, "publish in", "somebody else publishes in")

    def close(self) -> None:
        """Let other processes publish here. Idempotent."""
        fd, self._lock = self._lock, -1
        if fd >= 0:
            os.close(fd)

    def make_mark(self) -> str:
        """Write a mark into the folder for other ranks to find, and return its text. Replaces the previous mark."""
        write_file(self.path / MARK, (text := secrets.token_hex(8)).encode(), replaces=True)
        return text

    def has_mark(self, text: str) -> bool:
        try:
            return (self.path / MARK).read_text() == text
        except FileNotFoundError:
            return False

    def newest(self) -> Version | None:
        """Return the newest version, or None if no version can be read."""
        found = numbers(self.path)
        try:
            return read_version(self.path / directory_of(found[-1])) if found else None
        except (CSDStoreError, CSDOSError):
            return None

    def last_full(self, version: Version) -> int:
        """Return the number of the full version at the start of this version's chain; 0 if the chain has gaps."""
        try:
            while version.base:
                number, id = version.base
                version = read_version(self.path / directory_of(number))
                if version.id != id:
                    return 0
        except (CSDStoreError, CSDOSError):
            return 0
        return version.number

    def next_number(self) -> int:
        """Return the number of the next version. Never used before, because the newest version is never removed."""
        return max(numbers(self.path), default=0) + 1

    # ---- one version ---------------------------------------------------------------

    def pending(self, number: int) -> Path:
        """Return the directory of a version that has no name yet."""
        return self.path / f".{directory_of(number)}.pending"

    def begin(self, number: int) -> Path:
        """Return the directory for this rank's share of a version, without old files of this rank."""
        path = self.pending(number)
        try:
            path.mkdir()
        except FileExistsError:
            self.remove(number)
        return path

    def remove(self, number: int) -> None:
        """Remove this rank's share, for example after an undone step. Removes the description first."""
        described = _described(self.rank)
        for name in (described, described + ".new", self.file_of(CHANGED), self.file_of(WHOLE)):
            (self.pending(number) / name).unlink(missing_ok=True)

    def file_of(self, kind: str) -> str:
        """Return the name of this rank's file of a version. `kind`: WHOLE or CHANGED."""
        if kind == CHANGED:
            return f"{kind}-{self.rank}.bin"
        return f"{kind}-{self.rank}.safetensors" if self.ranks > 1 else f"{kind}.safetensors"

    def add(self, share: VersionShare) -> None:
        """Add the description of this rank's share, whose files are on the disk, and flush it."""
        path = self.pending(share.number) / _described(self.rank)
        write_file(new := path.with_name(path.name + ".new"), json.dumps(asdict(share)).encode(), replaces=True)
        rename(new, path)
        sync(self.path)

    def shares(self, number: int) -> list[VersionShare]:
        """Return the shares of all ranks, by rank. Raises CSDStoreError if a share is missing or does not match.

        Looks shares up by name: on a network file system a listing of the directory may be out of date.
        """
        found: list[VersionShare] = []
        while not found or len(found) < found[0].ranks:
            try:
                described = json.loads((self.pending(number) / _described(len(found))).read_bytes())
            except FileNotFoundError as e:
                raise CSDStoreError(f"version {number} is not complete: it lacks the share of rank {len(found)}") from e
            checksums = tuple((index, checksum) for index, checksum in described.pop("checksums"))
            found.append(VersionShare(**described, checksums=checksums))
        if len({(s.run, s.number, s.step, s.base, s.ranks) for s in found}) > 1 or found[0].number != number:
            raise CSDStoreError(f"the shares of version {number} are of different steps")
        return found

    def complete(self) -> Iterator[list[VersionShare]]:
        """Yield the shares of each complete version that has no name yet."""
        for path in sorted(self.path.iterdir()):
            if match := PENDING.fullmatch(path.name):
                with contextlib.suppress(CSDStoreError, ValueError, KeyError, TypeError):
                    yield self.shares(int(match[1]))

    def name(self, shares: Sequence[VersionShare], base: Version | None, tensors: Sequence[Tensor]) -> Version:
        """Let readers see a complete version, which appears as a whole.

        `base`: the base version; None for a full version. `tensors`: see with_checksums().
        """
        number, step = shares[0].number, shares[0].step
        pending, path = self.pending(number), self.path / directory_of(number)
        files = [file for share in shares for file in share.files]
        manifest = manifest_of(shares[0].run, number, step, base, tensors, files)
        write_file(pending / MANIFEST, json.dumps({"format": FORMAT, **manifest}).encode(), replaces=True)
        sync(pending)
        rename(pending, path)
        for share in shares:
            with contextlib.suppress(OSError):
                (path / _described(share.rank)).unlink()
        return read_version(path)

    def discard(self, last: int | None = None) -> None:
        """Remove unnamed versions: all, or those up to number `last`. Leaves what cannot be removed now."""
        with contextlib.suppress(OSError):
            for path in [*self.path.iterdir()]:
                match = PENDING.fullmatch(path.name)
                if path.name.startswith(".v") and (last is None or (match and int(match[1]) <= last)):
                    shutil.rmtree(path, ignore_errors=True)

    # ---- old versions --------------------------------------------------------------

    def retire(self, keep: int, last_full: int) -> None:
        """Remove old versions. Keeps the `keep` newest, and all from `last_full` on, which a new reader needs."""
        found = numbers(self.path)
        for number in found[: max(0, len(found) - keep)]:
            if number >= last_full:
                break
            gone = self.path / f".{directory_of(number)}.gone"
            with contextlib.suppress(FileNotFoundError):
                (self.path / directory_of(number)).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _described(rank: int) -> str:
    return f".share-{rank}.json"


def with_checksums(tensors: Sequence[Tensor], parts: Iterable[tuple[int, int]]) -> list[Tensor]:
    """Return the tensors with checksums, by adding up `parts`: (index of a tensor, part of its checksum)."""
    sums = [0] * len(tensors)
    for index, part in parts:
        sums[index] += part
    return [replace(tensor, checksum=total % (1 << 32)) for tensor, total in zip(tensors, sums, strict=True)]


def manifest_of(
    run: str, number: int, step: int, base: Version | None, tensors: Sequence[Tensor], files: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the manifest of a version. `base`: the base version; None for a full version."""
    return {
        "run": run,
        "number": number,
        "step": step,
        "base": base and {"number": base.number, "id": base.id},
        "tensors": [_entry(t) for t in tensors],
        "files": [*files],
    }


def _entry(t: Tensor) -> dict[str, Any]:
    entry = {"name": t.name, "dtype": t.dtype, "shape": [*t.shape], "checksum": t.checksum}
    return {**entry, "aliases": [*t.aliases]} if t.aliases else entry
