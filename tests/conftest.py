"""Fixtures: every back end, files that go away with the test, the command line."""

import pytest
import torch

from csd_optim import cli

BACKENDS = ["file", "files", "ram", "mixed"]
TILE = 2048  # elements: small, so that a handful of parameters crosses tiles and devices


def device_strings(backend, directory):
    """Devices of one back end for a test; named ones lie below `directory`."""
    if backend == "files":
        return [str(directory / f"csd{i}") for i in range(3)]
    return {"file": ["file:"], "ram": ["ram:"], "mixed": ["ram:", "file:"], "null": ["null:"]}[backend]


@pytest.fixture(params=BACKENDS)
def devices(request, tmp_path):
    """Device strings of each back end in turn: one file, three named files, memory, memory beside a file."""
    return device_strings(request.param, tmp_path)


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
