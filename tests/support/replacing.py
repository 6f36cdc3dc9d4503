"""Replaces methods temporarily."""

import contextlib
import errno
import time

from csd_optim import CSDOSError
from csd_optim.bindings import Native
from csd_optim.engine.commit.durable import DurableCommitter
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


def slow(owner, method, rank, seconds=0.3):
    """Make every call of a method take long on rank 1."""

    def sleeps(call, *args, **kwargs):
        time.sleep(seconds if rank == 1 else 0)
        return call(*args, **kwargs)

    return replaced(owner, method, sleeps)


def unplugged(rank, method):
    """Make the next call of this method of the engine fail on rank 1, and only this call."""
    return failing(class_with(method), method, int(rank == 1), "unplugged")


def raised_by(call):
    """Return what a call raises; it must raise."""
    try:
        call()
    except Exception as e:
        return e
    raise AssertionError("nothing was raised")
