"""Faults around an owner: full disks, connections that are cut or silent, forks, ends of processes."""

import contextlib
import copy
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from support.inside import engine_of
from support.nets import Net, assert_equal, own, synchronize_once_cut
from support.owner_here import OwnerHere
from support.owners import Owner

from csd_optim import CSDError, CSDLostError, CSDOSError, CSDRankError, CSDRuntimeError, signals
from csd_optim.engine.commit.durable import DurableCommitter
from csd_optim.serve.wire.connection import Connection
from csd_optim.store.file import StoreFile


def test_a_full_disk_undoes_the_step_and_the_next_call_tries_again(tmp_path, monkeypatch):
    with OwnerHere(tmp_path / "owner") as owner:
        ours, served = Net(own(tmp_path)).steps(3), Net(owner.address).steps(3)
        image = served.image()
        real = StoreFile.reserve

        def full(self, *arguments):
            raise CSDOSError(28, f"{self.path}: No space left on device")

        monkeypatch.setattr(StoreFile, "reserve", full)
        with pytest.raises(CSDOSError, match="No space left") as failure:
            served.step()
        assert failure.value.errno == 28
        assert all(torch.equal(a, b) for a, b in zip(image, served.image(), strict=True))
        monkeypatch.setattr(StoreFile, "reserve", real)
        served.opt.zero_grad()
        assert_equal(ours.steps(2), served.steps(2))
        served.opt.close()


def test_a_checkpoint_that_cannot_be_written_changes_nothing(tmp_path, monkeypatch):
    with OwnerHere(tmp_path / "owner") as owner:
        ours, served = Net(own(tmp_path)), Net(owner.address)
        loaded = copy.deepcopy(served.steps(1).opt.state_dict())
        assert_equal(ours.steps(3), served.steps(2))
        served.opt.synchronize()
        real = DurableCommitter.flush

        def fails(self, **options):
            monkeypatch.setattr(DurableCommitter, "flush", real)
            raise CSDOSError(28, "No space left on device")

        monkeypatch.setattr(DurableCommitter, "flush", fails)
        with pytest.raises(CSDOSError, match="No space left"):
            served.opt.load_state_dict(loaded)
        assert_equal(ours.steps(2), served.steps(2))
        served.opt.load_state_dict(loaded)
        assert served.opt.state_dict()["state"][0]["step"] == 1
        served.opt.close()


@pytest.mark.parametrize("mode", [None, {}, {"backward": True}], ids=str)
def test_connections_are_cut_between_steps(tmp_path, mode):
    with OwnerHere(tmp_path / "owner") as owner:
        ours, served = Net(own(tmp_path)), Net(owner.address)
        if mode is not None:
            served.opt.overlap(served.model, **mode)
        for _ in range(4):
            ours.step()
            served.step()
            served.opt.wait()
            owner.owner.sessions[0].end("cut")
            synchronize_once_cut(served.opt)
        assert_equal(ours, served)
        served.opt.close()


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlap"])
def test_a_connection_that_is_cut_within_a_tile_leaves_no_part_of_it(tmp_path, overlaps, monkeypatch):
    """Parameters arrive where they lie: what has arrived of a tile when the link is lost is undone, too."""
    with OwnerHere(tmp_path / "owner") as owner:
        ours, served = Net(own(tmp_path)).steps(3), Net(owner.address).steps(3)
        if overlaps:
            served.opt.overlap(served.model)
            assert_equal(ours.steps(2), served.steps(2))
        served.opt.synchronize()
        torn, real = [], Connection.fill

        def cut(self, views):
            if threading.current_thread().name.startswith("csd_optim receives") and not torn:
                for view in views:
                    view[: len(view) // 2] = b"\x7f" * (len(view) // 2)
                torn.extend(views)
                self.end()
            real(self, views)

        monkeypatch.setattr(Connection, "fill", cut)
        if overlaps:
            served.step()
        with pytest.raises(CSDRankError, match="is shut down"):
            served.opt.synchronize() if overlaps else served.step()
        assert torn
        served.opt.wait()
        assert_equal(ours, served)
        served.opt.zero_grad()
        served.done = ours.done
        assert_equal(ours.steps(2), served.steps(2))
        served.opt.close()


def test_an_owner_that_is_started_again_is_waited_for(tmp_path):
    with OwnerHere(tmp_path / "owner") as owner:
        ours, served = Net(own(tmp_path)).steps(3), Net(owner.address).steps(2)
        served.opt.synchronize()
        owner.stop()
        supervisor = threading.Timer(1, owner.start)
        supervisor.start()
        with contextlib.suppress(CSDRankError):  # says, if so, that the connection was cut
            served.opt.stats()
        assert_equal(ours, served.steps(1))
        supervisor.join()
        served.opt.close()


def test_a_stopped_owner_is_noticed_within_the_timeout(tmp_path):
    with Owner(tmp_path, timeout=2) as owner:
        served = Net(owner.address).steps(2)
        pid = owner.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            begun = time.monotonic()
            with pytest.raises(CSDError):
                served.step()
            assert time.monotonic() - begun < 60  # a busy machine takes longer than 2 s
        finally:
            os.kill(pid, signal.SIGCONT)
        served.opt.wait()
        served.opt.zero_grad()
        served.steps(2)
        served.opt.close()


def test_what_was_written_after_a_lost_step_is_lost_with_it(tmp_path, monkeypatch):
    """It is not put into the states of the step before, to which the owner goes back."""
    with OwnerHere(tmp_path / "owner") as owner:
        served = Net(owner.address).steps(3)
        served.opt.synchronize()
        image, real = served.image(), StoreFile.stage

        def lost(self, *arguments):
            raise CSDLostError(5, f"{self.path}: Input/output error")

        monkeypatch.setattr(StoreFile, "stage", lost)
        served.step()  # its commit is in the background
        first = next(served.model.parameters())
        served.opt.state[first]["exp_avg"].mul_(2)
        with contextlib.suppress(CSDLostError):
            owner.stop()
        monkeypatch.setattr(StoreFile, "stage", real)
        owner.start()
        with pytest.raises(CSDRankError, match="have lost step 4"):
            engine_of(served.opt).committer.confirm()
        engine_of(served.opt).close()  # as when the optimizer is dropped
        again = Net(owner.address, resume=True)
        assert again.opt.committed_step == 3
        assert all(torch.equal(a, b) for a, b in zip(image, again.image(), strict=True))
        again.opt.close()


def test_ctrl_c_ends_the_wait_for_a_stopped_owner(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "GRACE", 0.0)  # the first Ctrl-C is enough
    with Owner(tmp_path, timeout=300) as owner:
        ours, served = Net(own(tmp_path)).steps(2), Net(owner.address).steps(2)
        served.opt.synchronize()
        os.kill(owner.pid, signal.SIGSTOP)
        ctrl_c = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        ctrl_c.start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            served.step()
        assert time.monotonic() - begun < 120
        os.kill(owner.pid, signal.SIGCONT)
        with contextlib.suppress(CSDRankError):  # says, if so, that a step has been lost
            served.opt.wait()
        served.opt.zero_grad()
        assert_equal(ours, served)
        assert_equal(ours.steps(2), served.steps(2))
        served.opt.close()


@pytest.mark.ci
def test_a_stopped_trainer_is_superseded(tmp_path):
    with Owner(tmp_path, timeout=30) as owner:
        code = f"""
            import sys, time
            sys.path[:0] = {sys.path!r}
            from support.nets import Net
            net = Net({owner.address!r}, overwrite=True).steps(2)
            net.opt.synchronize()
            print("ready", flush=True)
            time.sleep(600)
        """
        trainer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
        try:
            assert trainer.stdout.readline() == "ready\n"
            trainer.send_signal(signal.SIGSTOP)
            net = Net(owner.address, resume=True)
            assert net.opt.committed_step == 2
            net.steps(1)
            net.opt.close()
        finally:
            trainer.kill()
            trainer.wait()
            trainer.stdout.close()


def test_a_forked_child_refuses_and_leaves_the_parents_session_alone(tmp_path):
    with OwnerHere(tmp_path / "owner") as owner:
        net = Net(owner.address).steps(2)

        if not (pid := os.fork()):
            code = 1
            try:
                net.opt.step()
            except CSDRuntimeError as e:
                code = 0 if "belongs to process" in str(e) else 2
            net.opt.close()
            os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        net.steps(2)
        net.opt.close()


@pytest.mark.ci
def test_a_process_ends_without_close(tmp_path):
    with Owner(tmp_path, timeout=30) as owner:
        for end in ("", "raise SystemExit(0)", "opt = net.opt; del net"):
            code = f"""
                import sys
                sys.path[:0] = {sys.path!r}
                from support.nets import Net
                net = Net({owner.address!r}, overwrite=True).steps(3)
                {end}
            """
            done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=300, capture_output=True)
            assert (done.returncode, done.stderr) == (0, b"")
        net = Net(owner.address, resume=True)
        assert net.opt.committed_step == 3
        net.opt.close()
