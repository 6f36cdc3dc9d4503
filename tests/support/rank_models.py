"""Models and parameters for training on several ranks: with FSDP, tensor parallelism, or none of them."""

import torch
import torch.distributed as dist
from support.optimizers import ADAMW, FULL
from support.states import assumed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

TILE = 1024  # elements: the smallest tile


STEPS = 3


ARGS = {"lr": 0.02, "weight_decay": 0.1}


OF = {of.name: of for of in (ADAMW, *FULL)}  # by name, as ranks are other processes


OTHERS = [of.name for of in FULL]


class Net(nn.Module):
    """An awkward model: parameters with fewer rows than ranks, without rows, 0-dim, 4-dim, in several tiles."""

    def __init__(self, hidden, scalar):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.big = nn.Linear(5 * 16, hidden)
        self.last = nn.Linear(hidden, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5 if scalar else [1.5]))
        self.unused = nn.Parameter(torch.randn(9, 2))
        self.empty = nn.Parameter(torch.randn(0, 4))

    def forward(self, x):
        x = torch.relu(self.conv(x)).flatten(1)
        return self.last(torch.tanh(self.big(x))) * self.scale + 0 * self.empty.sum()


def net(used=False, hidden=67, scalar=True):
    """A Net. `used`: without the parameter that gets no gradient."""
    torch.manual_seed(3)
    model = Net(hidden, scalar)
    if used:
        del model.unused
    return model


def data(rank, size, step, n=4):
    """The part of a batch for one rank. The whole batch does not depend on the number of ranks."""
    torch.manual_seed(100 + step)
    x, y = torch.randn(n * 4, 3, 4, 4), torch.randint(0, 3, (n * 4,))
    return x.chunk(size)[rank], y.chunk(size)[rank]


def loss_of(model, rank, size, step):
    x, y = data(rank, size, step)
    return nn.functional.cross_entropy(model(x), y)


def train_model(model, optimizer, rank=0, size=1, steps=range(STEPS)):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, size, step).backward()
        optimizer.step()


def odd_parameters(state_dtype=None):
    """fp32, bf16, fp16, complex; fewer rows than ranks, none, 0-dim; memory orders in which rows are not contiguous."""
    torch.manual_seed(5)
    shapes = [(), (1,), (2,), (0, 3), (700,), (5, 1), (37, 41), (1, 3000)]
    made = [torch.randn(s) for s in shapes]
    made += [torch.randn(400).to(torch.bfloat16), torch.randn(33, 7).half(), torch.randn(5, 3, dtype=torch.complex64)]
    made += [torch.randn(9, 4, 3, 3).to(memory_format=torch.channels_last), torch.randn(4, 6)[:, ::2]]
    # Random rounding of 8-bit states depends on an element's place in memory: a share of rows has to be contiguous.
    if (state_dtype or assumed()) == "fp32":
        made += [torch.randn(7, 5).t(), torch.randn(6, 8).to(torch.bfloat16).t()]
    return [nn.Parameter(t) for t in made]


def random_gradients(params, step, skip=()):
    for k, p in enumerate(params):
        torch.manual_seed(1000 * step + k)
        p.grad = None if k in skip else torch.randn_like(p)


def take(optimizer, params, steps, skip=lambda step: ()):
    for step in steps:
        random_gradients(params, step, skip(step))
        optimizer.step()


def whole(tensors):
    return [t.full_tensor() if isinstance(t, DTensor) else t.detach().clone() for t in tensors]


def states(optimizer, params):
    """The states of each parameter, as plain and whole tensors."""
    return [
        {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in optimizer.state[p].items()}
        for p in params
    ]


def everything(optimizer, params):
    return [p.detach().clone() for p in params], [
        {k: (v.to_local() if isinstance(v, DTensor) else v).clone() for k, v in optimizer.state.get(p, {}).items()}
        for p in params
    ]


def assert_everything_is(found, wanted):
    for p, q in zip(found[0], wanted[0], strict=True):
        assert torch.equal(p, q), (p.shape, p.stride(), p.dtype, (p != q).nonzero().tolist()[:40])
    for state, of_q in zip(found[1], wanted[1], strict=True):
        assert {*state} == {*of_q}
        for key in state:
            assert torch.equal(state[key], of_q[key]), (key, state[key], of_q[key])


def fsdp1(use_orig_params):
    return FSDP(net(scalar=False), use_orig_params=use_orig_params, device_id=torch.device("cpu"))


def fsdp2(used=False, **options):
    model = net(used, scalar=False)
    model.empty = nn.Parameter(torch.zeros(2, 4))  # FSDP2 does not support parameters without elements
    for part in (model.big, model):
        fully_shard(part, **options)
    return model


def hybrid(used=False):
    """HSDP: replicated over pairs of ranks, sharded within a pair."""
    return fsdp2(used, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def tensor_parallel():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = net(hidden=66)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"big": ColwiseParallel(), "last": RowwiseParallel()})


MODELS = {
    "FSDP1": lambda: fsdp1(False),
    "FSDP1 use_orig_params": lambda: fsdp1(True),
    "FSDP2": fsdp2,
    "FSDP2 bf16": lambda: fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    "hybrid": hybrid,
    "tensor parallel": tensor_parallel,
}
