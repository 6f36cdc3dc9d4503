"""Trains a model that does not fit into memory: a Llama of 1.5 B parameters, from Hugging Face's code, in 12 GB. From
the project's root:

    python -m bench.big                       what `make demo-big` does
    python -m bench.big --quick               a tiny model, to see that it works

Four trainings, one after another, each in a process of its own that is limited to 12 GB (see bench/limit.py):

    AdamW      torch.optim.AdamW on the 16-bit parameters, the least memory that AdamW can need: it runs out of memory
    CSDAdam    with 8-bit states in a directory, and overlap(model, free_gradients=True): trains to the end
    killed     the same, with kill -9 in the middle of a step
    resumed    the same script, started again: it continues from the last committed step

Weights are random, nothing is downloaded, and the text is the Python standard library's own source. Figures go to
memory.png and big.json in --directory; everything large is removed at the end, whatever happens.

The parameters that the resumed process begins with must be those of the killed one, to the last bit. Its losses are the
same, too, if torch computes the forward with the same bits in each process. Its matrix products do not always, even in
the first step; then losses may differ by CLOSE, and the output says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from bench.big_shown import Run, apart, conclusion, parts_table, plot, runs_table
from bench.demo import RATED, batch, megabytes, standard_library
from bench.demo import Size as TextSize
from bench.limit import limit_memory
from bench.step import machine_facts
from csd_optim import CSDAdam
from csd_optim.devices import machine
from csd_optim.devices.units import parse_bytes

Event = dict[str, Any]
Send = Callable[[Event], None]
OUT = Path("build/demo-big")
SPACE = 11  # bytes of the drive per parameter: 8-bit states in two copies, and a little more
WRITTEN = 5.016  # bytes per parameter and step
LR = 1e-5
CLOSE = 0.1  # nats per byte
BATCHES = 2  # used over and over, so that the loss falls within a few steps
TEXT = 4_000_000  # bytes of source that are read


@dataclass(frozen=True)
class Size:
    """The size of the model, and of the training."""

    width: int
    layers: int
    context: int  # bytes of text in a step
    steps: int
    kill_in: int  # the step in which a process is killed


FULL_SIZE = Size(2048, 23, 32, 8, 4)
QUICK = Size(512, 4, 16, 3, 2)
TITLES = {
    "AdamW": "torch.optim.AdamW on the 16-bit parameters themselves, the least memory that it can need",
    "CSDAdam": "CSDAdam, 8-bit states on the drive, gradients freed in backward",
    "killed": "the same once more, killed in the middle of a step",
    "resumed": "the same script, started again",
}


# ---- in the process that trains ------------------------------------------------------


def config_of(size: Size) -> LlamaConfig:
    """Return the configuration of a Llama whose tokens are bytes."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.width // 128,
        max_position_embeddings=size.context,
        tie_word_embeddings=False,
        use_cache=False,
    )


def train(pipe: Connection, name: str, size: Size, directory: Path, limit: int) -> None:
    """Train, and report every event through `pipe`.

    `limit`: the process's memory limit in bytes; if negative, its absolute value is added to what it uses now.
    """
    lock = threading.Lock()

    def send(event: Event) -> None:
        try:
            with lock:
                pipe.send(event)
        except OSError:  # the watching process has closed the pipe
            os._exit(1)

    try:
        how, group = limit_memory(limit if limit > 0 else proc_bytes("VmData") - limit)
        send({"limit": how, "group": group, "base": proc_bytes("VmRSS")})
        adamw: list[torch.optim.Optimizer] = []
        threading.Thread(target=watch_memory, args=(send, adamw), daemon=True).start()
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16)
        optimizer: Any
        if name == "AdamW":
            optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
            adamw.append(optimizer)
        else:
            resume = name == "resumed"
            optimizer = CSDAdam(
                model.parameters(), lr=LR, weight_decay=0.1, devices=[directory], state_dtype="8bit", resume=resume
            )
            optimizer.overlap(model, free_gradients=True)
        kill_in = size.kill_in if name == "killed" else None
        steps(send, model, optimizer, size, kill_in)
        if isinstance(optimizer, CSDAdam):
            send({"stats": optimizer.stats()})
            optimizer.close()
    except Exception as e:
        send({"failed": f"{type(e).__name__}: {str(e).strip().splitlines()[-1]}"})
        os._exit(1)  # exit at once: other threads still wait for memory that never becomes free


def steps(send: Send, model: torch.nn.Module, optimizer: Any, size: Size, kill_in: int | None) -> None:
    params = [*model.parameters()]
    half = params[len(params) // 2]
    text, _, _ = standard_library(TEXT)
    window = TextSize(size.width, size.layers, 1, size.context, 1, size.steps, 0, 0, TEXT, LR)
    for step in range(getattr(optimizer, "committed_step", 0) + 1, size.steps + 1):
        tokens, _ = batch(text, window, torch.Generator().manual_seed(step % BATCHES))
        marks = [time.perf_counter()]
        loss = model(input_ids=tokens, labels=tokens).loss
        marks.append(time.perf_counter())
        send({"step": step, "loss": loss.item()})
        if step == size.kill_in:  # both the killed and the resumed process have the same parameters here
            send({"checksum": checksum(params)})
        if step == kill_in:  # kill in the middle of backward: half of the gradients are there or already freed
            half.register_post_accumulate_grad_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        loss.backward()
        marks.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.perf_counter())
        seconds = [end - begin for begin, end in itertools.pairwise(marks)]
        send({"seconds": dict(zip(("forward", "backward", "step"), seconds, strict=True))})


def checksum(params: list[torch.nn.Parameter]) -> int:
    total = 0
    for p in params:
        total = zlib.crc32(p.detach().view(torch.uint8).numpy().data, total)  # type: ignore[arg-type]
    return total


def watch_memory(send: Send, adamw: list[torch.optim.Optimizer]) -> None:
    """Report memory ten times a second. AdamW's states grow in its first step; CSDAdam's buffers exist before."""
    while True:
        states = [t for opt in adamw for entry in [*opt.state.values()] for t in [*entry.values()]]
        send({"at": time.monotonic(), "resident": proc_bytes("VmRSS"), "states": sum(t.nbytes for t in states)})
        time.sleep(0.1)


def proc_bytes(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field + ":")).split()[1]) << 10


# ---- in the process that watches -----------------------------------------------------


def watched(name: str, size: Size, directory: Path, limit: int, began: float, say: Callable[[str], None]) -> Run:
    """Run one training in a process and collect its reports. Times count from `began`, of time.monotonic()."""
    processes = multiprocessing.get_context("fork")  # forked, so that torch and transformers are imported only once
    mine, theirs = processes.Pipe(duplex=False)
    child = processes.Process(target=train, args=(theirs, name, size, directory, limit), daemon=True)
    run = Run(name, time.monotonic() - began)
    child.start()
    theirs.close()
    group = None
    try:
        while True:
            try:
                event = mine.recv()
            except EOFError:
                break
            if "at" in event:
                run.memory.append({**event, "at": event["at"] - began})
            elif "loss" in event:
                if name == "resumed" and not run.losses:
                    say(f"  continues with step {event['step']}")
                run.losses[event["step"]] = event["loss"]
            elif "checksum" in event:
                run.checksum = event["checksum"]
            elif "seconds" in event:
                run.seconds.append(event["seconds"])
                say(describe_step(run, size))
            elif "stats" in event:
                run.stats = event["stats"]
            elif "failed" in event:
                run.ending = event["failed"]
            else:
                run.facts, group = event, event["group"]
        child.join()
    finally:
        child.kill()
        child.join()
        if group:
            group.rmdir()
    run.ended = time.monotonic() - began
    if name == "killed" and child.exitcode == -signal.SIGKILL:
        run.ending = f"kill -9 in the middle of step {max(run.losses)}"
        say(f"  {run.ending}")
    if child.exitcode and not run.ending:
        killed = child.exitcode == -signal.SIGKILL
        run.ending = "killed by the kernel, which is out of memory" if killed else f"exit status {child.exitcode}"
    return run


def describe_step(run: Run, size: Size) -> str:
    step, seconds = max(run.losses), run.seconds[-1]
    parts = ", ".join(f"{part} {s:.1f} s" for part, s in seconds.items())
    resident = run.memory[-1]["resident"] if run.memory else 0.0
    return f"  step {step:2} of {size.steps}  loss {run.losses[step]:.4f}  {parts}; {megabytes(resident)} resident"


def check(runs: dict[str, Run], size: Size) -> None:
    """Raise SystemExit unless everything happened that the output is going to claim."""
    adamw, killed, resumed = (runs[name] for name in ("AdamW", "killed", "resumed"))
    if not (adamw.losses and ("memory" in adamw.ending or "kernel" in adamw.ending)):  # it failed for another reason
        raise SystemExit(f"AdamW did not run out of memory in its first step: {adamw.ending or 'it did not fail'}")
    if not killed.ending or min(resumed.losses) != size.kill_in:
        raise SystemExit(f"killed in step {max(killed.losses)}, resumed at {min(resumed.losses)}")
    if killed.checksum is None or killed.checksum != resumed.checksum:
        raise SystemExit("the resumed process did not begin with the parameters of the killed one")
    if max(resumed.losses) != size.steps or apart(runs) > CLOSE:
        raise SystemExit(f"the losses differ from those of the training without a kill by {apart(runs)}")


def main() -> None:
    arguments = parse()
    size = QUICK if arguments.quick else FULL_SIZE
    out = sys.stderr if arguments.json else sys.stdout
    console = Console(file=out, highlight=False, width=None if out.isatty() else 100)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    with torch.device("meta"):
        params = sum(p.numel() for p in AutoModelForCausalLM.from_config(config_of(size)).parameters())
    limit, space = arguments.limit, SPACE * params
    if arguments.directory.exists() and not arguments.directory.is_dir():
        raise SystemExit(f"--directory {arguments.directory} is no directory")
    arguments.directory.mkdir(parents=True, exist_ok=True)
    facts = {**machine_facts(), "storage": machine.storage(arguments.directory)}
    say(f"csd_optim: a Llama of {params / 1e9:.2f} B parameters, trained in {megabytes(limit)} of memory")
    say(f"  machine  {facts['cpu']}, {facts['cores']} cores; torch {facts['torch']}")
    say(f"  takes    5 to 10 minutes on 2 cores with a drive of 2 GB/s, and {megabytes(limit)} of memory")
    say(f"           {megabytes(space)} in {arguments.directory}, gone at the end; no network")
    say(f"           {megabytes(WRITTEN * params * 2 * size.steps)} will be written to the drive: that is its wear\n")
    if facts["storage"]["free_bytes"] < space:
        raise SystemExit(f"{megabytes(facts['storage']['free_bytes'])} are free there: name another --directory")
    if not arguments.quick and machine.available_memory() < limit:
        raise SystemExit(f"{megabytes(machine.available_memory())} of memory are free: close something first")
    logging.set_verbosity_error()
    stores = arguments.directory / f"states-{os.getpid()}"
    began, runs = time.monotonic(), dict[str, Run]()
    try:
        for name in ("AdamW", "CSDAdam", "killed", "resumed"):
            say(TITLES[name])
            # Per parameter 2 B each for parameter, gradient and one moment, and only half of the other moment's 2 B.
            most = -7 * params if arguments.quick and name == "AdamW" else limit
            runs[name] = run = watched(name, size, stores, most, began, say)
            if name == "AdamW":
                say(f"  limited by {run.facts['limit']}\n  loss {run.losses.get(1)}; then {run.ending}")
            elif run.ending and name != "killed":
                raise SystemExit(f"{name}: {run.ending}")
            if name == "CSDAdam":
                shutil.rmtree(stores, ignore_errors=True)  # the next training starts from scratch
    finally:
        shutil.rmtree(stores, ignore_errors=True)
    check(runs, size)
    for run in runs.values():  # what CSDAdam keeps of its states in memory is its buffers
        for m in run.memory:
            m["states"] = m["states"] or (0 if run.name == "AdamW" else runs["CSDAdam"].stats["buffer_bytes"])
    png = arguments.directory / "memory.png"
    plot(runs, params, limit, png)
    for table in (runs_table(runs), parts_table(runs["CSDAdam"], params)):
        console.print()
        console.print(table)
    console.print(conclusion(runs, params, limit, time.monotonic() - began))
    say(f"\n  plot  {png}")
    result = {
        "schema": "csd_optim.bench.big/1",
        "machine": facts,
        "size": asdict(size),
        "params": params,
        "limit_bytes": limit,
        "rated_bytes": RATED,
        "runs": {name: asdict(run) for name, run in runs.items()},
    }
    (arguments.directory / "big.json").write_text(json.dumps(result, default=str))
    if arguments.json:
        print(json.dumps(result, default=str))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=OUT, help=f"where states, plot and figures go ({OUT})")
    parser.add_argument("--limit", type=parse_bytes, default="12GB", help="memory of each process (12GB)")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    return parser.parse_args()


if __name__ == "__main__":
    main()
