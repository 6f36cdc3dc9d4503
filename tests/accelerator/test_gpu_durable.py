"""`gpu:` beside named directories: these keep all states, and steps update some of them on the accelerator."""

import contextlib
import copy
import os
import random
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from crash.processes import preloaded
from support.accelerator_training import Trained, params_on, randn, same
from support.backends import TESTS, TILE
from support.inside import engine_of
from support.on_accelerator import DEVICE, DTYPES, launches_fail
from support.optimizers import ADAMW, CODED, FULL, MIXED
from support.replacing import class_with
from support.stores import flip

from csd_optim import CSDMemoryError, CSDOSError, CSDStoreError
from csd_optim.bindings import Native
from csd_optim.engine.engine import Engine

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("small_pieces")]
one_schedule = pytest.mark.one_schedule


EIGHT_BIT = [
    replace(ADAMW, kwargs={"state_dtype": "8bit"}),
    replace(ADAMW, kwargs={"state_dtype": "8bit", "amsgrad": True, "topk": 0.2}),
]
TOPK = replace(ADAMW, kwargs={"topk": 0.05})


def gpu(directory, room="1GB"):
    return [f"gpu:?room={room}", f"file:{directory}?cache=off"]


@pytest.mark.parametrize("pair", [ADAMW, *FULL, MIXED, *EIGHT_BIT, *CODED, TOPK], ids=str)
def test_bits_of_directories_alone(pair, tmp_path):
    """The bits are those of directories alone, also after resuming: with `gpu:`, with room for some, and without."""
    some = f"{12 * (3 * TILE + 5) + 12 * 40}"
    here, alone = Trained(gpu(tmp_path / "a"), pair=pair), Trained([tmp_path / "b"], "cpu", pair)
    for k in range(3):
        here.step(k, without=[3] if k == 1 else ())
        alone.step(k, without=[3] if k == 1 else ())
    assert same(here.bits(), alone.bits())
    elems = sum(p.numel() * (2 if p.is_complex() else 1) for p in here.params)
    assert [d["params"] for d in here.rows()] == [elems, 0]
    for room in ("1GB", None, some, "1GB"):
        here.opt.close()
        devices = [f"file:{tmp_path / 'a'}?cache=off"] if room is None else gpu(tmp_path / "a", room)
        here = Trained(devices, "cpu" if room is None else DEVICE, pair, seed=9, resume=True)
        assert same(here.bits(), alone.bits())
        for _ in range(2):
            k += 1
            assert same(here.step(k).bits(), alone.step(k).bits()), room


@one_schedule
def test_what_is_on_the_accelerator_is_not_read(tmp_path):
    """Its states are written once and not read, what crosses the link is counted, and host memory does not grow."""
    small = Trained(gpu(tmp_path / "a"))
    large = Trained(gpu(tmp_path / "b"), params=[torch.ones(40 * TILE, device=DEVICE).requires_grad_()])
    for trained in (small, large):
        for k in range(2):
            trained.step(k)
        there, directory = trained.rows()
        elems = sum(p.numel() * (2 if p.is_complex() else 1) for p in trained.params)
        assert there["params"] == elems
        assert there["state_bytes"] == there["commit_bytes"] == 12 * elems
        assert directory["params"] == directory["flash_read_bytes"] == directory["push_bytes"] == 0
        tiles = -(-sum(-(-p.numel() * (2 if p.is_complex() else 1) // 16) * 16 for p in trained.params) // TILE)
        assert directory["flash_write_bytes"] == 12 * TILE * tiles
    assert small.opt.stats()["buffer_bytes"] == large.opt.stats()["buffer_bytes"]


@one_schedule
def test_of_a_store_made_without(tmp_path):
    """Parameters share tiles in such a store. The host reads these, and updates what the accelerator does not."""
    shapes = [(3 * TILE // 2,)] * 4
    alone = Trained([tmp_path / "a"], params=[randn(s, i).to(DEVICE).requires_grad_() for i, s in enumerate(shapes)])
    alone.step(0)
    alone.opt.close()
    for name in "bc":
        shutil.copytree(tmp_path / "a", tmp_path / name)
    room = f"{12 * 3 * TILE}"  # for two of the four parameters
    here, other = (
        Trained(devices, params=[torch.zeros(s, device=DEVICE).requires_grad_() for s in shapes], resume=True)
        for devices in (gpu(tmp_path / "b", room), [tmp_path / "c"])
    )
    for k in range(1, 4):
        assert same(here.step(k, without=[k]).bits(), other.step(k, without=[k]).bits())
    here.step(4)
    there, directory = here.rows()
    assert (there["params"], directory["params"]) == (3 * TILE, 3 * TILE)
    assert directory["flash_read_bytes"] == 12 * TILE * 3


def test_a_slot_of_the_ring_has_what_is_given_between_others(tmp_path):
    """A slot is used for a third tile only after its parameters have left for the accelerator."""
    shapes = [*[(TILE,)] * 4, (4 * TILE,), *[(TILE,)] * 4]
    alone = Trained([tmp_path / "a"], params=[randn(s, i).to(DEVICE).requires_grad_() for i, s in enumerate(shapes)])
    alone.step(0)
    alone.opt.close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    here, other = (
        Trained(devices, params=[torch.zeros(s, device=DEVICE).requires_grad_() for s in shapes], resume=True)
        for devices in (gpu(tmp_path / "b", f"{12 * 4 * TILE}"), [tmp_path / "a"])
    )
    for k in (1, 2):
        assert same(here.step(k).bits(), other.step(k).bits())
    assert [d["params"] for d in here.rows()] == [4 * TILE, 8 * TILE]


@pytest.mark.parametrize("call", ["begin", "pull", "finish", "push", "launch"])
@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("pair", [ADAMW, EIGHT_BIT[1]], ids=str)
def test_a_step_that_fails(call, k, pair, tmp_path, monkeypatch):
    """Everything is as before the step, also on the accelerator, and the next call tries again."""
    here, alone = Trained(gpu(tmp_path / "a"), pair=pair), Trained([tmp_path / "b"], "cpu", pair)
    for earlier in range(k):
        here.step(earlier)
        alone.step(earlier)
    before = [p.detach().cpu() for p in here.params]
    real, calls = Engine.finish, []

    def breaks(*arguments, **named):
        raise CSDOSError(28, "full")

    def fails_once(engine, keep=True, **ending):
        calls.append(keep)
        return real(engine, keep, **ending) if len(calls) > 1 else breaks()

    with monkeypatch.context() as patch:
        if call == "launch":
            failing = launches_fail(2, breaks)
        else:
            patch.setattr(class_with(call), call, fails_once if call == "finish" else breaks)
            failing = contextlib.nullcontext()
        with failing, pytest.raises(CSDOSError):
            here.step(7)
    assert same([p.detach().cpu() for p in here.params], before)
    if k:
        assert same(here.bits(), alone.bits())
    for later in (2, 3):
        assert same(here.step(later).bits(), alone.step(later).bits())


@one_schedule
@pytest.mark.parametrize("pair", [ADAMW, *EIGHT_BIT, TOPK], ids=str)
def test_what_is_written_counts(pair, tmp_path):
    """Writes to parameters and states count, also by loading, in loading(), and if one moves to the host and back."""

    def run(devices, device):
        it = Trained(devices, device, pair)
        params, opt, seen = it.params, it.opt, []
        for k in range(5):
            it.step(k)
            with torch.no_grad():
                params[3][0] = k
                params[4].mul_(2)
                opt.state[params[1]]["exp_avg"].add_(1)
                opt.state[params[4]]["exp_avg_sq"] = torch.ones_like(params[4], dtype=torch.float32)
            if k == 1:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
            if k == 2:
                with opt.loading():
                    for p in params:
                        opt.state[p]["exp_avg_sq"].mul_(3)
            if k == 3:
                params[4].grad, params[4].data = None, params[4].data.cpu()
            seen += it.bits()
        it.step(5)
        if pair not in EIGHT_BIT:
            params[0].data = params[0].data.bfloat16()
        params[4].data = params[4].data.to(device)
        for k in (6, 7):
            seen += it.step(k).bits()
        return seen

    assert same(run(gpu(tmp_path / "a"), DEVICE), run([tmp_path / "b"], "cpu"))


@one_schedule
@pytest.mark.parametrize("pair", [ADAMW, EIGHT_BIT[0]], ids=str)
def test_an_edit_outlives_a_step_that_fails(pair, tmp_path, monkeypatch):
    here, alone = (Trained(*of, pair).step(0) for of in ((gpu(tmp_path / "a"), DEVICE), ([tmp_path / "b"], "cpu")))
    for it in (here, alone):
        it.opt.state[it.params[4]]["exp_avg"].fill_(2)
        it.opt.state[it.params[3]]["master"].mul_(1.5)
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "finish", failing_once(Engine.finish))
            with pytest.raises(CSDOSError):
                it.step(7)
        it.step(1)
    assert same(here.bits(), alone.bits())


@one_schedule
def test_what_joins_has_room_of_its_own(tmp_path):
    here, alone = Trained(gpu(tmp_path / "a")).step(0), Trained([tmp_path / "b"], "cpu").step(0)
    for it, device in ((here, DEVICE), (alone, "cpu")):
        new = params_on(device, seed=50)
        it.opt.add_param_group({"params": new, "lr": 3e-3, "amsgrad": True})
        it.params += new
    for k in (1, 2):
        assert same(here.step(k).bits(), alone.step(k).bits())
    assert here.rows()[1]["params"] == 0


@one_schedule
def test_no_memory_for_a_step(tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("out of it")

    here, alone = Trained(gpu(tmp_path / "a")), Trained([tmp_path / "b"], "cpu")
    for owner, name, k in (
        (torch, "zeros", 0),
        (torch.Tensor, "clone", 0),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(CSDMemoryError, match="no memory for a step on the accelerator"):
                here.step(k)
        if k == 0 and name == "clone":
            assert same(here.step(0).bits(), alone.step(0).bits())
    assert same(here.step(2).bits(), alone.step(2).bits())


@one_schedule
def test_a_snapshot(tmp_path):
    """A snapshot can be made while steps go on. It contains all states, and needs no accelerator to load."""
    here, alone = Trained(gpu(tmp_path / "a")).step(0), Trained([tmp_path / "b"], "cpu").step(0)
    made = here.opt.save(tmp_path / "snap", wait=False)
    here.step(1)
    assert made.result() == tmp_path / "snap"
    resumed = Trained([tmp_path / "snap" / "device-0"], "cpu", seed=9, resume=True)
    assert same(resumed.bits(), alone.bits())
    assert same(resumed.step(1).bits(), here.bits())


@one_schedule
def test_close_gives_memory_back(tmp_path):
    here = Trained(gpu(tmp_path / "a")).step(0)
    copies = engine_of(here.opt).truth.copies.by_param.values()
    there = [weakref.ref(state) for copy in copies for state in copy.states]
    assert there
    here.opt.close()
    assert [state for state in there if state() is not None] == []


@one_schedule
@pytest.mark.parametrize("named", [True, False])
def test_a_gradient_that_stayed_on_the_host(named, tmp_path):
    """The program moves a parameter to the accelerator after its gradient was computed on the host."""

    def run(devices, device, grad_dtype=None):
        it = Trained(devices, "cpu", params=params_on("cpu")[:-2], grad_dtype=grad_dtype)
        for p in it.params:
            p.grad = torch.ones_like(p)
            p.data = p.data.to(device)
        it.opt.step()
        return it.bits()

    for grad_dtype in (None, torch.bfloat16):
        devices = gpu(tmp_path / f"a{grad_dtype}") if named else ["gpu:", "ram:"]
        alone = run([tmp_path / f"b{named}{grad_dtype}"], "cpu", grad_dtype)
        assert same(run(devices, DEVICE, grad_dtype), alone)


@one_schedule
def test_what_rots_in_the_directory_is_found_when_it_is_read(tmp_path, monkeypatch):
    here = Trained(gpu(tmp_path / "a")).step(0)
    here.opt.synchronize()
    flip(tmp_path / "a", "exp_avg")
    before = [p.detach().cpu() for p in here.params]
    with monkeypatch.context() as patch:
        patch.setattr(Native, "pull", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            here.step(1)
    with pytest.raises(CSDStoreError, match=r"is not what was written there on device 0 .*0\.0"):
        here.step(1)
    assert same([p.detach().cpu() for p in here.params], before)


@one_schedule
@pytest.mark.parametrize(
    ("gpu", "there", "seconds", "limits"),
    [
        # A drive moves 48 MB/s, and only writes, but does not read, the tiles on the accelerator. Of 48 tiles it gets
        # all; or as many as there is room for; or so many that the link (12 B for each of its elements, 2 B for others)
        # is as busy as the drive.
        ("room=1GB&link=1GB/s", 48, 48 * 12 / 48e6, ["link", "speed"]),
        (f"room={12 * 10 * TILE}&link=1GB/s", 10, (10 * 12 + 38 * 24) / 48e6, ["room", "speed"]),
        ("room=1GB&link=24MB/s", 30, (30 * 12 + 18 * 24) / 48e6, ["link", "speed"]),
    ],
)
def test_auto(gpu, there, seconds, limits, tmp_path):
    params = [randn((TILE,), i).to(DEVICE, torch.bfloat16).requires_grad_() for i in range(48)]
    devices = ["auto", f"gpu:?update=1G/s&{gpu}", f"file:{tmp_path}?mixed=48MB/s"]
    it = Trained(devices, params=params)
    for k in range(2):
        it.step(k)
    stats = it.opt.stats()
    placement = stats["placement"]
    assert [d["params"] for d in stats["devices"]] == pytest.approx([there * TILE, (48 - there) * TILE], abs=TILE)
    assert [d["params"] for d in placement["devices"]] == [d["params"] for d in stats["devices"]]
    assert [d["limited_by"] for d in placement["devices"]] == limits
    assert placement["seconds"] == pytest.approx(seconds * TILE, rel=0.05)


@one_schedule
def test_bytes_of_codes(tmp_path):
    """Of 16-bit parameters, 5 B and an exponent per group are on the accelerator, and each of them is written once."""
    n = 64 * TILE
    it = Trained(gpu(tmp_path), params=[randn((n,), 1, torch.bfloat16).to(DEVICE).requires_grad_()], state_dtype="8bit")
    for k in range(2):
        it.step(k)
    there, directory = it.rows()
    assert there["params"] == n
    assert there["state_bytes"] == there["commit_bytes"] == 5 * n + n // 64
    assert directory["flash_read_bytes"] == directory["push_bytes"] == 0


@one_schedule
def test_codes_without_kernels(tmp_path, no_kernels):
    """Where the accelerator has no kernels, the directory has the states, and the host updates them."""
    it, alone = (Trained(d, pair=EIGHT_BIT[0]).step(0) for d in (gpu(tmp_path / "a"), [tmp_path / "b"]))
    assert it.rows()[0]["params"] == 0
    assert same(it.bits(), alone.bits())


SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 200))]


@pytest.mark.parametrize("seed", SEEDS)
def test_histories(seed, tmp_path, monkeypatch):
    """Whatever happens between and in steps, with any room, the bits are those of directories alone."""
    choose = random.Random(seed)
    some = [(), (0, 2), (7, 9), (TILE,), (3 * TILE + 5,), (700,)]
    shapes = [choose.choice(some) for _ in range(choose.randint(1, 7))]
    dtypes = [choose.choice([*DTYPES, torch.complex64]) for _ in shapes]
    n, options = choose.randint(1, 2), {}
    if seed % 2:
        options = {"state_dtype": "8bit", "amsgrad": seed % 4 == 1}
    if seed % 3 == 0:
        options["topk"] = 0.2

    def params_of(device):
        values = [randn(shape, i, dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]
        return [value.to(device).requires_grad_() for value in values]

    def devices(name, *, on_accelerator):
        cache = choose.choice(["off", "0", "40KiB"])
        named = [f"file:{tmp_path}/{name}{i}?cache={cache}&buffers={choose.choice([1, 3, 8])}" for i in range(n)]
        room = choose.choice(["1GB", "100kB", "40kB", "1"])
        return [f"gpu:?room={room}", *named] if on_accelerator else named

    def opened(**more):
        pair = []
        for name, device in (("a", DEVICE), ("b", "cpu")):
            on_accelerator = name == "a" and choose.random() < 0.8
            where = device if name == "b" or on_accelerator or choose.random() < 0.5 else "cpu"
            made = Trained(
                devices(name, on_accelerator=on_accelerator), where, params=params_of(where), **options, **more
            )
            pair.append(made)
        return pair

    pair = opened()
    for k in range(1, choose.randint(4, 10)):
        without = {i for i in range(len(shapes)) if choose.random() < 0.2}
        happens = choose.choice(["", "", "fails", "write", "edit", "load", "resume", "move", "topless"])
        known = [i for i, p in enumerate(pair[1].params) if pair[1].opt.state.get(p) and p.numel()]
        which, value = choose.randrange(len(shapes)), choose.random()
        fails_in = choose.choice(["pull", "finish", "begin"])
        if happens == "resume" and known:
            for it in pair:
                it.opt.close()
            pair = opened(resume=True)
        for it in pair:
            p = it.params[which]
            if happens == "write":
                with torch.no_grad():
                    p.mul_(value)
            elif happens == "edit" and which in known:
                it.opt.state[p]["exp_avg_sq"].fill_(value)
            elif happens == "load" and known:
                it.opt.load_state_dict(copy.deepcopy(it.opt.state_dict()))
            elif happens == "move" and it is pair[0]:
                p.grad, p.data = None, p.data.to("cpu" if p.device.type == DEVICE else DEVICE)
            elif happens == "fails" and it is pair[0] and len(without) < len(shapes):
                with monkeypatch.context() as patch:
                    patch.setattr(class_with(fails_in), fails_in, failing_once(getattr(class_with(fails_in), fails_in)))
                    try:
                        it.step(1000 + k, without)
                    except CSDOSError:
                        pass
                    else:  # nothing to pull
                        it.opt.close()
                        return
            it.step(k, without)
        assert same(pair[0].bits(), pair[1].bits()), (k, happens)


@one_schedule
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_kills(seed, tmp_path, emulated_only):
    """Whenever it is killed, and with whatever devices it is resumed, the bits are those of the run without a kill."""
    command = [sys.executable, TESTS / "crash" / "gpu.py", str(seed), "12", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "each one resumed from a committed step" in done.stdout


@pytest.mark.ci
@one_schedule
def test_the_power_fails(tmp_path, emulated_only):
    """A little of `make soak`: whatever a power loss leaves, a run resumes from a committed step."""
    options = ["--accelerator", "--kills=0", "--calls=0", "--images=20", "--seed=1"]
    command, environment = [sys.executable, TESTS / "crash", *options], preloaded(tmp_path)
    environment["PYTHONPATH"] = str(TESTS.parent)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "20 power losses" in done.stdout


def failing_once(call):
    failed = []

    def fails(engine, *arguments, **named):
        if not failed:
            failed.append(1)
            raise CSDOSError(5, "once")
        return call(engine, *arguments, **named)

    return fails
