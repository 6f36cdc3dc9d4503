"""What would be slow on a GPU, counted on the emulated one: launches, and how often the host waits."""

import time

import pytest
import torch
from support import emulated
from support.backends import TILE
from support.inside import steps_of
from support.on_accelerator import DEVICE
from torch import nn

from csd_optim import CSDAdam, accelerator
from csd_optim.compression.kernel_check import topk_kernels_of

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("emulated_only")]

TILES = 64


def per_tile(devices, dtype=torch.bfloat16, **options):
    """Return a step's launches and waits, per tile."""
    p = torch.randn(TILES * TILE).to(DEVICE, dtype).requires_grad_()
    with CSDAdam([{"params": [p], **options}], devices=devices, tile_size=TILE) as optimizer:
        for _ in range(3):
            p.grad = torch.randn_like(p)
            before = emulated.counts()
            optimizer.step()
            after = emulated.counts()
    return [(b - a) / TILES for a, b in zip(before, after, strict=True)]


@pytest.mark.parametrize("devices", [["ram:"], ["file:"], ["file:"] * 3], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_dense_tile(devices, dtype):
    """A dense tile costs two copies and a wait between streams; unpinned buffers would cost the host two waits more."""
    launches, waits = per_tile(devices, dtype)
    assert launches <= 3.2
    assert waits <= 1


@pytest.mark.parametrize("devices", [["ram:"], ["file:"], ["file:"] * 3], ids=str)
@pytest.mark.parametrize("topk", [0.01, 0.3])
def test_a_tile_with_topk(devices, topk):
    """It costs what a dense one does: 16 tiles are selected by five launches, all others of the step by five more."""
    library = topk_kernels_of(torch.device(DEVICE, 0))
    before = library.launches
    launches, waits = per_tile(devices, topk=topk)
    assert library.launches - before == 3 * 2 * (5 + 1)
    assert launches <= 3.4
    assert waits <= 1


@pytest.mark.ci
def test_tiles_that_are_no_rows(schedule):
    """Tiles of several parameters take no more launches, and the host does not wait for them either."""
    params = [torch.randn(100, TILE // 100 + 20).to(DEVICE).requires_grad_() for _ in range(40)]
    library = topk_kernels_of(torch.device(DEVICE, 0))
    with CSDAdam([{"params": params, "topk": 0.01}], devices="ram:", tile_size=TILE) as optimizer:
        for _ in range(2):
            for p in params:
                p.grad = torch.randn_like(p)
            launched, (_, before) = library.launches, emulated.counts()
            optimizer.step()
            _, after = emulated.counts()
    tiles = sum(p.numel() for p in params) / TILE
    assert library.launches - launched == 2 * (5 + 1)
    assert (after - before) / tiles <= 1.2


def test_gradients_do_not_queue_behind_parameters():
    """Each direction has its own stream, because the link is full duplex."""
    p = torch.randn(TILES * TILE, device=DEVICE).requires_grad_()
    with CSDAdam([p], devices="ram:", tile_size=TILE) as optimizer:
        p.grad = torch.randn_like(p)
        optimizer.step()
        [(to_host, back)] = steps_of(optimizer).resources.ring._streams.values()
        assert to_host != back
        assert torch.accelerator.current_stream() not in (to_host, back)


class Watched:
    """A value in pinned memory that a stream writes when it gets there."""

    def __init__(self, stream):
        self.seen = torch.zeros(1000, pin_memory=True)
        with stream:
            self.seen.copy_(torch.ones(1000, device=DEVICE), non_blocking=True)

    @property
    def written(self):
        return bool(self.seen[0] == 1)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.one_schedule  # late: nothing runs before it is waited for
def test_a_commit_waits_for_nobody_else(tmp_path, schedule, overlap):
    """A commit that stores residuals waits neither for another stream nor for the next forward, on the current one."""
    if schedule != "late":
        pytest.skip("only `late` lets nothing else happen")
    other = torch.Stream(DEVICE)
    p = torch.randn(TILES * TILE, device=DEVICE).requires_grad_()
    group = {"params": [p], "topk": 0.1}
    with CSDAdam([group], devices=[str(tmp_path / "a"), str(tmp_path / "b")], tile_size=TILE) as optimizer:
        if overlap:
            optimizer.overlap(nn.ParameterList([p]))
        for _ in range(2):
            elsewhere = Watched(other)
            p.grad = torch.randn_like(p)
            optimizer.step()
            forward = Watched(torch.accelerator.current_stream())
            optimizer.synchronize()
            assert not elsewhere.written
            assert not forward.written
        assert optimizer.state[p]["residual"].count_nonzero() > 0
    torch.accelerator.synchronize()
    assert forward.written


def test_waiting_does_not_burn_a_core(monkeypatch):
    """CUDA's event.synchronize() would spin on a core that is needed for updates."""
    monkeypatch.setattr(accelerator, "POLL_SECONDS", emulated.POLL_SECONDS)

    class Late:
        at = time.monotonic() + 0.2

        def query(self):
            return time.monotonic() >= self.at

    began = time.thread_time()
    accelerator.wait_for(Late())
    assert time.monotonic() >= Late.at
    assert time.thread_time() - began < 0.1
