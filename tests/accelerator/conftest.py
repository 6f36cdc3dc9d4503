"""Each test here runs on the accelerator: once on a real one, under each schedule on the emulated one."""

import contextlib

import pytest
from support import emulated

REAL = "real device"


def pytest_generate_tests(metafunc):
    if "schedule" in metafunc.fixturenames:
        named = (metafunc.config.getoption("--accelerator") or REAL).split(",")
        if metafunc.definition.get_closest_marker("one_schedule"):
            named = named[:1]
        metafunc.parametrize("schedule", named if emulated.loaded() else [REAL], indirect=True)


@pytest.fixture(autouse=True)
def schedule(request):
    """What is queued in streams runs by this one."""
    with contextlib.nullcontext() if request.param == REAL else emulated.schedule(request.param):
        yield request.param


@pytest.fixture
def emulated_only():
    """For what only the emulated accelerator can show."""
    if not emulated.loaded():
        pytest.skip("this is a real device")
