"""Axolotl: its own path from a YAML file to a trained model, with our plugin in it; resumes from its checkpoint."""

import json
import os
from types import SimpleNamespace

os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}

import axolotl
import common
import pytest
import tokenizers
import torch
import transformers
from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.integrations.base import BasePlugin
from axolotl.train import train as axolotl_train
from axolotl.utils.dict import DictDefault

from csd_optim import CSDAdam, CSDError
from csd_optim.integrations.axolotl import CSDOptimPlugin


class Losses(BasePlugin):
    """Keeps the loss of each step, which Axolotl's log rounds. Without our plugin it sets AdamW as that sets CSDAdam.

    Where an optimizer is set, Axolotl exempts embeddings from weight decay; with `optimizer: adamw_torch` it does not.
    """

    def post_trainer_create(self, cfg, trainer):
        trainer.losses = []
        if not cfg.csd_optim:
            hyper = {"lr": common.LR, "betas": common.BETAS, "eps": trainer.args.adam_epsilon}
            trainer.optimizer_cls_and_kwargs = (torch.optim.AdamW, hyper)
        trainer.model.register_forward_hook(lambda module, args, output: trainer.losses.append(output.loss.item()))


def make_model(directory):
    """Save a tiny Llama with random weights, a tokenizer of 20 words, and sentences of them."""
    torch.manual_seed(0)
    vocabulary = {**{f"w{i}": i for i in range(20)}, "<pad>": 20, "<eos>": 21, "<unk>": 22}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(directory / "model")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=23, pad_token_id=20, eos_token_id=21, **shape)
    transformers.LlamaForCausalLM(config).save_pretrained(directory / "model")
    sentences = [" ".join(f"w{i}" for i in text) for text in torch.cat(common.batches()).tolist()]
    (directory / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in sentences))


def fit(optimizer, options, directory):
    if not (directory / "model").exists():
        make_model(directory)
    ours = {"plugins": ["csd_optim.integrations.axolotl.CSDOptimPlugin"], "csd_optim": options} if options else {}
    saved = directory / "out" / f"checkpoint-{common.SAVED}"
    file = directory / "train.yaml"
    file.write_text(
        json.dumps(  # JSON is YAML
            {
                "base_model": str(directory / "model"),
                "datasets": [{"path": str(directory / "data.jsonl"), "ds_type": "json", "type": "completion"}],
                "dataset_prepared_path": str(directory / "prepared"),
                "output_dir": str(directory / "out"),
                "sequence_len": 32,
                "micro_batch_size": 4,
                "gradient_accumulation_steps": 1,
                "max_steps": common.STEPS,
                "save_steps": common.SAVED,
                "learning_rate": common.LR,
                "weight_decay": common.WEIGHT_DECAY,
                "adam_beta1": common.BETAS[0],
                "adam_beta2": common.BETAS[1],
                "lr_scheduler": "linear",
                "optimizer": "adamw_torch",
                "attn_implementation": "sdpa",
                "seed": 0,
                **dict.fromkeys(["bf16", "fp16", "tf32", "gradient_checkpointing"], False),
                **({"resume_from_checkpoint": str(saved)} if saved.exists() else {}),
                **ours,
                "plugins": [*ours.get("plugins", []), "on_axolotl.Losses"],
            }
        )
    )
    cfg = load_cfg(str(file))
    _, _, trainer = axolotl_train(cfg, load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    assert isinstance(optimizer, CSDAdam) == bool(options)
    return common.finished(trainer.losses, trainer.model, optimizer)


def refuses():
    """What would otherwise train with another optimizer, unsaid."""
    plugin = CSDOptimPlugin()
    args = SimpleNamespace(learning_rate=1, adam_beta1=0.9, adam_beta2=0.99, adam_epsilon=1e-8)
    for cfg, optimizer, error in (
        ({"optimizer": "muon"}, None, "optimizer: muon and the plugin CSDOptimPlugin exclude each other"),
        ({"optimizer": "adamw_torch", "deepspeed": "zero2.json"}, None, "deepspeed: has an optimizer of its own"),
        ({"optimizer": "adamw_torch_fused"}, object(), "already has an optimizer"),
    ):
        trainer = SimpleNamespace(args=args, optimizer=optimizer, optimizer_cls_and_kwargs=None)
        with pytest.raises(CSDError, match=error):
            plugin.post_trainer_create(DictDefault(cfg), trainer)
        assert trainer.optimizer_cls_and_kwargs is None


if __name__ == "__main__":
    refuses()
    common.main(f"Axolotl {axolotl.__version__}", fit, overwrite=True)
