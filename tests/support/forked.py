"""Python programs in processes of their own, forked from a process that has already imported torch.

A new interpreter takes about three seconds to import torch, and torch's compiler with the first optimizer; a fork takes
milliseconds. It cannot test options of the interpreter, or variables that are read while libraries load
(LD_LIBRARY_PATH).
"""

import atexit
import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from unittest import mock

from support import commit_traces, far, served
from support.states import assume, assumed

# Forked from a server, so that a process inherits neither threads nor anything that a test has done.
processes = multiprocessing.get_context("forkserver")
PRELOADED = ["numpy.ma", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "csd_optim"]


def process(function, *arguments, daemon=False):
    """Start a process that calls `function`, and return it.

    The server also imports the test modules that start processes: importing them in each process would take longer than
    most tests.
    """
    wants = {"process", "on_ranks", "on_living_ranks"}
    tests = [name for name, module in sys.modules.items() if name.startswith("test_") and wants & vars(module).keys()]
    drawing = [name for name in ("matplotlib.pyplot",) if name in sys.modules]  # as benches do
    processes.set_forkserver_preload(PRELOADED + drawing + tests)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    call = (commit_traces.followed(), function, *arguments)
    new = processes.Process(target=_begin, args=call, daemon=daemon)
    new.start()
    return new


def _begin(trace, function, *arguments):
    if sys.version_info < (3, 13):
        atexit._clear()  # from 3.13 on, multiprocessing itself does so
    gc.freeze()  # the server's objects live on anyway, and a collection would copy their pages
    assume(assumed())
    far.assume(far.assumed())
    served.assume(served.assumed())
    commit_traces.follow(trace)
    function(*arguments)


def python(program, *arguments, environment=None, seconds=120, finalized=False):
    """Run a program with these arguments, as `python -c` does.

    `finalized`: shut the interpreter down at the end; else only `atexit` functions run, which takes less time.

    Returns its exit status (128 + N after signal N) and output. The program has its own session; processes that it
    leaves there are killed. Raises TimeoutExpired after `seconds`, having killed the program.
    """
    with tempfile.TemporaryDirectory() as directory:
        # Output goes to files: a pipe would stay open as long as any process that the program has started.
        said = [Path(directory, name) for name in ("out", "err")]
        environment = dict(os.environ if environment is None else environment)
        call = (program, [str(a) for a in arguments], environment, os.getcwd(), said, finalized)
        program_runs = process(_run, *call)
        program_runs.join(seconds)
        late = program_runs.is_alive()
        with suppress(ProcessLookupError):
            os.killpg(program_runs.pid, signal.SIGKILL)
        program_runs.join()
        out, err = (file.read_text(errors="replace") if file.exists() else "" for file in said)
    if late:
        raise subprocess.TimeoutExpired(program, seconds, out, err)
    code = program_runs.exitcode
    status = code if code >= 0 else 128 - code
    return subprocess.CompletedProcess(program, status, out, err)


def printed(program, *arguments, **options):
    """Return what the program prints; it must exit with 0."""
    done = python(program, *arguments, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def module(name, *arguments, **options):
    """Run `python -m name` as python() runs a program."""
    return python(running(name), *arguments, **options)


def running(name):
    """Return a program that does what `python -m name` does."""
    program = "import os, runpy, sys; sys.path.insert(0, os.getcwd()); "
    return program + f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"


def _run(program, arguments, environment, directory, said, finalized):
    os.setsid()
    os.chdir(directory)
    for fd, file in zip((1, 2), said, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), fd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if finalized:
        atexit.register(weakref.finalize._exitfunc)  # the functions of the server are cleared
        failed = ctypes.pythonapi.PyRun_SimpleString(program.encode())  # which exits if the program does
        ctypes.pythonapi.Py_Exit(int(failed != 0))
    try:
        exec(compile(program, "<program>", "exec"), main.__dict__)
    finally:
        atexit._run_exitfuncs()
