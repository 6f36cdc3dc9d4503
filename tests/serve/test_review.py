"""Review of several trainers."""
import contextlib, os, threading, time
from unittest import mock
import pytest, torch
import torch.distributed as dist
from support.inside import engine_of
from support.owner_here import OwnerHere
from support.ranks import on_ranks
from test_remote_ranks import Net, assert_equal
from csd_optim import CSDError, CSDRankError
from csd_optim.serve.owner_requests import OwnerRequests
from csd_optim.serve.remote_committer import RemoteCommitter
from csd_optim.serve.link import Link


def lost_at_finish(rank, options={}):
    said = []
    with OwnerHere(f"owner-{rank}") as owner:
        net = Net(rank, owner.address).until(3)
        net.opt.synchronize()
        real = OwnerRequests._on_finish

        def cut(self, fields, arrays):
            OwnerRequests._on_finish = real
            owner.owner.sessions[1].end("cut")
            raise CSDRankError("cut")

        if rank == 1:
            OwnerRequests._on_finish = cut
        for _ in range(4):
            try:
                net.step()
                said.append(f"ok {net.done}")
            except CSDError as e:
                said.append(f"{type(e).__name__}: {e}")
            net.done = 3
        said.append(f"step {engine_of(net.opt).states.step}")
        with contextlib.suppress(CSDError):
            net.opt.close()
    with OwnerHere(f"owner-{rank}") as owner:
        try:
            net = Net(rank, owner.address, resume=True, **options)
            said.append(f"resumed {net.done}")
            net.opt.close()
        except CSDError as e:
            said.append(f"resume: {type(e).__name__}: {e}")
    return said


def test_lost_at_finish(tmp_path):
    for said in on_ranks(2, lost_at_finish, directory=tmp_path):
        assert said[-1] == "resumed 3", said


def killed_in_loading(rank, options={}):
    said = []
    with OwnerHere(f"owner-{rank}") as owner:
        net = Net(rank, owner.address, **options).until(2)
        loaded = net.opt.state_dict()
        import copy
        loaded = copy.deepcopy(loaded)
        net.until(5)
        before = net.image()
        net.opt.synchronize()
        n = 0
        real = OwnerRequests._on_write

        def cut(self, fields, arrays):
            nonlocal n
            n += 1
            if n == 4:
                owner.owner.sessions[rank].end("killed")
                raise CSDRankError("cut")
            return real(self, fields, arrays)

        OwnerRequests._on_write = cut
        try:
            net.opt.load_state_dict(loaded)
        except CSDError as e:
            said.append(f"load: {type(e).__name__}: {e}")
        OwnerRequests._on_write = real
        engine_of(net.opt)._abandoned = True
        said.append([str(line) for line in owner.lines][-3:])
        dist.barrier()
        try:
            new = Net(rank, owner.address, resume=True, **options)
            said.append(f"resumed {new.done} step {engine_of(new.opt).states.step}")
            after = new.image()
            said.append([torch.equal(a, b) for a, b in zip(before, after, strict=True)])
            new.opt.close()
        except CSDError as e:
            said.append(f"resume: {type(e).__name__}: {e}")
    dist.barrier()
    with OwnerHere(f"owner-{rank}") as owner:
        try:
            new = Net(rank, owner.address, resume=True, **options)
            said.append(f"again: resumed {new.done} step {engine_of(new.opt).states.step}")
            after = new.image()
            said.append([torch.equal(a, b) for a, b in zip(before, after, strict=True)])
            new.opt.close()
        except CSDError as e:
            said.append(f"again: {type(e).__name__}: {e}")
    return said


@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}])
def test_killed_in_loading(tmp_path, options):
    for said in on_ranks(2, killed_in_loading, options, directory=tmp_path):
        assert all(said[-1]), said
        assert "resumed 5" in said[-2]
