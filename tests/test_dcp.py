"""Checkpoints of torch.distributed.checkpoint: written on some ranks, read on others, by CSDAdam and by AdamW."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from test_distributed import ARGS, TILE, assert_everything_is, fsdp2, net, states, train, whole
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from csd_optim import CSDAdam


def alone():
    model = net(used=True, scalar=False)
    model.empty = nn.Parameter(torch.zeros(2, 4))  # as in fsdp2()
    return model


MODELS = {"DDP": lambda: DDP(alone()), "FSDP2": lambda: fsdp2(used=True), "alone": alone}


def made(model, kind, rank, size):
    model = MODELS[model]()
    if kind == "AdamW":
        return model, AdamW(model.parameters(), **ARGS)
    devices = {"CSDAdam": "file:", "durable": f"{size}-{rank}"}[kind]
    return model, CSDAdam(model.parameters(), **ARGS, tile_size=TILE, devices=devices)


def state_of(model, optimizer, **options):
    parts = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return dict(zip(("model", "optimizer"), parts, strict=True))


def seen(model, optimizer):
    return whole(model.parameters()), states(optimizer, model.parameters())


def goes_on(model, optimizer):
    """One more step, with the same gradients wherever it is made."""
    for k, p in enumerate(model.parameters()):
        torch.manual_seed(k)
        g = torch.randn(p.shape)
        p.grad = distribute_tensor(g, p.device_mesh, p.placements) if isinstance(p, DTensor) else g
    optimizer.step()
    return seen(model, optimizer)


def saves(rank, size, model, kind, how):
    model, optimizer = made(model, kind, rank, size)
    train(model, optimizer, rank, size)
    if how == "async_save":
        dcp.async_save(state_of(model, optimizer), checkpoint_id="checkpoint").result()
    elif how == "save":
        dcp.save(state_of(model, optimizer), checkpoint_id="checkpoint")
    else:  # one file, written by rank 0
        state = state_of(model, optimizer, full_state_dict=True, cpu_offload=True)
        if rank == 0:
            torch.save(state, "checkpoint")
    return seen(model, optimizer), goes_on(model, optimizer)


def loads(rank, size, model, kind, how):
    model, optimizer = made(model, kind, rank, size)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    options = StateDictOptions()
    if how == "file":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=size > 1)
        state = torch.load("checkpoint", weights_only=True) if rank == 0 else {"model": {}, "optimizer": {}}
    else:
        state = state_of(model, optimizer)
        # AdamW's checkpoints have no `master`; it is the parameter then.
        dcp.load(state, checkpoint_id="checkpoint", planner=DefaultLoadPlanner(allow_partial_load=True))
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    return seen(model, optimizer), goes_on(model, optimizer)


@pytest.mark.parametrize(
    ("saved", "loaded", "how"),
    [
        ((4, "DDP", "durable"), (2, "DDP", "durable"), "save"),
        ((4, "FSDP2", "durable"), (2, "FSDP2", "CSDAdam"), "save"),
        ((4, "FSDP2", "CSDAdam"), (1, "alone", "AdamW"), "save"),
        ((2, "DDP", "CSDAdam"), (3, "FSDP2", "durable"), "async_save"),
        ((2, "FSDP2", "durable"), (1, "alone", "CSDAdam"), "async_save"),
        ((2, "DDP", "AdamW"), (2, "DDP", "CSDAdam"), "save"),
        ((1, "alone", "AdamW"), (3, "FSDP2", "durable"), "save"),
        ((2, "DDP", "CSDAdam"), (1, "alone", "AdamW"), "file"),
        ((3, "FSDP2", "CSDAdam"), (2, "FSDP2", "CSDAdam"), "file"),
    ],
    ids=str,
)
def test_saved_on_some_ranks_loaded_on_others(saved, loaded, how, tmp_path):
    (size, *what), (size_then, *what_then) = saved, loaded
    before, after = on_ranks(size, saves, size, *what, how, directory=tmp_path)[0]
    for found, again in on_ranks(size_then, loads, size_then, *what_then, how, directory=tmp_path):
        exact = "AdamW" not in (*what, *what_then)
        for wanted, (params, held) in ((before, found), (after, again)):
            keys = {*wanted[1][0]} & {*held[0]}
            if not exact:
                keys -= {"master"}  # AdamW carries it along as it was
            held, kept = ([{k: s[k] for k in keys} for s in of] for of in (held, wanted[1]))
            if exact or wanted is before:
                assert_everything_is((params, held), (wanted[0], kept))
            else:
                torch.testing.assert_close((params, held), (wanted[0], kept), rtol=2e-6, atol=1e-7)
