"""Ranks that train together with parameters on the accelerator: replicas that share the updates, and shards.

They communicate by gloo, through host memory. Oracle: the same ranks with parameters on the CPU, to the last bit.
"""

import contextlib
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import emulated, through_host
from support.backends import TILE
from support.exact import Linear
from support.inside import mode_of
from support.on_accelerator import DTYPES, GPU, in_small_pieces, on_both
from support.ranks import on_ranks
from support.replacing import failing
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from csd_optim import CSDAdam, CSDOSError, CSDRankError
from csd_optim.bindings import Native

pytestmark = pytest.mark.accelerator

SIZES = [(7,), (40, 100), (2, TILE), (5 * TILE + 3,), (64, 65)]


def randn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(device, dtype, strided):
    params = [randn(shape, i).to(device, dtype) for i, shape in enumerate(SIZES)]
    return [(p.t().contiguous().t() if strided and p.dim() == 2 else p).requires_grad_() for p in params]


def devices_for(device, gpu):
    """Return the devices. `gpu`: devices for parameters on the accelerator; None: the same as on the CPU."""
    return gpu if gpu and device != "cpu" else "file:"


@in_small_pieces()  # so that more work is queued than the file has tiles
def shares(rank, device, dtype, strided, topk, gpu=None, overlap=False, state_dtype="fp32"):
    """Train replicas: each rank updates its share, and after each step all ranks have all parameters.

    `overlap`: parameters arrive later, and reading one waits for its arrival. With `gpu:` nothing arrives later.
    """
    model = nn.ParameterList(map(nn.Parameter, made(device, dtype, strided)))
    params = [*model]
    options = {"tile_size": TILE, "topk": topk, "state_dtype": state_dtype}
    optimizer = CSDAdam(params, lr=1e-2, devices=devices_for(device, gpu), **options)
    if overlap and device != "cpu":
        optimizer.overlap(model)
    launch, goes_on = mode_of(optimizer).launch, []
    mode_of(optimizer).launch = lambda *step, **agreed: goes_on.append(launch(*step, **agreed)) or goes_on[-1]
    seen = []
    for k in range(3):
        for i, p in enumerate(params):
            p.grad = randn(p.shape, 100 * k + i).to(device, dtype)
        optimizer.step()
        seen += [p.detach().clone() for p in model.parameters()]  # what the next forward reads
        for p in params:
            p.grad.fill_(torch.nan)
    assert goes_on == [False, *2 * [overlap and device != "cpu" and gpu is None]]
    optimizer.close()
    return [t.cpu() for t in seen]


@pytest.mark.one_schedule
@pytest.mark.parametrize(
    ("dtype", "strided", "topk", "gpu", "overlap", "state_dtype"),
    [
        (DTYPES[0], False, None, None, False, "fp32"),
        (DTYPES[2], True, None, None, False, "fp32"),
        (DTYPES[2], False, 0.1, None, False, "fp32"),
        (DTYPES[2], True, None, GPU[0], False, "fp32"),
        (DTYPES[2], True, None, GPU[1], False, "fp32"),
        (DTYPES[2], False, None, ["gpu:?share=20", "file:"], False, "fp32"),  # more updates than tiles
        (DTYPES[0], False, None, None, True, "fp32"),
        (DTYPES[2], True, None, None, True, "fp32"),
        (DTYPES[2], True, None, GPU[1], True, "fp32"),
        (DTYPES[2], True, None, GPU[1], False, "8bit"),
        (DTYPES[1], False, None, GPU[0], False, "8bit"),
    ],
    ids=str,
)
def test_shares_are_gathered(everywhere, dtype, strided, topk, gpu, overlap, state_dtype):
    everywhere(shares, dtype, strided, topk, gpu, overlap, state_dtype)


def steps_alone(rank, device):
    """Each rank steps with gradients of its own. On the accelerator these are known, and refused, a step later."""
    params = made(device, DTYPES[0], False)
    optimizer = CSDAdam(params, lr=1e-2, tile_size=TILE)
    taken = []

    def take_steps():
        for k in range(1, 9):
            for i, p in enumerate(params):
                p.grad = randn(p.shape, 1000 * k + 10 * i + rank).to(p)
            optimizer.step()
            taken.append(k)

    with pytest.raises(CSDRankError, match="different gradients in step 1:"):
        take_steps()
    assert taken or device == "cpu"
    return []


def test_gradients_of_its_own_are_found(everywhere):
    everywhere(steps_alone)


@in_small_pieces()
def beside_a_directory(rank, device):
    """Train replicas whose shares are in directories. With `gpu:`, a step fails on rank 1, and both repeat it."""
    params = made(device, DTYPES[2], False)
    devices = [f"file:{tempfile.mkdtemp(dir='.')}?cache=off"]
    far = device != "cpu"
    optimizer = CSDAdam(params, lr=1e-2, devices=["gpu:", *devices] if far else devices, tile_size=TILE)
    seen = []
    for k in range(3):
        for fails in (True, False) if far and k == 1 else (False,):
            for i, p in enumerate(params):
                p.grad = randn(p.shape, 100 * k + i + 1000 * fails).to(p)
            before = [p.detach().clone() for p in params]
            if fails:
                with (
                    failing(Native, "push", 1, "broken") if rank == 1 else contextlib.nullcontext(),
                    pytest.raises(CSDOSError if rank == 1 else CSDRankError, match="broken"),
                ):
                    optimizer.step()
                assert all(map(torch.equal, params, before))
            else:
                optimizer.step()
        seen += [t.detach().cpu().clone() for p in params for t in (p, *optimizer.state[p].values())]
    assert not far or optimizer.stats()["devices"][0]["params"] > 0
    optimizer.close()
    return seen


@pytest.mark.one_schedule
def test_beside_a_directory(everywhere):
    everywhere(beside_a_directory)


def shards(rank, device, dtype, topk, gpu=None, state_dtype="fp32"):
    """Train shards as FSDP2 makes them: each rank updates its rows, and the gradient norm is that of all.

    Gradients are integers, whose squares fp32 adds exactly: every device gets the same norm.
    """
    mesh = DeviceMesh.from_group(dist.group.WORLD, device)

    def sharded(t):
        rows = t.chunk(2)[rank].to(device, dtype)
        return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)

    params = [nn.Parameter(sharded(randn(shape, i))) for i, shape in enumerate([(8, 3), (40, 100), (2, TILE), (4096,)])]
    options = {"tile_size": TILE, "topk": topk, "max_grad_norm": 1.0, "state_dtype": state_dtype}
    optimizer = CSDAdam(params, lr=1e-2, devices=devices_for(device, gpu), **options)
    for k in range(3):
        for i, p in enumerate(params):
            p.grad = sharded((4 * randn(p.shape, 100 * k + i)).round())
        optimizer.step()
        for p in params:
            p.grad = None
    states = [t for p in params for t in optimizer.state[p].values()]
    assert gpu or all(t.device.type == "cpu" for t in optimizer.state[params[0]].values())
    return [(t.to_local() if isinstance(t, DTensor) else t).detach().cpu() for t in (*params, *states)]


@pytest.mark.one_schedule
@pytest.mark.parametrize(
    ("topk", "gpu", "state_dtype"),
    [
        (None, None, "fp32"),
        (0.1, None, "fp32"),
        (None, GPU[1], "fp32"),
        (None, GPU[1], "8bit"),
        (0.1, GPU[0], "8bit"),
    ],
)
def test_shards_are_updated(everywhere, topk, gpu, state_dtype):
    everywhere(shards, DTYPES[2], topk, gpu, state_dtype)


def fsdp2(rank, device, overlap, gpu, fails):
    """Train with FSDP2. `gpu`: use `gpu:`, too. `fails`: rank 1 fails in its third step, which both repeat."""
    torch.manual_seed(0)
    model = nn.Sequential(Linear(40, 64), nn.ReLU(), Linear(64, 8)).to(device)
    for part in (model[0], model):
        fully_shard(part, mesh=init_device_mesh(device, (2,)))
    model[0].set_modules_to_forward_prefetch([model])
    slow = f"file:{device}-{rank}?scratch=1&cache=off&latency=1ms"  # so that a missing wait shows
    Path(f"{device}-{rank}").mkdir(exist_ok=True)
    devices = ["gpu:", slow] if gpu and device != "cpu" else slow
    optimizer = CSDAdam(model.parameters(), lr=1e-2, devices=devices, tile_size=1024, max_grad_norm=1.0)
    if overlap and device != "cpu":
        optimizer.overlap(model)
    launch, goes_on = mode_of(optimizer).launch, []
    mode_of(optimizer).launch = lambda *step, **agreed: goes_on.append(launch(*step, **agreed)) or goes_on[-1]
    for k in range(4):
        for again in range(1 + (fails and k == 2 and device != "cpu")):
            model(randn((16, 40), 2 * k + rank).to(device)).square().mean().backward()
            if not again and fails and k == 2 and device != "cpu":
                with failing(Native, "pull", 2, "broken") if rank == 1 else contextlib.nullcontext():
                    optimizer.step()
                    with contextlib.suppress(CSDOSError):  # rank 1 raises at once, both at the end
                        optimizer.wait()
                with pytest.raises(CSDOSError if rank == 1 else CSDRankError, match="broken"):
                    optimizer.synchronize()
            else:
                optimizer.step()
            # FSDP2 uses their memory on its own stream when the next backward has waited for this one, and not before.
            gradients = [p.grad for p in model.parameters()]  # noqa: F841
            optimizer.zero_grad()
    if gpu and device != "cpu":
        assert goes_on[-1]
        assert {t.device.type for p in model.parameters() for t in optimizer.state[p].values()} == {"cpu", device}
    states = [t for p in model.parameters() for t in optimizer.state[p].values()]
    seen = [t.to_local() if isinstance(t, DTensor) else t for t in (*model.parameters(), *states)]
    return [t.detach().cpu().clone() for t in seen]


def fsdp2_through_host(rank, schedules, directory):
    emulated.load()
    through_host.join(directory, rank, 2)
    for overlap, gpu, fails in (False, False, False), (True, False, False), (True, True, True):
        on_both(rank, schedules, fsdp2, overlap, gpu, fails)


@pytest.mark.one_schedule
def test_fsdp2(request, tmp_path, emulated_only):
    """Its own streams gather parameters and reduce gradients, beside those of the step. With overlap, and without.

    With `gpu:` too, where a step that one rank cannot make is undone on both.
    """
    schedules = request.config.getoption("--accelerator").split(",")
    on_ranks(2, fsdp2_through_host, schedules, tmp_path, directory=tmp_path)
