"""Children that may be killed, and the libraries that are preloaded into them (../faults).

Children are forked, so that torch is imported once. The parent itself never makes an optimizer: a child would inherit
its locks but not its threads.
"""

import mmap
import os
import pickle
import signal
import sys
import time
import traceback

import faults
import numpy as np
from faults import ALLOCATE, KILL_AFTER, KILL_BEFORE, KILL_MIDDLE, META_WRITE, RENAME, SYNC, TILE_WRITE, TRUNCATE

CHANGES = TILE_WRITE | META_WRITE | ALLOCATE | SYNC | TRUNCATE | RENAME
COMMITS = META_WRITE | SYNC  # the calls that make up a commit
KILL_EFFECTS = {"before": KILL_BEFORE, "in the middle of": KILL_MIDDLE, "after": KILL_AFTER}
LOG_BYTES = 1 << 30  # size of a sparse file, of which a recording uses about 50 MB


def preloaded(directory):
    """Return an environment that preloads both libraries."""
    with open(directory / "log", "wb") as log:
        log.truncate(LOG_BYTES)
    # `record` comes first, so that it records every call that the process makes, even one in which it is killed.
    libraries = faults.preloaded(directory, "record", "faults")
    return {**os.environ, **libraries, "CSD_RECORD": str(directory / "log")}


def kill_at(call, effect, path, calls=CHANGES):
    """Kill the process that makes call number `call` (from 0) of this kind on a file below `path`. Yields the rule."""
    return faults.rule(calls, path, effect, skip=call, times=1)


class Shared:
    """Numbers and a message that a child leaves in shared memory, where they survive it."""

    PHASE, EVENT, DURABLE = range(3)
    CONSTRUCTING, TRAINING, CLOSING = range(1, 4)

    def __init__(self):
        self._memory = mmap.mmap(-1, 1 << 16)
        self.numbers = np.frombuffer(self._memory, np.int64, 8)

    def say(self, text):
        data = text.encode()[:60_000]
        self._memory[64 : 72 + len(data)] = len(data).to_bytes(8, "little") + data

    def said(self):
        return self._memory[72 : 72 + int.from_bytes(self._memory[64:72], "little")].decode(errors="replace")


def start(shared, body, *arguments):
    """Fork a child that calls `body`, and exits with 0, or with 3 after leaving a message about what was wrong."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 3
    try:
        body(*arguments)
        code = 0
    except BaseException:
        shared.say(traceback.format_exc())
    finally:
        os._exit(code)  # without destructors and the parent's exit handlers


class Child:
    """A child process. The end of the `with` block kills it if it still runs."""

    def __init__(self, shared, body, *arguments):
        self.shared = shared
        self.pid = start(shared, body, *arguments)
        self.code = None  # that of os.waitstatus_to_exitcode(), after it has ended

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def ended(self, flags=os.WNOHANG):
        if self.code is None:
            pid, status = os.waitpid(self.pid, flags)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def kill(self):
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            self.ended(0)

    def wait(self, seconds=300):
        """Wait for the child and return its exit code. Raises TimeoutError if it does not end."""
        end = time.monotonic() + seconds
        pause = 0.0002
        while not self.ended():
            if time.monotonic() > end:
                raise TimeoutError(f"a child has not ended for {seconds} seconds")
            time.sleep(pause)
            pause = min(2 * pause, 0.005)
        return self.code


def in_child(function, *arguments):
    """Call the function in a child, and return its result."""
    reading, writing = os.pipe()

    def body():
        with open(writing, "wb") as pipe:
            pickle.dump(function(*arguments), pipe)

    shared = Shared()
    with Child(shared, body) as child, open(reading, "rb") as pipe:
        os.close(writing)
        data = pipe.read()
        if child.wait() != 0:
            raise RuntimeError(f"{function.__name__} failed:\n{shared.said()}")
    return pickle.loads(data)
