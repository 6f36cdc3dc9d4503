"""The agreement of ranks: what they exchange before an operation takes effect on all of them."""

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import on_living_ranks, on_ranks

from csd_optim import CSDAdam
from csd_optim.distributed.buckets import TARGET_BUCKETS
from csd_optim.distributed.ranks import SMALL_EXCHANGE, Ranks, all_ranks_or_none
from csd_optim.errors import CSDRankError

ALIKE = ({3: 1}, [2], None, 0.5)


def tell_each_other(rank, size):
    ranks = Ranks(dist.group.WORLD)
    assert ranks.gather(rank, -1) == [(k, -1) for k in range(size)]
    assert ranks.gather(rank + 0.1, dtype=torch.float64) == [(k + 0.1,) for k in range(size)]

    with mock.patch.object(ranks, "gather_objects", side_effect=AssertionError), ranks.all_ranks_or_none() as votes:
        votes.mine = ALIKE  # equal on all ranks, so only a checksum travels
    assert votes.all == [ALIKE] * size

    with ranks.all_ranks_or_none() as votes:
        votes.mine = (*ALIKE, rank % 2)
    assert votes.all == [(*ALIKE, k % 2) for k in range(size)]

    votes = None

    def fails():
        nonlocal votes
        with ranks.all_ranks_or_none() as votes:
            votes.mine = rank
            if rank == 1:
                raise ValueError("of rank 1 alone")

    with pytest.raises(ValueError if rank == 1 else CSDRankError, match="of rank 1 alone"):
        fails()
    assert votes.all == []


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_tell_each_other_what_differs(size, tmp_path):
    on_living_ranks(size, tell_each_other, size, directory=tmp_path)


def borrow(rank):
    """A borrowed group waits for lost ranks as long as the one that it was made of."""
    cpu, seconds = torch.device("cpu"), timedelta(seconds=77)
    group = dist.new_group(timeout=seconds)
    lent = Ranks(group).borrow()
    assert lent.group._get_backend(cpu).options._timeout == seconds
    assert lent.gather(rank) == [(0,), (1,)]


def test_a_borrowed_group_has_the_same_timeout(tmp_path):
    on_ranks(2, borrow, directory=tmp_path)


def test_alone():
    with all_ranks_or_none(None) as votes:
        votes.mine = ALIKE
    assert votes.all == [ALIKE]


def share(rank, rows):
    """Return the number of buckets of parameters with so many rows of 1 KB, and all parameters after a step."""
    params = [torch.nn.Parameter(torch.full((n, 256), float(n))) for n in rows]
    for p in params:
        p.grad = torch.ones_like(p)
    with CSDAdam(params) as optimizer:
        optimizer.step()
        return len(optimizer._steps.resources.gather.buckets), [p.tolist() for p in params]


@pytest.mark.parametrize(("rows", "n"), [([TARGET_BUCKETS * 128], TARGET_BUCKETS), ([120, 1, 131], 1)])
def test_parameters_travel_in_several_buckets_unless_they_are_tiny(rows, n, tmp_path):
    """So the first buckets travel while the last tiles are still being updated."""
    one, other = on_living_ranks(2, share, rows, directory=tmp_path)
    assert one == other
    assert one[0] == n


def exchange(rank, sizes):
    ranks, found = Ranks(dist.group.WORLD), []
    for n in sizes:
        rows = torch.zeros(ranks.size, n, dtype=torch.uint8)
        rows[rank] = rank + 1
        ranks.wait(ranks.exchange(rows))
        found.append([row.unique().tolist() for row in rows])
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_an_exchange_fills_all_rows(size, tmp_path):
    """By one all_to_all, and, if the rows are larger, by messages between all pairs."""
    sizes = [16, SMALL_EXCHANGE // size, SMALL_EXCHANGE // size + 16]
    filled = [[rank + 1] for rank in range(size)]
    assert on_living_ranks(size, exchange, sizes, directory=tmp_path) == [[filled] * len(sizes)] * size
