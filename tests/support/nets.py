"""A small network with its optimizer, for owners and for the directories that they are compared with."""

import time

import torch

from csd_optim import CSDAdam, CSDError

MODES = {
    "plain": None,
    "overlap": {},
    "backward": {"backward": True},
    "backward, little room": {"backward": True, "hold": "20kB"},  # for two tiles: step() pushes the others
    "free": {"free_gradients": True},
}


def own(tmp_path):
    (tmp_path / "own").mkdir(exist_ok=True)
    return str(tmp_path / "own")


class Net:
    """A small network and its optimizer. Inputs depend only on the step."""

    def __init__(self, devices, dtype=torch.float32, *, muon=False, late=False, **options):
        """`late`: there is a small parameter that has its first gradient in the third step."""
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(40, 70), torch.nn.Tanh(), torch.nn.Linear(70, 60), torch.nn.Tanh(), torch.nn.Linear(60, 3)
        ).to(dtype)
        if late:
            self.model.register_parameter("late", torch.nn.Parameter(torch.ones(3, dtype=dtype)))
        params = [*self.model.parameters()]
        if muon:
            params = [{"params": params[:3:2], "rule": "muon"}, {"params": [params[1], *params[3:]]}]
        self.opt = CSDAdam(params, lr=0.01, devices=devices, tile_size=1024, **options)
        self.done, self.dtype = 0, dtype

    def step(self, touch=None):
        generator = torch.Generator().manual_seed(self.done)
        self.model(torch.randn(8, 40, generator=generator).to(self.dtype)).square().sum().backward()
        if self.done >= 2 and "late" in self.model._parameters:
            self.model.late.grad = torch.full_like(self.model.late, self.done)
        if touch:
            touch(self)
        self.opt.step()
        self.opt.zero_grad()
        self.done += 1

    def steps(self, n):
        for _ in range(n):
            self.step()
        return self

    def image(self):
        self.opt.wait()
        states = self.opt.state_dict()["state"]
        return [p.detach().clone() for p in self.model.parameters()] + [
            t.clone() for entry in states.values() for t in entry.values()
        ]


def assert_equal(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a.image(), b.image(), strict=True))


def synchronize_once_cut(opt):
    """Synchronize, although a connection was cut: whoever notices first says so, once."""
    while True:
        try:
            return opt.synchronize()
        except CSDError:
            time.sleep(0.01)
