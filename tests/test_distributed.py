"""On several ranks: DDP with its states shared out, FSDP, DTensors. The oracle is AdamW on the same ranks."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from csd_optim import CSDAdam

TILE = 1024  # the smallest
STEPS = 4
ARGS = {"lr": 0.02, "weight_decay": 0.1}


class Net(nn.Module):
    """Awkward on purpose: parameters with fewer rows than ranks, without rows, 0-dim, 4-dim, in several tiles."""

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
    """`used`: without the parameter that gets no gradient."""
    torch.manual_seed(3)
    model = Net(hidden, scalar)
    if used:
        del model.unused
    return model


def data(rank, size, step, n=4):
    """The part of a batch that a rank sees; on all ranks together always the same."""
    torch.manual_seed(100 + step)
    x, y = torch.randn(n * 4, 3, 4, 4), torch.randint(0, 3, (n * 4,))
    return x.chunk(size)[rank], y.chunk(size)[rank]


def loss_of(model, rank, size, step):
    x, y = data(rank, size, step)
    return nn.functional.cross_entropy(model(x), y)


def train(model, optimizer, rank=0, size=1, steps=range(STEPS), clip=None):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, size, step).backward()
        if clip:
            clip(optimizer)
        optimizer.step()


def states(optimizer, params):
    """What `state` says of each parameter: as plain tensors, whole."""
    return [
        {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in optimizer.state[p].items()}
        for p in params
    ]


def assert_like_adamw(params, held, wanted):
    """AdamW on the same ranks gets the same gradients, and rounds otherwise."""
    for p, state, q, of_q in zip(params, held, *wanted, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-7)
        assert {*of_q} <= {*state}
        for key, value in of_q.items():
            torch.testing.assert_close(state[key], value, rtol=2e-6, atol=1e-8)


# ---- DDP -------------------------------------------------------------------------------


def ddp():
    return DDP(net(), find_unused_parameters=True)


def ddp_trains(rank, size, devices):
    reference, model = ddp(), ddp()
    oracle = AdamW(reference.parameters(), **ARGS)
    train(reference, oracle, rank, size)
    with CSDAdam(model.parameters(), **ARGS, tile_size=TILE, devices=devices) as optimizer:
        train(model, optimizer, rank, size)
        params = [p.detach() for p in model.parameters()]
        wanted = [p.detach() for p in reference.parameters()], states(oracle, reference.parameters())
        assert_like_adamw(params, states(optimizer, model.parameters()), wanted)
        own = sum(w.to_local().numel() for s in optimizer.state.values() if isinstance(w := s.get("exp_avg"), DTensor))
        return params, own, optimizer.stats()


@pytest.mark.parametrize("devices", ["file:", "ram:", ["ram:", "file:"], "named"])
@pytest.mark.parametrize("size", [2, 3])
def test_ddp(size, devices, tmp_path):
    devices = ["csd{rank}-0", "csd{rank}-1"] if devices == "named" else devices
    ranks = on_ranks(size, ddp_trains, size, devices, directory=tmp_path)
    params = ranks[0][0]
    for others, _, _ in ranks[1:]:
        assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    total = sum(p.numel() for p in net().parameters()) - 9 * 2 - 1  # no gradient; 0-dim, and kept by every rank
    assert sum(own for _, own, _ in ranks) == total
    assert max(own for _, own, _ in ranks) < total * 0.7


def ddp_accumulates(rank, size, options, accumulation):
    models = [DDP(net(used=True), **options) for _ in range(2)]
    with CSDAdam(models[0].parameters(), **ARGS, tile_size=TILE, devices="file:") as optimizer:
        for model, o in zip(models, (optimizer, AdamW(models[1].parameters(), **ARGS)), strict=True):
            for step in range(accumulation * STEPS):
                whole = step % accumulation == accumulation - 1
                with contextlib.nullcontext() if whole else model.no_sync():
                    loss_of(model, rank, size, step).backward()
                if whole:
                    o.step()
                    o.zero_grad()
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-7)
        return [p.detach() for p in models[0].parameters()]


@pytest.mark.parametrize(
    ("options", "accumulation"), [({"static_graph": True}, 1), ({"gradient_as_bucket_view": True}, 3)]
)
def test_ddp_with_a_static_graph_and_with_no_sync(options, accumulation, tmp_path):
    ranks = on_ranks(2, ddp_accumulates, 2, options, accumulation, directory=tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(*ranks, strict=True))


# ---- Replicas of any kind, without DDP -----------------------------------------------------


def odd_parameters():
    """fp32, bf16, fp16, complex; fewer rows than ranks, none, 0-dim; orders of memory in which rows are not dense."""
    torch.manual_seed(5)
    shapes = [(), (1,), (2,), (0, 3), (700,), (5, 1), (37, 41), (1, 3000)]
    made = [torch.randn(s) for s in shapes]
    made += [torch.randn(400).to(torch.bfloat16), torch.randn(33, 7).half(), torch.randn(5, 3, dtype=torch.complex64)]
    made += [torch.randn(7, 5).t(), torch.randn(9, 4, 3, 3).to(memory_format=torch.channels_last)]
    made += [torch.randn(6, 8).to(torch.bfloat16).t(), torch.randn(4, 6)[:, ::2]]
    return [nn.Parameter(t) for t in made]


def random_gradients(params, step, skip=()):
    for k, p in enumerate(params):
        torch.manual_seed(1000 * step + k)
        p.grad = None if k in skip else torch.randn_like(p)


def take(optimizer, params, steps, skip=lambda step: ()):
    for step in steps:
        random_gradients(params, step, skip(step))
        optimizer.step()


def assert_same(params, others, optimizer, other):
    """Of the optimizers, the first is sharded, and the other is not. The same bits."""
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q), p.shape
    for state, of_q in zip(states(optimizer, params), states(other, others), strict=True):
        assert {*state} == {*of_q}
        for key, value in of_q.items():
            assert torch.equal(state[key], value), key


def shares_or_not(rank, size, options, bucket):
    from csd_optim import gather

    gather.BUCKET_BYTES = bucket
    params, others = odd_parameters(), odd_parameters()
    with (
        CSDAdam(params, **ARGS, tile_size=TILE, **options) as optimizer,
        CSDAdam(others, **ARGS, tile_size=TILE, devices="file:", sharded=False, **options) as other,
    ):
        skip = lambda step: (3, 6, 9) if step == 2 else ()  # noqa: E731
        take(optimizer, params, range(STEPS), skip)
        take(other, others, range(STEPS), skip)
        assert_same(params, others, optimizer, other)
        with torch.no_grad():
            for p, q in zip(params, others, strict=True):  # from outside, on all ranks
                p.mul_(1.5)
                q.mul_(1.5)
        take(optimizer, params, [9])
        take(other, others, [9])
        assert_same(params, others, optimizer, other)
        counted = optimizer.stats()
        assert counted["params"] < other.stats()["params"]
        return counted["gathered_bytes"]


@pytest.mark.parametrize("bucket", [1 << 13, 1 << 24], ids=["many buckets", "one bucket"])
@pytest.mark.parametrize(
    "options",
    [{}, {"grad_dtype": torch.bfloat16}, {"amsgrad": True}, {"max_grad_norm": 0.5}, {"maximize": True}],
    ids=lambda options: "".join(options) or "plain",
)
@pytest.mark.parametrize("size", [2, 4])
def test_sharing_changes_no_bit(size, options, bucket, tmp_path):
    """With grad_dtype some tiles travel by images."""
    on_ranks(size, shares_or_not, size, options, bucket, directory=tmp_path)


# ---- FSDP, tensor parallelism ------------------------------------------------------------------


def fsdp1(use_orig_params):
    return FSDP(net(scalar=False), use_orig_params=use_orig_params, device_id=torch.device("cpu"))


def fsdp2(**options):
    model = net(scalar=False)
    model.empty = nn.Parameter(torch.zeros(2, 4))  # FSDP2 knows none without elements
    for part in (model.big, model):
        fully_shard(part, **options)
    return model


def hybrid():
    """Replicated over pairs of ranks, sharded within them."""
    return fsdp2(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


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


def whole(tensors):
    return [t.full_tensor() if isinstance(t, DTensor) else t.detach().clone() for t in tensors]


def clip_gradients(model, norm):
    if isinstance(model, FSDP):
        return model.clip_grad_norm_(norm)
    if {type(p) for p in model.parameters()} != {DTensor, nn.Parameter}:
        return clip_grad_norm_(model.parameters(), norm)
    # torch refuses a mixture
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    total = torch.linalg.vector_norm(torch.stack([g.norm() for g in whole(grads)]))
    for g in grads:
        g.mul_(min(1.0, norm / (total.item() + 1e-6)))
    return total


def sharded_trains(rank, size, kind, clip, options):
    reference, model = MODELS[kind](), MODELS[kind]()
    oracle = AdamW(reference.parameters(), **ARGS)
    options = {"devices": "csd{rank}", **options}
    with CSDAdam(model.parameters(), **ARGS, tile_size=TILE, **options) as optimizer:
        tensor = kind == "tensor parallel"  # all ranks see the same data
        for m, o in ((reference, oracle), (model, optimizer)):
            for step in range(STEPS):
                o.zero_grad()
                loss_of(m, 0 if tensor else rank, 1 if tensor else size, step).backward()
                if clip and (o is oracle or clip != "max_grad_norm"):
                    clip_gradients(m, 0.1)
                o.step()
        wanted = whole(reference.parameters()), states(oracle, reference.parameters())
        assert_like_adamw(whole(model.parameters()), states(optimizer, model.parameters()), wanted)
        for p in model.parameters():
            if isinstance(p, DTensor) and optimizer.state[p]:
                assert optimizer.state[p]["exp_avg"].placements == p.placements
                assert optimizer.state[p]["master"].shape == p.shape
        return whole(model.parameters())


@pytest.mark.parametrize("clip", [None, "clip_grad_norm_", "max_grad_norm"])
@pytest.mark.parametrize("kind", MODELS)
def test_sharded_models(kind, clip, tmp_path):
    size = 4 if kind == "hybrid" else 3
    options = {"max_grad_norm": 0.1} if clip == "max_grad_norm" else {}
    on_ranks(size, sharded_trains, size, kind, clip, options, directory=tmp_path)
