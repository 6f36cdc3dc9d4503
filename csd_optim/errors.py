"""The exceptions of csd_optim: one base class, and each error is also the builtin that a user expects."""

from __future__ import annotations

import sys


class CSDError(Exception):
    """Base class of all errors that csd_optim itself raises."""


class CSDValueError(CSDError, ValueError):
    """An argument is wrong; nothing was touched."""


class CSDTypeError(CSDError, TypeError):
    """An argument has the wrong type or dtype; nothing was touched."""


class CSDRuntimeError(CSDError, RuntimeError):
    """The call is out of order, or is not possible with this parameter or device."""


class CSDOSError(CSDError, OSError):
    """The operating system refused: `errno` and the text say what and where."""


class CSDUnavailableError(CSDOSError, RuntimeError):
    """A card, an accelerator, the optimizer ranks or required software is missing; or a card has stopped responding."""


class CSDTornError(CSDOSError):
    """Parameters are a mix of two steps.

    Either a step was cut short that cannot be undone (ram: alone, or gpu: without a drive): go back to a
    snapshot or a checkpoint. Or a step is being undone, and old values cannot be read back yet: the next call tries
    again.
    """


class CSDLostError(CSDOSError):
    """The last step will never be durable: the data of a failed flush is lost, or the store's file was removed."""


class CSDStoreExistsError(CSDOSError, FileExistsError):
    """The directory already holds a store, and the caller did not ask to overwrite it."""


class CSDBusyError(CSDOSError, BlockingIOError):
    """The store belongs to another process, or to another optimizer in this process."""


class CSDStoreError(CSDValueError):
    """A file is no store, is damaged, or was written by a newer version."""


class CSDRankError(CSDRuntimeError):
    """Another rank could not take its step, so this rank did not take it either; the message is the other rank's."""


class CSDMemoryError(CSDError, MemoryError):
    """Memory for tile buffers or windows could not be allocated."""


class CSDWarning(UserWarning):
    """Training goes on, but not as expected: the message says what is slow, takes memory, is ignored or is lost."""


def users_stacklevel() -> int:
    """Return the stacklevel with which a warning from the calling function points at the user's own line."""
    between = ("csd_optim", "torch", "copy", "copyreg", "contextlib")
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in between:
        frame, level = frame.f_back, level + 1
    return level
