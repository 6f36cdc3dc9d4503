"""Lightning's CLI, with the optimizer by name in its YAML file; resumes from its checkpoint at the end of an epoch."""

import common
import torch
import trainers

import csd_optim


def fit(optimizer, options, directory):
    trainers.STEPS, trainers.SAVED, trainers.BATCHES = common.STEPS, common.SAVED, 1
    cls = getattr(csd_optim if options else torch.optim, optimizer)
    resume = (directory / f"step={common.SAVED}.ckpt").exists()
    return trainers.lightning_cli(cls, options, directory, resume)


if __name__ == "__main__":
    import lightning.pytorch.cli

    common.main(f"Lightning CLI {lightning.__version__}", fit, overwrite=True)
