"""overlap() where ranks share updates (DDP, HSDP): rows travel behind the program, with the bits of blocking steps."""

import contextlib
import functools
import random
import threading
import time
from pathlib import Path

import pytest
import torch
from support.inside import flight_of
from support.ranks import on_living_ranks, on_ranks
from support.replacing import failing, raised_by, replaced
from support.twins import now, training_on
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

from csd_optim import CSDAdam
from csd_optim.distributed.ranks import Ranks
from csd_optim.engine.engine import Engine
from csd_optim.errors import CSDRankError
from csd_optim.step.all_gather import ParamAllGather

STEPS = 6


def trains(rank, size, kind, overlap, **options):
    """Ranks are slow by turns; every third step is clipped."""
    choose = random.Random(rank)
    training = training_on(rank, str(overlap), overlap, kind, **options)
    flights = 0
    for k in range(STEPS):
        training.backward()
        time.sleep(0.05 * choose.random() if k % size == rank else 0)
        if k % 3 == 2:
            clip_grad_norm_(training.model.parameters(), 1e-1)
        training.opt.step()
        flights += overlap is not None and flight_of(training.opt) is not None
        training.opt.zero_grad()
    assert overlap is None or flights == STEPS - 1
    seen = training.seen()
    training.opt.close()
    return seen


blocking_trains = functools.cache(trains)  # the ranks' processes live on


def compares(rank, size, kind, overlap, options):
    assert trains(rank, size, kind, overlap, **options) == blocking_trains(rank, size, kind, None, **options)


CASES = [
    (2, "DDP", {}, {}),
    (3, "DDP", {}, {"named": True}),
    (2, "views", {}, {"named": True, "state_dtype": "8bit"}),
    (2, "DDP", {}, {"dtype": torch.bfloat16, "max_grad_norm": 1.0}),
    (4, "HSDP", {}, {"named": True}),
    (4, "HSDP", {"backward": True}, {"named": True}),
]


@pytest.mark.parametrize(("size", "kind", "overlap", "options"), CASES, ids=str)
def test_the_bits_of_blocking_steps(size, kind, overlap, options, tmp_path):
    on_living_ranks(size, compares, size, kind, overlap, options, directory=tmp_path)


class Few(nn.Module):
    """Parameters with fewer rows than ranks, without rows, and 0-dim."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.row, self.two = nn.Linear(30, 1), nn.Linear(1, 2)
        self.empty, self.scale = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.two(self.row(x)) * self.scale + self.empty.sum()


class Row(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.row = nn.Linear(30, 1, bias=False)

    def forward(self, x):
        return self.row(x)


def few_rows(rank, make, size):
    seen = []
    for how in None, {}:
        model = DDP(make())
        Path(f"{how}-{rank}").mkdir()
        opt = CSDAdam(model.parameters(), lr=1e-2, devices=f"{how}-{rank}", tile_size=1024)
        if how is not None:
            opt.overlap(model)
        flights = 0
        for k in range(STEPS):
            fails = how is not None and k in (2, 3)
            torch.manual_seed(k * size + rank)
            model(torch.randn(3, 30)).square().sum().backward()
            with failing(Engine, "finish", int(fails and rank == k % 2), "unplugged"):
                opt.step()
                flights += how is not None and flight_of(opt) is not None
                opt.zero_grad()
                if fails:  # on a rank with or without tiles
                    assert raised_by(opt.synchronize)
            if fails:
                torch.manual_seed(k * size + rank)
                model(torch.randn(3, 30)).square().sum().backward()
                opt.step()
                opt.zero_grad()
        opt.synchronize()
        assert opt.committed_step == STEPS
        assert how is None or flights == STEPS - 1
        entries = opt.state.values()
        held = [t.to_local() if hasattr(t, "to_local") else t for entry in entries for t in entry.values()]
        seen.append([t.detach().clone() for t in (*model.parameters(), *held)])
        opt.close()
    assert all(map(torch.equal, *seen))


@pytest.mark.parametrize("make", [Few, Row])
def test_fewer_rows_than_ranks(make, tmp_path):
    on_living_ranks(3, few_rows, make, 3, directory=tmp_path)


def one_lands_late(rank, place):
    """A parameter is read when its rows of the other rank are there, not later than that, and no earlier."""
    training = training_on(rank, "this", {}, "DDP", named=True)
    for _ in range(2):
        training.step()
    before = [p.detach().clone() for p in training.model.parameters()]

    def waits(begin, gather, *args, **kwargs):
        while not all((place / f"may begin, says {r}").exists() for r in range(2)):
            time.sleep(0.01)
        begin(gather, *args, **kwargs)

    training.backward()
    with replaced(ParamAllGather, "begin", waits):
        training.opt.step()  # if it waited for the rows, it would do so for ever
        began = time.monotonic()
        threading.Timer(0.4, (place / f"may begin, says {rank}").touch).start()
        (weight := training.model.module[0].inner.weight).sum()
        assert time.monotonic() - began >= 0.4
    for rows in before[0].chunk(2), weight.detach().chunk(2):
        assert len(rows) == 2
    changed = [(a != b).any(1).all() for a, b in zip(before[0].chunk(2), weight.detach().chunk(2), strict=True)]
    assert all(changed)
    training.opt.close()


def test_a_parameter_waits_for_the_rows_of_other_ranks(tmp_path):
    on_living_ranks(2, one_lands_late, tmp_path, directory=tmp_path)


# ---- failures ------------------------------------------------------------------------------------


def loses_the_others(rank):
    """The exchange itself fails on rank 1: nobody goes on, and all resume at the same step."""
    training = training_on(rank, "this", {}, "DDP", named=True)
    for _ in range(3):
        training.step()
    training.opt.synchronize()

    def cut(exchange, ranks, rows):
        ranks.lost = True
        raise CSDRankError("rank 1 has lost the others: cut")

    training.backward()
    with replaced(Ranks, "exchange", cut) if rank == 1 else contextlib.nullcontext():
        training.opt.step()
        if rank == 1:
            for call in training.opt.synchronize, training.opt.step:
                assert "cut" in str(raised_by(call))
            return
    assert "lost the others" in str(raised_by(training.opt.step))  # when rank 1 has ended
    assert "lost the others" in str(raised_by(training.opt.step))


def resumes(rank):
    with training_on(rank, "this", {}, "DDP", named=True, resume=True).opt as opt:
        return opt.committed_step


def test_an_exchange_that_is_cut(tmp_path):
    on_ranks(2, loses_the_others, directory=tmp_path)
    assert on_ranks(2, resumes, directory=tmp_path) == [3, 3]


def takes_turns(rank):
    """Overlap ends and begins again, on DDP and between other exchanges: no group is mistaken for another."""
    seen = []
    for how in None, {}:
        training = training_on(rank, str(how), how, "DDP")
        for k in range(9):
            training.step()
            if how is not None and k % 2:
                training.opt.overlap(None if k % 4 == 1 else training.model)
            if k == 5:  # moves on one rank, which then plans anew
                p = training.model.module[0].inner.weight
                p.data = p.data.clone() if rank else p.data
        seen.append(training.seen())
        training.opt.close()
    assert seen[0] == seen[1]


def test_overlap_is_turned_off_and_on(tmp_path):
    on_living_ranks(2, takes_turns, directory=tmp_path)


def uneven(rank):
    """Rank 1 runs out of data, and goes on updating its rows."""
    seen = []
    for how in None, {}:
        training = training_on(rank, str(how), how, "DDP")
        with Join([training.model, training.opt]):
            for _ in range(STEPS if rank == 0 else STEPS // 2):
                training.step()
        training.opt.synchronize()
        seen.append(now(training))
        training.opt.close()
    assert seen[0] == seen[1]


def test_uneven_inputs(tmp_path):
    on_living_ranks(2, uneven, directory=tmp_path)
