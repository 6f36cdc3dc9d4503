"""Fixtures: every back end, and files that go away with the test."""

import pytest
import torch

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
