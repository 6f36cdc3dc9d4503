"""What is left of directories if a process is killed: copies of them, made before each call that changes a file."""

import contextlib
import os
import shutil
import threading

from support.replacing import replaced

CALLS = ("pwrite", "fdatasync", "fsync", "posix_fallocate", "ftruncate", "replace", "mkdir", "unlink")


def images_of(directory, pattern, body):
    """Run body(), and return an image of what is in `directory` by these names before each call, and one of the end.

    A process that is killed loses nothing that it has written, so a kill at that call leaves the same.
    """
    taken, lock, copying = [], threading.RLock(), False  # stores are written by several threads

    def take():
        nonlocal copying
        with lock:
            if copying:  # a call that makes the copy
                return
            copying = True
            taken.append(directory / f"image-{len(taken)}")
            taken[-1].mkdir()
            for place in directory.glob(pattern):
                shutil.copytree(place, taken[-1] / place.name)
            copying = False

    def before(call, *arguments, **options):
        take()
        return call(*arguments, **options)

    with contextlib.ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(replaced(os, name, before))
        body()
    take()
    return taken


def put(image, pattern):
    """Put an image in the place of what it is of."""
    for place in image.parent.glob(pattern):
        shutil.rmtree(place)
    for place in image.iterdir():
        place.rename(image.parent / place.name)
