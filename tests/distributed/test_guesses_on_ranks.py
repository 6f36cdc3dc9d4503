"""overlap(backward=True) with several ranks: each keeps or undoes its guess alone, with the bits of blocking steps."""

import contextlib
import os
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from support.inside import engine_of, guess_of, together_of, vote_of
from support.rank_commits import die
from support.rank_models import MODELS, net
from support.ranks import on_living_ranks, on_ranks
from support.replacing import failing, raised_by, replaced, slow
from support.twins import blocking, local, now, training_on
from support.wires import until
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

from csd_optim import CSDAdam, CSDOSError, CSDRuntimeError, CSDWarning
from csd_optim.bindings import Native
from csd_optim.engine.engine import Engine
from csd_optim.errors import CSDRankError
from csd_optim.overlap.early import EarlySteps
from csd_optim.overlap.guess import Guess
from csd_optim.overlap.together import VoteResult
from csd_optim.store.file import StoreFile

STEPS = 7
EARLY = {"backward": True}


def ready(training):
    """Wait until a guess may begin: all ranks have the last step, and its commit is over."""
    training.opt.wait()
    together = together_of(training.opt)
    until(lambda: together.has_met and engine_of(training.opt).idle)


def early_step(training, change=None):
    """A step that can begin early: each forward waits for the vote. `change`: called between backward and step()."""
    training.backward()
    if change:
        change(training)
    training.opt.step()
    training.opt.zero_grad()
    if training.overlap is not None:
        ready(training)


def clips(training):
    clip_grad_norm_(training.model.parameters(), 1e-2)


def changes_lr(training):
    training.opt.param_groups[0]["lr"] *= 0.9


def changes_gradients_of_one_rank(training):
    if training.rank == 1:
        for p in training.model.parameters():
            local(p.grad).mul_(0.5)


# What happens in every third step, and why the guess is then undone: on rank 0, on the others.
CHANGES = {
    "nothing": (None, "", ""),
    "clip_grad_norm_": (clips, "gradients", "gradients"),
    "lr": (changes_lr, "constants", "constants"),
    "gradients of one rank": (changes_gradients_of_one_rank, "", "gradients"),
    "two backward passes": (lambda training: training.backward(), "more backward passes", "more backward passes"),
}


def guesses(rank, change, options):
    change, *why = CHANGES[change]
    for overlap in None, EARLY:
        training = training_on(rank, str(overlap), overlap, **options)
        early = []
        for k in range(STEPS):
            early_step(training, change if k % 3 == 2 else None)
            early.append(overlap and training.opt.stats()["overlap"]["early_params"])
        if overlap is None:
            blocking = training
            continue
        assert training.seen() == blocking.seen()
        redone = training.opt.stats()["overlap"]["redone"]
        assert {*redone} == {*filter(None, [why[rank > 0]])}
        assert any(early)
        assert early[0] == early[1] == 0  # the first step is no flight
        training.opt.close()
    blocking.opt.close()


@pytest.mark.parametrize("options", [{}, {"named": True}, {"named": True, "state_dtype": "8bit"}], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_guesses_have_the_bits_of_blocking_steps(change, options, tmp_path):
    on_living_ranks(2, guesses, change, options, directory=tmp_path)


def norm_is_clipped(rank):
    """max_grad_norm clips some steps: their guesses have other constants, on all ranks."""
    for overlap in None, EARLY:
        training = training_on(rank, str(overlap), overlap, named=True, max_grad_norm=50.0)
        for k in range(STEPS):
            training.backward(1e-3 if k % 3 else 1e3)
            training.opt.step()
            training.opt.zero_grad()
            if overlap is not None:
                ready(training)
        if overlap is None:
            blocking = training.seen()
        else:
            assert training.seen() == blocking
            assert {*training.opt.stats()["overlap"]["redone"]} == {"constants"}
        training.opt.close()


def test_norms(tmp_path):
    on_living_ranks(2, norm_is_clipped, directory=tmp_path)


def paced(rank):
    """Ranks are slow by turns, on drives of different speed, and do not wait for votes."""
    choose = random.Random(rank)
    for overlap in None, EARLY:
        training = training_on(rank, str(overlap), overlap, named=True, max_grad_norm=20.0, **PACES[rank])
        with slow(StoreFile, "publish", rank, 0.02):
            for k in range(STEPS):
                training.backward()
                time.sleep(0.05 * choose.random() if k % 3 == rank else 0)
                if k % 4 == 3:
                    clips(training)
                training.opt.step()
                training.opt.zero_grad()
        if overlap is None:
            blocking = training.seen()
        else:
            assert training.seen() == blocking
        training.opt.close()


PACES = [{"devices": 1}, {"devices": 2}, {"devices": 1}]


def test_ranks_of_different_speed(tmp_path):
    on_living_ranks(3, paced, directory=tmp_path)


def tensor_parallel(rank):
    """Gradients that have other placements than their parameters are left to step()."""
    nets = []
    for overlaps in False, True:
        model = MODELS["tensor parallel"]()
        with CSDAdam(model.parameters(), lr=0.02, tile_size=1024, devices="file:") as opt:
            if overlaps:
                opt.overlap(model, backward=True)
            early = 0
            for k in range(STEPS):
                torch.manual_seed(k)
                x, y = torch.randn(8, 3, 4, 4), torch.randint(0, 3, (8,))
                nn.functional.cross_entropy(model(x), y).backward()
                opt.step()
                opt.zero_grad()
                if overlaps:
                    opt.wait()
                    until(lambda opt=opt: together_of(opt).has_met and engine_of(opt).idle)
                    early += opt.stats()["overlap"]["early_params"]
            entries = opt.state_dict()["state"].values()
            held = [*model.parameters(), *(t for entry in entries for t in entry.values())]
            nets.append([t.detach().clone() for t in map(local, held)])
            assert not overlaps or early
    assert all(map(torch.equal, *nets))


def test_tensor_parallel(tmp_path):
    on_living_ranks(2, tensor_parallel, directory=tmp_path)


# ---- when a guess may begin ----------------------------------------------------------------------


def waits_for_the_vote(rank):
    """Rank 0 begins no guess before rank 1 has the last step, durable; then it does."""
    training = training_on(rank, "this", EARLY, named=True)
    for _ in range(2):
        early_step(training)
    training.backward()
    may_commit = threading.Event()

    def late(publish, *args):
        assert rank == 0 or may_commit.wait(60)
        return publish(*args)

    with replaced(StoreFile, "publish", late):
        training.opt.step()
        training.opt.zero_grad()
        training.opt.wait()
        assert not together_of(training.opt).has_met
        training.backward()
        assert guess_of(training.opt) is None
        dist.barrier()  # both have seen it
        may_commit.set()
        training.opt.step()
    training.opt.zero_grad()
    ready(training)
    training.backward()
    assert guess_of(training.opt)
    training.opt.step()
    training.opt.close()


def test_no_guess_before_the_vote(tmp_path):
    on_living_ranks(2, waits_for_the_vote, directory=tmp_path)


def no_guess_after_a_failure(rank):
    training = training_on(rank, "this", EARLY, named=True)
    for _ in range(3):
        early_step(training)
    training.opt.synchronize()
    before = now(training)
    training.backward()
    with failing(Engine, "finish", int(rank == 1), "unplugged"):
        training.opt.step()
        training.opt.zero_grad()
        training.backward()
        until(lambda: vote_of(training.opt).result is VoteResult.MUST_MEET)
        training.backward()
        assert guess_of(training.opt) is None
        said = raised_by(training.opt.step)
    assert isinstance(said, CSDOSError if rank == 1 else CSDRankError)
    assert now(training) == before
    training.opt.close()


def test_no_guess_after_a_step_that_failed(tmp_path):
    on_living_ranks(2, no_guess_after_a_failure, directory=tmp_path)


def overflows(rank):
    """An overflow on rank 1 alone: all skip the step, and undo their guesses."""
    seen = []
    for overlap in None, EARLY:
        training = training_on(rank, str(overlap), overlap, named=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        for k in range(STEPS):
            training.backward(scaler.scale(torch.ones(())).item())
            if k in (3, 4) and rank == 1:
                local(next(training.model.parameters()).grad).view(-1)[:1].fill_(float("inf"))
            scaler.step(training.opt)
            scaler.update(1024.0)
            training.opt.zero_grad()
            if overlap is not None:
                ready(training)
        seen.append(training.seen())
        if overlap is not None:
            redone = training.opt.stats()["overlap"]["redone"]
            assert redone.get("overflow") or redone.get("gradients") if rank == 1 else redone["overflow"]
        training.opt.close()
    assert seen[0] == seen[1]


def test_an_overflow_on_another_rank(tmp_path):
    on_living_ranks(2, overflows, directory=tmp_path)


# ---- one rank has no guess ------------------------------------------------------------------------


FAIL = [(Guess, "begin", 1), (Engine, "begin", 1), (Guess, "add_gradient", 2), (Native, "push", 2), (Guess, "wrong", 1)]


def loses_guesses(rank):
    training = training_on(rank, "this", EARLY, named=True)
    for _ in range(3):
        early_step(training)
    for owner, method, number in FAIL:
        with failing(owner, method, number * (rank == 1), "unplugged"):
            training.backward()
            assert rank == 1 or guess_of(training.opt), method
            training.opt.step()
        training.opt.zero_grad()
        ready(training)
    # A guess that could not begin has begun at the next gradient.
    assert training.opt.stats()["overlap"]["redone"] == ({"failure": 3} if rank == 1 else {})
    training.opt.synchronize()
    assert now(training) == blocking(rank, training.steps)
    training.opt.close()


def test_what_fails_costs_a_guess_on_that_rank_alone(tmp_path):
    on_living_ranks(2, loses_guesses, directory=tmp_path)


def foresees_nothing(rank):
    """Rank 1 makes no guess at all, and pushes all in step(): the others need not know."""
    training = training_on(rank, "this", EARLY)
    with replaced(EarlySteps, "_begin", lambda begin, early: rank != 1 and begin(early)):
        for _ in range(STEPS):
            early_step(training)
    assert now(training) == blocking(rank, STEPS)
    training.opt.close()


def test_ranks_with_and_without_guesses(tmp_path):
    on_living_ranks(2, foresees_nothing, directory=tmp_path)


# ---- a rank is killed ----------------------------------------------------------------------------


ALONE = {"kind": "plain", "sharded": False}  # a model of each rank's own, which trains faster


class Killed:
    """A training that is resumed."""

    def __init__(self, rank, overlap):
        self.training = training_on(rank, "killed", overlap, named=True, resume=True, **ALONE)
        self.training.steps = self.training.opt.committed_step

    def until(self, step):
        while self.training.steps < step:
            self.training.step()
        self.training.opt.synchronize()
        return now(self.training)


def trains_until_killed(rank, seed, victim, overlap):
    ours = Killed(rank, overlap)
    begun = ours.training.opt.committed_step
    if rank == victim:
        threading.Timer(random.Random(seed).uniform(0.0, 0.25), die).start()
    with contextlib.suppress(RuntimeError):
        ours.until(10**6)
    if random.Random(seed + rank).random() < 0.5:
        ours.training.opt.close()
    return begun


def ends(rank, more, overlap):
    ours = Killed(rank, overlap)
    step = ours.training.opt.committed_step
    image = ours.until(step + more)
    ours.training.opt.close()
    assert image == blocking(rank, step + more, **ALONE)
    return step


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 12), marks=pytest.mark.soak)], ids=str)
@pytest.mark.parametrize("overlap", [EARLY, {"free_gradients": True}, {}], ids=str)
def test_killed_again_and_again(overlap, seeds, tmp_path):
    os.makedirs(tmp_path / "killed-0")
    os.makedirs(tmp_path / "killed-1")
    last = 0
    for seed in seeds:
        on_ranks(2, trains_until_killed, seed, seed % 2, overlap, directory=tmp_path, may_die=(0, 1))
        steps = on_living_ranks(2, ends, 2, overlap, directory=tmp_path)
        assert steps[0] == steps[1] >= last
        last = steps[0]
    assert last


# ---- other hooks --------------------------------------------------------------------------------


def hooked(model):
    ddp = DDP(model)
    ddp.register_comm_hook(None, fp16_compress_hook)
    return ddp


def has_a_hook_of_its_own(rank):
    seen = []
    for overlap in None, EARLY:
        says = pytest.warns(CSDWarning, match="another communication hook") if overlap else contextlib.nullcontext()
        with says:
            training = training_on(rank, str(overlap), overlap, wrap=hooked, named=True)
        for _ in range(4):
            training.step()
        if overlap:
            assert training.opt.stats()["overlap"]["early_params"] == 0
        training.opt.synchronize()
        seen.append(now(training))
        training.opt.close()
    assert seen[0] == seen[1]


def test_a_hook_of_the_users_own(tmp_path):
    on_living_ranks(2, has_a_hook_of_its_own, directory=tmp_path)


# ---- what is refused ----------------------------------------------------------------------------


def refused(rank):
    model = DDP(net(used=True))
    for sharded_ in True, False:
        with (
            CSDAdam(model.parameters(), devices="file:", sharded=sharded_) as opt,
            pytest.raises(CSDRuntimeError, match="DistributedDataParallel"),
        ):
            opt.overlap(model, backward=True)


def test_what_is_refused(tmp_path):
    on_living_ranks(2, refused, directory=tmp_path)
