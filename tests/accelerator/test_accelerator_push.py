"""`csd_optim.push` with gradients on the accelerator: it reduces what backward has computed, on whatever stream.

Ranks communicate by gloo, through host memory. Oracle: the same ranks with parameters on the CPU, to the last bit.
"""

from unittest import mock

import pytest
import torch
from support import emulated, through_host
from support.exact import Linear
from support.on_accelerator import DTYPES, GPU, keep_busy, on_both
from support.ranks import on_ranks
from torch import nn

from csd_optim import CSDAdam, push
from csd_optim.distributed import reduce_scatter
from csd_optim.distributed.ranks import ranks_of
from csd_optim.distributed.reduce_scatter import ReducedGrads

pytestmark = pytest.mark.accelerator


class Bucket:
    """A bucket as DDP passes it to hooks: gradients in DDP's memory."""

    def __init__(self, index, params, *, is_last):
        self._index, self._params, self._is_last = index, params, is_last
        self._buffer = torch.cat([p.grad.flatten() for p in params])

    def index(self):
        return self._index

    def is_last(self):
        return self._is_last

    def buffer(self):
        return self._buffer

    def parameters(self):
        return self._params

    def gradients(self):
        sizes = [p.numel() for p in self._params]
        return [g.view(p.shape) for g, p in zip(self._buffer.split(sizes), self._params, strict=True)]


class Hooked:
    """A model that hands a bucket to push() when a layer has its gradients; its memory is somebody else's then."""

    def __init__(self, device, dtype, devices, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Linear(48, 48) for _ in range(3))).to(device, dtype)
        self.opt = CSDAdam(self.model.parameters(), lr=1e-2, devices=devices, tile_size=1024, **options)
        for k, layer in enumerate(self.model):
            layer.bias.register_post_accumulate_grad_hook(self.hands_over(k, layer))
            layer.weight.register_post_accumulate_grad_hook(self.hands_over(k, layer))

    def hands_over(self, k, layer):
        def hook(_):
            params = [layer.weight, layer.bias]
            if all(p.grad is not None for p in params):
                push(self.opt, Bucket(2 - k, params, is_last=k == 0)).wait().fill_(torch.nan)

        return hook


def pushes(rank, device, dtype, beside, gpu=None):
    """Train with gradients that differ from rank to rank. `beside`: on a side stream; `gpu`: devices with `gpu:`."""
    far = device != "cpu"
    hooked = Hooked(device, dtype, gpu if gpu and far else "file:")
    stream = torch.Stream(device) if beside else torch.accelerator.current_stream() if far else None
    seen = []
    if far:
        stream.wait_stream(torch.accelerator.current_stream())
    with mock.patch.object(reduce_scatter, "ROUND_BYTES", 2048), stream if far else mock.MagicMock(), hooked.opt:
        for k in range(3):
            x = torch.randn(5, 48, generator=torch.Generator().manual_seed(2 * k + rank)).to(device, dtype)
            if far:
                keep_busy()
            hooked.model(x).square().mean().backward()
            hooked.opt.step()
            seen += [p.detach().cpu().clone() for p in hooked.model.parameters()]
            hooked.opt.zero_grad()
    return seen


@pytest.mark.ci
@pytest.mark.one_schedule
@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("beside", [False, True], ids=["here", "on a side stream"])
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
@pytest.mark.parametrize("gpu", [None, *GPU], ids=str)
def test_rows_are_reduced(everywhere, dtype, beside, gpu):
    everywhere(pushes, dtype, beside, gpu)


def reduces(rank, device, dtype):
    """Return this rank's rows of what two backwards have left in their buckets."""
    reduced, seen = ReducedGrads(ranks_of(None)), []
    params = [torch.zeros(48, 48, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
    for _ in range(2):
        for k, p in enumerate(params):
            values = torch.randn(p.shape, generator=torch.Generator().manual_seed(2 * k + rank))
            p.grad = (values.to(device) + 1).to(dtype)
            bucket = Bucket(k, [p], is_last=k == 2)
            reduced.handle_bucket(bucket, lambda: {*map(id, params)}).wait().fill_(torch.nan)
        seen += [rows.cpu().clone() for rows in reduced.rows.values()]
    return seen


def reduces_through_host(rank, schedules, directory):
    emulated.load()
    through_host.join(directory, rank, 2)
    with mock.patch.object(reduce_scatter, "ROUND_BYTES", 2048):
        for dtype in DTYPES[::2]:
            on_both(rank, schedules, reduces, dtype)


@pytest.mark.one_schedule
def test_rows_are_reduced_on_the_accelerator(request, tmp_path, emulated_only):
    """With a process group that takes tensors there, as NCCL does, the buffers of a round are there, too."""
    schedules = request.config.getoption("--accelerator").split(",")
    on_ranks(2, reduces_through_host, schedules, tmp_path, directory=tmp_path)
