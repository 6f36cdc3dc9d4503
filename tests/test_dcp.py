"""Checkpoints of torch.distributed.checkpoint: written on some ranks, read on others, by CSDAdam and by AdamW."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from test_distributed import ARGS, MODELS, STEPS, TILE, assert_everything_is, loss_of, net, states, train, whole
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from csd_optim import CSDAdam

KINDS = {**MODELS, "DDP": lambda: DDP(net(used=True)), "alone": lambda: net(scalar=False)}


def model_of(kind):
    return KINDS[kind]()


def optimizer_of(kind, params):
    if kind == "AdamW":
        return AdamW(params, **ARGS)
    return CSDAdam(params, **ARGS, tile_size=TILE, devices={"CSDAdam": "file:", "durable": "{world_size}-{rank}"}[kind])


def saves(rank, size, model_kind, kind, how):
    model = model_of(model_kind)
    optimizer = optimizer_of(kind, model.parameters())
    train(model, optimizer, rank, size)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    if how == "async":
        dcp.async_save(state, checkpoint_id="checkpoint").result()
    else:
        dcp.save(state, checkpoint_id="checkpoint")
    before = whole(model.parameters()), states(optimizer, model.parameters())
    train(model, optimizer, rank, size, [STEPS])
    return before, whole(model.parameters())


def loads(rank, size, model_kind, kind):
    model = model_of(model_kind)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = optimizer_of(kind, model.parameters())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id="checkpoint")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    before = whole(model.parameters()), states(optimizer, model.parameters())
    train(model, optimizer, rank, size, [STEPS])
    return before, whole(model.parameters())


@pytest.mark.parametrize("model", ["DDP", "FSDP2"])
def test_x(model, tmp_path):
    saved, after = on_ranks(3, saves, 3, model, "durable", "save", directory=tmp_path)[0]
    found, again = on_ranks(3, loads, 3, model, "durable2" if 0 else "CSDAdam", directory=tmp_path)[0]
    assert_everything_is(found, saved)
    assert_everything_is((again, []), (after, []))
