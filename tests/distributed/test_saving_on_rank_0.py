"""Rank 0 says in the first step that it alone cannot save all states, where a script might do so: once, and in time."""

import copy
import io
import os
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import on_living_ranks
from support.twins import hybrid
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from csd_optim import CSDSGD, CSDAdam, CSDRuntimeError, CSDWarning

WAYS = (
    "consolidate_state_dict() on all ranks",
    "torch.distributed.checkpoint",
    "named devices with resume=True",
    "sharded=False",
)
SAID = "of the optimizer's states"


class Caught(warnings.catch_warnings):
    """Collects the warnings of csd_optim, all of them."""

    def __init__(self):
        super().__init__(record=True)

    def __enter__(self):
        self.found = super().__enter__()
        warnings.simplefilter("always")
        return self

    def told(self):
        """Return how often it was said, and forget it."""
        said = [w for w in self.found if issubclass(w.category, CSDWarning) and SAID in str(w.message)]
        for w in said:
            assert all(way in str(w.message) for way in WAYS)
            assert w.filename == __file__
        self.found.clear()
        return len(said)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def tensor_parallel(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model.append(nn.LayerNorm(8))  # stays plain
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


WRAPS = {
    "DDP": DDP,
    "FSDP2": fully_shard,
    "HSDP": hybrid,
    "FSDP1": lambda model: FSDP(model, device_id=torch.device("cpu")),
    "TP": tensor_parallel,
}
TABLE = [  # how the model is wrapped, options, whether rank 0 warns
    ("DDP", {}, True),
    ("DDP", {"devices": ["csd{rank}"], "overwrite": True}, True),
    ("DDP", {"devices": "ram:", "max_grad_norm": 1.0}, True),
    ("DDP", {"cls": CSDSGD}, True),
    ("DDP", {"overlap": {}}, True),
    ("DDP", {"sharded": True}, False),
    ("DDP", {"sharded": False}, False),
    ("DDP", {"cls": CSDSGD, "sharded": True}, False),
    ("DDP", {"environment": "sharded=1"}, False),
    ("DDP", {"environment": "sharded=0"}, False),
    ("DDP", {"environment": "topk_warmup=1"}, True),
    ("DDP", {"devices": ["resumed{rank}"], "resume": True}, False),
    ("FSDP2", {}, False),
    ("FSDP1", {}, False),
    ("TP", {}, False),
    ("HSDP", {}, False),
]


def warns(rank, kind, options):
    """Return how often each of three steps has said it."""
    cls, overlap = options.pop("cls", CSDAdam), options.pop("overlap", None)
    environment = {"CSD_OPTIM_OPTIONS": options.pop("environment", "")}
    model = WRAPS[kind](net())
    with Caught() as caught:
        with mock.patch.dict(os.environ, environment):
            optimizer = cls(model.parameters(), lr=0.1, **options)
        assert optimizer.sharded is options.get("sharded", environment["CSD_OPTIM_OPTIONS"] != "sharded=0")
        if overlap is not None:
            optimizer.overlap(model, **overlap)
        told = [caught.told()]
        for _ in range(3):
            step(model, optimizer)
            told.append(caught.told())
        optimizer.close()
    return told


@pytest.mark.parametrize(("kind", "options", "expected"), TABLE, ids=str)
def test_who_is_warned(kind, options, expected, tmp_path):
    size = 4 if kind == "HSDP" else 2
    told = on_living_ranks(size, warns, kind, options, directory=tmp_path)
    assert told == [[0, int(expected), 0, 0], *[[0] * 4] * (size - 1)]


def test_a_process_alone_is_not_warned():
    p = nn.Parameter(torch.ones(8, 8))
    with Caught() as caught, CSDAdam([p]) as optimizer:
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert not caught.told()


def not_before_ranks_divide(rank):
    """The first step is skipped, the second has a parameter that each rank stores; then others join."""
    scale, model = nn.Parameter(torch.tensor(1.0)), DDP(net())
    with Caught() as caught, CSDAdam([scale, *model.parameters()]) as optimizer:
        scale.grad = torch.ones(())
        optimizer.found_inf = torch.ones(1)
        optimizer.step()
        del optimizer.found_inf
        optimizer.step()
        assert not caught.told()
        step(model, optimizer)
        assert caught.told() == (rank == 0)


def copies(rank):
    """A copy warns if the original has not yet; each optimizer does for itself."""
    model = DDP(net())
    with Caught() as caught:
        optimizer = CSDAdam(model.parameters())
        copied = copy.deepcopy(optimizer)
        for p in copied.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        copied.step()
        assert caught.told() == (rank == 0)
        step(model, optimizer)
        assert caught.told() == (rank == 0)
        again = copy.deepcopy(optimizer)
        again.step()
        explicit = copy.deepcopy(CSDAdam(DDP(net()).parameters(), sharded=True))
        for p in explicit.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        explicit.step()
        assert not caught.told()


def knows(rank):
    """Scripts that have saved on all ranks before the first step, or whose trainer will."""
    with Caught() as caught:
        for save in (
            lambda model, optimizer: optimizer.consolidate_state_dict(),
            get_optimizer_state_dict,  # it takes a step of its own
        ):
            model = DDP(net())
            with CSDAdam(model.parameters()) as optimizer:
                save(model, optimizer)
                step(model, optimizer)
        assert not caught.told()


def says_the_same(rank):
    model = DDP(net())
    with Caught() as caught, CSDAdam(model.parameters()) as optimizer:
        step(model, optimizer)
        assert caught.told() == (rank == 0)
        with pytest.raises(CSDRuntimeError) as raised:
            torch.save(optimizer.state_dict(), io.BytesIO())
        assert all(way in str(raised.value) for way in WAYS)
        optimizer.consolidate_state_dict()
        if rank == 0:
            torch.save(optimizer.state_dict(), io.BytesIO())


def of_groups(rank):
    """The first rank of each group of ranks would save."""
    pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    model = DDP(net(), process_group=pair)
    with Caught() as caught, CSDAdam(model.parameters(), process_group=pair) as optimizer:
        step(model, optimizer)
        return caught.told()


@pytest.mark.parametrize("function", [not_before_ranks_divide, copies, knows, says_the_same])
def test_when(function, tmp_path):
    on_living_ranks(2, function, directory=tmp_path)


def test_groups_of_ranks(tmp_path):
    assert on_living_ranks(4, of_groups, directory=tmp_path) == [1, 0, 1, 0]
