"""Trainers, owners and connections end at any moment: no step is lost or mixed with another."""

import os
import random
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.forked import process
from support.inside import engine_of
from support.owners import STARTS, Owners, small_buckets
from test_serve import Replicas

from csd_optim import CSDRankError, CSDRuntimeError, signals
from csd_optim.serve.wire import BULK, PUSHED, Session
from csd_optim.serve.wire import PUSH as PUSH_TAG

STEPS = 3  # of a trainer that is not killed


def expected_of(directory, steps=60):
    """Return the parameters after each step of an undisturbed training."""
    training = Replicas(str(directory / "undisturbed"))
    images = [training.image()]
    for _ in range(steps):
        training.step()
        images.append(training.image())
    training.opt.close()
    return images


PUSH = "its first push"
HALFWAY = "a push in the middle of its second step"
PUSHES = {PUSH: 0, HALFWAY: 24}  # number of pushes before it; each step has about 17


HALF_OPEN = "nobody hears that its connections end"
SILENT = "it stops when all is heard that it has said"


def end(how, meet):
    """End this process by a signal. HALF_OPEN imitates a machine that vanishes: a child keeps the connections."""
    if how == HALF_OPEN:
        child = os.fork()
        if not child:
            signal.pause()
        Path(f"{meet}-child").write_text(str(child))
        how = signal.SIGKILL
    signal.pthread_kill(threading.get_ident(), how)  # delivered to this thread, so that it does not go on


def ended_at(call, how, meet=None):
    """End this process at its `call`-th send or receive in a session (from 0), or at the push that `call` names."""
    left, announcements = [PUSHES.get(call, call)], []

    def counted(function, pushes):
        def counting(session, tensor, rank, tag=BULK):
            if call not in PUSHES or (pushes and tag in (BULK, PUSHED)):
                left[0] -= 1
                if left[0] == -1:
                    for work in (work for work in announcements if how == SILENT and id(work) in session._under_way):
                        session.wait(work)
                    end(signal.SIGSTOP if how == SILENT else how, meet)
            work = function(session, tensor, rank, tag)
            announcements.extend([work] * (pushes and tag == PUSH_TAG))
            return work

        return counting

    send, receive = counted(Session.send, True), counted(Session.receive, False)
    return mock.patch.multiple(Session, send=send, receive=receive)


@small_buckets()
def train_rank(rank, size, route, address, meet, call, how, images):
    """Train STEPS steps from where the owners are, unless killed; write an error to a file."""
    torch.set_num_threads(1)
    try:
        if size > 1 or route != "kept":
            dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=size)
        expected = torch.load(images)
        with ended_at(call, how, meet):
            training = Replicas(f"{address}&route={route}", route != "kept", resume=True)
            assert_like(training, expected)
            for _ in range(STEPS):
                training.step(rank)
                assert_like(training, expected)
            training.opt.synchronize()
    except CSDRankError as e:
        Path(f"{meet}-{rank}").write_text(str(e))
    except BaseException as e:
        if isinstance(e, RuntimeError) and "gloo" in str(e):  # DDP's error when another trainer is gone
            os._exit(0)
        Path(f"{meet}-{rank}").write_text(f"{type(e).__name__}: {e}")
        os._exit(3)
    os._exit(0)


def assert_like(training, expected):
    for a, b in zip(training.image(), expected[training.done], strict=True):
        assert torch.equal(a, b), training.done


class Trainers:
    """Runs one session after another with the same owners, each in new processes."""

    def __init__(self, owners, directory, steps=60, route="kept"):
        self.owners, self.directory, self.sessions, self.route = owners, directory, 0, route
        self.images = directory / "expected.pt"
        torch.save(expected_of(directory, steps), self.images)

    def start(self, size, victim=0, call=-1, how=signal.SIGKILL):
        self.sessions += 1
        self.meet = f"{self.directory}/trainers-{self.sessions}"
        return [
            process(
                train_rank,
                *(rank, size, self.route, self.owners.address, self.meet),
                *(call if rank == victim else -1, how, str(self.images)),
                daemon=True,
            )
            for rank in range(size)
        ]

    def said(self, rank=0):
        path = Path(f"{self.meet}-{rank}")
        return path.read_text() if path.exists() else ""

    def run(self, size, victim=0, call=-1):
        """Run a session. Returns whether the victim was killed."""
        ended = []
        for p in self.start(size, victim, call):
            p.join(STARTS)
            ended.append(p.exitcode)
        assert {*ended} <= {0, -signal.SIGKILL}, ([self.said(rank) for rank in range(size)], self.owners.said)
        return ended[victim] == -signal.SIGKILL


def kill_trainers(owners, directory, calls, size, route):
    """Kill a trainer at each of these calls; the next session goes on from there. Returns the number of kills."""
    trainers, pids, kills = Trainers(owners, directory, STEPS * (len(calls) + 2), route), owners.pids, 0
    assert not trainers.run(size)
    for call in calls:
        kills += trainers.run(size, victim=size - 1 if call in PUSHES else call % size, call=call)
    assert not trainers.run(size)
    assert owners.pids == pids
    return kills


@pytest.mark.parametrize(("size", "route"), [(1, "kept"), (2, "kept"), (2, "slices"), (2, "star")])
def test_a_killed_trainer_costs_nothing(tmp_path, size, route):
    with Owners(tmp_path, size, small=True) as owners:
        calls = [0, 9, HALFWAY, 60] if size == 1 else [3, HALFWAY] if route == "kept" else [PUSH, HALFWAY]
        assert kill_trainers(owners, tmp_path, calls, size, route) == len(calls)
        owners.stop()


@pytest.mark.soak
@pytest.mark.parametrize("route", ["kept", "slices", "star"])
@pytest.mark.parametrize("size", [1, 2])
def test_two_hundred_killed_trainers_cost_nothing(tmp_path, size, route):
    choose, most = random.Random(size), 100
    with Owners(tmp_path, size, small=True) as owners:
        calls = [*range(24), *(choose.randrange(most) for _ in range(110 - 24))]
        assert kill_trainers(owners, tmp_path, calls, size, route) >= 100
        owners.stop()


@pytest.mark.ci
@pytest.mark.parametrize(("call", "size", "route"), [(PUSH, 2, "kept"), (HALFWAY, 1, "kept"), (HALFWAY, 1, "slices")])
def test_a_trainer_that_was_stopped_finds_that_another_has_taken_over(tmp_path, call, size, route):
    with Owners(tmp_path, size, small=True) as owners:
        trainers = Trainers(owners, tmp_path, route=route)
        assert not trainers.run(1)
        (stopped,) = trainers.start(1, call=call, how=signal.SIGSTOP)
        until(lambda: Path(f"/proc/{stopped.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        meet = trainers.meet
        assert not trainers.run(1)
        os.kill(stopped.pid, signal.SIGCONT)
        stopped.join(STARTS)
        assert stopped.exitcode == 0, Path(f"{meet}-0").read_text()
        assert "is over" in Path(f"{meet}-0").read_text()
        assert not trainers.run(1)
        owners.stop()


def test_a_connection_that_nobody_has_ended_keeps_nobody_out(tmp_path):
    with Owners(tmp_path, 2, small=True) as owners:
        trainers = Trainers(owners, tmp_path)
        assert not trainers.run(1)
        (gone,) = trainers.start(1, call=HALFWAY, how=HALF_OPEN)
        gone.join(STARTS)
        assert gone.exitcode == -signal.SIGKILL
        child = int(Path(f"{trainers.meet}-child").read_text())
        try:
            assert not trainers.run(1)  # while the owners still wait for the rest of that push
            assert "session 2 is over: another session has taken over" in owners.said
        finally:
            os.kill(child, signal.SIGKILL)
        owners.stop()


def test_ctrl_c_within_a_step(tmp_path, monkeypatch):
    expected = expected_of(tmp_path, 3)
    with Owners(tmp_path, 2) as owners:
        training = Replicas(owners.address)
        with ended_at(PUSH, signal.SIGINT), pytest.raises(KeyboardInterrupt):
            training.step()
        training.step()  # the interrupted step was completed, and the session goes on
        assert_like(training, expected)
        monkeypatch.setattr(signals, "GRACE", 0.0)
        os.kill(owners.pids[1], signal.SIGSTOP)
        with ended_at(0, signal.SIGINT), pytest.raises(KeyboardInterrupt):
            training.step()
        with pytest.raises(CSDRuntimeError, match="session"):
            training.step()
        os.kill(owners.pids[1], signal.SIGCONT)
        owners.until("session 1 is over: (?!another session)")  # they have noticed
        training = Replicas(owners.address, resume=True)
        assert training.done in (2, 3)
        assert_like(training, expected)
        owners.stop()


def until(there):
    end = time.monotonic() + STARTS
    while not there():
        assert time.monotonic() < end
        time.sleep(0.01)


def go_on_without_owners(owners, trainers, choose, kills):
    """Kill one or all owners at random moments and restart them: trainers that resume lose at most one step."""
    for _ in range(kills):
        (trainer,) = trainers.start(1)
        if choose.random() < 0.8:  # kill while the trainer runs
            time.sleep(0.3 * choose.random())
        else:
            trainer.join(STARTS)
        owners.kill(*choose.choice([[], *([rank] for rank in range(owners.size))]))
        trainer.join(STARTS)
        if trainer.exitcode == 3:  # it has tried to connect while no owner was running
            assert "CSDUnavailableError" in trainers.said(), trainers.said()
        owners.start()
        assert not trainers.run(1)  # it checks that the owners have a complete step


@pytest.mark.parametrize("size", [1, 2])
@small_buckets()
def test_killed_owners_go_on_from_a_whole_step(tmp_path, size):
    with Owners(tmp_path, size, timeout=10, small=True) as owners:
        trainers = Trainers(owners, tmp_path)
        assert not trainers.run(1)
        training = Replicas(owners.address, resume=True)
        assert training.done == STEPS
        training.step()
        owners.kill(size - 1)
        with pytest.raises(CSDRankError, match="resume=True"):
            training.step()
        with pytest.raises(CSDRuntimeError, match="session"):
            training.step()
        for other in owners.processes[: size - 1]:
            other.join(STARTS)
            assert other.exitcode == 1, owners.said
        owners.start()
        assert not trainers.run(1)
        go_on_without_owners(owners, trainers, random.Random(size), 1)


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2])
def test_owners_killed_again_and_again_go_on_from_a_whole_step(tmp_path, size):
    with Owners(tmp_path, size, timeout=10, small=True) as owners:
        go_on_without_owners(owners, Trainers(owners, tmp_path, 2 * STEPS * 51), random.Random(size), 50)


def test_silence_ends_a_session(tmp_path):
    with Owners(tmp_path) as owners:
        training = Replicas(owners.address)
        training.step()
        engine_of(training.opt)._session.timeout = 0.2
        os.kill(owners.pids[0], signal.SIGSTOP)
        with pytest.raises(CSDRankError, match="Timed out"):
            training.step()
        os.kill(owners.pids[0], signal.SIGCONT)
        training = Replicas(owners.address, resume=True)
        assert training.done in (1, 2)  # the owners may have received all of the step


@pytest.mark.parametrize("route", ["kept", "slices"])
def test_silence_within_a_push_ends_a_session(tmp_path, route):
    with Owners(tmp_path, timeout=1, small=True) as owners:  # no other session ends this one
        (stopped,) = Trainers(owners, tmp_path, route=route).start(1, call=HALFWAY, how=SILENT)
        owners.until(r"session 1 is over: .*([Tt]imed out|timeout)")
        stopped.kill()
