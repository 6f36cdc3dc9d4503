"""free_gradients=True on an accelerator: the same bits as without it, and gradients' memory is free within backward."""

import pytest
import torch
from support.between_steps import checkpoints_activations as checkpoints
from support.between_steps import freezes, gives_steps_up, steps_in_closures, ten_steps
from support.inside import mode_of
from support.on_accelerator import DEVICE
from support.replacing import failing
from support.twins import Twin, assert_twins

from csd_optim import CSDOSError, CSDRuntimeError
from csd_optim.bindings import Native
from csd_optim.step.live import LiveStep
from csd_optim.step.staging import StagingRing

pytestmark = pytest.mark.accelerator

EVERYWHERE = [*(f"{DEVICE}:{i}" for i in range(torch.accelerator.device_count())), "cpu"]
FREE, TIGHT = {"free_gradients": True}, {"free_gradients": True, "hold": "10KB"}  # about one gradient


def twins(directory, script, overlap=FREE, **options):
    return assert_twins(directory, overlap, script, **{"place": [DEVICE], "latency": "100us", **options})


@pytest.mark.parametrize("overlap", [FREE, TIGHT], ids=["free", "tight"])
@pytest.mark.parametrize(
    ("place", "options"),
    [
        ([DEVICE], {"latency": "2ms"}),
        ([DEVICE], {"dtype": torch.bfloat16, "state_dtype": "8bit"}),
        (EVERYWHERE, {"groups": True, "named": True}),
        (EVERYWHERE, {"dtype": torch.float16, "state_dtype": "8bit", "devices": 3}),
    ],
    ids=str,
)
def test_training(tmp_path, overlap, place, options):
    training = twins(tmp_path, ten_steps, overlap, place=place, **options)
    stats = training.opt.stats()
    assert stats["overlap"]["early_params"] > 0
    assert stats["params"] == sum(p.numel() for p in training.model.parameters())
    training.opt.close()


def on_a_side_stream(training):
    side = torch.Stream(DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        ten_steps(training)
    side.synchronize()


@pytest.mark.parametrize("overlap", [FREE, TIGHT], ids=["free", "tight"])
@pytest.mark.parametrize("script", [on_a_side_stream, gives_steps_up], ids=lambda script: script.__name__)
def test_twins(tmp_path, script, overlap):
    twins(tmp_path, script, overlap).opt.close()


@pytest.mark.parametrize("script", [freezes, steps_in_closures], ids=lambda script: script.__name__)
def test_what_a_program_may_do(tmp_path, script):
    twins(tmp_path, script, TIGHT, place=EVERYWHERE, groups=True).opt.close()


def test_a_checkpoint_that_goes_back_several_times_is_refused(tmp_path):
    training = Twin(tmp_path, FREE, place=[DEVICE], latency="100us")
    before = training.parameters()
    with pytest.raises(CSDRuntimeError, match=r"has changed parameters already|use_reentrant"):
        checkpoints(training)
    training.opt.zero_grad()
    assert training.steps == 0
    assert training.parameters() != before  # the completed steps have changed them
    training.opt.close()


@pytest.mark.parametrize(("state_dtype", "gpu"), [("fp32", []), ("8bit", []), ("fp32", ["gpu:?share=2"])])
def test_a_parameter_without_a_gradient(tmp_path, state_dtype, gpu):
    """It shares tiles with other parameters, and keeps every bit. Its states exist from the first backward on."""

    def seen(name, overlap):
        (tmp_path / name).mkdir()
        options = {"place": [DEVICE], "groups": True, "state_dtype": state_dtype, "dtype": torch.bfloat16, "gpu": gpu}
        training = Twin(tmp_path / name, overlap, latency="100us", **options)
        for k in range(6):
            model = training.model if k in (2, 3) else training.model[:3] if k % 2 else training.model[1:]
            model(torch.ones(2, training.width, dtype=training.dtype)).square().sum().backward()
            training.opt.step()
            training.opt.zero_grad()
        seen = training.seen()
        training.opt.close()
        return seen

    assert seen("free", FREE) == seen("plain", None)


def test_memory_of_gradients_is_free_in_backward(tmp_path):
    """With a `hold` of one gradient, there are that one, the one that backward makes, and parts of incomplete tiles."""
    training = Twin(tmp_path, TIGHT, place=[DEVICE], depth=12)
    training.step()
    training.losses.clear()
    training.log.clear()
    allocated, grad = [], training.model[0].inner.weight.nbytes
    for layer in training.model:
        layer.inner.weight.register_hook(lambda _: allocated.append(torch.accelerator.memory_allocated()))
    training.backward()
    assert len(allocated) == 12
    assert max(allocated[3:]) - allocated[2] <= 3 * grad
    training.opt.step()
    training.opt.close()


@pytest.mark.parametrize(("call", "number"), [("push", 1), ("push", 8), ("pull", 3)])
def test_a_device_that_fails(tmp_path, call, number):
    """A device fails in backward or in step(): everything is as before, and the next step is right."""

    def script(training):
        training.step()
        if training.overlap is not None:
            before, log, losses = training.parameters(), len(training.log), len(training.losses)
            steps = training.steps
            with failing(Native, call, number, "broken"), pytest.raises(CSDOSError, match="broken"):
                training.step()
            assert training.parameters() == before
            training.opt.zero_grad()
            del training.log[log:], training.losses[losses:]
            training.steps = steps
        training.step()
        training.step()

    twins(tmp_path, script, TIGHT).opt.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nobody_waits_for_ever_for_a_step_that_cannot_be_undone(tmp_path, monkeypatch):
    training, gone = Twin(tmp_path, FREE, place=[DEVICE]), []
    training.step()

    def breaks(_):
        gone.append(mode_of(training.opt)._run.ended)
        raise ZeroDivisionError

    def fails(*_):
        raise RuntimeError("the accelerator is gone")

    training.model[1].inner.weight.register_hook(breaks)
    with monkeypatch.context() as patch:
        patch.setattr(LiveStep, "undo", fails)
        with pytest.raises(ZeroDivisionError):
            training.backward()
        assert gone[0].wait(60)
    training.opt.close()


def test_a_step_is_undone_where_the_accelerator_fails(tmp_path, monkeypatch):
    """The step is undone as far as possible, and the devices accept the next one."""
    training = Twin(tmp_path, FREE, place=[DEVICE])
    training.step()
    before = training.parameters()

    def fails(*_):
        torch.accelerator.synchronize()  # what it had been asked to do before is done, and nothing comes after the undo
        raise RuntimeError("the accelerator is gone")

    with monkeypatch.context() as patch:
        patch.setattr(StagingRing, "join", fails)
        training.backward()
        with pytest.raises(RuntimeError, match="the accelerator is gone"):
            training.opt.zero_grad()
    torch.accelerator.synchronize()
    assert training.parameters() == before
    training.step()
    training.opt.close()
