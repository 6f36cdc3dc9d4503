"""The optimizer's statistics appear in a trainer's log, whatever it logs to."""

import pytest
import torch
from trainers import library, llama, texts

from csd_optim import CSDAdam, CSDTypeError
from csd_optim.trainers import log_stats, scalars


def test_scalars(tmp_path):
    p = torch.nn.Parameter(torch.ones(5000))
    with CSDAdam([p], devices=[f"file:{tmp_path}/a?tbw=600TB", "ram:"], max_grad_norm=1.0, tile_size=4096) as opt:
        for _ in range(2):
            p.grad = torch.ones_like(p)
            opt.step()
        stats, found = opt.stats(), scalars(opt.stats(), "csd")
    assert found["csd/grad_norm"] == pytest.approx(5000**0.5)
    assert found["csd/step_seconds"] == stats["seconds"]["step"] > 0
    assert found["csd/written_bytes"] == stats["written_bytes"] > 0
    assert found["csd/days_left"] == stats["devices"][0]["days_left"] > 0
    assert "csd/waited_seconds" not in found
    assert {type(value) for value in found.values()} == {float}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_hugging_face(tmp_path):
    library("transformers")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Report(TrainerCallback):  # like those for TensorBoard, Weights & Biases, MLflow, which come before others
        def on_log(self, arguments, state, control, logs, **_):
            logged.append((state.global_step, dict(logs)))

    logged = []
    arguments = TrainingArguments(
        tmp_path / "out",
        max_steps=4,
        logging_steps=2,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
    )
    data = [{"input_ids": text, "labels": text} for text in texts(8)]
    trainer = Trainer(
        llama(),
        arguments,
        train_dataset=data,
        callbacks=[Report()],
        optimizer_cls_and_kwargs=(CSDAdam, {"devices": tmp_path / "csd"}),
    )
    log_stats(trainer)
    trainer.train()
    *steps, _ = logged  # the last entry summarizes the training
    assert [step for step, _ in steps] == [2, 4]
    for _, logs in steps:
        assert logs["loss"] > 0
        assert logs["csd_optim/flash_write_bytes"] > 0
    assert steps[1][1]["csd_optim/written_bytes"] > steps[0][1]["csd_optim/written_bytes"]


def test_lightning(tmp_path):
    library("lightning")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers.logger import Logger

    class Report(Logger):
        name = version = "report"

        def log_metrics(self, metrics, step=None):
            logged.append((step, metrics))

        def log_hyperparams(self, *_, **__):
            pass

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(10, 10)

        def training_step(self, batch, i):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return CSDAdam(self.parameters(), devices=tmp_path / "csd")

    logged = []
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=Report(),
        log_every_n_steps=2,
        accumulate_grad_batches=2,
        default_root_dir=tmp_path,
        **quiet,
    )
    log_stats(trainer)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(10, 10), batch_size=1))  # 5 steps
    found = [(step, metrics) for step, metrics in logged if "csd_optim/step_seconds" in metrics]
    assert [step for step, _ in found] == [2, 4]
    assert found[1][1]["csd_optim/written_bytes"] > found[0][1]["csd_optim/written_bytes"] > 0


def test_what_is_no_trainer_of_ours():
    with pytest.raises(CSDTypeError, match="not Linear"):
        log_stats(torch.nn.Linear(1, 1))
