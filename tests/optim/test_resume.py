"""Resuming: however training ended, it goes on from the last committed step, bit for bit."""

import copy
import gc
import math
import signal
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from support.backends import TESTS, named_devices, place
from support.comparing import assert_same
from support.forked import python
from support.inside import engine_of
from support.optimizers import ADAMW, CODED, FULL, MIXED, MUON, MUON_IN_8_BITS, rules
from support.training import (
    JOIN,
    LATE,
    Training,
    crashed,
    fp16,
    image,
    never_stopped,
    parameters,
    resumed,
    stored,
    train,
)

from csd_optim import (
    CSDAdam,
    CSDStoreError,
    CSDTypeError,
    CSDWarning,
)
from csd_optim.store.file import StoreFile
from csd_optim.store.format import CLEAN, read_contents

pytestmark = pytest.mark.cards


# ---- going on --------------------------------------------------------------------------


ENDS = [(1, "close"), (3, "crash"), (3, "drop")]
# Each step and end runs with Top-K or without, in turns; `make soak` runs both, which takes its time.
ALL = [
    pytest.param(
        *(at, *ends, topk, ADAMW),
        id="-".join(map(str, (at, *ends, topk))),
        marks=[pytest.mark.soak] * ((i + j + (topk is None)) % 2),
    )
    for i, at in enumerate([1, LATE, JOIN - 1, JOIN + 1])
    for j, ends in enumerate(ENDS)
    for topk in (None, 0.02)
]
OTHERS = [
    pytest.param(JOIN - 1, 3, "crash", topk, *of.values, id=of.id, marks=of.marks)
    for topk, pairs in (
        (0.02, [*FULL, MIXED, *CODED]),
        (None, [MUON, MUON_IN_8_BITS]),
    )  # matrices of Muon are sent dense
    for of in rules(pairs)
]


@pytest.mark.here("residuals are in no store")
@pytest.mark.parametrize(("at", "n", "end", "topk", "of"), ALL + OTHERS)
def test_goes_on_bit_for_bit(tmp_path, n, end, at, topk, of):
    """With Top-K, residuals too: of one parameter of `model()`, and of a late one whose group has `topk`."""
    devices = named_devices(tmp_path, n)
    training = Training(devices, topk=topk, of=of).steps(at)
    if end == "close":
        training.close()
    elif end == "crash":
        training.opt.synchronize()
        devices = crashed(devices, tmp_path / "crash")
        training.close()
    del training
    gc.collect()
    # Order of devices and tile size come from the store. But with Top-K, the selection in a parameter that joins later
    # depends on the tile size given here.
    training = resumed(devices[::-1], at, tile_size=1024 if topk else 4096, topk=topk, of=of)
    assert training.done == training.opt.committed_step == at
    expected = never_stopped(at, topk, of)
    assert any(key[1] == "residual" for key in expected if isinstance(key, tuple)) == (topk is not None)
    assert_same(training.image(), expected)
    training.steps(2)
    assert_same(training.close(), never_stopped(at + 2, topk, of))
    training = resumed(devices, at + 2, topk=topk, of=of)
    assert_same(training.steps(3).close(), never_stopped(at + 5, topk, of))


def goes_on_after(device, topk, *, clean):
    assert bool(read_contents(place(device)).superblock.flags & CLEAN) == clean, (device, topk)
    training = resumed(device, 6, topk=topk)
    assert_same(training.image(), never_stopped(6, topk))
    assert_same(training.steps(1).close(), never_stopped(7, topk))


@pytest.mark.here("residuals are in no store")
@pytest.mark.parametrize("topk", [None, 0.02])
def test_a_process_that_is_killed(tmp_path, topk):
    [device] = named_devices(tmp_path, 1)
    training = f"import os, support.training as t; tr = t.Training({device!r}, topk={topk}).steps(6)"
    process = python(f"{training}; tr.opt.synchronize(); os.kill(os.getpid(), 9)")
    assert (process.returncode, process.stderr) == (128 + signal.SIGKILL, "")
    goes_on_after(device, topk, clean=False)


@pytest.mark.here("residuals are in no store")
@pytest.mark.ci
@pytest.mark.fp32_states("another process, which takes fp32")
def test_an_interpreter_that_ends_without_close(tmp_path):
    """Some of its optimizers are in reference cycles."""
    devices = named_devices(tmp_path, 3)
    trainings = [*zip(devices, (None, None, 0.02), (False, True, True), strict=True)]
    script = f"""if True:
        import sys, support.training as t
        kept = [t.Training(device, topk=topk).steps(6) for device, topk, _ in {trainings!r}]
        for training, (_, _, cycle) in zip(kept, {trainings!r}):
            training.opt.synchronize()
            if cycle:
                training.opt.cycle = training.opt
        sys.exit()
    """
    process = subprocess.run([sys.executable, "-c", script], cwd=TESTS, capture_output=True, timeout=300)
    assert process.returncode == 0
    assert not process.stderr
    for device, topk, _ in trainings:
        goes_on_after(device, topk, clean=True)


def test_every_instant_of_a_commit_leaves_a_common_step(tmp_path, monkeypatch):
    """The devices are copied before and after each write of a commit."""
    devices, lock, copies = named_devices(tmp_path, 3), threading.Lock(), []
    training = Training(devices).steps(3)
    training.opt.synchronize()
    publish = StoreFile.publish

    def copied(store, staged, copy):
        with lock:
            for _ in range(2):
                copies.append(crashed(devices, tmp_path / f"{len(copies)}"))
                publish(store, staged, copy)

    with monkeypatch.context() as patched:
        patched.setattr(StoreFile, "publish", copied)
        training.step()
        training.opt.synchronize()
    training.close()
    found = []
    for c in copies:
        training = resumed(c)
        assert_same(training.image(), never_stopped(training.done))
        found.append(training.done)
        assert_same(training.steps(1).close(), never_stopped(found[-1] + 1))
    assert found == sorted(found)
    assert {*found} == {3, 4}


def test_devices_too_far_apart(tmp_path):
    devices = named_devices(tmp_path, 2)
    training = Training(devices)
    for behind in (1, 2):
        training.steps(1)
        training.opt.synchronize()
        [old] = crashed(devices[:1], tmp_path / f"old{behind}")
        training.steps(behind)
        training.opt.synchronize()
        [new] = crashed(devices[1:], tmp_path / f"new{behind}")
        for order in ([old, new], [new, old]):
            with pytest.raises(CSDStoreError, match="no step in common") as caught:
                resumed(order)
            assert f"[{training.done}]" in str(caught.value)
            assert f"[{training.done - behind}]" in str(caught.value)
    training.close()


def test_more_parameters_join_after_a_resume(tmp_path):
    [device] = named_devices(tmp_path, 1)
    with CSDAdam(parameters((300,)), devices=device) as opt:
        train(opt, 2)
    for k in range(1, 4):
        ps = parameters(*[(300 + i,) for i in range(k + 1)])
        opt = CSDAdam([{"params": [p], "amsgrad": i == 2} for i, p in enumerate(ps[:k])], devices=device, resume=True)
        opt.add_param_group({"params": [ps[k]], "amsgrad": k == 2})
        train(opt, 2)
        assert [int(opt.state[p]["step"]) for p in ps] == [2 * (k + 1 - i) for i in range(k + 1)]
        before = image(opt, dict(enumerate(ps)))
        opt.close()
    ps = parameters(*[(300 + i,) for i in range(4)])
    groups = [{"params": [p], "amsgrad": i == 2} for i, p in enumerate(ps)]
    with CSDAdam(groups, devices=device, resume=True) as opt:
        assert_same(image(opt, dict(enumerate(ps))), before)


def test_a_group_that_joined_and_still_waits(tmp_path):
    [device] = named_devices(tmp_path, 1)
    p, q = parameters((300,), (20,))
    with CSDAdam([p], devices=device) as opt:
        train(opt, 2)
        opt.add_param_group({"params": [q], "lr": 0.5})
        train(opt, 1, only=[p])
    p, q = parameters((300,), (20,))
    with CSDAdam([{"params": [p]}, {"params": [q], "lr": 0.5}], devices=device, resume=True) as opt:
        assert opt.param_groups[1]["lr"] == 0.5
        assert opt.state[p]["step"] == 3


def test_a_parameter_that_got_another_place(tmp_path):
    """A state for amsgrad was loaded later, which needs a place with more sections."""
    [device] = named_devices(tmp_path, 1)
    runs = {}
    for name, where in (("mine", device), ("reference", "ram:")):
        torch.manual_seed(0)
        ps = parameters((3000,), (500,))
        opt = CSDAdam(ps, devices=where, tile_size=1024)
        train(opt, 2)
        held = copy.deepcopy(opt.state_dict())
        held["state"][0]["max_exp_avg_sq"] = torch.rand(3000)
        held["param_groups"][0]["amsgrad"] = True
        held["state"][1]["max_exp_avg_sq"] = torch.rand(500)
        opt.load_state_dict(held)
        train(opt, 1)
        if name == "mine":
            opt.close()
            ps = parameters((3000,), (500,))
            opt = CSDAdam(ps, devices=device, amsgrad=True, resume=True)
        train(opt, 1)
        runs[name] = image(opt, dict(enumerate(ps)))
        opt.close()
    assert_same(runs["mine"], runs["reference"])
    ps = parameters((3000,), (500,))
    with CSDAdam(ps, devices=device, amsgrad=True, resume=True) as opt:
        assert_same(image(opt, dict(enumerate(ps))), runs["mine"])


# ---- schedulers, scaler, closure ---------------------------------------------------------

SCHEDULES = {
    "lambda": lambda opt, at: torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.93**t, last_epoch=at),
    "cosine": lambda opt, at: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12, last_epoch=at),
    "onecycle": lambda opt, at: torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, total_steps=12, last_epoch=at),
}


@pytest.mark.parametrize(
    ("schedule", "lr", "kept"),
    [
        ("lambda", 0.1, False),
        ("lambda", torch.tensor(0.1), False),
        ("onecycle", 0.1, False),  # not cosine: with last_epoch alone, torch takes the group's lr as the next step's
        ("lambda", 0.1, True),
        ("lambda", torch.tensor(0.1), True),
        ("cosine", 0.1, True),
        ("cosine", torch.tensor(0.1), True),
        ("onecycle", 0.1, True),
    ],
)
def test_the_same_script_goes_on_with_a_schedule(tmp_path, schedule, lr, kept):
    """The scheduler goes on by last_epoch, or (`kept`) with its own state, which user_state holds."""

    def script(device, until):
        torch.manual_seed(0)
        [p] = parameters((300,))
        with CSDAdam([p], lr=copy.deepcopy(lr), devices=device, resume=True) as opt:
            scheduler = SCHEDULES[schedule](opt, -1 if kept else opt.committed_step - 1)
            if kept and opt.user_state:
                scheduler.load_state_dict(opt.user_state["scheduler"])
                scheduler.step()
            for _ in range(opt.committed_step, until):
                opt.user_state = {"scheduler": scheduler.state_dict()} if kept else {}
                train(opt)
                scheduler.step()
            return image(opt, {"p": p})

    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=CSDWarning)
        warnings.filterwarnings("ignore", message="there is no store")
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        whole = script(tmp_path / "whole", 10)
        for until in (1, 4, 7, 10):
            found = script(tmp_path / "parts", until)
    assert_same(found, whole)


def test_skipped_steps_commit_nothing(tmp_path):
    [device] = named_devices(tmp_path, 1)
    [p] = parameters((300,), dtype=fp16)
    opt = CSDAdam([p], devices=device)
    train(opt, 2)
    opt.synchronize()
    before = stored(device)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(p.float().sum()).backward()
    p.grad.fill_(math.inf)
    scaler.step(opt)
    scaler.update()
    p.grad = None
    opt.step()
    opt.synchronize()
    assert opt.committed_step == 2
    assert stored(device) == before
    opt.step(lambda: setattr(p, "grad", torch.ones_like(p)))
    opt.synchronize()
    assert opt.committed_step == 3
    opt.close()


# ---- committed_step, stats -------------------------------------------------------------------


def test_committed_step(tmp_path, monkeypatch):
    for devices in ("ram:", "file:"):
        with CSDAdam(parameters((30,)), devices=devices) as opt:
            train(opt, 2)
            opt.synchronize()
            assert opt.committed_step == 0
    [device] = named_devices(tmp_path, 1)
    opt = CSDAdam(parameters((30,)), devices=device)
    seen, finish = [], engine_of(opt).finish
    monkeypatch.setattr(engine_of(opt), "finish", lambda **how: (seen.append(opt.committed_step), finish(**how)))
    train(opt, 4)
    assert seen == [0, 1, 2, 3]
    opt.synchronize()
    assert opt.committed_step == 4
    held = copy.deepcopy(opt.state_dict())
    held["state"][0]["step"] = torch.tensor(90.0)
    opt.load_state_dict(held)
    assert opt.committed_step == 90
    train(opt)
    opt.synchronize()
    assert opt.committed_step == 91
    opt.close()
    with CSDAdam(parameters((30,)), devices=device, resume=True) as opt:
        assert opt.committed_step == 91


@pytest.mark.here("only the owner knows the rating of its drive")
@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_written_bytes_accumulate(tmp_path, run):
    [device] = named_devices(tmp_path, 1)
    written = []
    for resume in (False, True, True):
        with CSDAdam(parameters((3000,)), devices=f"file:{place(device)}?tbw=1MB", resume=resume) as opt:
            assert opt.stats()["written_bytes"] == (written[-1] if written else 0)
            train(opt, 2)
            written.append(opt.stats()["written_bytes"])
            assert 0 < opt.stats()["devices"][0]["days_left"] < 1
    assert written[0] >= 2 * 3 * 12 * 1024
    assert np.diff(written).tolist() == [2 * 3 * 12 * 1024] * 2
    code, out, err = run("inspect", place(device), "--tbw", "1MB")
    assert code == 0, err
    assert "day" in out


def test_seconds_of_training_pass_once(tmp_path):
    [device] = named_devices(tmp_path, 1)
    begun = time.monotonic()
    with CSDAdam(parameters((30,)), devices=device) as opt:
        train(opt)
        time.sleep(0.05)
        opt.user_state = None
        for _ in range(20):
            with pytest.raises(CSDTypeError):
                train(opt)
        opt.user_state = {}
        train(opt)
    assert read_contents(place(device)).record.seconds <= time.monotonic() - begun
