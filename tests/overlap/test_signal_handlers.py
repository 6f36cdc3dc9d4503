"""Signal handlers that run in the midst of a hook of backward: whatever they do, training goes on with the same bits.

A signal comes at one line of the hooks after another. Python runs its handler right there, unless it is deferred.
"""

import contextlib
import signal
import sys
import time

import pytest
from support.inside import engine_of
from support.repeating import MODES, Repeating

import csd_optim
from csd_optim import CSDRuntimeError

pytestmark = pytest.mark.signals

HOOKS = tuple(
    f"{csd_optim.__path__[0]}/overlap/{name}.py" for name in ("early", "guess", "backward_run", "in_backward", "lent")
)
EVERY = (f"{csd_optim.__path__[0]}/overlap", f"{csd_optim.__path__[0]}/step", f"{csd_optim.__path__[0]}/signals.py")
GOLDEN = 0.6180339887  # whose multiples, modulo 1, are spread evenly


class Stopped(Exception):
    """What a handler raises."""


class OfHandler(CSDRuntimeError):
    """What a handler raises that has called the optimizer."""


def training(directory, mode):
    directory.mkdir(exist_ok=True)
    new = Repeating(f"file:{directory}", MODES[mode], width=32, depth=3, tile_size=512)
    for number in range(3):
        iterate(new, number)
    return new


def iterate(training, number, files=(), line=0):
    """Train with one batch, and raise the signal at that `line`, counted over these files; 0: not at all.

    Returns how many lines have run.
    """
    opt, lines = training.opt, 0
    opt.wait()
    until = time.monotonic() + 1
    while not engine_of(opt).idle and time.monotonic() < until:  # a step can begin in backward
        time.sleep(1e-4)

    def tracer(frame, event, arg):
        nonlocal lines
        # Python swallows what a handler raises within __del__.
        if not frame.f_code.co_filename.startswith(files) or frame.f_code.co_name == "__del__":
            return None
        lines += event == "line"
        if event == "line" and lines == line:
            signal.raise_signal(signal.SIGUSR1)
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        training.backward(number)
        opt.step()
    finally:
        sys.settrace(before)
    opt.zero_grad()
    return lines


@contextlib.contextmanager
def handling(handler):
    """Call `handler` on SIGUSR1. Yields the list of its calls."""
    calls = []

    def handle(*_):
        calls.append(handler)
        handler()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield calls
    finally:
        signal.signal(signal.SIGUSR1, before)


def raises(error):
    def handler(training):
        raise error

    return handler


def reads(act):
    """A handler that calls the optimizer; with free_gradients that may be refused."""

    def handler(training):
        with contextlib.suppress(CSDRuntimeError):
            act(training)

    return handler


HANDLERS = {
    "state_dict": reads(lambda training: training.opt.state_dict()),
    "state": reads(lambda training: training.done()),
    "synchronize": reads(lambda training: training.opt.synchronize()),
    "wait": reads(lambda training: training.opt.wait()),
    "model": reads(lambda training: training.model.state_dict()),
    "raises": raises(Stopped),
    "raises ours": raises(OfHandler),
    "exits": raises(SystemExit),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The parameters after each step of a training that nothing disturbs."""
    undisturbed, values = training(tmp_path_factory.mktemp("undisturbed"), "in step"), []
    for number in range(3, 400):
        iterate(undisturbed, number)
        values.append(undisturbed.values())
    undisturbed.opt.close()
    return values


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("mode", ["backward", "free"])
@pytest.mark.parametrize(("files", "runs"), [(HOOKS, 100), (EVERY, 40)], ids=["hooks", "every"])
def test_anywhere(files, runs, mode, handler, tmp_path, request, expected):
    runs = 390 if request.config.getoption("--tier") == "soak" else runs
    one = training(tmp_path, mode)
    n_lines = iterate(one, 3, files)
    one.opt.wait()
    assert one.values() == expected[0]
    caught = 0
    with handling(lambda: HANDLERS[handler](one)) as calls:
        for number in range(4, 4 + runs):
            line = 1 + int(number * GOLDEN % 1 * n_lines)
            try:
                iterate(one, number, files, line)
            except (Stopped, OfHandler, SystemExit):
                caught += 1
                one.opt.zero_grad()
                while (done := one.done()) <= number:
                    iterate(one, done)
            one.opt.wait()
            assert one.values() == expected[number - 3], line
    assert len(calls) > runs // 2
    assert caught == (len(calls) if "raises" in handler or "exits" in handler else 0)
    one.opt.close()


@pytest.mark.parametrize("mode", ["backward", "free"])
def test_close(mode, tmp_path):
    """A handler closes the optimizer: backward goes on, and step() says that it is closed."""
    lines, ended = 0, []
    for run in range(30):
        one = training(tmp_path / f"{run}", mode)
        lines = lines or iterate(one, 3, HOOKS)
        backward = one.backward
        one.backward = lambda number, backward=backward: (backward(number), ended.append(number))
        with handling(one.opt.close) as calls, contextlib.suppress(CSDRuntimeError):
            iterate(one, 4, HOOKS, 1 + int(run * GOLDEN % 1 * lines))
        assert len(ended) == run + 1
        if calls:
            with pytest.raises(CSDRuntimeError, match="closed"):
                one.opt.step()
        one.opt.close()
