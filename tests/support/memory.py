"""Memory that runs out."""

import contextlib
import gc
import resource

LIMIT = 48 << 20  # bytes that an operation may take which must not take it all


@contextlib.contextmanager
def memory_limit(more):
    """Whoever takes so many bytes more of memory than the process has now gets a MemoryError."""
    gc.collect()  # what other tests left would be room, if it went later
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/status") as status:
        [now] = [1024 * int(line.split()[1]) for line in status if line.startswith("VmData")]
    resource.setrlimit(resource.RLIMIT_DATA, (now + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
