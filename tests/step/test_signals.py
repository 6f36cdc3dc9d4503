"""Signals are deferred, and all of them are handled at the end."""

import signal

import pytest

from csd_optim.signals import defer_signals, raise_deferred

pytestmark = pytest.mark.signals


@pytest.fixture
def handled():
    """The signals that were handled; the handler of SIGUSR2 raises."""
    numbers = []

    def note(number, frame):
        numbers.append(number)
        if number == signal.SIGUSR2:
            raise ZeroDivisionError

    before = [(number, signal.signal(number, note)) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    yield numbers
    for number, handler in before:
        signal.signal(number, handler)


def test_signals_wait_for_the_outermost_end(handled):
    with defer_signals():
        with defer_signals():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
        assert not handled
    assert handled == [signal.SIGUSR1]
    signal.raise_signal(signal.SIGUSR1)
    assert len(handled) == 2


@pytest.mark.parametrize("order", [(signal.SIGUSR1, signal.SIGUSR2), (signal.SIGUSR2, signal.SIGUSR1)])
def test_a_handler_that_raises_hides_no_other_signal(handled, order):
    def deferred():
        with defer_signals():
            for number in order:
                signal.raise_signal(number)

    handler = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ZeroDivisionError):
        deferred()
    assert handled == [*order]
    assert signal.getsignal(signal.SIGUSR1) is signal.getsignal(signal.SIGUSR2) is handler


def test_a_handler_that_defers_signals_itself(handled):
    def handler(*_):
        with defer_signals():
            signal.raise_signal(signal.SIGUSR1)
            assert not handled
        assert handled == [signal.SIGUSR1]

    signal.signal(signal.SIGUSR2, handler)
    with defer_signals():
        signal.raise_signal(signal.SIGUSR2)
    assert handled == [signal.SIGUSR1]


def test_a_handler_that_sets_another_one(handled):
    other = []
    signal.signal(signal.SIGUSR2, lambda *_: signal.signal(signal.SIGUSR2, lambda *_: other.append(True)))
    with defer_signals():
        signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR2)
    assert other


def test_ctrl_c():
    def interrupted():
        with defer_signals():
            raise_deferred()
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                raise_deferred()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    raise_deferred()
