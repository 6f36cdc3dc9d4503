"""Several trainers on owners' engines: each has its own there, and they keep steps together."""

import contextlib
import os
import signal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.inside import engine_of
from support.nets_on_ranks import Net, assert_equal
from support.owner_here import OwnersHere
from support.owners import Owner
from support.ranks import on_living_ranks, on_ranks

from csd_optim import CSDAdam, CSDError, CSDOSError, CSDRankError, CSDStoreError, CSDUnavailableError
from csd_optim.bindings import Native
from csd_optim.serve.trainer.remote_native import RemoteNative

pytestmark = pytest.mark.ci
WRAPS = ("DDP", "FSDP2", "HSDP", "TP")


@pytest.fixture
def owner(tmp_path):
    with Owner(tmp_path, timeout=30) as there:
        yield there


def beside(rank, address, wrap, options, overlap):
    """Train on directories and on an owner, with a resume on the way."""
    os.makedirs(f"own-{rank}", exist_ok=True)
    ours = Net(rank, f"own-{rank}", wrap, **options).until(9)
    with Net(rank, address, wrap, overlap, **options).until(5).opt as opt:
        opt.synchronize()
    served = Net(rank, address, wrap, overlap, resume=True, **options)
    assert served.opt.committed_step == served.done == 5
    assert_equal(ours.image(), served.until(9).image())
    assert served.opt.stats()["params"] == ours.opt.stats()["params"]
    served.opt.close()


@pytest.mark.parametrize(
    ("wrap", "options", "overlap"),
    [
        *((wrap, {}, None) for wrap in WRAPS),
        ("DDP", {"state_dtype": "8bit"}, None),
        ("FSDP2", {"max_grad_norm": 0.5}, None),
        ("FSDP2", {}, {}),
        ("FSDP2", {}, {"backward": True}),
        ("FSDP2", {}, {"free_gradients": True}),
        ("HSDP", {}, {"backward": True}),
        ("DDP", {}, {}),
        ("TP", {"state_dtype": "8bit", "topk": 0.1, "error_feedback": False}, None),
        ("DDP", {"sharded": False}, {}),
    ],
    ids=str,
)
def test_ranks_have_the_bits_of_directories_and_are_resumed(owner, tmp_path, wrap, options, overlap):
    on_ranks(4 if wrap == "HSDP" else 2, beside, owner.address, wrap, options, overlap, directory=tmp_path)


def on_two_owners(rank, addresses):
    with Net(rank, addresses).until(3).opt as opt:
        opt.synchronize()
        return str(engine_of(opt).devices.specs[0])


def test_owners_are_divided_among_trainers(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with Owner(tmp_path / "a") as first, Owner(tmp_path / "b") as second:
        addresses = [first.address, second.address]
        names = on_ranks(3, on_two_owners, addresses, directory=tmp_path)
        assert [str(second.port) in name for name in names] == [False, True, False]


def refused(rank, address, said):
    with pytest.raises(CSDError, match=said):
        Net(rank, address, resume=True)


def trains(rank, address, steps, resume=False, overwrite=False):
    net = Net(rank, address, resume=resume, overwrite=overwrite)
    begun = net.done
    with net.until(steps).opt as opt:
        opt.synchronize()
        return begun, net.image()


def test_another_number_of_trainers_is_refused(owner, tmp_path):
    on_ranks(2, trains, owner.address, 2, directory=tmp_path)
    on_ranks(3, refused, owner.address, "another number of trainers than 3", directory=tmp_path)
    with pytest.raises(CSDStoreError, match="another number of trainers"):
        CSDAdam([torch.zeros(3, requires_grad=True)], devices=owner.address, resume=True)
    assert [begun for begun, _ in on_ranks(2, trains, owner.address, 4, True, directory=tmp_path)] == [2, 2]


def killed_in_a_step(rank, address, victim):
    net = Net(rank, address).until(3)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(RuntimeError):
        net.until(10)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_trainer_is_killed(owner, tmp_path, victim):
    on_ranks(2, killed_in_a_step, owner.address, victim, directory=tmp_path, may_die=(victim,))
    said = on_ranks(2, trains, owner.address, 5, True, directory=tmp_path)
    assert {begun for begun, _ in said} <= {2, 3}
    os.makedirs(tmp_path / "undisturbed")
    alone = on_ranks(2, trains, ["undisturbed/rank-{rank}"], 5, directory=tmp_path)
    for (_, found), (_, wanted) in zip(said, alone, strict=True):
        assert_equal(found, wanted)


def takes_over(rank, address):
    """An older training of the same ranks is superseded, and changes nothing any more."""
    old = Net(rank, address).until(2)
    old.opt.synchronize()
    new = Net(rank, address, resume=True)
    dist.barrier()
    with pytest.raises(CSDRankError, match="another session has taken over"):
        old.step()
    with new.until(4).opt as opt:
        opt.synchronize()
        assert opt.committed_step == 4


def test_a_training_takes_over_from_another_one(owner, tmp_path):
    on_ranks(2, takes_over, owner.address, directory=tmp_path)


def failing_on_one_rank(rank, stage, n):
    """A device of rank 1 fails once at its owner, or its connection is cut: both raise, and repeat the step.

    `n`: the owners of each rank.
    """
    os.makedirs(f"own-{rank}", exist_ok=True)
    with OwnersHere(f"owner-{rank}", n) as owners:
        of_ranks = [None, None]
        dist.all_gather_object(of_ranks, owners.address)
        addresses = [address for those in zip(*of_ranks, strict=True) for address in those]
        ours, served = Net(rank, f"own-{rank}").until(6), Net(rank, addresses).until(2)
        served.opt.synchronize()
        before = [p.detach().clone() for p in served.model.parameters()]
        real = getattr(Native, stage) if stage != "cut" else None
        count = 0

        def fails(native, *arguments, **options):
            nonlocal count
            count += 1
            if count == (1 if stage == "finish" else 2):
                if stage == "finish":
                    real(native, keep=False)  # it raises when the step is undone
                raise CSDOSError(5, "broken")
            return real(native, *arguments, **options)

        context = mock.patch.object(Native, stage, fails) if real and rank == 1 else contextlib.nullcontext()
        if stage == "cut" and rank == 1:
            owners.owners[-1].owner.sessions[2 * n - 1].end("cut")
        elif rank == 1:
            with pytest.raises(CSDError), context:
                served.step()
        if stage == "cut":  # whoever notices it says so, to both; then the link is taken up again
            while served.done < 3:
                with contextlib.suppress(CSDRankError):
                    served.step()
        elif rank == 0:
            with pytest.raises(CSDRankError, match="broken"):
                served.step()
        if stage != "cut":
            assert_equal(before, [p.detach() for p in served.model.parameters()])
        assert_equal(ours.image(), served.until(6).image())
        served.opt.close()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stage", ["push", "params_ready", "finish", "cut"])
def test_one_rank_fails(tmp_path, stage, n):
    on_living_ranks(2, failing_on_one_rank, stage, n, directory=tmp_path)


def owner_dies(rank, address, pid):
    net = Net(rank, address).until(3)
    net.opt.synchronize()
    dist.barrier()
    if rank == 0:
        os.kill(pid, signal.SIGKILL)
    dist.barrier()
    for _ in range(2):
        with pytest.raises((CSDRankError, CSDUnavailableError)):
            net.step()


def test_the_owner_is_killed_and_all_resume(owner, tmp_path):
    on_ranks(2, owner_dies, owner.address + "&timeout=6", owner.pid, directory=tmp_path)
    owner.start()
    said = on_ranks(2, trains, owner.address, 5, True, directory=tmp_path)
    assert [begun for begun, _ in said] == [3, 3]


def records_of_an_undone_step(rank, address):
    """Load states after a step that has landed here and failed on rank 1. Returns what was recorded with them."""
    net = Net(rank, address, "FSDP2", {}).until(3)
    net.opt.synchronize()
    finish = RemoteNative.finish

    def fails(native, keep, ending=None):
        if keep and rank == 1:
            finish(native, False)
            raise CSDOSError(5, "unplugged")
        return finish(native, keep, ending)

    def step():
        net.step()
        net.opt.synchronize()

    with mock.patch.object(RemoteNative, "finish", fails), pytest.raises(CSDError, match="unplugged"):
        step()
    net.opt.zero_grad()
    with net.opt.loading():
        for p in net.model.parameters():
            net.opt.state[p]["exp_avg"].mul_(2)
    net.opt.close()
    again = Net(rank, address, "FSDP2", resume=True)
    again.opt.close()
    return again.done


def test_a_load_after_an_undone_step_keeps_the_record_of_the_step_before(owner, tmp_path):
    assert on_ranks(2, records_of_an_undone_step, owner.address, directory=tmp_path) == [3, 3]
