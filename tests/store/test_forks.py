"""A killed trainer can be restarted at once, as supervisors do, even if processes that it forked still run."""

import contextlib
import ctypes
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from support.forked import process, processes

import csd_optim.store.file as store_module
from csd_optim import CSDAdam, CSDBusyError
from csd_optim.store.file import StoreFile, lock
from csd_optim.store.format import FILE_NAME


def workers(opt):
    loader = torch.utils.data.DataLoader(range(1000), num_workers=2, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    return [w.pid for w in batches._workers], batches


def forked(opt):
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    return [child], None


def loaded(opt):
    opt.close()
    tensors = CSDAdam.load("csd0")
    return forked(opt)[0], tensors


def natively(opt):
    child = ctypes.CDLL(None).fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    return [child], None


def train_and_wait(pipe, children, directory, options):
    os.chdir(directory)
    p = torch.nn.Parameter(torch.ones(5000))
    opt = CSDAdam([p], devices=["csd0"], tile_size=1024, **options)
    p.grad = torch.ones(5000)
    opt.step()
    opt.synchronize()
    left, kept = children(opt)
    pipe.send(left)
    time.sleep(600)
    del kept


@contextlib.contextmanager
def killed_trainer(children, directory, **options):
    """Kills a trainer; yields the pids of the processes that it had forked, which still run."""
    ours, theirs = processes.Pipe()
    trainer = process(train_and_wait, theirs, children, directory, options)
    theirs.close()
    left = []
    try:
        assert ours.poll(300), "the trainer hangs"
        left = ours.recv()  # EOFError: the trainer has failed
        trainer.kill()
        trainer.join()
        for pid in left:
            os.kill(pid, 0)
        yield left
    finally:
        trainer.kill()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):  # workers end on their own within seconds
                os.kill(pid, signal.SIGKILL)
        trainer.join()


def resume(directory):
    return CSDAdam([torch.nn.Parameter(torch.ones(5000))], devices=[str(directory)], tile_size=1024, resume=True)


def test_tensors_of_load_are_not_for_children_either(tmp_path):
    with killed_trainer(loaded, tmp_path):
        resume(tmp_path / "csd0").close()


@pytest.mark.parametrize("options", [{}, {"overwrite": True}], ids=["new", "overwrite"])
@pytest.mark.parametrize("children", [workers, forked])
def test_a_killed_trainer_is_started_again(children, options, tmp_path):
    if "overwrite" in options:
        with CSDAdam([p := torch.nn.Parameter(torch.ones(7))], devices=[str(tmp_path / "csd0")]) as opt:
            p.grad = torch.ones(7)
            opt.step()
    with killed_trainer(children, tmp_path, **options), resume(tmp_path / "csd0") as opt:
        assert opt.committed_step == 1


def test_a_child_that_python_knows_nothing_of(tmp_path):
    with killed_trainer(natively, tmp_path) as (child,):
        with pytest.raises(CSDBusyError, match=rf"in use by process {child}, forked by process \d+, which has ended"):
            resume(tmp_path / "csd0")
        os.kill(child, signal.SIGKILL)
        end = time.monotonic() + 20
        while True:  # it is not our child, so we cannot wait for it
            try:
                resume(tmp_path / "csd0").close()
                break
            except CSDBusyError:
                assert time.monotonic() < end
                time.sleep(0.01)


def test_a_child_leaves_its_parent_the_lock_and_its_own_files_alone(tmp_path):
    store = StoreFile(tmp_path / "csd0", durable=True)
    store.allocate(4096)
    numbers = store.fd, store.io_fd
    child = os.fork()
    if child == 0:
        right = False
        try:
            taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(max(numbers))]  # lower numbers may be free, too
            reused = set(numbers) <= set(taken)
            store.close()  # as a finalizer may call it
            right = reused and all(os.fstat(fd) for fd in taken)
        finally:
            os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    file = tmp_path / "csd0" / FILE_NAME
    assert file.exists()
    with open(file) as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    store.close()


def descriptors():
    # One of the list is that of the folder, which is closed by now.
    return {number for number in map(int, os.listdir("/proc/self/fd")) if Path(f"/proc/self/fd/{number}").exists()}


@pytest.mark.parametrize("where", ["directory", "memory"])
def test_a_scratch_file_has_one_descriptor(where, tmp_path):
    before = descriptors()
    store = StoreFile(tmp_path if where == "directory" else None, durable=False)
    for size in (8192, 4096):
        store.allocate(size)
        assert descriptors() - before == {store.fd} == {store.io_fd}
        assert os.fstat(store.fd).st_size == store.end
    store.close()
    assert descriptors() == before


def test_an_owner_that_nobody_has_waited_for_has_ended(tmp_path):
    file = tmp_path / "file"
    reader, writer = os.pipe()
    if (owner := os.fork()) == 0:
        fd = os.open(file, os.O_CREAT | os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fork() == 0:
            os.close(writer)
            os.read(reader, 1)  # until the test is done
        os._exit(0)
    try:
        os.waitid(os.P_PID, owner, os.WEXITED | os.WNOWAIT)
        with open(file, "rb+") as other, pytest.raises(CSDBusyError, match=f"forked by process {owner}, which has end"):
            lock(other.fileno(), file)
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(owner, 0)


@pytest.mark.parametrize("error", [PermissionError, ProcessLookupError])
def test_an_owner_that_is_hidden_has_not_ended(error, tmp_path, monkeypatch):
    """With hidepid=2 /proc hides the owner: only kill(pid, 0) tells whether it exists."""
    hidden = (1 << 22) + 1  # beyond the largest pid

    def kill(pid, number):
        assert (pid, number) == (hidden, 0)
        raise error

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(store_module, "lock_owner", lambda _: hidden)
    says = (
        f"in use by process {hidden}; stop that" if error is PermissionError else f"process {hidden}, which has ended"
    )
    with open(tmp_path / "file", "wb") as one, open(tmp_path / "file", "rb+") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        with pytest.raises(CSDBusyError, match=says):
            lock(other.fileno(), tmp_path / "file")
