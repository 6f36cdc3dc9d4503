"""Libraries to preload into a process: faults.c makes its file I/O fail, record.c records it."""

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import numpy as np

# As in faults.c: kinds of calls, effects, and the struct of a rule.
TILE_READ, TILE_WRITE, META_READ, META_WRITE, ALLOCATE, SYNC, DIRECT_IO, DIRECT_OPEN, TRUNCATE, RENAME = (
    1 << i for i in range(10)
)
ERROR, SHORT, EOF, KILL_BEFORE, KILL_MIDDLE, KILL_AFTER = range(6)
RULE = np.dtype(
    [("active", "u4"), ("calls", "u4"), ("effect", "u4"), ("error", "i4")]
    + [(name, "u8") for name in ("skip", "times", "hold", "seen", "struck")]
    + [("path", "S192")]
)
N_RULES = 4
FOREVER = 1 << 62


def preloaded(directory, *names):
    """Compile these libraries in `directory`. Returns the environment variables that preload them into a process."""
    for name in names:
        command = [os.environ.get("CC", "cc"), "-Wall", "-O1", "-shared", "-fPIC", "-o", directory / f"{name}.so"]
        subprocess.run([*command, Path(__file__).with_name(f"{name}.c"), "-ldl", "-lpthread"], check=True)
    np.zeros(N_RULES, RULE).tofile(directory / "rules")
    return {
        "LD_PRELOAD": ":".join(str(directory / f"{name}.so") for name in names),
        "CSD_FAULTS": str(directory / "rules"),
    }


@contextmanager
def rule(calls, path, effect, error=0, *, skip=0, times=FOREVER, hold=False):
    """Apply `effect` to `calls` on files whose path contains `path`: `times` of them, after `skip` untouched ones.

    Yields the rule. As long as its `hold` is set, these calls block.
    """
    rules = np.memmap(os.environ["CSD_FAULTS"], RULE, "r+")
    at = int(np.flatnonzero(rules["active"] == 0)[0])
    rules[at] = (0, calls, effect, error, skip, times, hold, 0, 0, os.fsencode(path))
    rules["active"][at] = 1
    try:
        yield rules[at]
    finally:
        rules["active"][at] = rules["hold"][at] = 0
