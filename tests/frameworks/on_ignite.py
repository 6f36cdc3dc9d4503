"""Ignite: the optimizer is the script's own; continues from the checkpoint that Ignite's handler saved."""

import common
import ignite
import torch
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from torch.nn import functional as F

import csd_optim


def loss(logits, target):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def fit(optimizer, options, directory):
    torch.manual_seed(0)
    model, losses = common.LanguageModel(), []
    cls = getattr(csd_optim if options else torch.optim, optimizer)
    optimizer = cls(model.parameters(), **common.HYPER, **options)
    trainer = create_supervised_trainer(model, optimizer, loss)
    parts = {"model": model, "optimizer": optimizer, "trainer": trainer}
    saver = Checkpoint(parts, DiskSaver(directory, require_empty=False), filename_pattern="half.pt")
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=common.SAVED), saver)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    data = [(batch, batch) for batch in common.batches()]
    if (directory / "half.pt").exists():
        Checkpoint.load_objects(parts, torch.load(directory / "half.pt"))
        data = data[common.SAVED :]  # Ignite knows the step, not where the data were
    trainer.run(data, max_epochs=1, epoch_length=common.STEPS)
    return common.finished(losses, model, optimizer)


if __name__ == "__main__":
    common.main(f"Ignite {ignite.__version__}", fit, overwrite=True)
