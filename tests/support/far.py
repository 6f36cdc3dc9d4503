"""pytest --far: runs whole suites as if every device were on another machine: images only, and states on demand.

`ram:` and `file:` get the two capabilities, and the native engine refuses what nobody can send over a wire.
"""

import dataclasses
import os

from csd_optim.bindings import Native, Push
from csd_optim.devices.backends import BACKENDS
from csd_optim.engine import states

VARIABLE = "CSD_OPTIM_TEST_FAR"
FAR = ("ram", "file")


class FarNative(Native):
    """A native engine that reads no gradient and no parameter in memory; of other devices an ordinary one."""

    def __init__(self, name):
        super().__init__(name)
        self._is_far = name.__self__.images_only
        self._rows = []  # by tile: the rows of its parameters
        self._has_grad = []  # by row, in the step under way
        self._has_open_windows = False

    def _sent(self, params):
        """Return the table as it could be sent: without addresses, except those of states that were written."""
        assert not params["param"].any()
        sent = params.copy()
        sent["grad"], sent["residual"] = params["grad"] != 0, 0
        return sent

    def extend(self, config):
        rows = [[] for _ in range(config.n_tiles)]
        for param, tile, *_ in config.pieces.tolist():
            rows[tile].append(param)
        self._rows += rows
        self._has_open_windows = True
        return super().extend(config)

    def begin(self, params, hypers, tiles, **options):
        if self._is_far:
            if self._has_open_windows:  # only import writes to them; a tile with open ones would not be verified
                super().remap(open=False)
                self._has_open_windows = False
            params = self._sent(params)
            self._has_grad = (params["grad"] != 0).tolist()
        super().begin(params, hypers, tiles, **options)

    def push(self, tile, how=None):
        if self._is_far and how:
            assert all(how.images)
            assert how == Push(images=how.images, entries=how.entries)
        elif self._is_far:
            assert not any(self._has_grad[row] for row in self._rows[tile])
        super().push(tile, how)

    def drop_grads(self, params):
        for row in params if self._is_far else ():
            self._has_grad[row] = False
        super().drop_grads(params)

    def unchanged(self, params):
        return super().unchanged(self._sent(params) if self._is_far else params)

    def release(self, params, order):
        super().release(self._sent(params) if self._is_far else params, order)

    def remap(self, **options):
        assert not self._is_far
        super().remap(**options)

    def edited(self, tiles):
        assert not (self._is_far and len(tiles))
        super().edited(tiles)

    def read(self, *arguments):
        assert not self._is_far
        super().read(*arguments)


def assume(is_far):
    """Put all devices far away, or not, in this process and in those that support/forked.py starts."""
    os.environ[VARIABLE] = "1" if is_far else ""
    for name in FAR:
        BACKENDS[name] = dataclasses.replace(BACKENDS[name], images_only=is_far, states_on_demand=is_far)
    states.Native = FarNative if is_far else Native


def assumed():
    return bool(os.environ.get(VARIABLE))
