"""What all frameworks of `make trainers` go through: main(name, fit), in a script of each.

`fit(optimizer, options, directory)` makes STEPS steps of a tiny model with the framework: with "AdamW", or with
"CSDAdam" and options of ours. Started again with the same directory it goes on, from the framework's checkpoint, or
from the store where the framework leaves that to the script. It runs in processes of its own, forked after the
framework is imported: AdamW; CSDAdam; CSDAdam that is killed after KILLED steps, and once more. Losses, parameters and
states have to be those of AdamW up to rounding, and after the kill those of the run that was not killed, to the bit.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from support.language_model import LanguageModel, next_token_loss
from torch.optim.optimizer import register_optimizer_step_post_hook
from trainers import Run, assert_close, assert_same_bits, finished, texts

from csd_optim import CSDAdam

STEPS, SAVED, KILLED = 20, 10, 13
LR, WEIGHT_DECAY, BETAS = 1e-2, 0.1, (0.9, 0.95)
HYPER = {"lr": LR, "weight_decay": WEIGHT_DECAY, "betas": BETAS}
SECONDS = 1200  # after which a run is given up, however busy the machine is

__all__ = [
    "HYPER",
    "SAVED",
    "STEPS",
    "LanguageModel",
    "Run",
    "batches",
    "finished",
    "import_torchvision",
    "loop",
    "main",
    "next_token_loss",
]


def batches():
    """Return the batches of all steps: STEPS times (4, 13), int64."""
    return texts(STEPS).split(4)


def loop(make, between=lambda optimizer: None):
    """Train with an optimizer that the framework makes, make(model), in a loop of one's own. It resumes from the store.

    `between`: called with the optimizer after each step.
    """
    torch.manual_seed(0)
    model, losses = LanguageModel(), []
    optimizer = make(model)
    for batch in batches()[getattr(optimizer, "committed_step", 0) :]:
        loss = next_token_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        between(optimizer)
    return finished(losses, model, optimizer)


def import_torchvision():
    """Import torchvision, which some frameworks here import and none computes with.

    PyPI's build for GPUs does not load beside a torch without them: it lacks two operators, which are then declared.
    """
    try:
        import torchvision
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision

    return torchvision


def _child(fit, optimizer, options, directory, result, killed):
    taken = []

    def count(stepped, *_):
        if isinstance(stepped, CSDAdam):  # and not what a framework wraps around it
            taken.append(stepped)
        if len(taken) == killed:
            os.kill(os.getpid(), signal.SIGKILL)

    if killed:
        register_optimizer_step_post_hook(count)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "there is no store")
    os.chdir(directory)
    run = fit(optimizer, options, Path(directory))
    torch.save(vars(run), result)


def _run(fit, optimizer, options, directory, killed=None):
    """Run fit() in a process of its own. Returns its Run, or None if it was to be killed, and was."""
    directory.mkdir(exist_ok=True)
    result = directory / "result.pt"
    arguments = (fit, optimizer, options, str(directory), result, killed)
    process = multiprocessing.get_context("fork").Process(target=_child, args=arguments)
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        sys.exit(f"{optimizer} has not ended after {SECONDS} s")
    if process.exitcode != (-signal.SIGKILL if killed else 0):
        sys.exit(f"{optimizer}: exit status {process.exitcode}")
    return None if killed else Run(**torch.load(result))


def main(name, fit, **options):
    """Check a framework. `options`: those of CSDAdam beside `devices`, with which fit() goes on."""
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)

        def ours(directory, **how):
            return _run(fit, "CSDAdam", {"devices": str(directory / "csd"), **options}, directory, **how)

        reference = _run(fit, "AdamW", {}, place / "adamw")
        whole = ours(place / "whole")
        assert len(whole.losses) == STEPS
        assert whole.losses[-1] < whole.losses[0]
        assert all("master" in entry for entry in whole.state.values()), "the optimizer is not ours"
        assert_close(whole, reference)
        ours(place / "killed", killed=KILLED)
        resumed = ours(place / "killed")
        assert 0 < len(resumed.losses) < STEPS, "it began anew"
        assert_same_bits(resumed, whole)
    pairs = [(whole.params[name], p) for name, p in reference.params.items()]
    worst = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    print(
        f"{name}: {worst:.1e} from AdamW after {STEPS} steps; killed after step {KILLED}, resumed at step "
        f"{STEPS - len(resumed.losses)}: the same bits"
    )
