"""A model on several ranks with its optimizer, for owners and for the directories that they are compared with."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from csd_optim import CSDAdam


class Net:
    """A model on several ranks, and its optimizer. Inputs depend on the step and the rank."""

    def __init__(self, rank, devices, wrap="DDP", overlap=None, **options):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 4))
        if wrap == "DDP":
            model = DDP(model)
        elif wrap == "TP":
            parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        else:
            shape = (2, 2) if wrap == "HSDP" else (dist.get_world_size(),)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
            for part in (*model, model):
                fully_shard(part, mesh=mesh)
        self.model, self.rank, self.same = model, rank, wrap == "TP"
        self.opt = CSDAdam(model.parameters(), lr=0.01, devices=devices, tile_size=1024, **options)
        if overlap is not None:
            self.opt.overlap(model, **overlap)
        self.done = self.opt.user_state.get("done", 0)

    def step(self):
        generator = torch.Generator().manual_seed(100 * self.done + (0 if self.same else self.rank))
        self.opt.zero_grad()  # those of a step that has failed
        self.model(torch.randn(6, 40, generator=generator)).square().sum().backward()
        self.opt.user_state = {"done": self.done + 1}
        self.opt.step()
        self.done += 1

    def until(self, step):
        while self.done < step:
            self.step()
        return self

    def image(self):
        self.opt.wait()
        tensors = [*self.model.parameters()]
        tensors += [t for p in self.model.parameters() for t in self.opt.state[p].values()]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return [t.detach().clone() for t in local]


def assert_equal(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
