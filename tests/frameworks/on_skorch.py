"""skorch: `optimizer=CSDAdam`, with options as `optimizer__devices`; continues from the store."""

import common
import skorch
import torch
from torch.nn import functional as F

import csd_optim


class Loss(torch.nn.Module):
    def forward(self, logits, target):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def fit(optimizer, options, directory):
    torch.manual_seed(0)
    net = skorch.NeuralNet(
        common.LanguageModel,
        Loss,
        optimizer=getattr(csd_optim if options else torch.optim, optimizer),
        **{f"optimizer__{name}": value for name, value in {**common.HYPER, **options}.items()},
        max_epochs=1,
        batch_size=4,
        train_split=None,
        verbose=0,
    )
    net.initialize()
    first = getattr(net.optimizer_, "committed_step", 0)
    data = torch.cat(common.batches()[first:])
    net.partial_fit(data, data)
    losses = [batch["train_loss"] for batch in net.history[-1]["batches"]]
    return common.finished(losses, net.module_, net.optimizer_)


if __name__ == "__main__":
    common.main(f"skorch {skorch.__version__}", fit, resume=True)
