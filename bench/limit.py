"""Limits the memory of this process, and says how it is done."""

from __future__ import annotations

import os
import resource
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def limit_memory(nbytes: int) -> tuple[str, Path | None]:
    """From now on this process, and those that it starts, have so many bytes: what did it, and the cgroup if it is one.

    A cgroup v2 where one can be made: it counts everything, and who takes too much is killed. Else RLIMIT_DATA, which
    takes no privileges: it counts all memory of the process that is private and writable, and who takes too much is
    refused. Whoever made a cgroup removes it when all in it have ended.
    """
    try:
        group = _cgroup(nbytes)
    except OSError as e:
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))
        return f"RLIMIT_DATA; no cgroup v2, as {e.strerror or e}", None
    return "a cgroup v2 without swap", group


def _cgroup(nbytes: int) -> Path:
    """Raises OSError if there can be none."""
    own = next((line for line in OWN.read_text().splitlines() if line.startswith("0::/")), None)
    if own is None or not (CGROUPS / "cgroup.controllers").exists():
        raise OSError(f"none is mounted at {CGROUPS}")
    # Beside our own group: one that has processes in it cannot have groups with a limit below it.
    above = (CGROUPS / own.removeprefix("0::/")).parent if own != "0::/" else CGROUPS
    if "memory" not in (above / "cgroup.subtree_control").read_text().split():
        raise OSError(f"{above} does not hand on the control of memory")
    group = above / f"csd-optim-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as e:
        raise OSError(f"{above} is not ours to write to ({e.strerror})") from e
    try:
        (group / "memory.max").write_text(str(nbytes))
        if (group / "memory.swap.max").exists():
            (group / "memory.swap.max").write_text("0")
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as e:
        group.rmdir()
        raise OSError(f"this process may not move to {group} ({e.strerror})") from e
    return group
