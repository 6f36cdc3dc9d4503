"""A signal within a step is handled when the step is whole: it interrupts the training loop, never the state."""

import os
import signal
import threading

import pytest
import torch

from csd_optim import CSDAdam


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


def assert_same(ours, reference):
    params = zip(ours.param_groups[0]["params"], reference.param_groups[0]["params"], strict=True)
    for p, q in params:
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(ours.state[p]["exp_avg"], reference.state[q]["exp_avg"])
        assert ours.state[p]["step"] == reference.state[q]["step"]


@pytest.mark.parametrize("where", ["begin", "push", "finish"])
def test_ctrl_c_comes_after_the_step(devices, where, monkeypatch):
    ours, reference = make_pair(devices)
    step(ours, reference)
    engine = ours._engine
    plain = getattr(engine, where)

    def interrupted(*args, **kwargs):
        monkeypatch.setattr(engine, where, plain)
        os.kill(os.getpid(), signal.SIGINT)
        return plain(*args, **kwargs)

    monkeypatch.setattr(engine, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(ours)
    step(reference)
    assert_same(ours, reference)
    step(ours, reference)
    assert_same(ours, reference)


def test_handlers_are_put_back_and_get_their_signal(monkeypatch):
    ours, _ = make_pair(["ram:"])
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        handler = signal.getsignal(signal.SIGUSR1)
        plain = ours._engine.finish

        def signalled():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert seen == []
            plain()

        monkeypatch.setattr(ours._engine, "finish", signalled)
        step(ours)
        assert seen == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_step_in_another_thread():
    """Only the main thread may set handlers, and only there they run."""
    ours, reference = make_pair(["ram:"])
    thread = threading.Thread(target=step, args=(ours, reference))
    thread.start()
    thread.join()
    assert_same(ours, reference)
