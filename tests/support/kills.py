"""Owners and trainers that are killed at a place in a step."""

import contextlib
import functools
import os
import signal
import threading
from unittest import mock

import torch
from support.nets import Net

from csd_optim.engine.commit.commit import Commit
from csd_optim.serve.owner.owner_requests import OwnerRequests
from csd_optim.serve.owner.owner_step import OwnerStep
from csd_optim.serve.trainer.link import Link
from csd_optim.serve.trainer.remote_native import RemoteNative

STEPS = 30
PATIENCE = 300  # seconds for which a program tries again

# Where they are killed: a class, its method, and whether that has run.
OWNER = {
    "before-BEGIN": (OwnerRequests, "_on_begin", False),
    "after-BEGIN": (OwnerRequests, "_on_begin", True),
    "in-PUSH": (OwnerStep, "receive", False),
    "after-PUSH": (OwnerStep, "receive", True),
    "in-PARAMS": (OwnerStep, "send_next", True),
    "before-FINISH": (OwnerRequests, "_on_finish", False),
    "in-FINISH": (OwnerStep, "keep", True),
    "after-FINISH": (OwnerRequests, "_on_finish", True),
    "before-COMMITTED": (Commit, "prepare", False),
    "in-COMMITTED": (Commit, "prepare", True),
}
TRAINER = {
    "before-BEGIN": (RemoteNative, "begin", False),
    "after-BEGIN": (RemoteNative, "begin", True),
    "in-PUSH": (RemoteNative, "push", True),
    "in-PARAMS": (RemoteNative, "pull", True),
    "before-FINISH": (RemoteNative, "_keep", False),
    "after-FINISH": (RemoteNative, "_keep", True),
    "in-an-answer": (Link, "_exchange", True),
}


@contextlib.contextmanager
def killed_at(place, call):
    """Kill this process with SIGKILL at the given call of a method, counted from 1; 0: never."""
    owner, name, after = place
    real, calls = getattr(owner, name), [0]

    @functools.wraps(real)
    def method(*arguments, **options):
        calls[0] += 1
        mine = calls[0] == call
        if mine and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **options)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    with mock.patch.object(owner, name, method):
        yield


class Killing:
    """Called in an owner's process before it serves: it will be killed as a file says."""

    def __init__(self, path):
        self.path = path

    def __call__(self):
        if self.path.exists():
            name, call = self.path.read_text().rsplit(" ", 1)
            self.path.unlink()
            self.kept = killed_at(OWNER[name], int(call))  # as long as this lives
            self.kept.__enter__()


@contextlib.contextmanager
def restarting(owner):
    """Start the owner again whenever it ends."""
    stop = threading.Event()

    def watch():
        while not stop.wait(0.01):
            if not owner.process.is_alive():
                owner.start()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


# ---- what they have to show afterwards ---------------------------------------------------


@functools.cache
def expected():
    """Return the parameters after each step of a run that nobody disturbs."""
    net = Net("ram:")
    images = [params(net)]
    for _ in range(STEPS):
        net.step()
        images.append(params(net))
    net.opt.close()
    return images


def params(net):
    return [p.detach().clone() for p in net.model.parameters()]


def assert_like(net, images):
    for i, (a, b) in enumerate(zip(params(net), images[net.done], strict=True)):
        assert torch.equal(a, b), (net.done, i)


def done_of(net):
    return int(net.opt.state_dict()["state"][0]["step"])


def train_in_process(address, name, call, images, failure):
    """Resume, and train to the last step, unless killed. In a process of its own."""
    torch.set_num_threads(1)
    try:
        with killed_at(TRAINER[name], call):
            net = Net(address, resume=True)
            net.done = done_of(net)
            images = torch.load(images)
            assert_like(net, images)
            while net.done < STEPS:
                net.step()
                assert_like(net, images)
            net.opt.close()
    except BaseException as e:
        failure.write_text(f"{type(e).__name__}: {e}")
        raise
