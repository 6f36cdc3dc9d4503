"""Methods that do something else for a while."""

import contextlib
import errno

from csd_optim import CSDOSError


@contextlib.contextmanager
def replaced(owner, name, function):
    """`function` is called with the original, and what that is called with."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: function(original, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, original)


def failing(owner, name, number, text):
    """The call of this number, from 1, raises CSDOSError, and no other; 0: none."""
    left = number

    def fail(call, *args, **kwargs):
        nonlocal left
        left -= 1
        if left == 0:
            raise CSDOSError(errno.EIO, text)
        return call(*args, **kwargs)

    return replaced(owner, name, fail)
