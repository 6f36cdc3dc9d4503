"""Limits memory, to test that operations do not take too much; and counts what the disks move."""

import contextlib
import gc
import resource
from pathlib import Path

LIMIT = 48 << 20  # bytes of memory that an operation may take if it must not load everything


@contextlib.contextmanager
def memory_limit(more):
    """Let allocations fail with MemoryError beyond `more` bytes above what the process uses now."""
    gc.collect()  # garbage of other tests, freed later, would raise the limit
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/status") as status:
        [now] = [1024 * int(line.split()[1]) for line in status if line.startswith("VmData")]
    resource.setrlimit(resource.RLIMIT_DATA, (now + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def io_bytes():
    """Return the bytes that the disks have read and written for this process, as counted by the kernel."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])
