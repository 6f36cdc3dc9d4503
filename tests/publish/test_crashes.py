"""Processes that are killed at any call, and disks that are full: versions are never ahead, and never wrong."""

import errno
import os
import time

import pytest
import torch
from support.forked import process
from support.killed import ended, killed_at
from support.published import Model, Published, chain, gradients, publishes_on, weights_by_step
from support.versions import Writer

from csd_optim import CSDAdam, CSDWarning, Replica
from csd_optim.replica import to_file

STEPS = 3


def trains_and_publishes(directory, n, after, state_dtype):
    torch.set_num_threads(1)
    model = Model()
    options = {"lr": 1e-4, "tile_size": 4096, "state_dtype": state_dtype}
    opt = CSDAdam(model.parameters(), devices=f"{directory}/store", **options)

    def body():
        pub = opt.publish(f"{directory}/policy", model=model, keep=1, full_every=3)
        for step in range(1, STEPS + 1):
            gradients(model, step)
            opt.step()
        pub.wait()
        opt.close()

    killed_at(n, after=after, body=body)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("after", "state_dtype"),
    [
        (False, "fp32"),
        *(pytest.param(*c, marks=pytest.mark.soak) for c in [(True, "fp32"), (False, "8bit"), (True, "8bit")]),
    ],
)
def test_a_training_that_is_killed(after, state_dtype, tmp_path):
    """Killed at each call in turn: each version is that of its step, none is ahead of the store; and a resume goes on
    with the chain, as nothing was lost.
    """
    expected, n = weights_by_step(STEPS + 2, state_dtype=state_dtype, tile_size=4096), 0
    while True:
        n += 1
        directory = tmp_path / str(n)
        directory.mkdir()
        was_killed = ended(process(trains_and_publishes, str(directory), n, after, state_dtype))
        model = Model(seed=1)
        options = {"lr": 1e-4, "tile_size": 4096, "state_dtype": state_dtype}
        with CSDAdam(model.parameters(), devices=directory / "store", resume=True, **options) as opt:
            publishes_on(opt, directory / "policy", model, expected)
        if not was_killed:
            break
    assert n > 40


def follows(directory, out, n, after):
    killed_at(n, after=after, body=lambda: to_file.follow(directory, out))


@pytest.mark.parametrize("after", [False, True])
def test_a_follower_that_is_killed(after, tmp_path):
    """Killed at each call in turn: the file is the old one or the new one, and is continued."""
    out, n = tmp_path / "model.safetensors", 0
    with Writer(tmp_path / "policy", {"a": (70000,), "b": (3, 5)}) as writer:
        writer.full()
        to_file.follow(writer.path, out)
        old = out.read_bytes()
        writer.change(0.02)
        writer.delta()
        was_killed = True
        while was_killed:
            n += 1
            out.write_bytes(old)
            was_killed = ended(process(follows, writer.path, out, n, after))
            found = out.read_bytes()
            assert len(found) == len(old)
            assert (found != old) or was_killed
            to_file.follow(writer.path, out)
            new = out.read_bytes()
            assert found in (old, new)
            assert to_file.follow(writer.path, out) is None
    assert n > 3


# ---- a resume --------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_a_resume_goes_on_with_the_chain(state_dtype, tmp_path):
    options = {"state_dtype": state_dtype, "tile_size": 4096}
    with Published(tmp_path / "policy", str(tmp_path / "store"), **options) as t:
        t.steps(3)
    with Published(
        tmp_path / "policy", str(tmp_path / "store"), resume=True, model=Model(seed=9), done=3, **options
    ) as t:
        t.steps(2)
    versions = chain(tmp_path / "policy")
    assert [v.number for v in versions] == [1, 2, 3, 4, 5, 6]
    assert [v.is_full for v in versions] == [True] + [False] * 5
    assert len({v.run for v in versions}) == 1


def test_other_weights_begin_a_new_run(tmp_path):
    """After a rollback, or with weights set after the resume, there is a new run; a replica follows into it."""
    store, policy = tmp_path / "store", tmp_path / "policy"
    with Published(policy, str(store)) as t:
        t.steps(2)
        t.opt.save(tmp_path / "snapshot")
        t.steps(2)
        late = t.replica, t.copy
    with Published(policy, str(tmp_path / "snapshot/device-0"), resume=True, model=Model(seed=9), done=2) as t:
        t.replica, t.copy = late
        t.check()
        t.steps(2)
        assert t.replica.version == 8
    versions = chain(policy)
    assert [v.step for v in versions] == [0, 1, 2, 3, 4, 2, 3, 4]
    assert [v.is_full for v in versions] == [True, False, False, False, False, True, False, False]
    assert len({v.run for v in versions}) == 2


def test_versions_whose_full_one_is_gone(tmp_path):
    """A chain that nobody can begin gets a full version as soon as possible."""
    with Published(tmp_path / "policy", str(tmp_path / "store")) as t:
        t.steps(2)
    (tmp_path / "policy/v0000000001").rename(tmp_path / "elsewhere")
    model = Model(seed=9)
    with CSDAdam(model.parameters(), devices=tmp_path / "store", resume=True, tile_size=2048) as opt:
        pub = opt.publish(tmp_path / "policy", model=model)
        assert pub.version == 3
        gradients(model, 3)
        opt.step()
        pub.wait()
        assert chain(tmp_path / "policy")[-1].is_full
        Replica(tmp_path / "policy").load({})


# ---- what cannot be written ------------------------------------------------------------------


@pytest.mark.parametrize("where", ["write", "fsync", "rename"])
def test_a_full_disk(where, backend, tmp_path, devices, monkeypatch):
    """Training goes on, the publisher says so once, and then makes a full version."""
    with Published(tmp_path / "policy", devices) as t:
        t.steps(2)
        with monkeypatch.context() as patch:
            real = {"write": os.pwrite, "fsync": os.fsync, "rename": os.rename}[where]

            def refused(at, *arguments):
                place = os.readlink(f"/proc/self/fd/{at}") if isinstance(at, int) else str(at)
                if "policy" in place:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return real(at, *arguments)

            patch.setattr(os, {"write": "pwrite"}.get(where, where), refused)
            with pytest.warns(CSDWarning, match=r"were not published in .*: No space left") as said:
                t.step_and_wait()
            assert len([w for w in said if "not published" in str(w.message)]) == 1
            t.step_and_wait()
            assert (t.pub.version, t.pub.error) == (3, "No space left on device")
        t.steps(1)
        assert chain(tmp_path / "policy")[-1].is_full
        assert not [*(tmp_path / "policy").glob(".v*")]
        t.steps(2)
        assert not chain(tmp_path / "policy")[-1].is_full


def test_records_that_cannot_be_written(tmp_path, monkeypatch):
    """The updates themselves cannot write what they record: the same."""
    with Published(tmp_path / "policy", "ram:") as t:
        t.steps(2)
        spool = next(fd for fd in os.listdir("/proc/self/fd") if "policy/#" in os.readlink(f"/proc/self/fd/{fd}"))
        kept, full = os.dup(int(spool)), os.open("/dev/full", os.O_RDWR)
        os.dup2(full, int(spool))
        with pytest.warns(CSDWarning, match="were not published"):
            t.step_and_wait()
        os.dup2(kept, int(spool))
        os.close(kept)
        os.close(full)
        t.steps(1)
        assert chain(tmp_path / "policy")[-1].is_full


def test_no_reader_holds_it_up(tmp_path):
    """A replica that reads while versions are made and removed is never wrong."""
    with Published(tmp_path / "policy", "ram:", publish={"keep": 1, "full_every": 3}) as t:
        reader = process(reads_on, tmp_path / "policy")
        until = time.monotonic() + 60
        while reader.is_alive() and time.monotonic() < until:
            t.steps(1)
        assert ended(reader) is False


def reads_on(path):
    replica, copy = Replica(path), {}
    while replica.version is None or replica.version < 20:
        replica.follow(copy)
        replica.verify(copy)
    os._exit(0)
