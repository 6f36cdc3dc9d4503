"""Each test here runs on the accelerator: on a real one once, on the emulated one under each schedule."""

import contextlib

import pytest
from support import emulated
from support.ranks import on_living_ranks

from csd_optim.kernels import device_check
from csd_optim.kernels.device_check import DeviceKernels

REAL = "real device"


def pytest_generate_tests(metafunc):
    if "schedule" in metafunc.fixturenames:
        named = (metafunc.config.getoption("--accelerator") or REAL).split(",")
        if metafunc.definition.get_closest_marker("one_schedule"):
            named = named[:1]
        metafunc.parametrize("schedule", named if emulated.loaded() else [REAL], indirect=True)


@pytest.fixture(autouse=True)
def schedule(request):
    """The schedule by which queued work of streams runs."""
    with contextlib.nullcontext() if request.param == REAL else emulated.schedule(request.param):
        yield request.param


@pytest.fixture
def everywhere(request, tmp_path):
    """Run a function on two ranks, under all schedules in the same processes."""
    from support.on_accelerator import on_both  # not before the emulated one is loaded

    said = request.config.getoption("--accelerator").split(",") if emulated.loaded() else None
    return lambda *call: on_living_ranks(2, on_both, said, *call, directory=tmp_path)


@pytest.fixture
def small_pieces():
    """Launch the update of each parameter by itself."""
    from support.on_accelerator import in_small_pieces

    with in_small_pieces():
        yield


@pytest.fixture
def no_kernels(monkeypatch):
    """Let no device have kernels."""
    monkeypatch.setattr(device_check, "kernels_of", lambda device: DeviceKernels(None, (), "none in this test"))


@pytest.fixture(params=["kernels", "host"])
def way(request):
    """What selects the entries of Top-K: kernels, or without them the host."""
    if request.param == "host":
        request.getfixturevalue("no_kernels")


@pytest.fixture
def emulated_only():
    """Skip tests of what only the emulated accelerator can show."""
    if not emulated.loaded():
        pytest.skip("this is a real device")
