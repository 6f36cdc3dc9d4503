"""Trainings whose commits ranks make together, and how they are killed and go on."""

import contextlib
import functools
import os
import signal
import warnings
from pathlib import Path

import torch
from support import served
from support.ranks import on_living_ranks
from support.replacing import replaced

from csd_optim import CSDAdam
from csd_optim.engine.commit.commit import Commit
from csd_optim.engine.commit.durable import DurableCommitter
from csd_optim.engine.engine import Engine
from csd_optim.store.file import StoreFile

KEYS = ("master", "exp_avg", "exp_avg_sq", "step", "residual")


TOPK = None if served.assumed() else 0.1  # with optimizer ranks, the residual is in no store


def devices_of(rank, run="run"):
    return [f"{run}/rank-{rank}/device-{d}" for d in range(2)]


class ShardTraining:
    """Parameters that differ from rank to rank, as shards do. Gradients depend only on the rank and the step number."""

    def __init__(self, rank, devices=None, own=None, overlap=False, **options):
        own = rank if own is None else own  # for replicas, the same on all ranks
        generator = torch.Generator().manual_seed(own)
        sizes = (((90, 50), torch.float32), ((60, 30), torch.bfloat16), ((7,), torch.float32))  # the first is sparse
        self.params = [torch.nn.Parameter(torch.randn(size, generator=generator).to(d)) for size, d in sizes]
        self.own = own
        devices = devices or devices_of(rank)
        for device in devices:
            if ":" not in device:
                Path(device).parent.mkdir(parents=True, exist_ok=True)
        options = {"lr": 0.1, "tile_size": 1024, "topk": TOPK, "sharded": False, **options}
        self.opt = CSDAdam(self.params, devices=devices, **options)
        self.model = torch.nn.ParameterList(self.params)
        if overlap:
            self.opt.overlap(self.model)
        self.done = self.opt.user_state.get("done", 0)

    def step(self):
        generator = torch.Generator().manual_seed(1000 * self.own + self.done)
        for p in self.params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        self.opt.user_state = {"done": self.done + 1}
        self.opt.step()
        self.done += 1
        return self

    def until(self, step):
        while self.done < step:
            self.step()
        return self

    def image(self):
        """The bits of every parameter and every state."""
        state = self.opt.state
        tensors = [*self.params, *(state[p][key] for p in self.params for key in KEYS if key in state[p])]
        return [t.detach().clone().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


@functools.cache
def uninterrupted(rank, step, topk=TOPK):
    """The image of an undisturbed training in memory."""
    return ShardTraining(rank, ["ram:"], topk=topk).until(step).image()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def train_to(rank, step, options=None):
    """Trains up to `step`. Returns committed step, step count and image at the beginning, and the image at the end."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "there is no store")
        training = ShardTraining(rank, resume=True, **(options or {}))
    with training.opt:
        first = training.opt.committed_step, training.done, training.image() if training.opt.state else None
        return (*first, training.until(step).image())


def goes_on(directory, size=2, step=6, options=None):
    """Asserts that all ranks resume at the same step and reach the right end. Returns the step."""
    topk = (options or {}).get("topk", TOPK)
    said = on_living_ranks(size, train_to, step, options, directory=directory)
    for rank, (committed, done, image, last) in enumerate(said):
        assert committed == done == said[0][0]
        assert image is None if done == 0 else image == uninterrupted(rank, done, topk)
        assert last == uninterrupted(rank, step, topk)
    return said[0][0]


def dies_at(point, step):
    """Kills this process at `point` of a step or its commit."""

    def before_tiles_are_finished(finish, engine, **how):
        if engine.states.step + 1 == step:
            die()
        finish(engine, **how)

    def on_one_device(publish, store, staged, copy):
        if copy == 0 and staged.superblock.step == step and staged.superblock.device == 1:
            die()
        publish(store, staged, copy)

    def is_of_the_step(commit):
        return commit._staged[0].superblock.step == step

    def after_copy_0(prepare, commit, in_parallel):
        prepare(commit, in_parallel)
        if is_of_the_step(commit):
            die()

    def before_it_says_so(own_round, committer):
        if committer.states.step == step:
            committer.background.wait()
            die()
        return own_round(committer)

    def before_copy_1(complete, commit, in_parallel):
        if is_of_the_step(commit):
            die()
        complete(commit, in_parallel)

    owner, name, function = {
        "within the step": (Engine, "finish", before_tiles_are_finished),
        "copy 0 on one device": (StoreFile, "publish", on_one_device),
        "after copy 0": (Commit, "prepare", after_copy_0),
        "before confirm": (DurableCommitter, "own_round", before_it_says_so),
        "before copy 1": (Commit, "complete", before_copy_1),
    }[point]
    return replaced(owner, name, function)


def train_until_death(rank, point, step, victims, ends, options=None):
    """Trains until the victims die. The surviving ranks are then killed, too, or close their optimizers (`ends`)."""
    with dies_at(point, step) if rank in victims else contextlib.nullcontext():
        training = ShardTraining(rank, **(options or {}))
        try:
            training.until(step + 3)
        except RuntimeError as e:  # from torch: other ranks are gone
            if ends == "killed":
                die()
            training.opt.close()
            return str(e)


POINTS = {  # and the number of steps that are committed then
    "within the step": 2,
    "copy 0 on one device": 2,
    "after copy 0": 3,
    "before confirm": 3,
    "before copy 1": 3,
}
