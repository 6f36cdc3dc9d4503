"""How many collectives a step() needs: each one costs a round trip to all other ranks."""

import contextlib
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist
from support.ranks import on_living_ranks
from support.replacing import replaced
from support.twins import training_on

from csd_optim.distributed.ranks import Ranks
from csd_optim.replica.versions import numbers

STEPS, WARM_UP = 6, 3  # steps in all; those in which parameters join, groups are made, and the first guess is tried
COLLECTIVES = ("all_to_all_single", "all_gather_single", "all_gather_into_tensor", "all_gather_object", "all_reduce")


def counts(rank, kind, overlap, options):
    """Return the number of collectives within each step(), and of those behind the program, by step."""
    publishes = options.pop("publishes", False)
    training, here, behind = training_on(rank, "this", overlap, kind, **options), Counter(), Counter()
    if publishes:
        published = training.opt.publish("policy", training.model, dtype="bf16")
    within = False

    def counted(collective, *args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            behind[training.steps] += 1
        elif within:
            here[training.steps] += 1
        return collective(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                stack.enter_context(replaced(dist, name, counted))
        stack.enter_context(replaced(Ranks, "exchange", counted))  # of updated parameters, one per bucket
        for _ in range(STEPS):
            training.backward()
            within = True
            training.opt.step()
            within = False
            training.opt.zero_grad()
            training.opt.synchronize()  # the vote on this step is over
    if publishes:
        published.wait()
        assert len(numbers(Path("policy"))) == STEPS + 1
    training.opt.close()
    return [(here[k], behind[k]) for k in range(WARM_UP + 1, STEPS)]


CLIP, EARLY, FREE = {"max_grad_norm": 0.5}, {"backward": True}, {"free_gradients": True}
PUBLISHES = {"named": True, "publishes": True}
records = pytest.mark.at_hand("its updates are on the owner's machine, and record nothing here")
NAMED, TOPK = {"named": True}, {"topk": 0.1, "width": 96}
CASES = [  # collectives within step(), and behind the program; of DDP and HSDP one exchanges the parameters
    ("DDP", None, {}, 2, 0),
    ("DDP", None, {"width": 256}, 15, 0),  # 13 buckets
    ("DDP", None, NAMED, 2, 0),
    ("FSDP2", None, NAMED, 2, 0),
    ("DDP", None, TOPK, 5, 0),  # its steps cannot be undone when they are complete
    ("DDP", None, {**NAMED, **CLIP}, 3, 0),
    ("FSDP2", None, {**NAMED, **CLIP}, 3, 0),
    ("HSDP", None, {**NAMED, **CLIP}, 4, 0),
    pytest.param("DDP", None, PUBLISHES, 2, 0, marks=records),
    pytest.param("FSDP2", None, PUBLISHES, 2, 0, marks=records),
    pytest.param("FSDP2", EARLY, PUBLISHES, 1, 1, marks=records),
    ("DDP", {}, NAMED, 1, 2),
    ("FSDP2", {}, NAMED, 1, 1),
    ("FSDP2", {}, {**NAMED, **CLIP}, 2, 1),
    ("FSDP2", EARLY, NAMED, 1, 1),
    ("FSDP2", FREE, NAMED, 2, 1),
]


@pytest.mark.parametrize(("kind", "overlap", "options", "within", "behind"), CASES, ids=str)
def test_collectives_of_a_step(kind, overlap, options, within, behind, tmp_path):
    size = 4 if kind == "HSDP" else 2
    for counted in on_living_ranks(size, counts, kind, overlap, options, directory=tmp_path):
        assert counted == [(within, behind)] * len(counted)
