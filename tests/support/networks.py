"""Owners and trainers on machines of their own: network namespaces with cables (bench/paced_network.py).

A scenario runs in a process in new namespaces, and starts the machines' processes as its children. Everything in the
namespaces ends with that process.
"""

import ctypes
import functools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from support.forked import process, running

from bench import paced_network
from bench.paced_network import Network, libc
from csd_optim.serve.wire.init_key import init_key

NEW_USER, NEW_NET, NEW_MOUNT = 0x10000000, 0x40000000, 0x00020000  # CLONE_...
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
RATE = 50e6  # bytes per second of a cable
STARTS = 60  # seconds that an owner may take to start
children = multiprocessing.get_context("fork")  # they inherit the open namespaces


@functools.cache
def why_not():
    return paced_network.missing()


def on_machines(scenario, *arguments, directory, names, seconds=120):
    """Call `scenario(machines, *arguments)` with Machines of these names, and return what it returns.

    Skips the test where namespaces cannot be made. Raises AssertionError if it raises or takes longer.
    """
    __tracebackhide__ = True
    if why_not():
        pytest.skip(why_not())
    ours, theirs = children.Pipe()
    running = process(_run, theirs, scenario, arguments, str(directory), names)
    theirs.close()
    try:
        assert ours.poll(seconds), f"it has not ended in {seconds} s"
        right, value = ours.recv()
    except EOFError:
        right, value = False, f"it was ended: {running.exitcode}"
    finally:
        running.kill()
        running.join()
        ours.close()
    assert right, value
    return value


def _run(pipe, scenario, arguments, directory, names):
    os.chdir(directory)
    os.environ["PATH"] = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    user, group = os.getuid(), os.getgid()
    machines = None
    try:
        if libc.unshare(NEW_USER | NEW_NET | NEW_MOUNT):
            raise OSError(ctypes.get_errno(), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        machines = Machines(names)
        found = True, scenario(machines, *arguments)
    except BaseException:
        found = False, traceback.format_exc()
    pipe.send(found)


class Machines(Network):
    """Machines of these names, `owner` among them."""

    def __init__(self, names):
        super().__init__(dict.fromkeys(names, RATE))
        init_key(Path("key.pem"))

    def lose(self, name, seconds=0.02):
        """Delay the packets that reach a machine and drop some: with netem, or else every 32nd of each connection."""
        netem = f"qdisc replace dev {name} root netem delay {int(1000 * seconds)}ms 2ms loss 2%"
        if not subprocess.run(["tc", *netem.split()], capture_output=True).returncode:
            return
        for command in (  # those whose identification ends in these five bits go to a queue without room
            f"qdisc replace dev {name} root handle 1: htb default 1",
            f"class add dev {name} parent 1: classid 1:1 htb rate 60mbit",
            f"class add dev {name} parent 1: classid 1:2 htb rate 60mbit",
            f"qdisc add dev {name} parent 1:2 bfifo limit 1",
            f"filter add dev {name} parent 1: protocol ip u32 match u16 0x0007 0x001f at 4 flowid 1:2",
        ):
            subprocess.run(["tc", *command.split()], check=True)

    def dropped(self, name):
        """Return how many of the packets for a machine were dropped."""
        shown = subprocess.run(["tc", "-s", "qdisc", "show", "dev", name], capture_output=True, text=True, check=True)
        return int(re.search(r"dropped (\d+)", shown.stdout)[1])

    def trainers(self, n, function, *arguments, seconds=90, may_fail=False):
        """Call `function(machines, rank, *arguments)` on machines trainer0 ..., which are ranks; return the results.

        `may_fail`: a rank may also raise; its result is the exception's text.
        """
        meeting = f"file://{os.getcwd()}/meet-{time.monotonic_ns()}"
        pipes = []
        for rank in range(n):
            ours, theirs = children.Pipe()
            there = children.Process(
                target=_train, args=(theirs, self, rank, n, meeting, function, arguments), daemon=True
            )
            there.start()
            theirs.close()
            pipes.append((there, ours))
        end, results = time.monotonic() + seconds, []
        for rank, (there, pipe) in enumerate(pipes):
            assert pipe.poll(max(0, end - time.monotonic())), f"rank {rank} has not ended in {seconds} s"
            results.append(pipe.recv())
            there.kill()
            there.join()
        wrong = [f"rank {rank}: {value}" for rank, (right, value) in enumerate(results) if not right]
        assert may_fail or not wrong, "\n".join(wrong)
        return [value for _, value in results]


def _settle(machines, name):
    libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    machines.move_in(name)


def _train(pipe, machines, rank, size, meeting, function, arguments):
    _settle(machines, f"trainer{rank}")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    try:
        dist.init_process_group("gloo", meeting, rank=rank, world_size=size, timeout=timedelta(seconds=15))
        found = True, function(machines, rank, *arguments)
    except BaseException:
        found = False, traceback.format_exc()
    pipe.send(found)
    time.sleep(3600)  # until it is killed: an orderly exit would wait for the other ranks


class ServedThere:
    """`csd-optim serve` on the machine `owner`, with a key. The `with` block ends it."""

    def __init__(self, machines, store, timeout, environment=None):
        os.makedirs(store, exist_ok=True)
        self.timeout, self.log, self.host = timeout, Path(f"{store}.log").absolute(), machines.address("owner")
        program = f"import support.commit_traces; {running('csd_optim')}"
        command = [sys.executable, "-c", program, "serve", store, "--listen", f"{self.host}:0"]
        command += ["--key", "key.pem", "--timeout", str(timeout)]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})},
                preexec_fn=functools.partial(_settle, machines, "owner"),
            )
        self.port = int(self.until(r"at \S+:(\d+)\n")[1])

    @property
    def address(self):
        return f"serve://{self.host}:{self.port}?timeout={self.timeout}&key={Path('key.pem').absolute()}"

    def until(self, pattern, seconds=STARTS):
        """Wait until its output matches `pattern`, and return the first match."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, said := self.log.read_text() if self.log.exists() else "")):
            assert time.monotonic() < end, f"{pattern} is not in {said}"
            assert self.process.poll() is None, said
            time.sleep(0.01)
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
