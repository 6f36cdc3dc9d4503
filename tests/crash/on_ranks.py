"""SIGKILL of one rank of several before, in and after calls by which it changes a file."""

import contextlib
import itertools
import random
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist
from support.ranks import on_living_ranks, on_ranks
from support.twins import Twin, sharded
from torch.nn.parallel import DistributedDataParallel as DDP

import csd_optim

from .processes import KILL_EFFECTS, kill_at
from .training import Violation

BEFORE, AFTER = 3, 1  # steps before a run is closed, and after it is resumed


def _adds_up_in_order(group, bucket):
    """DDP's hook: the mean, added up by rank. DDP's own sum of three depends on where a bucket has a gradient.

    And that is elsewhere after its first backward, so a resumed run would have other bits without any fault.
    """
    mine = bucket.buffer()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    gathered = dist.all_gather(parts, mine, group=group, async_op=True).get_future()
    return gathered.then(lambda _: sum(parts[1:], parts[0]).div_(len(parts)))


# How the ranks divide a model, and how a step overlaps with it: the arguments of overlap(), or None.
WRAPS = {"FSDP2": sharded, "DDP": DDP, "DDP, push": DDP}  # the last one with the hook csd_optim.push
FORWARD, EARLY, FREE = {}, {"backward": True}, {"free_gradients": True}
MODES = [
    *itertools.product(WRAPS, [None, FORWARD]),
    *(("FSDP2", EARLY), ("FSDP2", FREE), ("DDP, push", EARLY)),
]
# Number of ranks, the one that is killed, how the model is divided, and the overlap.
CASES = [(size, victim, *mode) for size in (2, 3) for victim in range(size) for mode in MODES]


class Run:
    """A training with this process as one rank, resumed if there is a store. Use with `with`: it closes."""

    def __init__(self, rank, kind, overlap, name="run"):
        directory = Path(f"{name}-{rank}")
        directory.mkdir(exist_ok=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "there is no store")
            self.training = Twin(
                directory, None, rank=rank, wrap=WRAPS[kind], devices=2, latency="50us", named=True, resume=True
            )
        self.opt, model = self.training.opt, self.training.model
        if kind == "DDP":
            model.register_comm_hook(None, _adds_up_in_order)
        elif kind == "DDP, push":
            model.register_comm_hook(self.opt, csd_optim.push)
        if overlap is not None:
            self.opt.overlap(model, **overlap)
        self.training.steps = self.opt.committed_step

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.opt.close()

    def image(self):
        """The parameters and states after the last step."""
        self.opt.synchronize()
        return self.training.seen()[2:]


def _images(rank, kind):
    """The images of a run that nothing stops, by number of steps."""
    images = []
    with Run(rank, kind, None, f"never-{kind}") as run:
        for _ in range(BEFORE + AFTER + 2):
            images.append(run.image())
            run.training.step()
    return images


def _trains(rank, kind, overlap, survivor_closes):
    """Train, close, resume, train on, close. Notes all the time how many steps are durable.

    A rank that loses its peer closes its optimizer or just ends. Returns the exception raised.
    """
    durable, run = np.memmap(f"durable-{rank}", np.int64, "w+", shape=1), None
    try:
        for steps in (BEFORE, AFTER):
            run = Run(rank, kind, overlap)
            for _ in range(steps):
                run.training.step()
                durable[0] = run.opt.committed_step
            run.opt.close()
            durable[0] = run.opt.committed_step
    except RuntimeError as e:  # gloo's, or a CSDRankError
        if survivor_closes and run:
            with contextlib.suppress(RuntimeError):  # a step failed of which nothing was raised yet
                run.opt.close()
        return str(e)


def _resumes(rank, kind, overlap, images):
    """Resume, compare with the run that nothing stopped, and train one step. Returns the step resumed from."""
    with Run(rank, kind, overlap) as run:
        step = run.opt.committed_step
        assert run.image() == images[rank][step], f"other values after step {step}"
        run.training.step()
        assert run.image() == images[rank][step + 1], f"other values after step {step + 1}"
    return step


class KillsOfRanks:
    """Runs on several ranks, closed and resumed, one of which is killed at a call by which it changes a file."""

    def __init__(self, seed, directory, keep):
        self.choose = random.Random(seed)
        self.directory = directory
        self.keep = keep
        self._calls, self._images = {}, {}

    def calls(self, case):
        """How many calls that rank makes. Their order is not always the same, but their number is in each mode."""
        size, _, kind, _ = case
        if size not in self._calls:
            with self._kill(case, 1 << 60, "before") as (store, rule):
                assert on_ranks(size, _trains, kind, None, True, directory=store) == [None] * size
                self._calls[size] = int(rule["seen"])
        return self._calls[size]

    def at(self, case, call, effect):
        """Kill that rank at this call: no rank hangs, and all find everything. Returns whether it came to the call."""
        size, victim, kind, overlap = case
        what = f"kill {effect} call {call} of rank {victim} of {size} ({kind}, overlap {overlap})"
        images = self._images_of(size, kind)
        with self._kill(case, call, effect) as (store, rule):
            try:
                closes = self.choose.random() < 0.5
                said = on_ranks(size, _trains, kind, overlap, closes, directory=store, may_die=(victim,))
                killed = bool(rule["struck"])
                assert killed or not any(said), said
                rule["active"] = 0
                steps = on_living_ranks(size, _resumes, kind, overlap, images, directory=store)
                durable = max(int(np.memmap(Path(store, f"durable-{rank}"), np.int64)[0]) for rank in range(size))
                assert len({*steps}) == 1, f"resumed from {steps}"
                assert steps[0] >= durable, f"resumed from {steps}, {durable} was durable"
            except AssertionError as e:
                self.keep(store)
                raise Violation(what) from e
        return killed

    @contextlib.contextmanager
    def _kill(self, case, call, effect):
        with (
            TemporaryDirectory(dir=self.directory) as store,
            kill_at(call, KILL_EFFECTS[effect], f"run-{case[1]}/") as rule,
        ):
            yield store, rule

    def _images_of(self, size, kind):
        """The images of a run of that many ranks which nothing stops: per rank, by number of steps."""
        if (size, kind) not in self._images:
            # Stays until the end: in the first such directory living ranks meet, also for later process groups.
            store = Path(self.directory, f"images-{size}-{kind}")
            store.mkdir()
            self._images[size, kind] = on_living_ranks(size, _images, kind, directory=store)
        return self._images[size, kind]
