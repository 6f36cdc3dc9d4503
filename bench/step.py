"""One optimizer step, compared with the machine's limits and with other libraries. From the project's root:

    python -m bench.step                                    100 M parameters on a file and in memory, and torch's AdamW
    python -m bench.step --params 1e9 --peers all           with DeepSpeed and TensorNVMe, if they are installed
    python -m bench.step --quick                            half a minute, to see that it works

First every back end is compared with torch.optim.AdamW. Then each step is timed beside a limit that is measured in the
same run: their ratio, unlike absolute times, can be compared between machines and moments.

    file   until all states are on the disk. After each step, the same requests again without the update (replay);
           before and after the run, fio's best mixed rate over a file as large as the store
    8bit   bf16 parameters with 8-bit states and with fp32 states, by turns: on the same disk, each step followed by its
           replay, and in memory. First, ten steps on the disk must equal those in memory to the last bit
    commit several steps in a row in named directories, where each is committed, and on scratch space, where none is.
           What was committed is resumed and compared
    cache  with states kept in memory from step to step, in the ordinary buffers and in memory for half of the states,
           and without, by turns
    ram    in memory; after each step, as much memory is read and written back in place
    null   Python and the engine alone: 1000 small parameters
    rules  the optimizers that --optimizer names, on a file and in memory, each compared with the same limits and with
           torch's (rules.py)
    peer   other libraries do the same work in an interpreter of their own, by turns with CSDAdam; those that use a disk
           are compared with CSDAdam's 8-bit states, too

--json prints schema csd_optim.bench.step/1; --plot writes a PNG.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import peers, rules
from bench.fio import fio_mixed
from csd_optim import CSDAdam, bindings
from csd_optim.bindings import DTYPE_CODES, HYPER, PARAM
from csd_optim.cli import benchmark, measure
from csd_optim.cli.benchmark import DTYPES, MEMORY_BYTES, WARM_UP
from csd_optim.devices import machine
from csd_optim.devices.spec import DeviceSpec, parse_devices
from csd_optim.optim.optimizer import CSDOptimizer

Row = dict[str, Any]
BURST = 4  # steps without a pause between them
MEMORY = 1 << 30  # bytes, several times a last-level cache
LITTLE_MEMORY = 64 << 20  # with --quick
BACKENDS = ("file", "8bit", "commit", "cache", "ram", "null", "rules")
ON_DISK = ("deepspeed-nvme", "tensornvme", "nvme-stream-fp32", "nvme-stream-bf16")
WITHOUT_MASTERS = ("deepspeed-cpu-bf16-states", "bitsandbytes-8bit")
OURS = {"fp32": "our", "8bit": "our_8bit"}  # prefix of CSDAdam's keys in a peer's row, by its states


def main() -> None:
    arguments = parse()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    on_disk = parse_devices([f"file:{arguments.directory}?scratch=1"] * arguments.devices)
    facts = {
        **machine_facts(),
        "storage": machine.storage(arguments.directory),
    }
    say(f"one step of {arguments.params / 1e6:.0f} M parameters, {arguments.runs} runs")
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))

    rows: list[Row] = []
    if "file" in arguments.backends:
        verify(on_disk, arguments.dtype)
        rows.append(file_row(arguments, on_disk))
        rows += [peer_row(name, arguments, on_disk, "bf16", OURS) for name in ON_DISK if name in arguments.peers]
    if "8bit" in arguments.backends:
        verify_codes(on_disk)
        rows += coded_rows(arguments, on_disk) + coded_ram_rows(arguments, parse_devices("ram:"))
    if "commit" in arguments.backends:
        rows.append(commit_row(arguments))
    if "cache" in arguments.backends:
        half = benchmark.DISK_BYTES // 4 * arguments.params // arguments.devices
        rows += [cache_row(arguments, cache) for cache in (0, half)]
    if "ram" in arguments.backends:
        in_memory = parse_devices("ram:")
        for dtype in dict.fromkeys((arguments.dtype, "fp32")):
            verify(in_memory, dtype)
            rows.append(ram_row(arguments, in_memory, dtype))
            names = [f"torch-{dtype}", f"deepspeed-cpu-{dtype}"]
            rows += [peer_row(name, arguments, in_memory, dtype) for name in names if name in arguments.peers]
        in_place = [name for name in WITHOUT_MASTERS if name in arguments.peers]
        rows += [peer_row(name, arguments, in_memory, "bf16", OURS) for name in in_place]
    if "null" in arguments.backends:
        rows.append(overhead_row(arguments.runs))
    if "rules" in arguments.backends:
        rows += rules_rows(arguments, on_disk)
    say("")
    for row in rows:
        say(describe(row))
    if arguments.json:
        json.dump({"schema": "csd_optim.bench.step/1", "machine": facts, "rows": rows}, sys.stdout, indent=1)
        print()
    if arguments.plot:
        plot(rows, facts, arguments.plot)
        say(f"plot: {arguments.plot}")


def verify(specs: list[DeviceSpec], dtype: str) -> None:
    difference = benchmark.verify(specs, DTYPES[dtype])
    say(f"verified {dtype} on {specs[0]} against torch.optim.AdamW: largest relative difference {difference:.1e}")


def verify_codes(specs: list[DeviceSpec]) -> None:
    """Compare ten steps with 8-bit states on these devices and in memory. Raises SystemExit if any bit differs."""
    torch.manual_seed(1)
    start = [torch.randn(n).bfloat16() for n in (1, 4095, 300_001)]
    here, in_memory = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    devices = [benchmark.scratch(s) for s in specs]
    with (
        CSDAdam(here, devices=devices, state_dtype="8bit") as a,
        CSDAdam(in_memory, devices="ram:", state_dtype="8bit") as b,
    ):
        for _ in range(10):
            for p, q in zip(here, in_memory, strict=True):
                p.grad = q.grad = torch.randn(p.shape).bfloat16()
            a.step()
            b.step()
        for p, q in zip(here, in_memory, strict=True):
            same = [torch.equal(a.state[p][key], b.state[q][key]) for key in ("master", "exp_avg", "exp_avg_sq")]
            if not (all(same) and torch.equal(p, q)):
                raise SystemExit("8-bit states on the disk are not those in memory: nothing is timed; please report")
    say(f"verified 8-bit states on {specs[0]} against those in memory: the same bits")


# --------------------------------------------------------------------------------------------------- back ends


def file_row(arguments: argparse.Namespace, specs: list[DeviceSpec]) -> Row:
    """Time steps until all states are on the disk, each followed by its replay."""
    params = arguments.params
    gib = benchmark.DISK_BYTES * params / 2**30
    fio = [fio_mixed(arguments.directory, gib, arguments.fio_seconds)]
    seconds, returned, replayed = [], [], []
    with benchmark.make_optimizer(specs, params, DTYPES[arguments.dtype]) as opt:
        for i in range(WARM_UP + arguments.runs):
            start = time.perf_counter()
            opt.step()
            back = time.perf_counter()
            stats = opt.stats()  # waits until all states are written
            end = time.perf_counter()
            replay = timed(lambda: replay_step(opt))
            if i >= WARM_UP:
                seconds.append(end - start)
                returned.append(back - start)
                replayed.append(replay)
    fio.append(fio_mixed(arguments.directory, gib, arguments.fio_seconds))
    moved = stats["flash_read_bytes"] + stats["flash_write_bytes"]
    limits = {"the same requests without the update": [a / b for a, b in zip(replayed, seconds, strict=True)]}
    if rates := [f["bytes_per_s"] for f in fio if "bytes_per_s" in f]:
        limits["fio's best mixed rate, mean of before and after"] = [
            moved / s / statistics.mean(rates) for s in seconds
        ]
    else:
        say(f"fio: {fio[0]['skipped']}")
    return {
        "what": f"CSDAdam, {arguments.dtype}, {len(specs)} file(s)",
        "params": params,
        "seconds": seconds,
        "seconds_until_step_returns": returned,
        "bytes": moved,
        "bytes_per_param": {k: stats[f"{k}_bytes"] / params for k in ("push", "pull", "flash_read", "flash_write")},
        "buffer_bytes": stats["buffer_bytes"],
        "fio": fio,
        "ratio_to": limits,
    }


def coded_rows(arguments: argparse.Namespace, specs: list[DeviceSpec]) -> list[Row]:
    """Time steps with 8-bit states and with fp32 states on files, by turns, each followed by its replay."""
    opts, rows = by_states(arguments, specs, f"{len(specs)} file(s)")
    replayed: dict[str, list[float]] = {kind: [] for kind in opts}
    with opts["8bit"], opts["fp32"]:
        for i in range(WARM_UP + arguments.runs):
            for kind in in_turn(opts, i):
                opt, row = opts[kind], rows[kind]
                seconds, stats = timed(lambda o=opt: (o.step(), o.stats())), opt.stats()  # type: ignore[misc]
                replay, again = timed(lambda o=opt: replay_step(o)), opt.stats()  # type: ignore[misc]
                if i < WARM_UP:
                    continue
                flash = {k: stats[f"flash_{k}_bytes"] for k in ("read", "write")}
                if flash != {k: again[f"flash_{k}_bytes"] for k in flash}:
                    raise SystemExit(f"a replay does not move the bytes of {row['what']}: nothing is reported")
                row["seconds"].append(seconds)
                replayed[kind].append(replay)
                row["bytes"] = sum(flash.values())
                row["bytes_per_param"] = {
                    k: stats[f"{k}_bytes"] / arguments.params for k in ("push", "pull", "flash_read", "flash_write")
                }
                row["buffer_bytes"] = stats["buffer_bytes"]
    for kind, row in rows.items():
        limits = zip(replayed[kind], row["seconds"], strict=True)
        row["ratio_to"]["the same requests without the update"] = [a / b for a, b in limits]
    return beside_fp32(rows)


def coded_ram_rows(arguments: argparse.Namespace, specs: list[DeviceSpec]) -> list[Row]:
    """Time steps with 8-bit states and with fp32 states in memory, by turns."""
    opts, rows = by_states(arguments, specs, "in memory")
    with opts["8bit"], opts["fp32"]:
        for kind, opt in opts.items():
            before = resident_bytes()
            opt.step()  # creates the states
            rows[kind]["state_bytes_per_param"] = (resident_bytes() - before) / arguments.params
        for i in range(WARM_UP + arguments.runs):
            for kind in in_turn(opts, i):
                seconds = timed(opts[kind].step)
                if i >= WARM_UP:
                    rows[kind]["seconds"].append(seconds)
    return beside_fp32(rows)


def by_states(
    arguments: argparse.Namespace, specs: list[DeviceSpec], place: str
) -> tuple[dict[str, CSDAdam], dict[str, Row]]:
    """Return an optimizer with 8-bit states and one with fp32 states, over bf16 parameters, and a row for each."""
    kinds = {"8bit": "8-bit", "fp32": "fp32"}
    opts = {k: benchmark.make_optimizer(specs, arguments.params, torch.bfloat16, state_dtype=k) for k in kinds}
    rows: dict[str, Row] = {
        kind: {
            "what": f"CSDAdam, bf16, {name} states, {place}",
            "params": arguments.params,
            "seconds": [],
            "ratio_to": {},
        }
        for kind, name in kinds.items()
    }
    return opts, rows


def in_turn(opts: dict[str, CSDAdam], i: int) -> list[str]:
    """Return their names in alternating order, because the second may have an advantage."""
    return [*opts] if i % 2 else [*reversed(opts)]


def beside_fp32(rows: dict[str, Row]) -> list[Row]:
    times = {kind: row["seconds"] for kind, row in rows.items()}
    ratios = [plain / coded for coded, plain in zip(times["8bit"], times["fp32"], strict=True)]
    rows["8bit"]["ratio_to"]["the same with fp32 states"] = ratios
    return [*rows.values()]


def resident_bytes() -> int:
    """Return the resident bytes of this process, as the kernel counts them."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def replay_step(opt: CSDOptimizer) -> None:
    """Make the requests of a step, in its order and through its buffers, without the update."""
    engine = opt._engine
    assert engine is not None
    table, hypers = np.zeros(engine.tiles.n_params, PARAM), np.zeros(1, HYPER)
    for b in opt._state_map.by_index:
        if b.is_compared:  # a step with 8-bit states does not read the parameters, which the host has
            table[b.index]["param"], table[b.index]["param_dtype"] = b.local.data_ptr(), DTYPE_CODES[b.local.dtype]
    tiles = engine.in_step_order(np.arange(len(engine.tiles), dtype=np.uint32))
    engine.begin(table, hypers, tiles)
    for tile in tiles.tolist():
        engine.native.push(tile)
    engine.finish()
    engine.native.wait_writes()


def commit_row(arguments: argparse.Namespace) -> Row:
    """Time bursts of steps without pauses, committed and uncommitted, by turns."""
    params, dtype = arguments.params, DTYPES[arguments.dtype]
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        specs = parse_devices([f"file:{directory}/{d}?cache=off" for d in range(arguments.devices)])
        durable = benchmark.make_optimizer(specs, params, dtype, durable=True)
        scratch = benchmark.make_optimizer(parse_devices([f"file:{directory}?scratch=1"] * len(specs)), params, dtype)

        def burst(opt: CSDAdam) -> None:
            for _ in range(BURST):
                opt.step()
            opt.stats()  # waits until all states are written
            opt.synchronize()

        seconds, uncommitted = [], []
        with scratch, durable:
            for i in range(WARM_UP + arguments.runs):
                pair = timed(lambda: burst(durable)) / BURST, timed(lambda: burst(scratch)) / BURST
                if i >= WARM_UP:
                    seconds.append(pair[0])
                    uncommitted.append(pair[1])
            stats = durable.stats()
            steps = durable.committed_step
            expected = [p.detach().clone() for p in durable.param_groups[0]["params"]]
        with benchmark.make_optimizer(specs, params, dtype, durable=True, resume=True) as resumed:
            same = all(map(torch.equal, resumed.param_groups[0]["params"], expected))
            if not resumed.committed_step == steps == BURST * (WARM_UP + arguments.runs) or not same:
                raise SystemExit("what was resumed differs from what was committed: nothing is reported")
    return {
        "what": f"CSDAdam, {arguments.dtype}, committed, {len(specs)} file(s)",
        "params": params,
        "seconds": seconds,
        "bytes": stats["flash_read_bytes"] + stats["flash_write_bytes"],
        "ratio_to": {"the same without commits": [b / a for a, b in zip(seconds, uncommitted, strict=True)]},
    }


def cache_row(arguments: argparse.Namespace, cache: int) -> Row:
    """Time steps with `cache` bytes per device, which save reads, and steps that read everything, by turns."""
    params, dtype, place = arguments.params, DTYPES[arguments.dtype], f"file:{arguments.directory}?scratch=1"
    kept, plain = (
        benchmark.make_optimizer(parse_devices([f"{place}&cache={option}"] * arguments.devices), params, dtype)
        for option in (cache, "off")
    )
    times: dict[CSDAdam, list[float]] = {kept: [], plain: []}
    with kept, plain:
        for i in range(WARM_UP + arguments.runs):
            for opt in (kept, plain) if i % 2 else (plain, kept):  # alternating: order may matter
                times[opt].append(timed(lambda o=opt: (o.step(), o.stats())))  # type: ignore[misc]
        seconds, all_read = (t[WARM_UP:] for t in times.values())
        moved = [sum(opt.stats()[f"flash_{kind}_bytes"] for kind in ("read", "write")) for opt in (kept, plain)]
    return {
        "what": f"CSDAdam, {arguments.dtype}, {arguments.devices} file(s), cache={cache / 1e9:.1f}GB",
        "params": params,
        "seconds": seconds,
        "bytes": moved[0],
        "share_of_bytes": moved[0] / moved[1],
        "ratio_to": {"the same with cache=off": [b / a for a, b in zip(seconds, all_read, strict=True)]},
    }


def ram_row(arguments: argparse.Namespace, specs: list[DeviceSpec], dtype: str) -> Row:
    """Time steps in memory, each followed by passes over plain memory, whose median counts."""
    params, threads = arguments.params, bindings.threads_used()
    memory = measure.Memory(arguments.memory)
    seconds, rates = [], []
    with benchmark.make_optimizer(specs, params, DTYPES[dtype]) as opt:
        for i in range(WARM_UP + arguments.runs):
            elapsed = timed(opt.step)
            rate = statistics.median(memory.rate(threads) for _ in range(3))
            if i >= WARM_UP:
                seconds.append(elapsed)
                rates.append(rate)
        buffer_bytes = opt.stats()["buffer_bytes"]
    moved = MEMORY_BYTES * params
    return {
        "what": f"CSDAdam, {dtype}, in memory",
        "params": params,
        "seconds": seconds,
        "bytes": moved,
        "buffer_bytes": buffer_bytes,
        "memory_bytes_per_s": rates,
        "ratio_to": {
            "memory read and written back in place": [moved / s / r for s, r in zip(seconds, rates, strict=True)]
        },
    }


def rules_rows(arguments: argparse.Namespace, specs: list[DeviceSpec]) -> list[Row]:
    """Return rows for each named optimizer, on files and in memory, compared with the limits and with torch's."""
    memory, threads = measure.Memory(arguments.memory), bindings.threads_used()

    def in_memory(opt: CSDOptimizer) -> float:
        sections = len(opt._state_map.by_index[0].sections)
        moved = (8 * sections + 2 * DTYPES[arguments.dtype].itemsize) * arguments.params
        return moved / statistics.median(memory.rate(threads) for _ in range(3))

    requests = rules.Limit("the same requests without the update", lambda opt: timed(lambda: replay_step(opt)))
    places = {
        f"{len(specs)} file(s)": (specs, requests),
        "in memory": (parse_devices("ram:"), rules.Limit("memory read and written back in place", in_memory)),
    }
    rows = []
    for name in arguments.optimizer:
        for place, (devices, limit) in places.items():
            pair = rules.PAIRS[name]
            ours, theirs = (partial(make, **pair.kwargs) for make in (pair.ours, pair.theirs))
            difference = benchmark.verify(devices, DTYPES[arguments.dtype], ours, theirs)
            say(f"verified {name} on {devices[0]} against torch: largest relative difference {difference:.1e}")
            rows.append(rules.row(name, devices, place, arguments.params, arguments.runs, arguments.dtype, limit))
    return rows


def overhead_row(runs: int) -> Row:
    """Measure what a step costs without moving any byte."""
    params = [torch.nn.Parameter(torch.randn(1000).bfloat16()) for _ in range(1000)]
    seconds = []
    with CSDAdam(params, devices=["null:"]) as opt:
        for i in range(WARM_UP + 10 * runs):
            for p in params:
                p.grad = torch.ones_like(p)  # new tensors each time, as after backward
            elapsed = timed(opt.step)
            if i >= WARM_UP:
                seconds.append(elapsed)
    return {"what": "CSDAdam, null, 1000 small parameters", "params": 10**6, "seconds": seconds}


def peer_row(
    name: str,
    arguments: argparse.Namespace,
    specs: list[DeviceSpec],
    dtype: str,
    state_dtypes: Iterable[str] = ("fp32",),
) -> Row:
    """Time a peer and CSDAdam by turns, because the machine's speed drifts; ours until all states are written."""
    theirs: list[float] = []
    ours: dict[str, list[float]] = {kind: [] for kind in state_dtypes}
    ratios: dict[str, list[float]] = {kind: [] for kind in ours}
    for _ in range(arguments.rounds):
        say(f"running {name} ...")
        peer = peers.run(name, arguments.params, arguments.runs, arguments.directory, threads=bindings.threads_used())
        if "skipped" in peer:
            return {"what": name, "skipped": peer["skipped"]}
        theirs += peer["seconds"]
        # A peer may round the number of parameters.
        theirs_each = statistics.median(peer["seconds"]) / peer["params"]
        for kind in ours:
            with benchmark.make_optimizer(specs, arguments.params, DTYPES[dtype], state_dtype=kind) as opt:
                times = [timed(lambda o=opt: (o.step(), o.stats())) for _ in range(WARM_UP + arguments.runs)]  # type: ignore[misc]
            ours[kind] += times[WARM_UP:]
            ratios[kind].append(theirs_each / statistics.median(times[WARM_UP:]) * arguments.params)
    row: Row = {
        "what": name,
        "params": peer["params"],
        "versions": peer["versions"],
        "seconds": theirs,
        **{k: peer[k] for k in ("peak_bytes", "bytes_read", "bytes_written", "backward_bytes_written") if k in peer},
    }
    for kind in ours:
        row |= {f"{OURS[kind]}_seconds": ours[kind], f"{OURS[kind]}_speed_over_it": ratios[kind]}
    return row


# ---------------------------------------------------------------------------------------------------- helpers


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def span(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def describe(row: Row) -> str:
    """Return a row as text: medians (minimum to maximum)."""
    if "skipped" in row:
        return f"{row['what']}: skipped, {row['skipped']}"
    rates = [row["params"] / s / 1e6 for s in row["seconds"]]
    lines = [f"{row['what']}: {span([1e3 * s for s in row['seconds']], 2)} ms, {len(rates)} runs"]
    if row["params"] > 10**6:
        lines.append(f"{span(rates, 0)} Mparam/s, {row['params'] / 1e6:.0f} M parameters")
    if "bytes" in row:
        lines.append(f"{span([row['bytes'] / s / 1e9 for s in row['seconds']], 2)} GB/s")
    if "bytes_per_param" in row:
        lines.append("bytes per parameter: " + ", ".join(f"{k} {v:.2f}" for k, v in row["bytes_per_param"].items()))
    if "bytes_read" in row:
        each = {
            k: row[k] / row["params"] for k in ("bytes_read", "bytes_written", "backward_bytes_written") if k in row
        }
        lines.append("bytes per parameter: " + ", ".join(f"{k} {v:.1f}" for k, v in each.items()))
    if "peak_bytes" in row:
        lines.append(f"most memory: {row['peak_bytes'] / 1e9:.2f} GB")
    if "buffer_bytes" in row:
        lines.append(f"tile buffers: {row['buffer_bytes'] / 1e6:.0f} MB")
    lines += [f"{span(ratio, 3)} of {name}" for name, ratio in row.get("ratio_to", {}).items()]
    if "state_bytes_per_param" in row:
        lines.append(f"states: {row['state_bytes_per_param']:.2f} B of memory per parameter")
    for kind, our in OURS.items():
        if ratio := row.get(f"{our}_speed_over_it"):
            lines.append(f"CSDAdam beside it, with {kind} states, is {span(ratio, 2)} times as fast")
    return "\n    ".join(lines)


def plot(rows: list[Row], facts: Row, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed_rows = [r for r in rows if r.get("params", 0) > 10**6]
    on_disk = [r for r in timed_rows if r["what"] in ON_DISK or "file(s)" in r["what"]]
    in_memory = [r for r in timed_rows if r not in on_disk]
    panels = {title: found for title, found in (("on disk", on_disk), ("in memory", in_memory)) if found}
    heights = [len(found) + 1 for found in panels.values()]
    figure, axes = plt.subplots(
        len(panels), figsize=(8, 0.45 * sum(heights) + 1), height_ratios=heights, layout="constrained", squeeze=False
    )
    for axis, (title, found) in zip(axes.flat, panels.items(), strict=True):
        rates = [sorted(r["params"] / s / 1e6 for s in r["seconds"]) for r in found]
        middle = [statistics.median(rate) for rate in rates]
        spread = [[m - r[0], r[-1] - m] for m, r in zip(middle, rates, strict=True)]
        names = [r["what"] for r in found]
        ours = {name: "tab:green" if "8-bit" in name else "tab:blue" for name in names if name.startswith("CSDAdam")}
        colours = [ours.get(name, "tab:gray") for name in names]
        bars = axis.barh(names, middle, color=colours, xerr=np.transpose(spread), capsize=3)
        axis.bar_label(bars, labels=[f"{m:.0f}" for m in middle], label_type="center", color="white")
        axis.invert_yaxis()
        axis.set_title(f"{title}: million parameters per second, median and range", fontsize="medium")
    figure.suptitle(
        f"One optimizer step: {facts['cpu']}, {facts['cores']} cores, {facts['date'][:10]}", fontsize="medium"
    )
    figure.savefig(path, dpi=120)


def machine_facts() -> Row:
    """Return the date and the machine, which every bench prints first."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"date": now.isoformat(timespec="seconds"), **machine.machine(), **machine.updater()}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1e8, help="number of parameters (default 1e8)")
    parser.add_argument("--runs", type=int, default=7, help="timed steps, at least 5")
    parser.add_argument("--rounds", type=int, default=3, help="turns of a peer and CSDAdam")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="on the disk to be measured")
    parser.add_argument("--devices", type=int, default=1, help="emulated CSDs on that disk")
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16", help="of parameters and gradients")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--optimizer", nargs="+", choices=[*rules.PAIRS, "all"], default=[], help="for rules")
    parser.add_argument(
        "--peers", nargs="+", choices=[*peers.PEERS, "all", "none"], default=["torch-fp16", "torch-fp32"]
    )
    parser.add_argument("--fio-seconds", type=float, default=4, help="seconds for each of fio's request shapes")
    parser.add_argument("--quick", action="store_true", help="3 M parameters, less memory, no peers")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    parser.add_argument("--plot", type=Path, help="write a PNG")
    arguments = parser.parse_args()
    arguments.memory = LITTLE_MEMORY if arguments.quick else MEMORY
    if arguments.quick:
        arguments.params, arguments.fio_seconds, arguments.peers = 3e6, 1, ["none"]
    arguments.params, arguments.runs = int(arguments.params), max(5, arguments.runs)
    arguments.optimizer = list(rules.PAIRS) if "all" in arguments.optimizer else arguments.optimizer
    arguments.peers = list(peers.PEERS) if "all" in arguments.peers else arguments.peers
    return arguments


if __name__ == "__main__":
    main()
