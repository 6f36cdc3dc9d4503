"""One base class; each error is also the builtin a user expects."""


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


class CSDStoreExistsError(CSDOSError, FileExistsError):
    """The directory already holds a store and nobody asked to erase it."""


class CSDBusyError(CSDOSError, BlockingIOError):
    """Another process, or another optimizer of this one, owns the store."""


class CSDStoreError(CSDValueError):
    """A file is no store, is damaged, or was written by a newer version."""


class CSDMemoryError(CSDError, MemoryError):
    """Memory for tile buffers or windows could not be had."""


class CSDWarning(UserWarning):
    """Something works, but more slowly than it could."""
