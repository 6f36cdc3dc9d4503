import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _let_go_of_optimizers():
    """Frees the optimizers of runs that were meant to fail, because other tests count the mappings of the process."""
    yield
    gc.collect()
