"""Whole stores: found, read at rest, copied.

Everything goes tile by tile through a few buffers, whatever the size of the model. A copy is there as a whole or not at
all. What nobody ever wrote (a hole of a sparse file) is neither read nor written.
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
from ..engine.commit import Pin
from ..engine.durable import DurableCommitter
from ..engine.engine import Engine
from ..errors import CSDOSError, CSDRuntimeError, CSDStoreError, CSDWarning
from ..store.file import StoreFile
from ..store.format import CLEAN, FILE_NAME, PAGE, Contents, read_region
from ..store.reader import Residual, Tick, Tile, each_tile, stored_bytes, total_bytes
from ..store.recovery import common_commit
from ..store.transfer import opened
from .files import Output, Progress, made_whole, need_room, no_bar

FICLONE = 0x40049409  # ioctl: this file becomes another one's reflink, in no time
NO_REFLINK = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM)
PAUSE = 0.002  # seconds: how often a copy looks whether the step is over

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


# ---- reading stores ----------------------------------------------------------------


def directories(paths: Paths) -> list[Path]:
    """Those of the devices: of stores, named by their directory or file, and of snapshots."""
    found: list[Path] = []
    for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
        place = Path(path).expanduser()
        if place.is_dir() and not (place / FILE_NAME).exists():
            inside = [file.parent for file in place.glob(f"device-*/{FILE_NAME}")]
            found += sorted(inside, key=lambda d: (len(d.name), d.name)) or [place]
        elif place.is_dir():
            found.append(place)
        elif place.name == FILE_NAME:
            found.append(place.parent)
        else:
            raise CSDOSError(errno.ENOENT, f"there is no store in {place}: name its directory, or that of a snapshot")
    return found


@contextlib.contextmanager
def stores_at_rest(paths: Paths) -> Iterator[list[StoreFile]]:
    """Stores to be read. Nobody writes them. Raises CSDBusyError, CSDStoreError, CSDOSError."""
    with contextlib.ExitStack() as stack:
        stores = []
        for spec in parse_devices(directories(paths)):
            stores.append(StoreFile(spec.directory, durable=True, mode="read"))
            stack.callback(stores[-1].close)
        yield stores


def last_step(stores: Sequence[StoreFile]) -> list[Contents]:
    """What the stores of an optimizer hold of the last step that all have, device by device. Raises CSDStoreError."""
    if not (recovered := common_commit(stores)):
        raise CSDStoreError(f"{stores[0].path} holds no step yet")
    return sorted(recovered, key=lambda c: c.superblock.device)


# ---- snapshots ---------------------------------------------------------------------


class Snapshot:
    """A copy of the stores of one optimizer, each in a directory `device-0`, `device-1` ... of `path`.

    Made in two parts: this, while nothing is written to the stores; and `finish()`, once, while nothing that the
    commit holds is overwritten. Without reflinks, that is where the tiles are copied.
    """

    def __init__(self, recovered: list[Contents], path: Path) -> None:
        self.to_copy: list[Contents] = []
        self._outputs: dict[str, Output] = {}  # by the path of the store
        self._heads: list[tuple[str, int, bytes]] = []  # store, where, what
        store_id = _id_of_copy(recovered[0])
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(made_whole(path))
            place.mkdir()
            for d, contents in enumerate(recovered):
                (place / f"device-{d}").mkdir()
                output = stack.enter_context(Output(place / f"device-{d}" / FILE_NAME, 0))
                self._outputs[contents.path] = output
                block = replace(contents.superblock, store_id=store_id, flags=CLEAN)
                with opened(Path(contents.path)) as fd:
                    if not _cloned(output.fd, fd):
                        self.to_copy.append(contents)
                    os.ftruncate(output.fd, contents.end)
                    for what, region in (("manifest", block.manifest), ("slot table", block.table)):
                        data = read_region(fd, region, contents.copy, what, contents.path)
                        self._heads += [(contents.path, region.offset(copy), data) for copy in range(2)]
                self._heads += [(contents.path, copy * PAGE, block.pack()) for copy in range(2)]
            need_room(place, sum(map(stored_bytes, self.to_copy)))
            self._stack = stack.pop_all()

    def finish(self, *, gate: Callable[[], None] = lambda: None, tick: Tick = lambda _: None) -> None:
        """Raises CSDStoreError if a tile is damaged, CSDOSError; nothing is left then."""

        def copy(tile: Tile, data: memoryview | None) -> None:
            if data is not None:
                self._outputs[tile.contents.path].write(data, tile.offset)

        def copy_residual(residual: Residual, first: int, data: memoryview) -> None:
            self._outputs[residual.contents.path].write(data, residual.offset + first)

        with self._stack:
            each_tile(self.to_copy, copy, copy_residual, gate=gate, tick=tick)
            for store, offset, data in self._heads:
                self._outputs[store].write(data, offset)


def _id_of_copy(contents: Contents) -> bytes:
    """A new one: from here on store and copy go different ways. The copies of all ranks' stores have the same."""
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


def snapshot(paths: Paths, path: Path, progress: Progress = no_bar) -> None:
    """Of stores that nobody uses."""
    with stores_at_rest(paths) as stores:
        recovered = last_step(stores)
        made = Snapshot(recovered, path)
        with progress("copying", total_bytes(made.to_copy)) as tick:
            made.finish(tick=tick)


@dataclass(frozen=True)
class Saving:
    """A snapshot that is being made of stores in use."""

    future: Future[Path]
    give_up: threading.Event

    def wait(self) -> None:
        """Returns when it is there. Raises what went wrong. Interrupted, it gives up: nothing is left then."""
        try:
            self.future.result()
        except BaseException:
            self.give_up.set()
            wait([self.future])
            raise


def save(engine: Engine, path: Path, progress: Progress, *, wait: bool) -> Saving:
    """Begins a snapshot of everything that the engine has. To be called with its lock held.

    `wait`: the caller will; otherwise a failure is a warning, too.

    Raises CSDRuntimeError, CSDStoreExistsError, CSDOSError before anything is made.
    """
    specs = engine.devices.specs if engine.durable else engine.specs  # what gpu: has, directories have, too
    if temporary := [str(spec) for spec in specs if not spec.durable]:
        raise CSDRuntimeError(
            f"{temporary[0]} keeps its state for this process only, and there is no store to copy; "
            "name directories as devices, or use state_dict()"
        )
    committer = engine.committer
    assert isinstance(committer, DurableCommitter)
    if engine.stepping:
        raise CSDRuntimeError("a step is under way: save() when it has returned")
    engine.check_whole()
    if not (engine.n_params or engine.committed_step):  # a rank may have no parameters
        raise CSDRuntimeError("there is no state to save yet: save() goes after the first step()")
    if committer.ranks:
        try:
            path.mkdir(exist_ok=True)
        except OSError as e:
            raise CSDOSError(e.errno, f"cannot make {path}: {e.strerror}") from e
        path = path / f"rank-{committer.ranks.rank}"
    committer.flush()
    recovered = committer.committed()
    made = Snapshot(recovered, path)
    give_up = threading.Event()
    done: Future[Path] = Future()
    # The step after the next is the first to write where the copied state is; with one slot per tile, the next.
    sequence = recovered[0].superblock.sequence - (engine.slots == 1) if made.to_copy else math.inf
    pin = Pin(sequence, done)

    def gate() -> None:
        # The drive is the training's while a step is under way, until one has to wait for the copy.
        while engine.stepping and not (pin.wanted.is_set() or give_up.is_set()):
            pin.wanted.wait(PAUSE)
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

    committer.pins.append(pin)
    try:
        threading.Thread(target=work, name=f"csd_optim save {path}").start()
    except RuntimeError:  # the interpreter shuts down and has no more threads to give
        work()
    return Saving(done, give_up)
