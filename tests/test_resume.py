"""Resuming: whatever ends a training, it goes on from the last committed step, bit for bit."""

import copy
import errno
import functools
import gc
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import device_strings, named_devices, on_cards, place, reading_all

import csd_optim.engine.durable
import csd_optim.optim.optimizer
from csd_optim import (
    CSDAdam,
    CSDOSError,
    CSDRuntimeError,
    CSDStoreError,
    CSDTypeError,
    CSDValueError,
    CSDWarning,
    bindings,
)
from csd_optim.errors import CSDTornError
from csd_optim.store import user_state
from csd_optim.store.file import StoreFile
from csd_optim.store.format import CLEAN, FILE_NAME, read_contents

pytestmark = pytest.mark.cards

LATE = 3  # the step in which a parameter has its first gradient
JOIN = 5  # before this step a group joins
bf16, fp16, c64 = torch.bfloat16, torch.float16, torch.complex64


def model(seed):
    """Every kind of parameter, over several tiles; `late` and `never` wait for their first gradient."""
    generator = torch.Generator().manual_seed(seed)

    def new(*shape, dtype=torch.float32, generator=generator):
        return torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

    own = torch.Generator().manual_seed(0)  # what has no state yet begins as the model has it
    params = {
        "fp32": new(3000),
        "bf16": new(60, 70, dtype=bf16),
        "fp16": new(33, dtype=fp16),
        "complex": new(11, dtype=c64),
        "channels_last": torch.nn.Parameter(new(4, 3, 5, 5).detach().contiguous(memory_format=torch.channels_last)),
        "transposed": torch.nn.Parameter(new(20, 30, dtype=bf16).detach().t()),
        "scalar": new(),
        "empty": new(0, 3),
        "late": new(700, dtype=bf16, generator=own),
        "never": new(5, generator=own),
        "amsgrad": new(2500),
        "joined": new(1100, dtype=fp16, generator=own),
    }
    params["expanded"] = torch.nn.Parameter(new(40, 2).detach()[:, 0])  # not dense
    return params


class Training:
    """`model()` and its optimizer; gradients depend on the number of the step alone."""

    def __init__(self, devices, done=0, seed=1, **options):
        self.params = model(seed)
        first = [(n, p) for n, p in self.params.items() if n not in ("amsgrad", "joined")]
        groups = [
            {"params": first},
            {"params": [("amsgrad", self.params["amsgrad"])], "amsgrad": True, "lr": 0.01, "weight_decay": 0.3},
        ]
        options = {"lr": torch.tensor(0.03), "tile_size": 1024, **options}
        self.topk = options.get("topk")
        self.joined = done >= JOIN
        if self.joined:
            groups.append(self.joining())
        self.opt = CSDAdam(groups, devices=devices, **options)
        self.done = self.opt.user_state.get("done", 0)

    def joining(self):
        topk = {"topk": self.topk} if self.topk else {}
        return {"params": [("joined", self.params["joined"])], "eps": 1e-6, **topk}

    def step(self, without=()):
        number = self.done + 1
        if number >= JOIN and not self.joined:
            self.opt.add_param_group(self.joining())
            self.joined = True
        generator = torch.Generator().manual_seed(100 + number)
        for name, p in self.params.items():
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            waits = name in without or name == "never" or (name == "late" and number < LATE)
            p.grad = None if waits else grad
        self.opt.user_state = {"done": number}
        self.opt.step()
        self.done = number

    def steps(self, n):
        for _ in range(n):
            self.step()
        return self

    def image(self):
        return image(self.opt, self.params)

    def close(self):
        image = self.image()
        self.opt.close()
        return image


def bits(t):
    return t.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()


def image(opt, params):
    """The bits of every parameter that has a place, of every state; every hyperparameter."""
    held = {}
    for name, p in params.items():
        entry = opt.state.get(p, {})
        held |= {(name, key): bits(value) for key, value in entry.items()}
        if entry:
            held[name, "param"] = bits(p)
    for k, group in enumerate(opt.param_groups):
        held[k] = {n: group.get(n) for n in ("lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad")}
    return held


def assert_same(one, other):
    different = [key for key in one.keys() | other.keys() if one.get(key) != other.get(key)]
    assert not different


@functools.cache
def never_stopped(steps, topk=None):
    training = Training("ram:", topk=topk).steps(steps)
    return training.close()


def resumed(devices, done=0, **options):
    """In a model that knows nothing of the one before."""
    return Training(devices, done, seed=2, resume=True, **options)


def crashed(devices, to):
    """What is on the devices now, as devices of their own: as a process killed now would leave it."""
    copies = []
    for i, device in enumerate([devices] if isinstance(devices, (str, Path)) else devices):
        to.mkdir(exist_ok=True)
        shutil.copytree(place(device), to / f"copy{i}")
        copies.append(str(device).replace(str(place(device)), str(to / f"copy{i}")))
    return copies


def parameters(*shapes, dtype=torch.float32):
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def train(opt, steps=1, only=None):
    for _ in range(steps):
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, 0.1) if only is None or any(p is q for q in only) else None
        opt.step()


def stored(*devices):
    return [(place(d) / FILE_NAME).read_bytes() for d in devices]


# ---- going on --------------------------------------------------------------------------


@pytest.mark.parametrize("topk", [None, 0.02])
@pytest.mark.parametrize(("n", "end"), [(1, "close"), (3, "crash"), (3, "drop")])
@pytest.mark.parametrize("at", [1, LATE, JOIN - 1, JOIN + 1])
def test_goes_on_bit_for_bit(tmp_path, n, end, at, topk):
    """With Top-K, what is owed too: of one parameter of `model()`, and after it joins of one whose group says so."""
    devices = named_devices(tmp_path, n)
    training = Training(devices, topk=topk).steps(at)
    if end == "close":
        training.close()
    elif end == "crash":
        training.opt.synchronize()
        devices = crashed(devices, tmp_path / "crash")
        training.close()
    del training
    gc.collect()
    # Order and tile size are the store's; but what joins later, and is selected from, lies in tiles of the size given.
    training = resumed(devices[::-1], at, tile_size=1024 if topk else 4096, topk=topk)
    assert training.done == training.opt.committed_step == at
    expected = never_stopped(at, topk)
    assert any(key[1] == "residual" for key in expected if isinstance(key, tuple)) == (topk is not None)
    assert_same(training.image(), expected)
    training.steps(2)
    assert_same(training.close(), never_stopped(at + 2, topk))
    training = resumed(devices, at + 2, topk=topk)
    assert_same(training.steps(3).close(), never_stopped(at + 5, topk))


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "sys.exit()", "tr.opt.cycle = tr.opt"])
@pytest.mark.parametrize("topk", [None, 0.02])
def test_a_process_that_ends_without_close(tmp_path, how, topk):
    [device] = named_devices(tmp_path, 1)
    train = f"tr = t.Training({device!r}, topk={topk}).steps(6)"
    script = f"import os, sys, test_resume as t; {train}; tr.opt.synchronize(); {how}"
    process = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, timeout=60)
    assert process.returncode == (-signal.SIGKILL if "kill" in how else 0)
    assert not process.stderr
    assert bool(read_contents(place(device)).superblock.flags & CLEAN) == ("kill" not in how)
    training = resumed(device, 6, topk=topk)
    assert_same(training.image(), never_stopped(6, topk))
    assert_same(training.steps(1).close(), never_stopped(7, topk))


def test_every_instant_of_a_commit_leaves_a_common_step(tmp_path, monkeypatch):
    """The devices are copied before and after each thing that a commit writes."""
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
    """amsgrad's state was loaded later, and needs more room."""
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
        ("onecycle", 0.1, False),  # not cosine: for torch a group's lr is then that of the next step
        ("lambda", 0.1, True),
        ("lambda", torch.tensor(0.1), True),
        ("cosine", 0.1, True),
        ("cosine", torch.tensor(0.1), True),
        ("onecycle", 0.1, True),
    ],
)
def test_the_same_script_goes_on_with_a_schedule(tmp_path, schedule, lr, kept):
    """By last_epoch; or with the scheduler's own state `kept` in user_state."""

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


# ---- user_state --------------------------------------------------------------------------


def test_user_state_is_that_of_the_step(tmp_path):
    [device] = named_devices(tmp_path, 1)
    opt = CSDAdam(parameters((300,)), devices=device)
    state = {
        "epoch": 3,
        "nested": [1, (2.5, {"x": None}), "text", True],
        "tensor": torch.arange(5, dtype=bf16),
        "torch": torch.get_rng_state(),
        "random": random.getstate(),
    }
    opt.user_state = state
    expected = torch.rand(3), random.random()
    train(opt)
    opt.user_state = {"not": "yet"}
    state["epoch"] = 99
    opt.synchronize()
    copies = crashed(device, tmp_path / "crash")
    opt.close()
    for where in (copies[0], device):
        with CSDAdam(parameters((300,)), devices=where, resume=True) as opt:
            found = opt.user_state
            assert found["epoch"] == 3
            assert found["nested"] == state["nested"]
            assert torch.equal(found["tensor"], state["tensor"])
            torch.set_rng_state(found["torch"])
            random.setstate(found["random"])
            assert torch.equal(torch.rand(3), expected[0])
            assert random.random() == expected[1]


@pytest.mark.parametrize(
    ("state", "error", "said"),
    [
        (None, CSDTypeError, "user_state is a dict, got NoneType"),
        ([1], CSDTypeError, "user_state is a dict, got list"),
        ({"f": lambda: 0}, CSDTypeError, "user_state['f'], of type function, cannot be kept"),
        ({"a": 1, "array": np.ones(3)}, CSDTypeError, "user_state['array'], of type numpy.ndarray, cannot"),
        ({"object": threading.Lock()}, CSDTypeError, "user_state['object'], of type _thread.lock, cannot"),
        (
            {"x": [1, {"y": (2, np.float64(3))}]},
            CSDTypeError,
            "user_state['x'][1]['y'][1], of type numpy.float64, cannot",
        ),
        ({"x": OrderedDict(y=np.float64(3))}, CSDTypeError, "user_state['x']['y'], of type numpy.float64, cannot"),
        ({"x": {np.int64(3): 1}}, CSDTypeError, "a key of user_state['x'], of type numpy.int64, cannot"),
        ({"x": functools.reduce(lambda inner, _: [inner], range(5000), 1)}, CSDTypeError, "cannot be kept"),
        ({"large": torch.zeros(17 << 20, dtype=torch.uint8)}, CSDValueError, "user_state takes 178"),
    ],
    ids=range(10),
)
def test_user_state_that_cannot_be_kept(tmp_path, state, error, said):
    [device] = named_devices(tmp_path, 1)
    ps = parameters((3000,), (20,))
    with CSDAdam(ps, devices=device) as opt:
        opt.user_state = {"at": 1}
        train(opt)
        opt.synchronize()
        before, file = image(opt, dict(enumerate(ps))), stored(device)
        opt.user_state = state
        for _ in range(2):
            with pytest.raises(error, match=re.escape(said)) as caught:
                train(opt)
            assert len(str(caught.value)) < 200
        opt.synchronize()
        assert_same(image(opt, dict(enumerate(ps))), before)
        assert stored(device) == file
        opt.user_state = {"at": 2}
        train(opt)
    with CSDAdam(ps, devices=device, resume=True) as opt:
        assert opt.user_state == {"at": 2}
        assert opt.committed_step == 2


def test_user_state_is_kept_if_torch_reads_it_again():
    itself = ([],)
    itself[0].append(itself)
    marked = torch.ones(2)
    marked.mark = np.float64(1)
    integers = [sign * ((1 << bits) + more) for bits in (0, 63, 64, 2031, 3000) for sign in (1, -1) for more in (-1, 0)]
    tensors = [
        marked,
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2).to_sparse(),
        torch.ones(2, dtype=c64).conj().imag,
    ]
    others = [b"", b"x", bytearray(2), 1j, {1, 2}, itself, torch.Size([1]), bf16, OrderedDict(a=1), np.float64(1)]
    refused = 0
    for value in (*integers, *tensors, *others):
        state = {"x": value}
        try:
            user_state.unpack_user_state(user_state.pack_user_state(state))
        except Exception:
            refused += 1
            with pytest.raises(CSDTypeError, match=re.escape("user_state['x'], of type ")):
                user_state.checked_user_state(state, b"")
        else:
            user_state.checked_user_state(state, b"")
    assert 2 <= refused < len(integers)


@pytest.mark.parametrize("read", [False, True])
def test_plain_user_state_is_not_read_to_know_that_it_can_be(read, monkeypatch):
    state = {
        "scalars": [None, True, -(1 << 63), (1 << 63) - 1, 0.5, float("inf"), "text", "\ud800", ""],
        "containers": [{}, [], (), (1,), (1, (2, [3])), {(1, "x"): {2.5: None}}],
        "tensors": [torch.ones(2, 3).t()[1:], torch.ones((), dtype=bf16), torch.nn.Linear(2, 2)(torch.ones(2))],
        "many": {str(i): i for i in range(70000)},
    }
    if read:
        state["ordered"] = OrderedDict(a=1)
    asked = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: asked.append(1) or load(*a, **k))
    packed = user_state.checked_user_state(state, b"")
    assert len(asked) == read
    assert user_state.checked_user_state(state, packed) == packed
    assert len(asked) == read  # the one before could be read: so can the same again
    found = user_state.unpack_user_state(packed)
    assert all(torch.equal(a, b) for a, b in zip(found.pop("tensors"), state.pop("tensors"), strict=True))
    assert found == state


class Stop(Exception):
    pass


@pytest.mark.parametrize("how", ["failed", "state assigned", "large edit"])
def test_record_of_a_step_that_never_was(tmp_path, monkeypatch, how):
    """A commit of step 1 that is made in, or after, a step 2 that does not come to its end says what step 1 was."""
    [device] = named_devices(tmp_path, 1)
    [p] = parameters((300,), dtype=bf16)
    opt = CSDAdam([p], lr=0.1, devices=device)
    opt.user_state = {"at": 1}
    train(opt)
    opt.synchronize()
    opt.user_state = {"at": 2}
    opt.param_groups[0]["lr"] = 0.05
    if how == "state assigned":
        opt.state[p]["exp_avg"] = torch.zeros(300)
    if how == "large edit":
        monkeypatch.setattr(csd_optim.optim.optimizer, "EDIT_BYTES", 16)
        with torch.no_grad():
            p.mul_(2)

    def begin(*_):
        raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(opt._engine, "begin", begin)
        with pytest.raises(Stop):
            train(opt)
    copies = crashed(device, tmp_path / "crash")
    opt.close()
    for where in (copies[0], device):
        with CSDAdam([p], lr=0.1, devices=where, resume=True) as opt:
            assert opt.committed_step == 1
            assert opt.user_state == {"at": 1}
            assert opt.param_groups[0]["lr"] == 0.1


# ---- what cannot be resumed ----------------------------------------------------------------


def test_where_no_store_is_a_new_one_is_begun_and_said_so(tmp_path):
    with pytest.warns(CSDWarning, match="a new one is begun") as caught:
        opt = CSDAdam(parameters((30,)), devices=named_devices(tmp_path, 2), resume=True)
    assert caught[0].filename == __file__
    assert opt.committed_step == 0
    assert opt.user_state == {}
    opt.restore()
    train(opt)
    opt.close()
    with CSDAdam(parameters((30,)), devices=named_devices(tmp_path, 2), resume=True) as opt:
        assert opt.committed_step == 1


def test_devices_that_do_not_belong_together(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        with CSDAdam(parameters((3000,)), devices=named_devices(tmp_path / name, 3)) as opt:
            train(opt)
    a, b = named_devices(tmp_path / "a", 3), named_devices(tmp_path / "b", 3)
    empty = str(tmp_path / "empty")
    before = stored(*a, *b)
    for devices, message in [
        ([*a[:2], empty], "empty"),
        ([*a[:2], b[2]], "another optimizer"),
        (a[:2], "name all 3"),
        (a[:1], "name all 3"),
        ([*a, empty], "empty"),
        (["ram:"], "cannot resume on ram:"),
        ([*a[:2], "file:"], "cannot resume on file:"),
        ("null:", "cannot resume on null:"),
    ]:
        with pytest.raises(CSDStoreError, match=message):
            CSDAdam(parameters((3000,)), devices=devices, resume=True)
    shutil.copytree(place(a[0]), place(empty), dirs_exist_ok=True)
    with pytest.raises(CSDStoreError, match="each once"):
        CSDAdam(parameters((3000,)), devices=[*a[:2], empty], resume=True)
    with pytest.raises(CSDValueError, match="exclude"):
        CSDAdam(parameters((3000,)), devices=a, resume=True, overwrite=True)
    assert stored(*a, *b) == before
    CSDAdam(parameters((3000,)), devices=a, resume=True).close()
    assert not list((tmp_path / "a").glob(".*"))


def groups_of(*shapes, dtype=torch.float32, names=None):
    """A group for each list of shapes."""
    groups = [parameters(*s, dtype=dtype) for s in shapes]
    names = iter(names or ())
    return [{"params": [(n, p) for p, n in zip(g, names, strict=False)] or g} for g in groups]


RIGHT = ([(30,), (4, 5)], [(6,)])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: groups_of(*RIGHT, names=["a", "x", "c"]), "parameter 1 of group 0 is b there and x here"),
        (
            lambda: groups_of([(30,), (5, 4)], [(6,)], names="abc"),
            r"shape of parameter b is \[4, 5\] there and \[5, 4\]",
        ),
        (lambda: groups_of(*RIGHT, dtype=bf16, names="abc"), "dtype of parameter a is float32 there and bfloat16 here"),
        (lambda: groups_of(RIGHT[0], names="ab"), "only the store has a parameter 0 in group 1: c"),
        (lambda: groups_of(*RIGHT, [(2,)], names="abcd"), "only the model has a parameter 0 in group 2: d"),
        (lambda: groups_of(RIGHT[0], [(6,), (2,)], names="abcd"), "only the model has a parameter 1 in group 1: d"),
        (lambda: groups_of([(30,)], [(6,)], names="ac"), "only the store has a parameter 1 in group 0: b"),
        (lambda: groups_of([(30,), (4, 5), (6,)], names="abc"), "only the model has a parameter 2 in group 0: c"),
    ],
    ids=["name", "shape", "dtype", "group missing", "group more", "more", "fewer", "membership"],
)
def test_another_model_is_refused_by_its_first_difference(tmp_path, model, message):
    devices = named_devices(tmp_path, 2)
    with CSDAdam(groups_of(*RIGHT, names="abc"), devices=devices) as opt:
        train(opt)
    before, groups = stored(*devices), model()
    values = [p.detach().clone() for p in named_values(groups)]
    with pytest.raises(CSDStoreError, match=message) as caught:
        CSDAdam(groups, devices=devices, resume=True)
    assert "another model" in str(caught.value)
    assert all(map(torch.equal, values, named_values(groups)))
    assert stored(*devices) == before
    for names in ("abc", None):  # without names, by their places
        with CSDAdam(groups_of(*RIGHT, names=names), devices=devices, resume=True) as opt:
            assert opt.committed_step == 1


def named_values(groups):
    return [p[1] if isinstance(p, tuple) else p for g in groups for p in g["params"]]


def test_hyperparameters_given_otherwise(tmp_path):
    [device] = named_devices(tmp_path, 1)

    def script(**options):
        return CSDAdam(parameters((30,)), devices=device, resume=(tmp_path / "csd0").exists(), **options)

    given = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2, "amsgrad": True, "maximize": True}
    with script(**given) as opt:
        train(opt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script(**given).close()
    for name, other in [("lr", 0.2), ("betas", (0.8, 0.95)), ("eps", 1e-8), ("weight_decay", 0.0), ("maximize", False)]:
        with (
            pytest.warns(CSDWarning, match=f"^{name} of group 0 goes on as") as caught,
            script(**given | {name: other}) as opt,
        ):
            assert opt.param_groups[0][name] == given[name]
        assert [w.filename for w in caught] == [__file__]


def test_a_share_given_otherwise(tmp_path):
    [device] = named_devices(tmp_path, 1)
    [p] = parameters((8, 8))

    def script(**own):
        resume = (tmp_path / "csd0").exists()
        return CSDAdam([{"params": [p], **own}], devices=device, resume=resume, topk=0.02)

    with script(topk=0.1) as opt:
        p.grad = torch.randn_like(p)
        opt.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for own in {"topk": 0.1}, {}:
            with script(**own) as opt:
                assert opt.param_groups[0]["topk"] == 0.1
    with pytest.warns(CSDWarning, match=r"^topk of group 0 goes on as 0\.1, not 0\.5"), script(topk=0.5) as opt:
        assert opt.param_groups[0]["topk"] == 0.1


# ---- parameters that are exchanged -------------------------------------------------------


def test_restore(tmp_path):
    device = named_devices(tmp_path, 1)
    Training(device).steps(4).close()
    training = resumed(device, 4)
    with torch.no_grad():
        for p in training.params.values():
            p.zero_()
    training.opt.param_groups[0]["lr"].fill_(7)
    training.opt.restore()
    assert_same(training.image(), never_stopped(4))
    # Other objects, as a trainer makes them when it moves a model.
    others = model(3)
    for group in training.opt.param_groups:
        group["params"] = [others[name] for name in group["param_names"]]
    training.params = others
    training.opt.restore()
    assert_same(training.image(), never_stopped(4))
    assert len(training.opt.state) == len(others) - 2  # `never` and `joined` have no state
    training.step()
    with pytest.raises(CSDRuntimeError, match="before the first step"):
        training.opt.restore()
    assert_same(training.close(), never_stopped(5))


def test_restore_of_parameters_in_another_order(tmp_path):
    [device] = named_devices(tmp_path, 1)
    a, b = parameters((300,), (300,))
    with CSDAdam([a, b], devices=device) as opt:
        train(opt, 2)
    values = a.detach().clone(), b.detach().clone()
    a, b = parameters((300,), (300,))
    with CSDAdam([a, b], devices=device, resume=True) as opt:
        opt.param_groups[0]["params"].reverse()
        opt.restore()
        assert torch.equal(b, values[0])
        assert torch.equal(a, values[1])
        train(opt)
        assert [int(opt.state[p]["step"]) for p in (a, b)] == [3, 3]


@pytest.mark.parametrize("order", ["model, optimizer, state", "optimizer, model, state"])
def test_a_checkpoint_of_an_earlier_step_is_loaded_after_resume(tmp_path, order):
    """As trainers do; some make the optimizer, which resumes, only when the model is loaded."""
    device = named_devices(tmp_path, 1)
    training = Training(device).steps(3)
    state = copy.deepcopy(training.opt.state_dict())
    weights = {name: p.detach().clone() for name, p in training.params.items()}
    training.step()
    training.close()
    training = resumed(device, 4)
    if order == "optimizer, model, state":
        with torch.no_grad():
            for name, p in training.params.items():
                p.copy_(weights[name])
    training.opt.load_state_dict(state)
    assert_same(training.image(), never_stopped(3))
    training.done = 3
    training.step()
    assert_same(training.close(), never_stopped(4))


@pytest.mark.parametrize("swap", [False, True])
def test_meta_device(tmp_path, swap):
    [device] = named_devices(tmp_path, 1)
    module = torch.nn.Linear(30, 40)
    with CSDAdam(module.parameters(), devices=device) as opt:
        train(opt, 2)
    expected = [p.detach().clone() for p in module.parameters()]
    with torch.device("meta"):
        module = torch.nn.Linear(30, 40)
    opt = CSDAdam(module.parameters(), devices=device, resume=True)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        module.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    opt.param_groups[0]["params"] = [*module.parameters()]
    with pytest.raises(CSDRuntimeError, match=r"restore\(\)"):
        train(opt)
    opt.restore()
    assert all(map(torch.equal, expected, module.parameters()))
    train(opt)
    assert [int(opt.state[p]["step"]) for p in module.parameters()] == [3, 3]
    opt.close()


@pytest.mark.parametrize("meta", [False, True])
def test_the_first_step_after_a_resume_overflows(tmp_path, meta):
    [device] = named_devices(tmp_path, 1)
    with CSDAdam(parameters((300,)), devices=device) as opt:
        train(opt, 2)
    with torch.device("meta" if meta else "cpu"):
        ps = parameters((300,))
    opt = CSDAdam(ps, devices=device, resume=True)
    [p] = opt.param_groups[0]["params"] = parameters((300,))
    opt.found_inf = opt.grad_scale = torch.ones(1)
    train(opt)
    del opt.found_inf, opt.grad_scale
    if meta:
        with pytest.raises(CSDRuntimeError, match=r"restore\(\)"):
            train(opt)
        opt.restore()
    train(opt)
    assert opt.state[p]["step"] == 3
    opt.close()


# ---- damage --------------------------------------------------------------------------------


def flip(device, section, element, *, current=True, tile=0):
    file = place(device) / FILE_NAME
    contents = read_contents(file)
    extent, _, at = [*contents.slots()][tile]
    size = 4 * extent["tile_elems"] * len(extent["sections"])
    if not current:
        at += -size if contents.tiles["slot"][tile] else size
    with file.open("r+b") as f:
        f.seek(at + 4 * (section * extent["tile_elems"] + element))
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("section", range(4))
def test_damaged_state_is_named(tmp_path, section):
    [device] = named_devices(tmp_path, 1)
    ps = dict(zip("abc", parameters((100,), (2000,), (3,)), strict=True))

    def script(**options):
        return CSDAdam(ps.items(), devices=device, amsgrad=True, tile_size=1024, **options)

    with script() as opt:
        train(opt, 3)
    names = ["master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    before = [p.detach().clone() for p in ps.values()]
    for tile, element, lying in [
        (0, 50, "elements 0 to 99 of a, elements 0 to 911 of b"),
        (0, 105, "of a"),  # between a and b
        (1, 0, "elements 912 to 1935 of b"),
        (2, 1023, "elements 1936 to 1999 of b, elements 0 to 2 of c"),  # behind c
    ]:
        flip(device, section, element, tile=tile)
        file = stored(device)
        with torch.no_grad():
            [p.zero_() for p in ps.values()]
        with pytest.raises(CSDStoreError, match=f"{names[section]} of tile {tile} is damaged: .*{lying}") as caught:
            script(resume=True)
        assert str(place(device)) in str(caught.value)
        assert not any(p.any() for p in ps.values())
        assert stored(device) == file
        flip(device, section, element, tile=tile)
        flip(device, section, element, tile=tile, current=False)
        with script(resume=True) as opt:
            assert all(map(torch.equal, before, ps.values()))


@pytest.mark.parametrize("section", range(3))
def test_damage_while_training(tmp_path, section):
    devices = reading_all(named_devices(tmp_path, 3))
    training = Training(devices).steps(JOIN)
    training.opt.synchronize()
    before = training.image()
    flip(devices[1], section, 3)
    for _ in range(2):
        with pytest.raises(CSDStoreError, match="of fp32") as caught:
            training.step()
        assert str(place(devices[1])) in str(caught.value)
    flip(devices[1], section, 3)
    assert_same(training.image(), before)
    assert_same(training.steps(2).close(), never_stopped(JOIN + 2))


# ---- edits ---------------------------------------------------------------------------------


def load(opt, p):
    held = copy.deepcopy(opt.state_dict())
    for entry in held["state"].values():
        entry["exp_avg"] *= 0.5
    opt.load_state_dict(held)


def set_parameter(opt, p):
    with torch.no_grad():
        p.mul_(1.5)


EDITS = {
    "exp_avg": lambda opt, p: opt.state[p]["exp_avg"].mul_(0.5),
    "part": lambda opt, p: opt.state[p]["exp_avg"][3:7].fill_(1),
    "exp_avg_sq": lambda opt, p: opt.state[p]["exp_avg_sq"].add_(1),
    "master": lambda opt, p: opt.state[p]["master"].add_(1e-4),
    "step": lambda opt, p: opt.state[p]["step"].fill_(10),
    "assign": lambda opt, p: opt.state[p].__setitem__("exp_avg", torch.ones_like(p, dtype=torch.float32)),
    "parameter": set_parameter,
    "load": load,
}


@pytest.mark.parametrize(
    ("name", "shadow", "edit_bytes"),
    [("bf16", True, 16), ("bf16", False, 16), ("bf16", False, 1 << 20), ("bf16", True, 1 << 20), ("fp32", True, 16)],
)
@pytest.mark.parametrize("edit", EDITS)
def test_edits_count_from_the_next_step_on(tmp_path, monkeypatch, edit, name, shadow, edit_bytes):
    monkeypatch.setattr(csd_optim.optim.optimizer, "EDIT_BYTES", edit_bytes)
    device = named_devices(tmp_path, 1)
    # Of the same kind: on a card an fp32 master can be edited, elsewhere the parameter itself is the master.
    mine, other = Training(device, shadow=shadow), Training(device_strings("xrt" if on_cards() else "file", tmp_path))
    for training in (mine, other):
        training.steps(3)
        training.opt.synchronize()
        EDITS[edit](training.opt, training.params[name])
    if edit != "load":  # that is committed at once
        training = resumed(crashed(device, tmp_path / "crash"), 3)
        assert_same(training.close(), never_stopped(3))
    for training in (mine, other):
        training.steps(1)
    assert_same(mine.image(), other.image())
    mine.close()
    mine = resumed(device, 4)
    assert_same(mine.image(), other.image())
    assert_same(mine.steps(1).close(), other.steps(1).close())


@pytest.mark.parametrize("shadow", [True, False])
@pytest.mark.parametrize("edit", ["exp_avg", "step"])
@pytest.mark.parametrize("then", ["close", "step"])
def test_edits_without_a_gradient_are_kept(tmp_path, edit, shadow, then):
    device = named_devices(tmp_path, 1)
    training = Training(device, shadow=shadow).steps(3)
    EDITS[edit](training.opt, training.params["bf16"])
    if then == "step":
        training.step(without=["bf16"])
    expected = training.close()
    training = resumed(device)
    assert_same(training.close(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, bf16])
def test_a_parameter_set_from_outside_without_a_gradient_is_kept(tmp_path, dtype):
    [device] = named_devices(tmp_path, 1)
    p, q = parameters((300,), (20,), dtype=dtype)
    with CSDAdam([p, q], devices=device) as opt:
        train(opt, 2)
        with torch.no_grad():
            q.fill_(7)
        train(opt, only=[p])
    p, q = parameters((300,), (20,), dtype=dtype)
    with CSDAdam([p, q], devices=device, resume=True) as opt:
        assert (q == 7).all()


@pytest.mark.parametrize("shadow", [True, False])
@pytest.mark.parametrize("then", ["look", "edit"])
def test_an_edit_through_a_tensor_from_before_the_last_step(tmp_path, then, shadow):
    """It is lost, and does no harm."""
    [device] = named_devices(tmp_path, 1)
    mine, other = Training(device, shadow=shadow), Training("file:")
    for training in (mine, other):
        p, opt = training.params["fp32"], training.opt
        kept = training.steps(1).opt.state[p]["exp_avg"]
        kept.sum()
        training.steps(1).opt.synchronize()
        if training is mine:
            kept.zero_()
        training.steps(1)
        if then == "edit":
            opt.state[p]["exp_avg_sq"].mul_(2)
            training.steps(1)
    assert_same(mine.close(), other.close())


@pytest.mark.parametrize("edit", ["exp_avg", "step"])
def test_edits_between_resume_and_close_are_kept(tmp_path, edit):
    [device] = named_devices(tmp_path, 1)
    Training(device).steps(2).close()
    training = resumed(device)
    EDITS[edit](training.opt, training.params["bf16"])
    expected = training.close()
    assert_same(resumed(device).close(), expected)


@pytest.mark.parametrize("how", ["converted", "removed"])
def test_a_model_that_changed_while_training_is_the_one_that_resumes(tmp_path, how):
    [device] = named_devices(tmp_path, 1)
    ps = parameters((300,), (20,))
    with CSDAdam(ps, devices=device) as opt:
        train(opt, 2)
        if how == "converted":
            ps[0].grad, ps[0].data = None, ps[0].data.bfloat16()
        else:
            ps = opt.param_groups[0]["params"] = ps[:1]
        train(opt, 1)
        expected = image(opt, dict(enumerate(ps)))
    others = [torch.nn.Parameter(torch.zeros_like(p)) for p in ps]
    with CSDAdam(others, devices=device, resume=True) as opt:
        assert_same(image(opt, dict(enumerate(others))), expected)


# ---- committed_step, stats -------------------------------------------------------------------


def test_committed_step(tmp_path, monkeypatch):
    for devices in ("ram:", "file:"):
        with CSDAdam(parameters((30,)), devices=devices) as opt:
            train(opt, 2)
            opt.synchronize()
            assert opt.committed_step == 0
    [device] = named_devices(tmp_path, 1)
    opt = CSDAdam(parameters((30,)), devices=device)
    seen, finish = [], opt._engine.finish
    monkeypatch.setattr(opt._engine, "finish", lambda keep=True: (seen.append(opt.committed_step), finish(keep)))
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


def test_written_bytes_accumulate(tmp_path):
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
    command = [sys.executable, "-m", "csd_optim", "inspect", str(place(device)), "--tbw", "1MB"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    assert "day" in said.stdout


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


# ---- shadow=False --------------------------------------------------------------------------


def test_without_shadow_half_the_space_and_the_same_bits(tmp_path):
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    with_ = Training(named_devices(tmp_path / "with", 1)).steps(6)
    without = Training(named_devices(tmp_path / "without", 1), shadow=False).steps(6)
    without.opt.synchronize()
    copies = crashed(named_devices(tmp_path / "without", 1), tmp_path / "crash")
    assert_same(with_.close(), without.close())
    size = [(tmp_path / name / "csd0" / FILE_NAME).stat().st_blocks for name in ("with", "without")]
    assert size[1] < 0.62 * size[0]
    for devices in (copies, named_devices(tmp_path / "without", 1)):
        training = resumed(devices, 6)
        assert_same(training.image(), never_stopped(6))
        assert_same(training.steps(2).close(), never_stopped(8))


def test_without_shadow_a_step_cut_short_is_noticed(tmp_path, monkeypatch):
    devices, copies = named_devices(tmp_path, 2), []
    training = Training(devices, shadow=False).steps(3)
    finish = training.opt._engine.finish

    def copied(keep=True):
        copies.extend(crashed(devices, tmp_path / "crash"))
        finish(keep)

    monkeypatch.setattr(training.opt._engine, "finish", copied)
    training.steps(1)
    monkeypatch.undo()
    training.close()
    for _ in range(2):
        with pytest.raises(CSDStoreError, match="step 3 was cut short, and with shadow=False"):
            resumed(copies)
    assert_same(resumed(devices, 4).close(), never_stopped(4))


def test_without_shadow_a_step_that_cannot_be_announced_changes_nothing(tmp_path, monkeypatch):
    devices = named_devices(tmp_path, 2)
    training = Training(devices, shadow=False).steps(3)
    training.opt.synchronize()
    mark = StoreFile.mark

    def on_one_device(store, sequence, flags):
        if store.path.parent == place(devices[1]):
            raise CSDOSError(errno.EIO, f"{store.path}: cannot write the superblock")
        mark(store, sequence, flags)

    with monkeypatch.context() as patched:
        patched.setattr(StoreFile, "mark", on_one_device)
        for attempt in range(3):
            with pytest.raises(CSDOSError, match="cannot write the superblock"):
                training.step()
            copies = crashed(devices, tmp_path / f"crash{attempt}")
            assert_same(resumed(copies, 3).close(), never_stopped(3))
    copies = crashed(devices, tmp_path / "crash")
    assert_same(training.steps(1).close(), never_stopped(4))
    for left in (devices, copies):  # a mark that is not everybody's counts for nothing
        training = resumed(left)
        training.steps(4 - training.done)
        assert_same(training.close(), never_stopped(4))


@pytest.mark.parametrize("end", ["close", "drop"])
def test_without_shadow_a_torn_step_is_final(tmp_path, monkeypatch, end):
    devices = named_devices(tmp_path, 2)
    training = Training(devices, shadow=False).steps(3)
    training.opt.synchronize()
    real = csd_optim.engine.engine.bindings.engine_finish

    def torn(handle, keep, name):
        until = time.monotonic() + 10
        while (
            keep
            and time.monotonic() < until
            and not csd_optim.engine.engine.bindings.engine_stats(handle, 0)["write_bytes"]
        ):
            time.sleep(0.001)
        real(handle, False, name)

    with monkeypatch.context() as patched:
        patched.setattr(csd_optim.engine.engine.bindings, "engine_finish", torn)
        with pytest.raises(CSDTornError, match="shadow=False") as caught:
            training.step()
    assert isinstance(caught.value, CSDOSError)
    for _ in range(2):
        with pytest.raises(CSDTornError, match="cut short"):
            training.step()
    assert training.opt.committed_step == 3
    if end == "close":
        training.opt.close()
    del training, caught
    gc.collect()
    assert not read_contents(place(devices[0])).superblock.flags & CLEAN
    with pytest.raises(CSDStoreError, match="cut short"):
        resumed(devices)


def test_without_shadow_an_error_before_the_first_write_undoes_the_step(tmp_path):
    devices = reading_all(named_devices(tmp_path, 2))
    training = Training(devices, shadow=False).steps(3)
    training.opt.synchronize()
    before = training.image()
    every = [(device, tile) for device in devices for tile in range(len(read_contents(place(device)).tiles))]
    for device, tile in every:  # so that none of them is written
        flip(device, 0, 0, tile=tile)
    with pytest.raises(CSDStoreError, match="is not what was written"):
        training.step()
    for device, tile in every:
        flip(device, 0, 0, tile=tile)
    assert_same(training.image(), before)
    assert_same(training.steps(1).close(), never_stopped(4))
    assert_same(resumed(devices, 4).close(), never_stopped(4))


@pytest.mark.cards
@pytest.mark.parametrize("section", range(3))
def test_damage_in_the_middle_of_a_tile_changes_no_parameter(tmp_path, section):
    """A tile is verified chunk by chunk: the parameters of those before the damage have been given out by then."""
    devices = reading_all(named_devices(tmp_path, 1))

    def begun(devices):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(40, 100).bfloat16().t())
        return p, CSDAdam([p], devices=devices, tile_size=4096)

    def step(p, opt):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        opt.step()

    p, opt = begun(devices)
    step(p, opt)
    opt.synchronize()
    before = p.detach().clone()
    flip(devices[0], section, 2500)  # in the third chunk
    with pytest.raises(CSDStoreError, match="is not what was written there"):
        step(p, opt)
    assert [elems for _, elems in opt._live_engine.undone()] == ([] if on_cards() else [2048])
    assert torch.equal(p, before)
    flip(devices[0], section, 2500)
    step(p, opt)
    opt.close()
    same, memory = begun("ram:")
    for _ in range(2):
        step(same, memory)
    assert torch.equal(p, same)


# ---- optimizers that are dropped -----------------------------------------------------------

CYCLES = """
import faulthandler, sys, threading, torch
from csd_optim import CSDAdam
faulthandler.dump_traceback_later(40, exit=True)
def work(k):
    for i in range(12):
        p = torch.nn.Parameter(torch.ones(3000))
        opt = CSDAdam([p], devices=f"{sys.argv[1]}/{k}.{i}", tile_size=1024)
        opt.cycle = [opt, torch.optim.lr_scheduler.ConstantLR(opt)]
        for _ in range(3):
            p.grad = torch.ones(3000)
            opt.step()
            junk = [[] for _ in range(300)]
threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
import gc; gc.set_threshold(200)
[t.start() for t in threads]; [t.join() for t in threads]
"""


def test_many_dropped_in_cycles_while_others_step(tmp_path):
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CYCLES, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0, process.stderr
    for store in tmp_path.glob("*/" + FILE_NAME):
        block = read_contents(store).superblock
        assert block.step == 3
        assert block.flags & CLEAN
    assert len([*tmp_path.glob("*/" + FILE_NAME)]) == 48


COLLECTED = """
import faulthandler, gc, sys, torch
import csd_optim.finalize, csd_optim.engine.commit
from csd_optim import CSDAdam
faulthandler.dump_traceback_later(40, exit=True)
gc.disable()
def collecting(*arguments, plain=csd_optim.engine.commit.pack_table):
    gc.collect()  # on the thread of the commit, when its optimizer is garbage
    return plain(*arguments)
csd_optim.finalize.CLOSE_SECONDS = 0.2
csd_optim.engine.commit.pack_table = collecting
p = torch.nn.Parameter(torch.ones(3000))
p.grad = torch.ones(3000)
opt = CSDAdam([p], devices=sys.argv[1])
opt.cycle = opt
opt.step()
del opt
"""


def test_collected_by_its_own_commit(tmp_path):
    process = subprocess.run(
        [sys.executable, "-c", COLLECTED, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0, process.stderr
    assert read_contents(tmp_path).superblock.step == 1


# ---- what failures leave behind ------------------------------------------------------


class Full(Exception):
    pass


def failing(monkeypatch, where, call=0):
    """The engine's method `where` raises, once, the `call`-th time."""
    calls = iter(range(1000))
    plain = getattr(csd_optim.engine.engine.Engine, where)

    def full(*arguments, **named):
        if next(calls) == call:
            raise Full
        return plain(*arguments, **named)

    monkeypatch.setattr(csd_optim.engine.engine.Engine, where, full)


@pytest.mark.parametrize("what", ["state", "parameter"])
@pytest.mark.parametrize("then", ["close", "steps without its gradient"])
def test_edits_survive_a_step_that_was_undone(tmp_path, monkeypatch, what, then):
    [device] = named_devices(tmp_path, 1)
    a, b = parameters((3000,), (3000,), dtype=bf16)
    with CSDAdam([a, b], devices=device, tile_size=1024) as opt:
        train(opt, 2)
        if what == "state":
            opt.state[b]["exp_avg"].fill_(7)
        else:
            with torch.no_grad():
                b.fill_(7)
        failing(monkeypatch, "finish")
        with pytest.raises(Full):
            train(opt, only=[a])
        if then != "close" or what == "parameter":  # a parameter's is noticed by a step
            train(opt, 2, only=[a])
    a, b = parameters((3000,), (3000,), dtype=bf16)
    with CSDAdam([a, b], devices=device, resume=True) as opt:
        assert ((b if what == "parameter" else opt.state[b]["exp_avg"]) == 7).all()


def test_a_resume_that_fails_half_way(tmp_path, monkeypatch):
    [device] = named_devices(tmp_path, 1)

    def groups():
        a, b = parameters((3000,), (3000,))
        return [{"params": [a]}, {"params": [b], "amsgrad": True}]

    with CSDAdam(groups(), devices=device) as opt:
        train(opt)
    made, closed = [], []
    create, close = bindings.engine_create, bindings.engine_close
    monkeypatch.setattr(bindings, "engine_create", lambda *a: made.append(create(*a)) or made[-1])
    monkeypatch.setattr(bindings, "engine_close", lambda engine, *a: closed.append(engine) or close(engine, *a))
    failing(monkeypatch, "_add", call=1)
    with pytest.raises(Full):
        CSDAdam(groups(), devices=device, resume=True)
    assert made == closed
    assert len(made) == 1
    with CSDAdam(groups(), devices=device, resume=True) as opt:
        assert opt.committed_step == 1
    assert made == closed


def test_a_join_that_fails_half_way(tmp_path, monkeypatch):
    [device] = named_devices(tmp_path, 1)

    def groups():
        a, b, c = parameters((300,), (2000,), (2000,))
        return [{"params": [a]}, {"params": [b]}, {"params": [c], "amsgrad": True}]

    with CSDAdam(first := groups(), devices=device) as opt:
        train(opt, 2, only=first[0]["params"])
        failing(monkeypatch, "extend", call=1)
        with pytest.raises(Full):
            train(opt)
    with CSDAdam(groups(), devices=device, resume=True) as opt:
        assert opt.committed_step == 2
        train(opt)
    assert read_contents(place(device)).superblock.step == 3


@pytest.mark.parametrize("then", ["close", "save", "load_state_dict"])
def test_a_group_that_joined_after_the_last_step(tmp_path, then):
    [device] = named_devices(tmp_path, 1)
    p, q = parameters((300,), (20,))
    with CSDAdam([p], devices=device) as opt:
        train(opt)
        opt.add_param_group({"params": [q]})
        if then == "save":
            opt.save(tmp_path / "snap")
        elif then == "load_state_dict":
            opt.load_state_dict(opt.state_dict())
    p, q = parameters((300,), (20,))
    known = [{"params": [p]}, {"params": [q]}] if then == "load_state_dict" else [p]
    with CSDAdam(known, devices=device, resume=True) as opt:
        assert opt.committed_step == 1


def test_numbers_of_numpy_are_kept(tmp_path):
    [device] = named_devices(tmp_path, 1)
    with CSDAdam(parameters((30,)), lr=np.float32(0.5), betas=(np.float64(0.5), 0.9), devices=device) as opt:
        train(opt)
        opt.param_groups[0]["lr"] = np.float32(0.25)
        train(opt)
    with CSDAdam(parameters((30,)), lr=0.5, betas=(0.5, 0.9), devices=device, resume=True) as opt:
        assert opt.param_groups[0]["lr"] == 0.25
        assert opt.param_groups[0]["betas"] == (0.5, 0.9)
