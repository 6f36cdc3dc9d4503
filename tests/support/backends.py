"""The back ends of every test, and the devices that name them; under emulated cards (pytest --xrt), other ones."""

import os
from pathlib import Path

from csd_optim.devices.spec import parse_device

TESTS = Path(__file__).resolve().parents[1]
BACKENDS = ["file", "files", "ram", "mixed"]
NEAR = "near"  # with states on the accelerator of their parameters; those of parameters on the CPU are in a file
# Those of a run under emulated cards (test_xrt.py): pytest --xrt
XRT_BACKENDS = ["xrt", "xrts"]
TILE = 2048  # elements: small, so that a handful of parameters crosses tiles and devices


def on_cards():
    """Is this a run under emulated cards? (--xrt; and what such a run starts)"""
    return "CSD_OPTIM_TEST_XRT" in os.environ


def named_devices(directory, n):
    """Device strings of durable stores, csd0, csd1 ... below `directory`."""
    return [f"xrt:{i}?nvme={directory}/csd{i}" if on_cards() else str(directory / f"csd{i}") for i in range(n)]


def reading_all(devices):
    """The same devices, which read every tile in every step."""
    drives = {d for d in devices if parse_device(d).backend == "file"}
    return [f"file:{parse_device(d).directory}?cache=off" if d in drives else d for d in devices]


def place(device):
    """The directory of a named device."""
    return parse_device(device).directory


def device_strings(backend, directory):
    """Devices of one back end for a test; named ones lie below `directory`."""
    if backend in ("files", "xrts"):  # of the time on cards, opening them takes most
        return named_devices(directory, 3 if backend == "files" else 2)
    return {
        "file": ["file:"],
        "ram": ["ram:"],
        "mixed": ["ram:", "file:"],
        "null": ["null:"],
        NEAR: ["gpu:?room=1GB", "file:"],
        "xrt": [f"xrt:0?nvme={directory}&scratch=1"],
    }[backend]
