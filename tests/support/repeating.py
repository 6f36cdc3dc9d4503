"""A training that repeats what has failed, until it is as if nothing had."""

import functools

import torch
from support.twins import checksum
from torch import nn

from csd_optim import CSDAdam, CSDOSError
from csd_optim.errors import CSDRankError

STEPS = 6
MODES = {
    "in step": None,
    "forward": {},
    "backward": {"backward": True},
    "free": {"free_gradients": True},
}


class Repeating:
    """A training that repeats failed steps. The states tell which step is next."""

    def __init__(self, devices, overlap, *, width=48, depth=4, wrap=lambda model: model, rank=0, **options):
        torch.manual_seed(0)
        self.model = wrap(nn.Sequential(*(nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(depth))))
        self.width, self.rank, self.params = width, rank, list(self.model.parameters())
        options = {"tile_size": 1024, **options}
        self.opt = CSDAdam(self.model.parameters(), lr=1e-2, devices=devices, **options)
        if overlap is not None:
            self.opt.overlap(self.model, **overlap)
        self.failures = 0

    def done(self):
        state = self.opt.state
        return max((int(entry["step"]) for entry in state.values()), default=0)

    def backward(self, number):
        generator = torch.Generator().manual_seed(number + 1000 * self.rank)
        x = torch.randn(2, self.width, generator=generator).to(torch.bfloat16)
        self.model(x).square().sum().backward()

    def gradients(self, number):
        self.opt.zero_grad()
        self.backward(number)

    def step(self, number):
        self.gradients(number)
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
            except (CSDOSError, CSDRankError):
                self.failures += 1
                assert self.failures < 9, "it fails for ever"
                number = self.done()
        return self

    def parameters(self):
        return [checksum(p) for p in self.model.parameters()]

    def values(self):
        """The parameters as they lie in memory: nothing waits for them, and nothing refuses."""
        return [checksum(p) for p in self.params]

    def image(self):
        states = {k: [checksum(t) for t in entry.values()] for k, entry in self.opt.state_dict()["state"].items()}
        return self.parameters(), states


@functools.cache
def never_failed(state_dtype, steps=STEPS):
    training = Repeating("ram:", None, state_dtype=state_dtype)
    for number in range(steps):
        training.step(number)
    return training.image()
