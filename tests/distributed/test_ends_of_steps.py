"""A step within step() that fails at its very end, on one rank, is undone on all of them."""

import contextlib

import pytest
import torch
from support.ranks import on_living_ranks
from support.replacing import failing, raised_by
from support.twins import blocking, now, training_on

from csd_optim import CSDOSError, CSDTornError
from csd_optim.engine.durable import DurableCommitter
from csd_optim.engine.engine import Engine
from csd_optim.errors import CSDRankError

STEPS, AT = 4, 2  # steps in all; taken before the one that fails
FREE = {"free_gradients": True}


def fails_at_its_end(rank, kind, overlap, options):
    training = training_on(rank, "this", overlap, kind, **options)
    opt, named = training.opt, options.pop("named", False)
    for _ in range(AT):
        training.step()
    opt.synchronize()
    before = now(training)
    for _ in range(2):
        training.backward()
        with failing(Engine, "finish", int(rank == 1), "unplugged"):
            said = raised_by(opt.step)
        assert isinstance(said, CSDOSError if rank == 1 else CSDRankError)
        assert "unplugged" in str(said)
        opt.zero_grad()
        assert now(training) == before
        opt.synchronize()
        assert opt.committed_step == (AT if named else 0)
        training.steps = AT
    while training.steps < STEPS:
        training.step()
    opt.synchronize()
    assert opt.committed_step == (STEPS if named else 0)
    assert now(training) == blocking(rank, STEPS, kind, **options)
    opt.close()


@pytest.mark.parametrize(
    ("kind", "overlap", "options"),
    [
        ("DDP", None, {"named": True}),
        ("DDP", None, {"dtype": torch.bfloat16}),
        ("DDP", None, {"named": True, "state_dtype": "8bit", "dtype": torch.bfloat16}),
        ("FSDP2", None, {"named": True}),
        ("FSDP2", FREE, {"named": True}),
    ],
    ids=str,
)
def test_no_rank_keeps_it(kind, overlap, options, tmp_path):
    on_living_ranks(2, fails_at_its_end, kind, overlap, options, directory=tmp_path)


def cannot_begin_to_commit(rank, kind, overlap):
    """The step is complete, so no rank raises alone: the next step begins with its commit."""
    training = training_on(rank, "this", overlap, kind, named=True)
    opt = training.opt
    for _ in range(AT):
        training.step()
    opt.synchronize()
    with failing(DurableCommitter, "commit", int(rank == 1), "the disk is full"):
        training.step()
        training.step()
    opt.synchronize()
    assert opt.committed_step == AT + 2
    opt.close()


@pytest.mark.parametrize(("kind", "overlap"), [("DDP", None), ("FSDP2", FREE)], ids=str)
def test_a_commit_that_does_not_begin(kind, overlap, tmp_path):
    on_living_ranks(2, cannot_begin_to_commit, kind, overlap, directory=tmp_path)


def has_no_gradients(rank):
    """A rank that has no gradients, and counts the others' step, does not count one that they have undone."""
    training = training_on(rank, "this", wrap=lambda model: model, sharded=False, named=True)
    opt = training.opt
    for _ in range(AT):
        training.step()
    before = now(training)
    for failed in True, False:
        if rank == 1:
            training.backward()
        with failing(Engine, "finish", int(rank == 1 and failed), "unplugged"):
            if failed:
                assert isinstance(raised_by(opt.step), CSDOSError if rank == 1 else CSDRankError)
                assert now(training) == before
            else:
                opt.step()
        opt.zero_grad()
        opt.synchronize()
        assert opt.committed_step == AT + (not failed)
    opt.close()


def test_a_rank_without_gradients(tmp_path):
    on_living_ranks(2, has_no_gradients, directory=tmp_path)


def has_residuals(rank):
    """Top-K has changed the only copy of its residuals: the other rank cannot go back, and says so at once."""
    training = training_on(rank, "this", None, "DDP", named=True, topk=0.1, width=96)
    opt = training.opt
    for _ in range(AT):
        training.step()
    opt.synchronize()
    training.backward()
    with failing(Engine, "finish", int(rank == 1), "unplugged"):
        said = raised_by(opt.step)
    assert isinstance(said, CSDRankError if rank == 1 else CSDTornError)
    for _ in range(2):
        said = raised_by(opt.step)
        assert isinstance(said, CSDRankError if rank == 1 else CSDTornError)
    assert opt.committed_step == AT
    with contextlib.suppress(CSDOSError, CSDRankError):
        opt.close()
    again = training_on(rank, "this", None, "DDP", named=True, topk=0.1, width=96, resume=True)
    assert again.opt.committed_step == AT
    again.steps = AT
    again.step()
    again.opt.close()


def test_what_cannot_be_undone_is_torn_on_all(tmp_path):
    on_living_ranks(2, has_residuals, directory=tmp_path)
