"""Two runs of the same training, with overlap and without: everything that a program can observe must be the same."""

import functools
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from support.comparing import bits
from support.exact import Linear
from support.inside import engine_of, guess_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from csd_optim import CSDAdam

SLOW = "file:{}?latency={}&cache=off"  # parameters arrive late enough for a missing wait to show


class Seen(nn.Module):
    """A module that logs its parameters in each forward, before it computes."""

    def __init__(self, inner, log):
        super().__init__()
        self.inner, self.log = inner, log

    def forward(self, x):
        # Compared only at the end: on an accelerator, reading would wait for all queued work.
        self.log.append([p.detach().clone() for p in self.inner.parameters()])
        return self.inner(x.to(self.log[-1][0].device))


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def checksum(t):
    return zlib.crc32(bits(local(t).detach().cpu()).numpy().tobytes())


def sharded(model):
    """Divide the layers of a sequence, and the rest of it, with FSDP2."""
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def hybrid(model):
    """Do the same with HSDP, on four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    return model


WRAPS = {
    "DDP": DDP,
    "views": lambda model: DDP(model, gradient_as_bucket_view=True),
    "HSDP": hybrid,
    "FSDP2": sharded,
    "plain": lambda model: model,
}


class Twin:
    """A small network on slow devices. `overlap`: arguments of CSDAdam.overlap(), or None.

    `named`: devices are named directories, durable. `patient`: wait until each step is complete before the next
    backward, so that a step can begin in it; and wait after backward until that step has copied its gradients, because
    a guess is still right if gradients change before they are copied. `muon`: the matrices of every other layer have
    this rule. `wrap`: a function that wraps the model, for this
    `rank`. `place`: devices of its layers, by turns. `gpu`: devices named before its drives.
    """

    def __init__(
        self,
        directory,
        overlap,
        *,
        dtype=torch.float32,
        devices=1,
        width=48,
        depth=4,
        groups=False,
        muon=False,
        latency="2ms",
        patient=False,
        named=False,
        wrap=lambda model: model,
        rank=0,
        place=("cpu",),
        gpu=(),
        **options,
    ):
        torch.manual_seed(0)
        self.log = []
        layers = [Linear(width, width, dtype=dtype).to(place[k % len(place)]) for k in range(depth)]
        layers = [Seen(layer, self.log) for layer in layers]
        self.model = wrap(nn.Sequential(*layers))
        names = [directory / f"csd{d}" for d in range(devices)]
        for name in names:
            name.mkdir(exist_ok=True)
        params = [*self.model.parameters()]
        if groups:
            decay = [p for p in self.model.parameters() if p.dim() > 1]
            rest = [p for p in self.model.parameters() if p.dim() <= 1]
            params = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        if muon:
            matrices = [p for p in params if p.dim() > 1][1::2]
            rest = [p for p in self.model.parameters() if not any(p is q for q in matrices)]
            params = [{"params": rest}, {"params": matrices, "rule": "muon"}]
        self.opt = CSDAdam(
            params,
            lr=1e-2,
            devices=[*gpu, *(SLOW.format(name, latency) + "&scratch=1" * (not named) for name in names)],
            tile_size=1024,
            **options,
        )
        self.kind = torch.device(place[0]).type
        self.width, self.dtype, self.steps, self.overlap, self.rank = width, dtype, 0, overlap, rank
        self.losses, self.patient = [], patient
        if overlap is not None:
            self.opt.overlap(self.model, **overlap)

    def backward(self, scale=1.0):
        generator = torch.Generator().manual_seed(self.steps + 1000 * self.rank)
        x = torch.randn(3, self.width, generator=generator).to(self.dtype)
        loss = self.model(x).square().sum() * scale
        if self.patient:
            self.opt.wait()
            while not engine_of(self.opt).idle:  # its commit
                time.sleep(1e-4)
        loss.backward()
        if self.patient and (guess := guess_of(self.opt)):
            guess._images.wait()
            table = guess.live.spec.table
            engine_of(self.opt).native.unchanged(np.concatenate([table] * guess.travel.passes.n_passes))  # waits
        self.losses.append(loss.detach())
        self.steps += 1

    def step(self):
        self.backward()
        self.opt.step()
        self.opt.zero_grad()

    def seen(self):
        """Return everything that is compared between twins."""
        state = self.states()
        log = [[checksum(t) if isinstance(t, torch.Tensor) else t for t in entry] for entry in self.log]
        return log, [checksum(loss) for loss in self.losses], self.parameters(), state

    def states(self):
        return {k: [checksum(t) for t in entry.values()] for k, entry in self.opt.state_dict()["state"].items()}

    def parameters(self):
        return [checksum(p) for p in self.model.parameters()]


def assert_twins(directory, overlap, script, **options):
    """Assert that `script(training)` observes the same with overlap as without. Returns the training with overlap."""
    trainings = []
    for name, how in ("with", overlap), ("without", None):
        (directory / name).mkdir()
        training = Twin(directory / name, how, **options)
        script(training)
        trainings.append(training)
    one, other = (t.seen() for t in trainings)
    assert one[0] == other[0], "another parameter was used in forward"
    assert one[1:] == other[1:]
    trainings[1].opt.close()
    return trainings[0]


# ---- on several ranks --------------------------------------------------------------------


def training_on(rank, name, overlap=None, kind="FSDP2", **options):
    """Make one rank's training, of three layers, on a directory of its own."""
    Path(f"{name}-{rank}").mkdir(exist_ok=True)
    options = {"wrap": WRAPS[kind], "latency": "50us", "depth": 3, **options}
    return Twin(Path(f"{name}-{rank}"), overlap, rank=rank, **options)


def now(training):
    """Return checksums of parameters and states."""
    states = training.states()
    return training.parameters(), states


def blocking(rank, steps, kind="FSDP2", **options):
    """Return now() of an undisturbed training without overlap, which each process computes once.

    All ranks must call it alike.
    """
    training, images = _undisturbed(rank, kind, **options)
    while len(images) < steps:
        training.step()
        images.append(now(training))
    return images[steps - 1]


@functools.cache  # the ranks' processes live on
def _undisturbed(rank, kind, **options):
    return training_on(rank, "undisturbed", None, kind, **options), []
