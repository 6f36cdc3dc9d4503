"""Where new stores go: what is there already, and whether there is room. Nothing is written or created here."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..devices.spec import DeviceSpec, parse_devices
from ..errors import CSDOSError, CSDStoreExistsError, CSDValueError
from ..store.file import StoreFile
from ..store.format import FILE_NAME, Contents
from .files import check_free_space


def specs_of_ranks(names: Sequence[str], size: int) -> list[list[DeviceSpec]]:
    """Return the devices of each rank. `names`: with {rank} and {world_size}, each perhaps several, with commas.

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
            if spec.directory is None or not spec.durable:
                raise CSDValueError(f"{spec} keeps nothing; name a directory for the store")
            if (other := found.setdefault(spec.directory.resolve(), rank)) != rank:
                raise CSDValueError(
                    f"Invalid devices: {spec} is named for rank {other} and rank {rank}; write {{rank}} where their "
                    "names differ"
                )
    return specs


def are_made(specs: Sequence[Sequence[DeviceSpec]], old: Sequence[Contents], origin: dict[str, Any]) -> bool:
    """Return whether all new stores are there already, made from `origin` and not trained with since.

    False: there is nothing, or what an attempt left that was stopped, which may be overwritten. Raises
    CSDStoreExistsError for anything else, CSDValueError for an old store, CSDBusyError, CSDStoreError.
    """
    old_places = {Path(contents.path).resolve() for contents in old}
    ids: set[bytes] = set()
    is_missing = False
    for rank, of_rank in enumerate(specs):
        for spec in of_rank:
            assert spec.directory is not None
            file = spec.directory.resolve() / FILE_NAME
            if file in old_places:
                raise CSDValueError(f"Invalid devices: {spec} is one of the old stores, which are only read")
            contents = _first_commit(file)
            if contents is None:
                is_missing = True
                continue
            block = contents.superblock
            same_rank = (contents.rank, contents.world_size) == (rank, len(specs))
            if block.sequence > 1 or contents.origin != origin or not same_rank:
                raise CSDStoreExistsError(
                    errno.EEXIST,
                    f"{file} holds a store of step {block.step}, and nothing is overwritten; name another directory",
                )
            is_missing |= block.devices != len(of_rank)
            ids.add(block.store_id)
    return not is_missing and len(ids) == 1


def _first_commit(file: Path) -> Contents | None:
    """Return the newest commit of a store; None if there is no store, or it was never committed."""
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
    """Raise CSDOSError if some file system has not enough room. `places`: devices and the bytes that each will take."""
    needed: dict[int, tuple[Path, int]] = {}  # by file system
    for spec, size in places:
        assert spec.directory is not None
        directory = spec.directory.resolve()
        existing = directory if directory.exists() else directory.parent
        system = os.stat(existing).st_dev
        file = directory / FILE_NAME
        freed = file.stat().st_blocks * 512 if file.exists() else 0  # of an attempt that was stopped
        where, total = needed.get(system, (existing, 0))
        needed[system] = where, total + size - freed
    for where, total in needed.values():
        check_free_space(where, total)
