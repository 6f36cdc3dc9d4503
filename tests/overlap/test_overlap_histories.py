"""Random histories: whatever a program does between steps, it sees the same values as without overlap."""

import random
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.between_steps import History
from support.ranks import on_living_ranks
from support.twins import assert_twins
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from csd_optim.step.live import LiveStep


@pytest.mark.parametrize("seed", range(24))
def test_random_history(tmp_path, seed):
    choose = random.Random(-1 - seed)
    dtype = choose.choice([torch.float32, torch.bfloat16, torch.float16])
    options = {"devices": choose.choice([1, 2]), "groups": choose.random() < 0.3, "amsgrad": choose.random() < 0.2}
    options |= {"max_grad_norm": choose.choice([None, None, 0.5, 1e9]), "named": choose.random() < 0.4}
    options |= {"state_dtype": choose.choice(["fp32", "8bit"]), "latency": choose.choice(["50us", "1ms"])}
    options |= {"patient": choose.random() < 0.5}
    overlap = choose.choice([{}, {"backward": True}, {"backward": True}, {"backward": True, "hold": "30KB"}])
    if not overlap:
        options["topk"] = choose.choice([None, 0.05])
    assert_twins(tmp_path, overlap, History(seed), dtype=dtype, **options).opt.close()


def fsdp2(model, **options):
    for layer in model[:3]:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model[0].set_modules_to_forward_prefetch([model[1]])
    return model


WRAPS = {
    "FSDP2": fsdp2,
    "FSDP2 bf16": lambda model: fsdp2(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "DDP": DDP,
    "DDP, whole": DDP,
    "DDP with views": lambda model: DDP(model, gradient_as_bucket_view=True, static_graph=True),
}


def histories_on_ranks(rank, kind, seeds):
    """Returns the number of steps that landed after step() had returned."""
    with mock.patch.object(LiveStep, "land", autospec=True, side_effect=LiveStep.land) as landed:
        for seed in seeds:
            choose = random.Random(-1 - seed)
            options = {"dtype": choose.choice([torch.float32, torch.bfloat16]), "devices": choose.choice([1, 2])}
            options |= {"max_grad_norm": choose.choice([None, 0.5]), "named": choose.random() < 0.5}
            options |= {"state_dtype": choose.choice(["fp32", "8bit"]), "latency": choose.choice(["50us", "1ms"])}
            directory = Path(f"{seed}-{rank}")
            directory.mkdir()
            options |= {"wrap": WRAPS[kind], "rank": rank, "sharded": "whole" not in kind}
            assert_twins(directory, {}, History(seed), **options).opt.close()
    return landed.call_count


@pytest.mark.ci
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 12), marks=pytest.mark.soak)], ids=str)
@pytest.mark.parametrize("kind", WRAPS)
def test_random_histories_on_ranks(kind, seeds, tmp_path):
    one, other = on_living_ranks(2, histories_on_ranks, kind, seeds, directory=tmp_path)
    assert one == other > 3
