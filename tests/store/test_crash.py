"""A small part of `make soak`: training is killed, the power fails, superblocks are lost."""

import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from crash.power import RENAME, SYNC, SYNC_DIRECTORY, WRITE, Disk, Entry, File
from crash.processes import preloaded

from csd_optim import CSDAdam, CSDStoreError
from csd_optim.bindings import crc32c
from csd_optim.store.format import FILE_NAME, PAGE, Region, Superblock

CRASH = Path(__file__).parents[1] / "crash"


def crash(directory, *options, seed=1):
    # In a separate process, because it forks children and must have no threads; with the preloaded libraries, without
    # which it would restart itself. All cases at once, since imports take seconds; its output names each violation.
    command, environment = [sys.executable, CRASH, *options, f"--seed={seed}"], preloaded(directory)
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("kills", "calls", "images"), [(5, 6, 60), pytest.param(12, 16, 150, marks=pytest.mark.ci)])
def test_training_goes_on_from_a_committed_step(kills, calls, images, tmp_path):
    said = crash(tmp_path, f"--kills={kills}", f"--calls={calls}", f"--images={images}", seed=kills)
    parts = rf"\b{kills} kills at random", r"\b\d+ kills at calls", rf"\b{images} power losses", "each one resumed from"
    for part in parts:
        assert re.search(part, said), (part, said)


@pytest.mark.ci
def test_one_of_several_ranks_is_killed(tmp_path):
    said = crash(tmp_path, "--kills=0", "--calls=0", "--images=0", "--rank-calls=6")
    assert re.search(r"\b[1-6] kills of a rank at calls", said), said


def test_a_file_that_takes_the_place_of_another_promises_nothing_for_it():
    """Only one device has the first commit, and the next process replaces its file: then nothing is durable."""

    class Recording:
        n_devices = 2

    block = Superblock(bytes(16), 0, 2, 1, 1, 0, Region(0, 0, 0, crc32c(b"")), Region(0, 0, 0, crc32c(b""))).pack()
    disk = Disk(Recording)

    def happens(what, device, data=b"", *, path=None, call=0):
        path = f"/csd{device}/{FILE_NAME}" if path is None else path
        for done in (False, True):
            disk.pass_by(Entry(what, done, 1, call, 0, len(data), path, data))

    def commit(device):
        happens(WRITE, device, block, call=1)
        happens(SYNC, device, call=2)

    def begin(device):
        happens(RENAME, device)
        happens(SYNC_DIRECTORY, device, path=f"/csd{device}")
        happens(SYNC_DIRECTORY, device, path="")

    begin(0), begin(1)
    commit(0)
    assert disk.durable == 0  # the other device has nothing, so the next process starts over
    begin(0), begin(1)
    commit(1)
    assert disk.durable == 0
    commit(0)
    assert disk.durable == 2  # step 1
    begin(0)
    assert disk.durable == 2  # a replacement does not lower what was promised


def test_a_superblock_without_its_table_promises_nothing():
    table = bytes(100)
    block = Superblock(
        bytes(16), 0, 2, 1, 1, 0, Region(0, 0, 0, crc32c(b"")), Region(2 * PAGE, PAGE, 100, crc32c(table))
    )
    file = File(None, [])
    file.safe += block.pack() + bytes(PAGE)
    assert not file.has(block)
    file.safe += table
    assert file.has(block)
    file.safe[-1] ^= 1
    assert not file.has(block)


# ---- lost superblocks --------------------------------------------------------------


def killed_after(directory, steps):
    """The devices as a process that is killed after that many steps leaves them, and their states."""
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 5000)), torch.nn.Parameter(torch.ones(70, dtype=torch.bfloat16))]
    directory.mkdir()
    devices = [str(directory / f"csd{d}") for d in range(2)]
    with CSDAdam(params, devices=devices, tile_size=1024) as opt:
        for step in range(steps):
            for p in params:
                p.grad = torch.full_like(p, step + 1)
            opt.user_state = {"step": step + 1}
            opt.step()
        while opt.committed_step < steps:
            time.sleep(0.001)
        shutil.copytree(directory, directory.with_name("crashed"))
        state = [opt.state[p][key].clone() for p in params for key in ("master", "exp_avg", "exp_avg_sq", "step")]
    return directory.with_name("crashed"), [p.detach() for p in params] + state


def resumed(directory):
    params = [torch.nn.Parameter(torch.zeros(5000)), torch.nn.Parameter(torch.zeros(70, dtype=torch.bfloat16))]
    with CSDAdam(params, devices=[str(directory / f"csd{d}") for d in range(2)], tile_size=1024, resume=True) as opt:
        state = [opt.state[p][key].clone() for p in params for key in ("master", "exp_avg", "exp_avg_sq", "step")]
        return opt.committed_step, opt.user_state, [p.detach() for p in params] + state


def spoil(directory, device, copy, how):
    file = directory / f"csd{device}" / FILE_NAME
    bytes_of = np.memmap(file, np.uint8, "r+")
    block = bytes_of[copy * PAGE : (copy + 1) * PAGE]
    if how == "a bit":
        block[40] ^= 1
    elif how == "zeros":
        block[:] = 0
    else:
        block[:] = np.random.default_rng(copy).integers(0, 256, PAGE, np.uint8)
    bytes_of.flush()


@pytest.mark.parametrize("how", ["a bit", "zeros", "noise"])
@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_superblock_is_lost(steps, device, copy, how, tmp_path):
    crashed, expected = killed_after(tmp_path / "stores", steps)
    spoil(crashed, device, copy, how)
    for _ in range(2):  # the second time from the repaired store
        step, user_state, found = resumed(crashed)
        assert (step, user_state) == (steps, {"step": steps})
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("device", [0, 1])
def test_both_superblocks_are_lost(device, tmp_path):
    crashed, _ = killed_after(tmp_path / "stores", 3)
    spoil(crashed, device, 0, "a bit")
    spoil(crashed, device, 1, "noise")
    before = {file: file.read_bytes() for file in crashed.rglob(FILE_NAME)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CSDStoreError, match=f"csd{device}"):
            resumed(crashed)
    assert {file: file.read_bytes() for file in crashed.rglob(FILE_NAME)} == before
