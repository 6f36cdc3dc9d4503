"""timm: one line registers CSDAdam, and `--opt csdadam` or create_optimizer_v2() finds it."""

import common

from csd_optim import CSDAdam


def fit(optimizer, options, directory):
    from timm.optim import OptimInfo, create_optimizer_v2
    from timm.optim._optim_factory import default_registry

    default_registry.register(OptimInfo("csdadam", CSDAdam, "AdamW on devices", has_betas=True))
    hyper = {**common.HYPER, "betas": list(common.BETAS)}  # as its command line has them

    def make(model):
        return create_optimizer_v2(model, opt=optimizer.lower(), **hyper, **options)

    return common.loop(make)


if __name__ == "__main__":
    common.import_torchvision()
    import timm

    common.main(f"timm {timm.__version__}", fit, resume=True)
