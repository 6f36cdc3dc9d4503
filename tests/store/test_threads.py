"""The system starts no more threads, as under a limit on processes: said at once, or not needed any more."""

import threading

import pytest
import torch
from support.repeating import STEPS, Repeating, never_failed
from support.states import assumed

from csd_optim import CSDAdam, CSDRuntimeError
from csd_optim.engine.commit.commit import Commit
from csd_optim.store.format import CLEAN, read_contents
from csd_optim.threads import running_pool


@pytest.fixture
def refuse(monkeypatch):
    """A function after which only so many threads can be started."""
    start = threading.Thread.start

    def refuse(after=0):
        left = [None] * after

        def starts(thread):
            if not left:
                raise RuntimeError("can't start new thread")
            left.pop()
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", starts)

    return refuse


@pytest.mark.parametrize("after", range(4))
def test_a_pool_has_all_its_threads_or_none(refuse, after):
    before = threading.active_count()
    refuse(after)
    if after < 3:
        with pytest.raises(CSDRuntimeError, match="ulimit"):
            running_pool(3, "some")
    else:
        pool = running_pool(3, "some")
        assert threading.active_count() == before + 3
        refuse()
        assert pool.submit(lambda: 7).result() == 7
        pool.shutdown()
    assert threading.active_count() == before


@pytest.mark.here("an owner starts threads of its own")
def test_an_optimizer_says_so_when_it_is_made(refuse, tmp_path):
    refuse()
    with pytest.raises(CSDRuntimeError, match="can't start new thread"):
        CSDAdam([torch.nn.Parameter(torch.ones(3))], devices=tmp_path / "a")
    refuse(99)
    CSDAdam([torch.nn.Parameter(torch.ones(3))], devices=tmp_path / "a").close()  # the directory is free


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("overlap", [None, {}, {"backward": True}, {"free_gradients": True}], ids=str)
def test_training_goes_on_without_new_threads(refuse, devices, overlap, tmp_path):
    training = Repeating([tmp_path / str(d) for d in range(devices)], overlap)
    refuse()
    for number in range(STEPS):
        training.step(number)
    training.opt.wait()
    assert training.image() == never_failed(assumed())
    training.opt.close()
    for d in range(devices):
        superblock = read_contents(tmp_path / str(d)).superblock
        assert (superblock.step, superblock.flags) == (STEPS, CLEAN)


def test_a_commit_that_is_out_of_date_publishes_nothing(monkeypatch, tmp_path):
    commits = []
    complete = Commit.complete
    monkeypatch.setattr(Commit, "complete", lambda commit, run: commits.append(commit) or complete(commit, run))
    training = Repeating([tmp_path / "a"], None)
    for number in range(2):
        training.step(number)
    training.opt.synchronize()
    first, second = commits
    with pytest.raises(CSDRuntimeError, match="step 1 is out of date"):
        complete(first, lambda calls: [call() for call in calls])
    complete(second, lambda calls: [call() for call in calls])  # the last one may be repeated
    training.opt.close()
    assert read_contents(tmp_path / "a").superblock.step == 2
