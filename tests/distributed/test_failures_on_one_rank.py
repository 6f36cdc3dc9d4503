"""A call fails on one rank: its step is undone on all ranks, all of them raise, and then go on as if nothing had been.

Which call fails depends on how steps run: blocking, overlapping with the next forward, or begun in backward.
"""

import contextlib

import pytest
import torch
from support.inside import guess_of
from support.ranks import on_living_ranks
from support.replacing import failing, raised_by, replaced
from support.twins import blocking, now, training_on

from csd_optim import CSDAdam, CSDOSError, CSDTornError
from csd_optim.bindings import Native
from csd_optim.engine.commit.durable import DurableCommitter
from csd_optim.engine.engine import Engine
from csd_optim.errors import CSDRankError
from csd_optim.overlap.backward_run import TakenGradient
from csd_optim.overlap.lent import LentGradients
from csd_optim.step import all_gather
from csd_optim.step.all_gather import ParamAllGather
from csd_optim.step.steps import Steps
from csd_optim.step.travel import Travel
from csd_optim.store.file import StoreFile

AT = 2  # steps taken before calls fail
FORWARD, EARLY, FREE = {}, {"backward": True}, {"free_gradients": True}  # arguments of overlap()

# The calls that fail, one after another: owner, method, and the number of the call.
RECORD, OWN_ROUND, FINISH = (Steps, "record", 1), (DurableCommitter, "own_round", 1), (Engine, "finish", 1)
PREPARES = [RECORD, OWN_ROUND, (Steps, "_prepare", 1), (Steps, "_taking_part", 1)]  # before, or as, ranks agree
LAUNCHED = [
    (Engine, "begin", 1),
    (Native, "push", 2),
    FINISH,
    (Travel, "queue_accelerator", 1),
    (ParamAllGather, "advance", 1),
]
GUESSED = [(Engine, "release", 1), (DurableCommitter, "reserve", 2), FINISH]
FREED = [
    (Engine, "begin", 1),
    (Native, "push", 1),
    (Native, "push", 2),
    (LentGradients, "take", 3),
    (LentGradients, "push_rest", 1),
]

NAMED, BF16 = {"named": True}, {"dtype": torch.bfloat16}
CASES = [
    ("DDP", None, NAMED, [*PREPARES, FINISH]),
    ("DDP", None, {**NAMED, "max_grad_norm": 0.5}, PREPARES),
    ("DDP", None, {**NAMED, "topk": 0.1, "width": 96}, PREPARES),
    ("DDP", None, BF16, [FINISH]),
    ("DDP", None, {**NAMED, **BF16, "state_dtype": "8bit"}, [FINISH]),
    ("FSDP2", None, NAMED, [FINISH]),
    ("DDP", FORWARD, NAMED, [*PREPARES, *LAUNCHED]),
    ("views", FORWARD, NAMED, LAUNCHED),
    ("HSDP", FORWARD, NAMED, LAUNCHED),
    ("FSDP2", EARLY, NAMED, GUESSED),
    ("FSDP2", FREE, NAMED, [RECORD, OWN_ROUND, *FREED, FINISH]),
    ("HSDP", FREE, NAMED, FREED),
]


def step_and_next(training):
    """Take a step. If it goes on behind the program, so does this, with the present parameters, until the next one."""
    training.opt.step()
    training.opt.zero_grad()
    training.backward()
    with torch.no_grad():
        for p in training.model.parameters():
            p.mul_(0.5)
    training.opt.step()


def one_call_fails(rank, kind, overlap, options, calls):
    training = training_on(rank, "this", overlap, kind, **options)
    opt, named = training.opt, options.pop("named", False)
    for done in 0, AT:
        while training.steps < done:
            training.step()
        opt.synchronize()
        before, has_gradients = now(training), False
        for call in calls if done else [call for call in calls if call in PREPARES]:
            owner, method, number = call
            goes_on = overlap in (FORWARD, EARLY) and call not in PREPARES
            with failing(owner, method, number * (rank == 1), "unplugged"):
                if not has_gradients:
                    training.backward()
                assert overlap != EARLY or guess_of(opt)
                said = raised_by(lambda: step_and_next(training))
            assert isinstance(said, CSDOSError if rank == 1 else CSDRankError), (method, said)
            assert "unplugged" in str(said), method
            assert now(training) == before, method
            assert opt.committed_step == (done if named else 0), method
            assert training.steps == done + 1 + goes_on, method
            has_gradients = overlap != FREE and not goes_on
            if not has_gradients:
                opt.zero_grad()
                training.steps = done
        if has_gradients:
            opt.step()
            opt.zero_grad()
    training.step()
    opt.synchronize()
    assert opt.committed_step == (training.steps if named else 0)
    assert now(training) == blocking(rank, training.steps, kind, **options)
    opt.close()


def marks(overlap):
    return [pytest.mark.here("space for a commit is reserved by the optimizer ranks")] if overlap is EARLY else []


@pytest.mark.fp32_states("tiles of codes are larger: some ranks have too few for the second push")
@pytest.mark.parametrize(
    ("kind", "overlap", "options", "calls"),
    [pytest.param(*case, marks=marks(case[1]), id=" ".join(map(str, case[:3]))) for case in CASES],
)
def test_a_step_that_fails(kind, overlap, options, calls, tmp_path):
    size = 4 if kind == "HSDP" else 2
    on_living_ranks(size, one_call_fails, kind, overlap, options, calls, directory=tmp_path)


def cannot_commit(rank, overlap):
    training = training_on(rank, "this", overlap, named=True)
    opt, full = training.opt, False

    def publish(call, store, staged, copy):
        if full and rank == 1:
            raise CSDOSError(28, "the disk is full")
        call(store, staged, copy)

    for _ in range(AT):
        training.step()
    opt.synchronize()
    with replaced(StoreFile, "publish", publish):
        full = True
        training.step()
        training.backward()
        assert not any(isinstance(p.grad, TakenGradient) for p in training.model.parameters())
        for _ in range(2):
            said = raised_by(opt.step)
            assert isinstance(said, CSDOSError if rank == 1 else CSDRankError)
            assert f"step {AT + 1} cannot be committed yet" in str(said)
            assert opt.committed_step == AT
        full = False
        opt.step()
    opt.synchronize()
    assert opt.committed_step == AT + 2
    assert now(training) == blocking(rank, AT + 2)
    opt.close()


@pytest.mark.parametrize("overlap", [FORWARD, FREE], ids=str)
def test_a_step_that_cannot_be_committed(overlap, tmp_path):
    """It is kept, and the next one does not begin, neither in backward nor in step(), until rank 1 can commit it."""
    on_living_ranks(2, cannot_commit, overlap, directory=tmp_path)


def cannot_begin_to_commit(rank, kind, overlap):
    """The step is complete, so no rank raises alone: the next one commits it before it begins."""
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


@pytest.mark.here("residuals are in no store")
def test_what_cannot_be_undone_is_torn_on_all(tmp_path):
    on_living_ranks(2, has_residuals, directory=tmp_path)


# ---- parameters that cannot be received ------------------------------------------------------------


def cannot_receive(rank):
    """Rank 1 fails once the others have its vote for the step. Returns why each step fails."""
    params = [torch.ones(100, 50).requires_grad_() for _ in range(3)]
    optimizer, why, copies = CSDAdam(params, devices="file:"), [], 0

    def copy(real, pairs):
        nonlocal copies
        copies += 1
        if rank == 1 and len(why) == 2 and copies == 2:  # the first copy fills the bucket that is sent
            raise RuntimeError("the copy failed")
        real(pairs)

    for k in range(4):
        for p in params:
            p.grad = torch.full_like(p, k + 1.0)
        copies = 0
        with replaced(all_gather, "_copy", copy):
            try:
                optimizer.step()
                why.append(None)
            except RuntimeError as e:
                why.append(str(e))
    return why


def test_a_rank_that_fails_after_its_vote(tmp_path):
    """It makes no collective that the other does not; the next step raises on both."""
    whole, failed = on_living_ranks(2, cannot_receive, directory=tmp_path)
    assert whole[:3] == [None] * 3
    assert failed[:3] == [None, None, "the copy failed"]
    assert whole[3] == failed[3] == "ranks have taken different numbers of steps: [2, 3]. Resume from the store"
