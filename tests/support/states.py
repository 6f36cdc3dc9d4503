"""pytest --state-dtype 8bit: runs whole suites that compare CSDAdam with CSDAdam on 8-bit states."""

import functools
import inspect
import os

import torch

from csd_optim import CSDAdam
from csd_optim.store.sections import FP32, SECTIONS, size_of, slot_of

VARIABLE = "CSD_OPTIM_TEST_STATE_DTYPE"


def assume(state_dtype):
    """Set the default state_dtype of CSDAdam in this process and in those that support/forked.py starts."""
    os.environ[VARIABLE] = state_dtype
    init = inspect.unwrap(CSDAdam.__init__)

    @functools.wraps(init)
    def assuming(self, *arguments, **options):
        init(self, *arguments, **{"state_dtype": state_dtype, **options})

    CSDAdam.__init__ = init if state_dtype == FP32 else assuming


def assumed():
    return os.environ.get(VARIABLE, FP32)


def tile_bytes(elems, dtype=torch.float32, states=3):
    """Return the bytes that a step reads and writes of a tile. `dtype`: of its parameters, which are on the host."""
    if assumed() == FP32:
        return 4 * elems * states, 4 * elems * states
    sections = slot_of(elems, SECTIONS[:states], assumed(), dtype)
    return size_of(sections) - sections[0].size, size_of(sections)
