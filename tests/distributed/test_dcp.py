"""Checkpoints of torch.distributed.checkpoint: written on some ranks, read on others, by CSDAdam and by AdamW."""

import contextlib
import copy
import itertools
import json
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.memory import memory_limit
from support.owners import Owner
from support.rank_models import (
    ARGS,
    OF,
    OTHERS,
    STEPS,
    TILE,
    assert_everything_is,
    fsdp2,
    net,
    odd_parameters,
    states,
    take,
    train_model,
    whole,
)
from support.rank_models import MODELS as MODELS_OF_RANKS
from support.ranks import on_living_ranks
from support.states import assumed
from torch import nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from csd_optim import CSDAdam


def alone():
    model = net(used=True, scalar=False)
    model.empty = nn.Parameter(torch.zeros(2, 4))  # as in fsdp2()
    return model


MODELS = {
    "alone": alone,
    "DDP": lambda: DDP(alone()),
    "FSDP1": lambda: FSDP(alone(), device_id=torch.device("cpu")),
    "FSDP2": lambda: fsdp2(used=True),
}


def made(model, kind, rank, size, name="CSDAdam"):
    of, model = OF[name], MODELS[model]()
    kwargs = {**ARGS, **of.kwargs}
    if kind == "torch's":
        return model, of.reference(model.parameters(), **kwargs)
    devices = {"ours": "file:", "durable": f"{size}-{rank}"}.get(kind, kind)
    return model, of.ours(model.parameters(), **kwargs, tile_size=TILE, devices=devices)


def state_of(model, optimizer, **options):
    parts = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return dict(zip(("model", "optimizer"), parts, strict=True))


def seen(model, optimizer):
    return whole(model.parameters()), states(optimizer, model.parameters())


def goes_on(model, optimizer):
    """Takes one more step, with the same gradients on any number of ranks."""
    for k, p in enumerate(model.parameters()):
        torch.manual_seed(k)
        g = torch.randn(p.shape)
        p.grad = distribute_tensor(g, p.device_mesh, p.placements) if isinstance(p, DTensor) else g
    optimizer.step()
    return seen(model, optimizer)


def saves(rank, size, model, kind, how, name):
    model, optimizer = made(model, kind, rank, size, name)
    train_model(model, optimizer, rank, size)
    if how == "fsspec":
        dcp.save(state_of(model, optimizer), storage_writer=FsspecWriter(f"file://{os.getcwd()}/checkpoint"))
    elif how == "async_save":
        dcp.async_save(state_of(model, optimizer), checkpoint_id="checkpoint").result()
    elif how == "save":
        dcp.save(state_of(model, optimizer), checkpoint_id="checkpoint")
    else:  # one file, written by rank 0
        state = state_of(model, optimizer, full_state_dict=True, cpu_offload=True)
        if rank == 0:
            torch.save(state, "checkpoint")
    return seen(model, optimizer), goes_on(model, optimizer)


def loads(rank, size, model, kind, how, name):
    model, optimizer = made(model, kind, rank, size, name)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    options = StateDictOptions()
    if how == "file":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=size > 1)
        state = torch.load("checkpoint", weights_only=True) if rank == 0 else {"model": {}, "optimizer": {}}
    else:
        state = state_of(model, optimizer)
        # AdamW's checkpoints have no `master`, which is then taken from the parameter.
        dcp.load(state, checkpoint_id="checkpoint", planner=DefaultLoadPlanner(allow_partial_load=True))
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    return seen(model, optimizer), goes_on(model, optimizer)


@pytest.fixture
def owners(tmp_path):
    """Starts optimizer ranks, and returns their address."""
    with contextlib.ExitStack() as stack:
        directories = (tmp_path / f"owners-{k}" for k in itertools.count())
        yield lambda: stack.enter_context(Owner(next(directories))).address


@pytest.mark.ci
@pytest.mark.parametrize(
    ("saved", "loaded", "how", "name"),
    [
        ((4, "DDP", "durable"), (2, "DDP", "durable"), "save", "CSDAdam"),
        ((4, "FSDP2", "durable"), (2, "FSDP2", "ours"), "save", "CSDAdam"),
        ((4, "FSDP2", "ours"), (1, "alone", "torch's"), "fsspec", "CSDAdam"),
        ((2, "DDP", "ours"), (3, "FSDP2", "durable"), "async_save", "CSDAdam"),
        ((2, "FSDP2", "durable"), (1, "alone", "ours"), "async_save", "CSDAdam"),
        ((2, "DDP", "torch's"), (2, "DDP", "ours"), "save", "CSDAdam"),
        ((1, "alone", "torch's"), (3, "FSDP2", "durable"), "save", "CSDAdam"),
        ((2, "DDP", "ours"), (1, "alone", "torch's"), "file", "CSDAdam"),
        ((3, "FSDP2", "ours"), (2, "FSDP2", "ours"), "file", "CSDAdam"),
        ((2, "DDP", "served"), (2, "FSDP2", "ours"), "save", "CSDAdam"),
        ((3, "FSDP2", "served"), (2, "DDP", "served"), "save", "CSDAdam"),
        *(  # one of the three for each optimizer; all of them with soak
            pytest.param(*way, name, marks=[pytest.mark.soak] * ((i + j) % 3 > 0))
            for i, name in enumerate(OTHERS)
            for j, way in enumerate(
                [
                    ((2, "FSDP2", "durable"), (1, "alone", "ours"), "save"),
                    ((2, "FSDP2", "ours"), (1, "alone", "torch's"), "save"),
                    ((1, "alone", "torch's"), (2, "FSDP2", "durable"), "save"),
                ]
            )
        ),
    ],
    ids=str,
)
def test_saved_on_some_ranks_loaded_on_others(saved, loaded, how, name, owners, tmp_path):
    (size, *what), (size_then, *what_then) = saved, loaded
    what, what_then = ([owners() if kind == "served" else kind for kind in of] for of in (what, what_then))
    exact = "torch's" not in (*what, *what_then)
    if assumed() != "fp32" and not exact:
        pytest.skip("compares with torch's to its last bits")
    before, after = on_living_ranks(size, saves, size, *what, how, name, directory=tmp_path)[0]
    for found, again in on_living_ranks(size_then, loads, size_then, *what_then, how, name, directory=tmp_path):
        for wanted, (params, held) in ((before, found), (after, again)):
            keys = {*wanted[1][0]} & {*held[0]}
            assert OF[name].rule.sections[1] in keys
            if not exact:
                keys -= {"master"}  # torch's optimizer does not update it
            held, kept = ([{k: s[k] for k in keys} for s in of] for of in (held, wanted[1]))
            if exact or wanted is before:
                assert_everything_is((params, held), (wanted[0], kept))
            else:
                # Centered RMSprop divides by the root of a small difference, which amplifies rounding.
                amplified = 100 if name == "CSDRMSprop" else 1
                near = {"rtol": 2e-6 * amplified, "atol": 1e-7 * amplified}
                torch.testing.assert_close((params, held), (wanted[0], kept), **near)


def local_round_trip(rank, size, path, kind):
    """FSDP1, with flat shards. Needs `flatten_optimizer_state_dict`, without which torch does not find the groups."""
    model, optimizer = made("FSDP1", kind, rank, size)
    options = {"flatten_optimizer_state_dict": True}
    if path == "save":
        train_model(model, optimizer, rank, size)
        dcp.save(state_of(model, optimizer, **options), checkpoint_id="checkpoint")
    else:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        state = state_of(model, optimizer, **options)
        dcp.load(state, checkpoint_id="checkpoint")
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=StateDictOptions(**options))
    return seen(model, optimizer), goes_on(model, optimizer)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("durable", "ours"),
        pytest.param("served", "served", marks=pytest.mark.at_hand("its owners keep what they own in directories")),
    ],
)
def test_flat_shards_of_fsdp1(saved, loaded, owners, tmp_path):
    saved, loaded = (owners() if kind == "served" else kind for kind in (saved, loaded))
    saved = on_living_ranks(3, local_round_trip, 3, "save", saved, directory=tmp_path)
    loaded = on_living_ranks(3, local_round_trip, 3, "load", loaded, directory=tmp_path)
    for wanted, found in zip(saved, loaded, strict=True):
        assert_everything_is(found[0], wanted[0])
        assert_everything_is(found[1], wanted[1])


N = 8 << 20  # parameters; the state of half of them is 48 MiB
LIMIT = 36 << 20  # bytes that an operation may allocate, less than the whole state


def in_little_memory(rank):
    # Several parameters, because torch writes them one after another, and may copy each.
    params = [nn.Parameter(torch.ones(N // 16, 1, dtype=torch.bfloat16)) for _ in range(16)]
    with CSDAdam([(str(k), p) for k, p in enumerate(params)], devices="csd{rank}") as optimizer:
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
            state = {"optimizer": optimizer.state_dict()}
            if not os.path.exists("checkpoint"):
                with memory_limit(LIMIT):
                    dcp.save(state, checkpoint_id="checkpoint")
                with memory_limit(LIMIT), pytest.raises(RuntimeError, match="can't allocate memory"):
                    copy.deepcopy(state)  # proves that the limit works
        assert all(held["exp_avg"].to_local()[0] == torch.tensor(0.19) for held in optimizer.state.values())
        with memory_limit(LIMIT), optimizer.loading():
            dcp.load(state, checkpoint_id="checkpoint")
        assert all((held["exp_avg"].to_local() == torch.tensor(0.1)).all() for held in optimizer.state.values())
    with CSDAdam([(str(k), p) for k, p in enumerate(params)], devices="csd{rank}", resume=True) as optimizer:
        assert all((held["exp_avg"].to_local() == torch.tensor(0.1)).all() for held in optimizer.state.values())


@pytest.mark.fp32_states("only fp32 states are mapped")
def test_saving_and_loading_take_little_memory(tmp_path):
    on_living_ranks(2, in_little_memory, directory=tmp_path)
    assert sum(f.stat().st_size for f in (tmp_path / "checkpoint").iterdir()) > 12 * N


# ---- csd-optim export: the way out without torch.distributed -----------------------------------------------


def states_after_training(rank, size, kind):
    if kind == "odd":
        params = odd_parameters()
    else:
        model = DIVIDED[kind]()
        params = list(model.parameters())
    with CSDAdam(params, **ARGS, tile_size=TILE, devices=["{rank}-0", "{rank}-1"]) as optimizer:
        if kind == "odd":
            take(optimizer, params, range(STEPS), lambda step: (3, 6))
        else:
            train_model(model, optimizer, *((0, 1) if kind == "tensor parallel" else (rank, size)))
        optimizer.synchronize()
        return states(optimizer, params)


DIVIDED = {"tensor parallel": MODELS_OF_RANKS["tensor parallel"], **MODELS}


@pytest.mark.parametrize("kind", ["odd", "FSDP2", "tensor parallel"])
def test_export_puts_ranks_together(kind, tmp_path, run):
    wanted = on_living_ranks(3, states_after_training, 3, kind, directory=tmp_path)[0]
    stores = sorted(tmp_path.glob("?-?"))
    assert len(stores) == 6
    assert run("export", *stores, tmp_path / "state.pt")[0] == 0
    exported = torch.load(tmp_path / "state.pt", weights_only=True)
    assert exported["csd_optim"]["step"] == STEPS
    for k, state in enumerate(wanted):
        found = exported["state"].get(k, {})
        assert {*found} == {*state}
        for key, value in state.items():
            assert torch.equal(found[key], value), (k, key)
    assert run("export", "--format", "safetensors", *stores, tmp_path / "safetensors")[0] == 0
    held = {}
    for file in (tmp_path / "safetensors").glob("*.safetensors"):
        held |= load_file(file)
    index = json.loads((tmp_path / "safetensors" / "optimizer.safetensors.index.json").read_text())
    names = [p["name"] for p in index["metadata"]["csd_optim"]["params"]]
    for name, state in zip(names, [s for s in wanted if s], strict=True):
        value = state["exp_avg"]
        assert torch.equal(held[f"{name}.exp_avg"], torch.view_as_real(value) if value.is_complex() else value)

    code, _, err = run("export", *stores[:4], tmp_path / "some.pt")
    assert code == 1
    assert "ranks 0, 1 of 3: name those of all, or of one" in " ".join(err.split())
    if kind == "odd":
        on_living_ranks(2, loads_export, wanted, directory=tmp_path)


def loads_export(rank, wanted):
    """Loads on another number of ranks. The file is memory-mapped, and each rank reads its own part."""
    params = odd_parameters()
    optimizer = CSDAdam(params, **ARGS, tile_size=TILE, devices="file:")
    state = torch.load("state.pt", weights_only=True, mmap=True)
    with torch.no_grad():
        for k, held in state["state"].items():
            params[k].copy_(held["master"])
    optimizer.load_state_dict(state)
    for found, of in zip(states(optimizer, params), wanted, strict=True):
        assert {*found} == {*of}
        assert all(torch.equal(found[key], of[key]) for key in of)


def test_flat_shards_are_not_put_together(tmp_path, run):
    on_living_ranks(2, states_after_training, 2, "FSDP1", directory=tmp_path)
    code, _, err = run("export", *sorted(tmp_path.glob("?-?")), tmp_path / "state.pt")
    assert code == 1
    assert "shard of FSDP1" in " ".join(err.split())
    assert not (tmp_path / "state.pt").exists()
