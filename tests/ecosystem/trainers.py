"""Short trainings with popular trainers, each a function of the optimizer's class and its options.

    run(Optimizer, options, directory, resume=False, overlap=None) -> Run

trains STEPS steps of two batches each, and saves a checkpoint below `directory` in the middle. With resume=True it is
the same script started again, which resumes from that checkpoint. Libraries are imported lazily, because that takes
seconds. Nothing is downloaded. `overlap`: arguments of CSDAdam.overlap(), or None for no overlap.

Those with a trainer also run on several ranks (with an initialized process group), each of which sees as many batches.
With consolidate=True the states of all ranks are consolidated before a checkpoint is written.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.language_model import LanguageModel, next_token_loss
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler

STEPS, SAVED, BATCHES = 8, 4, 2  # steps, the step of the checkpoint, batches per step
LR, WEIGHT_DECAY, CLIP = 1e-2, 0.1, 0.5


@dataclass
class Run:
    losses: list[float]  # per batch
    params: dict[str, torch.Tensor]  # trained parameters, by name
    state: dict[str, dict[str, torch.Tensor]]  # the optimizer's states, by the same names
    overlap: dict | None = None  # the entry of stats()


def finished(losses, model, optimizer):
    """Return the Run of a finished training, and close its devices."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    params = {name: whole(p.detach()) for name, p in named.items()}
    state = {name: {key: whole(t) for key, t in optimizer.state[p].items()} for name, p in named.items()}
    if not hasattr(optimizer, "close"):
        return Run(losses, params, state)
    overlap = optimizer.stats().get("overlap")
    optimizer.close()
    return Run(losses, params, state, overlap)


def assert_close(run, reference):
    """Assert equality up to what 8 or 20 steps make of fp32's last bits, 6e-8: 1e-5 of a loss, 2e-5 of a norm."""
    assert run.losses == pytest.approx(reference.losses, rel=1e-5)
    assert run.params.keys() == reference.params.keys()
    for name, theirs in reference.params.items():
        pairs = [(run.params[name], theirs), *((run.state[name][k], v) for k, v in reference.state[name].items())]
        for a, b in pairs:
            assert (a - b).norm() <= 2e-5 * b.norm(), name


def assert_same_bits(run, reference):
    assert run.losses == reference.losses[-len(run.losses) :]
    assert run.params.keys() == reference.params.keys()
    for name, p in reference.params.items():
        assert torch.equal(run.params[name], p), name
        assert run.state[name].keys() == reference.state[name].keys()
        for key, value in reference.state[name].items():
            assert torch.equal(run.state[name][key], value), (name, key)


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t.clone()


def ranks():
    return dist.get_world_size() if dist.is_initialized() else 1


def library(name):
    """Import a library without network access, or skip the test if it is not installed."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    return pytest.importorskip(name, reason=f"{name} is not installed")


def texts(batches):
    """Return `batches` batches of four sentences: (4 * batches, 13), int64."""
    starts = torch.randint(20, (4 * batches, 1), generator=torch.Generator().manual_seed(1))
    return (starts + torch.arange(13)) % 20


def schedule_of(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))


# ---- without a trainer ---------------------------------------------------------------------


def loop(model, loss_of, Optimizer, options, directory, resume, overlap):
    """Gradient accumulation, clipping, a schedule, and a checkpoint of everything by torch.save."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = Optimizer(params, lr=LR, weight_decay=WEIGHT_DECAY, **options)
    schedule = schedule_of(optimizer)
    os.makedirs(directory, exist_ok=True)
    file, first, losses = Path(directory) / "checkpoint.pt", 0, []
    if resume:
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first = SAVED
    if overlap is not None:
        optimizer.overlap(model, **overlap)
    batches = texts(STEPS * BATCHES).split(4)
    for step in range(first, STEPS):
        for batch in batches[step * BATCHES : (step + 1) * BATCHES]:
            loss = loss_of(batch)
            (loss / BATCHES).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step + 1 == SAVED and not resume:
            saved = {"model": model, "optimizer": optimizer, "schedule": schedule}
            torch.save({name: part.state_dict() for name, part in saved.items()}, file)
    return finished(losses, model, optimizer)


def compiled(Optimizer, options, directory, resume=False, overlap=None):
    """The model is compiled by torch.compile, the step is not."""
    torch.manual_seed(0)
    model = torch.compile(LanguageModel(), backend="aot_eager")  # the inductor would need a compiler
    return loop(model, lambda batch: next_token_loss(model, batch), Optimizer, options, directory, resume, overlap)


# ---- Hugging Face --------------------------------------------------------------------------


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, tie_word_embeddings=True, **shape))


def hugging_face(trainer_options, model, directory, resume, consolidate=False, overlap=None, **more):
    """Train with transformers.Trainer. `trainer_options`: a function of the model that returns options about the
    optimizer. `more`: further TrainingArguments.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Consolidate(TrainerCallback):
        def on_step_end(self, arguments, state, control, optimizer, **_):
            if control.should_save:
                optimizer.optimizer.consolidate_state_dict()

        on_epoch_end = on_step_end

    class Overlap(TrainerCallback):
        def on_train_begin(self, arguments, state, control, model, optimizer, **_):
            optimizer.optimizer.overlap(model, **overlap)

    losses = []
    model.register_forward_hook(lambda module, args, output: losses.append(output.loss.item()))
    options = {
        "max_steps": STEPS,
        "save_steps": SAVED,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": BATCHES,
        "learning_rate": LR,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": CLIP,
    }
    arguments = TrainingArguments(directory, use_cpu=True, disable_tqdm=True, report_to=[], **(options | more))
    data = [{"input_ids": text, "labels": text} for text in texts(STEPS * BATCHES * ranks())]
    callbacks = [Consolidate()] * consolidate + [Overlap()] * (overlap is not None)
    trainer = Trainer(
        model, arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks, **trainer_options(model)
    )
    trainer.train(resume_from_checkpoint=os.path.join(directory, f"checkpoint-{SAVED}") if resume else None)
    return finished(losses, model, trainer.optimizer.optimizer)


def hugging_face_optimizers(Optimizer, options, directory, resume=False, overlap=None, dtype=torch.float32):
    library("transformers")

    def trainer_options(model):
        optimizer = Optimizer(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, **options)
        return {"optimizers": (optimizer, schedule_of(optimizer))}

    return hugging_face(trainer_options, llama().to(dtype), directory, resume, overlap=overlap)


def hugging_face_class(Optimizer, options, directory, resume=False, **more):
    """The trainer itself makes the optimizer: groups with and without weight decay, a linear schedule."""
    library("transformers")
    trainer_options = {"optimizer_cls_and_kwargs": (Optimizer, {"lr": LR, **options})}
    return hugging_face(lambda model: trainer_options, llama(), directory, resume, **more)


def peft_lora(Optimizer, options, directory, resume=False, overlap=None):
    """LoRA: two small trained matrices beside each of some frozen ones."""
    library("transformers")
    peft = library("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return loop(model, lambda batch: model(batch, labels=batch).loss, Optimizer, options, directory, resume, overlap)


def accelerate(Optimizer, options, directory, resume=False, overlap=None, consolidate=False, set_up=lambda: None):
    library("accelerate")
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=BATCHES, step_scheduler_with_optimizer=False)
    set_up()
    model = LanguageModel()
    optimizer = Optimizer(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, **options)
    loader = torch.utils.data.DataLoader(texts(STEPS * BATCHES * ranks()), batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule_of(optimizer))
    if overlap is not None:
        optimizer.optimizer.overlap(model, **overlap)
    losses = []
    if resume:
        accelerator.load_state(directory)
        loader = accelerator.skip_first_batches(loader, SAVED * BATCHES)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = next_token_loss(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == SAVED * BATCHES and not resume:
            if consolidate:
                optimizer.optimizer.consolidate_state_dict()
            accelerator.save_state(directory)
    return finished(losses, accelerator.unwrap_model(model), optimizer.optimizer)


# ---- Lightning -----------------------------------------------------------------------------


def for_large_state():
    """Return arguments of Lightning's Trainer. By default it would build and read checkpoints in memory, and move
    resumed states to the GPU.
    """
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class MappedCheckpoints(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.save(checkpoint, f"{path}.part")
            os.replace(f"{path}.part", path)

        def load_checkpoint(self, path, map_location=None, weights_only=None):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)

    class StateStays(SingleDeviceStrategy):
        def load_optimizer_state_dict(self, checkpoint):
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                optimizer.load_state_dict(state)

    return {"plugins": [MappedCheckpoints()], "strategy": StateStays("cpu")}


def lightning_module(overlap, **methods):
    """Return a class that trains a LanguageModel and keeps its losses, with these further methods."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = LanguageModel(), []

        def training_step(self, batch):
            loss = next_token_loss(self.model, batch)
            self.losses.append(loss.item())
            return loss

        def on_fit_start(self):
            if overlap is not None:
                self.trainer.optimizers[0].overlap(self, **overlap)

    for name, method in methods.items():
        setattr(Module, name, method)
    return Module


def lightning(Optimizer, options, directory, resume=False, overlap=None, trainer_options=dict):
    library("lightning")
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    def configure_optimizers(module):
        optimizer = Optimizer(module.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, **options)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule_of(optimizer), "interval": "step"},
        }

    torch.manual_seed(0)
    module = lightning_module(overlap, configure_optimizers=configure_optimizers)()
    checkpoints = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks(),
        max_epochs=STEPS // SAVED,
        limit_train_batches=SAVED * BATCHES,
        accumulate_grad_batches=BATCHES,
        gradient_clip_val=CLIP,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_options(),
    )
    loader = torch.utils.data.DataLoader(texts(SAVED * BATCHES * ranks()), batch_size=4)
    trainer.fit(module, loader, ckpt_path=os.path.join(directory, f"step={SAVED}.ckpt") if resume else None)
    return finished(module.losses, module, trainer.optimizers[0])


def lightning_cli(Optimizer, options, directory, resume=False, overlap=None):
    """All is in a YAML file, the optimizer by name; the checkpoint is made at the end of the first epoch."""
    library("lightning")
    library("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    def train_dataloader(module):
        return torch.utils.data.DataLoader(texts(SAVED * BATCHES), batch_size=4)

    checkpoints = {"dirpath": str(directory), "filename": "{step}", "save_top_k": -1}
    configuration = {
        "seed_everything": 0,
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": STEPS // SAVED,
            "accumulate_grad_batches": BATCHES,
            "gradient_clip_val": CLIP,
            "callbacks": [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": checkpoints}],
            **dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False),
        },
        "optimizer": {
            "class_path": f"{Optimizer.__module__}.{Optimizer.__name__}",
            "init_args": {"lr": LR, "weight_decay": WEIGHT_DECAY, **options},
        },
        "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.ExponentialLR", "init_args": {"gamma": 0.7}},
        "ckpt_path": os.path.join(directory, f"step={SAVED}.ckpt") if resume else None,
    }
    os.makedirs(directory, exist_ok=True)
    file = Path(directory) / "fit.yaml"
    file.write_text(json.dumps(configuration))  # JSON is YAML
    module = lightning_module(overlap, train_dataloader=train_dataloader)
    with (
        mock.patch.object(sys, "argv", sys.argv[:1]),  # the CLI warns of others
        mock.patch.dict(os.environ, JSONARGPARSE_DEPRECATION_WARNINGS="off"),  # which are meant for Lightning
    ):
        cli = LightningCLI(module, args=["fit", "--config", str(file)], save_config_callback=None)
    return finished(cli.model.losses, cli.model, cli.trainer.optimizers[0])


TRAINERS = [compiled, hugging_face_optimizers, hugging_face_class, peft_lora, accelerate, lightning, lightning_cli]
