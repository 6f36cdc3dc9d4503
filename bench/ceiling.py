"""How fast the engine is when drives are not the limit, and where its CPU time goes. From the project's root:

    python -m bench.ceiling                         100 M parameters, threads from 1 to all, a disk beside it
    python -m bench.ceiling --dtype fp16 --threads 1 2 4 8 16
    python -m bench.ceiling --quick                 some seconds, to see that it works

First the engine is compared with torch.optim.AdamW. Then, by turns, for each number of update threads:

    engine    a step on a device that completes at once (EngineWithoutDrive): every tile lies in memory, is verified,
              updated and checksummed, and its write is discarded. A tmpfs would copy every byte twice more
    verify    the same without gradients: tiles are only fetched from memory and verified
    wake-ups  as many tiles and requests as on drives, but tiny ones: threads, locks, system calls, Python
    memory    as many bytes of memory, read and written back in place
    chunk     the update and the checksum of a chunk in the second-level cache, on one thread
    codec     the update of 8-bit states in memory, decoded and encoded, and that of fp32 states, on one thread, with
              each instruction set of the CPU; first it is verified that all of them give the same bits

and on a disk, with all threads: a step of CSDAdam, and the same requests without the update. The system time of the
latter is that of I/O calls, its user time that of verifying.

CPU time is user plus system time of all threads of the process, per GB moved to or from drives (24 B per parameter). On
a machine that others use as well, it says more than the rates. The sum of the parts is shown beside the measured whole:
they should roughly agree. The figures for many fast drives are arithmetic: no such machine was measured.

--json prints schema csd_optim.bench.ceiling/1; --plot writes a PNG.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.step import LITTLE_MEMORY, MEMORY, Row, machine_facts, replay_step, say, span, timed, verify
from csd_optim import CSDAdam, bindings
from csd_optim.cli import benchmark
from csd_optim.cli.benchmark import DISK_BYTES, DTYPES, MEMORY_BYTES, WARM_UP
from csd_optim.cli.measure import Memory
from csd_optim.devices import machine
from csd_optim.devices.spec import parse_devices
from csd_optim.engine.placing.engine_rate import HYPERS, EngineWithoutDrive
from csd_optim.optim.rules import ADAMW
from csd_optim.store.layout import GRAIN, SUM_ELEMS, TILE_ELEMS
from csd_optim.store.sections import EIGHT_BIT, SECTIONS, slot_of

TILES = 1024  # tiny tiles, for the wake-ups
TINY = 4 * GRAIN  # elements of a tiny tile, and bytes of its requests: twelve each way, like those of a 12 MiB tile
CODED_ELEMS, FEW_CODED_ELEMS = 1 << 24, 1 << 18  # far more than fits in caches; the latter with --quick
CALLS = 200  # timed together, because one takes microseconds
DRIVES, DRIVE_RATE, CORES = (4, 8, 16), 13e9, 16  # bytes per second, read plus written
# Bytes of memory traffic per parameter if caches hold only a chunk: states in from the drive, into the CPU, back, out
# to the drive; 16-bit gradients in; 16-bit parameters out, written past the caches.
TRAFFIC = 4 * 12 + 2 + 2


def main() -> None:
    arguments = parse()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    facts = {**machine_facts(), "storage": machine.storage(arguments.directory)}
    say(f"{arguments.params / 1e6:.0f} M parameters, {arguments.dtype}, {arguments.runs} runs")
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    on_disk = parse_devices([f"file:{arguments.directory}?scratch=1"])
    verify(on_disk, arguments.dtype)
    same_bits(DTYPES[arguments.dtype])
    same_codes(DTYPES[arguments.dtype])

    chunk, codec = in_cache(arguments), codec_rows(arguments)
    rows, disk = engine_rows(arguments), disk_row(arguments, on_disk)
    found = {"chunk": chunk, "codec": codec, "rows": rows, "disk": disk, "per_gb": per_gb(chunk, rows, disk)}
    found["reckoned"] = reckoned(found["per_gb"], rows[-1])
    say(describe(found))
    if arguments.json:
        json.dump({"schema": "csd_optim.bench.ceiling/1", "machine": facts, **found}, sys.stdout, indent=1)
        print()
    if arguments.plot:
        plot(found["per_gb"], facts, arguments.plot)
        say(f"plot: {arguments.plot}")


def same_bits(dtype: torch.dtype) -> None:
    """Verify that the engine without a drive gives the parameters that CSDAdam gives."""
    p = torch.nn.Parameter(torch.zeros(300_001, dtype=dtype))
    with CSDAdam([p], devices=["file:"]) as opt, EngineWithoutDrive(p.numel(), dtype) as engine:
        for t in range(1, 6):
            p.grad = torch.randn(p.numel()).to(dtype)
            engine.grad.copy_(p.grad)
            engine.hyper[0] = ADAMW.constants(opt.param_groups[0], ADAMW.sections, t, 1.0)
            opt.step()
            engine.step()
        if not torch.equal(engine.param, p):
            raise SystemExit("without a drive the engine gives other parameters: nothing is timed; please report this")
    say("verified without a drive: the same bits as CSDAdam's")


def codes(elems: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return new 8-bit states of `elems` parameters of a dtype, a tensor per section."""
    return [torch.zeros(s.size, dtype=torch.uint8) for s in slot_of(elems, SECTIONS[:3], EIGHT_BIT, dtype)]


def same_codes(dtype: torch.dtype) -> None:
    """Verify that all instruction sets give the same codes and parameters."""
    elems, grads = 100_003, [torch.randn(100_003).to(dtype) for _ in range(5)]
    found = []
    for isa in bindings.isas():
        states, param = codes(elems, dtype), torch.zeros(elems, dtype=dtype)
        for key, grad in enumerate(grads):
            bindings.update_codes(HYPERS, isa, grad, states, param, key)
        found.append([*states, param])
    if not all(all(map(torch.equal, tensors, found[0])) for tensors in found):
        raise SystemExit("instruction sets differ: nothing is timed; please report this")
    say(f"verified {', '.join(bindings.isas())}: the same bits of 8-bit states")


# ------------------------------------------------------------------------------------------------ measured


def used(call: Callable[[], Any]) -> Row:
    """Return the seconds of a call, and the CPU seconds of all threads of the process meanwhile."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    seconds = timed(call)
    after = resource.getrusage(resource.RUSAGE_SELF)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return {"seconds": seconds, "user_seconds": user, "system_seconds": system}


def by_turns(calls: dict[str, Callable[[], Row]], runs: int) -> dict[str, Row]:
    """Make each call `runs` times, after a warm-up. Returns what each call returned, as lists.

    The calls take turns, because the machine's speed drifts.
    """
    kept: dict[str, list[Row]] = {name: [] for name in calls}
    for _ in range(WARM_UP + runs):
        for name, call in calls.items():
            kept[name].append(call())
    return {name: {key: [r[key] for r in results[WARM_UP:]] for key in results[0]} for name, results in kept.items()}


def engine_rows(arguments: argparse.Namespace) -> list[Row]:
    """Return a row for each number of threads, with `seconds` and so on of each part by its name."""
    params, dtype = arguments.params, DTYPES[arguments.dtype]
    memory, rows = Memory(arguments.memory), []
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(EngineWithoutDrive(params, dtype))
        tiny = stack.enter_context(
            EngineWithoutDrive(TILES * TINY, dtype, cached=False, tile_elems=TINY, block_bytes=TINY)
        )
        engine.grad.normal_()
        for threads in arguments.threads:
            say(f"{threads} thread(s) ...")
            bindings.threads_use(threads)
            calls: dict[str, Callable[[], Row]] = {
                "engine": lambda: used(engine.step),
                "verify": lambda: used(lambda: engine.step(update=False)),
                "wake-ups": lambda: used(lambda: tiny.step(update=False)),
                "memory": lambda n=threads: {"bytes_per_s": memory.rate(n)},  # type: ignore[misc]
            }
            parts = by_turns(calls, arguments.runs)
            at = zip(parts["engine"]["seconds"], parts["memory"]["bytes_per_s"], strict=True)
            parts["engine"]["ratio_to_memory"] = [MEMORY_BYTES * params / s / r for s, r in at]
            rows.append({"threads": threads, "params": params, "bytes": DISK_BYTES * params, **parts})
    return rows


def in_cache(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Measure one chunk over and over on this thread: bytes checksummed, parameters updated, per CPU second."""
    dtype = DTYPES[arguments.dtype]
    grad, states, param = torch.randn(SUM_ELEMS).to(dtype), torch.zeros(3, SUM_ELEMS), torch.zeros(SUM_ELEMS).to(dtype)
    isa, data = bindings.isa_used(), memoryview(states.numpy()).cast("B")
    calls = {
        "sum": (lambda: bindings.crc32c(data), data.nbytes),
        "update": (lambda: bindings.update(HYPERS, isa, grad, [*states], param), SUM_ELEMS),
    }
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + arguments.runs):
        for name, (call, amount) in calls.items():
            start = time.thread_time()
            for _ in range(CALLS):
                call()
            rates[name].append(CALLS * amount / (time.thread_time() - start))
    return {f"{name}_per_cpu_s": values[1:] for name, values in rates.items()}


def codec_rows(arguments: argparse.Namespace) -> list[Row]:
    """Return a row per instruction set: parameters per CPU second of this thread, with 8-bit and with fp32 states."""
    elems, dtype = arguments.coded, DTYPES[arguments.dtype]
    grad, param = torch.randn(elems).to(dtype), torch.zeros(elems, dtype=dtype)
    plain, coded, hyper = [torch.zeros(elems) for _ in range(3)], codes(elems, dtype), HYPERS

    def rate(call: Callable[[], None]) -> Row:
        start = time.thread_time()
        call()
        return {"per_cpu_s": elems / (time.thread_time() - start)}

    calls: dict[str, Callable[[], Row]] = {}
    for isa in bindings.isas():
        calls[f"8bit {isa}"] = lambda i=isa: rate(  # type: ignore[misc]
            lambda: bindings.update_codes(hyper, i, grad, coded, param, 0)
        )
        calls[f"fp32 {isa}"] = lambda i=isa: rate(  # type: ignore[misc]
            lambda: bindings.update(hyper, i, grad, plain, param)
        )
    rates = {name: part["per_cpu_s"] for name, part in by_turns(calls, arguments.runs).items()}
    return [
        {
            "isa": isa,
            "8bit_per_cpu_s": rates[f"8bit {isa}"],
            "fp32_per_cpu_s": rates[f"fp32 {isa}"],
            "ratio": [a / b for a, b in zip(rates[f"8bit {isa}"], rates[f"fp32 {isa}"], strict=True)],
        }
        for isa in bindings.isas()
    ]


def disk_row(arguments: argparse.Namespace, specs: list[Any]) -> Row:
    """Time steps of CSDAdam until all states are on the disk, and the same requests alone, by turns."""
    say("a disk ...")
    with benchmark.make_optimizer(specs, arguments.params, DTYPES[arguments.dtype]) as opt:
        calls = {
            "step": lambda: used(lambda: (opt.step(), opt.stats())),
            "requests": lambda: used(lambda: replay_step(opt)),
        }
        parts = by_turns(calls, arguments.runs)
        stats = opt.stats()
    ratio = [a / b for a, b in zip(parts["requests"]["seconds"], parts["step"]["seconds"], strict=True)]
    moved = stats["flash_read_bytes"] + stats["flash_write_bytes"]
    return {"params": arguments.params, "bytes": moved, "threads": bindings.threads_used(), **parts, "ratio": ratio}


# ------------------------------------------------------------------------------------------------ what follows


def per_gb(chunk: dict[str, list[float]], rows: list[Row], disk: Row) -> list[Row]:
    """Return CPU seconds per GB moved: the parts, their sum, and the measured whole. The last row is the disk's."""

    def runs(part: Row, nbytes: float, *kinds: str) -> list[float]:
        every = zip(*(part[f"{kind}_seconds"] for kind in kinds or ("user", "system")), strict=True)
        return [sum(seconds) / nbytes * 1e9 for seconds in every]

    def cpu(*of: Any) -> float:
        return statistics.median(runs(*of))

    # Wake-ups are those of reads and writes together. Tiles that lie in buffers are only written: they have fewer
    # wake-ups, and "fetch, verify" gets 2 or 3 ms that are really wake-ups.
    found, tiles = [], DISK_BYTES * TILE_ELEMS * TILES  # bytes that as many full-size tiles would move
    for row in rows:
        wakes = cpu(row["wake-ups"], tiles)
        parts = {
            "fetch, verify": cpu(row["verify"], row["bytes"]) - wakes,
            "update": 1e9 / DISK_BYTES / statistics.median(chunk["update_per_cpu_s"]),
            "sum": 1e9 / 2 / statistics.median(chunk["sum_per_cpu_s"]),  # half of the bytes moved are written
            "wake-ups": wakes,
        }
        whole = runs(row["engine"], row["bytes"])
        found.append({"what": f"{row['threads']} thread(s)", "parts": parts, "measured": whole})
    # From the requests without the update: the time to verify the tiles (user) and that of the kernel (system). Both
    # include wake-ups.
    parts = dict(found[-1]["parts"])
    for part, kind in (("fetch, verify", "user"), ("I/O calls", "system")):
        parts[part] = cpu(disk["requests"], disk["bytes"], kind) - cpu(rows[-1]["wake-ups"], tiles, kind)
    found.append({"what": "on the disk", "parts": parts, "measured": runs(disk["step"], disk["bytes"])})
    for entry in found:
        entry["together"] = sum(entry["parts"].values())
        entry["ratio"] = entry["together"] / statistics.median(entry["measured"])
    return found


def reckoned(per_gb: list[Row], row: Row) -> list[Row]:
    """Calculate how many cores like these, and how much memory bandwidth, drives of DRIVE_RATE keep busy.

    The last row says what CORES cores can do.
    """
    *_, engine, disk = per_gb  # with all threads; all from memory, even if few drives' buffers stay in a cache
    second, memory = engine["together"] + disk["parts"]["I/O calls"], statistics.median(row["memory"]["bytes_per_s"])
    rates = [(f"{n} drives", n * DRIVE_RATE) for n in DRIVES] + [(f"{CORES} cores", CORES / second * 1e9)]
    return [
        {
            "what": what,
            "bytes_per_s": rate,
            "params_per_s": rate / DISK_BYTES,
            "cores": rate / 1e9 * second,
            "memory_bytes_per_s": TRAFFIC * rate / DISK_BYTES,
            "times_this_memory": TRAFFIC * rate / DISK_BYTES / memory,
        }
        for what, rate in rates
    ]


def describe(found: Row) -> str:
    """Return the whole result as text: medians (least to most)."""
    chunk = {what: [r / 1e9 for r in rates] for what, rates in found["chunk"].items()}
    lines = [
        f"\nin the second-level cache, one thread, per CPU second: CRC-32C {span(chunk['sum_per_cpu_s'], 1)} GB, "
        f"update {span(chunk['update_per_cpu_s'], 2)} G parameters"
    ]
    for row in found["codec"]:
        coded, plain = ([r / 1e6 for r in row[f"{states}_per_cpu_s"]] for states in ("8bit", "fp32"))
        lines.append(
            f"in memory, one thread, {row['isa']}, per CPU second: 8-bit states {span(coded, 0)} M parameters, "
            f"fp32 states {span(plain, 0)} M; {span(row['ratio'], 2)} of that"
        )
    for row in found["rows"]:
        rate = span([row["params"] / s / 1e6 for s in row["engine"]["seconds"]], 0)
        memory = span([r / 1e9 for r in row["memory"]["bytes_per_s"]], 1)
        lines.append(
            f"{row['threads']} thread(s): {rate} Mparam/s verified, updated, summed; "
            f"{span(row['engine']['ratio_to_memory'], 2)} of memory read and written back in place, {memory} GB/s"
        )
    disk = found["disk"]
    rate = span([disk["bytes"] / s / 1e9 for s in disk["step"]["seconds"]], 2)
    lines.append(f"on the disk: {rate} GB/s, {span(disk['ratio'], 2)} of the same requests without the update")
    lines.append("\nCPU ms per GB moved to or from drives")
    for entry in found["per_gb"]:
        parts = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in entry["parts"].items())
        rate = span([1e3 / DISK_BYTES / s for s in entry["measured"]], 0)
        lines.append(
            f"    {entry['what']}: {parts}; together {1e3 * entry['together']:.1f}, {entry['ratio']:.2f} of what was "
            f"measured: {span([1e3 * s for s in entry['measured']], 1)}, {rate} Mparam per CPU second"
        )
    lines.append(f"\ncalculated, not measured: drives of {DRIVE_RATE / 1e9:.0f} GB/s, cores and memory like these")
    lines += [
        f"    {r['what']}: {r['bytes_per_s'] / 1e9:.0f} GB/s, {r['params_per_s'] / 1e9:.2f} Gparam/s: "
        f"{r['cores']:.1f} cores, {r['memory_bytes_per_s'] / 1e9:.0f} GB/s of memory "
        f"({r['times_this_memory']:.1f} times what all threads here get)"
        for r in found["reckoned"]
    ]
    return "\n".join(lines)


def plot(entries: list[Row], facts: Row, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 0.6 * len(entries) + 1.4), layout="constrained")
    names, left = [e["what"] for e in entries], np.zeros(len(entries))
    for part in entries[-1]["parts"]:
        widths = np.array([1e3 * e["parts"].get(part, 0) for e in entries])
        axis.barh(names, widths, left=left, label=part)
        left += widths
    axis.plot([1e3 * statistics.median(e["measured"]) for e in entries], names, "kD", label="measured")
    axis.invert_yaxis()
    axis.set_xlabel("CPU milliseconds per GB moved to or from drives")
    axis.legend(fontsize="small", ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1))
    figure.suptitle(f"{facts['cpu']}, {facts['cores']} cores, {facts['date'][:10]}", fontsize="medium")
    figure.savefig(path, dpi=120)


def parse() -> argparse.Namespace:
    cores = bindings.threads_used()
    every = sorted({2**i for i in range(cores.bit_length()) if 2**i <= cores} | {cores})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1e8, help="number of parameters (default 1e8)")
    parser.add_argument("--runs", type=int, default=7, help="timed steps, at least 5")
    parser.add_argument("--threads", type=int, nargs="+", default=every, help="that update (default 1, 2, 4 ... all)")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="on a disk with direct I/O")
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="bf16", help="of parameters and gradients")
    parser.add_argument("--quick", action="store_true", help="3 M parameters, less memory, all threads only")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    parser.add_argument("--plot", type=Path, help="write a PNG")
    arguments = parser.parse_args()
    arguments.memory = LITTLE_MEMORY if arguments.quick else MEMORY
    arguments.coded = FEW_CODED_ELEMS if arguments.quick else CODED_ELEMS
    if arguments.quick:
        arguments.params, arguments.threads = 3e6, [cores]
    arguments.params, arguments.runs = int(arguments.params), max(5, arguments.runs)
    return arguments


if __name__ == "__main__":
    main()
