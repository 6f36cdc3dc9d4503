"""Power loss: the calls by which a run changes its files are recorded, and the record is cut off at any instant.

What a completed flush covers is on the disk. Every other sector holds what it held before, or what one of the pending
writes would have put there. Each image of the disks that can result must open at a committed step.

A failed flush covers nothing. Writes made before it are not covered by later flushes either: they may be on the disk or
not, until they are made again, or read from the disk itself after a flush that succeeds.
"""

import contextlib
import ctypes
import errno
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import faults
import numpy as np
from faults import ERROR
from faults import SYNC as SYNC_CALL

from csd_optim import CSDOSError
from csd_optim.bindings import crc32c
from csd_optim.store.format import FILE_NAME, PAGE, Superblock

from .kills import devices_in
from .processes import CHANGES, COMMITS, KILL_EFFECTS, Child, Shared, in_child, kill_at
from .training import LAST, StoppedTraining, Violation, named, reference

SECTOR = 512
# As in faults/record.c.
WRITE, ALLOCATE, TRUNCATE, SYNC, SYNC_DIRECTORY, RENAME, MARK, DONE, OTHER, CREATE, SEEN, READ, READ_DIRECT, DROP = (
    range(1, 15)
)
NAMES = (
    "",
    "write",
    "allocate",
    "truncate",
    "flush",
    "flush of the directory",
    "rename",
    "mark",
    "",
    "unlink",
    "create",
    "the end of a process that wrote",
    *("read", "read past the cache", "drop of the cache"),
)
HEAD = np.dtype([("active", "u8"), ("end", "u8"), ("room", "u8"), ("root", "S232")])
ENTRY = np.dtype(
    [(name, "u8") for name in ("bytes", "what", "process", "call", "at", "n", "data")] + [("path", "S136")]
)


# ---- recording -----------------------------------------------------------------


@dataclass
class Entry:
    """One entry of the log: a call that is about to be made or, with `done`, has returned."""

    what: int
    done: bool
    process: int
    call: int
    at: int
    n: int
    path: str
    data: bytes = b""
    mapped: list = field(default_factory=list)  # for a flush: pages that were written through mappings, without a call
    ahead: list = field(default_factory=list)  # the `mapped` pages of the file's next flush

    def __str__(self):
        file, what = Path(self.path).parent.name, NAMES[self.what]
        where = f" of {self.n} bytes at {self.at}" if self.what in (WRITE, ALLOCATE) else ""
        return f"{'the end of ' if self.done else ''}{what}{where} to {file}" if file else f"{what} {self.n}"


class Recording:
    """All changes of a run to its stores, in one order. The run is stopped and resumed several times.

    `killed`: its first two processes are killed at some call; otherwise they close.
    """

    def __init__(self, seed, n_devices, directory, *, killed, choose):
        self.seed, self.n_devices, self.killed = seed, n_devices, killed
        self.expected = in_child(reference, seed)
        with TemporaryDirectory(dir=directory) as store:
            log = np.memmap(os.environ["CSD_RECORD"], np.uint8, "r+")
            head = log[: HEAD.itemsize].view(HEAD)[0]
            head["end"], head["room"], head["root"] = HEAD.itemsize, len(log), os.fsencode(store)
            head["active"] = 1
            try:
                self._run(store, choose)
            finally:
                head["active"] = 0
            self.entries = _entries(log[: int(head["end"])])
            _find_mapped(self.entries)
            self._check_fidelity(store)

    def _run(self, store, choose):
        shared = Shared()
        # In most recordings a flush fails, too, which does not mean that anything was lost.
        flush = choose.randrange(120)
        with faults.rule(SYNC_CALL, store, ERROR, errno.EIO, skip=flush, times=choose.choice([0, 1, 1, 2])):
            self._processes(shared, store, choose)
        self._process(shared, store, LAST)

    def _processes(self, shared, store, choose):
        for until in (18, 22) if not self.killed else (choose.randint(4, 16), choose.randint(17, 22)):
            # A run makes about 20 calls per event, and about 50 up to its first commit.
            call = choose.randrange(choose.choice([50, 20 * until])) if self.killed else 1 << 60
            # Half of the kills hit a commit, or never strike if there are fewer calls of that kind.
            kinds = choose.choice([CHANGES, COMMITS])
            with kill_at(call, KILL_EFFECTS[choose.choice([*KILL_EFFECTS])], store, kinds):
                self._process(shared, store, until)

    def _process(self, shared, store, until):
        with Child(shared, lambda: _train(self.seed, devices_in(store, self.n_devices), until)) as child:
            if child.wait() not in (0, -signal.SIGKILL):
                raise Violation(f"{self}: {shared.said()}")
        for device in devices_in(store, self.n_devices):
            ctypes.CDLL(None).csd_record_seen(os.fsencode(f"{device}/{FILE_NAME}"))

    def _check_fidelity(self, store):
        """Check that the final content of the files follows from the log, so that no call was missed."""
        disk = Disk(self)
        for entry in self.entries:
            disk.pass_by(entry)
        for path, file in disk.files.items():
            content, _ = file.image(None)
            if content != Path(store + path).read_bytes():
                raise RuntimeError(f"{self}: the recorder missed something that happened to {path}")

    def __str__(self):
        how = "killed twice" if self.killed else "closed twice"
        return f"recording (training seed {self.seed}, {self.n_devices} devices, {how})"


def _train(seed, devices, until):
    mark = ctypes.CDLL(None).csd_record_mark
    try:
        training = StoppedTraining(seed, devices)
    except CSDOSError:  # a flush has failed
        return
    try:
        while training.event < until:
            mark(ctypes.c_uint64(2 * training.opt.committed_step))
            event = training.next_event()
            mark(ctypes.c_uint64(event if event % 2 else 2 * training.opt.committed_step))
        training.opt.close()
    except CSDOSError:
        with contextlib.suppress(CSDOSError):
            training.opt.close()
    else:
        mark(ctypes.c_uint64(training.event))


def _entries(log):
    entries, begun, at = [], {}, HEAD.itemsize
    while at < len(log):
        row = log[at : at + ENTRY.itemsize].view(ENTRY)[0]
        what, call, data = int(row["what"]), int(row["call"]), int(row["data"])
        path = os.fsdecode(row["path"])
        entry = Entry(
            begun[call].what if what == DONE else what,
            what == DONE,
            int(row["process"]),
            call,
            int(row["at"]),
            int(row["n"].astype(np.int64)),
            path,
            log[at + ENTRY.itemsize :][:data].tobytes(),
        )
        if what == WRITE:
            entry.n = data
        if what != DONE:
            begun[call] = entry
        entries.append(entry)
        at += int(row["bytes"])
    return entries


def _will_be(path):
    """Return the path of the store that a temporary file is going to replace; "" for other files."""
    path = Path(path)
    return str(path.with_name(FILE_NAME)) if path.name.startswith(f".{FILE_NAME}.") else ""


def _find_mapped(entries):
    """Find for every flush the pages that changed since the previous one without a call."""
    shadows, under_way, last, new = {}, {}, {}, {}
    for entry in entries:
        if entry.what in (WRITE, ALLOCATE) and not entry.done and (path := _will_be(entry.path)):
            _apply(new.setdefault(path, bytearray()), entry)
        if entry.what == OTHER:  # removed before it became a store
            shadows.pop(entry.path, None)
            last.pop(entry.path, None)
        if entry.what in (SYNC_DIRECTORY, MARK, OTHER, READ, READ_DIRECT, DROP) or Path(entry.path).name != FILE_NAME:
            continue
        if entry.done:
            under_way.pop(entry.call, None)
            continue
        if entry.what == RENAME:
            shadows[entry.path], last[entry.path] = new.pop(entry.path, bytearray()), entry
            continue
        shadow = shadows.setdefault(entry.path, bytearray())
        last.setdefault(entry.path, entry)
        if entry.what not in (SYNC, SEEN):
            _apply(shadow, entry)
            under_way[entry.call] = entry
            continue
        # The file may show part of a write in flight.
        calls = [other for other in under_way.values() if other.path == entry.path]
        busy = {
            page
            for other in calls
            if other.what == WRITE
            for page in range(other.at // PAGE, -(-(other.at + other.n) // PAGE))
        }
        seen = entry.data
        if entry.what == SEEN:
            for other in calls:
                _correct(other, seen)
                del under_way[other.call]
            shadow[:], busy = shadow[: len(seen)].ljust(len(seen), b"\0"), {}
            for other in calls:
                _apply(shadow, other)
        for page in range(-(-len(seen) // PAGE)):
            now = seen[page * PAGE : (page + 1) * PAGE]
            if page not in busy and shadow[page * PAGE : (page + 1) * PAGE] != now:
                entry.mapped.append((page * PAGE, now))
                _put(shadow, page * PAGE, now)
        last[entry.path].ahead, last[entry.path] = entry.mapped, entry


def _correct(call, seen):
    """Reduce a call in which its process was killed to the part that the file shows."""
    if call.what == WRITE:
        call.data = seen[call.at : call.at + call.n]
        call.n = len(call.data)
    elif call.what == ALLOCATE:
        call.n = max(0, min(call.n, len(seen) - call.at))
        call.at = min(call.at, len(seen))
    elif call.what == TRUNCATE:
        call.n = len(seen)


def _put(content, at, data):
    if len(content) < at:
        content.extend(bytes(at - len(content)))
    content[at : at + len(data)] = data


def _apply(content, entry):
    if entry.what == WRITE:
        _put(content, entry.at, entry.data)
    elif entry.what == ALLOCATE:
        content.extend(bytes(max(0, entry.at + entry.n - len(content))))
    elif entry.what == TRUNCATE:
        if entry.n < len(content):
            del content[entry.n :]
        else:
            content.extend(bytes(entry.n - len(content)))


# ---- a disk over time ------ -----------------------------------------------------


@dataclass
class Pending:
    """A write or a change of size that may not have reached the disk yet."""

    entry: Entry
    returned: bool = False
    doomed: bool = False  # a flush of it failed: no later flush covers it

    def replaced(self, by):
        """Take over the content of the range that a later, flushed write `by` covers: it is known to be there."""
        first, last = max(self.entry.at, by.at), min(self.entry.at + self.entry.n, by.at + by.n)
        if first < last:
            data = bytearray(self.entry.data)
            data[first - self.entry.at : last - self.entry.at] = by.data[first - by.at : last - by.at]
            self.entry = replace(self.entry, data=bytes(data))


class File:
    """One store file: what is on the disk for certain, and what may be."""

    def __init__(self, before, mapped):
        self.safe = bytearray()
        self.pending = {}  # by call
        self.mapped = mapped  # pages written through mappings before the next flush, as it will see them
        self.covered = {}  # the calls that each flush in flight covers
        self.readable = self.dropped = False  # after a good flush: direct reads, or all reads, come from the disk
        self.named = set()  # directories that were flushed since the file was created
        self.before = before  # the file that had this name, and may still have it on the disk

    def doom(self, flush):
        """Mark the calls of a failed flush. Not changes of size: a file system whose journal fails stops for good."""
        calls, mapped = self.covered.pop(flush)
        for call in calls:
            if call in self.pending and self.pending[call].entry.what == WRITE:
                self.pending[call].doomed = True
        for i, write in enumerate(mapped):
            self.pending[flush, i] = Pending(write, returned=True, doomed=True)
        self.readable = self.dropped = False

    def cut(self, size):
        """Drop what was written before a change of size that was flushed, and lay behind the new end."""
        for key, pending in [*self.pending.items()]:
            entry, call = pending.entry, key[0] if isinstance(key, tuple) else key
            if pending.doomed and call < size.call and entry.at + entry.n > size.n:
                pending.entry = replace(
                    entry, data=entry.data[: max(0, size.n - entry.at)], n=max(0, size.n - entry.at)
                )
                if not pending.entry.n:
                    del self.pending[key]

    def read(self, at, n):
        """Note that this range was read from the disk: what it returned is there."""
        there = [p for p in self.pending.values() if p.entry.what == WRITE]
        for k, pending in enumerate(there):
            entry = pending.entry
            first, last = max(at, entry.at), min(at + n, entry.at + entry.n)
            newer = (p.entry for p in there[k + 1 :])
            if pending.doomed and first < last and not any(e.at < last and first < e.at + e.n for e in newer):
                _put(self.safe, first, entry.data[first - entry.at : last - entry.at])

    def has(self, block):
        """Return whether copy 0 of this superblock's manifest and table is on the disk for certain."""
        regions = ((r.offset(0), r.size, r.crc) for r in (block.manifest, block.table))
        return all(crc32c(bytes(self.safe[at : at + size])) == crc for at, size, crc in regions)

    def image(self, choose):
        """Return a possible content of the disk, and a word that describes it. `choose` None: all writes, in order."""
        writes = [p.entry for p in self.pending.values()]
        writes += [Entry(WRITE, False, 0, 0, at, len(data), "", data) for at, data in self.mapped if choose]
        content = bytearray(self.safe)
        how = choose.choice(HOW) if choose else "all"
        # Changes of size take effect in order, because a file system's journal is ordered.
        sizes = [w for w in writes if w.what != WRITE]
        kept = sizes if how == "all" else sizes[: choose.randint(0, len(sizes))]
        if how not in ("all", "superblocks only") and not sizes:
            choose.shuffle(writes)
        for entry in writes:
            if entry.what != WRITE:
                if any(entry is k for k in kept):
                    _apply(content, entry)
                continue
            is_superblock = entry.at < 2 * PAGE
            whole = {
                "none": False,
                "all": True,
                "superblocks only": is_superblock,
                "all but superblocks": not is_superblock,
                "some": choose and choose.random() < 0.5,
            }.get(how)
            torn = whole is None and (how == "torn" or is_superblock)
            if torn:
                share = choose.choice([0.1, 0.5, 0.9])
                for first in range(0, entry.n, SECTOR):
                    if choose.random() < share:
                        _put(content, entry.at + first, entry.data[first : first + SECTOR])
            elif whole or whole is None:
                _apply(content, entry)
        return content, how


HOW = ("none", "all", "superblocks only", "all but superblocks", "some", "torn", "torn", "torn superblocks")


class Disk:
    """The disks of a recording at one instant of it."""

    def __init__(self, recording):
        self.recording = recording
        self.files = {}  # by path
        self.new = {}  # by the path that they will have: files that replace others
        self.begun = {}  # reads in flight, by call
        self.flushed = {}  # by path: the last step whose copy 0 is safe in that file
        self.promised = 0  # the last event that the optimizer has called durable

    def pass_by(self, entry):
        """Apply an entry of the log."""
        if entry.what == MARK:
            self.promised = max(self.promised, entry.n)
        elif entry.what == SYNC_DIRECTORY:
            if entry.done and entry.n == 0:
                for path, file in self.files.items():
                    if entry.path in ("", str(Path(path).parent)):
                        file.named.add(entry.path)
        elif entry.what == RENAME:
            # If the process is killed before it happens, the next one does it again.
            if not entry.done:
                self._forget(entry.path)
                new = self.new.pop(entry.path, None) or File(None, ())
                new.before, new.mapped = self.files.get(entry.path), entry.ahead
                self.files[entry.path] = new
        elif entry.what == OTHER:
            self._forget(entry.path)
            self.files.pop(entry.path, None)
        elif Path(entry.path).name == FILE_NAME:
            self._pass_file(self.files, entry.path, entry)
        elif path := _will_be(entry.path):
            self._pass_file(self.new, path, entry)

    def _forget(self, path):
        """Forget a file that was replaced or removed. What it flushed no longer counts, except a step that all have."""
        self.promised = self.durable
        self.flushed.pop(path, None)

    def _pass_file(self, files, path, entry):
        if path not in files:
            files[path] = File(None, entry.ahead)
        file = files[path]
        if entry.what == CREATE:
            return
        if entry.what == DROP:
            file.dropped = file.readable
            return
        if entry.what in (READ, READ_DIRECT):
            if entry.done and file.readable and (entry.what == READ_DIRECT or file.dropped):
                file.read(self.begun.pop(entry.call).at, entry.n)
            elif not entry.done:
                self.begun[entry.call] = entry
            return
        if entry.what == SEEN:
            for pending in file.pending.values():
                pending.returned = True  # or never will
            file.mapped = file.mapped + entry.ahead
            return
        if entry.what != SYNC:
            if not entry.done:
                file.pending[entry.call] = Pending(entry)
                file.dropped = False
            elif entry.call in file.pending:
                # A short write has written as much as it returned, a failed one nothing.
                pending = file.pending[entry.call]
                pending.returned = True
                if entry.what == WRITE and entry.n < pending.entry.n:
                    raise RuntimeError(f"{self.recording}: a short write, which the replay does not know")
        elif not entry.done:
            calls = [c for c, p in file.pending.items() if p.returned and not p.doomed]
            file.covered[entry.call] = (
                calls,
                [Entry(WRITE, False, 0, 0, at, len(data), "", data) for at, data in file.mapped],
            )
            file.mapped = entry.ahead  # from now on, these pages may be written
        elif entry.n != 0:
            file.doom(entry.call)
        else:
            calls, mapped = file.covered.pop(entry.call)
            for write in (*(p.entry for c in calls if (p := file.pending.pop(c, None))), *mapped):
                _apply(file.safe, write)
                for doomed in file.pending.values() if write.what == WRITE else ():
                    if doomed.doomed:
                        doomed.replaced(write)
                if write.what == TRUNCATE:
                    file.cut(write)
            file.readable = True
            if (block := Superblock.unpack(bytes(file.safe[:PAGE]), entry.path)) and file.has(block):
                self.flushed[entry.path] = block.step

    @property
    def durable(self):
        """Return the last event that a power loss now must not undo."""
        files = self.files.items()
        if len(files) < self.recording.n_devices or not all(len(f.named) == 2 for _, f in files):
            return self.promised
        return max(self.promised, 2 * min(self.flushed.get(path, 0) for path, _ in files))

    def lose_power(self, directory, choose):
        """Write an image of all devices to `directory`. Returns a description of it."""
        said = []
        alike = choose.random() < 0.3  # the random choices are the same for all disks
        seed = choose.random()
        for path, file in self.files.items():
            of_file = random.Random(seed) if alike else choose
            if len(file.named) < 2 and of_file.random() < 0.3:
                if file.before is None:
                    said.append(f"{path}: not there")
                    continue
                said.append(f"{path}: the one before")
                file = file.before
            content, how = file.image(of_file)
            target = Path(f"{directory}{path}")
            target.parent.mkdir()
            target.write_bytes(content)
            said.append(f"{path}: {how} of {len(file.pending)} writes and {len(file.mapped)} pages")
        return "; ".join(said)


# ---- checking ------------------------------------------------------------------


def check_image(recording, directory, durable, choose):
    training = StoppedTraining(recording.seed, devices_in(directory, recording.n_devices))
    training.check(recording.expected, durable)
    event = training.event
    if event == 0 or choose.random() < 0.15:
        training.check_next(recording.expected)
    training.opt.close()
    return event


class PowerLosses:
    """Images of one recording, made and checked by several children in parallel."""

    LANES = 2

    def __init__(self, seed, recording, directory, keep):
        self.seed, self.recording = seed, recording
        self.directory = directory
        self.keep = keep
        self.fresh = 0

    def run(self, images, tick):
        choose = random.Random(f"{self.seed} {self.recording}")
        points = sorted(choose.choice([*self._moments()])(choose) for _ in range(images))
        lanes = []
        try:
            for lane in range(self.LANES):
                shared = Shared()
                mine = points[lane :: self.LANES]
                lanes.append(Child(shared, lambda s=shared, m=mine, k=lane: self._lane(s, m, k)))
            done = 0
            while True:
                ended = [child.ended() for child in lanes]
                now = sum(int(child.shared.numbers[Shared.EVENT]) for child in lanes)
                tick(now - done)
                done = now
                if all(ended):
                    break
                time.sleep(0.05)
            for child in lanes:
                if child.code != 0:
                    raise Violation(f"power loss, seed {self.seed}, {self.recording}: {child.shared.said()}")
                self.fresh += int(child.shared.numbers[Shared.DURABLE])
        finally:
            for child in lanes:
                child.kill()

    def _moments(self):
        """Yield functions that choose a moment: any moment, and particularly delicate ones."""
        entries = self.recording.entries
        yield lambda choose: choose.randint(0, len(entries))
        # Writes of superblocks, and all flushes.
        delicate = [
            i
            for i, e in enumerate(entries)
            if e.what in (SYNC, SYNC_DIRECTORY) or (e.what == WRITE and e.at < 2 * PAGE)
        ]
        yield lambda choose: choose.choice(delicate) + choose.randint(0, 1)
        # Before the first commit.
        first = next(i for i, e in enumerate(entries) if e.what == MARK and e.n)
        yield lambda choose: choose.randint(0, first)
        # While a process recovers what the previous one has left.
        begins = [i for i in range(1, len(entries)) if entries[i - 1].what == SEEN != entries[i].what]
        ends = [next((i for i in range(b, len(entries)) if entries[i].what == MARK), len(entries)) for b in begins]
        windows = [*zip(begins, ends, strict=True)]
        if windows:  # otherwise a flush failed before anything was written
            yield lambda choose: choose.randint(*choose.choice(windows))

    def _lane(self, shared, points, lane):
        disk, at = Disk(self.recording), 0
        for number, point in enumerate(points):
            for entry in self.recording.entries[at:point]:
                disk.pass_by(entry)
            at = point
            choose = random.Random(f"{self.seed} {lane} {number}")
            with TemporaryDirectory(dir=self.directory) as image:
                said = disk.lose_power(image, choose)
                before = str(self.recording.entries[point - 1]) if point else "the beginning"
                copy = shutil.copytree(image, Path(image) / "copy", ignore=shutil.ignore_patterns("copy"))
                try:
                    event = check_image(self.recording, image, disk.durable, choose)
                except Exception as e:
                    self.keep(copy)
                    what = f"entry {point} of {len(self.recording.entries)}, after {before}"
                    durable = f"{named(disk.durable)} was durable"
                    raise Violation(f"image {number} of lane {lane}, at {what}; {durable}; {said}") from e
            shared.numbers[Shared.EVENT] += 1
            shared.numbers[Shared.DURABLE] += event == 0
