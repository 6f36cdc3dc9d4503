"""An owner or a trainer is killed anywhere in a step: no durable step is lost, and none is mixed.

The trainer repeats what its owner has lost; a new trainer resumes. Either way all bits are those of a run that nobody
has disturbed. The soak tier kills each side 200 times.
"""

import random
import signal
import time

import pytest
import torch
from support.forked import process
from support.kills import (
    OWNER,
    PATIENCE,
    STEPS,
    TRAINER,
    Killing,
    assert_like,
    done_of,
    expected,
    restarting,
    train_in_process,
)
from support.nets import Net
from support.owners import Owner

from csd_optim import CSDError


def persist(net, images, until):
    """Train as a program does that repeats a step after an error, when parameters have their values again."""
    failures, end = 0, time.monotonic() + PATIENCE
    while net.done < until:
        assert time.monotonic() < end
        try:
            net.step()
        except CSDError as e:
            failures, last = failures + 1, e
            while True:
                assert time.monotonic() < end, f"in step {net.done + 1}: {last}"
                try:
                    net.opt.wait()
                    net.done = done_of(net)
                    break
                except CSDError as e:
                    last = e
                    time.sleep(0.01)
            net.opt.zero_grad()
        assert_like(net, images)
    return failures


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if i % 3 == 0 else pytest.mark.soak) for i, name in enumerate(OWNER)]
)
def test_a_trainer_goes_on_when_its_owner_was_killed(tmp_path, name):
    images = expected()
    order = tmp_path / "kill"
    call = random.Random(name).randint(2, 4)
    order.write_text(f"{name} {call * (5 if 'PUSH' in name or 'PARAMS' in name else 1) + 1}")
    with Owner(tmp_path, before=Killing(order), timeout=30) as owner, restarting(owner):
        net = Net(owner.address)
        persist(net, images, 8)
        assert owner.runs == 2, owner.said
        states = net.opt.state_dict()["state"]
        net.opt.close()
        again = Net(owner.address, resume=True)
        for k, entry in again.opt.state_dict()["state"].items():
            assert all(torch.equal(value, states[k][n]) for n, value in entry.items())
        again.opt.close()


def kill_trainers(directory, names, seed):
    """Train in one process after another, each killed, until a process has made all steps."""
    images = directory / "images.pt"
    torch.save(expected(), images)
    chance = random.Random(seed)
    with Owner(directory, timeout=30) as owner:
        Net(owner.address).steps(1).opt.close()
        pid = owner.pid
        kills = 0
        for name in names:
            failure = directory / "failure"
            call = chance.randint(1, 4 if "BEGIN" in name or "FINISH" in name else 40)
            trainer = process(train_in_process, owner.address, name, call, images, failure)
            trainer.join(PATIENCE)
            assert not failure.exists(), failure.read_text()
            assert trainer.exitcode in (0, -signal.SIGKILL)
            kills += trainer.exitcode != 0
            assert owner.pid == pid
            if trainer.exitcode == 0:
                Net(owner.address, overwrite=True).steps(1).opt.close()
        return kills


def test_a_trainer_resumes_where_a_killed_one_has_left(tmp_path):
    assert kill_trainers(tmp_path, ["in-PUSH", "after-FINISH", "in-an-answer"], 1)


@pytest.mark.soak
def test_trainers_are_killed_200_times(tmp_path):
    names = [name for _ in range(40) for name in TRAINER]
    assert kill_trainers(tmp_path, names, 2) >= 200


@pytest.mark.soak
def test_an_owner_is_killed_200_times(tmp_path):
    chance = random.Random(3)
    images = expected()
    order, kills = tmp_path / "kill", 0
    places = [name for _ in range(22) for name in OWNER]
    net = None
    with Owner(tmp_path, before=Killing(order), timeout=30) as owner:
        for name in places:
            if net is None or net.done > STEPS - 10:
                if net:
                    net.opt.close()
                net = Net(owner.address, overwrite=True).steps(1)
                net.opt.synchronize()  # an owner that has nothing durable cannot go on
            many = 25 if "PUSH" in name or "PARAMS" in name else 5
            order.write_text(f"{name} {chance.randint(2, many)}")
            owner.stop()
            before = owner.runs
            owner.start()
            with restarting(owner):
                persist(net, images, net.done + 7)
                kills += owner.runs > before + 1
        net.opt.close()
    assert kills >= 200
