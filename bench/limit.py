"""Limits the memory of this process, by a cgroup or by RLIMIT_DATA."""

from __future__ import annotations

import os
import resource
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def limit_memory(nbytes: int) -> tuple[str, Path | None]:
    """Limit this process, and those it starts from now on, to `nbytes` bytes of memory.

    Uses a cgroup v2 if one can be made: it counts all memory, and kills a process that takes too much. Otherwise
    RLIMIT_DATA, which needs no privileges: it counts the process's private writable memory, and allocations beyond it
    fail. Returns a description of the limit, and the cgroup's directory or None. The caller removes the cgroup when all
    its processes have ended.
    """
    try:
        group = _cgroup(nbytes)
    except OSError as e:
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))
        return f"RLIMIT_DATA; no cgroup v2, as {e.strerror or e}", None
    return "a cgroup v2 without swap", group


def _cgroup(nbytes: int) -> Path:
    """Make a cgroup with the limit and move this process into it. Raises OSError if that is not possible."""
    own = next((line for line in OWN.read_text().splitlines() if line.startswith("0::/")), None)
    if own is None or not (CGROUPS / "cgroup.controllers").exists():
        raise OSError(f"none is mounted at {CGROUPS}")
    # A sibling of our own group: a group that contains processes cannot have limited child groups.
    above = (CGROUPS / own.removeprefix("0::/")).parent if own != "0::/" else CGROUPS
    if "memory" not in (above / "cgroup.subtree_control").read_text().split():
        raise OSError(f"{above} does not delegate the memory controller")
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
