"""The environment variables of csd_optim, each read when it is used; docs/settings.md has the table."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from .errors import CSDValueError

EMULATED_DRIVES = "CSD_OPTIM_EMULATED_DRIVES"
OPTIONS = "CSD_OPTIM_OPTIONS"


def devices() -> list[str]:
    """Return the device strings in CSD_OPTIM_DEVICES, where commas separate them."""
    return [d.strip() for d in os.environ.get("CSD_OPTIM_DEVICES", "").split(",") if d.strip()]


def options() -> dict[str, str]:
    """Return the options in CSD_OPTIM_OPTIONS, `name=value` with commas between them, as text. Raises CSDValueError."""
    found: dict[str, str] = {}
    for text in filter(None, map(str.strip, os.environ.get(OPTIONS, "").split(","))):
        name, _, value = (part.strip() for part in text.partition("="))
        if not name or not value:
            raise CSDValueError(f"Invalid {OPTIONS}: {text!r}; write name=value, as in state_dtype=8bit,resume=1")
        if name in found:
            raise CSDValueError(f"Invalid {OPTIONS}: {name!r} is in it twice")
        found[name] = value
    return found


@contextlib.contextmanager
def without_options() -> Iterator[None]:
    """Hide CSD_OPTIM_OPTIONS, which is meant for training scripts, from an optimizer that a command makes."""
    text = os.environ.pop(OPTIONS, None)
    try:
        yield
    finally:
        if text is not None:
            os.environ[OPTIONS] = text


def xclbin() -> Path | None:
    """Return CSD_OPTIM_XCLBIN, the path of the FPGA binary (xclbin)."""
    named = os.environ.get("CSD_OPTIM_XCLBIN")
    return None if named is None else Path(named)


def threads() -> int | None:
    """Return CSD_OPTIM_THREADS, the number of threads of the CPU updater. Raises CSDValueError."""
    text = os.environ.get("CSD_OPTIM_THREADS")
    if not text:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise CSDValueError(f"Invalid CSD_OPTIM_THREADS: {text!r}; it is a number of threads from 1 to 1024")
    return int(text)


def isa() -> str | None:
    """Return CSD_OPTIM_ISA, the instruction set of the CPU updater, which is not validated here."""
    return os.environ.get("CSD_OPTIM_ISA") or None


def probes_drives() -> bool:
    """Return whether drives are probed: not if CSD_OPTIM_PROBE is 0. Raises CSDValueError."""
    text = os.environ.get("CSD_OPTIM_PROBE") or "1"
    if text not in ("0", "1"):
        raise CSDValueError(f"Invalid CSD_OPTIM_PROBE: {text!r}; 1 tries drives out, which is the default, 0 does not")
    return text == "1"


def trace() -> str | None:
    """Return CSD_OPTIM_TRACE, the file that receives a timeline of device activity."""
    return os.environ.get("CSD_OPTIM_TRACE") or None


def key() -> Path | None:
    """Return CSD_OPTIM_KEY, the key file for `serve://`. Raises CSDValueError if it is set to nothing."""
    named = os.environ.get("CSD_OPTIM_KEY")
    if named == "":  # a mistake in a script must not look like the wish to go without
        raise CSDValueError("Invalid CSD_OPTIM_KEY: it is empty; name a key file, or unset it")
    return None if named is None else Path(named)


def emulated_drives() -> list[str]:
    """Return the directories in CSD_OPTIM_EMULATED_DRIVES, one for each emulated card, where `:` separates them."""
    return [d for d in os.environ.get(EMULATED_DRIVES, "").split(os.pathsep) if d]
