"""Optimizer ranks (`csd-optim serve`) in processes of their own."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from support.forked import process
from torch.nn.parallel import DistributedDataParallel

from csd_optim import CSDAdam, push
from csd_optim.distributed import buckets
from csd_optim.serve import early

STARTS = 60  # seconds that they may take to start


@contextlib.contextmanager
def small_buckets():
    """Make buckets so small that the small models of tests have several. Trainers of `small` owners must do so, too."""
    with mock.patch.object(buckets, "MIN_BUCKET_BYTES", 512), mock.patch.object(early, "MIN_ROUND_BYTES", 512):
        yield


class Owners:
    """`size` optimizer ranks, each with its own directory below `directory`. The `with` block stops them.

    They listen on a free port, each at its own entry of `hosts`. `small`: see small_buckets(). `before` is called with
    the rank in each process, before it serves. `protocol`: 3 or 4, which keeps its port when it is started again.
    """

    def __init__(self, directory, size=1, timeout=60, hosts=("127.0.0.1",), small=False, before=None, protocol=3):
        self.small, self.before, self.protocol = small, before, protocol
        self.directory, self.size, self.timeout = Path(directory), size, timeout
        self.hosts = [*hosts, *[hosts[-1]] * (size - len(hosts))]
        self.stores = [str(self.directory / f"owner-{k}") for k in range(size)]
        self.runs, self.processes, self.port = 0, [], 0
        self.start()

    def start(self):
        if self.processes:
            self.kill()
        self.runs += 1
        self.log = self.directory / f"owners-{self.runs}.log"
        meet = self.directory / f"owners-meet-{self.runs}"
        for store in self.stores:
            os.makedirs(store, exist_ok=True)
        self.processes = [
            process(
                _own,
                *(k, self.size, self.stores[k], str(meet), str(self.log), self.timeout, self.hosts[k]),
                *(self.small, self.before, self.protocol, self.port if self.protocol == 4 else 0),
                daemon=True,
            )
            for k in range(self.size)
        ]
        line = self.until(r"optimizer ranks? with .* at \S+:(\d+)")
        self.port = int(line[1])

    @property
    def address(self):
        protocol = "" if self.protocol == 3 else f"&protocol={self.protocol}"
        return f"serve://{self.hosts[0]}:{self.port}?timeout={self.timeout}{protocol}"

    @property
    def said(self):
        return self.log.read_text() if self.log.exists() else ""

    def until(self, pattern):
        """Wait until their output matches `pattern`, and return the first match."""
        end = time.monotonic() + STARTS
        while not (found := re.search(pattern, self.said)):
            lives = time.monotonic() < end and all(p.is_alive() for p in self.processes)
            assert lives, f"{pattern} is not in {self.said}"
            time.sleep(0.01)
        return found

    @property
    def pids(self):
        assert all(p.is_alive() for p in self.processes), self.said
        return [p.pid for p in self.processes]

    def stop(self):
        """Stop all of them as `kill PID` does (SIGTERM), and assert that they exit with 0."""
        for p in self.processes:
            os.kill(p.pid, signal.SIGTERM)
        for p in self.processes:
            p.join(STARTS)
        assert [p.exitcode for p in self.processes] == [0] * self.size, self.said

    def kill(self, *ranks):
        """Kill these ranks, or all of them, with SIGKILL."""
        for p in [self.processes[rank] for rank in ranks] or self.processes:
            p.kill()
            p.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def _own(rank, size, store, meet, log, timeout, host, small, before, protocol, port):
    for fd in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), fd)
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=size)
    from csd_optim.cli.serving import serve

    with small_buckets() if small else contextlib.nullcontext():
        if before:
            before(rank)
        serve([store], f"{host}:{port}", timeout, protocol)


class UnderDDP:
    """A model under DDP. `devices`: owners, to which its hook pushes gradients, or other devices."""

    def __init__(self, model, devices, *, ddp=None, hooked=False, **options):
        """Make the model and its optimizer. `ddp`: arguments of DDP. `options`: arguments of CSDAdam.

        `hooked`: csd_optim.push is DDP's hook, also where no owners are.
        """
        served = devices.startswith("serve:")
        options |= {"overwrite": True} if served else {}
        self.model = model
        self.opt = CSDAdam(model.parameters(), devices=devices, **options)
        self.ddp = DistributedDataParallel(model, **(ddp or {}))
        if served or hooked:
            self.ddp.register_comm_hook(self.opt, push)

    def step(self):
        self.opt.step()
        self.opt.zero_grad()

    def image(self):
        return [p.detach().clone() for p in self.model.parameters()]
