"""After each step that goes on behind the program, the ranks vote in the background: nobody waits who need not."""

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.forked import python
from support.ranks import on_living_ranks, on_ranks
from support.replacing import failing, raised_by, replaced, slow
from support.twins import blocking, now, training_on
from support.wires import until
from torch.nn.parallel import DistributedDataParallel

from csd_optim.bindings import Native
from csd_optim.distributed.ranks import Ranks
from csd_optim.engine.commit.commit import Commit
from csd_optim.engine.engine import Engine
from csd_optim.errors import CSDRankError
from csd_optim.step.all_gather import ParamAllGather
from csd_optim.store.file import StoreFile
from csd_optim.store.format import read_commits

STEPS = 4


# ---- a step counts without another step() ------------------------------------------------------


def counts_by_itself(rank, slows):
    with slow(*slows, rank, 0.1) if slows else contextlib.nullcontext():
        training = training_on(rank, "this", {}, named=True)
        opt = training.opt
        for k in range(1, STEPS):
            training.step()
            if k > 1:  # the first step lands within step(), and counts from the next one on
                until(lambda k=k: opt.committed_step == k)
        with Path(f"this-{rank}/csd0/csd_optim.store").open("rb") as f:
            until(lambda: [c.superblock.step for c in read_commits(f.fileno(), "")] == [STEPS - 1])  # both copies
        opt.close()


@pytest.mark.parametrize("slows", [None, (Engine, "finish"), (StoreFile, "publish"), (Commit, "prepare")], ids=str)
def test_a_step_counts_as_soon_as_all_ranks_have_it(slows, tmp_path):
    on_living_ranks(2, counts_by_itself, slows, directory=tmp_path)


def counts_votes(rank):
    """One vote for each step that was launched, whether it fails or not, and no other message but those of step()."""
    training = training_on(rank, "this", {})
    votes = 0

    def counted(gather, ranks, *values):
        nonlocal votes
        votes += threading.current_thread() is not threading.main_thread()
        return gather(ranks, *values)

    training.step()
    with replaced(Ranks, "gather", counted):
        for k, method in enumerate([None, "begin", "finish", None]):
            with failing(Engine, method, int(rank == 1), "unplugged") if method else contextlib.nullcontext():
                training.step()
                training.opt.wait() if rank == 0 or not method else raised_by(training.opt.wait)
            until(lambda k=k: votes == k + 1)
            if method:
                raised_by(training.opt.synchronize)
        training.opt.synchronize()
        time.sleep(0.05)
        assert votes == 4
    training.opt.close()


def test_one_vote_for_each_step(tmp_path):
    on_living_ranks(2, counts_votes, directory=tmp_path)


def three(rank):
    """Ranks that take turns in being slow have the bits of steps that are not hidden."""
    training = training_on(rank, "this", {}, max_grad_norm=0.5)
    for k in range(STEPS):
        if k % 3 == rank:
            time.sleep(0.1)
        training.step()
    assert now(training) == blocking(rank, STEPS, max_grad_norm=0.5)
    training.opt.close()


def test_three_ranks(tmp_path):
    on_living_ranks(3, three, directory=tmp_path)


def turns(rank):
    """Two optimizers vote at the same time, each on a group of its own; groups of closed optimizers serve again."""
    made = []
    with replaced(
        dist, "new_group", lambda new_group, *args, **kwargs: made.append(args) or new_group(*args, **kwargs)
    ):
        for k in range(3):
            trainings = [training_on(rank, f"{k}-{name}", {}) for name in "ab"]
            for _ in range(STEPS):
                for training in trainings:
                    training.step()
            for training in trainings:
                training.opt.synchronize()
                training.opt.close()
    assert len(made) == 2


def test_groups_are_used_again(tmp_path):
    on_ranks(2, turns, directory=tmp_path)


# ---- what fails ----------------------------------------------------------------------------------


def vote_fails(rank):
    """The message of a vote is lost: the state of the other rank is unknown, so neither rank goes on."""
    training = training_on(rank, "this", {}, named=True)
    for _ in range(2):
        training.step()
    training.opt.synchronize()

    def lost(gather, ranks, *values):
        if rank == 1 and threading.current_thread() is not threading.main_thread():
            ranks.lost = True
            raise CSDRankError("rank 1 has lost the others: cut")
        return gather(ranks, *values)

    with replaced(Ranks, "gather", lost):
        training.step()
        if rank == 1:
            for call in (training.opt.synchronize, training.opt.step):
                assert "cut" in str(raised_by(call))
            training.opt.close()
            return
    said = str(raised_by(training.opt.synchronize))  # once rank 1 has ended
    assert "has lost the others" in said
    training.opt.close()


def test_a_vote_is_lost(tmp_path):
    on_ranks(2, vote_fails, directory=tmp_path)
    assert on_ranks(2, resumes, {}, directory=tmp_path) == [3, 3]


def loses_a_carrier(rank):
    """One rank has lost the group over which rows travel: it says so, and nobody waits for its vote."""
    training = training_on(rank, "this", {}, wrap=DistributedDataParallel, named=True)
    for _ in range(2):
        training.step()
    training.opt.synchronize()

    def cut(finish, gather):
        finish(gather)
        if rank == 1:
            for ranks in gather.groups:
                ranks.lost = True
            raise CSDRankError("rank 1 has lost the others: cut")

    with replaced(ParamAllGather, "finish", cut):
        training.step()
        for _ in range(2):
            said = raised_by(training.opt.synchronize)
            assert isinstance(said, CSDRankError)
            assert "cut" in str(said) if rank == 1 else "ranks [1] have lost others" in str(said)
    assert training.opt.committed_step == 2
    dist.barrier()  # both live
    raised_by(training.opt.close) if rank == 1 else training.opt.close()


def test_a_group_for_rows_is_lost(tmp_path):
    on_ranks(2, loses_a_carrier, directory=tmp_path)
    assert on_ranks(2, resumes, WRAPS["DDP"], directory=tmp_path) in ([2, 2], [3, 3])


def closes_at_once(rank):
    """A rank that could not launch a step closes: afterwards no rows from the other rank arrive in its parameters."""
    training = training_on(rank, "this", {}, wrap=DistributedDataParallel)
    for _ in range(2):
        training.step()
    training.opt.synchronize()
    with slow(ParamAllGather, "begin", rank, 1.0), failing(Engine, "begin", int(rank == 0), "unplugged"):
        training.step()
        if rank == 0:
            said = raised_by(training.opt.close)
            assert "unplugged" in str(said)
            closed = [p.detach().clone() for p in training.model.parameters()]
    dist.barrier()
    if rank == 1:
        training.opt.wait()
        training.opt.close()
    dist.barrier()
    assert rank == 1 or all(map(torch.equal, closed, training.model.parameters()))


def test_nothing_arrives_after_close(tmp_path):
    on_living_ranks(2, closes_at_once, directory=tmp_path)


def resumes(rank, options):
    with training_on(rank, "this", {}, named=True, resume=True, **options).opt as opt:
        return opt.committed_step


def interrupted_waiting(rank):
    """Ctrl-C while a rank waits for the vote of another one."""
    training = training_on(rank, "this", {})
    training.step()
    with slow(Native, "finish", rank, 1.0):
        training.step()
        if rank == 0:
            main = threading.main_thread().ident
            threading.Timer(0.2, lambda: __import__("signal").pthread_kill(main, 2)).start()
            with pytest.raises(KeyboardInterrupt):
                training.opt.synchronize()
        training.opt.synchronize()
        training.step()
    training.opt.synchronize()
    training.opt.close()


def test_interrupted_as_it_waits_for_a_vote(tmp_path):
    on_living_ranks(2, interrupted_waiting, directory=tmp_path)


# ---- how a script ends while a vote is pending ---------------------------------------------------


def script(rank, how, kind):
    """A whole program. Rank 1 lands its last step a second late; under DDP, rank 0 has to wait for its rows."""
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet", rank=int(rank), world_size=2)
    training = training_on(int(rank), "this", {}, named=True, **WRAPS[kind])
    for _ in range(2):
        training.step()
    training.opt.synchronize()
    with slow(*SLOW_IN[kind], int(rank), 1.0):
        training.step()
        if how == "dies" and rank == "1":
            os.kill(os.getpid(), 9)
        if how in ("destroyed", "destroyed and closed"):
            dist.destroy_process_group()
        if how in ("closed", "destroyed and closed"):
            training.opt.close()
        elif how == "destroyed":
            del training
        if how != "closed":
            return
    dist.destroy_process_group()


WRAPS = {"FSDP2": {}, "DDP": {"wrap": DistributedDataParallel}}
SLOW_IN = {"FSDP2": (Native, "finish"), "DDP": (ParamAllGather, "begin")}


@pytest.mark.ci
@pytest.mark.parametrize("kind", WRAPS)
@pytest.mark.parametrize("how", ["plain", "closed", "destroyed", "destroyed and closed", "dies"])
def test_a_script_ends_while_a_vote_is_pending(how, kind, tmp_path):
    """A daemon thread has to survive the end of the interpreter."""
    program = "import sys, test_votes; test_votes.script(*sys.argv[1:])"
    with ThreadPoolExecutor(2) as pool:
        ended = [*pool.map(lambda rank: python(program, rank, how, kind, finalized=True), range(2))]
    assert [rank.returncode for rank in ended] == [0, 128 + 9 if how == "dies" else 0], ended
    assert "Traceback" not in ended[0].stderr
    steps = on_ranks(2, resumes, WRAPS[kind], directory=tmp_path)
    assert steps in ([2, 2], [3, 3])
    assert how == "dies" or steps == [3, 3]
