"""The back ends that tests run on, and device strings for them; with emulated cards (pytest --xrt), other back ends."""

import os
from pathlib import Path

from csd_optim.devices.spec import parse_device

TESTS = Path(__file__).resolve().parents[1]
BACKENDS = ["file", "files", "ram", "mixed"]
GPU = "gpu"  # states on the parameters' accelerator; states of parameters on the CPU are in a file
# The back ends of a run on emulated cards (test_xrt.py): pytest --xrt
XRT_BACKENDS = ["xrt", "xrts"]
TILE = 2048  # elements: small, so that a handful of parameters crosses tiles and devices


def on_cards():
    """Return whether this is a run on emulated cards (--xrt), or a process that such a run has started."""
    return "CSD_OPTIM_TEST_XRT" in os.environ


def named_devices(directory, n):
    """Return device strings of durable stores, csd0, csd1 ... below `directory`."""
    return [f"xrt:{i}?nvme={directory}/csd{i}" if on_cards() else str(directory / f"csd{i}") for i in range(n)]


def reading_all(devices):
    """Return the same devices without a cache, so that every step reads every tile."""
    drives = {d for d in devices if parse_device(d).backend == "file"}
    return [f"file:{parse_device(d).directory}?cache=off" if d in drives else d for d in devices]


def place(device):
    """Return the directory of a named device."""
    return parse_device(device).directory


def device_strings(backend, directory):
    """Return the devices of one back end for a test; named ones lie below `directory`."""
    if backend in ("files", "xrts"):  # on cards, most of a test's time goes to opening them
        return named_devices(directory, 3 if backend == "files" else 2)
    return {
        "file": ["file:"],
        "ram": ["ram:"],
        "mixed": ["ram:", "file:"],
        "null": ["null:"],
        GPU: ["gpu:?room=1GB", "file:"],
        "xrt": [f"xrt:0?nvme={directory}&scratch=1"],
    }[backend]
