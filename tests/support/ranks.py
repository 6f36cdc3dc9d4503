"""Runs a function of a test module on several ranks: processes of this machine, joined by gloo."""

import contextlib
import gc
import io
import os
import signal
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
from support import commit_traces, phases
from support.forked import process, processes

import csd_optim.distributed.ranks

KILLED = "killed"
_living = {}  # processes that wait for another call, by the number of ranks


def on_ranks(size, function, *arguments, directory, seconds=120, may_die=()):
    """Call `function(rank, *arguments)` on `size` ranks, in new processes and a new process group.

    Returns a list of what each rank returned. Raises AssertionError, with all ranks' exceptions, if one raised or did
    not return in time. Ranks in `may_die` may be killed; their result is KILLED. `directory` exists, and becomes their
    current directory.
    """
    __tracebackhide__ = True  # the ranks' own tracebacks are what matters
    ranks = _started(size, directory)
    try:
        return _called(ranks, function, arguments, directory, seconds, may_die)
    finally:
        _killed(ranks)


def on_living_ranks(size, function, *arguments, directory, seconds=120):
    """Do the same in the processes of earlier calls of this test file, if none has failed.

    New ones cost much work of torch's. The function must leave the process group as it is, and undo what it replaces.
    """
    __tracebackhide__ = True
    ranks = _living.pop(size, None) or _started(size, directory, living=True)
    try:
        results = _called(ranks, function, arguments, directory, seconds)
    except BaseException:
        _killed(ranks)
        raise
    _living[size] = ranks
    return results


def end_living():
    """End the processes that wait for another call: gloo's threads take some 2 % of a core each, even then."""
    while _living:
        _killed(_living.popitem()[1])


def _started(size, directory, living=False):
    """Start the processes. Returns them, and a pipe to each."""
    place, ranks = f"{directory}/meet-{time.monotonic_ns()}", []
    for rank in range(size):
        ours, theirs = processes.Pipe()
        ranks.append((process(_run, theirs, rank, size, place, living, daemon=True), ours))
        theirs.close()
    return ranks


def _killed(ranks):
    for rank, pipe in ranks:
        rank.kill()
        rank.join()
        pipe.close()


def _called(ranks, function, arguments, directory, seconds, may_die=()):
    __tracebackhide__ = True
    for _, pipe in ranks:
        _send(pipe, (function, arguments, str(directory), commit_traces.followed()))
    results, deadline = {}, time.monotonic() + seconds
    while len(results) < len(ranks):
        left = [r for r in range(len(ranks)) if r not in results]
        wait([*(ranks[r][1] for r in left), *(ranks[r][0].sentinel for r in left)], deadline - time.monotonic())
        if time.monotonic() >= deadline:
            raise AssertionError(f"ranks {left} did not return in {seconds} s; of the others: {results}")
        for r in left:
            rank, pipe = ranks[r]
            if pipe.poll():
                with contextlib.suppress(EOFError, ConnectionError):
                    results[r] = _receive(pipe)
            if r not in results and not rank.is_alive():
                rank.join()
                results[r] = (rank.exitcode == -signal.SIGKILL and r in may_die, KILLED)
    if wrong := [f"rank {r}: {value}" for r, (right, value) in sorted(results.items()) if not right]:
        raise AssertionError("\n".join(wrong))
    return [results[r][1] for r in range(len(ranks))]


def _send(pipe, value):
    packed = io.BytesIO()
    torch.save(value, packed)  # by value: a tensor sent through a pipe would live no longer than its process
    pipe.send_bytes(packed.getvalue())


def _receive(pipe):
    return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)


def _run(pipe, rank, size, place, living):
    """Run one call or, if `living`, call after call until a failure.

    Then this rank is missing, so that all ranks fail.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    phases.watch()
    # If a rank is killed while they make a group, the others wait for all of this time, and on_ranks() for 120 s.
    csd_optim.distributed.ranks.CREATED_WITHIN = timedelta(seconds=20)
    environment = dict(os.environ)
    while True:
        try:
            function, arguments, directory, trace = _receive(pipe)
        except EOFError:  # the process that runs the tests has ended
            break
        os.chdir(directory)
        commit_traces.follow(trace)
        torch.manual_seed(0)
        try:
            if not dist.is_initialized():
                dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=size)
                dist.barrier()  # a rank that left while another one still connects would make that one fail
            right, value = True, function(rank, *arguments)
            if living:
                dist.barrier()  # so that no rank still waits for this call's messages when the next one begins
        except BaseException:
            right, value = False, traceback.format_exc()
        _send(pipe, (right, value))
        if not (living and right):
            break
        del function, arguments, value
        gc.collect()
        os.environ.clear()
        os.environ.update(environment)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
