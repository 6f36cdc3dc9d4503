"""Snapshots, state dicts from stores, export and import, verify: the same bits everywhere, and nothing half made."""

import errno
import fcntl
import gc
import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TILE

from csd_optim import (
    CSDAdam,
    CSDBusyError,
    CSDOSError,
    CSDRuntimeError,
    CSDStoreError,
    CSDStoreExistsError,
    CSDValueError,
    CSDWarning,
)
from csd_optim.bindings import crc32c
from csd_optim.checkpoint import export as convert
from csd_optim.checkpoint import snapshot as checkpoint
from csd_optim.checkpoint.verify import verify
from csd_optim.cli import output as show
from csd_optim.engine import engine
from csd_optim.store import reader as tiles
from csd_optim.store.format import (
    CLEAN,
    FILE_NAME,
    PAGE,
    TILE_STATE,
    Record,
    Region,
    Superblock,
    pack_table,
    pack_tiles,
    read_contents,
)
from csd_optim.store.layout import plan_extent, round_up

GIB = 1 << 30


def model(seed=0):
    """Parameters of every kind; "waiting" never has a gradient."""
    torch.manual_seed(seed)
    return {
        "weight": torch.nn.Parameter(torch.randn(60, 150)),
        "columns": torch.nn.Parameter(torch.randn(70, 90).t()),
        "half": torch.nn.Parameter(torch.randn(5000).bfloat16()),
        "phase": torch.nn.Parameter(torch.randn(33, 3, dtype=torch.complex64).t()),
        "scalar": torch.nn.Parameter(torch.randn(())),
        "empty": torch.nn.Parameter(torch.randn(0, 3)),
        "waiting": torch.nn.Parameter(torch.randn(4)),
        "amsgrad": torch.nn.Parameter(torch.randn(3000)),
    }


def groups_of(params, named=True):
    members = [*params.items()] if named else [*params.values()]
    return [{"params": members[:4]}, {"params": members[4:7], "lr": 3e-3}, {"params": members[7:], "amsgrad": True}]


def grads(params, seed):
    torch.manual_seed(1000 + seed)
    for name, p in params.items():
        p.grad = None if name == "waiting" else torch.randn_like(p)


def train(opt, params, first, last):
    for step in range(first, last):
        grads(params, step)
        opt.step()


def places(directory, n):
    return [directory / f"csd{d}" for d in range(n)]


def make(directory, n=2, named=True, steps=3, **options):
    """Parameters and an optimizer after some steps."""
    directory.mkdir(exist_ok=True)
    params = model()
    options = {"tile_size": TILE, "lr": 1e-2} | options
    opt = CSDAdam(groups_of(params, named), devices=places(directory, n), **options)
    train(opt, params, 0, steps)
    return params, opt


def state_of(opt, params):
    """Everything that a store holds, copied."""
    held = {}
    for name, p in params.items():
        if name != "waiting":
            held[name] = {key: value.clone() for key, value in opt.state[p].items()} | {"itself": p.detach().clone()}
    return held


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].keys() == b[name].keys(), name
        for key in a[name]:
            assert torch.equal(a[name][key], b[name][key]), (name, key)


def resumed(devices, named=True, **options):
    """A fresh model with what is in a store."""
    params = model(seed=9)
    return params, CSDAdam(groups_of(params, named), lr=1e-2, devices=devices, resume=True, **options)


def in_snapshot(path):
    return sorted(path.iterdir())


def continues_like(params, opt, devices, named=True):
    """Whoever resumes `devices` gets the same bits, now and after more steps."""
    others, again = resumed(devices, named)
    assert_same(state_of(again, others), state_of(opt, params))
    train(opt, params, 100, 102)
    train(again, others, 100, 102)
    assert_same(state_of(again, others), state_of(opt, params))
    again.close()


# ---- save ----------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_snapshot_is_a_store_of_the_last_step(tmp_path, n, named):
    params, opt = make(tmp_path / "a", n, named, steps=2)
    opt.user_state = {"epoch": 7, "seen": torch.arange(5)}
    opt.param_groups[0]["lr"] = 5e-4
    train(opt, params, 2, 3)
    opt.user_state = {"epoch": "of the next step"}
    future = opt.save(tmp_path / "snap")
    assert future.result() == tmp_path / "snap"
    made = in_snapshot(tmp_path / "snap")
    assert [d.name for d in made] == [f"device-{d}" for d in range(n)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "snap"]
    for d, place in enumerate(made):
        contents = read_contents(place)
        assert (contents.superblock.device, contents.superblock.step, contents.superblock.flags) == (d, 3, CLEAN)
    assert all(not v.damage for v in verify(tmp_path / "snap"))
    _, again = resumed(made, named)
    assert again.user_state["epoch"] == 7
    assert torch.equal(again.user_state["seen"], torch.arange(5))
    assert again.param_groups[0]["lr"] == 5e-4
    again.close()
    continues_like(params, opt, made, named)
    opt.close()


def test_snapshot_goes_its_own_way(tmp_path):
    """A device of the original and one of the snapshot are not taken for one optimizer's."""
    _, opt = make(tmp_path / "a", 2)
    opt.save(tmp_path / "snap")
    opt.close()
    with pytest.raises(CSDStoreError, match="belongs to another optimizer"):
        resumed([tmp_path / "a" / "csd0", tmp_path / "snap" / "device-1"])


def test_snapshot_has_what_was_written_since_the_step(tmp_path):
    params, opt = make(tmp_path / "a")
    opt.state[params["weight"]]["exp_avg"][3] = 17.0
    opt.state[params["amsgrad"]]["step"].fill_(11)
    opt.state[params["half"]]["exp_avg_sq"] = torch.full((5000,), 2.0)  # another tensor
    opt.save(tmp_path / "snap")
    held = CSDAdam.load(tmp_path / "snap")["state"]
    assert torch.equal(held[0]["exp_avg"], opt.state[params["weight"]]["exp_avg"])
    assert (held[0]["exp_avg"][3] == 17).all()
    assert held[7]["step"] == 11
    assert (held[2]["exp_avg_sq"] == 2).all()
    train(opt, params, 3, 5)
    opt.close()
    assert all(not v.damage for v in verify(places(tmp_path / "a", 2)))


def test_snapshot_after_load_state_dict_and_before_any_step(tmp_path):
    source = model()
    plain = torch.optim.AdamW([source["weight"], source["half"]])
    grads(source, 0)
    plain.step()
    target = model()
    with CSDAdam([target["weight"], target["half"]], devices=[tmp_path / "a"]) as opt:
        opt.load_state_dict(plain.state_dict())
        opt.save(tmp_path / "snap")
    held = CSDAdam.load(tmp_path / "snap")["state"]
    assert torch.equal(held[0]["exp_avg"], plain.state[source["weight"]]["exp_avg"])
    assert torch.equal(held[1]["master"], target["half"].float())


def test_store_is_in_use_as_before_when_it_was_saved(tmp_path):
    """save() leaves no mark that the store was closed in order, and close() does."""
    params, opt = make(tmp_path / "a", 1)
    opt.save(tmp_path / "one")
    assert read_contents(tmp_path / "a" / "csd0").superblock.flags == 0
    opt.close()
    assert read_contents(tmp_path / "a" / "csd0").superblock.flags == CLEAN
    others, again = resumed(places(tmp_path / "a", 1))
    again.save(tmp_path / "two")  # nothing was done since
    assert_same(state_of(again, others), state_of(opt, params))
    again.close()


class Slow:
    """A copy that goes on when it is let go."""

    def __init__(self, monkeypatch):
        self.begun, self.go = threading.Event(), threading.Event()
        write = checkpoint.Output.write

        def slow(output, data, offset):
            self.begun.set()
            assert self.go.wait(60)
            write(output, data, offset)

        monkeypatch.setattr(checkpoint.Output, "write", slow)


@pytest.fixture
def slow(monkeypatch):
    slow = Slow(monkeypatch)
    yield slow
    slow.go.set()


@pytest.mark.parametrize("shadow", [True, False])
def test_training_goes_on_while_a_snapshot_is_copied(tmp_path, slow, shadow):
    params, opt = make(tmp_path / "a", 2, shadow=shadow)
    before = state_of(opt, params)
    future = opt.save(tmp_path / "snap", wait=False)
    assert slow.begun.wait(60)
    done = []

    def steps():
        for step in (3, 4):
            train(opt, params, step, step + 1)
            done.append(step)

    trainer = threading.Thread(target=steps)
    trainer.start()
    if shadow:  # the next step writes the other slots
        while not done:
            time.sleep(0.001)
    time.sleep(0.2)
    assert done == ([3] if shadow else [])  # the one after would write what is being copied
    assert not future.done()
    assert not (tmp_path / "snap").exists()
    slow.go.set()
    trainer.join(60)
    assert done == [3, 4]
    assert future.result(60) == tmp_path / "snap"
    others, again = resumed(in_snapshot(tmp_path / "snap"))
    assert_same(state_of(again, others), before)
    again.close()
    opt.close()
    assert all(not v.damage for v in verify(places(tmp_path / "a", 2)))
    others, again = resumed(places(tmp_path / "a", 2))
    assert_same(state_of(again, others), state_of(opt, params))
    again.close()


def test_what_is_copied_is_not_overwritten_by_edits_either(tmp_path, slow):
    """Between steps, too, tiles move: to make room for what load_state_dict() brings."""
    params, opt = make(tmp_path / "a", 1)
    before = state_of(opt, params)
    checkpoint_ = {"state": {}, "param_groups": opt.state_dict()["param_groups"]}
    checkpoint_["state"] = {
        i: {k: v.clone() for k, v in entry.items()} for i, entry in opt.state_dict()["state"].items()
    }
    future = opt.save(tmp_path / "snap", wait=False)
    assert slow.begun.wait(60)
    loading = threading.Thread(target=lambda: [opt.load_state_dict(checkpoint_) for _ in range(3)])
    loading.start()
    time.sleep(0.2)
    assert loading.is_alive()
    slow.go.set()
    loading.join(60)
    future.result(60)
    others, again = resumed(in_snapshot(tmp_path / "snap"))
    assert_same(state_of(again, others), before)
    again.close()
    opt.close()


def test_close_waits_for_a_copy(tmp_path, slow):
    _, opt = make(tmp_path / "a", 1)
    future = opt.save(tmp_path / "snap", wait=False)
    closing = threading.Thread(target=opt.close)
    closing.start()
    time.sleep(0.1)
    assert closing.is_alive()
    slow.go.set()
    closing.join(60)
    assert future.done()
    assert (tmp_path / "snap").exists()


def test_a_copy_rests_while_a_step_is_under_way(tmp_path, monkeypatch):
    params, opt = make(tmp_path / "a", 1)
    copied, read, finish = [], tiles._read, engine.bindings.engine_finish
    during = []

    def slowly(*arguments):
        copied.append(arguments)
        time.sleep(0.02)
        return read(*arguments)

    def long_step(*arguments):
        time.sleep(0.1)  # what had begun before comes to its end
        before = len(copied)
        time.sleep(0.2)
        during.append(len(copied) - before)
        finish(*arguments)

    monkeypatch.setattr(tiles, "_read", slowly)
    monkeypatch.setattr(tiles, "IO_DEPTH", 1)
    monkeypatch.setattr(engine.bindings, "engine_finish", long_step)
    future = opt.save(tmp_path / "snap", wait=False)
    train(opt, params, 3, 4)
    assert during[0] <= 1  # not the ten that it has time for
    n = len(read_contents(tmp_path / "a" / "csd0").tiles)
    opt.close()
    assert future.done()
    assert len(copied) == n


def test_interrupted_save_leaves_nothing(tmp_path, slow, monkeypatch):
    _, opt = make(tmp_path / "a", 1)
    monkeypatch.setattr(checkpoint.Saving, "wait", interrupted(checkpoint.Saving.wait, slow))
    with pytest.raises(KeyboardInterrupt):
        opt.save(tmp_path / "snap")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
    opt.save(tmp_path / "snap")  # the next one is not affected
    opt.close()


def interrupted(wait, slow):
    def interrupt(saving):
        class Once:
            def result(self):
                saving.give_up.set()
                slow.go.set()
                raise KeyboardInterrupt

        if slow.go.is_set():
            return wait(saving)
        try:
            return Once().result()
        finally:
            assert isinstance(saving.future.exception(60), CSDRuntimeError)

    return interrupt


def test_two_snapshots_at_a_time(tmp_path, slow):
    params, opt = make(tmp_path / "a", 1)
    before = state_of(opt, params)
    first = opt.save(tmp_path / "one", wait=False)
    second = opt.save(tmp_path / "two", wait=False)
    slow.go.set()
    train(opt, params, 3, 6)
    for future in (first, second):
        others, again = resumed(in_snapshot(future.result(60)))
        assert_same(state_of(again, others), before)
        again.close()
    opt.close()


@pytest.fixture
def reflinks(monkeypatch):
    """A file system that has them; counts."""
    made = []
    ioctl = fcntl.ioctl

    def clone(fd, request, *arguments):
        if request != checkpoint.FICLONE:
            return ioctl(fd, request, *arguments)
        with open(f"/proc/self/fd/{arguments[0]}", "rb") as source, open(f"/proc/self/fd/{fd}", "wb") as target:
            shutil.copyfileobj(source, target)
        made.append(fd)
        return 0

    monkeypatch.setattr(fcntl, "ioctl", clone)
    return made


@pytest.mark.parametrize("shadow", [True, False])
def test_reflinks_hold_up_nothing(tmp_path, reflinks, monkeypatch, shadow):
    params, opt = make(tmp_path / "a", 2, shadow=shadow)
    monkeypatch.setattr(checkpoint, "each_tile", lambda held, *_, **__: pytest.fail("copies") if held else None)
    go = threading.Event()
    finish = checkpoint.Snapshot.finish
    monkeypatch.setattr(checkpoint.Snapshot, "finish", lambda *a, **k: go.wait(60) and finish(*a, **k))
    future = opt.save(tmp_path / "snap", wait=False)
    assert len(reflinks) == 2
    before = state_of(opt, params)
    train(opt, params, 3, 6)  # does not wait
    go.set()
    others, again = resumed(in_snapshot(future.result(60)))
    assert_same(state_of(again, others), before)
    again.close()
    opt.close()


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY])
def test_without_reflinks_it_copies(tmp_path, monkeypatch, error):
    def refuse(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    _, opt = make(tmp_path / "a", 1)
    opt.save(tmp_path / "snap")
    opt.close()
    assert not verify(tmp_path / "snap")[0].damage


def test_copy_takes_half_the_room(tmp_path):
    """The other slot of each tile stays a hole."""
    p = torch.nn.Parameter(torch.randn(1 << 20))
    with CSDAdam([p], devices=[tmp_path / "a"]) as opt:
        p.grad = torch.ones_like(p)
        opt.step()
        opt.save(tmp_path / "snap")
    a, b = ((d / FILE_NAME).stat() for d in (tmp_path / "a", tmp_path / "snap" / "device-0"))
    assert a.st_size == b.st_size
    assert 12 << 20 <= 512 * b.st_blocks < 13 << 20 < 24 << 20 <= 512 * a.st_blocks


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("call", ["pwrite", "fsync", "ioctl"])
def test_failing_copy_leaves_nothing(tmp_path, monkeypatch, call, wait):
    params, opt = make(tmp_path / "a", 2)
    before = state_of(opt, params)
    engine_fds = {store.fd for store in opt._engine.devices.stores}
    module = fcntl if call == "ioctl" else os
    real = getattr(module, call)

    def full(fd, *arguments):
        if fd in engine_fds:
            return real(fd, *arguments)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", CSDWarning)
        patch.setattr(module, call, full)
        with pytest.raises(CSDOSError, match="No space left") as caught:
            opt.save(tmp_path / "snap", wait=wait).result(60)
        opt._engine.committer.make_way()
    if not wait and call != "ioctl":  # somebody who does not ask the future is told all the same
        assert any("was not saved" in str(w.message) for w in warned)
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path / "snap") in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
    train(opt, params, 3, 6)  # nothing waits for it
    opt.close()
    assert before["weight"]["step"] == 3


def test_no_room_is_seen_before(tmp_path, monkeypatch):
    _, opt = make(tmp_path / "a", 1)

    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    with pytest.raises(CSDOSError, match=r"no room in .*0\.00 GB are free") as caught:
        opt.save(tmp_path / "snap")
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "snap").exists()
    opt.close()


def test_save_overwrites_nothing(tmp_path):
    _, opt = make(tmp_path / "a", 1)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "directory", "link"):
        with pytest.raises(FileExistsError, match="nothing is overwritten") as caught:
            opt.save(tmp_path / name)
        assert isinstance(caught.value, CSDStoreExistsError)
    with pytest.raises(CSDOSError, match="there is no directory"):
        opt.save(tmp_path / "no" / "where")
    assert (tmp_path / "file").read_text() == "mine"
    opt.close()
    with pytest.raises(CSDRuntimeError, match="closed"):
        opt.save(tmp_path / "late")


@pytest.mark.parametrize("devices", [["ram:"], ["file:"], ["CSD", "ram:"]])
def test_save_needs_directories(tmp_path, devices):
    p = torch.nn.Parameter(torch.randn(10))
    devices = [str(tmp_path / "a") if d == "CSD" else d for d in devices]
    with CSDAdam([p], devices=devices) as opt:
        p.grad = torch.ones_like(p)
        opt.step()
        with pytest.raises(CSDRuntimeError, match=r"state_dict\(\)"):
            opt.save(tmp_path / "snap")
    assert not (tmp_path / "snap").exists()


def test_save_needs_a_state(tmp_path):
    p = torch.nn.Parameter(torch.randn(10))
    with (
        CSDAdam([p], devices=[tmp_path / "a"]) as opt,
        pytest.raises(CSDRuntimeError, match="after the first step"),
    ):
        opt.save(tmp_path / "snap")


def test_save_within_a_step_is_refused(tmp_path):
    params, opt = make(tmp_path / "a", 1)
    opt._engine.stepping = True
    with pytest.raises(CSDRuntimeError, match="under way"):
        opt.save(tmp_path / "snap")
    opt._engine.stepping = False
    train(opt, params, 3, 4)
    opt.close()


def test_damaged_tile_is_not_copied(tmp_path):
    _, opt = make(tmp_path / "a", 1)
    opt._engine.wait()
    flip(tmp_path / "a" / "csd0", "exp_avg", tile=2)
    with pytest.raises(CSDStoreError, match="exp_avg of tile 2 is damaged: elements 4096 to 5119 of weight"):
        opt.save(tmp_path / "snap")
    assert not (tmp_path / "snap").exists()
    opt.close()


# ---- load ----------------------------------------------------------------------------


def test_load_gives_adamws_state_dict(tmp_path):
    params, opt = make(tmp_path / "a", 3)
    opt.user_state = {"epoch": 2}
    train(opt, params, 3, 4)
    expected = opt.state_dict()
    opt.close()
    devices = places(tmp_path / "a", 3)
    for paths in (devices, devices[::-1], [d / FILE_NAME for d in devices]):
        held = CSDAdam.load(paths)
        assert held["state"].keys() == expected["state"].keys() == {0, 1, 2, 3, 4, 5, 7}
        for i, entry in held["state"].items():
            assert entry.keys() == expected["state"][i].keys()
            for key, value in entry.items():
                assert torch.equal(value, expected["state"][i][key])
                assert value.stride() == expected["state"][i][key].stride() or key == "step"
        for group, wanted in zip(held["param_groups"], expected["param_groups"], strict=True):
            assert group == wanted
    ours = held["csd_optim"]
    assert (ours["step"], ours["user_state"]) == (4, {"epoch": 2})
    assert {p["name"]: p["dtype"] for p in ours["params"]} == {
        name: str(p.dtype).removeprefix("torch.") for name, p in params.items() if name != "waiting"
    }
    assert [p["name"] for p in ours["waiting"]] == ["waiting"]


@pytest.mark.parametrize("named", [True, False])
def test_load_fits_torchs_adamw_and_ours(tmp_path, named):
    """The step after is the one that the original makes."""
    params, opt = make(tmp_path / "a", 1, named)
    opt.save(tmp_path / "snap")
    held = CSDAdam.load(tmp_path / "snap")
    theirs, ours = ({n: torch.nn.Parameter(p.detach().clone()) for n, p in params.items()} for _ in range(2))
    adamw = torch.optim.AdamW(groups_of(theirs, named))
    adamw.load_state_dict(held)
    with CSDAdam(groups_of(ours, named), devices=["ram:"]) as again:
        again.load_state_dict(CSDAdam.load(tmp_path / "snap"))
        for optimizer, mine in ((opt, params), (adamw, theirs), (again, ours)):
            train(optimizer, mine, 3, 4)
        assert_same(state_of(again, ours), state_of(opt, params))
    for name, p in params.items():
        tolerance = 1e-6 if p.dtype is not torch.bfloat16 else 2e-2  # there, AdamW steps in bfloat16
        torch.testing.assert_close(theirs[name], p, rtol=tolerance, atol=tolerance)
    opt.close()


def test_loaded_tensors_are_the_file_and_keep_it_from_being_written(tmp_path):
    params, opt = make(tmp_path / "a", 1)
    opt.close()
    held = CSDAdam.load(tmp_path / "a" / "csd0")
    other = CSDAdam.load(tmp_path / "a" / "csd0")  # several may look
    with pytest.raises(CSDBusyError, match=r"load\(\)"):
        resumed(places(tmp_path / "a", 1))
    held["state"][0]["exp_avg"].fill_(5.0)  # private
    assert torch.equal(other["state"][0]["exp_avg"], opt.state[params["weight"]]["exp_avg"])
    (tmp_path / "a" / "csd0" / FILE_NAME).rename(tmp_path / "moved")
    assert torch.equal(other["state"][1]["exp_avg"], opt.state[params["columns"]]["exp_avg"])
    (tmp_path / "moved").rename(tmp_path / "a" / "csd0" / FILE_NAME)
    one = held["state"][0]["master"]
    del held, other
    gc.collect()
    with pytest.raises(CSDBusyError):
        resumed(places(tmp_path / "a", 1))
    del one
    gc.collect()
    _, again = resumed(places(tmp_path / "a", 1))
    again.close()


def test_load_of_a_store_in_use(tmp_path):
    _, opt = make(tmp_path / "a", 1)
    with pytest.raises(CSDBusyError, match=r"a snapshot, which its optimizer makes by save\(\)"):
        CSDAdam.load(tmp_path / "a" / "csd0")
    opt.close()


def test_load_refuses_what_is_no_whole_store(tmp_path):
    _, opt = make(tmp_path / "a", 3)
    opt.close()
    with pytest.raises(CSDStoreError, match="name all 3"):
        CSDAdam.load(places(tmp_path / "a", 2))
    with pytest.raises(CSDOSError, match="there is no store"):
        CSDAdam.load(tmp_path)
    with pytest.raises(CSDOSError, match="there is no store"):
        CSDAdam.load(tmp_path / "nowhere")
    with pytest.raises(CSDValueError, match="at least one"):
        CSDAdam.load([])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / FILE_NAME).touch()
    with pytest.raises(CSDStoreError, match="no step"):
        CSDAdam.load(tmp_path / "empty")
    assert (tmp_path / "empty" / FILE_NAME).exists()  # looking removes nothing
    (tmp_path / "other").mkdir()
    for content in (b"mine", b"mine" * 5000):
        (tmp_path / "other" / FILE_NAME).write_bytes(content)
        for path in (tmp_path / "other", tmp_path / "other" / FILE_NAME):
            with pytest.raises(CSDStoreError, match=r"other/.* is no csd_optim store"):
                CSDAdam.load(path)
        assert (tmp_path / "other" / FILE_NAME).read_bytes() == content
    flip(tmp_path / "a" / "csd1", "master", tile=1)
    with pytest.raises(CSDStoreError, match="master of tile 1 is damaged"):
        CSDAdam.load(places(tmp_path / "a", 3))


# ---- export and import ---------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("n", "m"), [(1, 3), (3, 1)])
@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_export_and_import_are_the_same_bits(tmp_path, run, form, n, m, named):
    params, opt = make(tmp_path / "a", n, named, steps=2)
    opt.user_state = {"epoch": 4, "rng": torch.arange(100)}
    train(opt, params, 2, 3)
    opt.save(tmp_path / "snap")
    code, out, err = run("export", tmp_path / "snap", tmp_path / "out", "--format", form, "--shard-size", "50kB")
    assert (code, err) == (0, "")
    assert str(tmp_path / "out") in out
    code, out, err = run("import", tmp_path / "out", *places(tmp_path, m), "--tile-size", "4096")
    assert (code, err) == (0, "")
    assert "step 3" in out
    assert f"on {m} device" in out
    assert not any(v.damage or v.unchecked for v in verify(places(tmp_path, m)))
    a, b = read_contents(tmp_path / "snap" / "device-0"), read_contents(tmp_path / "csd0")
    assert (a.record.groups, a.record.seconds, a.superblock.step) == (b.record.groups, b.record.seconds, 3)
    assert {e["tile_elems"] for e in b.manifest["extents"]} == {4096}
    _, again = resumed(places(tmp_path, m), named)
    assert again.user_state["epoch"] == 4
    assert torch.equal(again.user_state["rng"], torch.arange(100))
    again.close()
    continues_like(params, opt, places(tmp_path, m), named)
    opt.close()


def test_torch_export_is_what_torch_save_writes(tmp_path, run):
    params, opt = make(tmp_path / "a", 2)
    opt.user_state = {"list": [torch.arange(3), {"x": torch.ones(2).half()}], "none": None}
    train(opt, params, 3, 4)
    opt.save(tmp_path / "snap")
    opt.close()
    assert run("export", tmp_path / "snap", tmp_path / "ours.pt")[0] == 0
    torch.save(CSDAdam.load(tmp_path / "snap"), tmp_path / "torchs.pt")
    ours, torchs = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("ours", "torchs"))
    assert str(ours) == str(torchs)
    for i, entry in torchs["state"].items():
        for key, value in entry.items():
            assert torch.equal(ours["state"][i][key], value)
            assert ours["state"][i][key].stride() == value.stride()
    convert.import_store(tmp_path / "torchs.pt", [tmp_path / "b"])  # so users may write it, too
    assert not verify(tmp_path / "b")[0].damage


def test_inspect_tells_what_a_step_writes(tmp_path, run):
    """Of what was imported, too, of which this store has written the last step only."""
    params, opt = make(tmp_path / "a", 2, steps=9)
    opt.close()
    convert.export_torch(places(tmp_path / "a", 2), tmp_path / "out.pt")
    convert.import_store(tmp_path / "out.pt", [tmp_path / "b"], TILE)
    for store in (tmp_path / "a" / "csd0", tmp_path / "b"):
        code, out, _ = run("inspect", store, "--json")
        told = json.loads(out)["step_bytes"]
        code, out, _ = run("inspect", store)
        assert code == 0
        assert f", {show.size(told)} a step" in out
    params, opt = resumed([tmp_path / "b"])
    train(opt, params, 9, 10)
    assert opt.stats()["flash_write_bytes"] == told
    opt.close()


def test_safetensors_are_read_by_the_library(tmp_path, run):
    safe = pytest.importorskip("safetensors.torch")
    params, opt = make(tmp_path / "a", 2)
    opt.close()
    arguments = ("export", *places(tmp_path / "a", 2), tmp_path / "out", "--format", "safetensors")
    code, out, _ = run(*arguments, "--shard-size", "60kB", "--json")
    assert code == 0
    content = json.loads(out)
    assert content["schema"] == "csd_optim.export/1"
    assert {Path(f) for f in content["files"]} == {*(tmp_path / "out").iterdir()}
    held = {}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        part = safe.load_file(file)
        assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= 60_000
        assert not held.keys() & part.keys()
        held |= part
    index = json.loads((tmp_path / "out" / convert.INDEX_NAME).read_text())
    assert index["weight_map"].keys() == held.keys()
    for name, p in params.items():
        for key, value in opt.state[p].items() if name != "waiting" else ():
            if key == "step":
                continue
            stored = held[f"{name}.{key}"]
            assert torch.equal(torch.view_as_complex(stored) if p.is_complex() else stored, value)
    assert index["metadata"]["csd_optim"]["steps"] == [3.0] * 7


def test_parameters_that_got_another_place_are_left_behind(tmp_path):
    """amsgrad's fourth state takes another extent; the old one is not exported."""
    params, opt = make(tmp_path / "a", 1)
    held = opt.state_dict()
    held["state"][0]["max_exp_avg_sq"] = torch.full((60, 150), 3.0)
    held["param_groups"][0]["amsgrad"] = True
    for i in (1, 2, 3):
        held["state"][i]["max_exp_avg_sq"] = torch.zeros_like(held["state"][i]["exp_avg"])
    opt.load_state_dict(held)
    train(opt, params, 3, 4)
    opt.save(tmp_path / "snap")
    convert.export_torch(tmp_path / "snap", tmp_path / "out.pt")
    convert.import_store(tmp_path / "out.pt", places(tmp_path, 2))
    assert len(read_contents(tmp_path / "csd0").manifest["params"]) == 7
    assert len(read_contents(tmp_path / "a" / "csd0").manifest["params"]) == 11
    others, again = resumed(places(tmp_path, 2))
    assert_same(state_of(again, others), state_of(opt, params))
    again.close()
    opt.close()


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_export_of_a_damaged_store_leaves_nothing(tmp_path, run, form):
    _, opt = make(tmp_path / "a", 1)
    opt.close()
    flip(tmp_path / "a" / "csd0", "exp_avg_sq", tile=0)
    code, _, err = run("export", tmp_path / "a" / "csd0", tmp_path / "out", "--format", form)
    assert code == 1
    assert "exp_avg_sq of tile 0 is damaged: elements 0 to 1023 of weight" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize(
    ("what", "message"), [("start", "the manifest contradicts itself"), ("tiles", "do not belong together")]
)
def test_a_manifest_that_contradicts_itself(tmp_path, run, what, message):
    _, opt = make(tmp_path / "a", 1)
    opt.close()
    store = tmp_path / "a" / "csd0"
    held = read_contents(store)
    if what == "start":
        held.manifest["params"][1]["start"] += 16
    else:
        held.manifest["extents"][0]["tiles"] -= 1
        held.manifest["extents"][1]["tiles"] += 1
    about = json.dumps(held.manifest).encode()
    region = held.superblock.manifest._replace(size=len(about), crc=crc32c(about))
    block = replace(held.superblock, manifest=region).pack()
    with (store / FILE_NAME).open("r+b") as file:
        for copy in range(2):
            for at, data in ((region.offset(copy), about), (copy * PAGE, block)):
                file.seek(at)
                file.write(data)
    with pytest.raises(CSDStoreError, match=message):
        resumed([store])
    for form in ("torch", "safetensors"):
        code, _, err = run("export", store, tmp_path / "out", "--format", form)
        assert code == 1
        assert message in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_export_overwrites_nothing_and_needs_a_store_at_rest(tmp_path, run):
    _, opt = make(tmp_path / "a", 1)
    store = tmp_path / "a" / "csd0"
    code, _, err = run("export", store, tmp_path / "out")
    assert code == 1
    assert "save()" in err
    opt.close()
    (tmp_path / "out").write_text("mine")
    for form in ("torch", "safetensors"):
        code, _, err = run("export", store, tmp_path / "out", "--format", form)
        assert code == 1
        assert "nothing is overwritten" in err
    assert (tmp_path / "out").read_text() == "mine"
    assert run("export", store, tmp_path / "new", "--format", "onnx")[0] == 2
    assert run("export", store)[0] == 2


def test_import_refuses_what_is_no_export(tmp_path, run):
    params = model()
    plain = torch.optim.AdamW([params["weight"]])
    grads(params, 0)
    plain.step()
    torch.save(plain.state_dict(), tmp_path / "adamw.pt")
    (tmp_path / "text").write_text("no checkpoint")
    (tmp_path / "empty").mkdir()
    expected = {
        "adamw.pt": "opt.load_state_dict(torch.load(...))",
        "text": "is no file that torch.load",
        "empty": "is no export of a store",
        "nowhere": "cannot read",
    }
    for name, what in expected.items():
        code, _, err = run("import", tmp_path / name, tmp_path / "b")
        assert code == 1
        assert what in err
    assert not (tmp_path / "b").exists()


def test_import_makes_a_whole_store_or_none(tmp_path, run):
    _, opt = make(tmp_path / "a", 1)
    opt.close()
    store = tmp_path / "a" / "csd0"
    convert.export_safetensors(store, tmp_path / "out", 50_000)
    code, _, err = run("import", tmp_path / "out", tmp_path / "b", store)
    assert code == 1
    assert "holds a store of step 3" in err
    code, _, err = run("import", tmp_path / "out", "ram:")
    assert code == 1
    assert "name a directory" in err
    shard = sorted((tmp_path / "out").glob("*.safetensors"))[2]
    whole = shard.read_bytes()
    for broken in (whole[:-100], b"", b"\xff" * len(whole)):
        shard.write_bytes(broken)
        code, _, err = run("import", tmp_path / "out", tmp_path / "b")
        assert code == 1
        assert "damaged" in err
        assert not (tmp_path / "b" / FILE_NAME).exists()
    shard.write_bytes(whole)
    index = tmp_path / "out" / convert.INDEX_NAME
    content = json.loads(index.read_text())
    next(p for p in content["metadata"]["csd_optim"]["params"] if p["name"] == "half")["shape"] = [5001]
    index.write_text(json.dumps(content))
    code, _, err = run("import", tmp_path / "out", tmp_path / "b")
    assert code == 1
    assert "of half is missing or another" in err
    assert not (tmp_path / "b" / FILE_NAME).exists()


def test_newer_exports_are_refused(tmp_path, run):
    _, opt = make(tmp_path / "a", 1)
    opt.close()
    held = CSDAdam.load(tmp_path / "a" / "csd0")
    held["csd_optim"]["format"] = 3
    torch.save(held, tmp_path / "new.pt")
    code, _, err = run("import", tmp_path / "new.pt", tmp_path / "b")
    assert code == 1
    assert "upgrade" in err


# ---- verify ----------------------------------------------------------------------------


def where(directory, section, tile=0):
    """The first byte of a section of a tile (of extent 0, one device)."""
    contents = read_contents(directory)
    extent, _, at = next(s for s in contents.slots() if s[1] == tile)
    return at + 4 * extent["tile_elems"] * extent["sections"].index(section)


def flip(directory, section, tile=0, at=None):
    file = directory / FILE_NAME
    at = where(directory, section, tile) if at is None else at
    with file.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 0x10]))


@pytest.fixture
def store(tmp_path):
    _, opt = make(tmp_path / "a", 1)
    opt.close()
    return tmp_path / "a" / "csd0"


def test_verify_says_what_is_whole(tmp_path, run, store):
    _, opt = make(tmp_path / "b", 2)
    opt.save(tmp_path / "snap")
    opt.close()
    code, out, err = run("verify", store, tmp_path / "snap", *places(tmp_path / "b", 2))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    tiles = len(read_contents(store).tiles)
    assert lines[0] == f"{store / FILE_NAME}: ok, step 3, {tiles} tiles"
    assert len(lines) == 5
    assert all("ok, step 3" in line for line in lines)
    assert "device 1 of 2" in lines[2]
    code, out, _ = run("verify", tmp_path / "b" / "csd1" / FILE_NAME, "--json")
    content = json.loads(out)
    assert content["schema"] == "csd_optim.verify/1"
    assert content["ok"] is True
    assert content["stores"][0]["device"] == 1
    assert content["stores"][0]["unchecked"] == 0


@pytest.mark.parametrize("section", ["master", "exp_avg", "exp_avg_sq"])
def test_verify_names_section_tile_and_parameters(run, store, section):
    flip(store, section, tile=4)
    named = f"{section} of tile 4 is damaged: elements 8192 to 8999 of weight, elements 0 to 207 of columns"
    code, out, _ = run("verify", store)
    assert code == 1
    assert out == f"{store / FILE_NAME}: {named}\n"
    code, out, _ = run("verify", store, "--json")
    assert code == 1
    assert json.loads(out)["stores"][0]["damage"] == [f"{store / FILE_NAME}: {named}"]
    with pytest.raises(CSDStoreError) as caught:
        resumed([store])
    assert named in str(caught.value)


@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("what", ["superblock", "manifest", "slot table"])
def test_verify_sees_the_loss_of_one_copy_and_resume_repairs_it(run, store, what, copy):
    contents = read_contents(store)
    region = {"manifest": contents.superblock.manifest, "slot table": contents.superblock.table}.get(what)
    flip(store, None, at=copy * PAGE + 50 if region is None else region.offset(copy) + 7)
    code, out, _ = run("verify", store)
    assert code == 1
    assert f"copy {copy} of the {what} is damaged; the other copy is whole, and resume=True repairs this one" in out
    _, opt = resumed([store])
    opt.close()
    assert run("verify", store)[0] == 0


@pytest.mark.parametrize("what", ["superblock", "manifest", "slot table"])
def test_verify_when_both_copies_are_lost(run, store, what):
    contents = read_contents(store)
    region = {"manifest": contents.superblock.manifest, "slot table": contents.superblock.table}.get(what)
    for copy in range(2):
        flip(store, None, at=copy * PAGE + 50 if region is None else region.offset(copy) + 7)
    code, out, _ = run("verify", store)
    assert code == 1
    for copy in range(2):
        assert f"copy {copy} of the {what} is damaged\n" in out
    with pytest.raises(CSDStoreError, match="damaged"):
        resumed([store])


def test_verify_of_a_store_that_is_cut_off(run, store):
    file = store / FILE_NAME
    os.truncate(file, where(store, "exp_avg", tile=5) + 100)
    code, out, _ = run("verify", store)
    assert code == 1
    assert out


def test_verify_of_files_that_are_no_stores(tmp_path, run):
    code, _, err = run("verify", tmp_path)
    assert code == 1
    assert "there is no store" in err
    (tmp_path / FILE_NAME).write_bytes(b"mine" * 5000)
    code, out, _ = run("verify", tmp_path)
    assert code == 1
    assert "copy 0 of the superblock is damaged" in out
    (tmp_path / FILE_NAME).write_bytes(b"")
    code, out, _ = run("verify", tmp_path)
    assert code == 1
    assert (tmp_path / FILE_NAME).exists()


def test_verify_refuses_a_store_in_use(tmp_path, run):
    _, opt = make(tmp_path / "a", 1)
    code, _, err = run("verify", tmp_path / "a" / "csd0")
    assert code == 1
    assert "in use" in err
    assert "save()" in err
    opt.close()


def test_verify_sees_devices_that_do_not_belong_together(tmp_path, run, store):
    _, opt = make(tmp_path / "b", 3)
    opt.close()
    devices = places(tmp_path / "b", 3)
    assert run("verify", devices[1])[0] == 0  # one by itself may be looked at
    assert run("verify", *devices, store)[0] == 0
    code, out, _ = run("verify", *devices[:2])
    assert code == 1
    assert "name all 3" in out


def test_verify_sees_devices_without_a_common_step(tmp_path, run):
    _, opt = make(tmp_path / "a", 2)
    devices = places(tmp_path / "a", 2)
    opt.save(tmp_path / "snap")
    opt.close()
    made = in_snapshot(tmp_path / "snap")
    others, again = resumed(made)
    shutil.copy(made[0] / FILE_NAME, tmp_path / "old")
    train(again, others, 3, 6)
    again.close()
    shutil.copy(tmp_path / "old", made[0] / FILE_NAME)
    code, out, _ = run("verify", tmp_path / "snap")
    assert code == 1
    assert "no step in common" in out
    assert run("verify", *devices)[0] == 0


def test_verify_sees_a_step_in_place_that_was_cut_short(tmp_path, run):
    _, opt = make(tmp_path / "a", 1, shadow=False)
    opt._engine.committer._background.wait()
    opt._engine.committer.announce_step()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    opt.close()
    code, out, _ = run("verify", tmp_path / "b" / "csd0")
    assert code == 1
    assert "cut short" in out


# ---- memory ------------------------------------------------------------------------------


def sparse_store(directory, shapes, dense):
    """A store of which `dense` tiles are written, with random states; the rest are zeros, and holes."""
    directory.mkdir()
    numels = [int(np.prod(shape)) for _, shape in shapes]
    extent = plan_extent(numels, 1)
    sections, base = ["master", "exp_avg", "exp_avg_sq"], 2 * PAGE
    end = base + extent.device_bytes(0)
    params = [
        {"name": name, "group": 0, "position": i, "shape": list(shape), "dtype": "bfloat16", "extent": 0}
        | {"stride": list(torch.empty(shape, device="meta").stride()), "start": extent.starts[i], "numel": numels[i]}
        for i, (name, shape) in enumerate(shapes)
    ]
    described = {"tile_elems": extent.tile_elems, "tiles": extent.n_tiles, "slots": 2, "sections": sections}
    described["sum_elems"] = extent.tile_elems
    manifest = {"params": params, "waiting": [], "extents": [described | {"file_offset": base}]}
    about = json.dumps(manifest | {"tiles": extent.n_tiles}).encode()
    tiles, sums = np.zeros(extent.n_tiles, TILE_STATE), np.zeros((extent.n_tiles, 1, 3), np.uint32)
    tiles["summed"] = 1
    sums[:] = crc32c(bytes(4 * extent.tile_elems))
    noise = np.random.default_rng(0).bytes(4 * extent.tile_elems)
    with (directory / FILE_NAME).open("wb") as file:
        for tile in np.linspace(0, extent.n_tiles - 1, dense).astype(int).tolist():
            tiles["slot"][tile] = tile % 2
            sums[tile] = crc32c(noise)
            file.seek(base + (2 * tile + tile % 2) * extent.slot_bytes)
            for _ in sections:
                file.write(noise)
        with CSDAdam([torch.nn.Parameter(torch.ones(1))], devices=["ram:"]) as opt:
            record = Record(groups=[{k: v for k, v in opt.param_groups[0].items() if k != "params"}])
        table = pack_table([pack_tiles(described, tiles, sums)], np.full(len(params), 7.0), record)
        rooms = [round_up(len(data), PAGE) for data in (about, table)]
        of_manifest = Region(end, rooms[0], len(about), crc32c(about))
        of_table = Region(end + 2 * rooms[0], rooms[1], len(table), crc32c(table))
        block = Superblock(b"sparse as can be", 0, 1, 7, 7, CLEAN, of_manifest, of_table)
        for copy in range(2):
            for at, data in ((of_manifest.offset(copy), about), (of_table.offset(copy), table)):
                file.seek(at)
                file.write(data)
            file.seek(copy * PAGE)
            file.write(block.pack())
        file.truncate(of_table.offset(2))
    return sum(numels)


LIMITED = """
import json, resource, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
from csd_optim.checkpoint import export, snapshot
place = Path(sys.argv[1])
snapshot.snapshot(place / "store", place / "snap")
export.export_torch(place / "snap", place / "out.pt")
export.export_safetensors(place / "snap", place / "out")
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
"""


@pytest.fixture
def large(tmp_path):
    """A place for some GB, empty again whatever happens; pytest would keep it."""
    if shutil.disk_usage(tmp_path).free < 12 * GIB:
        pytest.skip("needs 12 GiB of disk")
    yield tmp_path
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()


def test_7b_parameters_in_1_gib_of_memory(large):
    """A copy and both exports, of 162 GB of which 1.3 GB, more than the memory, are no holes.

    RLIMIT_DATA stops whoever allocates more, the peak of the resident memory shows what was mapped from files.
    """
    wide, deep = 4096, 11008
    shapes = [("embed", (32000, wide)), ("head", (32000, wide))]
    for i in range(32):
        shapes += [(f"layer{i}.{name}", (wide, wide)) for name in "qkvo"]
        shapes += [(f"layer{i}.{name}", (deep, wide)) for name in ("gate", "up")]
        shapes += [(f"layer{i}.down", (wide, deep)), (f"layer{i}.norm", (wide,))]
    n = sparse_store(large / "store", shapes, dense=100)
    assert n > 6.7e9
    command = [sys.executable, "-c", LIMITED, str(large)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) < GIB
    assert (large / "out.pt").stat().st_size > 12 * n
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):  # else it wants as much memory as that
        held = torch.load(large / "out.pt", mmap=True, weights_only=True)["state"]
    assert len(held) == len(shapes)
    noise = torch.frombuffer(bytearray(np.random.default_rng(0).bytes(4 << 20)), dtype=torch.int32)
    embed = held[0]["exp_avg"].flatten().view(torch.int32)
    assert torch.equal(embed[: len(noise)], noise)
    assert not embed[len(noise) : 3 * len(noise)].any()
    index = json.loads((large / "out" / convert.INDEX_NAME).read_text())
    assert len(index["weight_map"]) == 3 * len(shapes)
