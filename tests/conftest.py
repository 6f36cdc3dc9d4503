"""Fixtures: every back end, files that go away with the test, the command line."""

import signal

import pytest
import torch

from csd_optim import cli

BACKENDS = ["file", "files", "ram", "mixed"]
# Those of a run under emulated cards (test_xrt.py): pytest --xrt
XRT_BACKENDS = ["xrt", "xrts"]
TILE = 2048  # elements: small, so that a handful of parameters crosses tiles and devices


def device_strings(backend, directory):
    """Devices of one back end for a test; named ones lie below `directory`."""
    if backend == "files":
        return [str(directory / f"csd{i}") for i in range(3)]
    if backend == "xrts":
        return [f"xrt:{i}?nvme={directory}/csd{i}" for i in range(3)]
    return {
        "file": ["file:"],
        "ram": ["ram:"],
        "mixed": ["ram:", "file:"],
        "null": ["null:"],
        "xrt": [f"xrt:0?nvme={directory}&scratch=1"],
    }[backend]


def pytest_configure():
    # Tests send these. A shell ignores them for what it starts in the background, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser):
    parser.addoption("--xrt", action="store_true", help="on cards, and only the tests that run on every back end")


def pytest_generate_tests(metafunc):
    """`backend`: each in turn: one file, three named files, memory, memory beside a file; or one card, and three."""
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", XRT_BACKENDS if metafunc.config.getoption("--xrt") else BACKENDS)


def pytest_collection_modifyitems(config, items):
    if config.getoption("--xrt"):
        chosen = [item for item in items if {"backend", "on_cards"} & set(item.fixturenames)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


@pytest.fixture
def on_cards(pytestconfig):
    """Is this a run under emulated cards?"""
    return pytestconfig.getoption("--xrt")


@pytest.fixture
def devices(backend, tmp_path):
    """Device strings of each back end."""
    return device_strings(backend, tmp_path)


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    """Scratch stores go below the current directory: make that a temporary one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CSD_OPTIM_DEVICES", raising=False)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command of csd-optim in this process: (exit code, stdout, stderr)."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.app([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert "\x1b" not in out + err  # no terminal, no colours
        return exit_.value.code, out, err

    return run
