"""Trainers and owners of bench/studies/optimizer_ranks.py, each in a process of its own.

A trainer has a model under DDP whose backward yields known gradients, one parameter after another, as slowly as asked
for. The gradients have so few bits that their sum over trainers is exact in any order. So all ways give the same bits
as one process with the mean gradient.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported here, once: the first optimizer of each process would import it, which takes seconds
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import csd_optim
from bench.studies.paced_network import Network, libc
from csd_optim import CSDAdam, bindings
from csd_optim.cli.serving import serve

# So many layers that one is a small part of a step: the parameters of a tile that two layers share come back only when
# both have their gradients. Fewer layers if they had less than LEAST elements, because then headers would count.
MOST_LAYERS = 64
FEWEST_LAYERS, LEAST = 16, 1 << 16
LR = 0.01
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
processes = multiprocessing.get_context("fork")  # forked before anything is computed: torch is imported once


class Layer(torch.autograd.Function):
    """Passes its input on unchanged. Its backward sleeps, then yields the weight's known gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.of = grad, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> Any:  # type: ignore[override]
        grad, seconds = ctx.of
        time.sleep(seconds)
        return d, grad, None, None


class Model(nn.Module):
    """A model of equal bf16 matrices, alike on all ranks, with `params` elements in all or a few more."""

    def __init__(self, params: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        layers = max(FEWEST_LAYERS, min(MOST_LAYERS, params // LEAST))
        rows = -(-params // layers // 256)
        self.weights = nn.ParameterList(
            torch.randn(rows, 256, generator=generator).to(torch.bfloat16) for _ in range(layers)
        )

    def forward(self, grads: list[torch.Tensor], seconds: float) -> torch.Tensor:
        x = torch.zeros((), requires_grad=True)
        for weight, grad in zip(self.weights, grads, strict=True):
            x = Layer.apply(x, weight, grad, seconds / len(grads))  # type: ignore[no-untyped-call]
        return x


def gradients(model: Model, rank: int) -> list[torch.Tensor]:
    """Return the gradients of one trainer: multiples of 1/64 from -1/8 to 1/8."""
    generator = torch.Generator().manual_seed(rank + 1)
    return [torch.randint(-8, 9, w.shape, generator=generator).to(torch.bfloat16) / 64 for w in model.weights]


def factor(step: int) -> float:
    """Return the factor of a step's gradients. It differs from step to step, so that stale gradients are noticed."""
    return float(2 ** (step % 3))


def checksum(model: Model) -> int:
    crc = 0
    for w in model.weights:
        crc = zlib.crc32(w.detach().contiguous().view(torch.uint8).numpy(), crc)
    return crc


def reference(params: int, trainers: int, steps: int) -> int:
    """Return the checksum of the parameters after `steps` steps of one CSDAdam in memory with the mean gradients."""
    model = Model(params)
    mean = [torch.stack(g).float().mean(0) for g in zip(*(gradients(model, r) for r in range(trainers)), strict=True)]
    with CSDAdam(model.parameters(), lr=LR, devices="ram:") as opt:
        for step in range(steps):
            for w, g in zip(model.weights, mean, strict=True):
                w.grad = (g * factor(step)).to(torch.bfloat16)
            opt.step()
        return checksum(model)


# ------------------------------------------------------------------------------------------------------ trainers


class Trainer:
    """A trainer's model and optimizer. `way`: adamw, zero, local (drives here), or a route to owners."""

    def __init__(self, params: int, backward: float, way: str, devices: Any, **options: Any) -> None:
        self.model, self.rank = Model(params), dist.get_rank()
        self.grads = gradients(self.model, self.rank)
        self.backward, self.done = backward, 0
        megabytes = 0.9 * self.grads[0].nbytes / (1 << 20)  # less than a layer, so that each layer is a bucket
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=megabytes)  # type: ignore[arg-type]
        self.opt = self._optimizer(way, devices, options)
        if way in ("slices", "star"):
            self.ddp.register_comm_hook(self.opt, csd_optim.push)  # type: ignore[attr-defined]

    def _optimizer(self, way: str, devices: Any, options: dict[str, Any]) -> Any:
        if way == "adamw":
            return AdamW(self.model.parameters(), lr=LR, fused=True)
        if way == "zero":
            return ZeroRedundancyOptimizer(self.model.parameters(), AdamW, lr=LR, fused=True)
        return CSDAdam(self.model.parameters(), lr=LR, devices=devices, **options)

    def step(self) -> tuple[float, float]:
        """Run an iteration. Returns its seconds, and those after backward."""
        grads = [g * factor(self.done) for g in self.grads]
        self.opt.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        self.ddp(grads, self.backward).backward()
        passed = time.perf_counter()
        self.opt.step()
        end = time.perf_counter()
        self.done += 1
        return end - start, end - passed

    def close(self) -> None:
        if isinstance(self.opt, CSDAdam):
            self.opt.synchronize()
            self.opt.close()


def settle(place: Callable[[], None], threads: int = 1) -> None:
    """Prepare a new process: move it to its machine, and make it end with its parent, even if that is killed."""
    libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    place()
    torch.set_num_threads(threads)
    bindings.threads_use(threads)


def train(conn: Connection, rank: int, size: int, meeting: str, place: Callable[[], None]) -> None:
    """Run a trainer that executes commands from `conn` and answers each: `open`, `steps`, `close`."""
    settle(place)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    trainer: Trainer | None = None
    while True:
        what, arguments = conn.recv()
        try:
            if what == "open":
                trainer = Trainer(**arguments)
                answer: Any = None
            else:
                assert trainer
                if what == "steps":
                    answer = [trainer.step() for _ in range(arguments)]
                else:
                    answer = checksum(trainer.model)
                    trainer.close()
                    trainer = None
            conn.send((True, answer))
        except Exception as e:  # reported to the parent, which then exits
            conn.send((False, f"{type(e).__name__}: {e}"))


class Trainers:
    """All trainer processes. `places`: what moves each to its machine. `meeting`: torch's init_method."""

    def __init__(self, places: list[Callable[[], None]], meeting: str) -> None:
        self._ends: list[Connection] = []
        self._running: list[Any] = []
        for rank, place in enumerate(places):
            here, there = processes.Pipe()
            process = processes.Process(target=train, args=(there, rank, len(places), meeting, place), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._running.append(process)

    def tell(self, what: str, *each: Any) -> list[Any]:
        """Send a command to all trainers and return their answers. `each`: an argument per trainer, or one for all.

        Raises SystemExit if a trainer fails.
        """
        for k, end in enumerate(self._ends):
            end.send((what, each[k % len(each)]))
        answers: dict[Any, Any] = {}
        while len(answers) < len(self._ends):  # in the order of their answers: when one fails, others may wait for it
            for end in wait([end for end in self._ends if end not in answers]):
                try:
                    well, answer = end.recv()  # type: ignore[union-attr]
                except EOFError:
                    well, answer = False, "it is gone"
                if not well:
                    raise SystemExit(f"trainer {self._ends.index(end)}: {answer}")  # type: ignore[arg-type]
                answers[end] = answer
        return [answers[end] for end in self._ends]

    def end(self) -> None:
        for process in self._running:
            process.kill()
            process.join()


# -------------------------------------------------------------------------------------------------------- owners


def own(
    rank: int, size: int, meeting: str, devices: list[str], address: str, log: str, place: Callable[[], None]
) -> None:
    settle(place)
    for fd in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), fd)
    if size > 1:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    serve(devices, address, 120)


@contextlib.contextmanager
def owners(directory: Path, places: list[Callable[[], None]], devices: str, drives: int, host: str) -> Iterator[str]:
    """Start owners, and yield the address at which they serve.

    Each owner has `drives` devices. `devices`: a device string in which {} stands for the directory.
    """
    directory.mkdir(parents=True)
    running = []
    log = directory / "log"
    log.touch()
    for rank, place in enumerate(places):
        mine = drive_strings(directory / f"owner{rank}", devices, drives)
        arguments = (rank, len(places), f"file://{directory}/meeting", mine, f"{host}:0", str(log), place)
        running.append(processes.Process(target=own, args=arguments, daemon=True))
        running[-1].start()
    try:
        while not (said := re.search(r"optimizer ranks? with .* at \S+:(\d+)", log.read_text())):
            if not all(process.is_alive() for process in running):
                raise SystemExit(f"the owners ended: {log.read_text()}")
            time.sleep(0.02)
        yield f"serve://{host}:{said[1]}?timeout=120"
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.join()


def drive_strings(directory: Path, devices: str, drives: int) -> list[str]:
    found = []
    for k in range(drives):
        Path(directory, str(k)).mkdir(parents=True)
        found.append(devices.format(directory / str(k)))
    return found


def places_of(network: Network | None, names: list[str]) -> list[Callable[[], None]]:
    """Return functions that move a process to each of these machines. Without a network they do nothing: loopback."""

    def place(name: str) -> Callable[[], None]:
        def move() -> None:
            if network:
                network.move_in(name)
            else:
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"

        return move

    return [place(name) for name in names]
