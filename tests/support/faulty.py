"""Runs the bodies of tests in a child process with faults/faults.c preloaded, and makes its calls fail."""

import contextlib
import functools
import importlib
import multiprocessing
import os
import traceback
from concurrent.futures import ProcessPoolExecutor

import faults
import pytest
from faults import ERROR, FOREVER
from support import emulated, phases

_child: ProcessPoolExecutor | None = None


@pytest.fixture(scope="module", autouse=True)
def child(tmp_path_factory):
    """An executor whose one process runs the bodies of tests."""
    global _child
    directory = tmp_path_factory.mktemp("faults")
    environment = faults.preloaded(directory, "faults")
    spawn, load = multiprocessing.get_context("spawn"), emulated.load if emulated.loaded() else None
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, spawn, initializer=load) as pool:
        for name, value in environment.items():
            patch.setenv(name, value)
        pool.submit(os.getpid).result()  # waits until the process has started: then the environment can be restored
        _child = pool
        yield
        _child = None


def in_child(body):
    """Decorate a test so that its body runs in the child, in its tmp_path, and ends here as it ended there."""

    @functools.wraps(body)
    def test(**arguments):
        __tracebackhide__ = True  # the child's own traceback is what matters
        assert _child is not None
        outcome, said = _child.submit(_call, body.__module__, body.__name__, os.getcwd(), arguments).result()
        if outcome in ("skip", "xfail"):
            getattr(pytest, outcome)(said)
        elif outcome == "fail":
            pytest.fail(said, pytrace=False)

    return test


def _call(module, name, directory, arguments):
    """Call the body of a test. Returns its outcome and a message.

    Both are texts: pytest's own exceptions cannot be pickled, and others need not be.
    """
    os.chdir(directory)
    phases.watch()
    try:
        getattr(importlib.import_module(module), name).__wrapped__(**arguments)
    except pytest.skip.Exception as e:
        return "skip", str(e)
    except pytest.xfail.Exception as e:
        return "xfail", str(e)
    except BaseException:  # pytest's own, such as that of pytest.fail(), are no Exceptions
        return "fail", traceback.format_exc()
    return "pass", ""


@contextlib.contextmanager
def fault(calls, path, error=0, *, effect=ERROR, skip=0, times=FOREVER, hold=False, must_strike=True):
    """Make `calls` on files whose path contains `path` fail: `times` of them, after `skip` that succeed.

    With `hold`, they block, and fail when the function that this yields is called.
    """
    with faults.rule(calls, path, effect, error, skip=skip, times=times, hold=hold) as rule:
        yield lambda: rule.__setitem__("hold", 0)
    assert not must_strike or rule["struck"] > 0, "the fault never struck"
