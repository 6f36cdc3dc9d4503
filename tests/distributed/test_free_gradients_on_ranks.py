"""overlap(free_gradients=True) with several ranks: gradients are used in backward, with the bits of blocking steps."""

import pytest
import torch
from support import far
from support.rank_models import MODELS, net
from support.ranks import on_living_ranks, on_ranks
from support.replacing import failing, raised_by, slow
from support.twins import blocking, local, now, training_on
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from csd_optim import CSDAdam, CSDRuntimeError
from csd_optim.bindings import Native
from csd_optim.errors import CSDRankError
from csd_optim.overlap.backward_run import TakenGradient
from csd_optim.store.file import StoreFile

STEPS = 5
FREE = {"free_gradients": True}


def trains(rank, kind, options):
    seen = []
    for overlap in None, FREE:
        training = training_on(rank, str(overlap), overlap, kind, **options)
        params = [*training.model.parameters()]
        with slow(StoreFile, "publish", rank, 0.01):
            for k in range(STEPS):
                training.backward()
                taken = [isinstance(p.grad, TakenGradient) for p in params]
                assert all(taken) if overlap and k else not any(taken)  # not in the first step
                training.opt.step()
                training.opt.zero_grad()
        assert overlap is None or training.opt.stats()["overlap"]["early_params"] > 0
        training.opt.synchronize()
        assert training.opt.committed_step == (STEPS if options.get("named") else 0)
        seen.append(training.seen())
        training.opt.close()
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("size", "kind", "options"),
    [
        (2, "FSDP2", {}),
        (2, "FSDP2", {"named": True}),
        (2, "FSDP2", {"named": True, "state_dtype": "8bit", "dtype": torch.bfloat16}),
        (4, "HSDP", {"named": True}),
    ],
    ids=str,
)
def test_the_bits_of_blocking_steps(size, kind, options, tmp_path):
    on_living_ranks(size, trains, kind, options, directory=tmp_path)


def tensor_parallel(rank):
    nets = []
    for overlaps in False, True:
        model = MODELS["tensor parallel"]()
        with CSDAdam(model.parameters(), lr=0.02, tile_size=1024, devices="file:") as opt:
            if overlaps:
                opt.overlap(model, free_gradients=True)
            params = [*model.parameters()]
            for k in range(STEPS):
                torch.manual_seed(k)
                x, y = torch.randn(8, 3, 4, 4), torch.randint(0, 3, (8,))
                nn.functional.cross_entropy(model(x), y).backward()
                assert not (overlaps and k) or any(isinstance(p.grad, TakenGradient) for p in params)
                opt.step()
                opt.zero_grad()
            entries = opt.state_dict()["state"].values()
            held = [*model.parameters(), *(t for entry in entries for t in entry.values())]
            nets.append([t.detach().clone() for t in map(local, held)])
    assert all(map(torch.equal, *nets))


def test_tensor_parallel(tmp_path):
    on_living_ranks(2, tensor_parallel, directory=tmp_path)


def far_tensor_parallel(rank):
    far.assume(True)
    tensor_parallel(rank)


def test_tensor_parallel_on_far_devices(tmp_path):
    """Ranks exchange rows of tiles whose parameters come back as images."""
    on_ranks(2, far_tensor_parallel, directory=tmp_path)


def synchronizes(rank, fails):
    """Between backward and step(), synchronize() raises on all ranks, whether backward has failed on one or not."""
    training = training_on(rank, "this", FREE, "FSDP2", named=True)
    opt = training.opt
    for _ in range(2):
        training.step()
    opt.synchronize()
    before = now(training)
    with failing(Native, "push", int(fails and rank == 1), "unplugged"):
        training.backward()
        for call in (opt.synchronize, opt.synchronize):
            said = raised_by(call)
            assert isinstance(said, CSDRankError if fails and rank == 1 else CSDRuntimeError)
            assert "backward has changed parameters already" in str(said)
        if fails:
            assert "unplugged" in str(raised_by(opt.step))
            assert now(training) == before
            opt.zero_grad()
            training.steps -= 1
            training.backward()
        opt.step()
    opt.zero_grad()
    opt.synchronize()
    assert opt.committed_step == 3
    opt.close()


@pytest.mark.parametrize("fails", [True, False])
def test_synchronize_before_step(fails, tmp_path):
    on_living_ranks(2, synchronizes, fails, directory=tmp_path)


def differs(rank, how):
    """What one rank alone does between backward and step() makes all of them raise, and undo the step."""
    training = training_on(rank, "this", FREE, "FSDP2", named=True)
    for _ in range(2):
        training.step()
    training.opt.synchronize()
    before = now(training)
    training.backward()
    if rank == 1:
        if how == "lr":
            training.opt.param_groups[0]["lr"] *= 2
        else:
            training.opt.zero_grad()
    said = raised_by(training.opt.step)
    assert isinstance(said, CSDRuntimeError | CSDRankError)
    if rank == 1 and how == "lr":
        training.opt.param_groups[0]["lr"] /= 2
    assert now(training) == before
    training.opt.zero_grad()
    training.steps = 2
    training.step()
    training.opt.synchronize()
    assert training.opt.committed_step == 3
    training.opt.close()


@pytest.mark.parametrize("how", ["lr", "zero_grad"])
def test_a_rank_that_does_something_else(how, tmp_path):
    on_living_ranks(2, differs, how, directory=tmp_path)


def refused(rank):
    model = DDP(net(used=True))
    with (
        CSDAdam(model.parameters(), devices="file:") as opt,
        pytest.raises(CSDRuntimeError, match=r"free_gradients=True.* DistributedDataParallel"),
    ):
        opt.overlap(model, free_gradients=True)


def test_ddp_is_refused(tmp_path):
    on_living_ranks(2, refused, directory=tmp_path)


def takes_turns(rank):
    """All modes follow each other, with a commit under way each time."""
    training = training_on(rank, "this", {}, named=True)
    with slow(StoreFile, "publish", rank, 0.01):
        for mode in MODES_IN_TURN:
            training.opt.overlap(None if mode is None else training.model, **(mode or {}))
            for _ in range(3):
                training.step()
    training.opt.synchronize()
    assert training.opt.committed_step == training.steps == 3 * len(MODES_IN_TURN)
    assert now(training) == blocking(rank, training.steps)
    training.opt.close()


MODES_IN_TURN = [FREE, {"backward": True}, FREE, None, FREE, {}, {"backward": True}]


def test_modes_in_turn(tmp_path):
    on_living_ranks(2, takes_turns, directory=tmp_path)
