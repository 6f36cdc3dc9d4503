"""Trainings with `gpu:` beside named directories, and without."""

import torch
from support.backends import TILE
from support.on_accelerator import DEVICE, DTYPES, keep_busy
from support.optimizers import ADAMW

SHAPES = [(), (5, 7), (0,), (2, TILE), (3 * TILE + 5,), (40, 60), (11, 3)]


def randn(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def params_on(device, shapes=SHAPES, seed=0):
    params = [randn(shape, seed + i).to(device, DTYPES[i % 3]) for i, shape in enumerate(shapes)]
    params[-2] = params[-2].t()  # strided, so that a contiguous copy is updated
    params[-1] = randn(shapes[-1], seed, torch.complex64).to(device)
    return [p.requires_grad_() for p in params]


class Trained:
    """An optimizer and its parameters on a device."""

    def __init__(self, devices, device=DEVICE, pair=ADAMW, *, seed=0, params=None, **options):
        self.params = params_on(device, seed=seed) if params is None else params
        options = {"tile_size": TILE, "lr": 1e-2, **pair.kwargs, **options}
        self.opt = pair.ours(self.params, devices=devices, **options)

    def step(self, k, without=()):
        for i, p in enumerate(self.params):
            p.grad = None if i in without else randn(p.shape, 100 * k + i, p.dtype).to(p.device)
        keep_busy()
        self.opt.step()
        for p in self.params:
            if p.grad is not None:
                p.grad.fill_(torch.nan)  # from here on the program may overwrite it
        return self

    def bits(self):
        return [t.detach().cpu().clone() for p in self.params for _, t in [("", p), *sorted(self.opt.state[p].items())]]

    def rows(self):
        """Return the rows of stats() for the accelerator and the directory."""
        return self.opt.stats()["devices"]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))
