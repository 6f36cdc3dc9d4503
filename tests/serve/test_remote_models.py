"""Wrapped models with accumulation, clipping, GradScaler and two optimizers: an owner has the bits of directories."""

import contextlib

import pytest
import torch
from support.owners import Owner
from support.ranks import on_living_ranks
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ExponentialLR

from csd_optim import CSDSGD, CSDAdam

STEPS = 6
JOINS = 2  # a group is added before this step
OVERFLOW = 3  # gradients overflow in this step


class Net(nn.Module):
    """A small net: `stem` is frozen; `late` has 16 bits, and rows that do not divide evenly among ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(6, 10).requires_grad_(False)
        self.body = nn.Linear(10, 14)
        self.late = nn.Linear(14, 9).bfloat16()
        self.head = nn.Linear(9, 3, bias=False)

    def forward(self, x):
        x = torch.relu(self.body(self.stem(x)))
        return self.head(torch.tanh(self.late(x.bfloat16())).float())

    def groups(self, n):
        """Return the first `n` parameter groups of the first optimizer; the second one has `head`."""
        layers = [self.stem, self.body], [self.late]
        return [{"params": [p for layer in group for p in layer.parameters()]} for group in layers[:n]]


def sharded(*dims):
    def wrap(net):
        mesh = init_device_mesh("cpu", dims, mesh_dim_names=("replicate", "shard")[-len(dims) :])
        for layer in (net.body, net.late, net):
            fully_shard(layer, mesh=mesh)
        return net

    return wrap


def divided(net):
    """Tensor parallelism; layers outside the plan stay whole on each rank."""
    return parallelize_module(
        net, init_device_mesh("cpu", (2,)), {"body": ColwiseParallel(), "late": RowwiseParallel()}
    )


def divided_and_sharded(net):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    parallelize_module(net, mesh["tensor"], {"body": ColwiseParallel(), "late": RowwiseParallel()})
    for layer in (net.body, net.late, net):
        fully_shard(layer, mesh=mesh["shard"])
    return net


def flattened(use_orig_params):
    def wrap(net):
        for name, layer in [*net.named_children()]:
            setattr(net, name, FSDP(layer, use_orig_params=use_orig_params, device_id=torch.device("cpu")))
        return net

    return wrap


# Number of ranks, how they wrap the model, and how many of them share their data.
KINDS = {
    "DDP": (2, DDP, 1),
    "FSDP2": (2, sharded(2), 1),
    "HSDP": (4, sharded(2, 2), 1),
    "tensor parallel": (2, divided, 2),
    "FSDP2 and tensor parallel": (4, divided_and_sharded, 2),
    "FSDP1": (2, flattened(False), 1),
    "FSDP1 use_orig_params": (2, flattened(True), 1),
}


@contextlib.contextmanager
def without_reducing(model):
    if isinstance(model, DDP):
        with model.no_sync():
            yield
    elif isinstance(model.head, FSDP):
        with contextlib.ExitStack() as stack:
            for layer in model.children():
                stack.enter_context(layer.no_sync())
            yield
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        yield


def trains(rank, kind, devices):
    """Train. Returns the whole parameters, on rank 0 the states of both optimizers, and what each of them says.

    The latter is the committed step, the loss scale, and the bytes pushed in the last step.
    """
    _, wrap, alike = KINDS[kind]
    net = Net()
    model = wrap(net)
    places = [d.format(rank=rank) for d in devices]
    first = CSDAdam(net.groups(1), lr=0.05, devices=places[0], tile_size=1024, max_grad_norm=0.3)
    second = CSDSGD(net.head.parameters(), lr=0.1, momentum=0.9, devices=places[1], tile_size=1024)
    optimizers = first, second
    schedules = [ExponentialLR(optimizer, 0.8) for optimizer in optimizers]
    scaler = GradScaler("cpu", init_scale=256.0)
    for step in range(STEPS):
        if step == JOINS:
            first.add_param_group({**net.groups(2)[1], "lr": 0.01})
        for part in range(2):  # gradients of two batches are accumulated
            torch.manual_seed(100 * step + 10 * part + rank // alike)
            x = torch.randn(4, 6) * (float("inf") if step == OVERFLOW and rank == 1 else 1.0)
            with contextlib.nullcontext() if part else without_reducing(model):
                scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(second)
        if isinstance(net.head, FSDP):
            net.head.clip_grad_norm_(0.1)
        else:
            clip_grad_norm_(net.head.parameters(), 0.1)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            schedule.step()
            optimizer.zero_grad()
    said = []
    for optimizer in optimizers:
        optimizer.synchronize()
        said.append((optimizer.committed_step, scaler.get_scale(), optimizer.stats()["push_bytes"]))
        optimizer.consolidate_state_dict()
    states = [optimizer.state_dict()["state"] for optimizer in optimizers] if rank == 0 else None
    for optimizer in optimizers:
        optimizer.close()
    return whole(model), states, said


def whole(model):
    with FSDP.summon_full_params(model):
        return [p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:lr of group")
def test_wrapped_models_have_the_bits_of_directories(kind, tmp_path):
    size = KINDS[kind][0]
    places = [f"{tmp_path}/{{rank}}-{k}" for k in range(2)]
    own = on_living_ranks(size, trains, kind, places, directory=tmp_path)
    with Owner(tmp_path / "first") as first, Owner(tmp_path / "second") as second:
        theirs = on_living_ranks(size, trains, kind, [first.address, second.address], directory=tmp_path)
    for (ours, _, said), (params, _, also_said) in zip(own, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, params, strict=True))
        assert [*map(tuple, said)] == [*map(tuple, also_said)]
        assert said[0][:2] == (STEPS - 1, 128.0)  # one step was skipped, and the scale was halved
    for ours, states in zip(own[0][1], theirs[0][1], strict=True):
        assert ours.keys() == states.keys()
        for k, entry in ours.items():
            assert all(torch.equal(value, states[k][name]) for name, value in entry.items()), k
