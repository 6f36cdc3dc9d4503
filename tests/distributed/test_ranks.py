"""The helpers that run tests on several ranks: whatever one test does, the next one finds working ranks."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import KILLED, on_living_ranks, on_ranks


def well(rank, *more):
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    return os.getpid(), os.getcwd(), int(total), torch.rand(1).item(), *more


def raises(rank):
    if rank == 1:
        raise ValueError("of rank 1 alone")
    dist.barrier()


def killed(rank):
    if rank == 0:
        Path("connected").touch()
        return
    while not Path("connected").exists():  # else the other rank could not even start its call
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(rank):
    if rank == 1:
        time.sleep(600)


def sets_a_variable(rank):
    os.environ["LEFT"] = "behind"


def has_a_variable(rank):
    return "LEFT" in os.environ


@pytest.mark.parametrize(
    ("function", "said", "seconds"),
    [
        (raises, "rank 1: Traceback(.|\n)*of rank 1 alone", 60),
        (killed, "rank 1: killed", 60),
        (hangs, r"ranks \[.*1\] did not return in 0.5 s", 0.5),
    ],
    ids=["raises", "killed", "hangs"],
)
@pytest.mark.parametrize("call", [on_ranks, on_living_ranks])
def test_a_rank_that_fails_leaves_the_next_test_alone(call, function, said, seconds, tmp_path):
    with pytest.raises(AssertionError, match=said):
        call(2, function, directory=tmp_path, seconds=seconds)
    found = call(2, well, {"of": torch.ones(3)}, directory=tmp_path)
    assert [f[1:4] for f in found] == [(str(tmp_path), 3, found[0][3])] * 2
    assert all(torch.equal(f[4]["of"], torch.ones(3)) for f in found)


def test_ranks_live_on_while_all_is_well(tmp_path):
    (tmp_path / "other").mkdir()
    first, second, third = (
        on_living_ranks(2, well, directory=directory) for directory in (tmp_path, tmp_path / "other", tmp_path)
    )
    assert first == third
    assert [(pid, seed) for pid, _, _, seed in first] == [(pid, seed) for pid, _, _, seed in second]
    assert {directory for _, directory, _, _ in second} == {str(tmp_path / "other")}
    on_living_ranks(2, sets_a_variable, directory=tmp_path)
    assert on_living_ranks(2, has_a_variable, directory=tmp_path) == [False, False]
    assert {pid for pid, *_ in on_ranks(2, well, directory=tmp_path)}.isdisjoint(pid for pid, *_ in first)


def test_ranks_may_die(tmp_path):
    assert on_ranks(2, killed, directory=tmp_path, may_die=[1]) == [None, KILLED]
