"""One optimizer step, against what the machine can do and against what others do. From the project's root:

    python -m bench.step                              100 M parameters, `file` and `ram`, torch beside them
    python -m bench.step --params 1e9 --peers all     with DeepSpeed and TensorNVMe where they are installed
    python -m bench.step --quick                      a few seconds, to see that it works

First every back end is compared with torch.optim.AdamW. Then, per question, a step is timed beside a limit measured in
the same run: on these limits, not on absolute times, two machines or two minutes can be compared.

    file   a step until its last state is on the disk, interleaved with the same requests without the update (`replay`);
           before and after, fio's best mixed read and write over a file of the size of the store
    ram    a step, interleaved with reading and writing back as much memory in place
    null   Python and the engine alone: 1000 small parameters, no state
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import limits, peers
from csd_optim import CSDAdam, bindings
from csd_optim.bindings import HYPER, PARAM

Row = dict[str, Any]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
TENSOR = 1 << 24  # elements per parameter, as in the peers
WARM_UP = 3  # steps; both slots of every tile have then been written once


def main() -> None:
    arguments = parse()
    directory: Path = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    facts = limits.machine(directory) | {"isa": bindings.isa_used(), "update_threads": bindings.threads_used()}
    say(f"csd_optim step: {arguments.params / 1e6:.0f} M parameters, {arguments.runs} runs, in {directory}")
    say("  ".join(f"{k} {v}" for k, v in facts.items()))

    for backend in ("file:", "ram:"):
        verify(backend, directory)
    rows: list[Row] = []
    if "file" in arguments.backends:
        rows += file_rows(arguments, directory)
    if "ram" in arguments.backends:
        for name in DTYPES if arguments.all_dtypes else dict.fromkeys((arguments.dtype, "fp32")):
            rows += ram_rows(arguments, name)
    if "null" in arguments.backends:
        rows.append(overhead_row(arguments.runs))
    say("")
    for row in rows:
        say(describe(row))
    if arguments.json:
        json.dump({"schema": "csd_optim.bench.step/1", "machine": facts, "rows": rows}, sys.stdout, indent=1)
        print()
    if arguments.plot:
        plot(rows, facts, arguments.plot)
        say(f"plot: {arguments.plot}")


# ------------------------------------------------------------------------------------------------ verification


def verify(backend: str, directory: Path) -> None:
    """Three steps equal torch.optim.AdamW's on fp32 copies, or nothing is timed."""
    torch.manual_seed(1)
    ours = [torch.nn.Parameter(torch.randn(n).half()) for n in (1, 4095, 300_001)]
    theirs = [torch.nn.Parameter(p.detach().float()) for p in ours]
    opt, oracle = CSDAdam(ours, devices=scratch(backend, directory)), torch.optim.AdamW(theirs)
    with opt:
        for _ in range(3):
            for p, q in zip(ours, theirs, strict=True):
                p.grad = torch.randn_like(p)
                q.grad = p.grad.float()
            opt.step()
            oracle.step()
        worst = 0.0
        for p, q in zip(ours, theirs, strict=True):
            expected = {"master": q.detach(), **{k: oracle.state[q][k] for k in ("exp_avg", "exp_avg_sq")}}
            for key, value in expected.items():
                worst = max(worst, float((opt.state[p][key] - value).abs().max() / value.abs().max()))
    if worst > 1e-6:
        raise SystemExit(f"{backend} differs from torch.optim.AdamW by {worst:.1e}: not timing a wrong result")
    say(f"verified {backend} against torch.optim.AdamW: largest relative difference {worst:.1e}")


# --------------------------------------------------------------------------------------------------- back ends


def file_rows(arguments: argparse.Namespace, directory: Path) -> list[Row]:
    params = arguments.params
    gib = min(arguments.fio_gib, 24 * params / 2**30)
    fio = [limits.fio_mixed(directory, gib)]
    opt = optimizer(params, arguments.dtype, [scratch("file:", directory)[0] for _ in range(arguments.devices)])
    with opt:
        whole, returned, replayed = [], [], []
        for i in range(WARM_UP + arguments.runs):
            start = time.perf_counter()
            opt.step()
            back = time.perf_counter()
            opt.stats()  # waits for the last states
            end = time.perf_counter()
            replay = timed(lambda: replay_step(opt))
            if i >= WARM_UP:
                whole.append(end - start)
                returned.append(back - start)
                replayed.append(replay)
        opt.step()  # the last one was a replay, whose counts are not those of a step
        stats = opt.stats()
    fio.append(limits.fio_mixed(directory, gib))
    moved = stats["flash_read_bytes"] + stats["flash_write_bytes"]
    row = {
        "question": "one step on disk",
        "backend": "file",
        "devices": arguments.devices,
        "dtype": arguments.dtype,
        "params": params,
        "seconds": whole,
        "seconds_until_step_returns": returned,
        "bytes_per_param": {
            k: stats[k] / params for k in ("push_bytes", "pull_bytes", "flash_read_bytes", "flash_write_bytes")
        },
        "bytes_per_s": moved / statistics.median(whole),
        "buffer_bytes": stats["buffer_bytes"],
        "mparam_per_s": params / statistics.median(whole) / 1e6,
        "limits": {"replay of the same requests": paired(replayed, whole)},
    }
    rates = [f["bytes_per_s"] for f in fio if "bytes_per_s" in f]
    if rates:
        row["fio"] = fio
        row["limits"]["fio's best mixed rate"] = row["bytes_per_s"] / statistics.mean(rates)
    else:
        say(f"fio: {fio[0].get('skipped')}")
    rows = [row]
    for name in ("deepspeed-nvme", "tensornvme"):
        if name in arguments.peers:
            peer = run_peer(name, min(params, arguments.peer_params), arguments.runs, directory)
            if "seconds" in peer:
                peer["ours_over_it"] = row["mparam_per_s"] / peer["mparam_per_s"]
            rows.append(peer)
    return rows


def replay_step(opt: CSDAdam) -> None:
    """The requests of a step, in its order and through its buffers, without the update."""
    engine = opt._engine
    assert engine is not None
    table, hypers = np.zeros(engine.n_params, PARAM), np.zeros(1, HYPER)
    tiles = np.arange(engine.n_tiles, dtype=np.uint32)
    engine.begin(table, hypers, tiles)
    for tile in tiles.tolist():
        engine.push(tile)
    engine.finish()
    engine.drain()


def ram_rows(arguments: argparse.Namespace, name: str) -> list[Row]:
    """16-bit parameters move 28 B each: three fp32 states read and written, gradient in, parameter out; fp32 parameters
    are their own master and move as many: two states and the parameter read and written, gradient in."""
    params = arguments.params
    mib = max(64, min(1024, 12 * params >> 20))
    with optimizer(params, name, ["ram:"]) as opt:
        seconds, rmw = [], []
        for i in range(WARM_UP + arguments.runs):
            elapsed = timed(opt.step)
            limit = limits.memory_rmw(mib, bindings.threads_used(), 1)
            if i >= WARM_UP:
                seconds.append(elapsed)
                rmw.append(limit["bytes_per_s"])
        buffer_bytes = opt.stats()["buffer_bytes"]
    per_run = [28 * params / s / r for s, r in zip(seconds, rmw, strict=True)]
    row = {
        "question": "one step in memory",
        "backend": "ram",
        "dtype": name,
        "params": params,
        "seconds": seconds,
        "bytes_per_s": 28 * params / statistics.median(seconds),
        "buffer_bytes": buffer_bytes,
        "mparam_per_s": params / statistics.median(seconds) / 1e6,
        "limits": {"memory read and written back in place": statistics.median(per_run)},
    }
    rows = [row]
    for peer_name in (f"torch-{name}", f"deepspeed-cpu-{name}"):
        if peer_name not in arguments.peers:
            continue
        # Turn about, because the machine's speed drifts while the peer's interpreter starts.
        ratios = []
        for _ in range(arguments.rounds):
            peer = run_peer(peer_name, params, arguments.runs, arguments.directory)
            if "seconds" not in peer:
                break
            with optimizer(params, name, ["ram:"]) as opt:
                for _ in range(WARM_UP):
                    opt.step()
                ours = statistics.median(timed(opt.step) for _ in range(arguments.runs))
            ratios.append(params / ours / 1e6 / peer["mparam_per_s"])
        if ratios:
            peer["ours_over_it"], peer["ours_over_it_per_round"] = statistics.median(ratios), ratios
        rows.append(peer)
    return rows


def overhead_row(runs: int) -> Row:
    """What a step costs before any byte moves."""
    params = [torch.nn.Parameter(torch.randn(1000).bfloat16()) for _ in range(1000)]
    seconds = []
    with CSDAdam(params, devices=["null:"]) as opt:
        for i in range(WARM_UP + 10 * runs):
            for p in params:
                p.grad = torch.ones_like(p)  # new tensors each time, as after backward
            elapsed = timed(opt.step)
            if i >= WARM_UP:
                seconds.append(elapsed)
    return {"question": "overhead of 1000 small parameters", "backend": "null", "params": 10**6, "seconds": seconds}


# ---------------------------------------------------------------------------------------------------- helpers


def optimizer(params: int, dtype: str, devices: list[str]) -> CSDAdam:
    sizes = [min(TENSOR, params - first) for first in range(0, params, TENSOR)]
    tensors = [torch.nn.Parameter(torch.randn(n).to(DTYPES[dtype])) for n in sizes]
    for p in tensors:
        p.grad = torch.randn(p.numel()).to(p.dtype)
    return CSDAdam(tensors, devices=devices)


def scratch(backend: str, directory: Path) -> list[str]:
    """A nameless store in `directory`: gone with the process, however it ends."""
    return [f"file:{directory}?scratch=1" if backend == "file:" else backend]


def run_peer(name: str, params: int, runs: int, directory: Path) -> Row:
    say(f"running {name} ...")
    return {"question": "peer", **peers.run(name, params, runs, directory, threads=bindings.threads_used())}


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def paired(limit: list[float], ours: list[float]) -> float:
    """Median, over the pairs, of the limit's time over ours: 1 is as fast as the limit."""
    return statistics.median(a / b for a, b in zip(limit, ours, strict=True))


def describe(row: Row) -> str:
    if "skipped" in row:
        return f"{row['name']}: skipped, {row['skipped']}"
    seconds = sorted(row["seconds"])
    spread = f"{statistics.median(seconds):.4f} s ({seconds[0]:.4f} to {seconds[-1]:.4f}, {len(seconds)} runs)"
    if row["question"] == "peer":
        text = f"  peer {row['name']}: {row['mparam_per_s']:.0f} Mparam/s, {row['params'] / 1e6:.0f} M parameters, "
        text += spread
        return text + (f"; CSDAdam is {row['ours_over_it']:.2f} times as fast" if "ours_over_it" in row else "")
    text = f"{row['question']} ({row['backend']}{', ' + row['dtype'] if 'dtype' in row else ''}): {spread}"
    if "mparam_per_s" in row:
        text += f", {row['mparam_per_s']:.0f} Mparam/s, {row['bytes_per_s'] / 1e9:.2f} GB/s"
        text += f", tile buffers {row['buffer_bytes'] / 1e6:.0f} MB"
    if "bytes_per_param" in row:
        text += "\n  bytes per parameter: " + ", ".join(f"{k} {v:.2f}" for k, v in row["bytes_per_param"].items())
    for name, ratio in row.get("limits", {}).items():
        text += f"\n  {ratio:.2f} of {name}"
    return text


def plot(rows: list[Row], facts: Row, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars = [
        (r.get("name") or f"CSDAdam {r['backend']} {r['dtype']}", r["mparam_per_s"])
        for r in rows
        if "mparam_per_s" in r
    ]
    figure, axis = plt.subplots(figsize=(8, 0.5 * len(bars) + 1.5), layout="constrained")
    colours = ["tab:blue" if name.startswith("CSDAdam") else "tab:gray" for name, _ in bars]
    axis.barh([name for name, _ in bars], [rate for _, rate in bars], color=colours)
    axis.bar_label(axis.containers[0], fmt="%.0f", padding=3)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("million parameters per second (log)")
    axis.set_title(f"One optimizer step, {facts['cores']} cores, {facts['date'][:10]}", fontsize="medium")
    figure.savefig(path, dpi=150)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1e8, help="number of parameters (default 1e8)")
    parser.add_argument("--runs", type=int, default=7, help="timed steps, at least 5")
    parser.add_argument("--rounds", type=int, default=3, help="times a peer in memory and CSDAdam take turns")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="on the disk to be measured")
    parser.add_argument("--devices", type=int, default=1, help="emulated CSDs on that disk")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16", help="of parameters and gradients on disk")
    parser.add_argument("--backends", nargs="+", choices=("file", "ram", "null"), default=["file", "ram", "null"])
    parser.add_argument(
        "--peers", nargs="+", choices=[*peers.PEERS, "all", "none"], default=["torch-fp16", "torch-fp32"]
    )
    parser.add_argument(
        "--peer-params", type=float, default=1 << 25, help="parameters of peers on disk (they are slow)"
    )
    parser.add_argument("--fio-gib", type=float, default=4, help="largest file for fio, in GiB")
    parser.add_argument("--all-dtypes", action="store_true", help="bf16 in memory, too")
    parser.add_argument("--quick", action="store_true", help="3 M parameters, no peers")
    parser.add_argument("--json", action="store_true", help="print the rows on stdout")
    parser.add_argument("--plot", type=Path, help="write a PNG")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.params, arguments.fio_gib, arguments.peers = 3e6, 0.125, ["none"]
    arguments.params, arguments.peer_params = int(arguments.params), int(arguments.peer_params)
    arguments.runs = max(5, arguments.runs)
    arguments.peers = list(peers.PEERS) if "all" in arguments.peers else arguments.peers
    return arguments


if __name__ == "__main__":
    main()
