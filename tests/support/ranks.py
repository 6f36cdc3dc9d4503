"""Runs a function of a test module on several ranks: processes of this machine, joined by gloo."""

import contextlib
import io
import os
import signal
import time
import traceback
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
from support.forked import processes

KILLED = "killed"


def on_ranks(size, function, *arguments, directory, seconds=120, may_die=()):
    """What `function(rank, *arguments)` returned on each of `size` ranks, in a new process group.

    Raises AssertionError with everything that was raised, if a rank raised something or did not return in time. Ranks
    in `may_die` may also be killed, and then return KILLED. `directory`: an existing one, where the ranks meet and
    which is their current directory.
    """
    __tracebackhide__ = True  # what matters is the ranks' own
    place = f"{directory}/meet-{time.monotonic_ns()}"
    ranks = []
    for rank in range(size):
        ours, theirs = processes.Pipe()
        call = (theirs, rank, size, str(directory), place, function, arguments)
        ranks.append((processes.Process(target=_run, args=call, daemon=True), ours))
        ranks[-1][0].start()
    results, deadline = {}, time.monotonic() + seconds
    try:
        while len(results) < len(ranks):
            left = [r for r in range(len(ranks)) if r not in results]
            wait([*(ranks[r][1] for r in left), *(ranks[r][0].sentinel for r in left)], deadline - time.monotonic())
            if time.monotonic() >= deadline:
                raise AssertionError(f"ranks {left} did not return in {seconds} s; of the others: {results}")
            for r in left:
                process, pipe = ranks[r]
                if pipe.poll():
                    with contextlib.suppress(EOFError):
                        results[r] = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
                if r not in results and not process.is_alive():
                    process.join()
                    results[r] = (process.exitcode == -signal.SIGKILL and r in may_die, KILLED)
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()
    if wrong := [f"rank {r}: {value}" for r, (right, value) in sorted(results.items()) if not right]:
        raise AssertionError("\n".join(wrong))
    return [results[r][1] for r in range(len(ranks))]


def _run(pipe, rank, size, directory, place, function, arguments):
    os.chdir(directory)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=size)
        result = True, function(rank, *arguments)
    except BaseException:
        result = False, traceback.format_exc()
    packed = io.BytesIO()
    torch.save(result, packed)  # by value: a tensor that is sent lives no longer than its process
    pipe.send_bytes(packed.getvalue())
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
