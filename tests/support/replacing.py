"""Replaces methods temporarily."""

import contextlib
import errno

from csd_optim import CSDOSError
from csd_optim.bindings import Native
from csd_optim.engine.durable import DurableCommitter
from csd_optim.engine.engine import Engine


@contextlib.contextmanager
def replaced(owner, name, function):
    """Replace a method by `function`, which is called with the original method and the call's arguments."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: function(original, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, original)


def failing(owner, name, number, text):
    """Let call `number` (counted from 1) of a method raise CSDOSError; 0: no call."""
    left = number

    def fail(call, *args, **kwargs):
        nonlocal left
        left -= 1
        if left == 0:
            raise CSDOSError(errno.EIO, text)
        return call(*args, **kwargs)

    return replaced(owner, name, fail)


def class_with(method):
    """Return the class that has a method of the engine or of what it consists of."""
    return next(owner for owner in (Engine, DurableCommitter, Native) if hasattr(owner, method))
