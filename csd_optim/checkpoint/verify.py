"""Verification of everything in a store that has a checksum."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..devices.spec import parse_devices
from ..errors import CSDStoreError
from ..files import opened, read
from ..store.file import StoreFile
from ..store.format import FILE_NAME, PAGE, UNDER_WAY, Contents, Superblock, read_region
from ..store.reader import find_damage, total_bytes
from ..store.recovery import common_commit
from .files import Progress, no_progress
from .snapshot import Paths, directories


@dataclass
class Verdict:
    """The result for one store."""

    file: str
    device: int | None = None
    devices: int | None = None
    step: int | None = None
    tiles: int = 0  # tiles in use; not those of parameters that have left the optimizer
    unchecked: int = 0  # number of these without a valid checksum, because they were written from outside
    damage: list[str] = field(default_factory=list)

    def describe(self, newest: Contents) -> None:
        block, named = newest.superblock, newest.are_named()
        self.device, self.devices, self.step, self.tiles = block.device, block.devices, block.step, int(named.sum())
        self.unchecked = int((newest.tiles["summed"][named] != 1).sum())


def verify(paths: Paths, progress: Progress = no_progress) -> list[Verdict]:
    """Check everything that has a checksum. Raises CSDBusyError while a store is in use, CSDOSError."""
    specs = parse_devices(directories(paths))
    verdicts: list[Verdict] = []
    stores: list[StoreFile] = []
    to_check: list[tuple[Verdict, Contents]] = []
    with contextlib.ExitStack() as stack:
        for spec in specs:
            assert spec.directory is not None
            file = spec.directory.resolve() / FILE_NAME
            verdicts.append(verdict := Verdict(str(file)))
            problem = f"{file} holds no step: the optimizer that made it was stopped before its first commit"
            try:
                store = StoreFile(spec.directory, durable=True, mode="read")
                stack.callback(store.close)
                if store.recovered:
                    problem = ""
                    stores.append(store)
                    verdict.describe(store.recovered[0])
                    # With one slot per tile (see layout.SLOTS), the previous step is overwritten.
                    undoable = all(extent["slots"] == 2 for extent in store.recovered[0].manifest["extents"])
                    recovered = store.recovered if undoable else store.recovered[:1]
                    to_check += [(verdict, contents) for contents in recovered]
            except CSDStoreError as e:
                problem = str(e)
            verdict.damage += _damaged_copies(file) or ([problem] if problem else [])
        with progress("verifying", total_bytes(c for _, c in to_check)) as tick:
            for verdict, contents in to_check:
                verdict.damage += map(str, find_damage([contents], tick=tick))
        if len(stores) == len(specs):
            for verdict, problem in _without_common_step(verdicts, stores):
                verdict.damage.append(problem)
    return verdicts


def _damaged_copies(file: Path) -> list[str]:
    """Return messages about damaged copies of superblock, manifest and slot table."""
    damaged: list[list[str]] = [[], []]
    with opened(file) as fd:
        pages = [read(fd, PAGE, copy * PAGE) for copy in range(2)]
        blocks = [Superblock.unpack(page, str(file)) for page in pages]
        for copy, block in enumerate(blocks):
            if copy == 1 and blocks[0] and blocks[0].round and blocks[0].sequence == 1 and not any(pages[1]):
                continue  # the ranks have not confirmed their first commit yet
            if block is None:
                damaged[copy].append("superblock")
                continue
            for what, region in (("manifest", block.manifest), ("slot table", block.table)):
                try:
                    read_region(fd, region, copy, what, str(file))
                except CSDStoreError:
                    damaged[copy].append(what)
    advice = "" if all(damaged) else "; the other copy is whole, and resume=True repairs this one"
    return [f"{file}: copy {copy} of the {what} is damaged{advice}" for copy in range(2) for what in damaged[copy]]


def _without_common_step(verdicts: list[Verdict], stores: list[StoreFile]) -> Iterator[tuple[Verdict, str]]:
    """Yield verdict and problem of each optimizer whose devices lack a common step, or are not all there.

    A single device may be verified alone.
    """
    by_id: dict[tuple[bytes, int], list[tuple[Verdict, StoreFile]]] = {}
    for verdict, store in zip(verdicts, stores, strict=True):
        recovered = store.recovered[0]
        by_id.setdefault((recovered.superblock.store_id, recovered.rank), []).append((verdict, store))
    for members in by_id.values():
        block = members[0][1].recovered[0].superblock
        if len(stores) == 1 < block.devices and not block.flags & UNDER_WAY:
            continue
        try:
            common_commit([s for _, s in members])
        except CSDStoreError as e:
            yield members[0][0], str(e)
