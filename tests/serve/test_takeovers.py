"""Trainings that want the same owner: one takes over from another as a whole, or not at all. No optimizer is needed."""

import contextlib
import threading
import time

import numpy as np
import pytest
import torch
from support.owner_here import OwnerHere

from csd_optim import CSDAdam, CSDError, CSDRankError, CSDStoreError
from csd_optim.serve.requests import Found
from csd_optim.serve.trainer.link import Link
from csd_optim.serve.wire.dial import connect

ID = "00" * 16
OVER = "another session has taken over"


@pytest.fixture
def owner(tmp_path):
    with OwnerHere(tmp_path / "owner") as there:
        yield there


@contextlib.contextmanager
def links(owner, *trainers):
    """Return a link for each (trainer, trainers, training)."""

    def dial():
        return connect(("127.0.0.1", owner.port), key=None, timeout=60, streams=2, within=60)

    with contextlib.ExitStack() as stack:
        made = []
        for trainer, size, training in trainers:
            hello = {"model": "", "trainer": trainer, "trainers": size, "here": size, "token": training}
            hello["who"] = training
            made.append(Link(dial, {**hello, "tile_elems": 1024}, 2, 20))
            stack.callback(made[-1].close)
        yield made


class Opening:
    """A HELLO on a thread of its own. With `waits`, it resumes, and its trainers choose a step only after go()."""

    def __init__(self, link, waits=False):
        self.result, self._go, self._asked = None, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._open, args=(link, "resume" if waits else "new"))
        self._thread.start()
        if waits:
            assert self._asked.wait(10)

    def _open(self, link, mode):
        try:
            if isinstance(link.open(mode=mode, store=ID).fields, Found):
                self._asked.set()
                self._go.wait(30)
                link.choose(None)
                link.granted()
            self.result = "opened"
        except CSDError as e:
            self.result = str(e)

    def go(self):
        self._go.set()
        self._thread.join()
        return self.result


def with_states(link):
    link.open(mode="new", store=ID)
    request = {"sections": ["master", "exp_avg"], "codec": "fp32", "param_dtype": "", "first_param": 0}
    link.request("extend", np.array([3000], ">u8"), **request, tile_elems=1024)


@pytest.mark.parametrize("mode", ["new", "overwrite"])
def test_another_number_of_trainers_ends_no_training_that_has_states(owner, mode):
    with links(owner, (0, 2, "a"), (1, 2, "a"), (2, 3, "b")) as (*both, other):
        for link in both:
            with_states(link)
        with pytest.raises(CSDStoreError, match="another number of trainers than 3"):
            other.open(mode=mode, store=ID)
        for link in both:
            assert link.request("stats").fields.devices


def test_a_trainer_that_has_made_no_step_leaves_nothing(owner):
    CSDAdam([torch.zeros(10, requires_grad=True)], devices=owner.address).close()
    with links(owner, (1, 2, "b")) as (several,):
        several.open(mode="new", store=ID)
    assert not any(path.is_file() and path.stat().st_size for path in owner.store.rglob("*"))
    CSDAdam([torch.zeros(10, requires_grad=True)], devices=owner.address).close()


def test_the_last_one_wins(owner):
    """Also if those before it wait for a choice, and for the engine."""
    with links(owner, (0, 2, "first"), (0, 2, "second"), (0, 2, "third")) as (first, second, third):
        waiting = Opening(first, waits=True)
        then = Opening(second)
        time.sleep(0.3)
        last = Opening(third)
        assert last.go() == "opened"
        assert then.go() in (f"{OVER} (said by the optimizer ranks)", "opened")
        assert waiting.go() != "opened"
        assert third.request("stats")


def test_the_owner_ends_while_trainers_choose(tmp_path):
    with OwnerHere(tmp_path / "owner", timeout=300) as owner, links(owner, (0, 2, "a")) as (link,):
        waiting = Opening(link, waits=True)
        begun = time.monotonic()
        owner.stop()
        assert time.monotonic() - begun < 150
        assert waiting.go() != "opened"
        owner.start()


def test_a_training_that_was_superseded_does_not_come_back(owner):
    """Not while the one after it is being granted either."""
    with links(owner, (0, 2, "old"), (0, 2, "new")) as (old, new):
        old.open(mode="new", store=ID)
        waiting = Opening(new, waits=True)
        old.reattach = (lambda: {"store": ID, "step": 0}), (lambda _: None)
        for _ in range(2):  # the first finds out that the link is lost
            with pytest.raises(CSDRankError):
                old.request("stats")
        assert waiting.go() == "opened"
        with pytest.raises(CSDRankError, match=OVER):
            old.request("stats")
        assert new.request("stats")
