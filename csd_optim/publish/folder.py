"""The folder of versions, as its writers see it: versions appear as a whole, and old ones go.

Each process (rank) writes a file with its share of a version, and then a description of that, `Share`, into a directory
that readers do not see. Once all are there, rank 0 writes the manifest, and gives the directory its name.
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
class Share:
    """What one of `ranks` processes has of a version: `files`, as in the manifest, which are on its disk."""

    run: str
    number: int
    step: int
    base: int | None  # number of the version from which it differs, of the same run; None: it is full
    rank: int
    ranks: int
    model: str  # the same for the same tensors
    checksums: Sequence[tuple[int, int]] = ()  # index of a tensor, and the part of its checksum for the elements here
    files: Sequence[dict[str, Any]] = ()


class Folder:
    """A folder of versions, locked against other writers until close(). Methods raise OSError.

    All ranks call begin(), add() and remove(), and rank 0 the others. The constructor raises CSDBusyError if somebody
    else publishes there, and CSDOSError.
    """

    def __init__(self, path: Path, rank: int = 0, ranks: int = 1) -> None:
        """Rank 0 makes and locks it, the others expect that it is there."""
        self.path: Path = path
        self.rank: int = rank
        self.ranks: int = ranks
        self._lock = -1 if rank else lock_folder(path, "publish in", "somebody else publishes in")

    def close(self) -> None:
        """Let others publish here. May be called again."""
        fd, self._lock = self._lock, -1
        if fd >= 0:
            os.close(fd)

    def make_mark(self) -> str:
        """Leave a mark in the folder for other ranks to find, until one is made again; return its text."""
        write_file(self.path / MARK, (text := secrets.token_hex(8)).encode(), replaces=True)
        return text

    def has_mark(self, text: str) -> bool:
        try:
            return (self.path / MARK).read_text() == text
        except FileNotFoundError:
            return False

    def newest(self) -> Version | None:
        """Return the newest version; None if there is none, or it cannot be read."""
        found = numbers(self.path)
        try:
            return read_version(self.path / directory_of(found[-1])) if found else None
        except (CSDStoreError, CSDOSError):
            return None

    def last_full(self, version: Version) -> int:
        """Return the number of the full version with which the chain to this one begins; 0 if it is not all there."""
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
        """Return the number of the next version: no other has had it, as the newest one stays."""
        return max(numbers(self.path), default=0) + 1

    # ---- one version ---------------------------------------------------------------

    def pending(self, number: int) -> Path:
        """Return the directory of a version that has no name yet."""
        return self.path / f".{directory_of(number)}.pending"

    def begin(self, number: int) -> Path:
        """Return the directory for this rank's share of a version, where it has nothing yet."""
        path = self.pending(number)
        try:
            path.mkdir()
        except FileExistsError:
            self.remove(number)
        return path

    def remove(self, number: int) -> None:
        """Remove this rank's share, such as that of a step that was undone; first what describes it."""
        described = _described(self.rank)
        for name in (described, described + ".new", self.file_of(CHANGED), self.file_of(WHOLE)):
            (self.pending(number) / name).unlink(missing_ok=True)

    def file_of(self, kind: str) -> str:
        """Return the name of this rank's file of a version. `kind`: WHOLE or CHANGED."""
        if kind == CHANGED:
            return f"{kind}-{self.rank}.bin"
        return f"{kind}-{self.rank}.safetensors" if self.ranks > 1 else f"{kind}.safetensors"

    def add(self, share: Share) -> None:
        """Add this rank's share, whose files are on the disk, and flush all of it."""
        path = self.pending(share.number) / _described(self.rank)
        write_file(new := path.with_name(path.name + ".new"), json.dumps(asdict(share)).encode(), replaces=True)
        rename(new, path)
        sync(self.path)

    def shares(self, number: int) -> list[Share]:
        """Return the shares of all ranks, by rank. Raises CSDStoreError if they are not all there, or do not match.

        They are looked up by name: of another machine, a listing of the directory may be out of date.
        """
        found: list[Share] = []
        while not found or len(found) < found[0].ranks:
            try:
                described = json.loads((self.pending(number) / _described(len(found))).read_bytes())
            except FileNotFoundError as e:
                raise CSDStoreError(f"version {number} is not complete: it lacks the share of rank {len(found)}") from e
            checksums = tuple((index, checksum) for index, checksum in described.pop("checksums"))
            found.append(Share(**described, checksums=checksums))
        if len({(s.run, s.number, s.step, s.base, s.ranks) for s in found}) > 1 or found[0].number != number:
            raise CSDStoreError(f"the shares of version {number} are of different steps")
        return found

    def complete(self) -> Iterator[list[Share]]:
        """Yield the shares of each complete version that has no name yet."""
        for path in sorted(self.path.iterdir()):
            if match := PENDING.fullmatch(path.name):
                with contextlib.suppress(CSDStoreError, ValueError, KeyError, TypeError):
                    yield self.shares(int(match[1]))

    def name(self, shares: Sequence[Share], base: Version | None, tensors: Sequence[Tensor]) -> Version:
        """Let readers see a version of which all shares are there: it appears as a whole.

        `base`: the version from which it differs; None: it is full. `tensors`: as of with_checksums().
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
        """Remove what has no name, of all versions or of those up to number `last`."""
        for path in [*self.path.iterdir()]:
            match = PENDING.fullmatch(path.name)
            if path.name.startswith(".v") and (last is None or (match and int(match[1]) <= last)):
                shutil.rmtree(path, ignore_errors=True)

    # ---- old versions --------------------------------------------------------------

    def retire(self, keep: int, last_full: int) -> None:
        """Remove all versions but the `keep` newest, and those from `last_full` on, which a new reader needs."""
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
    """Return the tensors with their checksums, the sums of these parts: index of the tensor, part of its checksum."""
    sums = [0] * len(tensors)
    for index, part in parts:
        sums[index] += part
    return [replace(tensor, checksum=total % (1 << 32)) for tensor, total in zip(tensors, sums, strict=True)]


def manifest_of(
    run: str, number: int, step: int, base: Version | None, tensors: Sequence[Tensor], files: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the manifest of a version. `base`: the version from which it differs; None: it is full."""
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
