"""Several trainers, each with an owner of its own: one of their links is lost, or one of them dies, at a bad moment."""

import contextlib
import copy
import math
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.inside import engine_of
from support.nets_on_ranks import Net
from support.owner_here import OwnerHere
from support.ranks import on_living_ranks, on_ranks

from csd_optim import CSDError, CSDRankError
from csd_optim.serve.owner import owner_session
from csd_optim.serve.owner.owner_requests import OwnerRequests
from csd_optim.serve.requests import op_of
from csd_optim.serve.trainer.link import Link

pytestmark = pytest.mark.ci


@contextlib.contextmanager
def cut_at(op, session, after=0):
    """End a session, at its owner, instead of executing a request of this kind, `after` some others."""
    real, left = OwnerRequests.execute, after

    def execute(requests, request, arrays):
        nonlocal left
        left -= op_of(request) == op
        if left == -1:
            left = math.inf
            session.end("cut")
            raise CSDRankError("cut")
        return real(requests, request, arrays)

    with mock.patch.object(OwnerRequests, "execute", execute):
        yield


def resumed(rank, owner):
    """Return the step, `user_state` and image of a resume."""
    with Net(rank, owner.address, resume=True).opt as opt:
        return engine_of(opt).states.step, opt.user_state, [p.detach().clone() for p in opt.param_groups[0]["params"]]


def lost_at_finish(rank):
    """A link is lost before the owner completes a step that the other trainers have completed: all undo it."""
    with OwnerHere(f"owner-{rank}") as owner:
        net = Net(rank, owner.address).until(3)
        net.opt.synchronize()
        before = [p.detach().clone() for p in net.model.parameters()]
        cut = cut_at("finish", owner.owner.sessions[1]) if rank == 1 else contextlib.nullcontext()
        with cut, pytest.raises(CSDRankError):
            net.step()
        net.opt.zero_grad()
        assert all(map(torch.equal, before, net.model.parameters()))
        net.until(5).opt.synchronize()
        wanted = [p.detach().clone() for p in net.model.parameters()]
        net.opt.close()
    with OwnerHere(f"owner-{rank}") as owner:
        step, user_state, found = resumed(rank, owner)
        assert (step, user_state) == (5, {"done": 5})
        assert all(map(torch.equal, found, wanted))


def test_a_link_is_lost_as_a_step_ends(tmp_path):
    on_ranks(2, lost_at_finish, directory=tmp_path)


def ended_in_loading(rank, options):
    """All trainers die while some of the states that they load have arrived."""
    with OwnerHere(f"owner-{rank}") as owner:
        net = Net(rank, owner.address, **options).until(2)
        loaded = copy.deepcopy(net.opt.state_dict())
        net.until(5).opt.synchronize()
        wanted = net.image()
        with cut_at("write", owner.owner.sessions[rank], after=3), pytest.raises(CSDError):
            net.opt.load_state_dict(loaded)
    dist.barrier()
    for _ in range(2):  # the owner is restarted, too
        with OwnerHere(f"owner-{rank}") as owner:
            net = Net(rank, owner.address, resume=True, **options)
            assert net.done == 5
            assert all(map(torch.equal, net.image(), wanted))
            net.opt.close()
        dist.barrier()


@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}], ids=str)
def test_trainers_die_while_they_load(tmp_path, options):
    on_living_ranks(2, ended_in_loading, options, directory=tmp_path)


def loaded_in_part(rank):
    """One trainer's owner is gone for a moment, so that only the other one's states are loaded."""
    with OwnerHere(f"owner-{rank}") as owner:
        net = Net(rank, owner.address).until(2)
        net.opt.synchronize()
        loaded, real = copy.deepcopy(net.opt.state_dict()), Link.request

        def request(link, op, *arrays, **fields):
            if op == "loading" and rank == 1:
                raise CSDRankError("gone for a moment")
            return real(link, op, *arrays, **fields)

        with mock.patch.object(Link, "request", request), pytest.raises(CSDRankError):
            net.opt.load_state_dict(loaded)
        with pytest.raises(CSDRankError):
            net.step()
        net.opt.close()
    with OwnerHere(f"owner-{rank}") as owner:
        step, user_state, _ = resumed(rank, owner)
        assert (step, user_state) == (2, {"done": 2})


def test_states_are_loaded_on_one_rank_only(tmp_path):
    on_ranks(2, loaded_in_part, directory=tmp_path)


def opens_slowly(rank):
    """Reading one trainer's store takes longer than the other one's owner is silent within a message."""
    with OwnerHere(f"owner-{rank}", timeout=1) as owner:
        Net(rank, owner.address).until(2).opt.close()
        real = owner_session.summary_of

        def summary_of(store):
            time.sleep(3 * rank)
            return real(store)

        with mock.patch.object(owner_session, "summary_of", summary_of):
            Net(rank, owner.address, resume=True).opt.close()


def test_a_slow_store_holds_the_other_trainers(tmp_path):
    on_ranks(2, opens_slowly, directory=tmp_path)
