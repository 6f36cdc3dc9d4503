"""Training on several ranks: DDP with sharded states, FSDP, DTensors. Oracle: AdamW on the same ranks."""

import contextlib
import errno
import io
import itertools
import os
import signal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from support.comparing import assert_same
from support.inside import engine_of
from support.owners import Owner
from support.rank_models import (
    ARGS,
    MODELS,
    OF,
    OTHERS,
    STEPS,
    TILE,
    assert_everything_is,
    everything,
    fsdp2,
    hybrid,
    loss_of,
    net,
    odd_parameters,
    random_gradients,
    states,
    take,
    train_model,
    whole,
)
from support.ranks import KILLED, on_living_ranks, on_ranks
from support.replacing import raised_by, replaced
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

import csd_optim.step.resources
from csd_optim import CSDAdam
from csd_optim.distributed.ranks import Ranks
from csd_optim.distributed.sharding import ReplicaShard
from csd_optim.errors import CSDOSError, CSDRankError, CSDTypeError

# How far two optimizers with the same gradients may be apart, relative to the largest element: on both sides an element
# is rounded some five times per step, each time by at most 2⁻²⁴ of its magnitude.
OFF = 2 * 5 * STEPS * 2.0**-24


def gradients_of(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def take_gradients(reference, gradients, off=1e-3):
    """Give the reference the gradients of the other model, after comparing them with its own.

    The parameters of the two differ in their last bits, and so do the gradients. Optimizers divide a gradient by its
    magnitude: one that nearly cancels out would move a parameter by up to `lr` in either direction, depending on how
    the CPU rounds. `off`: by how much of the largest one gradients may differ. Wrong parameters would change them by
    far more, as a step moves each by 0.02 and most are below 0.2.
    """
    for q, gradient in zip(reference.parameters(), gradients, strict=True):
        assert (gradient is None) == (q.grad is None)
        if gradient is not None:
            assert_near(*whole([gradient, q.grad]), off)
            q.grad.copy_(gradient)


def assert_like_torch(params, held, wanted):
    """Asserts equality up to rounding with torch's optimizer on the same ranks, given the same gradients."""
    for p, state, q, of_q in zip(params, held, *wanted, strict=True):
        assert_near(p, q, OFF)
        if not state:  # torch's Adagrad creates states in its constructor
            assert of_q.get("step", 0) == 0
            continue
        assert {*of_q} <= {*state}
        for key, value in of_q.items():
            assert_near(state[key], value, OFF)


def assert_near(found, wanted, off):
    """Asserts that no element is off by more than this part of the largest magnitude."""
    assert found.shape == wanted.shape
    if wanted.numel():
        assert (found.double() - wanted.double()).abs().max() <= off * wanted.double().abs().max()


# ---- DDP -------------------------------------------------------------------------------


def ddp():
    return DDP(net(), find_unused_parameters=True)


def train_beside(model, optimizer, reference, oracle, rank, size):
    for step in range(STEPS):
        for m, o in ((reference, oracle), (model, optimizer)):
            o.zero_grad()
            loss_of(m, rank, size, step).backward()
        take_gradients(reference, gradients_of(model))
        oracle.step()
        optimizer.step()


def ddp_trains(rank, size, devices, name):
    of, reference, model = OF[name], ddp(), ddp()
    oracle = of.reference(reference.parameters(), **{**ARGS, **of.kwargs})
    with of.ours(model.parameters(), **{**ARGS, **of.kwargs}, tile_size=TILE, devices=devices) as optimizer:
        train_beside(model, optimizer, reference, oracle, rank, size)
        params = [p.detach() for p in model.parameters()]
        wanted = [p.detach() for p in reference.parameters()], states(oracle, reference.parameters())
        assert_like_torch(params, states(optimizer, model.parameters()), wanted)
        first = of.rule.sections[1]
        own = sum(w.to_local().numel() for s in optimizer.state.values() if isinstance(w := s.get(first), DTensor))
        return params, own, optimizer.stats()


@pytest.mark.parametrize(
    ("size", "devices", "name"),
    [
        *itertools.product([2, 3], ["file:", "ram:", ["ram:", "file:"], "named"], ["CSDAdam"]),
        *((2, "named", name) for name in OTHERS),
    ],
)
@pytest.mark.fp32_states("compares with torch to its last bits")
def test_ddp(size, devices, name, tmp_path):
    devices = ["csd{rank}-0", "csd{rank}-1"] if devices == "named" else devices
    ranks = on_living_ranks(size, ddp_trains, size, devices, name, directory=tmp_path)
    params = ranks[0][0]
    for others, _, _ in ranks[1:]:
        assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    total = sum(p.numel() for p in net().parameters()) - 9 * 2 - 1  # without gradient; 0-dim, not sharded
    assert sum(own for _, own, _ in ranks) == total
    assert max(own for _, own, _ in ranks) < total * 0.7


def ddp_accumulates(rank, size, options, accumulation):
    models = [DDP(net(used=True), **options) for _ in range(2)]
    with CSDAdam(models[0].parameters(), **ARGS, tile_size=TILE, devices="file:") as optimizer:
        oracle = AdamW(models[1].parameters(), **ARGS)
        for step in range(accumulation * STEPS):
            whole = step % accumulation == accumulation - 1
            for model in models:
                with contextlib.nullcontext() if whole else model.no_sync():
                    loss_of(model, rank, size, step).backward()
            if whole:
                take_gradients(models[1], gradients_of(models[0]))
                for o in (optimizer, oracle):
                    o.step()
                    o.zero_grad()
        wanted = [p.detach() for p in models[1].parameters()], states(oracle, models[1].parameters())
        assert_like_torch(models[0].parameters(), states(optimizer, models[0].parameters()), wanted)
        return [p.detach() for p in models[0].parameters()]


@pytest.mark.parametrize(
    ("options", "accumulation"), [({"static_graph": True}, 1), ({"gradient_as_bucket_view": True}, 3)]
)
@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_ddp_with_a_static_graph_and_with_no_sync(options, accumulation, tmp_path):
    ranks = on_living_ranks(2, ddp_accumulates, 2, options, accumulation, directory=tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(*ranks, strict=True))


# ---- Replicas of any kind, without DDP -----------------------------------------------------


def assert_same_whole(params, others, optimizer, other):
    """Asserts the same bits. The first optimizer is sharded; the other is not, or in the same way."""
    assert_same(whole(params), whole(others))
    assert_same(states(optimizer, params), states(other, others))


def shares_or_not(rank, size, options, bucket):
    params, others = (odd_parameters(options.get("state_dtype")) for _ in range(2))
    with (
        mock.patch("csd_optim.distributed.buckets.BUCKET_BYTES", bucket),
        CSDAdam(params, **ARGS, tile_size=TILE, **options) as optimizer,
        CSDAdam(others, **ARGS, tile_size=TILE, devices="file:", sharded=False, **options) as other,
    ):
        skip = lambda step: (3, 6, 9) if step == 2 else ()  # noqa: E731
        take(optimizer, params, range(STEPS), skip)
        take(other, others, range(STEPS), skip)
        assert_same_whole(params, others, optimizer, other)
        with torch.no_grad():
            for p, q in zip(params, others, strict=True):  # writes from outside, on all ranks
                p.mul_(1.5)
                q.mul_(1.5)
        take(optimizer, params, [9])
        take(other, others, [9])
        assert_same_whole(params, others, optimizer, other)
        counted = optimizer.stats()
        assert counted["params"] < other.stats()["params"]
        return counted["gathered_bytes"]


SHARED = [
    {},
    {"grad_dtype": torch.bfloat16},
    {"amsgrad": True},
    {"max_grad_norm": 0.5},
    {"maximize": True},
    {"state_dtype": "8bit"},
]


@pytest.mark.parametrize(
    ("size", "options", "bucket"),
    [
        pytest.param(
            *(size, options, bucket),
            id=f"{size}-{''.join(options) or 'plain'}-{'many buckets' if bucket == 1 << 13 else 'one bucket'}",
            marks=[pytest.mark.soak] * ((i + j + k) % 2),  # without soak still all pairs of values
        )
        for i, size in enumerate([2, 4])
        for j, options in enumerate(SHARED)
        for k, bucket in enumerate([1 << 13, 1 << 24])
    ],
)
def test_sharing_changes_no_bit(size, options, bucket, tmp_path):
    """With grad_dtype some tiles travel by images."""
    on_living_ranks(size, shares_or_not, size, options, bucket, directory=tmp_path)


def selects(rank, size, feedback):
    """Shares of whole tiles select the same entries. Residuals are rounded differently, depending on their place."""
    params, others = ([nn.Parameter(torch.zeros(size * TILE // 4, 16)) for _ in range(2)] for _ in range(2))
    topk = {"topk": 0.05, "error_feedback": feedback, "tile_size": TILE}
    with (
        CSDAdam(params, **ARGS, **topk, devices="csd{rank}") as optimizer,
        CSDAdam(others, **ARGS, **topk, devices="file:", sharded=False) as other,
    ):
        for step in range(STEPS):
            take(optimizer, params, [step])
            take(other, others, [step])
            if not feedback or step == 0:
                for p, q in zip(params, others, strict=True):
                    assert torch.equal(p, q)
        owed = [o.state[p].get("residual") for o, p in ((optimizer, params[0]), (other, others[0]))]
        if feedback:
            assert isinstance(owed[0], DTensor)
            same = torch.isclose(owed[0].full_tensor().float(), owed[1].float(), rtol=0.1, atol=0.02)
            assert same.float().mean() > 0.99
        else:
            assert owed == [None, None]
        return [p.detach() for p in params]


@pytest.mark.parametrize("feedback", [False, True])
def test_topk_of_shares(feedback, tmp_path):
    for p, q in zip(*on_living_ranks(2, selects, 2, feedback, directory=tmp_path), strict=True):
        assert torch.equal(p, q)


# ---- FSDP, tensor parallelism ------------------------------------------------------------------


def on_a_mesh_of_gpus(rank):
    """Parameters as FSDP2 creates them with CPUOffloadPolicy on GPUs: states must stay on the host, too."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
    like = DTensor.from_local(torch.ones(3, 4, device="meta"), mesh, [Shard(0)], run_check=False)
    p = nn.Parameter(DTensor(torch.ones(3, 4), like._spec, requires_grad=False))
    p.grad = DTensor(torch.full((3, 4), 2.0), like._spec, requires_grad=False)
    with CSDAdam([p], lr=0.1, weight_decay=0, devices="csd{rank}") as optimizer:
        optimizer.step()
        held = optimizer.state[p]["exp_avg"]
        assert held.device_mesh == mesh
        assert held.shape == p.shape == (6, 4)
        assert held.to_local().device.type == "cpu"
        held.to_local().mul_(2.0)  # writes to the state itself
        p.grad = DTensor(torch.zeros(3, 4), like._spec, requires_grad=False)
        optimizer.step()
        assert torch.allclose(optimizer.state[p]["exp_avg"].to_local(), torch.full((3, 4), 0.9 * 0.4))
        expected = 0.9 - 0.1 * (0.36 / 0.19) / (0.003996 / 0.001999) ** 0.5
        assert torch.allclose(p.to_local(), torch.full((3, 4), expected))


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_states_of_parameters_on_gpus(tmp_path):
    on_living_ranks(2, on_a_mesh_of_gpus, directory=tmp_path)


def clip_gradients(model, norm):
    if isinstance(model, FSDP):
        return model.clip_grad_norm_(norm)
    if {type(p) for p in model.parameters()} != {DTensor, nn.Parameter}:
        return clip_grad_norm_(model.parameters(), norm)
    # torch refuses a mixture of DTensors and plain parameters
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    total = torch.linalg.vector_norm(torch.stack([g.norm() for g in whole(grads)]))
    for g in grads:
        g.mul_(min(1.0, norm / (total.item() + 1e-6)))
    return total


def sharded_trains(rank, size, kind, clip, name, options):
    of, reference, model = OF[name], MODELS[kind](), MODELS[kind]()
    oracle = of.reference(reference.parameters(), **{**ARGS, **of.kwargs})
    options = {**ARGS, **of.kwargs, "devices": "csd{rank}", **options}
    with of.ours(model.parameters(), tile_size=TILE, **options) as optimizer:
        tensor = kind == "tensor parallel"  # then all ranks have the same data
        for step in range(STEPS):
            for m, o in ((reference, oracle), (model, optimizer)):
                o.zero_grad()
                loss_of(m, 0 if tensor else rank, 1 if tensor else size, step).backward()
            # A weight between two bf16 numbers may be rounded to either: all that is computed with it differs by 2⁻⁸.
            take_gradients(reference, gradients_of(model), off=2**-5 if "bf16" in kind else 1e-3)
            for m, o in ((reference, oracle), (model, optimizer)):
                if clip and (o is oracle or clip != "max_grad_norm"):
                    clip_gradients(m, 0.1)
                o.step()
        wanted = whole(reference.parameters()), states(oracle, reference.parameters())
        assert_like_torch(whole(model.parameters()), states(optimizer, model.parameters()), wanted)
        for p in model.parameters():
            if isinstance(p, DTensor) and optimizer.state[p]:
                if kind != "hybrid":  # there replicas divide states further
                    assert optimizer.state[p][of.rule.sections[1]].placements == p.placements
                assert optimizer.state[p]["master"].shape == p.shape
        return whole(model.parameters())


@pytest.mark.parametrize(
    ("kind", "clip", "name"),
    [
        *itertools.product(MODELS, [None, "clip_grad_norm_", "max_grad_norm"], ["CSDAdam"]),
        *(("FSDP2", None, name) for name in OTHERS),
    ],
)
@pytest.mark.fp32_states("compares with torch to its last bits")
def test_sharded_models(kind, clip, name, tmp_path):
    size = 4 if kind == "hybrid" else 3 if name == "CSDAdam" else 2
    options = {"max_grad_norm": 0.1} if clip == "max_grad_norm" else {}
    on_living_ranks(size, sharded_trains, size, kind, clip, name, options, directory=tmp_path)


def hybrid_divides(rank, size):
    """HSDP's replicas each update some rows of their shard, with the same bits as if each updated the whole shard."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    models = [hybrid(used=True) for _ in range(3)]
    params = [list(model.parameters()) for model in models]

    def optimizer_of(model, devices, **options):
        return CSDAdam(model.parameters(), **ARGS, tile_size=TILE, devices=devices, **options)

    def same(a, b, c, d):
        for x, y in zip(whole(a), whole(b), strict=True):
            assert torch.equal(x, y)
        for p, q in zip(a, b, strict=True):
            for key in ("master", "exp_avg", "exp_avg_sq"):
                if c.state[p]:
                    assert torch.equal(*whole([c.state[p][key], d.state[q][key]]))

    one, all_of_it = optimizer_of(models[0], "csd{rank}"), optimizer_of(models[1], "file:", sharded=False)
    for model, optimizer in ((models[0], one), (models[1], all_of_it)):
        train_model(model, optimizer, rank, size)
    same(params[0], params[1], one, all_of_it)
    assert one.stats()["params"] < 0.6 * all_of_it.stats()["params"]
    assert one.stats()["gathered_bytes"] > 0 == all_of_it.stats()["gathered_bytes"]

    # A step that fails on one rank is undone on all.
    before = whole(params[0])
    loss_of(models[0], rank, size, STEPS).backward()
    native = type(engine_of(one).native)
    with replaced(native, "push", lambda *_, **__: 1 / 0) if rank == 1 else contextlib.nullcontext():
        error = raised_by(one.step)
    assert isinstance(error, ZeroDivisionError if rank == 1 else CSDRankError)
    assert all(map(torch.equal, whole(params[0]), before))

    # Through torch.distributed.checkpoint, into an optimizer that is not sharded, and into another that is.
    saved = get_optimizer_state_dict(models[0], one)
    torch.distributed.checkpoint.save(saved, checkpoint_id="checkpoint")
    for model, options in ((models[1], {"sharded": False}), (models[2], {})):
        model.load_state_dict(models[0].state_dict())
        other = optimizer_of(model, "ram:", **options)
        other.zero_grad()
        found = get_optimizer_state_dict(model, other)
        torch.distributed.checkpoint.load(found, checkpoint_id="checkpoint")
        set_optimizer_state_dict(model, other, found)
        same(params[0], list(model.parameters()), one, other)
        other.close()
    all_of_it.close()

    # After a crash each rank has its own rows, and sends them to the others.
    one.synchronize()
    one.close()
    with torch.no_grad():
        for p in params[2]:
            p.zero_()
    with optimizer_of(models[2], "csd{rank}", resume=True) as resumed:
        assert all(map(torch.equal, whole(params[2]), before))
        loss_of(models[2], rank, size, STEPS).backward()
        resumed.step()


def test_replicas_of_hsdp_divide_their_shard(tmp_path):
    on_living_ranks(4, hybrid_divides, 4, directory=tmp_path)


def in_foreach(p, value):
    torch._foreach_mul_([p], 0.0)
    torch._foreach_add_([p], [value])


SET = {  # ways to set a parameter under no_grad(), noticed through torch's version counters only
    "copy_": lambda p, value: p.copy_(value),
    "foreach": in_foreach,
    "foreach lerp": lambda p, value: torch._foreach_lerp_([p], [value], 1.0),
    "foreach of data": lambda p, value: in_foreach(p.data, value),
    "foreach of local tensors": lambda p, value: torch._foreach_copy_([p.to_local()], [value.to_local()]),
}


def set_half_way(rank, devices, dtype, options):
    """However DTensors are set, the next step takes their values as masters; unset DTensors keep their masters."""
    mesh = init_device_mesh("cpu", (2,))

    def random(seed, *shape):
        torch.manual_seed(seed)
        return distribute_tensor(torch.randn(shape).to(dtype), mesh, [Shard(0)])

    def set_and_train(set_to):
        params = [nn.Parameter(random(i, 70, 31)) for i in range(3)]
        with CSDAdam(params, **ARGS, tile_size=TILE, devices=devices, **options) as optimizer:
            for step in range(4):
                for i, p in enumerate(params):
                    p.grad = random(10 * step + i, 70, 31)
                if step == 2:
                    with torch.no_grad():
                        set_to(params[0], random(5, 70, 31))
                        set_to(params[1], params[1].detach().clone())  # to its own value
                optimizer.step()
            held = [optimizer.state[p][key].to_local().clone() for p in params for key in ("master", "exp_avg")]
            return [p.to_local().clone() for p in params] + held

    wanted = set_and_train(SET["copy_"])
    for name, set_to in SET.items():
        for found, value in zip(set_and_train(set_to), wanted, strict=True):
            assert torch.equal(found, value), name


@pytest.mark.at_hand("devices that do not reach parameters find only writes that torch counts")
@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("options", [{}, {"grad_dtype": torch.float32}, {"topk": 0.1}], ids=["direct", "cast", "topk"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("devices", ["ram:", "file:"])
def test_parameters_set_through_foreach_are_noticed(devices, dtype, options, tmp_path):
    on_living_ranks(2, set_half_way, devices, dtype, options, directory=tmp_path)


def bf16_shards(dims):
    """bf16 parameters sharded by FSDP2, or HSDP with a 2-D mesh, on boundaries of groups of 64; and the whole ones."""
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False)).bfloat16()
    whole = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    fully_shard(model, mesh=init_device_mesh("cpu", dims, mesh_dim_names=("replicate", "shard")[-len(dims) :]))
    return list(model.parameters()), whole


def take_shards(optimizer, params, steps):
    for step in steps:
        for k, p in enumerate(params):
            torch.manual_seed(1000 * step + k)
            grad = torch.randn(p.shape).to(p.dtype)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        optimizer.step()


def shards_in_8_bits(rank, dims, options):
    """Asserts the bits of a single process, before and after a resume; with Top-K, those of another sharded run."""
    options = {**ARGS, "tile_size": TILE, "state_dtype": "8bit", **options}
    params, others = bf16_shards(dims)
    if "topk" in options:  # selection and residuals depend on tiles
        others, _ = bf16_shards(dims)
    other = CSDAdam(others, **options, devices="ram:", sharded="topk" in options)
    take_shards(other, others, range(2))
    with CSDAdam(params, **options, devices="csd{rank}") as optimizer:
        take_shards(optimizer, params, range(2))
        assert_same_whole(params, others, optimizer, other)
    resumed, _ = bf16_shards(dims)
    with torch.no_grad():
        for p in resumed:
            p.zero_()
    with CSDAdam(resumed, **options, devices="csd{rank}", resume=True) as optimizer:
        for p, q in zip(resumed, others, strict=True):
            assert torch.equal(*whole([p, q]))
        for o, of in ((optimizer, resumed), (other, others)):
            take_shards(o, of, [2])
            for p in of:
                o.state[p]["exp_avg"].mul_(0.5)
            take_shards(o, of, [3])
        assert_same_whole(resumed, others, optimizer, other)


topk = pytest.param({"topk": 0.1}, marks=pytest.mark.here("a resume begins without Top-K's residuals"))


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, topk], ids=lambda o: "".join(o) or "plain")
@pytest.mark.parametrize("dims", [(2,), (2, 2)], ids=["FSDP2", "HSDP"])
def test_8_bit_states_of_shards(dims, options, tmp_path):
    on_living_ranks(2 ** len(dims), shards_in_8_bits, dims, options, directory=tmp_path)


def within_zero(rank, size):
    """ZeroRedundancyOptimizer itself divides the parameters among the ranks."""
    models = [ddp() for _ in range(2)]
    ours = ZeroRedundancyOptimizer(
        models[0].parameters(), optimizer_class=CSDAdam, sharded=False, devices="csd{rank}", tile_size=TILE, **ARGS
    )
    oracle = ZeroRedundancyOptimizer(models[1].parameters(), optimizer_class=AdamW, **ARGS)
    train_beside(models[0], ours, models[1], oracle, rank, size)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert_near(p, q, OFF)
    ours.consolidate_state_dict(to=0)
    oracle.consolidate_state_dict(to=0)
    if rank == 0:
        saved, wanted = ours.state_dict()["state"], oracle.state_dict()["state"]
        assert saved.keys() == wanted.keys()
        for i, entry in wanted.items():
            assert_near(saved[i]["exp_avg"], entry["exp_avg"], OFF)
    ours.optim.synchronize()
    assert ours.optim.committed_step == STEPS
    ours.optim.close()

    shared = ZeroRedundancyOptimizer(models[0].parameters(), optimizer_class=CSDAdam, devices="ram:")
    return str(raised_by(shared.step))


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_within_zero_redundancy_optimizer(tmp_path):
    for said in on_living_ranks(2, within_zero, 2, directory=tmp_path):
        assert "ZeroRedundancyOptimizer(params, optimizer_class=CSDAdam, sharded=False, ...)" in said


def fsdp2_offloads(rank, size):
    """Parameters and gradients in host memory; gradients are reduced only in every second backward."""
    models = [fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False)) for _ in range(2)]
    with CSDAdam(models[0].parameters(), **ARGS, tile_size=TILE, devices="file:") as optimizer:
        oracle = AdamW(models[1].parameters(), **ARGS)
        for step in range(2 * STEPS):
            for model in models:
                model.set_requires_gradient_sync(step % 2 == 1)
                loss_of(model, rank, size, step).backward()
            if step % 2 == 1:
                take_gradients(models[1], gradients_of(models[0]))
                for o in (optimizer, oracle):
                    o.step()
                    o.zero_grad()
        for p, q in zip(*(whole(m.parameters()) for m in models), strict=True):
            assert_near(p, q, OFF)


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_fsdp2_offloaded_to_the_cpu(tmp_path):
    on_living_ranks(2, fsdp2_offloads, 2, directory=tmp_path)


# ---- What goes wrong on one rank goes wrong on all -----------------------------------------------


def fails(rank, where, devices):
    """A device fails on rank 1. All ranks raise, parameters and states are restored, and the next attempt works."""
    params, others = odd_parameters(), odd_parameters()
    if devices == "memory":
        devices = "file:" if rank == 1 else "ram:"
    with (
        CSDAdam(params, **ARGS, tile_size=TILE, devices=devices, max_grad_norm=10.0) as optimizer,
        CSDAdam(others, **ARGS, tile_size=TILE, devices="file:", sharded=False, max_grad_norm=10.0) as other,
    ):
        take(optimizer, params, range(2))
        take(other, others, range(2))
        before, engine = everything(optimizer, params), engine_of(optimizer)
        owner = engine if where == "begin" else engine.native
        if rank == 1:
            real, count = getattr(owner, where), []

            def broken(*args, **kwargs):
                count.append(1)
                if len(count) == (2 if where == "push" else 1):
                    raise CSDOSError(errno.EIO, "unplugged")
                return real(*args, **kwargs)

            setattr(owner, where, broken)
        random_gradients(params, 2)
        e = raised_by(optimizer.step)
        assert isinstance(e, CSDOSError if rank == 1 else CSDRankError), e
        assert "unplugged" in str(e)
        assert rank == 1 or "rank 1" in str(e)
        assert_everything_is(everything(optimizer, params), before)
        if rank == 1:
            delattr(owner, where)
        optimizer.step()
        take(other, others, [2])
        assert_same_whole(params, others, optimizer, other)


@pytest.mark.parametrize("where", ["push", "params_ready", "begin"])
@pytest.mark.parametrize("devices", ["file:", "csd{rank}", "memory"])
def test_a_step_fails_on_one_rank(devices, where, tmp_path):
    """`memory`: rank 1, which fails, has files, and all others `ram:`."""
    on_living_ranks(2, fails, where, devices, directory=tmp_path)


def refuses(rank):
    def plain(value=1.0, grad=True):
        p = nn.Parameter(torch.full((4, 3), value))
        p.grad = torch.ones(4, 3) if grad else None
        return p

    said = []
    for what in ("values", "gradients", "one has none", "sparse"):
        p = plain(value=1.0 + rank * (what == "values"))
        q = plain(grad=not (what == "gradients" and rank == 1))
        if what == "one has none" and rank == 1:
            p.grad = q.grad = None
        if what == "sparse" and rank == 1:
            p.grad = p.grad.to_sparse()
        with CSDAdam([p, q], devices="file:") as optimizer:
            said.append(str(raised_by(optimizer.step)))
            assert torch.equal(p, torch.full((4, 3), 1.0 + rank * (what == "values")))
    alone = dist.new_group([rank], use_local_synchronization=True)
    for options in ({"sharded": False}, {"process_group": alone}):  # each rank has its own model
        p = plain(value=1.0 + rank)
        with CSDAdam([p], lr=0.1, weight_decay=0, devices="file:", **options) as optimizer:
            optimizer.step()
            assert torch.allclose(p, torch.full((4, 3), 0.9 + rank))
    return said


def test_what_is_no_replica_is_refused(tmp_path):
    for rank, said in enumerate(on_living_ranks(2, refuses, directory=tmp_path)):
        assert "rank 0 has" in said[0]
        assert "process_group of its own" in said[0]
        assert "gradients of different parameters: rank 0 has ('0.1',), rank 1 None" in said[1]
        assert "gradients of different parameters: rank 0 has ('0.0',), rank 1 None" in said[2]
        assert "does not support sparse gradients" in said[3]
        assert rank == 1 or "rank 1: CSDRuntimeError" in said[3]


def without_rank_1(rank):
    p = nn.Parameter(torch.ones(6))
    p.grad = torch.ones(6)
    with CSDAdam([p], devices="file:") as optimizer:
        optimizer.step()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        before = everything(optimizer, [p])
        e = raised_by(optimizer.step)
        assert "has lost the others" in str(e)
        assert_everything_is(everything(optimizer, [p]), before)


def test_a_rank_dies(tmp_path):
    assert on_ranks(2, without_rank_1, directory=tmp_path, may_die=[1]) == [None, KILLED]


def raises_before_the_step(rank):
    """Rank 1 fails once, at several places: rank 0 must not wait for it, nor misinterpret its later messages."""

    def plain():
        p = nn.Parameter(torch.full((8, 3), 1.0))
        p.grad = torch.ones(8, 3)
        return p

    def once(of, name):
        real = getattr(of, name)

        def broken(*_, **__):
            setattr(of, name, real)
            raise CSDOSError(errno.ENOSPC, "full")

        if rank == 1:
            setattr(of, name, broken)

    for of, name in ((None, "extend"), (csd_optim.step.resources, "ParamAllGather")):
        params = [plain(), plain()]
        with CSDAdam(params, **ARGS, devices="file:") as optimizer:
            once(of or engine_of(optimizer), name)
            assert isinstance(raised_by(optimizer.step), CSDOSError if rank == 1 else CSDRankError)
            params[0].grad = None  # rank 1 gives places in another order than rank 0
            optimizer.step()
            params[0].grad, params[1].grad = torch.full((8, 3), 2.0), torch.ones(8, 3)
            optimizer.step()
            want = AdamW(copies := [plain(), plain()], **ARGS)
            copies[0].grad = None
            want.step()
            copies[0].grad = torch.full((8, 3), 2.0)
            want.step()
            for p, q in zip(params, copies, strict=True):
                torch.testing.assert_close(p, q)
                assert torch.equal(p, p[0, 0].expand_as(p))  # rows updated by rank 1 equal those of rank 0

    model = nn.Linear(8, 8)
    fully_shard(model)
    with CSDAdam(model.parameters(), **ARGS, max_grad_norm=1.0, devices="csd{rank}") as optimizer:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.user_state = {"kept": object() if rank == 1 else 0}
        assert isinstance(raised_by(optimizer.step), CSDTypeError if rank == 1 else CSDRankError)
        optimizer.user_state = {}
        optimizer.step()

    model = nn.Linear(4, 4)
    with CSDAdam(model.parameters(), devices="file:") as optimizer:
        model.double()(torch.ones(2, 4).double()).sum().backward()
        assert isinstance(raised_by(optimizer.step), CSDTypeError)


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_a_rank_raises_before_the_step(tmp_path):
    on_living_ranks(2, raises_before_the_step, directory=tmp_path)


# ---- Overflow, scaling, Join ---------------------------------------------------------------------


def overflows(rank):
    p = nn.Parameter(torch.ones(5, 3))
    with CSDAdam([p], lr=0.1, weight_decay=0, devices="file:") as optimizer:
        for overflow_on in (None, 0, 1, None):
            p.grad = torch.full((5, 3), 8.0)
            optimizer.grad_scale = torch.tensor(4.0)
            optimizer.found_inf = torch.tensor(float(rank == overflow_on))
            optimizer.step()
        assert optimizer.state[p]["step"] == 2
        assert torch.allclose(optimizer.state[p]["exp_avg"].full_tensor(), torch.full((5, 3), 2 * 0.19))
        return p.detach()


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_an_overflow_on_one_rank_is_skipped_by_all(tmp_path):
    assert torch.equal(*on_living_ranks(2, overflows, directory=tmp_path))


def joins(rank, size, state_dtype, devices):
    """Rank r has r + 1 batches. The oracle is not sharded, so its right result is that of the last rank to join."""
    models = [DDP(net(used=True)) for _ in range(2)]
    if state_dtype == "fp32":
        oracle = AdamW(models[1].parameters(), **ARGS)
    else:
        alone = dist.new_group([rank], use_local_synchronization=True)
        options = {"devices": "ram:", "process_group": alone, "state_dtype": state_dtype}
        oracle = CSDAdam(models[1].parameters(), **ARGS, **options)
    options = {"tile_size": TILE, "devices": devices, "state_dtype": state_dtype}
    with CSDAdam(models[0].parameters(), **ARGS, **options) as optimizer:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), torch.optim.lr_scheduler.StepLR(oracle, 1, 0.5)
        gradients = []
        for model, o, s in zip(models, (optimizer, oracle), schedule, strict=True):
            with Join([model, o] if o is optimizer else [model]):
                for step in range(rank + 1):
                    o.zero_grad()
                    loss_of(model, rank, size, step).backward()
                    if o is optimizer:
                        gradients.append(gradients_of(model))
                    else:
                        take_gradients(model, gradients[step])
                    o.step()
                    s.step()
        assert optimizer.param_groups[0]["lr"] == oracle.param_groups[0]["lr"]
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            assert_near(p, q, OFF)
        return [p.detach() for p in models[0].parameters()], optimizer.state[models[0].module.scale]["step"].item()


served = pytest.param("fp32", "serve:", marks=pytest.mark.here("it has an optimizer rank of its own"))


@pytest.mark.parametrize(("state_dtype", "devices"), [("fp32", "file:"), ("8bit", "file:"), served])
def test_uneven_inputs_with_join(state_dtype, devices, tmp_path):
    with contextlib.ExitStack() as stack:
        if devices == "serve:":
            devices = stack.enter_context(Owner(tmp_path / "owners")).address
        ranks = on_living_ranks(3, joins, 3, state_dtype, devices, directory=tmp_path)
    for params, step in ranks:
        assert step == 3
        assert all(torch.equal(p, q) for p, q in zip(params, ranks[0][0], strict=True))


def joins_with_unlike_gradients(rank):
    p = nn.Parameter(torch.ones(8, 3))
    with CSDAdam([p], devices="file:") as optimizer:
        p.grad = torch.ones(8, 3) if rank != 1 else None
        take_it = optimizer._step_of_others if rank == 2 else optimizer.step
        assert "gradients of different parameters" in str(raised_by(take_it))
        p.grad = torch.ones(8, 3)
        take_it()


def test_join_with_unlike_gradients(tmp_path):
    on_living_ranks(3, joins_with_unlike_gradients, directory=tmp_path)


# ---- state ---------------------------------------------------------------------------------------


def shows_states(rank, size, devices):
    """Writes to `state` take effect; AdamW's checkpoint loads; saving only a part of the states is refused."""
    params, others = odd_parameters(), odd_parameters()
    with CSDAdam(params, **ARGS, tile_size=TILE, devices=devices) as optimizer:
        other = CSDAdam(others, **ARGS, tile_size=TILE, devices="file:", sharded=False)
        take(optimizer, params, range(2))
        take(other, others, range(2))
        for o, of in ((optimizer, params), (other, others)):
            for p in of:
                o.state[p]["exp_avg"].mul_(0.5)
                o.state[p]["exp_avg_sq"].add_(1.0)
        take(optimizer, params, [2])
        take(other, others, [2])
        assert_same_whole(params, others, optimizer, other)

        big = next(p for p in params if isinstance(optimizer.state[p]["exp_avg"], DTensor))
        assert optimizer.state[big]["exp_avg"].shape == big.shape
        e = raised_by(lambda: torch.save(optimizer.state_dict(), io.BytesIO()))
        assert f"rank {rank} holds 1/{size} of the optimizer's states" in str(e)

        again = CSDAdam(again_params := odd_parameters(), **ARGS, tile_size=TILE, devices="file:")
        with torch.no_grad():
            for p, q in zip(again_params, params, strict=True):
                p.copy_(q)
        state = other.state_dict()
        state["state"] = {
            k: {name: v.reshape(1) if name == "step" else v for name, v in entry.items()}
            for k, entry in state["state"].items()
        }
        again.load_state_dict(state)  # plain and whole, as AdamW's; some versions have steps of shape (1,)
        take(again, again_params, [3])
        take(other, others, [3])
        assert_same_whole(again_params, others, again, other)
        optimizer.load_state_dict(again.state_dict())  # of DTensors
        with torch.no_grad():
            for p, q in zip(params, again_params, strict=True):
                p.copy_(q)
        take(optimizer, params, [4])
        take(other, others, [4])
        assert_same_whole(params, others, optimizer, other)
        again.close()
        other.close()


@pytest.mark.parametrize("devices", ["file:", "csd{rank}"])
def test_states_of_shares(devices, tmp_path):
    on_living_ranks(2, shows_states, 2, devices, directory=tmp_path)


def consolidates(rank, size):
    params, others = odd_parameters(), odd_parameters()
    with (
        CSDAdam(params, **ARGS, tile_size=TILE, devices="file:") as optimizer,
        CSDAdam(others, **ARGS, tile_size=TILE, devices="file:", sharded=False) as other,
    ):
        take(optimizer, params, range(2))
        take(other, others, range(2))
        optimizer.consolidate_state_dict(to=1)
        if rank == 1:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            saved, wanted = torch.load(file), other.state_dict()
            assert saved["param_groups"] == wanted["param_groups"]
            assert saved["state"].keys() == wanted["state"].keys()
            for k, state in wanted["state"].items():
                assert saved["state"][k].keys() == state.keys()
                assert all(torch.equal(saved["state"][k][name], value) for name, value in state.items())
        else:
            assert "consolidate_state_dict()" in str(
                raised_by(lambda: torch.save(optimizer.state_dict(), io.BytesIO()))
            )
        take(optimizer, params, [2])
        take(other, others, [2])
        assert_same_whole(params, others, optimizer, other)
        assert "consolidate_state_dict()" in str(raised_by(lambda: torch.save(optimizer.state_dict(), io.BytesIO())))


def test_one_rank_saves_the_states_of_all(tmp_path):
    on_living_ranks(3, consolidates, 3, directory=tmp_path)


def on_gpus(_):
    ranks = Ranks(dist.group.WORLD)
    ranks.mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")  # as with NCCL groups and FSDP2
    window = torch.ones(2, 3)
    shown = ReplicaShard(torch.ones(4, 3), ranks).show(window)
    shown.mul_(2)
    assert shown.shape == (4, 3)
    assert torch.equal(window, torch.full((2, 3), 2.0))
    assert shown.to_local().data_ptr() == window.data_ptr()


def test_states_stay_on_the_devices_when_parameters_are_on_gpus(tmp_path):
    on_living_ranks(2, on_gpus, directory=tmp_path)
