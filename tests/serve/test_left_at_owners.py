"""Parameters that leave a trainer are freed by its optimizer ranks."""

import os
import time
from pathlib import Path

import pytest
import torch
from support.owners import Owner
from torch.nn import Parameter

from csd_optim import CSDAdam
from csd_optim.checkpoint.verify import verify
from csd_optim.engine.commit.commit import CommitJob
from csd_optim.store.format import read_contents


def replace(opt, name, keep):
    """Let a group's parameter be replaced by some of its rows, with the states that AdamW has."""
    group = next(group for group in opt.param_groups if group["name"] == name)
    [old] = group["params"]
    entry, new = opt.state.pop(old), Parameter(old.detach()[keep].clone())
    for key in ("exp_avg", "exp_avg_sq"):
        entry[key] = entry[key][keep]
    group["params"], opt.state[new] = [new], entry


def with_replaced(make, rounds, n=20_000):
    torch.manual_seed(0)
    groups = [{"params": [Parameter(torch.randn(rows, 3))], "name": name} for name, rows in (("xyz", n), ("rest", 50))]
    opt = make(groups)
    for k in range(rounds):
        for group in opt.param_groups:
            [p] = group["params"]
            p.grad = p.detach().sin()
        opt.step()
        replace(opt, "xyz", torch.arange(n).roll(k))
    for group in opt.param_groups:
        [p] = group["params"]
        p.grad = p.detach().sin()
    opt.step()
    return opt, [group["params"][0].detach().clone() for group in opt.param_groups]


def used(directory):
    return sum(os.stat(store).st_blocks * 512 for store in Path(directory).rglob("csd_optim.store"))


@pytest.mark.parametrize("n_owners", [1, 2])
def test_owners_free_what_leaves(tmp_path, n_owners):
    _, right = with_replaced(lambda groups: torch.optim.AdamW(groups, lr=0.01), 8)
    places = [tmp_path / str(k) for k in range(n_owners)]
    for place in places:
        place.mkdir()
    owners = [Owner(place) for place in places]
    try:
        devices = [owner.address for owner in owners]
        opt, found = with_replaced(lambda groups: CSDAdam(groups, lr=0.01, devices=devices), 8)
        for ours, theirs in zip(found, right, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        opt.synchronize()
        live = 24 * sum(p.numel() for p in found)
        assert used(tmp_path) < 3 * live  # of nine stores of that size
        opt.close()
        shapes = [p.shape for p in found]
        groups = [{"params": [Parameter(torch.zeros(shape))], "name": "any"} for shape in shapes]
        with CSDAdam(groups, lr=0.01, devices=devices, resume=True) as opt:
            assert opt.committed_step == 9
            for p, ours in zip((group["params"][0] for group in opt.param_groups), found, strict=True):
                assert torch.equal(p, ours)
    finally:
        for owner in owners:
            owner.stop()
    assert [
        verdict.damage for place in places for verdict in verify([next(place.rglob("csd_optim.store")).parent])
    ] == [[]] * n_owners


def _is_slow_in_step_2():
    stage = CommitJob.stage

    def slow(job, *arguments):
        if job.step == 2:
            time.sleep(0.5)
        return stage(job, *arguments)

    CommitJob.stage = slow


def test_an_owner_frees_nothing_that_its_commit_still_reads(tmp_path):
    with Owner(tmp_path, before=_is_slow_in_step_2) as owner:
        groups = [{"params": [Parameter(torch.zeros(n))]} for n in (10_000, 500)]
        with CSDAdam(groups, devices=[owner.address]) as opt:
            for step in range(2):
                for group in opt.param_groups:
                    group["params"][0].grad = torch.ones_like(group["params"][0])
                opt.step()
                if step == 0:
                    opt.synchronize()
            left, _ = opt.param_groups.pop(0)["params"][0], opt.zero_grad()
            del opt.state[left]
            opt.step()  # without gradients: it frees, and commits nothing
            opt.synchronize()
            contents = read_contents(next(tmp_path.rglob("csd_optim.store")))
            assert contents.superblock.step == 2
            assert [p["group"] for p in contents.manifest["params"]] == [0, 1]
            assert contents.tiles["summed"].all()
