"""Warnings when much of the optimizer's state is in memory, which may be too small for it."""

from __future__ import annotations

import warnings
from bisect import bisect
from collections.abc import Iterable

import torch

from ..errors import CSDWarning, users_stacklevel

WORTH_A_WARNING = 1 << 30  # bytes of state
LOADED = 'came from memory; torch.load(file, map_location="cpu", mmap=True) leaves it in the file'
REPLACED = "had been replaced by tensors in memory, and goes back to the devices"
DECODED = "is decoded: 8-bit states take as much memory as fp32 ones when they are looked at; opt.save() takes none"
FETCHED = "is fetched from the optimizer ranks (serve://) for a state dict; opt.save() takes none"
COPIED = "is read: a copy of the optimizer, or its pickle, takes as much memory"


def warn_if_large(size: int, what: str) -> None:
    """Warn if `size` bytes of state in memory are much. `what` completes the sentence.

    Python's default filter shows the warning once per line of user code.
    """
    if size >= WORTH_A_WARNING:
        text = f"{size / 1e9:.1f} GB of optimizer state {what} (docs/trainers.md)"
        warnings.warn(text, CSDWarning, users_stacklevel())


def bytes_in_memory(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of these tensors in the memory of the host or of a GPU; 0 if too few for a warning.

    Tensors that are mapped from a file, as by torch.load(mmap=True), do not count.
    """
    sizes = {(t.device.type == "cpu", t.data_ptr()): t.nbytes for t in tensors}
    if sum(sizes.values()) < WORTH_A_WARNING:
        return 0
    starts, of_files = _mappings()
    return sum(
        size for (on_host, pointer), size in sizes.items() if not (on_host and of_files[bisect(starts, pointer)])
    )


def _mappings() -> tuple[list[int], list[bool]]:
    """Return the mappings' start addresses, ascending, and whether the mapping before each address is of a file."""
    starts, of_files = [], [False]
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, _, _, _, inode, *path = line.split(maxsplit=5)
            starts.append(int(addresses.partition("-")[0], 16))
            of_files.append(inode != "0" and not path[0].startswith(("/dev/", "/memfd:")))  # these are memory
    return starts, of_files
