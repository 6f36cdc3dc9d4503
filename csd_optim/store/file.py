"""The file behind an emulated CSD: opened, locked, allocated, committed. What is in it: format.py."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import secrets
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from ..bindings import crc32c
from ..errors import (
    CSDBusyError,
    CSDLostError,
    CSDOSError,
    CSDStoreError,
    CSDStoreExistsError,
    CSDWarning,
    users_stacklevel,
)
from ..finalize import wait_for_dropped
from .format import FILE_NAME, MAGIC, PAGE, Contents, Region, Superblock, read_commits, read_region, superblocks
from .layout import round_up
from .transfer import open_direct, opened, read, sync_directory, write

SECTOR = 512  # bytes that a disk writes as a whole
STATE = "optimizer state (AdamW's is 24 bytes per parameter, 32 with amsgrad, half of it with shadow=False)"
# What is to become of a store that is there already: an error, erased at the first write, taken up, only looked at.
Mode = Literal["new", "overwrite", "resume", "read"]


def how_to_own(directory: Path | str) -> str:
    """What to do about one that the user may not write to."""
    return f"name a directory that you may write to, or make this one yours: sudo install -d -o $USER {directory}"


def lock_owner(stat: os.stat_result) -> int | None:
    """The process that owns a store's file, None if none is seen. Only looks: takes no lock, not for an instant."""
    inode = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    with contextlib.suppress(OSError):  # no /proc: only the message is poorer
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # number, kind, ADVISORY, WRITE, process, inode, first, last
            if len(fields) > 5 and fields[5] == inode and fields[1] != "->":
                return int(fields[4])
    return None


def _holders(stat: os.stat_result) -> list[int]:
    """The processes that have a file open, of those that this one may look at."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.path.samestat(stat, fd.stat()) for fd in (process / "fd").iterdir()):
                found.append(int(process.name))
    return sorted(found)


def _has_ended(pid: int) -> bool:
    """Has a process ended, waited for by its parent or not? /proc may hide those of others."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()  # number, (name), state; the name may have any characters
    except OSError as e:
        return isinstance(e, ProcessLookupError)
    return stat.rpartition(")")[2].split()[:1] == ["Z"]


def _left_behind(owner: int, stat: os.stat_result) -> str:
    """What keeps the lock of a process that has ended: a lock belongs to all who have inherited the open file."""
    children = [f"process {pid}" for pid in _holders(stat) if pid != os.getpid()]
    return f"{' and '.join(children) or 'a process'}, forked by process {owner}, which has ended"


def lock(fd: int, path: Path, *, shared: bool = False) -> None:
    """Makes this process the owner of the file; `shared`: one of those that only want nobody to write it.

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
            gc.collect()  # an optimizer that was dropped, and hangs on a reference cycle, say with its scheduler
            wait_for_dropped()
    if owner == os.getpid():
        who = "another optimizer of this process, or by tensors from load(); close() or drop those"
    elif owner is None:
        who = "another process; stop that"
    elif _has_ended(owner):
        who = f"{_left_behind(owner, os.fstat(fd))}; stop that"
    else:
        who = f"process {owner}; stop that"
    instead = "another directory"
    if shared:
        instead = "a snapshot, which its optimizer makes by save()"
    elif "LOCAL_RANK" in os.environ:
        instead += ", for each rank its own, as in '/mnt/nvme{local_rank}'"
    raise CSDBusyError(errno.EWOULDBLOCK, f"{path} is in use by {who}, or name {instead}")


@dataclass(frozen=True)
class Staged:
    """What is written to make a commit."""

    superblock: Superblock
    manifest: bytes | None  # None: it is there already
    table: bytes


class StoreFile:
    """One open store, owned by this process until `close()`.

    Without `durable`: a nameless file in the directory, or in memory without one, gone with the process, however that
    ends. `recovered`: the commits that an existing store has, the newest first, with `mode` "resume" and "read"; empty
    if there is no store yet. Raises CSDStoreExistsError, CSDBusyError, CSDStoreError, CSDOSError; an existing store is
    only written with "overwrite" and "resume", and a file that is no store never.
    """

    def __init__(self, directory: Path | None, *, durable: bool, mode: Mode = "new") -> None:
        self.durable = durable
        self.direct: bool | None = None  # past the page cache? None: there is none
        self.fd: int = -1
        self.io_fd: int = -1
        self._next_fd = -1  # of a file that is to replace this one
        not_for_children(self)
        self.end: int = 2 * PAGE
        self.recovered: list[Contents] = []
        self.in_doubt: bool = False  # a flush has failed, and what it should have covered was not read back since
        self.lost: str = ""  # why the last step will never be committed here
        self._named = True  # as far as is known, the file's name is on the disk
        self._unsure: int | None = None  # the copy of the superblock that may be half written
        self._is_new = not durable  # a file of our own, which nobody misses until it has a superblock
        self.current: Superblock | None = None  # of the last commit
        self._spaces: dict[str, tuple[int, int]] = {}  # for "manifest" and "table": base, room
        try:
            if directory is None:
                self.path: Path = Path("memory")
                self.fd = os.memfd_create("csd_optim")
                self.io_fd = os.dup(self.fd)
            elif durable:
                self.path = self._open_durable(directory.resolve(), mode)
            else:
                self.path = self._open_scratch(directory.resolve())
        except BaseException as e:
            self.close()
            if isinstance(e, CSDOSError) or not isinstance(e, OSError):
                raise
            where = directory.resolve() if directory else "memory"
            refused = directory and durable and mode != "read" and e.errno == errno.EACCES
            advice = f"; {how_to_own(where)}" if refused else ""
            raise CSDOSError(e.errno, f"cannot open a store in {where}: {e.strerror}{advice}") from e

    def _open_scratch(self, directory: Path) -> Path:
        try:
            self.fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            # A file system without nameless files: named for a moment.
            name = directory / f".{FILE_NAME}.{secrets.token_hex(8)}"
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
            os.close(self.fd)  # an owner removed it between the two calls above: the name is another file's, or free
            self.fd = -1
        self._is_new = mode != "read" and os.fstat(self.fd).st_size == 0
        if self._is_new:
            return path
        if mode in ("resume", "read"):
            # Who wrote it may have died with that in memory only, or have been told that it did not get to the disk:
            # then it is in the page cache all the same, and gone when it leaves that.
            try:
                os.fdatasync(self.fd)
                self.forget_cached()
            except OSError as e:
                if mode != "read" or e.errno not in (errno.EINVAL, errno.EROFS, errno.ENOSYS):
                    raise  # else a file system that is only read, and has nothing to flush
        heads = [read(self.fd, PAGE, i * PAGE) for i in range(2)]
        unborn = self._is_unborn(path, *heads)
        if mode != "read" and MAGIC not in (head[:8] for head in heads) and not unborn:
            raise CSDStoreExistsError(errno.EEXIST, f"{path} exists and is no csd_optim store; move it away")
        if mode in ("resume", "read") and not unborn:
            self.recovered = read_commits(self.fd, str(path))
        elif mode == "new":
            known = superblocks(self.fd, str(path))
            step = f" of step {known[0][1].step}" if known else ""
            raise CSDStoreExistsError(
                errno.EEXIST,
                f"{path} holds a store{step}; pass resume=True to continue from there, overwrite=True to erase it, or "
                "name another directory",
            )
        return path

    def _is_unborn(self, path: Path, first: bytes, second: bytes) -> bool:
        """Was the process that began to make this store stopped before the first commit?

        Then copy 1 is zeros, and copy 0, of which only the first and last sector are anything else, is not whole.
        """
        sectors = [first[i : i + SECTOR] for i in range(0, PAGE, SECTOR)]
        if any(second) or any(map(any, sectors[1:-1])) or (any(sectors[0]) and first[: len(MAGIC)] != MAGIC):
            return False
        for copy, block in superblocks(self.fd, str(path)):  # raises if it is one that we do not know
            with contextlib.suppress(CSDStoreError):
                read_region(self.fd, block.manifest, copy, "manifest", str(path))
                read_region(self.fd, block.table, copy, "slot table", str(path))
                return False  # whole, and a commit then, if perhaps one that is refused
        return True

    def _has_name(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self.fd), path.stat())
        except FileNotFoundError:
            return False

    def _replace(self) -> None:
        """Puts an empty file in the place of the store that is to be overwritten.

        Not before the first byte is to be written; and a new file, because somebody may still look at the old one.
        """
        temporary = self.path.with_name(f".{FILE_NAME}.{secrets.token_hex(8)}")
        self._next_fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            lock(self._next_fd, temporary)
            temporary.replace(self.path)
        except BaseException:
            fd, self._next_fd = self._next_fd, -1
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        fd, self.fd, self._next_fd, self._is_new = self.fd, self._next_fd, -1, True
        os.close(fd)

    @contextlib.contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Errors of the operating system say which file they are about."""
        try:
            yield
        except OSError as e:
            if isinstance(e, CSDOSError):
                raise
            raise CSDOSError(e.errno, f"{self.path}: cannot {what}: {e.strerror}") from e

    def _open_direct(self) -> None:
        """Opens the file a second time, for O_DIRECT if that works."""
        mode = fcntl.fcntl(self.fd, fcntl.F_GETFL) & os.O_ACCMODE
        again = f"/proc/self/fd/{self.fd}"
        # Where there is something already, it must not be written over.
        direct = open_direct(again, mode, overwrite=self.current is None)
        self.direct = direct is not None
        self.io_fd = os.open(again, mode | os.O_CLOEXEC) if direct is None else direct
        if not self.direct:
            warnings.warn(
                f"{self.path}: this file system has no direct I/O; tiles go through the page cache, which is slower "
                "and takes host memory. Use a directory on ext4 or xfs on a local drive for speed.",
                CSDWarning,
                stacklevel=users_stacklevel(),
            )

    def adopt_commit(self, commit: Contents) -> None:
        """Goes on from one of `recovered`."""
        self.current = block = commit.superblock
        self._spaces = {"manifest": block.manifest[:2], "table": block.table[:2]}
        self.end = commit.end
        with self.naming("open"):
            self._open_direct()

    def discard_newer(self, commit: Contents) -> None:
        """Makes the commit that was taken up the only one, and forgets what lies behind it. Raises CSDOSError."""
        block, path = commit.superblock, str(self.path)
        manifest = read_region(self.fd, block.manifest, commit.copy, "manifest", path)
        table = read_region(self.fd, block.table, commit.copy, "slot table", path)
        for copy in (1 - commit.copy, commit.copy):
            self.publish(Staged(block, manifest, table), copy)
        with self.naming("shrink"):
            os.ftruncate(self.fd, self.end)

    def allocate(self, size: int, what: str = STATE) -> int:
        """Reserves `size` bytes, all of them on the disk, at the end of the file; returns their offset (bytes).

        Raises CSDOSError when the disk is full, and then gives back what it had taken.
        """
        if self.io_fd < 0:
            with self.naming("write"):
                if not (self._is_new and self._named):
                    self._replace()
                if self.durable:
                    self._sync_names()
                self._open_direct()
        unit = max(PAGE, mmap.PAGESIZE)  # tiles are mapped from here
        offset, size = round_up(self.end, unit), round_up(size, unit)
        try:
            if size:
                os.posix_fallocate(self.fd, offset, size)
        except OSError as e:
            os.ftruncate(self.fd, self.end)
            free = os.fstatvfs(self.fd)
            raise CSDOSError(
                e.errno,
                f"{self.path}: no room for {size / 1e9:.2f} GB of {what}: {e.strerror}; "
                f"{free.f_bavail * free.f_frsize / 1e9:.2f} GB are free",
            ) from e
        self.end = offset + size
        return offset

    def _sync_names(self) -> None:
        """Waits until the file and its directory have their names on the disk: after an error, they need others."""
        if self.lost:
            raise CSDLostError(errno.EIO, self.lost)
        directory = self.path.parent
        self._named = False
        sync_directory(directory)
        self._named = True
        with opened(directory.parent, os.O_DIRECTORY) as fd:
            try:
                os.fsync(fd)
            except OSError as e:
                self.lost = f"{directory} may be gone after a power loss: {directory.parent} could not be flushed "
                self.lost += f"({e.strerror}). Remove {directory.name} and begin anew, or name another directory"
                raise CSDLostError(e.errno, self.lost) from e

    def shrink(self, end: int) -> None:
        """Gives back what was allocated from byte `end` on."""
        os.ftruncate(self.fd, end)
        self.end = end

    def sync(self) -> None:
        """Waits until everything written so far, through mappings too, is on the disk. Raises CSDOSError.

        The system tells once that it could not write something, and takes it for written from then on: after an error
        no later flush says anything about what this one should have covered. See proof.py.
        """
        if self.io_fd >= 0:
            try:
                with self.naming("write"):
                    os.fdatasync(self.fd)
            except CSDOSError:
                self.in_doubt = True
                raise

    def forget_cached(self) -> None:
        """Takes out of the page cache what is on the disk: it is read from there next."""
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def write(self, data: memoryview, offset: int) -> None:
        """Whole pages, of memory too, past the page cache where the file system can. Raises CSDOSError."""
        with self.naming("write"):
            write(self.io_fd, data, offset)

    def stage(self, block: Superblock, manifest: bytes | None, table: bytes) -> Staged:
        """Finds room for a commit. `block`: its regions are filled in. `manifest` None: the one that is there stays."""
        if manifest is not None:
            block = replace(block, manifest=self._region("manifest", manifest))
        else:
            assert self.current is not None
            block = replace(block, manifest=self.current.manifest)
        return Staged(replace(block, table=self._region("table", table)), manifest, table)

    def publish(self, staged: Staged, copy: int) -> None:
        """Writes one copy of what makes a commit, and waits until it is on the disk; all tiles before it.

        Copy 1 is written when copy 0 is on the disks of all devices: until then all of them have the commit before.
        """
        block = staged.superblock
        if copy == 0:
            self.sync()
        with self.naming("write the superblock"):
            # In any order: a superblock whose manifest and table are not there yet does not count. If the flush fails,
            # all of it is written anew: nothing else can have been lost.
            if staged.manifest is not None:
                write(self.fd, staged.manifest, block.manifest.offset(copy))
            write(self.fd, staged.table, block.table.offset(copy))
            write(self.fd, block.pack(), copy * PAGE)
            os.fdatasync(self.fd)
        self._is_new = False
        self.current = block

    def mark(self, sequence: int, flags: int) -> None:
        """Changes the flags of the commit that is valid, in both copies, and waits until that is on the disk."""
        if self.current:
            self.current = replace(self.current, sequence=sequence, flags=flags)
            # After a failure, first the copy that is not known to be whole: the other one is all that there is.
            for copy in (0, 1) if self._unsure != 1 else (1, 0):
                self._unsure = copy
                with self.naming("write the superblock"):
                    write(self.fd, self.current.pack(), copy * PAGE)
                self.sync()
                self._unsure = None

    def _region(self, what: str, data: bytes) -> Region:
        self.reserve(what, len(data))
        return Region(*self._spaces[what], len(data), crc32c(data))

    def reserve(self, what: str, size: int) -> None:
        """Makes sure that a manifest or table of `size` bytes finds room. Raises CSDOSError."""
        if self._spaces.get(what, (0, 0))[1] < size:
            room = round_up(2 * size, PAGE)  # room to grow, as parameters may join one by one
            self._spaces[what] = self.allocate(2 * room), room

    def close(self) -> None:
        """Lets go of the file. One that never became a store leaves no trace."""
        try:
            if self.fd >= 0 and self.durable and self._is_new and self._has_name(self.path):
                self.path.unlink()
        finally:
            if self.fd >= 0:
                fcntl.flock(self.fd, fcntl.LOCK_UN)  # a child that was forked by native code keeps the file open
            self.let_go()

    def let_go(self) -> None:
        """Closes what is open, and no more: the lock stays with those that have the same file open."""
        # The numbers are forgotten first: they may be another file's as soon as they are closed.
        fds = self.io_fd, self.fd, self._next_fd
        self.fd = self.io_fd = self._next_fd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


class Locked(Protocol):
    def let_go(self) -> None: ...


_open: weakref.WeakSet[Locked] = weakref.WeakSet()


def not_for_children(locked: Locked) -> None:
    """From now on a forked child lets go of it first thing."""
    _open.add(locked)


def _after_fork_in_child() -> None:
    """A child can use no store, but would keep it locked when its parent is gone: workers outlive a trainer."""
    for store in list(_open):
        with contextlib.suppress(OSError):
            store.let_go()


os.register_at_fork(after_in_child=_after_fork_in_child)
