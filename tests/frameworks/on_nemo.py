"""NeMo Automodel: `_target_: csd_optim.CSDAdam` in a YAML file, through its own loader of such files."""

import importlib.metadata
import json

import common
from nemo_automodel.components.config.loader import load_yaml_config
from nemo_automodel.components.optim.optimizer import build_optimizer_config


def fit(optimizer, options, directory):
    file = directory / "train.yaml"
    target = f"csd_optim.{optimizer}" if options else f"torch.optim.{optimizer}"
    file.write_text(json.dumps({"optimizer": {"_target_": target, **common.HYPER, **options}}))
    described = load_yaml_config(str(file)).optimizer.to_dict()
    config = build_optimizer_config(described.pop("_target_"), described)
    return common.loop(lambda model: config.build(model)[0])


if __name__ == "__main__":
    common.main(f"NeMo Automodel {importlib.metadata.version('nemo_automodel')}", fit, resume=True)
