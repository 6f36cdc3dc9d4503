"""Hydra: `_target_: csd_optim.CSDAdam`, instantiated with the parameters."""

import common
import hydra
from omegaconf import OmegaConf


def fit(optimizer, options, directory):
    if options:
        options = {**options, "devices": [f"{options['devices']}{i}" for i in range(2)]}
    target = f"csd_optim.{optimizer}" if options else f"torch.optim.{optimizer}"
    config = OmegaConf.create({"_target_": target, **common.HYPER, **options})

    def make(model):
        return hydra.utils.instantiate(config, params=model.parameters())

    return common.loop(make)


if __name__ == "__main__":
    common.main(f"Hydra {hydra.__version__}", fit, resume=True)
