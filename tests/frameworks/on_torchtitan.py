"""torchtitan: its containers of optimizers and schedules around FSDP2 parameters, and its flat state dict saved by DCP.

Its Trainer asks for a GPU.
"""

import importlib.metadata
from unittest import mock

import common
import pytest
import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import ConfigManager
from torchtitan.models.llama3 import config_registry

from csd_optim import CSDValueError
from csd_optim.integrations.torchtitan import CSDOptimizersContainer, csd_adam


def adamw():
    hyper = {**common.HYPER, "eps": 1e-8}
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=hyper)
    return OptimizersContainer.Config(param_groups=[group], implementation="for-loop")


def fit(optimizer, options, directory):
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model, losses = common.LanguageModel(), []
    for block in model.blocks:
        fully_shard(block, mesh=dist.init_device_mesh("cpu", (1,)))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    config = csd_adam(**common.HYPER, **options) if options else adamw()
    optimizers = config.build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2, decay_type="linear").build(
        optimizers=optimizers, training_steps=common.STEPS
    )
    saved, first = directory / "step-10", 0
    if saved.exists():
        parts = {"model": get_model_state_dict(model), "optimizer": optimizers, "schedule": schedule}
        dcp.load(parts, checkpoint_id=saved)
        set_model_state_dict(model, parts["model"])
        first = common.SAVED
    for step, batch in enumerate(common.batches()[first:], first):
        if step == common.SAVED and not saved.exists():
            dcp.save(
                {"model": get_model_state_dict(model), "optimizer": optimizers, "schedule": schedule},
                checkpoint_id=saved,
            )
        loss = common.next_token_loss(model, batch)
        loss.backward()
        optimizers.step()
        schedule.step()
        optimizers.zero_grad()
        losses.append(loss.item())
    (optimizer,) = optimizers.optimizers
    return common.finished(losses, model, optimizer)


def refuses():
    """Options of the optimizer among a group's, which torchtitan would put there without a word."""
    group = ParamGroupConfig(pattern=".*", optimizer_name="CSDAdam", optimizer_kwargs={"lr": 1, "devices": "ram:"})
    for config, error in (
        ({"param_groups": [group]}, "'devices' is an option of the optimizer, not of a group"),
        ({"param_groups": csd_adam().param_groups, "implementation": "fused_opt_states_bf16"}, "state_dtype='8bit'"),
    ):
        with pytest.raises(CSDValueError, match=error):
            CSDOptimizersContainer.Config(**config).build(model_parts=[torch.nn.Linear(2, 2)])


def passes_its_parser():
    """torchtitan parses its command line into a copy of the configuration."""
    default = config_registry.llama3_debugmodel()
    default.optimizer = csd_adam(devices="/mnt/nvme{local_rank}")
    with mock.patch.object(config_registry, "llama3_debugmodel", return_value=default):
        parsed = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel"])
    assert isinstance(parsed.optimizer, CSDOptimizersContainer.Config)
    assert parsed.optimizer.optimizer_factory_kwargs_by_name == {"CSDAdam": {"devices": "/mnt/nvme{local_rank}"}}


if __name__ == "__main__":
    refuses()
    passes_its_parser()
    common.main(f"torchtitan {importlib.metadata.version('torchtitan')}", fit, overwrite=True)
