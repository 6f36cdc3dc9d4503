"""The file behind an emulated CSD. Byte by byte: docs/store-format.md.

    superblock A | superblock B | manifest, tables | extent: tile 0 slot 0, tile 0 slot 1, tile 1 slot 0, ...

The manifest says what the store holds (names, shapes, dtypes, groups), the table where its state is now: the current
slot and the checksums of every tile, the step counter of every parameter. Both are written to fresh space and become
valid by the superblock that names them; of the two superblocks the valid one with the higher sequence counts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import mmap
import os
import secrets
import struct
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .bindings import TILE_STATE, crc32c
from .errors import CSDBusyError, CSDOSError, CSDStoreError, CSDStoreExistsError, CSDWarning
from .layout import round_up

FILE_NAME = "csd_optim.store"
MAGIC = b"CSDOPTIM"
VERSION = 1
ENDIAN = 0x01020304
PAGE = 4096
CLEAN = 1  # flag: closed in order, nothing written since

# magic, version, endianness, store id, device index, devices, sequence, step, flags,
# manifest offset, bytes, crc, table offset, bytes, crc; then zeros up to the crc of all that in the last 4 bytes.
_SUPERBLOCK = struct.Struct("<8sII16sIIQQIQQIQQI")
# The table: one entry per tile of this device, then one step counter (float64) per parameter.
_TILE_ENTRY = np.dtype([("slot", "<u4"), ("summed", "<u4"), ("crc", "<u4", 4)])


@dataclass(frozen=True)
class Superblock:
    store_id: bytes
    device: int
    devices: int
    sequence: int
    step: int
    flags: int
    manifest: tuple[int, int, int]  # offset, bytes, crc
    table: tuple[int, int, int]

    def pack(self) -> bytes:
        head = _SUPERBLOCK.pack(
            MAGIC, VERSION, ENDIAN, self.store_id, self.device, self.devices, self.sequence, self.step, self.flags,
            *self.manifest, *self.table,
        )  # fmt: skip
        body = head.ljust(PAGE - 4, b"\0")
        return body + struct.pack("<I", crc32c(body))

    @classmethod
    def unpack(cls, block: bytes, path: str) -> Superblock | None:
        """None if the block is no valid superblock. Raises CSDStoreError for a format we do not know."""
        if len(block) < PAGE or block[:8] != MAGIC:
            return None
        if crc32c(block[: PAGE - 4]) != struct.unpack("<I", block[PAGE - 4 : PAGE])[0]:
            return None
        _, version, endian, store_id, device, devices, sequence, step, flags, *regions = _SUPERBLOCK.unpack_from(block)
        if endian != ENDIAN:
            raise CSDStoreError(f"{path} was written on a machine of the other endianness")
        if version != VERSION:
            raise CSDStoreError(f"{path} has store format {version}; this csd_optim reads format {VERSION}: upgrade it")
        return cls(store_id, device, devices, sequence, step, flags, tuple(regions[:3]), tuple(regions[3:]))


@dataclass(frozen=True)
class Contents:
    """What a store says of itself."""

    superblock: Superblock
    manifest: dict[str, Any]
    tiles: np.ndarray[Any, Any]
    steps: np.ndarray[Any, Any]
    file_bytes: int
    allocated_bytes: int


def _read(fd: int, size: int, offset: int) -> bytes:
    """Up to `size` bytes: less only where the file ends. The system may cut a transfer short."""
    data = b""
    while len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
        data += more
    return data


def _write(fd: int, data: bytes, offset: int) -> None:
    while data:
        n = os.pwrite(fd, data, offset)
        data, offset = data[n:], offset + n


def _read_region(fd: int, region: tuple[int, int, int], what: str, path: str) -> bytes:
    offset, size, crc = region
    data = _read(fd, size, offset)
    if len(data) != size or crc32c(data) != crc:
        raise CSDStoreError(f"{path}: the {what} is damaged")
    return data


def _superblocks(fd: int, path: str) -> list[Superblock]:
    """The valid ones, the current one first."""
    found = [Superblock.unpack(_read(fd, PAGE, i * PAGE), path) for i in range(2)]
    return sorted((s for s in found if s), key=lambda s: -s.sequence)


def read_contents(path: Path) -> Contents:
    """Reads what a store says of itself, without changing or locking it.

    `path` is the store's directory or the file. Raises FileNotFoundError, CSDStoreError.
    """
    file = path / FILE_NAME if path.is_dir() else path
    try:
        return _read_contents(file)
    except CSDStoreError:
        return _read_contents(file)  # its owner may have written a newer table while we read the old one


def _read_contents(file: Path) -> Contents:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        blocks = _superblocks(fd, str(file))
        if not blocks:
            raise CSDStoreError(f"{file} is no csd_optim store, or both of its superblocks are damaged")
        for block in blocks:
            try:
                data = _read_region(fd, block.manifest, "manifest", str(file))
                table = _read_region(fd, block.table, "slot table", str(file))
                break
            except CSDStoreError:
                if block is blocks[-1]:
                    raise
        manifest = json.loads(data)
        n_tiles, n_params = manifest["tiles"], len(manifest["params"])
        tiles = np.frombuffer(table, _TILE_ENTRY, n_tiles)
        steps = np.frombuffer(table, "<f8", n_params, offset=tiles.nbytes)
        stat = os.fstat(fd)
        return Contents(block, manifest, tiles, steps, stat.st_size, 512 * stat.st_blocks)
    finally:
        os.close(fd)


def lock_owner(stat: os.stat_result) -> int | None:
    """The process that owns a store's file, None if none is seen. Only looks: takes no lock, not for an instant."""
    inode = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    with contextlib.suppress(OSError):  # no /proc: only the message is poorer
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # number, kind, ADVISORY, WRITE, process, inode, first, last
            if len(fields) > 5 and fields[5] == inode and fields[1] != "->":
                return int(fields[4])
    return None


def _lock(fd: int, path: Path) -> None:
    """Makes this process the owner of the file. Raises CSDBusyError."""
    owner = None
    for _ in range(2):
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = lock_owner(os.fstat(fd))
            if owner != os.getpid():
                break
            gc.collect()  # an optimizer that was dropped, and hangs on a reference cycle, say with its scheduler
    if owner == os.getpid():
        who = "another optimizer of this process; close() that"
    else:
        who = f"{'another process' if owner is None else f'process {owner}'}; stop that"
    raise CSDBusyError(errno.EWOULDBLOCK, f"{path} is in use by {who}, or name another directory")


def _users_stacklevel() -> int:
    """The stacklevel, for a warning from the calling function, of the line that made us do this."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("csd_optim", "torch"):
        frame, level = frame.f_back, level + 1
    return level


class StoreFile:
    """One open store, owned by this process until `close()`.

    Not `durable`: a nameless file in the directory, or in memory without one, gone with the process, however that ends.
    Raises CSDStoreExistsError, CSDBusyError, CSDStoreError, CSDOSError; an existing store is only touched with
    `overwrite`, and a file that is no store never.
    """

    def __init__(self, directory: Path | None, *, durable: bool, overwrite: bool = False) -> None:
        self.durable = durable
        self.direct: bool | None = None  # past the page cache? None: there is none
        self.fd = self.io_fd = -1
        self.sequence = 0
        self.end = 2 * PAGE
        self._is_new = not durable  # a file of our own, which nobody misses until it has a superblock
        self._current: Superblock | None = None
        self._spaces: dict[str, list[tuple[int, int]]] = {"manifest": [], "table": []}  # two of each: offset, size
        try:
            if directory is None:
                self.path = Path("memory")
                self.fd = os.memfd_create("csd_optim")
                self.io_fd = os.dup(self.fd)
            elif durable:
                self.path = self._open_durable(directory.resolve(), overwrite)
            else:
                self.path = self._open_scratch(directory.resolve())
        except BaseException as e:
            self.close()
            if isinstance(e, CSDOSError) or not isinstance(e, OSError):
                raise
            where = directory.resolve() if directory else "memory"
            raise CSDOSError(e.errno, f"cannot open a store in {where}: {e.strerror}") from e

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

    def _open_durable(self, directory: Path, overwrite: bool) -> Path:
        if directory.exists() and not directory.is_dir():
            raise CSDOSError(errno.ENOTDIR, f"{directory} is a file; a device is a directory")
        if not directory.parent.is_dir():
            raise CSDOSError(errno.ENOENT, f"there is no directory {directory.parent} to make {directory.name} in")
        directory.mkdir(exist_ok=True)
        path = directory / FILE_NAME
        while True:
            self.fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            _lock(self.fd, path)
            if self._has_name(path):
                break
            os.close(self.fd)  # an owner removed it between the two calls above: the name is another file's, or free
            self.fd = -1
        self._is_new = os.fstat(self.fd).st_size == 0
        if not self._is_new:
            head = _read(self.fd, 2 * PAGE, 0)
            # All zero: the process that began to make it was killed before it could say what it is.
            if MAGIC not in (head[:8], head[PAGE : PAGE + 8]) and any(head):
                raise CSDStoreExistsError(errno.EEXIST, f"{path} exists and is no csd_optim store; move it away")
            if not overwrite:
                held = _superblocks(self.fd, str(path))
                step = f" of step {held[0].step}" if held else ""
                raise CSDStoreExistsError(
                    errno.EEXIST,
                    f"{path} holds a store{step}; pass overwrite=True to erase it, or name another directory",
                )
        return path

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
        fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            _lock(fd, temporary)
            temporary.replace(self.path)
        except BaseException:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        os.close(self.fd)
        self.fd, self._is_new = fd, True

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Errors of the operating system say which file they are about."""
        try:
            yield
        except OSError as e:
            if isinstance(e, CSDOSError):
                raise
            raise CSDOSError(e.errno, f"{self.path}: cannot {what}: {e.strerror}") from e

    def _open_direct(self) -> None:
        """Opens the file a second time for O_DIRECT and tries it out: some file systems refuse only the I/O itself."""
        try:
            self.io_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
            with mmap.mmap(-1, PAGE) as page:
                os.pwritev(self.io_fd, [page], PAGE)
                os.preadv(self.io_fd, [page], PAGE)
            self.direct = True
        except OSError as e:
            if self.io_fd >= 0:
                os.close(self.io_fd)
                self.io_fd = -1
            if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY):
                raise
            self.io_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
            self.direct = False
            warnings.warn(
                f"{self.path}: this file system has no direct I/O; tiles go through the page cache, which is slower "
                "and takes host memory. Use a directory on ext4 or xfs on a local drive for speed.",
                CSDWarning,
                stacklevel=_users_stacklevel(),
            )

    def allocate(self, size: int) -> int:
        """Reserves `size` bytes, all of them on the disk, at the end of the file; returns their offset (bytes).

        Raises CSDOSError when the disk is full, and then gives back what it had taken.
        """
        if self.io_fd < 0:
            with self._naming("write"):
                if not self._is_new:
                    self._replace()
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
                f"{self.path}: no room for {size / 1e9:.2f} GB of optimizer state (24 bytes per parameter, 32 with "
                f"amsgrad): {e.strerror}; {free.f_bavail * free.f_frsize / 1e9:.2f} GB are free",
            ) from e
        self.end = offset + size
        return offset

    def shrink(self, end: int) -> None:
        """Gives back what was allocated from byte `end` on."""
        os.ftruncate(self.fd, end)
        self.end = end

    def sync(self) -> None:
        """Waits until everything written so far, through mappings too, is on the disk. Raises CSDOSError."""
        if self.io_fd >= 0:
            with self._naming("write"):
                os.fdatasync(self.fd)

    def write_superblock(
        self,
        *,
        store_id: bytes,
        device: int,
        devices: int,
        step: int,
        clean: bool,
        manifest: dict[str, Any] | None,
        tiles: np.ndarray[Any, Any],
        steps: np.ndarray[Any, Any],
    ) -> None:
        """Makes the state described by `tiles` (dtype TILE_STATE) and `steps` the one a reader finds.

        `manifest` None: the one that is there stays valid.
        """
        assert tiles.dtype == TILE_STATE
        sequence = self.sequence + 1
        if manifest is not None:
            named = self._write_beside("manifest", json.dumps(manifest).encode())
        else:
            assert self._current is not None
            named = self._current.manifest
        table = self._write_beside("table", tiles.astype(_TILE_ENTRY).tobytes() + steps.astype("<f8").tobytes())
        block = Superblock(store_id, device, devices, sequence, step, CLEAN if clean else 0, named, table)
        with self._naming("write the superblock"):
            os.fdatasync(self.fd)  # first what the superblock names, then the superblock
            _write(self.fd, block.pack(), sequence % 2 * PAGE)
            os.fdatasync(self.fd)
        # Not before: a second attempt must touch nothing that is valid.
        self.sequence, self._current = sequence, block

    def _write_beside(self, what: str, data: bytes) -> tuple[int, int, int]:
        """Writes a manifest or table where the valid superblock does not look; returns what the next one is to name."""
        valid = getattr(self._current, what)[0] if self._current else 0
        free = [offset for offset, size in self._spaces[what] if offset != valid and size >= len(data)]
        if not free:
            # Room to grow, as parameters may join one by one; and two, so that close() never finds the disk full.
            size = 2 * len(data)
            free = [self.allocate(size) for _ in range(2)]
            self._spaces[what] = [(offset, size) for offset in free]
        offset = free[0]
        with self._naming(f"write the {what}"):
            _write(self.fd, data, offset)
        return offset, len(data), crc32c(data)

    def close(self) -> None:
        """Lets go of the file. One that never became a store leaves no trace."""
        try:
            if self.fd >= 0 and self.durable and self._is_new and self.sequence == 0 and self._has_name(self.path):
                self.path.unlink()
        finally:
            if self.fd >= 0:
                fcntl.flock(self.fd, fcntl.LOCK_UN)  # a forked child may keep the file open
            for fd in (self.io_fd, self.fd):
                if fd >= 0:
                    os.close(fd)
            self.fd = self.io_fd = -1
