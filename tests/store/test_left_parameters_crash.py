"""What a crash leaves of parameters that leave the optimizer: the last commit that has them can always be resumed.

Kills at calls and power losses with such parameters are part of tests/crash: see test_crash.py.
"""

import copy
import errno
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from support.replacing import replaced
from torch.nn import Parameter

from csd_optim import CSDAdam, CSDOSError
from csd_optim.checkpoint.snapshot import Snapshot
from csd_optim.engine.commit.commit import Commit
from csd_optim.store.format import FILE_NAME, read_commits
from csd_optim.store.reader import find_damage, tiles_of

LARGE, SMALL = 6000, 3000  # elements of the parameter that is replaced, and of the one that takes its place


def devices_in(directory):
    name = "device-" if directory.name == "snapshot" else "csd"
    return [str(directory / f"{name}{d}") for d in range(2)]


def opened(directory, *numels, **options):
    params = [Parameter(torch.linspace(-1, 1, n)) for n in numels]
    groups = [{"params": [p]} for p in params]
    directory.mkdir(exist_ok=True)
    return CSDAdam(groups, devices=devices_in(directory), tile_size=1024, **options)


def step(opt):
    for k, group in enumerate(opt.param_groups):
        for p in group["params"]:
            p.grad = torch.full_like(p, k + 1)
    opt.step()


def replace(opt):
    """Let a smaller parameter have the place of the first one, with the first of its states."""
    group = opt.param_groups[0]
    old = group["params"][0]
    entry = opt.state.pop(old)
    group["params"] = [new := Parameter(old.detach()[:SMALL].clone())]
    opt.state[new] = {key: value[:SMALL].clone() if value.dim() else value for key, value in entry.items()}


def leave(opt):
    """Drop the first parameter with its group."""
    del opt.state[opt.param_groups.pop(0)["params"][0]]


def bits(opt):
    params = [p for group in opt.param_groups for p in group["params"]]
    states = [opt.state[p][key].clone() for p in params for key in ("master", "exp_avg", "exp_avg_sq", "step")]
    return [p.detach().clone() for p in params] + states


def contents(directory):
    """Return the newest commit of each store."""
    found = []
    for place in devices_in(directory):
        with open(path := Path(place, FILE_NAME), "rb") as file:
            found.append(read_commits(file.fileno(), str(path))[0])
    return found


def n_tiles(directory):
    """Return how many tiles the newest commit has checksums of. They must be right."""
    found = contents(directory)
    assert not [*find_damage(found)]
    return sum(tile.summed for tile in tiles_of(found))


def check_resumes(directory, numels, expected, at_step):
    with opened(directory, *numels, resume=True) as opt:
        assert opt.committed_step == at_step
        assert all(torch.equal(a, b) for a, b in zip(bits(opt), expected, strict=True))
        step(opt)


@pytest.mark.parametrize("how", ["is late", "fails at first"])
def test_the_last_commit_has_what_leaves_after_it(tmp_path, how):
    """The commit of step 2 has read no tiles when step 3 begins, before which a parameter leaves; that of 3 fails."""
    tries = []

    def prepare(original, commit, in_parallel):
        tries.append(commit.job.step)
        if commit.job.step == 3 or (how == "fails at first" and tries.count(2) == 1):
            raise CSDOSError(errno.EIO, "unplugged")
        if commit.job.step == 2:
            time.sleep(0.2)
        original(commit, in_parallel)

    with opened(tmp_path / "stores", LARGE, SMALL) as opt:
        step(opt)
        opt.synchronize()
        all_tiles = n_tiles(tmp_path / "stores")
        with replaced(Commit, "prepare", prepare):
            step(opt)
            expected = bits(opt)
            leave(opt)
            step(opt)
            with pytest.raises(CSDOSError):
                opt.synchronize()
            shutil.copytree(tmp_path / "stores", tmp_path / "crashed")
    assert tries.count(2) == (2 if how == "fails at first" else 1)
    assert n_tiles(tmp_path / "crashed") == all_tiles
    check_resumes(tmp_path / "crashed", (LARGE, SMALL), expected, 2)


def test_a_parameter_leaves_in_the_next_step_if_the_last_one_cannot_be_committed(tmp_path):
    def prepare(original, commit, in_parallel):
        if fails:
            raise CSDOSError(errno.EIO, "unplugged")
        original(commit, in_parallel)

    fails = []
    with opened(tmp_path / "stores", LARGE, SMALL) as opt, replaced(Commit, "prepare", prepare):
        step(opt)
        opt.synchronize()
        all_tiles = n_tiles(tmp_path / "stores")
        fails.append("the drive")
        step(opt)
        leave(opt)
        with pytest.raises(CSDOSError, match="unplugged"):
            step(opt)
        shutil.copytree(tmp_path / "stores", tmp_path / "crashed")
        fails.clear()
        step(opt)
        opt.synchronize()
        expected = bits(opt)
        assert n_tiles(tmp_path / "stores") < all_tiles
    assert n_tiles(tmp_path / "crashed") == all_tiles
    check_resumes(tmp_path / "stores", (SMALL,), expected, 3)


@pytest.mark.parametrize("what", ["save()", "a load", "close()"])
def test_a_commit_after_a_resume_does_not_name_what_has_left(tmp_path, what):
    """Space that was given back reads as zeros, or as before if the power failed: no checksum of it is certain."""
    with opened(tmp_path / "stores", LARGE, SMALL) as opt:
        step(opt)
        replace(opt)
        step(opt)
    left = n_tiles(tmp_path / "stores")
    with opened(tmp_path / "stores", SMALL, SMALL, resume=True) as opt:
        if what == "save()":
            opt.state[opt.param_groups[1]["params"][0]]["exp_avg"].zero_()
            opt.save(tmp_path / "snapshot")
        elif what == "a load":
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        else:
            opt.state[opt.param_groups[1]["params"][0]]["exp_avg"].zero_()
        expected = bits(opt)
    assert n_tiles(tmp_path / "stores") == left
    if what == "save()":
        assert n_tiles(tmp_path / "snapshot") == left
    check_resumes(tmp_path / "stores", (SMALL, SMALL), expected, 2)


def test_a_commit_without_a_step_does_not_name_what_has_left(tmp_path):
    """A parameter leaves in a step without gradients, which takes no step; save() commits after it."""
    with opened(tmp_path / "stores", LARGE, SMALL) as opt:
        step(opt)
        leave(opt)
        opt.zero_grad()
        opt.step()
        expected = bits(opt)
        opt.save(tmp_path / "snapshot")
    check_resumes(tmp_path / "snapshot", (SMALL,), expected, 1)


def test_a_snapshot_has_what_leaves_while_it_is_copied(tmp_path):
    """Only when it is whole, the commit begins that gives the space back."""
    goes_on, in_time = threading.Event(), []

    def finish(original, snapshot, **options):
        in_time.append(goes_on.wait(0.5))  # a step that does not wait for this has given the space back by then
        original(snapshot, **options)

    with opened(tmp_path / "stores", LARGE, SMALL) as opt:
        step(opt)
        expected = bits(opt)
        with replaced(Snapshot, "finish", finish):
            saving = opt.save(tmp_path / "snapshot", wait=False)
            replace(opt)
            step(opt)
            opt.synchronize()
            goes_on.set()
            saving.result()
    assert in_time == [False]
    check_resumes(tmp_path / "snapshot", (LARGE, SMALL), expected, 1)
