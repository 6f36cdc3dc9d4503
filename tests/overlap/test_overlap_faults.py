"""A device that fails while a step is under way, or a guess: said once, nothing lost, the next attempt works."""

import errno
import functools

import pytest
import torch
from faults import META_WRITE, SYNC, TILE_READ, TILE_WRITE
from support.faulty import child, fault, in_child  # noqa: F401
from support.twins import checksum
from torch import nn

from csd_optim import CSDAdam, CSDOSError

STEPS = 6
WIDTH = 48


class Training:
    """Redoes a step that has failed: which it was, the states say."""

    def __init__(self, devices, overlap, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(4)))
        self.opt = CSDAdam(self.model.parameters(), lr=1e-2, devices=devices, tile_size=1024, **options)
        if overlap is not None:
            self.opt.overlap(self.model, **overlap)
        self.failures = 0

    def done(self):
        state = self.opt.state
        return max((int(entry["step"]) for entry in state.values()), default=0)

    def step(self, number):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(2, WIDTH, generator=generator).to(torch.bfloat16)
        self.opt.zero_grad()
        self.model(x).square().sum().backward()
        self.opt.step()

    def whole_step(self, number):
        self.step(number)
        self.opt.wait()

    def train(self):
        number = 0
        while number < STEPS:
            try:
                self.step(number)
                number += 1
                if number == STEPS:
                    self.opt.synchronize()
            except CSDOSError:
                self.failures += 1
                number = self.done()

    def image(self):
        states = {k: [checksum(t) for t in entry.values()] for k, entry in self.opt.state_dict()["state"].items()}
        return [checksum(p) for p in self.model.parameters()], states


@functools.cache
def never_failed(state_dtype):
    training = Training("ram:", None, state_dtype=state_dtype)
    training.train()
    return training.image()


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.parametrize("calls", [TILE_READ, TILE_WRITE, META_WRITE | SYNC], ids=["read", "write", "commit"])
@pytest.mark.parametrize("overlap", [{}, {"backward": True}], ids=["forward", "backward"])
@in_child
def test_one_call_fails(overlap, calls, state_dtype, tmp_path):
    failures = 0
    for skip in range(0, 40, 3):
        devices = [f"file:{tmp_path}/{skip}-{i}?cache=off" for i in range(2)]
        with fault(calls, tmp_path / f"{skip}-1", errno.EIO, skip=skip, times=1, must_strike=False):
            training = Training(devices, overlap, state_dtype=state_dtype, overwrite=True)
            training.train()
        assert training.image() == never_failed(state_dtype), skip
        assert training.failures <= 1, skip
        failures += training.failures
        training.opt.close()
    assert failures or calls == META_WRITE | SYNC  # whose failure the next attempt may mend before anybody is told


@pytest.mark.parametrize("overlap", [{}, {"backward": True}], ids=["forward", "backward"])
@in_child
def test_a_device_that_fails_for_ever(overlap, tmp_path):
    training = Training([f"file:{tmp_path}/csd{i}?cache=off" for i in range(2)], overlap)
    training.step(0)
    training.step(1)
    training.opt.wait()
    before = [checksum(p) for p in training.model.parameters()]
    with fault(TILE_READ, tmp_path / "csd1", errno.EIO):
        for _ in range(3):
            with pytest.raises(CSDOSError, match="csd1"):
                training.whole_step(2)
            assert [checksum(p) for p in training.model.parameters()] == before
    training.opt.wait()
    for number in range(2, STEPS):
        training.step(number)
    assert training.image() == never_failed("fp32")
    training.opt.close()


@in_child
def test_a_step_that_fails_before_it_returns(tmp_path):
    training = Training([tmp_path / "csd0"], None)
    training.opt.overlap(training.model[:2])  # the others have arrived when step() returns
    training.step(0)
    with fault(TILE_READ, tmp_path / "csd0", errno.EIO), pytest.raises(CSDOSError):
        training.step(1)
    training.opt.wait()  # said once
    for number in range(1, STEPS):
        training.step(number)
    assert training.image() == never_failed("fp32")
    training.opt.close()
