"""Ranks that divide the work on parameters need the same gradients: Local SGD is refused, and nothing else is."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from support.ranks import on_living_ranks
from support.twins import hybrid
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from csd_optim import CSDAdam, push
from csd_optim.errors import CSDRankError

SAMPLED = [1, 2, 4, 8, 16, 32, 48]  # the steps, counted from 1
SHAPES = [(40, 30), (30,), (7, 40), (7,), ()]
BF16 = torch.bfloat16


def noise(shape, *seeds):
    return torch.randn(shape, generator=torch.Generator().manual_seed(hash(seeds)))


def refused_at(optimizer, make_gradients, steps):
    """Take steps. Returns the first one, counted from 1, that is refused; None if none is."""
    for k in range(1, steps + 1):
        make_gradients(k)
        said = None
        try:
            optimizer.step()
        except CSDRankError as e:
            said = str(e)
        if said:
            assert f"different gradients in step {k}:" in said
            assert "Local SGD" in said
            assert "pass sharded=False" in said
            return k
        optimizer.zero_grad()
    return None


# ---- given gradients -----------------------------------------------------------------------------


def given(rank, gradient, steps, dtype=torch.float32, **options):
    """Take steps with `gradient(rank, step, i, shape)` for the i-th parameter."""
    params = [nn.Parameter(noise(shape, i).to(dtype)) for i, shape in enumerate(SHAPES)]

    def make_gradients(k):
        for i, p in enumerate(params):
            p.grad = gradient(rank, k, i, p.shape).to(dtype)

    with CSDAdam(params, **options) as optimizer:
        return refused_at(optimizer, make_gradients, steps)


def own(rank, k, i, shape):
    return noise(shape, k, i, rank)


def shared(rank, k, i, shape):
    return noise(shape, k, i)


def first_are_zero(rank, k, i, shape):
    return own(rank, k, i, shape) * (i > 1)


def one_differs(rank, k, i, shape):
    return (own if i == 3 else shared)(rank, k, i, shape)


def tiny(rank, k, i, shape):
    return 1e-30 * own(rank, k, i, shape)


def huge(rank, k, i, shape):
    return 1e30 * own(rank, k, i, shape)


def nothing_on_one(rank, k, i, shape):
    return shared(rank, k, i, shape) * rank


def sparse_rows(rank, k, i, shape):
    """Few rows of a matrix, as an embedding's, have a gradient, others on each rank; all else has none."""
    found = torch.zeros(shape)
    if i == 0:
        found[rank::4] = own(rank, k, i, found[rank::4].shape)
    return found


def from_third(rank, k, i, shape):
    return (own if k > 2 else shared)(rank, k, i, shape)


def from_seventeenth(rank, k, i, shape):
    return (own if k > 16 else shared)(rank, k, i, shape)


FOUND = [
    (own, {}, 1),
    (own, {"dtype": BF16}, 1),
    (own, {"max_grad_norm": 0.1}, 1),
    (own, {"topk": 0.1}, 1),
    (first_are_zero, {}, 1),
    (one_differs, {}, 1),
    (tiny, {"dtype": BF16}, 1),
    (huge, {}, 1),
    (nothing_on_one, {}, 1),
    (sparse_rows, {}, 1),
    (from_third, {}, 4),
    (from_seventeenth, {}, 32),
]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("gradient", "options", "step"), FOUND, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_gradients_of_its_own_are_found(size, gradient, options, step, tmp_path):
    call = on_living_ranks(size, lists, [(gradient, step, options)], directory=tmp_path)
    assert call == [[step]] * size


def lists(rank, calls):
    return [given(rank, gradient, steps, **options) for gradient, steps, options in calls]


def rounded(rank, k, i, shape):
    """Each value is off by 1 %, on each rank otherwise."""
    return shared(rank, k, i, shape) * (1 + 0.01 * noise(shape, k, i, rank, 0))


def tiny_and_rounded(rank, k, i, shape):
    return 1e-33 * rounded(rank, k, i, shape)


def near_zero(rank, k, i, shape):
    """Near zero after cancelling out, values have random signs on each rank: all of parameter 1, part of the rest."""
    values = shared(rank, k, i, shape)
    small = 1e-2 * own(rank, k, i, shape)
    return small if i == 1 else torch.where(values.abs() < 0.3, small, values)


def subnormal(rank, k, i, shape):
    """In fp16 all of them are smaller than the smallest normal number, and rounding is as large as they are."""
    return 1e-7 * own(rank, k, i, shape)


def zero(rank, k, i, shape):
    return torch.zeros(shape)


def no_number(rank, k, i, shape):
    found = own(rank, k, i, shape)
    found[...] = found if i else [torch.nan, torch.inf][rank % 2]
    return found


SILENT = [
    (shared, {}),
    (shared, {"max_grad_norm": 0.1}),
    (shared, {"topk": 0.1}),
    (shared, {"state_dtype": "8bit"}),
    (rounded, {}),
    (rounded, {"dtype": BF16}),
    (tiny_and_rounded, {"dtype": BF16}),
    (near_zero, {"dtype": BF16}),
    (subnormal, {"dtype": torch.float16}),
    (zero, {}),
    (no_number, {}),
    (own, {"sharded": False}),
    (own, {"sharded": False, "max_grad_norm": 0.1}),
]


@pytest.mark.fp32_states("one of them sets 8-bit states")
def test_what_is_the_same_but_for_rounding(tmp_path):
    for size, steps in (2, 9), (3, 4):
        calls = [(gradient, steps, options) for gradient, options in SILENT]
        assert on_living_ranks(size, lists, calls, directory=tmp_path) == [[None] * len(calls)] * size


def changes_nothing(rank, named):
    """A step that is refused is refused again, and goes on with the right gradients as if nothing had been."""
    seen = []
    for refuses in True, False:
        params = [nn.Parameter(noise(shape, i)) for i, shape in enumerate(SHAPES)]
        with CSDAdam(params, devices=f"{refuses}-{rank}" if named else None) as optimizer:
            for k in range(1, 6):
                if refuses and k in SAMPLED:
                    before = [p.detach().clone() for p in params]
                    for _ in range(2):
                        for i, p in enumerate(params):
                            p.grad = own(rank, k, i, p.shape)
                        with pytest.raises(CSDRankError, match="different gradients"):
                            optimizer.step()
                    assert all(map(torch.equal, params, before))
                for i, p in enumerate(params):
                    p.grad = shared(rank, k, i, p.shape)
                optimizer.step()
            seen.append([p.detach().clone() for p in params])
    assert all(map(torch.equal, *seen))


@pytest.mark.parametrize("named", [False, True])
def test_a_refused_step_has_changed_nothing(named, tmp_path):
    on_living_ranks(2, changes_nothing, named, directory=tmp_path)


def groups_of_their_own(rank):
    """Each rank trains a model of its own, which begins as the others'; or two of them train one together."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    of_pair = given(rank // 2, own, 4, process_group=pair)
    return given(rank, own, 4, process_group=alone), of_pair, given(rank, own, 4, process_group=pair)


def test_process_groups(tmp_path):
    assert on_living_ranks(4, groups_of_their_own, directory=tmp_path) == [(None, None, 1)] * 4


# ---- trainings -----------------------------------------------------------------------------------


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def loss_of(model, rank, k):
    return model(noise((4, 16), k, rank)).square().sum()


def training(rank, kind, steps, **options):
    """Train a model of a kind, with data of each rank's own. Returns the first step that is refused, or None."""
    model, backward = KINDS[kind](net(), rank)
    optimizer = CSDAdam(model.parameters(), **options)
    if kind == "DDP, csd_optim.push":
        model.register_comm_hook(optimizer, push)
    with optimizer:
        return refused_at(optimizer, lambda k: backward(model, k), steps)


def ddp(hook=None, state=None, make=DDP):
    def wraps(model, rank):
        model = make(model)
        if hook:
            model.register_comm_hook(state() if state else None, hook)
        return model, lambda model, k: loss_of(model, rank, k).backward()

    return wraps


def accumulates(model, rank):
    def backward(model, k):
        with model.no_sync():
            loss_of(model, rank, 100 * k).backward()
        loss_of(model, rank, k).backward()

    return DDP(model), backward


def never_synchronizes(model, rank):
    def backward(model, k):
        with model.no_sync() if k > 4 else contextlib.nullcontext():
            loss_of(model, rank, k).backward()

    return DDP(model), backward


def clips(model, rank):
    def backward(model, k):
        loss_of(model, rank, k).backward()
        clip_grad_norm_(model.parameters(), 0.1)

    return DDP(model), backward


def empty_on_one_rank(model, rank):
    def backward(model, k):
        model(noise((4 * (rank != k % 2), 16), k, rank)).square().sum().backward()

    return DDP(model), backward


def head_is_forgotten(model, rank):
    """DDP has only a part of the model."""
    model[0] = DDP(model[0])
    return model, lambda model, k: loss_of(model, rank, k).backward()


def fsdp2(model, rank):
    return fully_shard(model), lambda model, k: loss_of(model, rank, k).backward()


def hsdp(model, rank):
    def backward(model, k):
        model.set_requires_all_reduce(False)
        loss_of(model, rank, 100 * k).backward()
        model.set_requires_all_reduce(True)
        loss_of(model, rank, k).backward()

    return hybrid(model), backward


def shards(differ):
    """Two replicas of a model of DTensors. `differ`: their gradients do."""

    def wraps(model, rank):
        mesh = init_device_mesh("cpu", (2, 2))
        for layer in model:
            for name, p in [*layer.named_parameters()]:
                setattr(layer, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate(), Shard(0)])))
        of = (rank if differ else rank % 2,)

        def backward(model, k):
            for i, p in enumerate(model.parameters()):
                local = noise(p.to_local().shape, k, i, *of)
                p.grad = DTensor.from_local(local, mesh, p.placements, run_check=False)

        return model, backward

    return wraps


def tensor_parallel(model, rank):
    """Ranks have the same data; of one layer no parameter is divided."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model.append(nn.LayerNorm(16))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, lambda model, k: loss_of(model, 0, k).backward()


def bf16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.bf16_compress_hook(state, bucket)  # itself DDP takes on GPUs only


def local_from_fifth():
    return PostLocalSGDState(None, None, start_localSGD_iter=5, post_local_gradient_allreduce=False)


def power_sgd():
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)


KINDS = {
    "DDP": ddp(),
    "DDP, views": ddp(make=lambda model: DDP(model, gradient_as_bucket_view=True)),
    "DDP, fp16": ddp(default_hooks.fp16_compress_hook),
    "DDP, bf16": ddp(bf16),
    "DDP, PowerSGD": ddp(powerSGD_hook.powerSGD_hook, power_sgd),
    "DDP, csd_optim.push": ddp(),
    "accumulates": accumulates,
    "clips": clips,
    "empty on one rank": empty_on_one_rank,
    "FSDP2": fsdp2,
    "HSDP": hsdp,
    "replicas of shards": shards(differ=False),
    "tensor parallelism": tensor_parallel,
    "plain": lambda model, rank: (model, lambda model, k: loss_of(model, rank, k).backward()),
    "post-local SGD's hook": ddp(post_localSGD_hook, local_from_fifth),
    "no all-reduce": ddp(noop_hook),
    "never synchronizes": never_synchronizes,
    "the head is forgotten": head_is_forgotten,
    "replicas of shards, each for itself": shards(differ=True),
}
FIRST_REFUSED = {
    "plain": 1,
    "post-local SGD's hook": 8,
    "no all-reduce": 1,
    "never synchronizes": 8,
    "the head is forgotten": 1,
    "replicas of shards, each for itself": 1,
}


@pytest.mark.parametrize("kind", KINDS)
def test_trainings(kind, tmp_path):
    size, step = 4 if "HSDP" in kind or "shards" in kind else 2, FIRST_REFUSED.get(kind)
    assert on_living_ranks(size, training, kind, step or 9, directory=tmp_path) == [step] * size


@pytest.mark.parametrize("kind", ["DDP", "DDP, csd_optim.push", "plain"])
def test_they_are_clipped(kind, tmp_path):
    step = FIRST_REFUSED.get(kind)
    trains = on_living_ranks(2, clipped, kind, directory=tmp_path)
    assert trains == [step] * 2


def clipped(rank, kind):
    return training(rank, kind, 5, max_grad_norm=0.1)


def overlaps(rank, kind, options):
    model, backward = KINDS[kind](net(), rank)
    optimizer = CSDAdam(model.parameters())
    if kind == "DDP, csd_optim.push":
        model.register_comm_hook(optimizer, push)
    with optimizer:
        optimizer.overlap(model, **options)
        return refused_at(optimizer, lambda k: backward(model, k), 9)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("DDP", {}),
        ("DDP, csd_optim.push", {"backward": True}),
        ("HSDP", {"backward": True}),
        ("plain", {}),
        ("plain", {"backward": True}),
        ("never synchronizes", {}),
    ],
    ids=str,
)
def test_overlap(kind, options, tmp_path):
    size, step = 4 if "HSDP" in kind else 2, FIRST_REFUSED.get(kind)
    assert on_living_ranks(size, overlaps, kind, options, directory=tmp_path) == [step] * size


def scales(rank):
    """On one rank alone a gradient overflows in a step that would be sampled; all of them skip it."""
    model = DDP(net())
    with CSDAdam(model.parameters()) as optimizer:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        for k in range(1, 6):
            scaler.scale(loss_of(model, rank, k)).backward()
            if k == 2 and rank == 0:
                model.module[0].weight.grad.mul_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert optimizer.stats()["skipped"] == (k == 2)


def test_a_grad_scaler(tmp_path):
    on_living_ranks(2, scales, directory=tmp_path)


def joins(rank):
    model = DDP(net())
    with CSDAdam(model.parameters()) as optimizer:
        with Join([model, optimizer]):
            for k in range(2 + 4 * rank):
                loss_of(model, rank, k).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]


def test_join(tmp_path):
    ranks = on_living_ranks(3, joins, directory=tmp_path)
    for other in ranks[1:]:
        assert all(map(torch.equal, ranks[0], other))


def post_local_sgd(rank, make, options, dtype):
    model = net().to(dtype)
    inner = make(model.parameters(), lr=1e-2, **options)
    optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=4, warmup_steps=0))
    for k in range(10):
        optimizer.zero_grad()
        model(noise((4, 16), k, rank).to(dtype)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def local_sgd(rank, dtype):
    with pytest.raises(CSDRankError, match="PostLocalSGDOptimizer"):
        post_local_sgd(rank, CSDAdam, {}, dtype)
    found = post_local_sgd(rank, CSDAdam, {"sharded": False}, dtype)
    wanted = post_local_sgd(rank, AdamW, {}, dtype)
    for p, q in zip(found, wanted, strict=True):
        assert (p - q).norm() <= (1e-5 if dtype is torch.float32 else 0.05) * q.norm()
    return found


@pytest.mark.fp32_states("compares with AdamW")
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_local_sgd_with_what_the_error_says(dtype, tmp_path):
    """bf16: AdamW rounds its parameters in each step, CSDAdam does not."""
    ranks = on_living_ranks(2, local_sgd, dtype, directory=tmp_path)
    assert not torch.equal(ranks[0][0], ranks[1][0])  # since the average of the ninth step
