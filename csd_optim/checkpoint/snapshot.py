"""Whole stores: copied, loaded as a state dict.

Everything goes tile by tile through a few buffers, whatever the size of the model. What it makes is there as a whole or
not at all. What nobody ever wrote (a hole of a sparse file) is neither read nor written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import math
import os
import secrets
import shutil
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from ..devices.spec import parse_devices
from ..engine.commit import Pin
from ..engine.durable import DurableCommitter, common_commit
from ..engine.engine import Engine
from ..engine.open_engine import open_engine
from ..engine.resume import check_recovered
from ..errors import CSDError, CSDOSError, CSDRuntimeError, CSDStoreError, CSDStoreExistsError, CSDWarning
from ..store.file import StoreFile, lock, not_for_children
from ..store.format import CLEAN, FILE_NAME, PAGE, RESIDUAL_BYTES, Contents, opened, read_region, sync_directory, write
from ..store.reader import Residual, Tick, Tile, each_tile, residuals_of, stored_bytes, total_bytes
from ..store.user_state import stored_user_state

EXPORT_FORMAT = 1  # of what a state dict says of us beside AdamW's entries
EXPORT_WITH_RESIDUALS = 2  # the same, if there are any: who knows only format 1 would leave them out, and not say so
EXPORT_WITH_RULE = 3  # or a rule that is not AdamW's: who knows only these would make AdamW's store of it
FICLONE = 0x40049409  # ioctl: this file becomes another one's reflink, in no time
NO_REFLINK = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM)
SYNC_BYTES = 64 << 20  # so much is written, then it goes to the disk and out of the page cache: training wants memory
PAUSE = 0.002  # seconds: how often a copy looks whether the step is over

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Progress = Callable[[str, int], AbstractContextManager[Tick]]  # what is done, of how many bytes


@contextlib.contextmanager
def no_bar(_what: str, _total: int) -> Iterator[Tick]:
    yield lambda _: None


@contextlib.contextmanager
def bar(what: str, total: int) -> Iterator[Tick]:
    """A progress bar on stderr, gone when it is done."""
    from rich import progress  # training scripts need not wait for this import
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(what, total=total)
        yield lambda n: shown.advance(task, n)


# ---- files that are whole or not there -------------------------------------------


@contextlib.contextmanager
def made_whole(path: Path) -> Iterator[Path]:
    """A name beside `path` for what is made there: at the end it becomes `path`; if that fails, nothing is left."""
    path = Path(os.path.abspath(path))
    if os.path.lexists(path):
        raise CSDStoreExistsError(errno.EEXIST, f"{path} exists, and nothing is overwritten; name another path")
    if not path.parent.is_dir():
        raise CSDOSError(errno.ENOENT, f"there is no directory {path.parent} to make {path.name} in")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield temporary
        for directory in (*temporary.glob("*/"), temporary):
            if directory.is_dir():
                sync_directory(directory)
        if os.path.lexists(path):
            raise CSDStoreExistsError(errno.EEXIST, f"{path} was made by somebody else meanwhile")
        temporary.rename(path)
        try:
            sync_directory(path.parent)
        except OSError:
            path.rename(temporary)
            raise
    except BaseException as e:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        if isinstance(e, OSError) and not isinstance(e, CSDError):
            raise CSDOSError(e.errno, f"cannot write {path}: {e.strerror}; nothing of it is left") from e
        raise


class Output:
    """A file written in any order, by any thread, that does not stay in memory. `size` None: the file is there."""

    def __init__(self, path: Path, size: int | None) -> None:
        new = 0 if size is None else os.O_CREAT | os.O_EXCL
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | new, 0o644)
        self._unsynced = 0
        if size is not None:
            os.ftruncate(self.fd, size)  # zeros, and none of them on the disk

    def write(self, data: bytes | memoryview, offset: int) -> None:
        self._unsynced += len(data)
        write(self.fd, data, offset)
        if self._unsynced > SYNC_BYTES:
            self._unsynced = 0
            os.fdatasync(self.fd)
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        try:
            if kind is None:
                os.fsync(self.fd)
        finally:
            os.close(self.fd)


def need_room(directory: Path, size: int) -> None:
    place = os.statvfs(directory)
    if (free := place.f_bavail * place.f_frsize) < size:
        raise CSDOSError(
            errno.ENOSPC, f"no room in {directory}: {size / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free"
        )


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
    if temporary := [str(spec) for spec in engine.devices.specs if not spec.durable]:
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


# ---- a store as AdamW's state dict ----------------------------------------------------


def numbered(manifest: dict[str, Any]) -> list[tuple[int, int, dict[str, Any]]]:
    """Of every parameter that has a state: its number over all groups, as torch counts; its row; its entry."""
    lengths: dict[int, int] = {}
    for p in (*manifest["params"], *manifest["waiting"]):
        lengths[p["group"]] = max(lengths.get(p["group"], 0), p["position"] + 1)
    first = {k: sum(n for group, n in lengths.items() if 0 <= group < k) for k in lengths}
    found = [(first[p["group"]] + p["position"], row, p) for row, p in enumerate(manifest["params"]) if p["group"] >= 0]
    return sorted(found, key=lambda n: n[0])


def _groups(manifest: dict[str, Any], hypers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`param_groups` of a state dict."""
    groups, n = [], 0
    for k, recovered in enumerate(hypers):
        members = [p for p in (*manifest["params"], *manifest["waiting"]) if p["group"] == k]
        names = [p["name"] for p in sorted(members, key=lambda p: p["position"])]
        betas = {"betas": tuple(recovered["betas"])} if "betas" in recovered else {}
        group = {**recovered, **betas, "params": [*range(n, n + len(names))]}
        if names != [f"{k}.{i}" for i in range(len(names))]:
            group["param_names"] = names
        groups.append(group)
        n += len(names)
    return groups


def about_of(contents: Contents) -> dict[str, Any]:
    """What a state dict has no place for: all that it takes to make the store anew."""
    manifest, extents = contents.manifest, contents.manifest["extents"]
    entries = [p for _, _, p in numbered(manifest)]
    params = [{k: v for k, v in p.items() if k not in ("start", "numel", "residual")} for p in entries]
    residuals = any("residual" in p for p in entries)
    rule = {"rule": manifest["rule"], "sections": [e["sections"] for e in extents]} if "rule" in manifest else {}
    return {
        "format": EXPORT_WITH_RULE if rule else EXPORT_WITH_RESIDUALS if residuals else EXPORT_FORMAT,
        "step": contents.superblock.step,
        "seconds": contents.record.seconds,
        "given": contents.record.given,
        "shadow": all(extent["slots"] == 2 for extent in extents),
        "params": params,
        "waiting": manifest["waiting"],
        **rule,
    }


def state_dict(contents: Contents, tensor: Callable[[int, str, dict[str, Any]], torch.Tensor]) -> dict[str, Any]:
    """AdamW's, and an entry of ours. `tensor` gives what a row has by that name."""
    state = {}
    for number, row, p in numbered(contents.manifest):
        master, *others = names_of(contents.manifest, p)
        step = torch.tensor(contents.steps[row], dtype=torch.float32)
        state[number] = {"step": step, **{name: tensor(row, name, p) for name in (*others, master)}}
    return {
        "state": state,
        "param_groups": _groups(contents.manifest, contents.record.groups),
        "csd_optim": {**about_of(contents), "user_state": stored_user_state(contents.record.user_state, contents.path)},
    }


def names_of(manifest: dict[str, Any], p: dict[str, Any]) -> list[str]:
    """What a parameter has: its states, and its residual if there is one."""
    return [*manifest["extents"][p["extent"]]["sections"], *(["residual"] if "residual" in p else [])]


def dtype_of(p: dict[str, Any], name: str) -> torch.dtype:
    """Of one of these."""
    if name == "residual":
        return torch.bfloat16
    return torch.complex64 if p["dtype"] == "complex64" else torch.float32


class _Keeper:
    """As long as this lives, nobody writes the stores."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = contextlib.ExitStack()
        weakref.finalize(self, self._files.close)
        not_for_children(self)
        for file in files:
            lock(self._files.enter_context(opened(file)), file, shared=True)

    def let_go(self) -> None:
        self._files.close()


def load(paths: Paths) -> dict[str, Any]:
    """See CSDAdam.load."""
    engine = open_engine(parse_devices(directories(paths)), mode="read")
    try:
        if not engine.recovered:
            raise CSDStoreError(f"{engine.devices.specs[0]} holds no step yet")
        check_recovered(engine)
        first = engine.recovered[0]
        windows: dict[tuple[int, str], torch.Tensor] = {}
        for row, p in enumerate(first.manifest["params"]):
            extent = engine.extents[p["extent"]]
            for k, section in enumerate(first.manifest["extents"][p["extent"]]["sections"]):
                window = engine.windows.window(extent, row - extent.first_param, k, dtype_of(p, section))
                windows[row, section] = window.as_strided(p["shape"], p["stride"])
        # The tensors are what lies in the files, even when the engine is closed.
        keeper = _Keeper(Path(c.path) for c in engine.recovered)
        engine.windows.hold(keeper)
        for residual in residuals_of(engine.recovered):
            p, values = first.manifest["params"][residual.row], np.zeros(0, np.int16)
            if residual.size:
                path, shape = residual.contents.path, (residual.size // RESIDUAL_BYTES,)
                values = np.memmap(path, np.int16, "c", residual.offset, shape)
                weakref.finalize(values, id, keeper).atexit = False
            flat = torch.from_numpy(values).view(torch.bfloat16)
            windows[residual.row, "residual"] = flat.as_strided(p["shape"], p["stride"])
        return state_dict(first, lambda row, section, _: windows[row, section])
    finally:
        engine.close()
