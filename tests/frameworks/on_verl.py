"""verl's build_optimizer(), which its FSDP engine calls; and what it does between steps to park an optimizer."""

import importlib.metadata

import common
from verl.utils.fsdp_utils import load_fsdp_optimizer, offload_fsdp_optimizer
from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer


def fit(optimizer, options, directory):
    config = FSDPOptimizerConfig(
        optimizer_impl="csd_optim" if options else "torch.optim",
        optimizer=optimizer,
        override_optimizer_config=options,
        **common.HYPER,
    )

    def park(optimizer):
        offload_fsdp_optimizer(optimizer)
        load_fsdp_optimizer(optimizer, "cpu")

    return common.loop(lambda model: build_optimizer(model.parameters(), config), park)


if __name__ == "__main__":
    common.main(f"verl {importlib.metadata.version('verl')}", fit, resume=True)
