"""Finds stores, reads stores that no optimizer uses, and copies stores (snapshots).

Data goes tile by tile through a few buffers, whatever the size of the model. A copy appears as a whole or not at all.
Tiles that were never written (holes in a sparse file) are neither read nor written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import math
import os
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path

from ..devices.spec import parse_devices
from ..engine.commit.commit import Pin
from ..engine.commit.durable import DurableCommitter
from ..engine.engine import Engine
from ..errors import CSDOSError, CSDRuntimeError, CSDStoreError, CSDWarning
from ..files import appears, check_free_space, opened
from ..store.file import StoreFile
from ..store.format import CLEAN, FILE_NAME, PAGE, Contents, read_commits, read_region
from ..store.reader import Residual, Tick, Tile, each_tile, stored_bytes, total_bytes
from ..store.recovery import common_commit
from .files import Output, Progress, no_progress

FICLONE = 0x40049409  # ioctl: makes the file a reflink copy of another file
NO_REFLINK = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM)
PAUSE = 0.002  # seconds: interval at which a copy checks whether the step in flight is over

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


# ---- reading stores ----------------------------------------------------------------


def directories(paths: Paths) -> list[Path]:
    """Return the directories of all devices in `paths`: stores, named by their directory or file, and snapshots.

    A snapshot of several ranks has the directories of all ranks that were saved there.
    """
    found: list[Path] = []
    for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
        place = Path(path).expanduser()
        if place.is_dir() and not (place / FILE_NAME).exists():
            names = f"device-*/{FILE_NAME}", f"rank-*/device-*/{FILE_NAME}"
            inside = [file.parent for name in names for file in place.glob(name)]
            found += sorted(inside, key=lambda d: (len(d.parts), *((len(n), n) for n in d.parts))) or [place]
        elif place.is_dir():
            found.append(place)
        elif place.name == FILE_NAME:
            found.append(place.parent)
        else:
            raise CSDOSError(errno.ENOENT, f"there is no store in {place}: name its directory, or that of a snapshot")
    return found


@contextlib.contextmanager
def stores_at_rest(paths: Paths) -> Iterator[list[StoreFile]]:
    """Open stores for reading, locked against writers. Raises CSDBusyError, CSDStoreError, CSDOSError."""
    with contextlib.ExitStack() as stack:
        stores = []
        for spec in parse_devices(directories(paths)):
            stores.append(StoreFile(spec.directory, durable=True, mode="read"))
            stack.callback(stores[-1].close)
        yield stores


def last_step(stores: Sequence[StoreFile]) -> list[Contents]:
    """Return, by device, the contents of an optimizer's stores at the last step that all have. Raises CSDStoreError."""
    if not (recovered := common_commit(stores)):
        raise CSDStoreError(f"{stores[0].path} holds no step yet")
    return sorted(recovered, key=lambda c: c.superblock.device)


# ---- snapshots ---------------------------------------------------------------------


class Snapshot:
    """A copy of the stores of one optimizer, each in a directory `device-0`, `device-1` ... of `path`.

    Call the constructor while nothing is written to the stores; then `finish()`, once, while nothing that belongs to
    the commit is overwritten. Without reflinks, `finish()` copies the tiles.
    """

    def __init__(self, recovered: list[Contents], path: Path) -> None:
        self.to_copy: list[Contents] = []
        self._outputs: dict[str, Output] = {}  # by the path of the original store
        self._headers: list[tuple[str, int, bytes]] = []  # (path of the original store, offset, data) of manifests etc.
        store_id = _id_of_copy(recovered[0])
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(appears(path, replaces=False))
            directory.mkdir()
            for d, contents in enumerate(recovered):
                (directory / f"device-{d}").mkdir()
                output = stack.enter_context(Output(directory / f"device-{d}" / FILE_NAME, 0))
                self._outputs[contents.path] = output
                block = replace(contents.superblock, store_id=store_id, flags=CLEAN)
                with opened(Path(contents.path)) as fd:
                    if not _cloned(output.fd, fd):
                        self.to_copy.append(contents)
                    os.ftruncate(output.fd, contents.end)
                    for what, region in (("manifest", block.manifest), ("slot table", block.table)):
                        data = read_region(fd, region, contents.copy, what, contents.path)
                        self._headers += [(contents.path, region.offset(copy), data) for copy in range(2)]
                self._headers += [(contents.path, copy * PAGE, block.pack()) for copy in range(2)]
            check_free_space(directory, sum(map(stored_bytes, self.to_copy)))
            self._stack = stack.pop_all()

    def finish(self, *, gate: Callable[[], None] = lambda: None, tick: Tick = lambda _: None) -> None:
        """Complete the copy. Raises CSDStoreError if a tile is damaged, CSDOSError; nothing is left then.

        `gate` is called before each tile and may block.
        """

        def copy(tile: Tile, data: memoryview | None) -> None:
            if data is not None:
                self._outputs[tile.contents.path].write(data, tile.offset)

        def copy_residual(residual: Residual, first: int, data: memoryview) -> None:
            self._outputs[residual.contents.path].write(data, residual.offset + first)

        with self._stack:
            each_tile(self.to_copy, copy, copy_residual, gate=gate, tick=tick)
            for store, offset, data in self._headers:
                self._outputs[store].write(data, offset)


def _id_of_copy(contents: Contents) -> bytes:
    """Return a new store id, as store and copy diverge from now on. All ranks derive the same id for their copies."""
    block = contents.superblock
    if contents.world_size == 1:
        return secrets.token_bytes(16)
    return hashlib.sha256(block.store_id + block.round.to_bytes(8, "little")).digest()[:16]


def _cloned(to: int, source: int) -> bool:
    try:
        fcntl.ioctl(to, FICLONE, source)
    except OSError as e:
        if e.errno in NO_REFLINK:
            return False
        raise
    return True


def snapshot(paths: Paths, path: Path, progress: Progress = no_progress) -> None:
    """Make a snapshot at `path` of stores that no optimizer uses."""
    with stores_at_rest(paths) as stores:
        recovered = last_step(stores)
        made = Snapshot(recovered, path)
        with progress("copying", total_bytes(made.to_copy)) as tick:
            made.finish(tick=tick)


@dataclass(frozen=True)
class Saving:
    """A snapshot in progress, of stores in use."""

    future: Future[Path]
    give_up: threading.Event

    def wait(self) -> None:
        """Return once the snapshot is complete, or raise its error. If interrupted, cancel it: nothing is left."""
        try:
            self.future.result()
        except BaseException:
            self.give_up.set()
            wait([self.future])
            raise


def save(engine: Engine, path: Path, progress: Progress, *, wait: bool) -> Saving:
    """Begin a snapshot of everything in the engine. The caller holds the engine's lock.

    `wait`: the caller will wait for the snapshot; if not, a failure also becomes a warning.

    Raises CSDRuntimeError, CSDStoreExistsError, CSDOSError before anything is made.
    """
    # States on gpu: are in the directories, too.
    specs = engine.devices.specs if engine.durable else engine.devices.named
    if temporary := [str(spec) for spec in specs if not spec.durable]:
        raise CSDRuntimeError(
            f"{temporary[0]} keeps its state for this process only, and there is no store to copy; "
            "name directories as devices, or use state_dict()"
        )
    committer = engine.committer
    if engine.stepping:
        raise CSDRuntimeError("a step is under way: save() when it has returned")
    engine.states.check_whole()
    if not (engine.tiles.n_params or engine.states.committed_step):  # a rank may have no parameters
        raise CSDRuntimeError("there is no state to save yet: save() goes after the first step()")
    if (elsewhere := committer.begin_save(path)) is not None:
        return Saving(elsewhere, threading.Event())
    assert isinstance(committer, DurableCommitter)
    if committer.ranks:
        try:
            path.mkdir(exist_ok=True)
        except OSError as e:
            raise CSDOSError(e.errno, f"cannot make {path}: {e.strerror}") from e
        path = path / f"rank-{committer.ranks.rank}"
    committer.flush()
    recovered = []  # the contents of the commit
    for store in filter(None, committer.devices.stores):
        with store.wrapping_errors("read"):
            recovered.append(read_commits(store.fd, str(store.path))[0])
    made = Snapshot(recovered, path)
    give_up = threading.Event()
    done: Future[Path] = Future()
    # The step after the next is the first to overwrite the slots being copied.
    sequence = recovered[0].superblock.sequence if made.to_copy else math.inf
    pin = Pin(sequence, done)

    def gate() -> None:
        # Leave the drive to training while a step is in flight, unless a step is waiting for this copy.
        while engine.stepping and not (pin.hurry.is_set() or give_up.is_set()):
            pin.hurry.wait(PAUSE)
        if give_up.is_set():
            raise CSDRuntimeError(f"saving {path} was given up; nothing of it is left")

    def work() -> None:
        try:
            with progress(f"saving {path}", total_bytes(made.to_copy)) as tick:
                made.finish(gate=gate, tick=tick)
            done.set_result(path)
        except BaseException as e:
            try:
                if not wait:
                    warnings.warn(f"{path} was not saved: {e}", CSDWarning, stacklevel=1)
            finally:
                done.set_exception(e)

    committer.pins.add(pin)
    try:
        threading.Thread(target=work, name=f"csd_optim save {path}").start()
    except RuntimeError:  # the interpreter is shutting down and starts no more threads
        work()
    return Saving(done, give_up)
