"""A snapshot is a store of one step, complete or absent, made while training goes on."""

import errno
import fcntl
import os
import shutil
import threading
import time
import warnings

import pytest
import torch
from support.comparing import assert_same
from support.inside import engine_of
from support.stores import (
    continues_like,
    flip,
    grads,
    in_snapshot,
    make,
    model,
    places,
    resumed,
    state_of,
    train_params,
)

from csd_optim import (
    CSDAdam,
    CSDOSError,
    CSDRuntimeError,
    CSDStoreError,
    CSDStoreExistsError,
    CSDWarning,
)
from csd_optim.bindings import Native
from csd_optim.checkpoint import files
from csd_optim.checkpoint import snapshot as checkpoint
from csd_optim.checkpoint.verify import verify
from csd_optim.store import reader as tiles
from csd_optim.store.format import (
    CLEAN,
    FILE_NAME,
    read_contents,
)

GIB = 1 << 30


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_snapshot_is_a_store_of_the_last_step(tmp_path, n, named):
    params, opt = make(tmp_path / "a", n, named, steps=2)
    opt.user_state = {"epoch": 7, "seen": torch.arange(5)}
    opt.param_groups[0]["lr"] = 5e-4
    train_params(opt, params, 2, 3)
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
    """A device of the original and one of the snapshot are not accepted as one optimizer's."""
    _, opt = make(tmp_path / "a", 2)
    opt.save(tmp_path / "snap")
    opt.close()
    with pytest.raises(CSDStoreError, match="belongs to another optimizer"):
        resumed([tmp_path / "a" / "csd0", tmp_path / "snap" / "device-1"])


@pytest.mark.fp32_states("what is written to states is rounded to codes")
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
    train_params(opt, params, 3, 5)
    opt.close()
    assert all(not v.damage for v in verify(places(tmp_path / "a", 2)))


@pytest.mark.fp32_states("what is written to states is rounded to codes")
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


@pytest.mark.fp32_states("only fp32 states are mapped")
@pytest.mark.at_hand("looks at states after the optimizer was closed")
def test_store_is_in_use_as_before_when_it_was_saved(tmp_path):
    """save() does not mark the store as cleanly closed; close() does."""
    params, opt = make(tmp_path / "a", 1)
    opt.save(tmp_path / "one")
    assert read_contents(tmp_path / "a" / "csd0").superblock.flags == 0
    opt.close()
    assert read_contents(tmp_path / "a" / "csd0").superblock.flags == CLEAN
    others, again = resumed(places(tmp_path / "a", 1))
    again.save(tmp_path / "two")  # no step was taken since
    assert_same(state_of(again, others), state_of(opt, params))
    again.close()


class Slow:
    """Makes a copy wait until the test lets it go on."""

    def __init__(self, monkeypatch):
        self.begun, self.go = threading.Event(), threading.Event()
        write = files.Output.write

        def slow(output, data, offset):
            self.begun.set()
            assert self.go.wait(60)
            write(output, data, offset)

        monkeypatch.setattr(files.Output, "write", slow)


@pytest.fixture
def slow(monkeypatch):
    slow = Slow(monkeypatch)
    yield slow
    slow.go.set()


@pytest.mark.fp32_states("only fp32 states are mapped")
@pytest.mark.at_hand("looks at states after the optimizer was closed")
def test_training_goes_on_while_a_snapshot_is_copied(tmp_path, slow):
    params, opt = make(tmp_path / "a", 2)
    before = state_of(opt, params)
    future = opt.save(tmp_path / "snap", wait=False)
    assert slow.begun.wait(60)
    done = []

    def steps():
        for step in (3, 4):
            train_params(opt, params, step, step + 1)
            done.append(step)

    trainer = threading.Thread(target=steps)
    trainer.start()
    while not done:
        time.sleep(0.001)
    time.sleep(0.2)
    assert done == [3]  # the next step writes the other slots, the one after it would overwrite what is being copied
    assert not future.done()
    assert not (tmp_path / "snap").exists()
    slow.go.set()
    trainer.join(300)
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


@pytest.mark.here("holds a copy back")
def test_what_is_copied_is_not_overwritten_by_edits_either(tmp_path, slow):
    """Tiles also change slots between steps, to make room for states from load_state_dict()."""
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
    loading.join(300)
    future.result(60)
    others, again = resumed(in_snapshot(tmp_path / "snap"))
    assert_same(state_of(again, others), before)
    again.close()
    opt.close()


@pytest.mark.here("the owner copies")
def test_close_waits_for_a_copy(tmp_path, slow):
    _, opt = make(tmp_path / "a", 1)
    future = opt.save(tmp_path / "snap", wait=False)
    closing = threading.Thread(target=opt.close)
    closing.start()
    time.sleep(0.1)
    assert closing.is_alive()
    slow.go.set()
    closing.join(300)
    assert future.done()
    assert (tmp_path / "snap").exists()


@pytest.mark.here("the owner copies")
def test_a_copy_rests_while_a_step_is_under_way(tmp_path, monkeypatch):
    params, opt = make(tmp_path / "a", 1)
    copied, read, finish = [], tiles._read, Native.finish
    during, stepping, rests = [], threading.Event(), threading.Event()

    def slowly(*arguments):
        copied.append(arguments)
        if len(copied) > 1:
            assert stepping.wait(60)
        return read(*arguments)

    def long_step(*arguments):
        stepping.set()  # from here on reads that had begun before the step finish
        assert rests.wait(60)
        before = len(copied)
        time.sleep(0.2)
        during.append(len(copied) - before)
        finish(*arguments)

    monkeypatch.setattr(tiles, "_read", slowly)
    monkeypatch.setattr(tiles, "IO_DEPTH", 1)
    monkeypatch.setattr(Native, "finish", long_step)
    future = opt.save(tmp_path / "snap", wait=False)
    hurry = engine_of(opt).committer.pins._pins[-1].hurry  # for which the copy waits while it rests
    wait = hurry.wait
    hurry.wait = lambda timeout: (rests.set(), wait(timeout))
    train_params(opt, params, 3, 4)
    assert during[0] <= 1  # there was time for all
    n = len(read_contents(tmp_path / "a" / "csd0").tiles)
    opt.close()
    assert future.done()
    assert len(copied) == n


@pytest.mark.here("the owner copies")
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


@pytest.mark.here("the owner copies")
def test_two_snapshots_at_a_time(tmp_path, slow):
    params, opt = make(tmp_path / "a", 1)
    before = state_of(opt, params)
    first = opt.save(tmp_path / "one", wait=False)
    second = opt.save(tmp_path / "two", wait=False)
    slow.go.set()
    train_params(opt, params, 3, 6)
    for future in (first, second):
        others, again = resumed(in_snapshot(future.result(60)))
        assert_same(state_of(again, others), before)
        again.close()
    opt.close()


@pytest.fixture
def reflinks(monkeypatch):
    """Simulates a file system with reflinks, and counts them."""
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


@pytest.mark.here("the owner copies")
def test_reflinks_hold_up_nothing(tmp_path, reflinks, monkeypatch):
    params, opt = make(tmp_path / "a", 2)
    monkeypatch.setattr(checkpoint, "each_tile", lambda held, *_, **__: pytest.fail("copies") if held else None)
    go = threading.Event()
    finish = checkpoint.Snapshot.finish
    monkeypatch.setattr(checkpoint.Snapshot, "finish", lambda *a, **k: go.wait(60) and finish(*a, **k))
    future = opt.save(tmp_path / "snap", wait=False)
    assert len(reflinks) == 2
    before = state_of(opt, params)
    train_params(opt, params, 3, 6)  # does not wait for the copy
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


@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
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


@pytest.mark.here("the owner copies")
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("call", ["pwrite", "fsync", "ioctl"])
def test_failing_copy_leaves_nothing(tmp_path, monkeypatch, call, wait):
    params, opt = make(tmp_path / "a", 2)
    before = state_of(opt, params)
    engine_fds = {store.fd for store in engine_of(opt).devices.stores}
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
        engine_of(opt).committer.pins.wait_before(0)
    if not wait and call != "ioctl":  # a caller that ignores the future is warned
        assert any("was not saved" in str(w.message) for w in warned)
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path / "snap") in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
    train_params(opt, params, 3, 6)  # nothing waits for the failed copy
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


@pytest.mark.here("the owner copies")
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
    engine_of(opt).stepping = True
    with pytest.raises(CSDRuntimeError, match="under way"):
        opt.save(tmp_path / "snap")
    engine_of(opt).stepping = False
    train_params(opt, params, 3, 4)
    opt.close()


@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_damaged_tile_is_not_copied(tmp_path):
    _, opt = make(tmp_path / "a", 1)
    engine_of(opt).committer.wait()
    flip(tmp_path / "a" / "csd0", "exp_avg", tile=2)
    with pytest.raises(CSDStoreError, match="exp_avg of tile 2 is damaged: elements 4096 to 5119 of weight"):
        opt.save(tmp_path / "snap")
    assert not (tmp_path / "snap").exists()
    opt.close()
