"""The file behind an emulated CSD: open, lock, allocate, commit. For the content see format.py."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from .. import commit_trace, settings
from ..bindings import crc32c, punch_hole
from ..errors import CSDBusyError, CSDLostError, CSDOSError, CSDWarning, users_stacklevel
from ..files import hidden_name, opened, sync, write
from ..finalize import wait_for_dropped
from .direct import open_direct
from .existing import Mode, existing_commits, forget_cached
from .format import FILE_NAME, PAGE, Contents, Region, Superblock, read_region
from .layout import round_up
from .unused import Unused

STATE = "optimizer state (AdamW's is 24 bytes per parameter, 32 with amsgrad)"


def ownership_advice(directory: Path | str) -> str:
    """Return advice for a directory that the user may not write to."""
    return f"name a directory that you may write to, or make this one yours: sudo install -d -o $USER {directory}"


def lock_owner(stat: os.stat_result) -> int | None:
    """Return the process that has locked a store's file, or None if that is not visible.

    Takes no lock, not even briefly.
    """
    inode = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    with contextlib.suppress(OSError):  # without /proc the message only has fewer facts
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # number, kind, ADVISORY, WRITE, process, inode, first, last
            if len(fields) > 5 and fields[5] == inode and fields[1] != "->":
                return int(fields[4])
    return None


def _holders(stat: os.stat_result) -> list[int]:
    """Return the processes that have a file open, as far as this process may inspect them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.path.samestat(stat, fd.stat()) for fd in (process / "fd").iterdir()):
                found.append(int(process.name))
    return sorted(found)


def _has_ended(pid: int) -> bool:
    """Return whether a process has ended, including zombies. /proc may hide the processes of other users."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()  # number, (name), state; the name may have any characters
    except OSError as e:
        return isinstance(e, ProcessLookupError)
    return stat.rpartition(")")[2].split()[:1] == ["Z"]


def _lock_heirs(owner: int, stat: os.stat_result) -> str:
    """Return text that names the forked children that have inherited the lock of an ended process."""
    children = [f"process {pid}" for pid in _holders(stat) if pid != os.getpid()]
    return f"{' and '.join(children) or 'a process'}, forked by process {owner}, which has ended"


def another_directory() -> str:
    """Return "another directory", with a placeholder for ranks or optimizers where that helps."""
    if "LOCAL_RANK" in os.environ:
        return "another directory, for each rank its own, as in '/mnt/nvme{local_rank}'"
    if settings.devices():
        return "another directory, for each optimizer its own, as in CSD_OPTIM_DEVICES='/mnt/nvme0/{optimizer}'"
    return "another directory"


def lock(fd: int, path: Path, *, shared: bool = False) -> None:
    """Lock a file for this process alone; with `shared`, as one of several readers that keep writers out.

    Raises CSDBusyError.
    """
    owner = None
    for _ in range(2):
        try:
            return fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = lock_owner(os.fstat(fd))
            if owner != os.getpid():
                break
            gc.collect()  # a reference cycle, for example with a scheduler, may keep a dropped optimizer alive
            wait_for_dropped()
    if owner == os.getpid():
        who = "another optimizer of this process, or by tensors from load(); close() or drop those"
    elif owner is None:
        who = "another process; stop that"
    elif _has_ended(owner):
        who = f"{_lock_heirs(owner, os.fstat(fd))}; stop that"
    else:
        who = f"process {owner}; stop that"
    instead = "a snapshot, which its optimizer makes by save()" if shared else another_directory()
    raise CSDBusyError(errno.EWOULDBLOCK, f"{path} is in use by {who}, or name {instead}")


@dataclass(frozen=True)
class Staged:
    """The data of a commit that is ready to be written."""

    superblock: Superblock
    manifest: bytes | None  # None: the manifest in the store stays
    table: bytes


class StoreFile:
    """One open store, owned by this process until `close()`.

    Without `durable`: a nameless file in the directory, or in memory if `directory` is None; it vanishes with the
    process, however the process ends. `recovered`: with `mode` "resume" and "read", the commits of an existing store,
    the newest first; empty if there is no store yet. Raises CSDStoreExistsError, CSDBusyError, CSDStoreError,
    CSDOSError. Only "overwrite" and "resume" write to an existing store; a file that is not a store is never written
    to.
    """

    def __init__(self, directory: Path | None, *, durable: bool, mode: Mode = "new") -> None:
        self.durable = durable
        self.direct: bool | None = None  # whether I/O bypasses the page cache; None: not opened yet, or in memory
        self.fd: int = -1
        self.io_fd: int = -1
        self._next_fd = -1  # the file that will replace this one
        close_in_children(self)
        self.end: int = 2 * PAGE
        self.unused: Unused = Unused()
        self.recovered: list[Contents] = []
        self.in_doubt: bool = False  # a flush has failed, and the data was not read back since
        self.lost: str = ""  # why the last step will never be committed here
        self._is_name_durable = True  # False after a failed flush of the directory
        self.was_missing: bool = False  # with mode "resume": there was no file, or an empty one
        self._is_new = not durable  # this process has created the file, and it has no superblock yet
        self.current: Superblock | None = None  # of the last commit
        self._spaces: dict[str, tuple[int, int]] = {}  # of "manifest" and "table": (base, room)
        try:
            if directory is None:
                self.path: Path = Path("memory")
                self.fd = os.memfd_create("csd_optim")
                self.io_fd = self.fd
            elif durable:
                self.path = self._open_durable(directory.resolve(), mode)
                self.was_missing = self._is_new and mode == "resume"
                if not self._is_new:
                    self.recovered = existing_commits(self.fd, self.path, mode)
            else:
                self.path = self._open_scratch(directory.resolve())
        except BaseException as e:
            self.close()
            if isinstance(e, CSDOSError) or not isinstance(e, OSError):
                raise
            where = directory.resolve() if directory else "memory"
            refused = directory and durable and mode != "read" and e.errno == errno.EACCES
            advice = f"; {ownership_advice(where)}" if refused else ""
            if directory and not durable:
                advice = "; name a drive by devices= or CSD_OPTIM_DEVICES, such as devices='/mnt/nvme0'"
            raise CSDOSError(e.errno, f"cannot open a store in {where}: {e.strerror}{advice}") from e

    def _open_scratch(self, directory: Path) -> Path:
        try:
            self.fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            # This file system has no nameless files (O_TMPFILE): create a named one and unlink it.
            name = hidden_name(directory / FILE_NAME)
            self.fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            name.unlink()
        return directory

    def _open_durable(self, directory: Path, mode: Mode) -> Path:
        if directory.exists() and not directory.is_dir():
            raise CSDOSError(errno.ENOTDIR, f"{directory} is a file; a device is a directory")
        path = directory / FILE_NAME
        if mode == "read":
            if not path.exists():
                raise CSDOSError(errno.ENOENT, f"there is no store in {directory}")
            flags = os.O_RDONLY
        else:
            if not directory.parent.is_dir():
                raise CSDOSError(errno.ENOENT, f"there is no directory {directory.parent} to make {directory.name} in")
            directory.mkdir(exist_ok=True)
            flags = os.O_CREAT | os.O_RDWR
        while True:
            self.fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
            lock(self.fd, path, shared=mode == "read")
            if self._has_name(path):
                break
            os.close(self.fd)  # removed by its owner meanwhile: open the file that has the name now
            self.fd = -1
        self._is_new = mode != "read" and os.fstat(self.fd).st_size == 0
        return path

    def _has_name(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self.fd), path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _replace(self) -> None:
        """Put an empty file in the place of the store to be overwritten.

        Called only just before the first write. A new file, because other processes may still read the old file.
        """
        temporary = hidden_name(self.path)
        self._next_fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            lock(self._next_fd, temporary)
            self._make_present(self._next_fd)
            temporary.replace(self.path)
        except BaseException:
            fd, self._next_fd = self._next_fd, -1
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        fd, self.fd, self._next_fd, self._is_new = self.fd, self._next_fd, -1, True
        os.close(fd)

    def _make_present(self, fd: int) -> None:
        """Durably give a new file room for superblocks, before its name is durable: an empty file counts as missing.

        Other stores may have their first commit earlier, or still have an older commit.
        """
        self._reserve(fd, 0, self.end, STATE)
        os.fdatasync(fd)

    @contextlib.contextmanager
    def wrapping_errors(self, action: str) -> Iterator[None]:
        """Turn errors of the operating system inside the context into CSDOSErrors that name the file."""
        try:
            yield
        except OSError as e:
            if isinstance(e, CSDOSError):
                raise
            raise CSDOSError(e.errno, f"{self.path}: cannot {action}: {e.strerror}") from e

    def _open_direct(self) -> None:
        """Open the file for tiles, with O_DIRECT if that works. A scratch file keeps no other descriptor."""
        mode = fcntl.fcntl(self.fd, fcntl.F_GETFL) & os.O_ACCMODE
        again = f"/proc/self/fd/{self.fd}"
        # The test of O_DIRECT must not write to a file with content.
        direct = open_direct(again, mode, overwrite=self.current is None)
        self.direct = direct is not None
        self.io_fd = os.open(again, mode | os.O_CLOEXEC) if direct is None else direct
        if not self.durable:  # no lock and no superblock need the other descriptor, of which a process has few
            fd, self.fd = self.fd, self.io_fd
            os.close(fd)
        if not self.direct:
            warnings.warn(
                f"{self.path}: this file system has no direct I/O; tiles go through the page cache, which is slower "
                "and takes host memory. Use a directory on ext4 or xfs on a local drive for speed.",
                CSDWarning,
                stacklevel=users_stacklevel(),
            )

    def adopt_commit(self, commit: Contents) -> None:
        """Continue from one of the `recovered` commits."""
        self.current = block = commit.superblock
        self._spaces = {"manifest": block.manifest[:2], "table": block.table[:2]}
        self.end = commit.end
        with self.wrapping_errors("open"):
            self._open_direct()

    def discard_newer(self, commit: Contents) -> None:
        """Make the adopted commit the only one, and cut the file off behind it. Raises CSDOSError."""
        block, path = commit.superblock, str(self.path)
        commit_trace.note("discards newer", store=self, commit=commit)
        with self.wrapping_errors("read"):
            manifest = read_region(self.fd, block.manifest, commit.copy, "manifest", path)
            table = read_region(self.fd, block.table, commit.copy, "slot table", path)
        for copy in (1 - commit.copy, commit.copy):
            self.publish(Staged(block, manifest, table), copy)
        with self.wrapping_errors("shrink"):
            os.ftruncate(self.fd, self.end)
        for space in commit.unused():
            self.give_back(*space)

    def allocate(self, size: int, what: str = STATE) -> int:
        """Reserve `size` bytes of disk space, in an unused part or at the end of the file; return the offset in bytes.

        Raises CSDOSError when the disk is full, with nothing reserved.
        """
        if self.io_fd < 0:
            with self.wrapping_errors("write"):
                if not (self._is_new and self._is_name_durable):
                    self._replace()
                elif self.durable:
                    self._make_present(self.fd)
                if self.durable:
                    self._sync_names()
                self._open_direct()
        unit = max(PAGE, mmap.PAGESIZE)  # tiles are mapped from here
        size = round_up(size, unit)
        unused = self.unused.take(size, unit)
        offset = round_up(self.end, unit) if unused is None else unused
        try:
            self._reserve(self.fd, offset, size, what)
        except OSError:
            if unused is not None:
                self.give_back(offset, size)
            else:
                with contextlib.suppress(OSError):  # if the drive fails, the file stays too long
                    os.ftruncate(self.fd, self.end)
            raise
        self.end = max(self.end, offset + size)
        return offset

    def _reserve(self, fd: int, offset: int, size: int, what: str) -> None:
        try:
            if size:
                os.posix_fallocate(fd, offset, size)
        except OSError as e:
            raise CSDOSError(
                e.errno, f"{self.path}: no room for {size / 1e9:.2f} GB of {what}: {e.strerror}{self._free_space()}"
            ) from e

    def _free_space(self) -> str:
        try:
            free = os.fstatvfs(self.fd)
        except OSError:
            return ""
        return f"; {free.f_bavail * free.f_frsize / 1e9:.2f} GB are free"

    def check_not_lost(self) -> None:
        """Raise CSDLostError if writes to this file can no longer become durable.

        That is so after a failed flush, and if the file was removed: without a name, it vanishes when closed. A renamed
        or moved file keeps everything.
        """
        if self.lost:
            raise CSDLostError(errno.EIO, self.lost)
        # Some file systems in user space do not count names, so look for the name only if the count is 0.
        if os.fstat(self.fd).st_nlink == 0 and not self._has_name(self.path):
            raise CSDLostError(
                errno.ENOENT,
                f"{self.path} was removed while it was in use: nothing can be committed any more, and what it held is "
                "gone when this optimizer is closed. The states in memory are good: save state_dict() of the model and "
                "of the optimizer with torch.save(), close() the optimizer, and begin a new store with them",
            )

    def _sync_names(self) -> None:
        """Flush the names of the file and of its directory. After an error the names may be lost."""
        self.check_not_lost()
        directory = self.path.parent
        self._is_name_durable = False
        sync(directory)
        self._is_name_durable = True
        with opened(directory.parent, os.O_DIRECTORY) as fd:
            try:
                os.fsync(fd)
            except OSError as e:
                self.lost = f"{directory} may be gone after a power loss: {directory.parent} could not be flushed "
                self.lost += f"({e.strerror}). Remove {directory.name} and begin anew, or name another directory"
                raise CSDLostError(e.errno, self.lost) from e

    def shrink(self, end: int) -> None:
        """Free everything from byte `end` on. Raises CSDOSError; the space then stays allocated."""
        self.end = end
        with self.wrapping_errors("shrink"):
            os.ftruncate(self.fd, end)

    def give_back(self, offset: int, size: int) -> None:
        """Free disk space that is no longer in use (whole pages), for other files and for allocate().

        If the file system cannot make holes, which read as zeros, the space stays allocated, unused.
        """
        commit_trace.note("gives back", store=self, offset=offset, size=size)
        if size and punch_hole(self.fd, offset, size) == 0:
            self.unused.add(offset, size)

    def undo_allocate(self, offset: int, size: int) -> None:
        """Free space from allocate(). Raises CSDOSError; the space then stays allocated, perhaps unused."""
        if offset + size < self.end:
            self.give_back(offset, size)
        elif size:
            self.shrink(offset)

    def sync(self) -> None:
        """Wait until everything written so far, also through mappings, is durable. Raises CSDOSError.

        The kernel reports a failed write only once, and then treats the pages as clean. So after an error a later
        successful flush proves nothing about the data of the failed one. See proof.py.
        """
        if self.io_fd >= 0:
            try:
                with self.wrapping_errors("write"):
                    os.fdatasync(self.fd)
            except CSDOSError:
                self.in_doubt = True
                raise

    def forget_cached(self) -> None:
        """Evict clean pages from the page cache, so that the next read comes from the disk."""
        forget_cached(self.fd)

    def write(self, data: memoryview, offset: int) -> None:
        """Write whole pages from page-aligned memory, with direct I/O if the file system has it. Raises CSDOSError."""
        with self.wrapping_errors("write"):
            write(self.io_fd, data, offset)

    def stage(self, block: Superblock, manifest: bytes | None, table: bytes) -> Staged:
        """Reserve room for a commit, and fill in the regions of `block`. `manifest` None: keep the present manifest."""
        if manifest is not None:
            block = replace(block, manifest=self._region("manifest", manifest))
        else:
            assert self.current is not None
            block = replace(block, manifest=self.current.manifest)
        return Staged(replace(block, table=self._region("table", table)), manifest, table)

    def stay(self) -> None:
        """Keep the file even if it never becomes a store: other stores may get a commit, and must find this file."""
        self._is_new = False

    def publish(self, staged: Staged, copy: int) -> None:
        """Write one copy of a commit, and wait until it is durable; before copy 0, flush all tiles.

        Write copy 1 only when copy 0 is durable on all devices: until then copy 1 of each holds the previous commit.
        """
        block = staged.superblock
        commit_trace.note("publish begins", store=self, staged=staged, copy=copy)
        if copy == 0:
            self.sync()
        with self.wrapping_errors("write the superblock"):
            # The order does not matter, since a superblock without its manifest and table is invalid. If the flush
            # fails, everything is written again.
            if staged.manifest is not None:
                write(self.fd, staged.manifest, block.manifest.offset(copy))
            write(self.fd, staged.table, block.table.offset(copy))
            write(self.fd, block.pack(), copy * PAGE)
            try:
                os.fdatasync(self.fd)
            except OSError:
                self.in_doubt |= copy == 1  # may have lost tiles, too, as the next step already writes tiles
                raise
        self._is_new = False
        self.current = block
        commit_trace.note("publish ends", store=self, staged=staged, copy=copy)

    def _region(self, what: str, data: bytes) -> Region:
        self.reserve(what, len(data))
        return Region(*self._spaces[what], len(data), crc32c(data))

    def reserve(self, what: str, size: int) -> None:
        """Make sure that a manifest or table of `size` bytes has room. Raises CSDOSError."""
        if self._spaces.get(what, (0, 0))[1] < size:
            room = round_up(2 * size, PAGE)  # room to grow, as parameters may join one by one
            self._spaces[what] = self.allocate(2 * room), room

    def close(self) -> None:
        """Close and unlock the file; remove it if it never became a store. Raises CSDOSError."""
        try:
            if self.fd >= 0 and self.durable and self._is_new:
                with self.wrapping_errors("remove the file"):
                    if self._has_name(self.path):
                        self.path.unlink()
        finally:
            if self.fd >= 0:
                fcntl.flock(self.fd, fcntl.LOCK_UN)  # children forked by native code still have the file open
            self.close_without_unlocking()

    def close_without_unlocking(self) -> None:
        """Close the descriptors without unlocking: the lock stays with processes that share the open file."""
        # Forget the numbers first, which may be reused for other files once closed.
        fds = self.io_fd, self.fd, self._next_fd
        self.fd = self.io_fd = self._next_fd = -1
        for fd in {*fds} - {-1}:
            os.close(fd)


class Locked(Protocol):
    def close_without_unlocking(self) -> None: ...


_open: weakref.WeakSet[Locked] = weakref.WeakSet()


def close_in_children(locked: Locked) -> None:
    """Register an object whose close_without_unlocking() a forked child calls right after the fork."""
    _open.add(locked)


def _after_fork_in_child() -> None:
    """Close all stores in a forked child, which cannot use stores, but would keep them locked after its parent ends.

    Data loader workers may outlive their trainer.
    """
    for store in list(_open):
        with contextlib.suppress(OSError):
            store.close_without_unlocking()


os.register_at_fork(after_in_child=_after_fork_in_child)
