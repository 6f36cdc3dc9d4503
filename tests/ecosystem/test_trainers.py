"""Popular trainers with one line changed: the real libraries, on the CPU, with models that need no download."""

import contextlib
import functools
import pathlib
import warnings
from unittest import mock

import pytest
import torch
from support.language_model import LanguageModel, next_token_loss
from support.memory import LIMIT, memory_limit
from support.owners import Owner
from torch.optim import AdamW
from trainers import (
    BATCHES,
    CLIP,
    LR,
    SAVED,
    STEPS,
    TRAINERS,
    WEIGHT_DECAY,
    accelerate,
    assert_close,
    assert_same_bits,
    finished,
    for_large_state,
    hugging_face_class,
    hugging_face_optimizers,
    library,
    lightning,
    lightning_cli,
    lightning_module,
    peft_lora,
    texts,
)

from csd_optim import CSDAdam, CSDRuntimeError, CSDWarning
from csd_optim.overlap.guess import Guess
from csd_optim.params import memory_warnings as materialized
from csd_optim.store.format import FILE_NAME, read_contents

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),
]
each_trainer = pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.__name__)


@functools.cache
def uninterrupted(trainer):
    """Make a run. Returns it and the directory of its checkpoint.

    A warning would show that a trainer replaces entries of `state`, or copies the optimizer; none does.
    """
    directory = pathlib.Path.cwd() / "uninterrupted"
    with warnings.catch_warnings(), mock.patch.object(materialized, "WORTH_A_WARNING", 1000):
        warnings.simplefilter("error", CSDWarning)
        return trainer(CSDAdam, {}, directory), directory


@each_trainer
def test_one_line_changed(trainer, tmp_path):
    reference = trainer(AdamW, {}, tmp_path / "adamw")
    assert reference.losses[-1] < reference.losses[0]
    assert_close(uninterrupted(trainer)[0], reference)


@each_trainer
def test_resumed_run_equals_the_uninterrupted_one(trainer, monkeypatch):
    """It has the same bits; and trainers that load the state into memory cause a warning."""
    monkeypatch.setattr(materialized, "WORTH_A_WARNING", 1000)
    whole, directory = uninterrupted(trainer)
    with pytest.warns(CSDWarning, match="came from memory") as caught:
        resumed = trainer(CSDAdam, {}, directory, resume=True)
    assert len(resumed.losses) == (STEPS - SAVED) * BATCHES
    assert_same_bits(resumed, whole)
    told = {w.filename for w in caught if issubclass(w.category, CSDWarning)}
    assert len(told) == 1
    where = dict.fromkeys(["lightning", "lightning_cli"], "/lightning/") | {
        "compiled": "/trainers.py",
        "peft_lora": "/trainers.py",
    }
    assert where.get(trainer.__name__, "/accelerate/") in told.pop()


@each_trainer
@pytest.mark.parametrize("option", ["overwrite", "resume"])
def test_the_same_on_named_devices(trainer, option, tmp_path):
    """If the restarted script finds a store that is ahead of the checkpoint, the checkpoint counts."""
    options = {"devices": [str(tmp_path / "csd0"), str(tmp_path / "csd1")], option: True}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "there is no store", CSDWarning)
        whole = trainer(CSDAdam, options, tmp_path)
    assert_same_bits(trainer(CSDAdam, options, tmp_path, resume=True), whole)


@pytest.mark.parametrize("trainer", [hugging_face_class, accelerate, lightning])
def test_the_same_on_optimizer_ranks_by_the_environment_alone(trainer, tmp_path, monkeypatch):
    whole = uninterrupted(trainer)[0]
    with Owner(tmp_path) as owner:
        monkeypatch.setenv("CSD_OPTIM_DEVICES", owner.address)
        run, resumed = trainer(CSDAdam, {}, tmp_path), trainer(CSDAdam, {"overwrite": True}, tmp_path, resume=True)
        owner.stop()
    assert run.losses == whole.losses
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    for name, p in whole.params.items():
        assert torch.equal(run.params[name], p), name
        assert torch.equal(resumed.params[name], p), name


def test_torchs_own_rounding_is_as_large():
    """Where Adam amplifies rounding, as that of a key's bias, whose gradient is 0 but for rounding, torch's plain and
    its fused AdamW differ as much from each other, and from float64, as CSDAdam does.
    """
    library("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    shape |= dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)

    def after_12_steps(Optimizer, dtype=torch.float32, **options):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=20, **shape)).to(dtype)
        optimizer = Optimizer(model.parameters(), lr=LR, **options)
        for batch in texts(12).split(4):
            model(batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().double().flatten() for p in model.parameters()])

    exact, plain, fused = (
        after_12_steps(AdamW, torch.float64),
        after_12_steps(AdamW, foreach=False),
        after_12_steps(AdamW, fused=True),
    )
    ours = after_12_steps(CSDAdam)

    def distance(a, b):
        return ((a - b).norm() / exact.norm()).item()

    torchs = max(distance(plain, exact), distance(fused, exact))
    assert distance(plain, fused) > 1e-6
    assert distance(ours, exact) <= 5 * torchs
    assert max(distance(ours, plain), distance(ours, fused)) <= 5 * torchs


def test_a_dtype_in_a_configuration_file(tmp_path):
    """It is text there, and rounds the gradients."""
    run, exact = lightning_cli(CSDAdam, {"grad_dtype": "bfloat16"}, tmp_path), uninterrupted(lightning_cli)[0]
    assert run.losses[:BATCHES] == exact.losses[:BATCHES]
    assert run.losses[BATCHES:] != exact.losses[BATCHES:]
    assert run.losses == pytest.approx(exact.losses, rel=0.02)


def test_16_bit_parameters(tmp_path):
    """Checkpoints contain the masters of 16-bit parameters."""
    run = functools.partial(hugging_face_optimizers, CSDAdam, {}, tmp_path, dtype=torch.bfloat16)
    whole = run()
    assert any((whole.params[name] != entry["master"]).any() for name, entry in whole.state.items())
    assert_same_bits(run(resume=True), whole)


def test_lora_takes_space_for_what_is_trained_only(tmp_path):
    run = peft_lora(CSDAdam, {"devices": tmp_path / "csd", "tile_size": 512}, tmp_path)
    trained = sum(p.numel() for p in run.params.values())
    assert trained == 2 * 2 * (32 * 4 + 4 * 32)
    assert all("lora" in name for name in run.params)
    held = sum(extent["tile_elems"] for extent, *_ in read_contents(tmp_path / "csd" / FILE_NAME).slots())
    assert trained <= held < trained + 1024


# ---- overlap ---------------------------------------------------------------------------------

FORWARD, BACKWARD = {}, {"backward": True}


@pytest.fixture
def kept(monkeypatch):
    """Return for each guess that step() kept how many tiles were ready before it.

    Every backward waits until the previous step has landed, so that a guess is made whenever it may be, however slow
    the machine is.
    """
    found, optimizers = [], []
    overlap, backward, keep = CSDAdam.overlap, torch.Tensor.backward, Guess.keep

    def noted(optimizer, *arguments, **options):
        optimizers.append(optimizer)
        overlap(optimizer, *arguments, **options)

    def patient(loss, *arguments, **options):
        optimizers[-1].wait()
        backward(loss, *arguments, **options)

    def kept(guess, *arguments):
        found.append(len(guess.pushed))
        return keep(guess, *arguments)

    monkeypatch.setattr(CSDAdam, "overlap", noted)
    monkeypatch.setattr(Guess, "keep", kept)
    monkeypatch.setattr(torch.Tensor, "backward", lambda *a, **o: (patient if optimizers else backward)(*a, **o))
    return found


@each_trainer
@pytest.mark.parametrize("overlap", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_overlap(trainer, overlap, kept, tmp_path):
    """The checkpoint, too, is the one without. All of these clip: where that changes gradients, guesses are wrong."""
    whole, resumed = (trainer(CSDAdam, {}, tmp_path, overlap=overlap, resume=resume) for resume in (False, True))
    for run in (whole, resumed):
        assert_same_bits(run, uninterrupted(trainer)[0])
        assert run.overlap["redone"].keys() <= ({"gradients"} if overlap else set())
        # After wrong guesses it pauses. On a busy machine a guess may be right, if gradients are read after clipping.
        assert sum(run.overlap["redone"].values()) <= 3 or kept
    assert overlap or not kept


@pytest.mark.parametrize("clip", [None, 0, 1e9], ids=["clipped", "unclipped", "norm only"])
def test_guesses_with_hugging_face(clip, kept, tmp_path):
    """Guesses are right in each step from the third on, though gradients are accumulated, and multiplied by 1, and the
    model is evaluated between steps.
    """
    more = {"max_grad_norm": CLIP if clip is None else clip, "eval_strategy": "steps", "eval_steps": 3}
    plain, run = (
        hugging_face_class(CSDAdam, {"tile_size": 1024}, tmp_path / name, overlap=overlap, **more)
        for name, overlap in (("plain", None), ("overlap", BACKWARD))
    )
    assert_same_bits(run, plain)
    assert len(run.losses) > STEPS * BATCHES
    if clip is None:
        assert kept or 1 <= run.overlap["redone"]["gradients"] <= 3  # of the six; after wrong guesses it pauses
    else:
        assert run.overlap["redone"] == {}
        assert len(kept) == STEPS - 2
        assert all(kept)


# ---- torch.compile ---------------------------------------------------------------------------


def test_step_inside_a_compiled_function():
    """The graph breaks at step(), which runs correctly."""

    def compiled(Optimizer, compile):
        torch.manual_seed(0)
        model = LanguageModel()
        optimizer = Optimizer(model.parameters(), lr=LR)

        @compile
        def step(batch):
            loss = next_token_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        losses = [step(batch).item() for batch in texts(8).split(4)]
        return finished(losses, model, optimizer)

    reference = compiled(AdamW, lambda f: f)
    run = compiled(CSDAdam, torch.compile(backend="aot_eager"))
    assert_close(run, reference)


# ---- trainers that make the optimizer again, while they still hold the older one -------------


def learning_rate_found(trainer, module):
    from lightning.pytorch.tuner import Tuner

    Tuner(trainer).lr_find(module, num_training=10, max_lr=0.1)
    trainer.fit(module)


def batch_size_found(trainer, module):
    from lightning.pytorch.tuner import Tuner

    Tuner(trainer).scale_batch_size(module, max_trials=2, steps_per_trial=2)
    trainer.fit(module)


def fit_twice(trainer, module):
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)


def two_trainers(trainer, module):
    trainer.fit(module)
    lightning_once().fit(module)


def lightning_once():
    from lightning.pytorch import Trainer

    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"], False)
    return Trainer(accelerator="cpu", devices=1, max_epochs=1, gradient_clip_val=CLIP, **quiet)


@pytest.mark.filterwarnings("ignore:.*weights_only")
@pytest.mark.parametrize("how", [learning_rate_found, batch_size_found, fit_twice, two_trainers])
@pytest.mark.parametrize("overlap", [None, {"backward": True}], ids=["", "overlap"])
def test_lightning_makes_the_optimizer_again(how, overlap, tmp_path, monkeypatch):
    library("lightning")
    monkeypatch.chdir(tmp_path)

    def run(Optimizer, **options):
        made = []

        def configure_optimizers(module):
            made.append(Optimizer(module.parameters(), lr=module.lr, weight_decay=WEIGHT_DECAY, **options))
            return made[-1]

        def train_dataloader(module):
            return torch.utils.data.DataLoader(texts(8), batch_size=module.batch_size)

        torch.manual_seed(0)
        methods = {"configure_optimizers": configure_optimizers, "train_dataloader": train_dataloader}
        module = lightning_module(overlap if options else None, **methods)()
        module.lr, module.batch_size = LR, 4
        how(lightning_once(), module)
        assert len(made) == 2
        run = finished(module.losses, module, made[-1])
        if options:
            with pytest.raises(CSDRuntimeError, match="was replaced by a newer one"):
                made[0].state_dict()
        return run

    assert_close(run(CSDAdam, devices=tmp_path / "csd", overwrite=True), run(AdamW))


# ---- memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", [hugging_face_class, accelerate])
def test_checkpoints_can_be_mapped(trainer, tmp_path, monkeypatch):
    """With torch's own setting, checkpoints are memory-mapped: nothing comes from memory, so there is no warning."""
    monkeypatch.setattr(materialized, "WORTH_A_WARNING", 1000)
    whole = trainer(CSDAdam, {}, tmp_path)
    with torch.utils.serialization.config.patch({"load.mmap": True}), warnings.catch_warnings():
        warnings.simplefilter("error", CSDWarning)
        assert_same_bits(trainer(CSDAdam, {}, tmp_path, resume=True), whole)


def test_lightning_with_large_state(tmp_path, monkeypatch):
    """As docs/trainers.md says, no state comes from memory, and none is moved to the model's device."""
    library("lightning")
    from lightning.pytorch.strategies import strategy

    monkeypatch.setattr(materialized, "WORTH_A_WARNING", 1000)
    monkeypatch.setattr(strategy, "_optimizer_to_device", lambda optimizer, device: pytest.fail("state is moved"))
    run = functools.partial(lightning, CSDAdam, {}, tmp_path, trainer_options=for_large_state)
    whole = run()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CSDWarning)
        assert_same_bits(run(resume=True), whole)


class Large(torch.nn.Module):
    """A model of 8 M parameters, with 96 MiB of states."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8 << 20, dtype=torch.bfloat16))

    def forward(self, input_ids, labels):
        return {"loss": (self.weight * labels).sum()}


def large_hugging_face(stack):
    library("transformers")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Limit(TrainerCallback):
        def on_step_end(self, arguments, state, control, **_):
            stack.enter_context(memory_limit(LIMIT))

        def on_save(self, arguments, state, control, **_):
            stack.close()

    one = {"input_ids": torch.ones(1), "labels": torch.ones(1)}
    arguments = TrainingArguments("out", max_steps=1, save_steps=1, use_cpu=True, disable_tqdm=True, report_to=[])
    optimizer = (CSDAdam, {"lr": LR})
    Trainer(Large(), arguments, train_dataset=[one], optimizer_cls_and_kwargs=optimizer, callbacks=[Limit()]).train()


def large_accelerate(stack):
    library("accelerate")
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), Large()
    model, optimizer = accelerator.prepare(model, CSDAdam(model.parameters(), lr=LR))
    accelerator.backward(model(None, torch.ones(1))["loss"])
    optimizer.step()
    stack.enter_context(memory_limit(LIMIT))
    accelerator.save_state("out")


def large_lightning(stack):
    library("lightning")
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Large()

        def training_step(self, batch):
            return self.model(None, batch)["loss"]

        def configure_optimizers(self):
            return CSDAdam(self.parameters(), lr=LR)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", max_steps=1, enable_checkpointing=False, **for_large_state(), **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(1, 1)))
    stack.enter_context(memory_limit(LIMIT))
    trainer.save_checkpoint("out/last.ckpt")


@pytest.mark.parametrize("train", [large_hugging_face, large_accelerate, large_lightning])
def test_checkpoints_take_less_memory_than_the_state(train):
    with contextlib.ExitStack() as stack:
        train(stack)
    assert sum(file.stat().st_size for file in pathlib.Path("out").rglob("*") if file.is_file()) > 12 * (8 << 20)
