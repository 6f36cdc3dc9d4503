"""A signal during a step is handled when the step is complete: it interrupts the training loop, never an update."""

import os
import signal
import threading
import time

import pytest
import torch
from support.inside import engine_of

from csd_optim import CSDAdam
from csd_optim.bindings import Native
from csd_optim.store.format import read_contents

pytestmark = pytest.mark.serial("sends signals to its process, which may be talking to pytest-xdist")


def make_pair(devices):
    torch.manual_seed(1)
    values = [torch.randn(5000), torch.randn(33)]
    ours, theirs = ([torch.nn.Parameter(v.clone()) for v in values] for _ in range(2))
    return CSDAdam(ours, devices=devices, tile_size=1024), torch.optim.AdamW(theirs)


def step(*optimizers):
    for optimizer in optimizers:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()


def assert_close_to_torch(ours, reference):
    params = zip(ours.param_groups[0]["params"], reference.param_groups[0]["params"], strict=True)
    for p, q in params:
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(ours.state[p]["exp_avg"], reference.state[q]["exp_avg"])
        assert ours.state[p]["step"] == reference.state[q]["step"]


@pytest.mark.parametrize("where", ["begin", "push", "finish"])
@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_ctrl_c_comes_after_the_step(devices, where, monkeypatch):
    ours, reference = make_pair(devices)
    step(ours, reference)
    engine = engine_of(ours).native if where == "push" else engine_of(ours)
    plain = getattr(engine, where)

    def interrupted(*args, **kwargs):
        monkeypatch.setattr(engine, where, plain)
        os.kill(os.getpid(), signal.SIGINT)
        return plain(*args, **kwargs)

    monkeypatch.setattr(engine, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(ours)
    step(reference)
    assert_close_to_torch(ours, reference)
    step(ours, reference)
    assert_close_to_torch(ours, reference)


def test_handlers_are_put_back_and_get_their_signal(monkeypatch):
    ours, _ = make_pair(["ram:"])
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        handler = signal.getsignal(signal.SIGUSR1)
        plain = engine_of(ours).finish

        def signalled():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert seen == []
            plain()

        monkeypatch.setattr(engine_of(ours), "finish", signalled)
        step(ours)
        assert seen == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.fp32_states("compares with AdamW to its last bits")
def test_step_in_another_thread():
    """Only the main thread may set signal handlers, and they run only there."""
    ours, reference = make_pair(["ram:"])
    thread = threading.Thread(target=step, args=(ours, reference))
    thread.start()
    thread.join()
    assert_close_to_torch(ours, reference)


# ---- close() -----------------------------------------------------------------------


@pytest.fixture
def slow_commit(tmp_path, monkeypatch):
    """An optimizer on two devices that is committing its second step, the events of its native engine, and a gate."""
    happened, reached, goes_on = [], threading.Event(), threading.Event()
    ours, _ = make_pair([str(tmp_path / f"csd{d}") for d in range(2)])
    step(ours)
    ours.synchronize()
    really_settle, really_close = Native.wait_writes, Native.close

    def settle(*arguments):
        reached.set()
        goes_on.wait(60)
        really_settle(*arguments)
        happened.append("settled")

    def close(*arguments):
        happened.append("closed")
        really_close(*arguments)

    monkeypatch.setattr(Native, "wait_writes", settle)
    monkeypatch.setattr(Native, "close", close)
    step(ours)
    assert reached.wait(60)
    yield ours, happened, goes_on
    goes_on.set()


def test_ctrl_c_comes_after_close(slow_commit, tmp_path, monkeypatch):
    ours, happened, goes_on = slow_commit
    committer, closing = engine_of(ours).committer, threading.Event()
    before_close = committer.before_close
    monkeypatch.setattr(committer, "before_close", lambda: (closing.set(), before_close()))

    def interrupt():
        assert closing.wait(60)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)  # for a handler that does not wait
        happened.append("interrupted")
        goes_on.set()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        ours.close()
    assert happened[:2] == ["interrupted", "settled"]
    assert happened[-1] == "closed"
    assert [read_contents(tmp_path / f"csd{d}").superblock.step for d in range(2)] == [2, 2]
    ours.close()  # no-op


def test_close_that_fails_waits_for_the_commit(slow_commit, monkeypatch):
    ours, happened, goes_on = slow_commit
    threading.Timer(0.3, goes_on.set).start()
    monkeypatch.setattr(engine_of(ours).windows, "versions", lambda: 1 / 0)  # stands for any error
    with pytest.raises(ZeroDivisionError):
        ours.close()
    assert happened == ["settled", "closed"]
