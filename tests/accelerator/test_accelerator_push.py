"""`csd_optim.push` with gradients on the accelerator: it sends what backward has computed, on whatever stream."""

import threading
from collections import defaultdict
from unittest import mock

import pytest
import torch
from support.exact import Linear
from support.on_accelerator import DEVICE, DTYPES, keep_busy
from support.owners import Owners
from torch import nn

from csd_optim import CSDAdam, push
from csd_optim.accelerator import on
from csd_optim.serve import early

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
    """A model that hands a bucket to push() when a layer has its gradients.

    Its memory is somebody else's at once, with the route star after the step.
    """

    def __init__(self, device, dtype, devices):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Linear(48, 48) for _ in range(3))).to(device, dtype)
        there = "serve" in devices
        self.opt = CSDAdam(self.model.parameters(), lr=1e-2, devices=devices, overwrite=there)
        self.device, self.dtype = device, dtype
        self.kept = [] if "star" in devices else None
        if there:
            for k, layer in enumerate(self.model):
                layer.bias.register_post_accumulate_grad_hook(self.hands_over(k, layer))
                layer.weight.register_post_accumulate_grad_hook(self.hands_over(k, layer))

    def hands_over(self, k, layer):
        def hook(_):
            params = [layer.weight, layer.bias]
            if any(p.grad is None for p in params):
                return
            bucket = Bucket(2 - k, params, is_last=k == 0)
            buffer = push(self.opt, bucket).wait()
            if self.kept is None:
                buffer.fill_(torch.nan)
            else:
                self.kept.append(buffer)

        return hook

    def train(self):
        for k in range(3):
            x = torch.randn(5, 48, generator=torch.Generator().manual_seed(k)).to(self.device, self.dtype)
            keep_busy()
            self.model(x).square().mean().backward()
            self.opt.step()
            for buffer in self.kept or ():
                buffer.fill_(torch.nan)
            self.opt.zero_grad()
        return [p.detach().cpu() for p in self.model.parameters()]


@pytest.fixture(scope="module")
def owners(tmp_path_factory):
    with Owners(tmp_path_factory.mktemp("owners")) as running:
        yield running


@pytest.fixture(scope="module")
def expected():
    return {dtype: Hooked("cpu", dtype, "ram:").train() for dtype in DTYPES[::2]}


@pytest.mark.ci
@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("beside", [False, True], ids=["here", "on a side stream"])
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
@pytest.mark.parametrize("route", ["", "&route=star"])
def test_one_trainer(owners, expected, route, dtype, beside):
    hooked = Hooked(DEVICE, dtype, owners.address + route)
    stream = torch.Stream(DEVICE) if beside else torch.accelerator.current_stream()
    stream.wait_stream(torch.accelerator.current_stream())
    with hooked.opt, stream:
        found = hooked.train()
        assert hooked.opt.stats()["route"] == ("star" if route else "slices")
    assert all(map(torch.equal, found, expected[dtype]))


@pytest.mark.one_schedule
def test_what_reduces_and_what_pushes_have_streams_of_their_own(owners):
    threads_of = defaultdict(set)

    def noting(stream):
        threads_of[stream].add(threading.get_ident())
        return on(stream)

    with mock.patch.object(early, "on", noting):
        hooked = Hooked(DEVICE, torch.float32, owners.address)
        with hooked.opt:
            hooked.train()
    assert None not in threads_of
    assert [len(threads) for threads in threads_of.values()] == [1, 1]
