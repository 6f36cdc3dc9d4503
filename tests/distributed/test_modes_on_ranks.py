"""Ranks that call overlap() unlike each other, or fail as they launch a step, do not wait for each other forever."""

import os
import signal
import threading
import time
import warnings

import pytest
from support.ranks import on_living_ranks, on_ranks
from support.replacing import raised_by, replaced
from support.twins import now, training_on
from torch import nn

from csd_optim import CSDRuntimeError, CSDWarning
from csd_optim.distributed.ranks import Ranks
from csd_optim.errors import CSDRankError

SECONDS = 90  # after which a rank waits forever
FREE = {"free_gradients": True}


def calls_it_unlike(rank, before, then):
    training = training_on(rank, "this", None)
    opt = training.opt
    if before is not None:
        opt.overlap(training.model, **before)
        for _ in range(2):
            training.step()
    if then[rank] is not None:
        opt.overlap(training.model, **then[rank])
    seen = now(training)
    training.backward()
    for _ in range(2):
        assert "overlap() was called on some of the ranks" in str(raised_by(opt.step))
    assert now(training) == seen
    opt.zero_grad()
    opt.overlap(training.model)
    for _ in range(2):
        training.step()
    opt.synchronize()
    opt.close()


@pytest.mark.parametrize(
    ("before", "then"),
    [(None, [{}, FREE]), ({}, [{}, None]), (FREE, [None, FREE])],
    ids=str,
)
def test_overlap_is_called_unlike(before, then, tmp_path):
    """Also if only one rank calls overlap() again: its votes would need a new group."""
    on_ranks(2, calls_it_unlike, before, then, directory=tmp_path, seconds=SECONDS)


def fails_to_launch(rank, backward):
    """The model of one rank has changed, and there the warning of it is an error."""
    training = training_on(rank, "this", {"backward": backward}, patient=backward)
    for _ in range(4):
        training.step()
    training.opt.synchronize()
    before = now(training)
    if rank == 1:
        tied = nn.Linear(1, 1, bias=False)
        tied.weight = training.model[0].inner.weight
        training.model.append(tied)
        training.model[-1].forward = lambda x: x
    training.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CSDWarning)
        training.opt.step()
        said = raised_by(training.opt.synchronize)
    assert isinstance(said, CSDWarning if rank == 1 else CSDRankError)
    assert "the model has changed" in str(said)
    assert now(training) == before
    training.opt.zero_grad()
    training.step()
    training.opt.synchronize()
    training.opt.close()


@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_fails_to_launch(backward, tmp_path):
    on_living_ranks(2, fails_to_launch, backward, directory=tmp_path, seconds=SECONDS)


def forks(rank):
    training = training_on(rank, "this", FREE, wrap=lambda model: model, sharded=False)
    for _ in range(2):
        training.step()
    voting, forked = threading.Event(), threading.Event()

    def late(gather, ranks, *values):
        if threading.current_thread() is not threading.main_thread():
            voting.set()
            forked.wait(SECONDS)
        return gather(ranks, *values)

    with replaced(Ranks, "gather", late):
        training.step()
        assert voting.wait(SECONDS)
        if (child := os.fork()) == 0:
            try:
                training.backward()
            except CSDRuntimeError:
                os._exit(0)
            finally:
                os._exit(1)
        forked.set()
        deadline = time.monotonic() + SECONDS / 3
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended[0] == 0:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
    training.step()
    training.opt.close()
    return os.waitstatus_to_exitcode(ended[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_is_forked_while_a_vote_is_pending(tmp_path):
    """A child has no thread that votes: it must not wait for one."""
    assert on_living_ranks(2, forks, directory=tmp_path, seconds=2 * SECONDS) == [0, 0]
