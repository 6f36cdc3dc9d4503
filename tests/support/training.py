"""A training with every kind of parameter. Gradients depend only on the step, so that any two runs can be compared."""

import functools
import os
import shutil
from pathlib import Path

import torch
from support.backends import place
from support.comparing import params_of
from support.optimizers import ADAMW

from csd_optim import CSDAdam
from csd_optim.store.format import FILE_NAME, read_contents

LATE = 3  # the step in which a parameter has its first gradient
JOIN = 5  # before this step a parameter group is added
bf16, fp16, c64 = torch.bfloat16, torch.float16, torch.complex64


def model(seed):
    """Return every kind of parameter, over several tiles; `late` and `never` have no gradient at first."""
    generator = torch.Generator().manual_seed(seed)

    def new(*shape, dtype=torch.float32, generator=generator):
        return torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

    own = torch.Generator().manual_seed(0)  # parameters without a state are the same for every seed
    params = {
        "fp32": new(3000),
        "bf16": new(60, 70, dtype=bf16),
        "fp16": new(33, dtype=fp16),
        "complex": new(11, dtype=c64),
        "channels_last": torch.nn.Parameter(new(4, 3, 5, 5).detach().contiguous(memory_format=torch.channels_last)),
        "transposed": torch.nn.Parameter(new(20, 30, dtype=bf16).detach().t()),
        "scalar": new(),
        "empty": new(0, 3),
        "late": new(700, dtype=bf16, generator=own),
        "never": new(5, generator=own),
        "amsgrad": new(2500),
        "joined": new(1100, dtype=fp16, generator=own),
    }
    params["expanded"] = torch.nn.Parameter(new(40, 2).detach()[:, 0])  # not dense
    return params


class Training:
    """`model()` and its optimizer. Gradients depend only on the step. `of`: a Pair; group 1 has its other options."""

    def __init__(self, devices, done=0, seed=1, of=ADAMW, **options):
        self.params = model(seed)
        first = [(n, p) for n, p in self.params.items() if n not in ("amsgrad", "joined")]
        groups = [
            {"params": first},
            {"params": [("amsgrad", self.params["amsgrad"])], **of.other, "lr": 0.01, "weight_decay": 0.3},
        ]
        options = {"lr": torch.tensor(0.03), "tile_size": 1024, **of.kwargs, **options}
        self.topk = options.get("topk")
        self.joined = done >= JOIN
        if self.joined:
            groups.append(self.joining())
        self.opt = of.ours(groups, devices=devices, **options)
        self.done = self.opt.user_state.get("done", 0)

    def joining(self):
        topk = {"topk": self.topk} if self.topk else {}
        return {"params": [("joined", self.params["joined"])], "eps": 1e-6, **topk}

    def step(self, without=()):
        number = self.done + 1
        if number >= JOIN and not self.joined:
            self.opt.add_param_group(self.joining())
            self.joined = True
        generator = torch.Generator().manual_seed(100 + number)
        for name, p in self.params.items():
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            waits = name in without or name == "never" or (name == "late" and number < LATE)
            p.grad = None if waits else grad
        self.opt.user_state = {"done": number}
        self.opt.step()
        self.done = number

    def steps(self, n):
        for _ in range(n):
            self.step()
        return self

    def image(self):
        return image(self.opt, self.params)

    def close(self):
        image = self.image()
        self.opt.close()
        return image


def bits(t):
    return t.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()


def image(opt, params):
    """Return the bits of every parameter in the store and of every state, and every hyperparameter."""
    held = {}
    for name, p in params.items():
        entry = opt.state.get(p, {})
        held |= {(name, key): bits(value) for key, value in entry.items()}
        if entry:
            held[name, "param"] = bits(p)
    for k, group in enumerate(opt.param_groups):
        held[k] = {n: group.get(n) for n in ("lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad")}
    return held


@functools.cache
def never_stopped(steps, topk=None, of=ADAMW):
    training = Training("ram:", topk=topk, of=of).steps(steps)
    return training.close()


def resumed(devices, done=0, **options):
    """Return a Training of a new model that resumes `devices`."""
    return Training(devices, done, seed=2, resume=True, **options)


def crashed(devices, to):
    """Copy what is on the devices now, as a process killed now would leave it. Returns the copies as devices."""
    copies = []
    for i, device in enumerate([devices] if isinstance(devices, (str, Path)) else devices):
        to.mkdir(exist_ok=True)
        shutil.copytree(place(device), to / f"copy{i}")
        copies.append(str(device).replace(str(place(device)), str(to / f"copy{i}")))
    return copies


def parameters(*shapes, dtype=torch.float32):
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def give_gradients(params, step, only=None):
    """Give the parameters, or `only` these of them, random gradients that depend only on the step."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = grad if only is None or any(p is q for q in only) else None


def train(opt, steps=1, first=0, only=None):
    """Make `steps` steps, numbered from `first`, with the gradients of give_gradients(). Returns the optimizer."""
    for step in range(first, first + steps):
        give_gradients(params_of(opt), step, only)
        opt.step()
    return opt


def trained(params, steps=1, **options):
    """Return a CSDAdam over `params` after `steps` steps."""
    return train(CSDAdam(params, **options), steps)


def stored(*devices):
    return [(place(d) / FILE_NAME).read_bytes() for d in devices]


def groups_of(*shapes, dtype=torch.float32, names=None):
    """Return a parameter group for each list of shapes."""
    groups = [parameters(*s, dtype=dtype) for s in shapes]
    names = iter(names or ())
    return [{"params": [(n, p) for p, n in zip(g, names, strict=False)] or g} for g in groups]


def flip(device, section, element, *, current=True, tile=0):
    file = place(device) / FILE_NAME
    contents = read_contents(file)
    extent, _, at = [*contents.slots()][tile]
    size = 4 * extent["tile_elems"] * len(extent["sections"])
    if not current:
        at += -size if contents.tiles["slot"][tile] else size
    with file.open("r+b") as f:
        f.seek(at + 4 * (section * extent["tile_elems"] + element))
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 1]))
