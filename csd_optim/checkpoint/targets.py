"""Checks of the places for new stores: existing stores, and room. Nothing is written or created here."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeGuard

from ..devices.spec import DeviceSpec, parse_devices
from ..errors import CSDOSError, CSDValueError
from ..files import check_free_space
from ..store.file import StoreFile
from ..store.format import FILE_NAME, Contents


def specs_of_ranks(names: Sequence[str], size: int) -> list[list[DeviceSpec]]:
    """Return the devices of each rank. `names`: with {rank} and {world_size}; each may be several, separated by commas.

    Raises CSDValueError.
    """
    texts = [text for name in names for text in name.split(",")]
    specs = [
        parse_devices([t.replace("{rank}", str(rank)).replace("{world_size}", str(size)) for t in texts])
        for rank in range(size)
    ]
    found: dict[Path, int] = {}
    for rank, of_rank in enumerate(specs):
        for spec in of_rank:
            if (other := found.setdefault(directory_of(spec).resolve(), rank)) != rank:
                raise CSDValueError(
                    f"Invalid devices: {spec} is named for rank {other} and rank {rank}; write {{rank}} where their "
                    "names differ"
                )
    return specs


def commits_at(specs: Sequence[DeviceSpec], old: Collection[Path]) -> list[Contents | None]:
    """Return the newest commit at each device of a new rank; None without a store, or before its first commit.

    `old`: the old stores' directories, resolved. Raises CSDValueError for a device in an old store's directory, or
    without a directory; CSDStoreExistsError, CSDBusyError, CSDStoreError, CSDOSError.
    """
    found = []
    for spec in specs:
        directory = directory_of(spec).resolve()
        if directory in old:
            raise CSDValueError(f"Invalid devices: {spec} is one of the old stores, which are only read")
        found.append(_newest_commit(directory / FILE_NAME))
    return found


def is_complete(commits: Sequence[Contents | None]) -> TypeGuard[Sequence[Contents]]:
    """Return whether `commits` belong to one optimizer, and are the commits of all its devices."""
    blocks = [c.superblock for c in commits if c]
    return len(blocks) == len(commits) and {(b.store_id, b.devices) for b in blocks} == {
        (blocks[0].store_id, len(commits))
    }


def directory_of(spec: DeviceSpec) -> Path:
    """Return the directory of a device. Raises CSDValueError if the device keeps nothing in a directory."""
    if spec.directory is None or not spec.durable:
        raise CSDValueError(f"{spec} keeps nothing; name a directory for the store")
    return spec.directory


def _newest_commit(file: Path) -> Contents | None:
    """Return the newest commit of a store; None without a store, or before its first commit."""
    directory = file.parent
    if not file.exists():
        if directory.exists() and not directory.is_dir():
            raise CSDOSError(errno.ENOTDIR, f"{directory} is a file; a device is a directory")
        if not directory.parent.is_dir():
            raise CSDOSError(errno.ENOENT, f"there is no directory {directory.parent} to make {directory.name} in")
        return None
    if not file.stat().st_size:
        return None
    store = StoreFile(directory, durable=True, mode="resume")  # raises for a file that is no store
    try:
        return store.recovered[0] if store.recovered else None
    finally:
        store.close()


def check_room(places: Sequence[tuple[DeviceSpec, int]]) -> None:
    """Raise CSDOSError if some file system lacks room. `places`: devices, and bytes on each."""
    needed: dict[int, tuple[Path, int]] = {}  # by file system
    for spec, size in places:
        directory = directory_of(spec).resolve()
        existing = directory if directory.exists() else directory.parent
        system = os.stat(existing).st_dev
        file = directory / FILE_NAME
        freed = file.stat().st_blocks * 512 if file.exists() else 0  # by a stopped attempt
        where, total = needed.get(system, (existing, 0))
        needed[system] = where, total + size - freed
    for where, total in needed.values():
        check_free_space(where, total)
