"""Goodput while trainers are killed: `python -m bench.studies.optimizer_ranks --kills`.

Intervals between kills are exponentially distributed, counted in steps, and the same for all ways. One trainer is
killed, the others with it, as torchrun does, and all restart at once: AdamW from its last checkpoint, which one trainer
writes every K steps; CSDAdam, with drives in the trainers or with owners, where it was. New trainers are forked from a
process that has imported torch; real ones take seconds longer, the same for all ways.

Goodput is the time that the steps would take undisturbed, divided by the time that they took. CSDAdam must end with the
parameters of as many steps in one process, to the last bit, or nothing is reported.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.step import say
from bench.studies.paced_network import Network
from bench.studies.ranks_training import (
    Trainer,
    checksum,
    drive_strings,
    owners,
    places_of,
    processes,
    reference,
    settle,
)

Row = dict[str, Any]


def measure(arguments: argparse.Namespace, network: Network | None, directory: Path) -> list[Row]:
    trainers = [f"trainer{k}" for k in range(arguments.trainers)]
    places, at_owners = places_of(network, trainers), places_of(network, [f"owner{k}" for k in range(arguments.owners)])
    rows = []
    for every in arguments.every:
        row = {"way": "adamw", "every": every}
        rows.append(survived(row, arguments, directory / f"adamw{every}", places, [None] * len(places)))
    here = [drive_strings(directory / f"drives/{name}", arguments.device, 1) for name in trainers]
    rows.append(survived({"way": "local"}, arguments, directory / "local", places, here))
    host = network.address("owner0") if network else "127.0.0.1"
    for route in arguments.routes:
        with owners(directory / f"owners-{route}", at_owners, arguments.device, 1, host) as address:
            there = address if route == "kept" else f"{address}&route={route}"
            rows.append(survived({"way": route}, arguments, directory / route, places, [there] * len(places)))
    for row in rows:
        if row["way"] != "adamw" and row.pop("checksum") != reference(arguments.params, len(places), row["steps"]):
            raise SystemExit(
                f"{describe(row)}\n    has other parameters than {row['steps']} steps: nothing is reported"
            )
    say("verified: ours have the parameters of as many steps in one process, to the last bit")
    return rows


def survived(
    row: Row, arguments: argparse.Namespace, directory: Path, places: list[Callable[[], None]], devices: list[Any]
) -> Row:
    """Train for `arguments.steps` steps, restarting trainers after each kill."""
    directory.mkdir()
    log, chance, kills = directory / "log", random.Random(1), []
    log.touch()
    start = time.monotonic()
    while True:
        run = len(kills) + 1
        running = [
            processes.Process(
                target=work,
                args=(rank, len(places), run, directory, place, row, devices[rank], arguments),
                daemon=True,
            )
            for rank, place in enumerate(places)
        ]
        for process in running:
            process.start()
        lifetime = chance.expovariate(1 / arguments.mtbf)
        while True:
            failed = any(process.exitcode for process in running)
            if log.read_text().count("\n") > len(done := steps_in(log)):  # one more line than steps: the end
                end(running)
                return judged(row, arguments.steps, start, kills, log)
            if failed:
                raise SystemExit(f"{row['way']}: a trainer ended by itself: {Path(directory, 'said').read_text()}")
            if max(1, int(lifetime)) <= sum(of == run for of, _, _ in done):
                break
            time.sleep(0.005)
        time.sleep(lifetime % 1 * typical(done))
        kills.append(time.monotonic())
        chance.choice(running).kill()
        end(running)


def end(running: list[Any]) -> None:
    """Kill all trainers, whatever they do: gloo may hang in an orderly exit after other ranks have died."""
    for process in running:
        process.kill()
    for process in running:
        process.join()


def steps_in(log: Path) -> list[tuple[int, int, float]]:
    """Return the run, the number and the time of each step in the log."""
    words = [line.split() for line in log.read_text().splitlines() if line.endswith(";")]
    return [(int(run), int(step), float(at)) for run, step, at, _ in words]


def typical(done: list[tuple[int, int, float]]) -> float:
    """Return the typical seconds of a step."""
    alone = [b[2] - a[2] for a, b in itertools.pairwise(done) if a[0] == b[0]]
    return statistics.median(alone) if alone else 0.0


def judged(row: Row, steps: int, start: float, kills: list[float], log: Path) -> Row:
    seconds, done = time.monotonic() - start, steps_in(log)
    lost, resumed = [], []
    for k, kill in enumerate(kills, 1):
        if after := [(step, at) for run, step, at in done if run > k]:  # empty if owners had already made the last step
            lost.append(max(0, max(step for run, step, _ in done if run <= k) + 1 - after[0][0]))
            resumed.append(after[0][1] - kill)
    found = {
        **row,
        "kills": len(kills),
        "steps": steps,
        "checksum": int(log.read_text().split()[-1]),
        "seconds": seconds,
        "step_seconds": typical(done),
        "goodput": steps * typical(done) / seconds,
        "steps_lost": lost,
        "seconds_to_next_step": resumed,
    }
    say(describe(found))
    return found


def work(
    rank: int,
    size: int,
    run: int,
    directory: Path,
    place: Callable[[], None],
    row: Row,
    devices: Any,
    arguments: argparse.Namespace,
) -> None:
    """Run a trainer: continue where the training stopped, to the last step."""
    # stderr goes to a file: what a trainer prints when another one is killed does not matter.
    os.dup2(os.open(directory / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    settle(place)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting{run}", rank=rank, world_size=size)
    way, checkpoint = row["way"], directory / "checkpoint"
    options = {} if way == "adamw" else {"resume": True, "tile_size": arguments.tile}
    trainer = Trainer(arguments.params, arguments.backward, way, devices, **options)
    if way != "adamw":
        trainer.done = trainer.opt.committed_step
    elif checkpoint.exists():
        kept = torch.load(checkpoint)
        trainer.model.load_state_dict(kept["model"])
        trainer.opt.load_state_dict(kept["opt"])
        trainer.done = kept["step"]
    with open(directory / "log", "a", buffering=1) as log:
        while trainer.done < arguments.steps:
            trainer.step()
            if rank == 0:
                log.write(f"{run} {trainer.done - 1} {time.monotonic()} ;\n")
            if way == "adamw" and rank == 0 and trainer.done % row["every"] == 0:
                kept = {"model": trainer.model.state_dict(), "opt": trainer.opt.state_dict(), "step": trainer.done}
                with open(directory / "new", "wb") as file:
                    torch.save(kept, file)
                    os.fsync(file.fileno())
                os.replace(directory / "new", checkpoint)
        if rank == 0:
            log.write(f"{checksum(trainer.model)}\n")
    time.sleep(3600)  # until this trainer is killed with the others


def describe(row: Row) -> str:
    way = f"{row['way']}, a checkpoint every {row['every']} steps" if "every" in row else row["way"]
    lost, again = row["steps_lost"], row["seconds_to_next_step"]
    return (
        f"{way}: {row['steps']} steps of {row['step_seconds']:.3f} s, {row['kills']} kills, {row['seconds']:.1f} s: "
        f"goodput {row['goodput']:.0%}; steps done again {sum(lost)}, {max(lost, default=0)} at most; "
        f"{statistics.median(again) if again else math.nan:.2f} s from a kill to the next step"
    )
