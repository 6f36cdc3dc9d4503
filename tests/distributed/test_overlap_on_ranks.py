"""overlap() with several ranks: a step that fails on one of them is undone on all, in the next step()."""

import contextlib
import copy
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from support.inside import flight_of, mode_of
from support.rank_commits import POINTS, ShardTraining, die, dies_at, goes_on, train_until_death, uninterrupted
from support.rank_models import MODELS, train_model
from support.ranks import KILLED, on_living_ranks, on_ranks
from support.replacing import raised_by, replaced, unplugged
from support.twins import assert_twins, blocking, local, now, sharded, training_on
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from csd_optim import CSDAdam, CSDOSError, CSDWarning
from csd_optim.errors import CSDRankError
from csd_optim.overlap.together import Together

STEPS = 6


# ---- the same values as without overlap: see also test_overlap_histories.py -------------------


class Branches(nn.Module):
    """Uses a different layer in each forward."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.calls = layers, 0

    def forward(self, x):
        self.calls += 1
        for k, layer in enumerate(self.layers):
            if k != self.calls % 3:
                x = layer(x)
        return x


WRAPS = {
    "FSDP2": lambda model: fully_shard(Branches(sharded(model))),
    "DDP": lambda model: DDP(Branches(model), find_unused_parameters=True, gradient_as_bucket_view=True),
}


def trains_branches(rank, kind, shared):
    def script(training):
        for _ in range(STEPS):
            training.step()

    Path(f"{rank}").mkdir()
    options = {"wrap": WRAPS[kind], "rank": rank, "sharded": shared}
    assert_twins(Path(f"{rank}"), {}, script, **options).opt.close()


@pytest.mark.parametrize(("kind", "shared"), [("FSDP2", True), ("DDP", False), ("DDP", True)])
def test_a_layer_that_is_not_used_each_time(kind, shared, tmp_path):
    """DDP writes to the memory of the unused layer's gradient, which the step may still read."""
    on_living_ranks(2, trains_branches, kind, shared, directory=tmp_path)


def trains_net(rank, size, kind):
    nets = []
    for overlaps in False, True:
        model = MODELS[kind]()
        with CSDAdam(model.parameters(), lr=0.02, tile_size=1024, devices="file:?latency=1ms", sharded=False) as opt:
            if overlaps:
                opt.overlap(model)
            train_model(model, opt, rank, size)
            entries = opt.state_dict()["state"].values()
            held = [*model.parameters(), *(t for entry in entries for t in entry.values())]
            nets.append([t.detach().clone() for t in map(local, held)])
            assert not overlaps or opt.stats()["overlap"]["waited"] > 0
    assert all(map(torch.equal, *nets))


@pytest.mark.parametrize(("kind", "size"), [("tensor parallel", 2), ("hybrid", 4)])
def test_other_divisions(kind, size, tmp_path):
    on_living_ranks(size, trains_net, size, kind, directory=tmp_path)


# ---- a step fails on one rank ------------------------------------------------------------


def fails_later(rank, method, options):
    training = training_on(rank, "this", {}, **options)
    opt, named = training.opt, options.pop("named")
    for _ in range(2):
        training.step()
    opt.synchronize()
    before = now(training)
    for _ in range(2):
        with unplugged(rank, method):
            training.step()
            training.backward()  # goes on with the present parameters
            # Saving or copying them raises at once on the rank that failed.
            copied = partial(copy.copy, training.model[0].inner._parameters)  # as deepcopy(model) and pickle do
            for look in (lambda: opt.state, opt.state_dict, opt.stats, opt.wait, training.model.state_dict, copied):
                if rank == 1:
                    assert "unplugged" in str(raised_by(look))
                else:
                    look()
            with torch.no_grad():
                for p in training.model.parameters():
                    p.mul_(0.5)  # parameters that the step has updated, and others
            said = raised_by(opt.step)
        assert isinstance(said, CSDOSError if rank == 1 else CSDRankError)
        assert "unplugged" in str(said)
        assert rank == 1 or "rank 1" in str(said)
        assert now(training) == before
        assert opt.committed_step == (2 if named else 0)
        opt.zero_grad()
        training.steps = 2
    while training.steps < 4:
        training.step()
    opt.synchronize()
    assert opt.committed_step == (4 if named else 0)
    assert now(training) == blocking(rank, 4, **options)
    opt.close()


@pytest.mark.parametrize(
    "options", [{"named": False}, {"named": True}, {"named": True, "state_dtype": "8bit"}], ids=str
)
@pytest.mark.parametrize("method", ["begin", "finish"])
def test_a_step_fails_on_one_rank(method, options, tmp_path):
    on_living_ranks(2, fails_later, method, options, directory=tmp_path)


def meets(rank, how):
    """Other collective calls of the optimizer raise the failure as well."""
    training = training_on(rank, "this", {}, named=True)
    opt = training.opt
    for _ in range(2):
        training.step()
    opt.synchronize()
    before = now(training)
    state = opt.state_dict()
    state = {**state, "state": {k: {n: v.clone() for n, v in entry.items()} for k, entry in state["state"].items()}}
    with unplugged(rank, "finish"):
        training.step()
        said = raised_by(
            {
                "synchronize": opt.synchronize,
                "save": lambda: opt.save("snapshot"),
                "load_state_dict": lambda: opt.load_state_dict(state),
                "consolidate": opt.consolidate_state_dict,
                "overlap": lambda: opt.overlap(None),
            }[how]
        )
    assert isinstance(said, CSDOSError if rank == 1 else CSDRankError)
    assert now(training) == before
    training.steps = 2
    training.step()
    opt.close()


@pytest.mark.parametrize("how", ["synchronize", "save", "load_state_dict", "consolidate", "overlap"])
def test_what_all_ranks_call_raises_on_all(how, tmp_path):
    on_living_ranks(2, meets, how, directory=tmp_path)


def closes(rank):
    training = training_on(rank, "this", {}, named=True)
    for _ in range(2):
        training.step()
    training.opt.synchronize()
    before = now(training)
    with unplugged(rank, "finish"):
        training.step()
        if rank == 1:
            assert "unplugged" in str(raised_by(training.opt.close))
            assert training.parameters() == before[0]
        else:
            training.opt.close()
    again = training_on(rank, "this", {}, named=True, resume=True)
    assert again.opt.committed_step == 2
    assert now(again) == before
    again.opt.close()


def test_closed_with_a_step_that_failed(tmp_path):
    on_living_ranks(2, closes, directory=tmp_path)


def interrupted(rank):
    """Ctrl-C on one rank while it notes the outcome of its step: the other rank must still learn of it."""
    training = training_on(rank, "this", {})
    for _ in range(2):
        training.step()

    def ctrl_c(call, *args):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return call(*args)

    told = pytest.raises(KeyboardInterrupt) if rank == 1 else contextlib.nullcontext()
    with replaced(Together, "note_outcome", ctrl_c), told:
        training.opt.wait()
    training.step()
    training.opt.close()


def test_interrupted_as_a_step_lands(tmp_path):
    on_living_ranks(2, interrupted, directory=tmp_path)


# ---- a rank dies ---------------------------------------------------------------------------


OVERLAPPING = {"overlap": True, "topk": None}  # steps with residuals of Top-K land within step()


@pytest.mark.parametrize("point", POINTS)
def test_a_rank_is_killed(point, tmp_path):
    args = (point, 3, (1,), "killed", OVERLAPPING)
    on_ranks(2, train_until_death, *args, directory=tmp_path, may_die=(0, 1))
    assert goes_on(tmp_path, options=OVERLAPPING) == POINTS[point]


def train_past_a_failure(rank, point, step):
    training = ShardTraining(rank, **OVERLAPPING).until(2)
    training.opt.wait()
    with unplugged(rank, "finish"):
        training.step()  # complete on rank 0, and being committed
        raised_by(training.step)
    assert training.image() == uninterrupted(rank, 2, None)
    training.done = 2
    with dies_at(point, step) if rank == 0 else contextlib.nullcontext():
        try:
            training.until(6)
        except RuntimeError:
            training.opt.close()  # completes the commit that has begun
            die()


@pytest.mark.parametrize(
    ("point", "step", "left"),
    [
        ("within the step", 3, 2),
        ("copy 0 on one device", 3, 2),
        ("after copy 0", 3, 3),
        ("before copy 1", 3, 3),
    ],
)
def test_killed_after_a_step_was_undone(point, step, left, tmp_path):
    """A resume ignores what one rank has committed of the step that was undone."""
    on_ranks(2, train_past_a_failure, point, step, directory=tmp_path, may_die=(0, 1))
    assert goes_on(tmp_path, options=OVERLAPPING) == left


def without_rank_1(rank):
    training = training_on(rank, "this", {})
    training.step()
    training.backward()
    training.opt.step()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    training.opt.wait()
    for _ in range(2):
        assert "has lost the others" in str(raised_by(training.opt.step))
    training.opt.close()


def test_a_rank_dies(tmp_path):
    assert on_ranks(2, without_rank_1, directory=tmp_path, may_die=[1]) == [None, KILLED]


# ---- what lands within step(), and what is refused -----------------------------------------


def lands_within(rank, options):
    """The steps land within step(), with the same bits."""
    written = options.pop("written", False)

    def script(training):
        for k in range(3):
            with torch.no_grad():
                if written and k:
                    p = next(training.model.parameters())
                    (p if k == 1 else training.opt.state[p]["exp_avg"]).mul_(0.5)
            training.step()
            assert not mode_of(training.opt).overlaps or flight_of(training.opt) is None

    Path(f"{rank}").mkdir()
    options = {"wrap": sharded, "rank": rank, **options}
    assert_twins(Path(f"{rank}"), {}, script, **options).opt.close()


@pytest.mark.parametrize(
    "options",
    [{"topk": 0.1, "width": 96}, {"written": True, "named": True}],
    ids=["topk", "written"],
)
def test_what_cannot_be_taken_back_lands_within_the_step(options, tmp_path):
    on_living_ranks(2, lands_within, options, directory=tmp_path)


def misused(rank):
    model = MODELS["FSDP2"]()
    with CSDAdam(model.parameters(), devices="file:") as opt:
        if rank == 1:
            opt.overlap(model)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        assert "on some of the ranks" in str(raised_by(opt.step))
    model = nn.Linear(4, 4)
    model = FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)
    with CSDAdam(model.parameters(), devices="file:") as opt:
        with pytest.warns(CSDWarning, match="fully_shard"):
            opt.overlap(model)
        for _ in range(3):
            model(torch.ones(4)).sum().backward()
            opt.step()
            assert flight_of(opt) is None


def test_misused(tmp_path):
    on_living_ranks(2, misused, directory=tmp_path)
