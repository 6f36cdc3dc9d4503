"""The trainers of test_trainers.py on two ranks. The oracle is AdamW in the same trainer on the same ranks."""

import os
import warnings

import pytest
import torch
from support.ranks import on_living_ranks, on_ranks
from torch.optim import AdamW
from trainers import (
    BATCHES,
    LR,
    SAVED,
    STEPS,
    accelerate,
    assert_close,
    assert_same_bits,
    hugging_face_class,
    library,
    lightning,
    lightning_module,
    texts,
)

from csd_optim import CSDAdam, CSDRuntimeError, CSDWarning


def as_torchrun():
    """Set the environment variables that trainers need beyond those of on_ranks()."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500", LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1")


def saves_and_resumes(trainer, where, options, **more):
    """A run, and one that resumes from its checkpoint, have the same bits."""
    run = trainer(CSDAdam, options, where, **more)
    resumed = trainer(CSDAdam, options, where, resume=True, **more)
    assert len(resumed.losses) == (STEPS - SAVED) * BATCHES
    assert_same_bits(resumed, run)
    return run


def trains(rank, trainer, consolidate, warns=False):
    """`warns`: rank 0 warns in the first step that its states are not all."""
    as_torchrun()
    reference = trainer(AdamW, {}, "adamw")
    assert reference.losses[-1] < reference.losses[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        consolidated = saves_and_resumes(trainer, "sharded", {}, **consolidate)
    told = [w for w in caught if issubclass(w.category, CSDWarning) and "of the optimizer's states" in str(w.message)]
    assert len(told) == (2 if warns and rank == 0 else 0)  # of two runs
    assert_close(consolidated, reference)
    assert_close(saves_and_resumes(trainer, "replicated", {"sharded": False}), reference)
    return consolidated.params


def refuses(rank, trainer):
    """Only rank 0 saves; it gets an error with instructions, and ends its process. Until then rank 1 waits for it."""
    as_torchrun()
    try:
        trainer(CSDAdam, {}, "saved")
    except Exception as e:
        return str(e)


BOTH = pytest.mark.parametrize("trainer", [hugging_face_class, accelerate], ids=lambda trainer: trainer.__name__)


@BOTH
def test_ddp(trainer, tmp_path):
    library("transformers")
    ranks = on_living_ranks(2, trains, trainer, {"consolidate": True}, True, directory=tmp_path)
    assert all(torch.equal(p, ranks[1][name]) for name, p in ranks[0].items())


@BOTH
def test_a_part_of_the_states_is_not_saved_for_the_whole(trainer, tmp_path):
    library("transformers")
    said = on_ranks(2, refuses, trainer, directory=tmp_path)[0]
    assert "Call consolidate_state_dict() on all ranks before" in said
    assert "sharded=False" in said


def ddp_of_lightning(Optimizer, options, directory, resume=False):
    return lightning(Optimizer, options, directory, resume, trainer_options=lambda: {"strategy": "ddp"})


def test_ddp_of_lightning(tmp_path):
    library("lightning")
    ranks = on_living_ranks(2, trains, ddp_of_lightning, {}, directory=tmp_path)
    assert all(torch.equal(p, ranks[1][name]) for name, p in ranks[0].items())


def fsdp2_of_accelerate(Optimizer, options, directory, resume=False):
    """Accelerate supports FSDP on GPUs only, and silently falls back to DDP on a CPU: make it use FSDP."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    def set_up():
        for state in (PartialState, AcceleratorState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            cpu_ram_efficient_loading=False,
            auto_wrap_policy="no_wrap",
            state_dict_type="SHARDED_STATE_DICT",
        )

    PartialState._reset_state()
    AcceleratorState._reset_state()
    return accelerate(Optimizer, options, directory, resume, set_up=set_up)


def test_fsdp2_of_accelerate(tmp_path):
    """The trainer replaces the optimizer's parameters by shards, and saves with torch.distributed.checkpoint."""
    library("accelerate")
    on_living_ranks(2, trains, fsdp2_of_accelerate, {}, directory=tmp_path)
    assert (tmp_path / "sharded" / "optimizer_0" / ".metadata").exists()


def fits_twice(rank):
    """DDP's trainer makes the optimizer again for its second fit(). Returns the parameters."""
    as_torchrun()
    from lightning.pytorch import Trainer

    made = []

    def configure_optimizers(module):
        made.append(CSDAdam(module.parameters(), lr=LR, devices=f"csd-{rank}", overwrite=True))
        return made[-1]

    torch.manual_seed(0)
    module = lightning_module(None, configure_optimizers=configure_optimizers)()
    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"], False)
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet)
    loader = torch.utils.data.DataLoader(texts(4), batch_size=4)
    trainer.fit(module, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)
    older, newer = made
    with pytest.raises(CSDRuntimeError, match="was replaced by a newer one"):
        older.step()
    newer.synchronize()
    assert newer.committed_step == 2
    newer.close()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def test_ddp_of_lightning_fits_twice(tmp_path):
    library("lightning")
    ranks = on_living_ranks(2, fits_twice, directory=tmp_path)
    assert all(torch.equal(p, ranks[1][name]) for name, p in ranks[0].items())
