"""pytest --state-dtype 8bit: whole suites that compare CSDAdam with CSDAdam, on states that are kept otherwise."""

import os

from csd_optim import CSDAdam

VARIABLE = "CSD_OPTIM_TEST_STATE_DTYPE"


def assume(state_dtype):
    """What CSDAdam takes where a test does not say it: in this process, and in those that support/forked.py starts."""
    os.environ[VARIABLE] = CSDAdam.__init__.__kwdefaults__["state_dtype"] = state_dtype


def assumed():
    return os.environ.get(VARIABLE, "fp32")
