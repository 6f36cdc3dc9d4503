"""One optimizer step on several ranks, compared with ZeroRedundancyOptimizer(AdamW). From the project's root:

    python -m bench.distributed                       50 M parameters on 1, 2 and 4 processes, joined by gloo
    python -m bench.distributed --devices /mnt/nvme{local_rank} ram: --params 1e8 --dtype bf16
    python -m bench.distributed --quick               tiny, to see that it works

    DDP replicated   every rank holds all parameters and keeps all states (sharded=False)
    DDP sharded      every rank holds all parameters, keeps the states of its share and updates that, and gets the
                     other parameters from the other ranks: the default
    FSDP2            every rank holds and updates its shards; parameters are gathered in the forward, not in the step
    AdamW            torch's (fused), on replicas and on FSDP2's shards, for orientation

First each way, on each device, is compared with torch.optim.AdamW on fp32 copies, and the ranks with each other. Then
its steps and ZeRO's are timed by turns. ZeRO (fused AdamW, parameters as views of buckets) keeps its states in memory,
in bf16 if parameters are bf16: 4 bytes per parameter instead of our 12. A step is timed alone, from a barrier, on the
slowest rank. Gradients are there already; what DDP and FSDP move in forward and backward is not included, since it is
the same for both. Within our step, updates overlap with reading and writing states and with gathering parameters. It
counts until all states are written, although in a training the end overlaps with the next forward; the time until
step() returns is shown as well.

At last, backward under DDP without the hook csd_optim.push and with it: its time, and the bytes that the loopback
device has carried, divided by the ranks; the least of all runs, since other programs use it, too.

Bytes are per rank: ours are counted where they are moved, ZeRO's are what the other ranks own. All processes share this
machine's cores, memory and disk: the figures compare ways with each other and say nothing about scaling.

--json prints schema csd_optim.bench.distributed/1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from bench.step import machine_facts, say, span
from csd_optim import CSDAdam, bindings, push
from csd_optim.cli.benchmark import DTYPES, TOLERANCE, WARM_UP, scratch
from csd_optim.devices import machine
from csd_optim.devices.spec import parse_devices

Row = dict[str, Any]
Params = list[nn.Parameter]
WAYS: dict[str, Row] = {"DDP replicated": {"sharded": False}, "DDP sharded": {}, "FSDP2": {}}
COUNTED = ("push", "pull", "gathered", "flash_read", "flash_write")
MEMORY_BYTES = 32  # per parameter and rank, at most: parameters, gradients and states, ours and the peer's
VERIFIED = 200_000  # parameters, at most


def main() -> None:
    arguments = parse()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    need = MEMORY_BYTES * arguments.params * max(arguments.processes) * 1.2
    if need > machine.available_memory():
        raise SystemExit(f"{need / 1e9:.0f} GB of memory are needed, try fewer --params or --processes")
    facts = {
        **machine_facts(),
        "storage": machine.storage(arguments.directory),
        "back_end": "gloo",
    }
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    found = [on_processes(size, arguments) for size in arguments.processes]
    if arguments.json:
        rows = {kind: [row for of_size in found for row in of_size[kind]] for kind in ("rows", "backward")}
        json.dump({"schema": "csd_optim.bench.distributed/1", "machine": facts, **rows}, sys.stdout, indent=1)
        print()


def on_processes(size: int, arguments: argparse.Namespace) -> dict[str, list[Row]]:
    """Return the rows of steps, "rows", and of backwards, "backward"."""
    with tempfile.TemporaryDirectory() as meeting:
        # Forked, so that torch is imported once. Nothing was computed here yet, so there are no threads to lose.
        torch.multiprocessing.start_processes(work, (size, meeting, arguments), size, start_method="fork")
        found: dict[str, list[Row]] = json.loads(Path(meeting, "found").read_text())
    return found


def work(rank: int, size: int, meeting: str, arguments: argparse.Namespace) -> None:
    """Run all measurements as rank `rank` of `size`. The processes share the cores."""
    threads = max(1, len(os.sched_getaffinity(0)) // size)
    torch.set_num_threads(threads)
    bindings.threads_use(threads)
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=size)
    rows: list[Row] = []
    backwards: list[Row] = []
    for name in arguments.dtype:
        dtype = DTYPES[name]
        for way, options in WAYS.items():
            for device in arguments.devices:
                difference = verify(way, ours(device, options), dtype, min(arguments.params, VERIFIED))
                row = measure(way, ours(device, options), dtype, arguments)
                rows.append({"what": f"CSDAdam, {way}", "device": device, "largest_relative_difference": difference})
                rows[-1] |= {"processes": size, "threads": threads, "dtype": name, **row}
                if rank == 0:
                    say(describe(rows[-1]))
        for way in ("DDP replicated", "FSDP2"):
            row = measure(way, lambda params: AdamW(params, fused=True), dtype, arguments)
            rows.append({"what": f"AdamW, {way}", "processes": size, "threads": threads, "dtype": name, **row})
            if rank == 0:
                say(describe(rows[-1]))
        for hooked in (False, True) if size > 1 else ():
            backwards.append({"processes": size, "dtype": name, "hooked": hooked, **backward(dtype, hooked, arguments)})
            if rank == 0:
                say(describe_backward(backwards[-1]))
    if rank == 0:
        Path(meeting, "found").write_text(json.dumps({"rows": rows, "backward": backwards}))
    dist.barrier()
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------ optimizers and models


def ours(device: str, options: Row) -> Callable[[Params], Optimizer]:
    """Return a function that makes a CSDAdam on unnamed scratch space, so that no store is touched."""
    devices = [scratch(spec) for spec in parse_devices(device)]
    return lambda params: CSDAdam(params, devices=devices, **options)


def zero(params: Params) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, AdamW, parameters_as_bucket_view=True, fused=True)


def parameters(params: int, dtype: torch.dtype, way: str) -> Params:
    """Return parameters of square linear layers with biases: `params` elements or a few more, alike on all ranks."""
    torch.manual_seed(1)
    width = 1024 if params > 10**7 else 64
    layers = -(-params // (width * (width + 1)))
    model = nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(layers)))
    if way == "FSDP2":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return list(model.parameters())


def give(params: Params, gradients: Iterable[torch.Tensor]) -> None:
    for p, g in zip(params, gradients, strict=True):
        p.grad = distribute_tensor(g, p.device_mesh, p.placements) if isinstance(p, DTensor) else g


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t.detach()


# ------------------------------------------------------------------------------------------------------- measuring


def verify(way: str, make: Callable[[Params], Optimizer], dtype: torch.dtype, n: int) -> float:
    """Compare ten steps with AdamW on fp32 copies. Returns the largest relative difference; exits if too large."""
    params = parameters(n, dtype, way)
    copies = [nn.Parameter(whole(p).float().clone()) for p in params]
    oracle = AdamW(copies)
    worst = 0.0
    with closing(make(params)) as opt:
        for _ in range(10):
            gradients = [torch.randn(q.shape).to(dtype) for q in copies]
            give(params, gradients)
            opt.step()
            for q, g in zip(copies, gradients, strict=True):
                q.grad = g.float()
            oracle.step()
        for p, q in zip(params, copies, strict=True):
            found = {k: whole(v) for k, v in opt.state[p].items()}
            for key, wanted in {"master": q.detach(), **oracle.state[q]}.items():
                worst = max(worst, float((found[key] - wanted).abs().max() / wanted.abs().max()))
            if not torch.equal(whole(p), found["master"].to(dtype)):
                raise SystemExit(f"{way}: a parameter is not its rounded master: nothing is timed; please report this")
        check_alike(way, params)
    if not worst <= TOLERANCE:
        raise SystemExit(f"{way}: off torch.optim.AdamW by {worst:.1e}: nothing is timed; please report this")
    return worst


def check_alike(way: str, params: Params) -> None:
    """Exit if the ranks' parameters differ in any bit."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, [zlib.crc32(whole(p).contiguous().view(torch.uint8).numpy()) for p in params])
    if any(theirs != said[0] for theirs in said):
        raise SystemExit(f"{way}: ranks hold different parameters: nothing is reported; please report this")


def measure(way: str, make: Callable[[Params], Optimizer], dtype: torch.dtype, arguments: argparse.Namespace) -> Row:
    """Time steps and ZeRO's steps by turns. The slowest rank counts."""
    params, replicas = parameters(arguments.params, dtype, way), parameters(arguments.params, dtype, "DDP")
    gradients = [torch.randn_like(p) for p in replicas]
    give(params, gradients)
    give(replicas, gradients)
    peer = zero(replicas)
    seconds = []  # per run: until step() returned, until all states were written, ZeRO's step
    with closing(make(params)) as opt:
        for _ in range(WARM_UP + arguments.runs):
            dist.barrier()
            start = time.perf_counter()
            opt.step()
            returned = time.perf_counter()
            counted = opt.stats() if isinstance(opt, CSDAdam) else {}  # waits until all states are written
            done = time.perf_counter()
            dist.barrier()
            began = time.perf_counter()
            peer.step()
            seconds.append([returned - start, done - start, time.perf_counter() - began])
    slowest = torch.tensor(seconds[WARM_UP:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    returned_after, done_after, zeros = slowest.t().tolist()
    for of, held in ((way, params), ("ZeRO", replicas)):
        if of != "FSDP2":
            check_alike(of, held)
    row = {
        "params": sum(p.numel() for p in params),
        "seconds": done_after,
        "seconds_until_step_returns": returned_after,
        "zero_seconds": zeros,
        "speed_over_zero": [z / s for z, s in zip(zeros, done_after, strict=True)],
        "zero_bytes_of_ranks": of_ranks({"gathered": others_own(peer)}),
    }
    if counted:
        row["bytes_of_ranks"] = of_ranks({name: counted[f"{name}_bytes"] for name in COUNTED})
    return row


class Given(nn.Module):
    """A model whose gradients are given."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.params, gradients, strict=True)]).sum()


def backward(dtype: torch.dtype, hooked: bool, arguments: argparse.Namespace) -> Row:
    """Time backwards under DDP, with csd_optim.push if `hooked`, and count what the loopback device carries in them."""
    params = parameters(arguments.params, dtype, "DDP")
    gradients = [torch.randn_like(p) for p in params]
    seconds, nbytes = [], []
    with CSDAdam(params, devices="ram:") as opt:
        ddp = DistributedDataParallel(Given(params), gradient_as_bucket_view=True)
        if hooked:
            ddp.register_comm_hook(opt, push)
        for _ in range(WARM_UP + arguments.runs):
            loss = ddp(gradients)
            before = loopback_bytes()  # of the barrier, too, but no other rank has begun
            dist.barrier()
            began = time.perf_counter()
            loss.backward()
            seconds.append(time.perf_counter() - began)
            dist.barrier()
            nbytes.append(loopback_bytes() - before)
            opt.zero_grad()
    slowest = torch.tensor(seconds[WARM_UP:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    elements = sum(p.numel() for p in params)
    each = min(nbytes[WARM_UP:]) / dist.get_world_size() / elements
    return {"params": elements, "seconds": slowest.tolist(), "bytes_per_parameter_and_rank": each}


def loopback_bytes() -> int:
    """Return the number of bytes that this machine's loopback device has carried."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.lstrip().startswith("lo:"))


def others_own(peer: ZeroRedundancyOptimizer) -> int:
    """Return the bytes of the parameters that the other ranks update and send."""
    owned = [group for r, groups in enumerate(peer._partition_parameters()) if r != dist.get_rank() for group in groups]
    return sum(p.nbytes for group in owned for p in group["params"])


def of_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def closing(opt: Optimizer) -> contextlib.AbstractContextManager[Any]:
    return opt if isinstance(opt, CSDAdam) else contextlib.nullcontext(opt)


# --------------------------------------------------------------------------------------------------------- showing


def describe(row: Row) -> str:
    """Return a row as text: medians (minimum to maximum); bytes are those of the rank that moves most."""
    milliseconds = {k: [1e3 * s for s in row[k]] for k in ("seconds", "seconds_until_step_returns", "zero_seconds")}
    runs = len(row["seconds"])
    on = f" on {row['device']}" if "device" in row else ""
    lines = [
        f"{row['processes']} process(es), {row['dtype']}, {row['params'] / 1e6:.1f} M parameters: {row['what']}{on}",
        f"{span(milliseconds['seconds'], 1)} ms, {runs} runs; ZeRO by turns {span(milliseconds['zero_seconds'], 1)} ms",
        f"{span(row['speed_over_zero'], 2)} times as fast as ZeRO",
    ]
    if "bytes_of_ranks" in row:
        lines[1] += f"; step() returned after {span(milliseconds['seconds_until_step_returns'], 1)} ms"
        most = {name: max(b[name] for b in row["bytes_of_ranks"]) / row["params"] for name in COUNTED}
        zeros = max(b["gathered"] for b in row["zero_bytes_of_ranks"]) / row["params"]
        each = ", ".join(f"{name} {value:.2f}" for name, value in most.items())
        lines.append(f"bytes per parameter and rank: {each}; ZeRO gathered {zeros:.2f}")
        lines.append(f"verified: off AdamW's by {row['largest_relative_difference']:.1e} at most, alike on all ranks")
    return "\n    ".join(lines)


def describe_backward(row: Row) -> str:
    what = "csd_optim.push" if row["hooked"] else "DDP's all-reduce"
    return (
        f"{row['processes']} processes, {row['dtype']}, {row['params'] / 1e6:.1f} M parameters: backward with {what}\n"
        f"    {span([1e3 * s for s in row['seconds']], 1)} ms; bytes per parameter and rank: "
        f"{row['bytes_per_parameter_and_rank']:.2f}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=5e7, help="number of parameters (default 5e7)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--dtype", nargs="+", choices=("bf16", "fp16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument(
        "--devices", nargs="+", help="each is timed by itself; as in CSDAdam(devices=...), with {rank} etc."
    )
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="used if no device is named")
    parser.add_argument("--runs", type=int, default=7, help="timed steps, at least 5")
    parser.add_argument("--quick", action="store_true", help="0.05 M parameters on 1 and 2 processes")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    arguments = parser.parse_args()
    arguments.devices = arguments.devices or [str(arguments.directory), "ram:"]
    if arguments.quick:
        arguments.params, arguments.processes, arguments.runs = 5e4, [1, 2], 5
    arguments.params, arguments.runs = int(arguments.params), max(5, arguments.runs)
    return arguments


if __name__ == "__main__":
    main()
