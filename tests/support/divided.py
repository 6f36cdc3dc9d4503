"""Trainings whose parameters are divided over ranks in various ways, with the bits of a twin that trains alone.

Gradients are given, the same for every division of the parameters, so a training has the same bits on any number of
ranks.
"""

import contextlib
import functools
import os
import warnings

import torch
import torch.distributed as dist
from support.comparing import assert_same
from support.optimizers import MuonOfMatrices, by_group
from support.ranks import on_living_ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from csd_optim import CSDSGD, CSDAdagrad, CSDAdam, CSDLion, CSDRMSprop
from csd_optim.checkpoint.export import export_torch
from csd_optim.distributed.sharding import rows_of
from csd_optim.store.format import FILE_NAME

TILE = 1024
DENSE = {"weight": (43, 37), "rows": (130,), "one": (1, 7), "late": (12, 30), "waiting": (9, 5)}
HSDP = {"hsdp": (2, 2), "hsdp replicas": (2, 2), "hsdp 1": (2, 1)}  # replicas and shards
KINDS = {  # FSDP2 shards contiguous parameters of one dtype only
    "fsdp2": DENSE,
    "any": {**DENSE, "columns": (70, 33), "bits16": (37, 40), "phase": (7, 3), "scalar": (), "empty": (0, 3)},
    "groups": {"weight": (12, 64), "rows": (6, 4, 32), "vector": (256,)},  # 8-bit: 2, 3 and 4 ranks have whole groups
    "odd": {"weight": (12, 64), "odd": (13, 37)},
    "large": {"weight": (90, 50), "columns": (70, 60), "small": (5,)},  # Top-K divides no small ones
    "aligned": {"weight": (12, 64), "tall": (96, 32)},  # matrices of which 2, 3 and 4 ranks have whole groups
    "tiny": {"weight": (12, 64), "small": (3,)},
}
RULES = {
    "AdamW": (CSDAdam, {}),
    "amsgrad": (CSDAdam, {"amsgrad": True}),
    "8bit": (CSDAdam, {"state_dtype": "8bit"}),
    "8bit amsgrad": (CSDAdam, {"state_dtype": "8bit", "amsgrad": True}),
    "Top-K": (CSDAdam, {"topk": 0.1}),
    "SGD": (CSDSGD, {"momentum": 0.9}),
    "Adagrad": (CSDAdagrad, {}),
    "RMSprop": (CSDRMSprop, {"centered": True}),
    "Lion": (CSDLion, {}),
    "a rule per group": (by_group, {}),
    "Muon": (MuonOfMatrices, {}),
    "8bit Adagrad": (CSDAdagrad, {"state_dtype": "8bit"}),
    "8bit Muon": (MuonOfMatrices, {"state_dtype": "8bit", "matrices": "8bit"}),
}
# A kind of model; how, on how many ranks and on how many devices it was and will be trained; --sharding. Each division
# is once the old one and once the new one, and so are more ranks and fewer.
CHANGES = {
    "DDP 3 to 2": ("any", ("ddp", 3, 1), ("ddp", 2, 1), None),
    "DDP 2 to 3, with other devices": ("any", ("ddp", 2, 2), ("ddp", 3, 1), None),
    "FSDP2 2 to 3": ("fsdp2", ("fsdp2", 2, 1), ("fsdp2", 3, 2), None),
    "FSDP2 3 to DDP 2": ("fsdp2", ("fsdp2", 3, 1), ("ddp", 2, 1), "ddp"),
    "DDP 2 to FSDP2 3": ("fsdp2", ("ddp", 2, 1), ("fsdp2", 3, 2), None),
    "FSDP2 3 to HSDP 4": ("fsdp2", ("fsdp2", 3, 1), ("hsdp", 4, 1), "hsdp:2x2"),
    "HSDP 4 to DDP 3": ("fsdp2", ("hsdp", 4, 1), ("ddp", 3, 1), None),
    "HSDP replicas to HSDP 2": ("fsdp2", ("hsdp replicas", 4, 1), ("hsdp 1", 2, 1), "hsdp:2x1"),
    "2 to one": ("any", ("ddp", 2, 1), ("alone", 1, 3), None),
    "one to replicas": ("any", ("alone", 1, 2), ("none", 2, 1), "none"),
    "replicas to 3": ("any", ("none", 2, 1), ("none", 3, 1), None),
    "replicas to rows": ("any", ("none", 2, 1), ("ddp", 3, 1), "fsdp2"),
    "the same number": ("any", ("ddp", 2, 1), ("ddp", 2, 2), None),
}


class DividedTraining:
    """A rank's training: `division` says how parameters are divided over `size` ranks, `rule` is a key of RULES.

    `dtype`: of most parameters. `spread`: gradients of one parameter are of very different sizes.
    """

    def __init__(
        self, kind, division, rank=0, size=1, devices="ram:", rule="AdamW", *, dtype="float32", spread=False, **options
    ):
        self.rank, self.size, self.division, self.spread = rank, size, division, spread
        self.model = torch.nn.ParameterDict()
        for name, shape in KINDS[kind].items():
            value = noise(shape, name)
            if name == "columns":
                value = noise(shape[::-1], name).t()
            self.model[name] = value.to(
                {"bits16": torch.bfloat16, "phase": torch.complex64}.get(name, getattr(torch, dtype))
            )
        if division == "fsdp2":
            fully_shard(self.model)
        elif division.startswith("hsdp"):
            fully_shard(
                self.model, mesh=dist.device_mesh.init_device_mesh("cpu", HSDP[division], mesh_dim_names=("r", "s"))
            )
        elif division == "columns":
            for name in self.model:
                mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
                self.model[name] = torch.nn.Parameter(distribute_tensor(self.model[name].detach(), mesh, [Shard(1)]))
        class_, own = RULES[rule]
        options = {"tile_size": TILE, "sharded": division not in ("none", "hsdp replicas"), **own, **options}
        self.opt = class_(self.model.named_parameters(), lr=0.01, devices=devices, **options)
        self.done = self.opt.committed_step if self.opt.state else 0

    def until(self, step):
        while self.done < step:
            for name, p in self.model.items():
                if name == "waiting" or (name == "late" and self.done < 2):
                    continue
                grad = noise(p.shape, f"{name} {self.done}")
                grad = (grad * 10 ** (1.2 * noise(p.shape, name) - 2) if self.spread else grad).to(p.dtype)
                p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
            self.opt.user_state = {"rank": self.rank}
            self.opt.step()
            self.done += 1
        return self

    def image(self):
        """This rank's parameters, and its part of all states, with `step`."""
        found = {}
        for name, p in self.model.items():
            for key, value in {"itself": p.detach(), **self.opt.state.get(p, {})}.items():
                value = value.to_local() if isinstance(value, DTensor) else value
                own = key == "itself" and self.division in ("ddp", "hsdp", "hsdp 1") and p.dim()
                found[name, key] = self._share(value).clone() if own else value.clone()
        return found

    def of_twin(self, image):
        """This rank's part of what a training alone has."""
        divided = self.division != "none"
        return {
            (name, key): self._rows(value) if divided and value.dim() and key != "step" else value
            for (name, key), value in image.items()
        }

    def _share(self, value):
        """This rank's rows of a local tensor that replicas have in common."""
        replicas, shards = HSDP.get(self.division, (self.size, 1))
        return value.narrow(0, *rows_of(len(value), replicas, self.rank // shards))

    def _rows(self, value):
        """This rank's rows of a whole tensor."""
        replicas, shards = HSDP.get(self.division, (1, self.size))
        value = value.narrow(0, *rows_of(len(value), shards, self.rank % shards))
        return (
            value
            if self.division == "hsdp replicas"
            else value.narrow(0, *rows_of(len(value), replicas, self.rank // shards))
        )


def noise(shape, name):
    seed = torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31)
    return torch.randn(shape, generator=seed)


@functools.cache
def twin(kind, step, rule="AdamW"):
    training = DividedTraining(kind, "alone", rule=rule)
    return training.until(step).image()


def places(run, rank, n=1):
    return [f"{run}-{rank}-{d}" for d in range(n)]


def names(run, size, n=1):
    """The directories of all ranks."""
    return [place for rank in range(size) for place in places(run, rank, n)]


def to(run, n=1):
    return [f"{run}-{{rank}}-{d}" for d in range(n)]


def begins(rank, size, kind, division, run, step, n, rule="AdamW", options=None):
    training = DividedTraining(kind, division, rank, size, places(run, rank, n), rule, **(options or {}))
    training.until(step).opt.synchronize()
    training.opt.close()


def makes(rank, size, kind, division, run, n, options):
    """Makes the stores, and takes no step."""
    DividedTraining(kind, division, rank, size, places(run, rank, n), resume=True, **options).opt.close()


def goes_on(rank, size, kind, division, run, n, rule, twins, options):
    """Resumes, compares with a training alone, and does so again after more steps. `twins`: its images, by step.

    Returns the rank that saved its `user_state`, and the ranks that saved all resumed user states.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "user_state differs")
        training = DividedTraining(kind, division, rank, size, places(run, rank, n), rule, resume=True, **options)
    with training.opt as opt:
        resumed_user_states = [state["rank"] for state in opt.resumed_user_states]
        assert opt.user_state["rank"] in resumed_user_states
        own = opt.user_state["rank"]
        assert opt.committed_step == training.done == min(twins)
        for last, image in twins.items():
            training.until(last)
            assert_same(training.image(), training.of_twin(image))
        opt.synchronize()
        return own, resumed_user_states


def on(size, function, *arguments, directory):
    if size > 1:
        return on_living_ranks(size, function, size, *arguments, directory=directory)
    with inside(directory):
        return [function(0, 1, *arguments)]


@contextlib.contextmanager
def inside(directory):
    before = os.getcwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def resumed(size, kind, division, run, step, n=1, rule="AdamW", *, directory, more=2, **options):
    """Resume, take `more` steps, and compare: see goes_on()."""
    twins = {last: twin(kind, last, rule) for last in (step, step + more)}
    return on(size, goes_on, kind, division, run, n, rule, twins, options, directory=directory)


def files(directory, run):
    return {path.parent.name: path.read_bytes() for path in sorted(directory.glob(f"{run}-*/{FILE_NAME}"))}


def exported(directory, run, size, n=1):
    [out] = export_torch([directory / name for name in names(run, size, n)], directory / f"{run}.pt")
    found = torch.load(out)
    del found["csd_optim"]["user_state"]
    for p in found["csd_optim"]["params"]:
        del p["stride"]  # of ranks' stores, an export is in index order
    return found
