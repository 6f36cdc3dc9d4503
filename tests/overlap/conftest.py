import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _let_go_of_optimizers():
    """Those of runs that were meant to fail: other tests count what a process has mapped."""
    yield
    gc.collect()
