"""Processes killed at any call that changes a file."""

import os
import signal

CALLS = ("open", "pwrite", "write", "fsync", "rename", "mkdir", "rmdir", "unlink", "replace")  # of the module os


def killed_at(n, *, after, body):
    """Run body(), and kill this process before its n-th call that changes a file, or after it."""
    left = n

    def counting(function):
        def call(*arguments, **options):
            nonlocal left
            left -= 1
            if left == 0 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return function(*arguments, **options)
            finally:  # also if it fails
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name in CALLS:
        setattr(os, name, counting(getattr(os, name)))
    body()
    os._exit(0)


def ended(child):
    """Wait for a child. Returns whether it was killed."""
    child.join(120)
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0
