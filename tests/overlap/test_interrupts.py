"""Ctrl-C at any instant, once or twice, also in an undo: no parameter keeps a value of a step that is gone."""

import os
import random
import signal
import sys
import threading
import time
from functools import partial

import pytest
import torch
from support.repeating import MODES, Repeating

from csd_optim.overlap.in_backward import _BackwardEnd

pytestmark = pytest.mark.signals


class LongUndo(Repeating):
    """A model whose undo takes some milliseconds."""

    def __init__(self, directory, mode, state_dtype):
        device = f"file:{directory}?cache=off"
        super().__init__(device, MODES[mode], width=256, depth=6, tile_size=8192, state_dtype=state_dtype)
        self.is_free = mode == "free"

    def mark(self):
        """Return what the last layer's weights begin with; backward changes these first."""
        return self.params[-2].detach()[0, :64].clone()

    def wait_for_updates(self, since):
        """Return when the step that runs in backward has changed a parameter since the mark()."""
        deadline = time.monotonic() + 10
        while torch.equal(self.mark(), since):
            assert time.monotonic() < deadline
            time.sleep(1e-4)


def interrupted(call, after, between, begin=None):
    """Run `call` and send Ctrl-C `after` seconds, and again `between` seconds later if that is not None.

    Neither gets out of here. `begin`: an event from which on the time runs; None: from now on.
    """
    begin, now, armed = begin or threading.Event(), begin is None, True

    def raises(*_):
        if armed:
            raise KeyboardInterrupt

    def send():
        begin.wait()
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGINT)
        if between is not None:
            time.sleep(between)
            os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    before = signal.signal(signal.SIGINT, raises)
    # Python swallows the first Ctrl-C if it comes in a __del__. pytest's hook then formats it for so long that the
    # second one comes there, which pytest takes for its own failure.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        try:
            if now:
                begin.set()
            call()
        finally:
            armed = False
    except KeyboardInterrupt:  # at most two: one from `call`, one from the line above
        armed = False
    begin.set()
    sender.join()
    signal.signal(signal.SIGINT, before)
    sys.unraisablehook = hook


def undisturbed(directory, state_dtype, steps):
    training = LongUndo(directory, "in step", state_dtype)
    for number in range(steps):
        training.backward(number)
        training.opt.step()
        training.opt.zero_grad()
    values = training.values()
    training.opt.close()
    return values


@pytest.fixture
def runs(request):
    return 500 if request.config.getoption("--tier") == "soak" else 20


@pytest.mark.at_hand("it waits for updates, which the owner does not record")
@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.parametrize("signals", [1, 2])
def test_while_a_skipped_step_is_undone(state_dtype, signals, tmp_path, runs):
    """The step has run in backward, and zero_grad() undoes it: see overlap(free_gradients=True)."""
    draw = random.Random(signals)
    training = LongUndo(tmp_path / "a", "free", state_dtype)
    training.backward(0)
    training.opt.step()
    training.opt.zero_grad()
    before, mark = training.values(), training.mark()
    for run in range(runs):
        training.backward(100 + run)
        training.wait_for_updates(mark)
        interrupted(training.opt.zero_grad, draw.uniform(0, 4e-3), draw.uniform(0, 4e-3) if signals == 2 else None)
        training.opt.zero_grad()
        training.opt.wait()
        assert training.values() == before, run
    training.backward(1)
    training.opt.step()
    assert training.values() == undisturbed(tmp_path / "b", state_dtype, 2)
    training.opt.close()


@pytest.mark.at_hand("it waits for updates, which the owner does not record")
@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.parametrize("signals", [1, 2])
def test_in_backward(state_dtype, signals, tmp_path, runs):
    draw = random.Random(signals)
    training = LongUndo(tmp_path / "a", "free", state_dtype)
    training.backward(0)
    training.opt.step()
    training.opt.zero_grad()
    before, mark, begins = training.values(), training.mark(), []

    def when_updated(_):  # one of the last gradients of backward: most others were taken
        training.wait_for_updates(mark)
        begins[-1].set()

    training.params[1].register_hook(when_updated)
    for run in range(runs):
        begins.append(threading.Event())
        times = draw.uniform(0, 2e-3), draw.uniform(0, 5e-3) if signals == 2 else None
        interrupted(partial(training.backward, 100 + run), *times, begins[-1])
        training.opt.zero_grad()
        training.opt.wait()
        assert training.values() == before, run
    begins.append(threading.Event())
    training.backward(1)
    training.opt.step()
    assert training.values() == undisturbed(tmp_path / "b", state_dtype, 2)
    training.opt.close()


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.parametrize("mode", MODES)
def test_anywhere(mode, state_dtype, tmp_path, runs):
    """A loop that catches Ctrl-C and goes on from the step that `state` tells."""
    draw, steps = random.Random(7), 0
    training = LongUndo(tmp_path / "a", mode, state_dtype)

    def go_on():
        torch.set_grad_enabled(True)  # an interrupt within torch.no_grad() itself leaves it off
        training.opt.zero_grad()
        while (number := training.done()) < steps:
            training.backward(number)
            training.opt.step()
            training.opt.zero_grad()

    for _ in range(runs):
        steps += 2
        interrupted(go_on, draw.uniform(0, 0.03), draw.choice([None, draw.uniform(0, 5e-3)]))
    go_on()
    training.opt.wait()
    assert training.values() == undisturbed(tmp_path / "b", state_dtype, steps)
    training.opt.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.at_hand("it waits for updates, which the owner does not record")
def test_a_signal_at_the_end_of_a_failed_backward(tmp_path, monkeypatch):
    """What tells that a backward has failed is interrupted before it can tell: nobody waits for it for ever."""
    training = LongUndo(tmp_path, "free", "fp32")
    training.backward(0)
    training.opt.step()
    training.opt.zero_grad()
    before, mark = training.values(), training.mark()

    interrupted = []

    def is_interrupted(end):
        interrupted.append(True)
        del end  # pytest keeps the exception, and with it this frame, which would keep the object
        raise KeyboardInterrupt

    def fails(_):
        training.wait_for_updates(mark)
        raise ZeroDivisionError

    monkeypatch.setattr(_BackwardEnd, "__del__", is_interrupted)
    hook = training.params[1].register_hook(fails)
    with pytest.raises(ZeroDivisionError):
        training.backward(1)
    assert interrupted
    hook.remove()
    monkeypatch.undo()
    training.opt.wait()
    assert training.values() == before
    training.opt.close()
