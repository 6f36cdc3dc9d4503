"""Several ranks make their optimizer again: either all ranks close the older optimizer, or no rank does."""

import gc

import pytest
import torch
from support.beside import everything
from support.comparing import assert_same
from support.ranks import on_living_ranks
from support.replacing import failing
from support.training import parameters, train

from csd_optim import CSDAdam, CSDBusyError, CSDOSError, CSDRankError, CSDRuntimeError
from csd_optim.engine.commit.durable import DurableCommitter

pytestmark = [
    pytest.mark.here("an owner keeps the stores of its trainers apart by itself"),
    pytest.mark.filterwarnings("ignore:there is no store:csd_optim.CSDWarning"),
]


def made(rank, shape=(40, 30), seed=0, **options):
    torch.manual_seed(seed)
    return CSDAdam(parameters(shape, (7,)), devices=f"device-{rank}", tile_size=1024, **options)


def make_again(rank, how, held_by, steps):
    """Ranks outside `held_by` close the older optimizer first."""
    older = train(made(rank), steps)
    older.synchronize()
    expected = everything(older)
    if rank not in held_by:
        older.close()
    newer = made(rank, seed=1, **{how: True})
    if how == "resume":
        assert newer.committed_step == steps
        if steps:
            assert_same(everything(newer), expected)
    train(newer, 2)
    newer.synchronize()
    assert newer.committed_step == 2 + (steps if how == "resume" else 0)
    if rank in held_by:
        with pytest.raises(CSDRuntimeError, match="was replaced by a newer one"):
            older.step()
    newer.close()


@pytest.mark.parametrize("how", ["overwrite", "resume"])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("held_by", [[0, 1], [1]], ids=str)
def test_each_rank_makes_it_again(how, held_by, steps, tmp_path):
    on_living_ranks(2, make_again, how, held_by, steps, directory=tmp_path)


def goes_on(rank):
    """Rank 1 makes another model: all are told, and all older ones go on."""
    older = train(made(rank), 2)
    with pytest.raises(CSDRankError if rank == 0 else CSDBusyError, match="it is of another model: shape of"):
        made(rank, shape=(40, 30 + rank), resume=True)
    train(older, 1, first=2)
    older.synchronize()
    assert older.committed_step == 3
    older.close()
    gc.collect()


def commit_fails(rank):
    older = train(made(rank), 2)
    gc.collect()  # else another optimizer is closed within failing()
    with failing(DurableCommitter, "before_close", rank, "no power"):  # rank 0 succeeds
        with pytest.raises(CSDRankError if rank == 0 else CSDOSError, match="no power"):
            made(rank, resume=True)
        train(older, 1, first=2)
    with made(rank, resume=True) as newer:
        assert newer.committed_step == 3


def test_a_last_commit_that_fails_on_one_rank(tmp_path):
    on_living_ranks(2, commit_fails, directory=tmp_path)


def test_refused_on_all_ranks_or_on_none(tmp_path):
    on_living_ranks(2, goes_on, directory=tmp_path)
