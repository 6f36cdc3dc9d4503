"""Parameters that are replaced on several ranks: the numbers are AdamW's, and stores do not grow."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from support.ranks import on_living_ranks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from csd_optim import CSDAdam
from csd_optim.checkpoint.verify import verify
from csd_optim.store.format import FILE_NAME

WRAPS = {"DDP": DDP, "FSDP2": lambda model: fully_shard(model) or model, "whole": lambda model: model}


def model_of(width):
    torch.manual_seed(width)
    return torch.nn.Linear(64, width)


def replaces(rank, kind, overlaps):
    """Every second step a model takes the place of the one before, which leaves with all its states."""
    place, held, old = Path(f"csd{rank}"), [], []
    ours = reference = None
    for round in range(6):
        width = 128 + 64 * (round % 2)
        wrapped, plain = WRAPS[kind](model_of(width)), model_of(width)
        if ours is None:
            ours = CSDAdam(wrapped.parameters(), devices=place, tile_size=1024, sharded=kind != "whole")
            reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        else:
            for opt, model in ((ours, wrapped), (reference, plain)):
                opt.state.clear()
                opt.param_groups.clear()
                opt.add_param_group({"params": [*model.parameters()]})
        if overlaps:
            ours.overlap(wrapped)
        for _ in range(2):
            for opt, model in ((ours, wrapped), (reference, plain)):
                model(torch.ones(2, 64)).sin().sum().backward()
                opt.step()
                opt.zero_grad()
        ours.synchronize()
        for p, q in zip(wrapped.parameters(), plain.parameters(), strict=True):
            whole = p.full_tensor() if hasattr(p, "full_tensor") else p
            assert (whole - q).norm() <= 1e-6 * q.norm()
        gc.collect()
        assert not any(ref() is not None for ref in old)
        old += map(weakref.ref, wrapped.parameters())
        held.append(512 * (place / FILE_NAME).stat().st_blocks)
        del p, whole, model, wrapped
    if overlaps:
        ours.overlap(None)
    ours.close()
    assert held[5] <= held[1] + (64 << 10), held
    assert [(v.unchecked, v.damage) for v in verify([place])] == [(0, [])]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("kind", WRAPS)
def test_what_leaves_is_freed_on_each_rank(kind, overlaps, tmp_path):
    on_living_ranks(2, replaces, kind, overlaps, directory=tmp_path)
