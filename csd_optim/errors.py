"""One base class; each error is also the builtin a user expects."""

from __future__ import annotations

import sys


class CSDError(Exception):
    """Anything csd_optim raises on its own account."""


class CSDValueError(CSDError, ValueError):
    """An argument is wrong; nothing was touched."""


class CSDTypeError(CSDError, TypeError):
    """An argument has the wrong type or dtype; nothing was touched."""


class CSDRuntimeError(CSDError, RuntimeError):
    """Called out of order, or not possible with this parameter or device."""


class CSDOSError(CSDError, OSError):
    """The operating system refused: `errno` and the text say what and where."""


class CSDUnavailableError(CSDOSError, RuntimeError):
    """A card, or something that it takes to use it, is not there; or it has stopped to answer."""


class CSDTornError(CSDOSError):
    """A step of an optimizer with shadow=False, or gpu: without a drive, was cut short.

    Parameters and state are a mix of two steps.
    """


class CSDLostError(CSDOSError):
    """A flush failed, and what it should have put on the disk is not there: the last step will never be durable."""


class CSDStoreExistsError(CSDOSError, FileExistsError):
    """The directory already holds a store and nobody asked to erase it."""


class CSDBusyError(CSDOSError, BlockingIOError):
    """Another process, or another optimizer of this one, owns the store."""


class CSDStoreError(CSDValueError):
    """A file is no store, is damaged, or was written by a newer version."""


class CSDRankError(CSDRuntimeError):
    """Another rank could not take its step, so this one has not either; the message is that rank's."""


class CSDMemoryError(CSDError, MemoryError):
    """Memory for tile buffers or windows could not be had."""


class CSDWarning(UserWarning):
    """It goes on, but otherwise than expected: the message says what is slow, takes memory, is ignored or lost."""


def users_stacklevel() -> int:
    """The stacklevel, for a warning from the calling function, of the line that made us do this."""
    between = ("csd_optim", "torch", "copy", "copyreg")
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in between:
        frame, level = frame.f_back, level + 1
    return level
