"""fastai: `opt_func=partial(OptimWrapper, opt=CSDAdam, ...)`; continues from what Learner.save() saved."""

from functools import partial

import common
import torch
from torch.nn import functional as F

import csd_optim


def loss(logits, target):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def loaders(part):
    from fastai.data.core import DataLoaders

    tokens = torch.cat(part)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens, tokens), batch_size=4)
    return DataLoaders(loader, loader)


def fit(optimizer, options, directory):
    from fastai.callback.core import Callback
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    class Losses(Callback):
        def before_fit(self):
            self.seen = []

        def after_batch(self):
            if self.training:
                self.seen.append(self.learn.loss.item())

    torch.manual_seed(0)
    model, kept, losses, data = common.LanguageModel(), Losses(), [], common.batches()
    cls = getattr(csd_optim if options else torch.optim, optimizer)
    make = partial(OptimWrapper, opt=cls, betas=common.BETAS, **options)
    first, second = loaders(data[: common.SAVED]), loaders(data[common.SAVED :])
    learner = Learner(first, model, loss, opt_func=make, path=directory, cbs=kept)
    resumes = (directory / "models" / "half.pth").exists()
    if resumes:
        learner.load("half", with_opt=True)
    with learner.no_logging():
        for part in [second] if resumes else [first, second]:
            learner.dls = part
            learner.fit(1, lr=common.LR, wd=common.WEIGHT_DECAY)
            losses += kept.seen
            if part is first:
                learner.save("half", with_opt=True)
    return common.finished(losses, model, learner.opt.opt)


if __name__ == "__main__":
    common.import_torchvision()
    import fastai.learner

    common.main(f"fastai {fastai.__version__}", fit, overwrite=True)
