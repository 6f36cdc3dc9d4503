"""Random histories: whatever a program does between steps, it sees what it would see without overlap."""

import random
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.ranks import on_living_ranks
from support.twins import assert_twins, checksum
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from csd_optim.step.run import StepRunner


class History:
    """The same for both of the twins: what happens follows from the seed."""

    def __init__(self, seed):
        self.seed = seed

    def __call__(self, training):
        self.choose, self.training = random.Random(self.seed), training
        scheduler = torch.optim.lr_scheduler.StepLR(training.opt, 3, 0.7)
        for _ in range(self.choose.randint(5, 9)):
            for _ in range(self.choose.choice([1, 1, 1, 2, 3])):
                training.backward()
                self.maybe(0.1, self.look, self.write_parameters, self.edit_state)
            if self.choose.random() < 0.1:
                training.opt.zero_grad()
                continue
            self.maybe(
                0.2, self.clip, self.change_lr, self.write_parameters, self.scale_gradients, self.look, self.wait
            )
            training.opt.step()
            self.maybe(0.2, self.look, self.evaluate, self.write_parameters, self.load, self.wait)
            scheduler.step()
            self.clear()
            self.maybe(0.2, self.evaluate, self.edit_state, self.look)

    def maybe(self, chance, *actions):
        for action in actions:
            if self.choose.random() < chance:
                action()

    def clear(self):
        how = self.choose.choice(["opt", "opt", "model", "zeros"])
        if how == "model":
            self.training.model.zero_grad()
        else:
            self.training.opt.zero_grad(set_to_none=how == "opt")

    def parameter(self):
        return self.choose.choice(list(self.training.model.parameters()))

    def clip(self):
        nn.utils.clip_grad_norm_(self.training.model.parameters(), self.choose.choice([1e-2, 1.0, 1e9]))

    def change_lr(self):
        self.choose.choice(self.training.opt.param_groups)["lr"] *= self.choose.choice([0.5, 1.0, 2.0])

    def write_parameters(self):
        p = self.parameter()
        with torch.no_grad():
            (p if self.choose.random() < 0.5 else p.data).mul_(0.75)

    def scale_gradients(self):
        p = self.parameter()
        if p.grad is not None:
            p.grad.mul_(self.choose.choice([1.0, 0.5]))

    def edit_state(self):
        if state := self.training.opt.state.get(self.parameter()):
            state["exp_avg"].mul_(0.5)

    def look(self):
        state = self.training.opt.state
        self.training.log.append([checksum(t) for entry in state.values() for t in entry.values()])

    def evaluate(self):
        with torch.no_grad():
            self.training.model(torch.ones(2, self.training.width).to(self.training.dtype))

    def load(self):
        self.training.opt.load_state_dict(self.training.opt.state_dict())

    def wait(self):
        self.training.opt.wait()


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
    "DDP with views": lambda model: DDP(model, gradient_as_bucket_view=True, static_graph=True),
}


def histories_on_ranks(rank, kind, seeds):
    """How many steps landed after step() had returned."""
    with mock.patch.object(StepRunner, "launch", autospec=True, side_effect=StepRunner.launch) as launched:
        for seed in seeds:
            choose = random.Random(-1 - seed)
            options = {"dtype": choose.choice([torch.float32, torch.bfloat16]), "devices": choose.choice([1, 2])}
            options |= {"max_grad_norm": choose.choice([None, 0.5]), "named": choose.random() < 0.5}
            options |= {"state_dtype": choose.choice(["fp32", "8bit"]), "latency": choose.choice(["50us", "1ms"])}
            directory = Path(f"{seed}-{rank}")
            directory.mkdir()
            options |= {"wrap": WRAPS[kind], "rank": rank, "sharded": "FSDP2" in kind}
            assert_twins(directory, {}, History(seed), **options).opt.close()
    return launched.call_count


@pytest.mark.parametrize("kind", WRAPS)
def test_random_histories_on_ranks(kind, tmp_path):
    one, other = on_living_ranks(2, histories_on_ranks, kind, range(3), directory=tmp_path)
    assert one == other > 5
