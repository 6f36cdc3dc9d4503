"""What only a GPU can answer, the most wanted first. From the project's root, or from an archive (docs/gpu-check.md):

    make gpu-check MINUTES=10
    python -m bench.gpu_questions --minutes 10 --only exact,rates
    python -m bench.gpu_questions --emulated --params 2e5      on the tests' emulated accelerator, to see that it works

Each part is a process of its own and prints one line of JSON, {"part": ..., "seconds": ...}; errors are in it, and the
next part runs. A part ends when the time is up.

    environment  what is here
    checks       what the checks of a device at its first use find: kernels for updates, for 8-bit codes, for Top-K
    exact        do the kernels have the CPU's bits, also where processors flush subnormal numbers differently?
    rates        kernels, and torch's fused AdamW, with a copy on the device; steps on `gpu:`
    topk         selection and feedback, with a copy and torch.topk
    staging      steps on `ram:` with parameters on the device and on the host, by the number of staging buffers
    nccl         one rank: DDP and FSDP2 train the same as without them
    sanitizer    compute-sanitizer on `checks`, if it is installed
    overlap      bench.overlap by the size of tiles, and where backward=True spends its time
    tests        tests of kernels and of the order of accesses (tests/accelerator/)
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import importlib
import io
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench import accelerator, overlap
from bench.accelerator import by_turns, optimizer_on, selection_rows
from csd_optim import CSDAdam, CSDUnavailableError, bindings
from csd_optim.accelerator import accelerator_type
from csd_optim.bindings import RULES, lib
from csd_optim.compression.kernel_check import topk_kernels_of
from csd_optim.engine.placing.codes_check import objection_to_codes
from csd_optim.engine.placing.engine_rate import ADAMW_STEP
from csd_optim.kernels.device_check import RULE, WAYS, kernels_of
from csd_optim.kernels.library import KernelLibrary, library_of
from csd_optim.kernels.update import RULE_DEFINES, SOURCE, UpdateRow, in_launches, launch_update
from csd_optim.overlap import early_images
from csd_optim.step import staging as ring

Row = dict[str, Any]
LEAST_SECONDS = 15  # no part begins with less
SANITIZER_SECONDS = 60  # for each of its tools
BF16 = torch.bfloat16
UPDATE_BYTES = 28  # per parameter: gradient and parameter in bf16, three states read and written
GOALS = {"kernels": 0.67, "selection": 0.27, "ram:": 0.85}  # of a copy on the device; of host parameters
PAIRS = 16  # products in each of the intervals of tests/support/floats.py
COMMIT = Path("COMMIT")  # in an archive
SMALL = (4096, 1000)  # parameters, and elements of each


def helper(name: str) -> Any:
    """Return a module of tests/support/."""
    return importlib.import_module(f"tests.support.{name}")


def attempt(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or its error as a row: what follows is worth as much."""
    try:
        return call()
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"[:400]}


def kernels_on(device: torch.device) -> KernelLibrary | None:
    """Return the kernels of a device, whatever its check finds; None if it can have none."""
    with contextlib.suppress(CSDUnavailableError):
        return library_of(device)
    return None


def rounded(x: float) -> float:
    return float(f"{x:.4g}")


def rates_of(runs: int, n: int, calls: Mapping[str, tuple[int, Callable[[], Any]]]) -> Row:
    """Time what is done to n elements, by turns. `calls`: by name, bytes per element and a call; one is "copy"."""
    turns = by_turns(runs, *(call for _, call in calls.values()))
    seconds = dict(zip(calls, map(statistics.median, turns), strict=True))
    speed = {name: nbytes * n / seconds[name] for name, (nbytes, _) in calls.items()}
    return {
        name: {"ms": rounded(1e3 * s), "G/s": rounded(n / s / 1e9), "of a copy": rounded(speed[name] / speed["copy"])}
        | {"ms, least to most": [rounded(1e3 * min(turn)), rounded(1e3 * max(turn))]}
        for (name, s), turn in zip(seconds.items(), turns, strict=True)
    }


# ---- what is here ------------------------------------------------------------------------------


def environment(how: argparse.Namespace) -> Row:
    facts = {"python": platform.python_version(), "torch": torch.__version__}
    facts["commit"] = COMMIT.read_text().strip() if COMMIT.exists() else None
    facts |= {"device": accelerator.name_of(how.device), "cuda": torch.version.cuda, "hip": torch.version.hip}
    facts |= {"cores": os.cpu_count(), "threads": bindings.threads_used(), "isa": bindings.isa_used()}
    if shutil.which("nvidia-smi"):
        asked = "--query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current"
        answer = subprocess.run(["nvidia-smi", asked, "--format=csv,noheader"], capture_output=True, text=True)
        facts["driver"] = answer.stdout.strip()
    return facts


def checks(how: argparse.Namespace) -> Row:
    report = kernels_of(how.device).report
    return {
        "update": report,
        "codes": objection_to_codes(how.device) or "same",
        "topk": bool(topk_kernels_of(how.device)),
    }


# ---- bits --------------------------------------------------------------------------------------


def exact(how: argparse.Namespace) -> Row:
    rules, library = helper("rule_cases"), kernels_on(how.device)
    if library is None:
        return {"report": kernels_of(how.device).report}
    began = time.perf_counter()
    for defines in WAYS.values():
        library.module(SOURCE, (*RULE_DEFINES[RULES[RULE]], *defines))
    compiled = time.perf_counter()
    found: Row = {"report": kernels_of(how.device).report}
    found["compile s"], found["check s"] = rounded(compiled - began), rounded(time.perf_counter() - compiled)
    adamw = next(row for row in rules.ROWS if row.name == "adamw")
    cases = [*rules.edge_rows(adamw, range(1))]  # in this order
    zones = {"products that x86 flushes": cases[:PAIRS], "products that x86 rounds up": cases[PAIRS : 2 * PAIRS]}
    zones |= {"products of states": cases[2 * PAIRS : -1], "quotient": cases[-1:]}
    for way, defines in WAYS.items():
        wrong = {name: rules.differing(library, defines, adamw, some)[0] for name, some in zones.items()}
        found[way] = {"wrong at the edge": wrong} | differing_rules(library, defines, how.values)
    return found


def differing_rules(library: KernelLibrary, defines: tuple[str, ...], values: int) -> Row:
    """Compare every rule with the native engine in so many values."""
    rules, total, wrong = helper("rule_cases"), 0, {}
    for row in rules.ROWS:
        generator, compared = torch.Generator().manual_seed(len(row.name)), 0
        while compared < values:
            sizes = rules.SIZES if compared == 0 else [100_003, 65_536, 7]
            cases = [*rules.edge_rows(row, range(1)), *rules.random_rows(row, generator, sizes)]
            differs, more = rules.differing(library, defines, row, cases)
            compared += more
            wrong[row.name] = wrong.get(row.name, 0) + differs
        total += compared
    return {"compared": total, "tensors that differ": {name: n for name, n in wrong.items() if n}}


# ---- rates -------------------------------------------------------------------------------------


def rates(how: argparse.Namespace) -> Row:
    found = rates_of_updates(how) | {"goal of kernels": GOALS["kernels"]}
    found["steps"] = {devices: attempt(lambda d=devices: near(how, d.split())) for devices in ("gpu:", "gpu: ram:")}
    return found


def rates_of_updates(how: argparse.Namespace) -> Row:
    device, n, rule = how.device, how.params, ADAMW_STEP[0]
    states = [torch.rand(n, device=device) + 0.1 for _ in range(3)]
    grad, param = (torch.randn(n, device=device).to(BF16) for _ in range(2))
    row = UpdateRow(grad, BF16, states, param, ADAMW_STEP[1])
    nonfinite, library = torch.zeros((), dtype=torch.int64, device=device), kernels_on(device)
    calls = {"copy": (8, lambda: states[1].copy_(states[2]))}
    for way, defines in WAYS.items() if library else ():
        calls[f"kernels, {way}"] = UPDATE_BYTES, lambda d=defines: launch_update(library, rule, [row], nonfinite, d)
    p = nn.Parameter(states[0].clone())
    p.grad = states[1]
    fused = attempt(lambda: torch.optim.AdamW([p], lr=1e-3, fused=True))
    if isinstance(fused, torch.optim.Optimizer):
        calls["torch.optim.AdamW(fused=True), fp32"] = UPDATE_BYTES, fused.step  # a gradient and three states in fp32
    found = rates_of(how.runs, n, calls)
    if library:
        found["small parameters"] = attempt(lambda: small_parameters(library, grad, states, nonfinite))
    return found


def small_parameters(
    library: KernelLibrary, grad: torch.Tensor, states: list[torch.Tensor], nonfinite: torch.Tensor
) -> Row:
    """Time an update of many small parameters, which the host has to list for the kernels."""
    count = min(SMALL[0], len(grad) // 64)
    n = min(SMALL[1], len(grad) // count)
    parts = [[t[i * n : (i + 1) * n] for t in (grad, *states)] for i in range(count)]
    rows = [UpdateRow(g, BF16, of, None, ADAMW_STEP[1]) for g, *of in parts]
    before = library.launches
    [seconds] = by_turns(
        5, lambda: [launch_update(library, ADAMW_STEP[0], some, nonfinite, ()) for some in in_launches(rows)]
    )
    launches = (library.launches - before) // (5 + accelerator.WARM_UP)
    return {"parameters": count, "launches": launches, "ms": rounded(1e3 * statistics.median(seconds))}


def near(how: argparse.Namespace, devices: list[str]) -> Row:
    """Time steps with states on the accelerator, and beside them in host memory."""
    with optimizer_on(how.device, how.params, devices, None) as opt:
        [seconds] = by_turns(how.runs, lambda: (opt.step(), opt.stats()))
        kernels = [device.get("kernels") for device in opt.stats()["devices"]]
        return {"G/s": rounded(how.params / statistics.median(seconds) / 1e9), "kernels": kernels}


def topk(how: argparse.Namespace) -> Row:
    rows = selection_rows(how.device, how)
    return {"goal": GOALS["selection"]} | {
        row["what"]: {"G/s": rounded(statistics.median(row["rates"]) / 1e9)}
        | {f"of {name}": rounded(statistics.median(ratios)) for name, ratios in row["ratio_to"].items()}
        for row in rows
    }


# ---- steps -------------------------------------------------------------------------------------


def staging(how: argparse.Namespace) -> Row:
    found: Row = {"goal": GOALS["ram:"], "threads": bindings.threads_used()}
    with optimizer_on("cpu", how.params, "ram:", None) as host:
        with optimizer_on(how.device, how.params, "ram:", None) as there:
            for most in (0, 4, 16, 64):  # the ring of buffers only grows
                ring.MOST_FOR_THREADS = most
                found[f"up to {most} buffers for threads"] = attempt(lambda: beside(how, there, host))
        ring.MOST_FOR_THREADS = 16
        with optimizer_on(how.device, how.params, "ram:", 0.01) as sparse:
            found["Top-K 1 %, of dense host parameters"] = attempt(lambda: beside(how, sparse, host))
    return found


def beside(how: argparse.Namespace, opt: CSDAdam, host: CSDAdam) -> Row:
    turns = by_turns(how.runs, *(lambda o=o: (o.step(), o.stats()) for o in (opt, host)))
    ours, theirs = map(statistics.median, turns)
    ratios = sorted(host / own for own, host in zip(*turns, strict=True))
    return {
        "G/s": rounded(how.params / ours / 1e9),
        "of host parameters": rounded(theirs / ours),
        "least to most": [rounded(ratios[0]), rounded(ratios[-1])],
        "buffers MB": rounded((opt.stats()["buffer_bytes"]) / 1e6),
        "tiles updated at once": updated_at_once(opt),
    }


def updated_at_once(opt: CSDAdam) -> float:
    """Return how many tiles a step updates at the same time, on average, by the engine's own events."""
    native = helper("inside").engine_of(opt).native
    native.events()  # from now on they are recorded
    opt.step()
    opt.stats()
    updates = native.events()
    updates = updates[updates["kind"] == lib.CSD_UPDATE]
    seconds = updates["end"].max() - updates["begin"].min()
    return rounded(float((updates["end"] - updates["begin"]).sum() / seconds))


# ---- ranks -------------------------------------------------------------------------------------


def nccl(how: argparse.Namespace) -> Row:
    backend = "gloo" if how.emulated else "nccl"
    device = torch.device("cpu") if how.emulated else how.device
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=0, world_size=1)
        found = {
            devices: {kind: attempt(lambda k=kind, d=devices: trained(k, d, device)) for kind in WRAPPED}
            for devices in ("ram:", *(["gpu:"] if how.device else []))
        }
        dist.destroy_process_group()
    same = {devices: {kind: sums == of["plain"] for kind, sums in of.items()} for devices, of in found.items()}
    errors = {f"{kind} {d}": row for d, of in found.items() for kind, row in of.items() if isinstance(row, dict)}
    return {"backend": backend, "same as plain": same} | errors


def in_fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard  # takes seconds

    return fully_shard(model)


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": nn.parallel.DistributedDataParallel,
    "fsdp2": in_fsdp2,
}


def trained(kind: str, devices: str, device: torch.device) -> list[float]:
    """Return the sums of a model's parameters after three steps."""
    torch.manual_seed(0)
    model = WRAPPED[kind](nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).to(device))
    with CSDAdam(model.parameters(), lr=1e-3, devices=devices) as opt:
        for step in range(3):
            x = torch.randn(8, 256, generator=torch.Generator().manual_seed(step)).to(device)
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
        wholes = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
        return [whole.detach().cpu().double().sum().item() for whole in wholes]


# ---- other programs ------------------------------------------------------------------------------


def tests(how: argparse.Namespace) -> Row:
    chosen = "kernels or device_check or dense or lifetimes"
    command = [sys.executable, "-m", "pytest", "tests/accelerator", "--accelerator", "-q", "-k", chosen]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"exit": done.returncode, "said": lines[-1:] or done.stderr[-400:], "failed": failed[:20]}


def sanitizer(how: argparse.Namespace) -> Row:
    tool = shutil.which("compute-sanitizer")
    if not tool:
        return {"skipped": "compute-sanitizer is not installed"}
    found = {}
    for kind in ("memcheck", "racecheck"):
        command = [tool, "--tool", kind, "--error-exitcode", "9", *this_program("checks", how)]
        found[kind] = attempt(lambda c=command: said_by(c, SANITIZER_SECONDS))
    return found


def said_by(command: list[str], seconds: float) -> Row:
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    return {"exit": done.returncode, "said": (done.stdout + done.stderr)[-400:]}


def overlapped(how: argparse.Namespace) -> Row:
    found = {}
    for tile in (1 << 16, 1 << 19):
        overlap.TILE = tile
        options = ["--accelerator", *(["--quick"] if how.emulated else ["--params=25e6", "--rate=1GB/s"])]
        sys.argv = ["overlap", *options, "--times=1", f"--directory={how.directory}", "--json"]
        with spent() as seconds, contextlib.redirect_stdout(io.StringIO()) as said:
            overlap.main()
        rows = {
            row["mode"]: [rounded(statistics.median(row[key])) for key in ("seconds", "step_seconds")]
            for row in json.loads(said.getvalue())["rows"]
        }
        found[f"tiles of {tile}"] = {"s, s in step()": rows, "calls, us each": dict(seconds)}
    return found


@contextlib.contextmanager
def spent() -> Iterator[Row]:
    """Measure what copies tiles in backward: by function, the number of calls and microseconds per call."""
    found: Row = collections.defaultdict(lambda: [0, 0.0])
    with contextlib.ExitStack() as stack:
        for owner, name in (
            *((early_images.EarlyImages, name) for name in ("push", "_push_when_copied", "unchanged")),
            *((ring.StagingRing, name) for name in ("fill", "equal", "run", "begin_empty")),
            (ring.StagingBuffer, "wait"),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, timed_method(getattr(owner, name), found[name]))
        yield found
    for entry in found.values():
        entry[1] = rounded(1e6 * entry[1] / max(entry[0], 1))


def timed_method(function: Callable[..., Any], entry: list[float]) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            entry[0] += 1
            entry[1] += time.perf_counter() - began

    return timed


# ---- all parts -----------------------------------------------------------------------------------

PARTS: dict[str, Callable[[argparse.Namespace], Row]] = {
    "environment": environment,
    "checks": checks,
    "exact": exact,
    "rates": rates,
    "topk": topk,
    "staging": staging,
    "nccl": nccl,
    "sanitizer": sanitizer,
    "overlap": overlapped,
    "tests": tests,
}


def this_program(part: str, how: argparse.Namespace) -> list[str]:
    options = [f"--params={how.params}", f"--values={how.values}", *(["--emulated"] if how.emulated else [])]
    return [sys.executable, "-m", "bench.gpu_questions", "--part", part, *options]


def in_own_process(part: str, how: argparse.Namespace, seconds: float) -> Row:
    """Run a part for at most so many seconds, in a process group that is ended then."""
    with subprocess.Popen(
        this_program(part, how), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            return {"error": f"not done in {seconds:.3g} s", "said": err[-400:]}
    try:
        return json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": f"exit status {process.returncode}", "said": err[-1000:]}


def main() -> None:
    how = parse()
    if how.part:
        print(json.dumps(PARTS[how.part](how)))
        return
    began, failed = time.monotonic(), False
    for part in how.only.split(","):
        left, start = 60 * how.minutes - (time.monotonic() - began), time.monotonic()
        row = in_own_process(part, how, left) if left > LEAST_SECONDS else {"skipped": "the time is up"}
        failed |= "error" in row
        print(json.dumps({"part": part, "seconds": rounded(time.monotonic() - start), **row}), flush=True)
    sys.exit(failed)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="for all parts together")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--params", type=float, default=2**28, help="parameters of steps")
    parser.add_argument("--values", type=float, default=2e6, help="compared for each rule")
    parser.add_argument("--emulated", action="store_true", help="on the tests' emulated accelerator")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    how = parser.parse_args()
    if unknown := {*how.only.split(",")} - {*PARTS}:
        parser.error(f"no part {', '.join(sorted(unknown))}")
    how.params, how.values, how.runs = int(how.params), int(how.values), 5
    how.tile = min(accelerator.TILE, how.params)
    how.directory = Path("build/bench")
    how.directory.mkdir(parents=True, exist_ok=True)
    if how.emulated and how.part and how.part != "nccl":  # its process groups have no such device
        emulated = helper("emulated")
        emulated.load()
        emulated.set_schedule("at once")
    if not how.emulated and not accelerator_type():
        parser.error(f"torch {torch.__version__} has no accelerator here: see docs/gpu-check.md")
    has_device = how.part and accelerator_type()
    how.device = torch.device(accelerator_type(), torch.accelerator.current_device_index()) if has_device else None
    return how


if __name__ == "__main__":
    main()
