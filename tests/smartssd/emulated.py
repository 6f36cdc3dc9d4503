"""Programs that drive XRT by its C API. test_emulation.py runs each in its own process, with emulated cards:
`python emulated.py NAME [ARGUMENT...]`. Each checks its results itself, and exits with status 0 if they are right.
"""

import mmap
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import cffi
import numpy as np

ffi = cffi.FFI()
ffi.cdef(
    """
    typedef void *handle;
    handle xrtDeviceOpen(unsigned int index);
    int xrtDeviceLoadXclbinFile(handle device, const char *path);
    int xrtDeviceGetXclbinUUID(handle device, unsigned char *uuid);
    int xrtDeviceClose(handle device);
    handle xrtPLKernelOpen(handle device, const unsigned char *uuid, const char *name);
    int xrtKernelClose(handle kernel);
    handle xrtBOAlloc(handle device, size_t size, unsigned int flags, unsigned int group);
    void *xrtBOMap(handle buffer);
    int xrtBOSync(handle buffer, int direction, size_t size, size_t offset);
    int xrtBOFree(handle buffer);
    handle xrtRunOpen(handle kernel);
    int xrtRunSetArg(handle run, int index, ...);
    int xrtRunStart(handle run);
    int xrtRunState(handle run);
    int xrtRunClose(handle run);
    """
)
xrt = ffi.dlopen("libxrt_coreutil.so.2")

CACHEABLE, P2P = 1 << 24, 1 << 30
TO_DEVICE, FROM_DEVICE = 0, 1
COMPLETED = 4
PAGE = 4096
KERNEL = "csd_adamw_update"
REPORT = 2 * 64  # bytes: a header, and the checksums of the only chunk
TAKEN_BY_XRT = [signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGUSR1, signal.SIGCHLD]

# The memory layouts of csd_kernel.h.
SEGMENT = np.dtype(
    [
        *((name, "u4") for name in ("first_word", "elems", "grad_dtype", "param_dtype")),
        ("rule", "u4"),
        ("hyper", "f4", 9),
        *((name, "u4") for name in ("sparse", "reserved")),
    ]
)
HYPER = np.array([0.999, 0.9, 0.1, 0.999, 0.001, 0.01, 3.0, 1e-8, 0.5], "f4")
F32, F16 = 0, 1


class Card:
    """A card with our xclbin loaded. At the end, everything opened on it is closed in the right order."""

    def __init__(self, index, xclbin=None):
        self.handle = xrt.xrtDeviceOpen(index)
        assert self.handle
        assert xrt.xrtDeviceLoadXclbinFile(self.handle, (xclbin or os.environ["CSD_OPTIM_XCLBIN"]).encode()) == 0
        self.uuid = ffi.new("unsigned char[16]")
        assert xrt.xrtDeviceGetXclbinUUID(self.handle, self.uuid) == 0
        self.runs, self.kernels, self.buffers = [], [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for close, handles in (
            (xrt.xrtRunClose, self.runs),
            (xrt.xrtKernelClose, self.kernels),
            (xrt.xrtBOFree, self.buffers),
            (xrt.xrtDeviceClose, [self.handle]),
        ):
            for handle in handles:
                assert close(handle) == 0

    def buffer(self, size, flags):
        size += -size % PAGE
        handle = xrt.xrtBOAlloc(self.handle, size, flags, 0)
        assert handle
        self.buffers.append(handle)
        return handle, np.frombuffer(ffi.buffer(xrt.xrtBOMap(handle), size), "u1")

    def kernel(self, name):
        handle = xrt.xrtPLKernelOpen(self.handle, self.uuid, name.encode())
        if handle:
            self.kernels.append(handle)
        return handle


class Update:
    """A run of the kernel over a tile with one segment, and its buffers."""

    def __init__(self, card, n_words, elems, grad_dtype=F32, param_dtype=F32, sparse=False):
        self.n_words = n_words
        tile_bytes = 3 * 64 * n_words
        self.tile, self.tile_map = card.buffer(tile_bytes, P2P)
        self.out, self.out_map = card.buffer(tile_bytes, P2P)
        self.grad, self.grad_map = card.buffer(64 * n_words, CACHEABLE)
        self.entries, self.entry_map = card.buffer(PAGE, CACHEABLE)
        self.segment, segment_map = card.buffer(PAGE, CACHEABLE)
        self.param, self.param_map = card.buffer(64 * n_words, CACHEABLE)
        self.report, self.report_map = card.buffer(PAGE, CACHEABLE)
        segment_map[:64].view(SEGMENT)[0] = (0, elems, grad_dtype, param_dtype, 0, HYPER, sparse, 0)
        to_card(self.segment, 64)
        words = [-(-elems // (16 if dtype == F32 else 32)) for dtype in (grad_dtype, param_dtype)]
        counts = [n_words, 3, 1, 0 if sparse else words[0], int(sparse), words[1], n_words]
        self.run = xrt.xrtRunOpen(card.kernel(KERNEL))
        card.runs.append(self.run)
        buffers = [*[self.tile] * 4, self.grad, self.entries, self.segment, *[self.out] * 4, self.param, self.report]
        for i, argument in enumerate([*buffers, *(ffi.cast("unsigned int", n) for n in counts)]):
            assert xrt.xrtRunSetArg(self.run, i, argument) == 0

    def start(self):
        self.report_map[:REPORT] = 0
        to_card(self.report, REPORT)
        assert xrt.xrtRunStart(self.run) == 0

    def wait(self, seconds=120.0):
        """Waits until the run has ended, for at most `seconds`; returns its state."""
        deadline = time.monotonic() + seconds
        while (state := xrt.xrtRunState(self.run)) < COMPLETED and time.monotonic() < deadline:
            time.sleep(1e-4)
        return state

    def read_report(self):
        from_card(self.report, REPORT)
        return self.report_map[:REPORT].view("u4").copy()

    def did(self):
        """Starts the run; returns whether it completed and its report says so."""
        self.start()
        return self.wait() == COMPLETED and self.read_report()[1] == self.n_words


def to_card(buffer, size):
    assert xrt.xrtBOSync(buffer, TO_DEVICE, size, 0) == 0


def from_card(buffer, size):
    assert xrt.xrtBOSync(buffer, FROM_DEVICE, size, 0) == 0


def open_direct(path):
    """Opens a file with O_DIRECT if the file system supports it; returns (file descriptor, whether it does)."""
    flags = os.O_RDWR | os.O_CREAT
    with suppress(OSError):
        fd = os.open(path, flags | os.O_DIRECT)
        os.preadv(fd, [mmap.mmap(-1, PAGE)], 0)
        return fd, True
    return os.open(path, flags), False


@contextmanager
def handlers_kept():
    """Restores the signal handlers that XRT's driver replaces: that for SIGCHLD ends the process group if any child is
    killed."""
    before = [(number, signal.getsignal(number)) for number in TAKEN_BY_XRT]
    yield
    for number, handler in before:
        signal.signal(number, handler)


# ---- programs ----------------------------------------------------------------------


def update(directory, n_words, elems):
    """On each card, reads the tile from its drive into P2P memory, updates it there and writes it back the same way."""
    directory, n_words, elems = Path(directory), int(n_words), int(elems)
    drives = os.environ["CSD_OPTIM_EMULATED_DRIVES"].split(os.pathsep)
    cards = [Card(i) for i in range(len(drives))]
    updates = []
    for i, (card, drive) in enumerate(zip(cards, drives, strict=True)):
        u = Update(card, n_words, elems, F16, F16)
        assert u.tile_map.ctypes.data % PAGE == 0
        fd, direct = open_direct(Path(drive, "tile"))
        assert os.preadv(fd, [u.tile_map], 0) == len(u.tile_map)  # written by the test
        grad = np.load(directory / f"grad{i}.npy").view("u1")
        u.grad_map[: len(grad)] = grad
        to_card(u.grad, len(u.grad_map))
        u.start()
        updates.append((u, fd))
        print(f"card {i}: direct I/O: {direct}")
    for i, (u, fd) in enumerate(updates):
        assert u.wait() == COMPLETED
        assert os.pwritev(fd, [u.out_map], 0) == len(u.out_map)
        from_card(u.param, len(u.param_map))
        np.save(directory / f"param{i}.npy", u.param_map[: 2 * elems].view("u2"))
        np.save(directory / f"report{i}.npy", u.read_report())
    for card in cards:
        card.__exit__()


def sync():
    """Without a sync, writes do not become visible: as on a real card, a buffer's mapping is not the card's memory."""
    with Card(0) as card:
        buffer, content = card.buffer(300_000, CACHEABLE)
        content[:] = 1
        to_card(buffer, len(content))
        content[:] = 2
        to_card(buffer, PAGE)
        content[:] = 3
        from_card(buffer, len(content))
        assert (content[:PAGE] == 2).all()
        assert (content[PAGE:] == 1).all()


def queue():
    """Runs execute sequentially, in the order of their starts."""
    with Card(0) as card:
        first, second = (Update(card, 16384, 16 * 16384) for _ in range(2))
        first.start()
        second.start()
        assert xrt.xrtRunState(second.run) < COMPLETED
        assert second.wait() == COMPLETED
        assert xrt.xrtRunState(first.run) == COMPLETED
        assert first.read_report()[1] == second.read_report()[1] == 16384


def out_of_range():
    """An entry beyond the tile is counted as bad and changes nothing."""
    with Card(0) as card:
        u = Update(card, 16, 200, F16, F16, sparse=True)
        half = np.float16(0.5).view("u2").astype("u4") << 16
        seen = []
        for entries in [], [5, 199], [5, 199, 256], [5, 199, 65535]:
            u.tile_map[:], u.out_map[:], u.param_map[:] = 0, 7, 7
            words = np.zeros(16, "u4")
            words[0], words[1 : 1 + len(entries)] = len(entries), [index | half for index in entries]
            u.entry_map[:64] = words.view("u1")
            to_card(u.entries, 64)
            assert u.did()
            from_card(u.param, len(u.param_map))
            seen.append((u.read_report()[3], u.out_map.copy()))
        assert [bad for bad, _ in seen] == [0, 0, 1, 1]
        assert np.flatnonzero(seen[1][1].view("f4")[:256]).tolist() == [5, 199]
        assert not np.array_equal(seen[0][1], seen[1][1])
        assert np.array_equal(seen[1][1], seen[2][1])
        assert np.array_equal(seen[1][1], seen[3][1])


def threads():
    """Several threads can run kernels at the same time, each on its own card."""
    failed = []

    def work(card):
        u = Update(card, 64, 1000)
        failed.extend([n for n in range(20) if not u.did()])

    cards = [Card(i) for i in range(3)]
    workers = [threading.Thread(target=work, args=[card]) for card in cards]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for card in cards:
        card.__exit__()
    assert not failed


def others():
    """Opening and closing a card leaves the buffers of another card alone."""
    with Card(0) as card:
        u = Update(card, 16, 256)
        u.tile_map[:] = 7
        for _ in range(2):
            with Card(1) as other:
                assert Update(other, 16, 256).did()
            assert (u.tile_map == 7).all()
            assert u.did()


def again():
    """Opening and closing a card many times leaks neither files nor child processes."""
    counts = []
    for _ in range(12):
        with Card(0) as card:
            assert Update(card, 16, 256).did()
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        counts.append((len(os.listdir("/proc/self/fd")), len(children)))
    assert counts[2:] == counts[2:3] * 10, counts


def hang(*, words=None):
    """The second run never ends. XRT can neither close the run nor shut down in an orderly way."""
    card = Card(0)
    u = Update(card, 16, 256)
    assert u.did()
    if words:  # claim that the tile is larger than its buffer
        assert xrt.xrtRunSetArg(u.run, 13, ffi.cast("unsigned int", words)) == 0
    u.start()
    assert u.wait(1.0) < COMPLETED
    assert u.read_report()[1] == 0
    os._exit(0)


def astray():
    hang(words=100_000)


def lost():
    """From the second run on, the card reports completion, and all reads from it return ones."""
    with Card(0) as card:
        u = Update(card, 16, 256)
        assert u.did()
        for _ in range(3):
            u.out_map[:] = 5
            u.start()
            assert u.wait() == COMPLETED
            assert (u.read_report() == 0xFFFFFFFF).all()
            assert (u.out_map == 5).all()


def garble():
    """The second run's tile differs from what the kernel wrote, and the report does not show it."""
    with Card(0) as card:
        u = Update(card, 16, 256)
        seen = []
        for _ in range(3):
            assert u.did()
            seen.append((u.out_map.copy(), u.read_report()))
        (first, report), (second, same_report), (third, _) = seen
        assert np.flatnonzero(first ^ second).tolist() == [0]
        assert np.array_equal(report, same_report)
        assert np.array_equal(first, third)


def kill():
    """The second run kills the card's process, and XRT then kills ours."""
    u = Update(Card(0), 16, 256)
    assert u.did()
    u.start()
    u.wait()


def kill_kept():
    """With the signal handlers restored, our process survives; requests to the card are never answered."""
    with handlers_kept():
        card = Card(0)
    u = Update(card, 16, 256)
    assert u.did()
    u.start()
    assert u.wait(1.0) < COMPLETED
    asked = threading.Thread(target=xrt.xrtBOFree, args=[u.tile], daemon=True)
    asked.start()
    asked.join(1.0)
    assert asked.is_alive()
    os._exit(0)


def child():
    """With the signal handlers restored, killing a child process affects nothing else."""
    with handlers_kept():
        card = Card(0)
    with card:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0) == (pid, signal.SIGKILL)
        assert Update(card, 16, 256).did()


def no_p2p():
    """P2P buffers are refused, as the host cannot map them; other buffers work."""
    with Card(0) as card:
        assert not xrt.xrtBOAlloc(card.handle, 1 << 20, P2P, 0)
        buffer, content = card.buffer(1 << 20, CACHEABLE)
        to_card(buffer, len(content))


def other_program(xclbin):
    """An xclbin without our kernels can be loaded, but opening one of our kernels fails."""
    with Card(0, xclbin) as card:
        assert not card.kernel(KERNEL)
        assert card.kernel("somebody_elses")


def not_a_program(path):
    handle = xrt.xrtDeviceOpen(0)
    assert xrt.xrtDeviceLoadXclbinFile(handle, path.encode()) != 0
    assert xrt.xrtDeviceClose(handle) == 0


def not_a_fault():
    not_a_program(os.environ["CSD_OPTIM_XCLBIN"])


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
