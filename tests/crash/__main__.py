"""Stops a training in every way there is, and checks that it resumes: see __init__.py."""

import argparse
import contextlib
import itertools
import os
import random
import shutil
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch._dynamo  # step() would import it: here once, instead of in every child

if __package__ in (None, ""):  # python tests/crash
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.automaton import Refused
from support import commit_traces

from crash.kills import KillsAtCalls, RandomKills
from crash.on_ranks import CASES, KillsOfRanks
from crash.power import PowerLosses, Recording
from crash.processes import KILL_EFFECTS, in_child, preloaded
from crash.training import Violation, use_accelerator

SHOTS = 50  # approximate number of images per recording


class Progress:
    """A counter on stderr. At the end of the `with` block the automaton has to accept the commits of all processes."""

    def __init__(self, what, total):
        self.what, self.total, self.done, self.shown = what, total, 0, 0.0

    def __call__(self, n):
        self.done += n
        now = time.monotonic()
        if now - self.shown > 1 or self.done == self.total:
            self.shown = now
            print(f"\r{self.what}: {self.done}/{self.total} ", end="", file=sys.stderr, flush=True)

    def __enter__(self):
        self(0)
        with contextlib.ExitStack() as stack:
            stack.enter_context(commit_traces.accepted(stack.enter_context(TemporaryDirectory())))
            self._trace = stack.pop_all()
        return self

    def __exit__(self, *failure):
        print(file=sys.stderr)
        self._trace.__exit__(*failure)


def parse():
    parser = argparse.ArgumentParser(prog="crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="number of kills at random moments")
    parser.add_argument("--calls", type=int, default=-1, help="kills at calls that change a file; -1: all of them")
    parser.add_argument("--rank-calls", type=int, default=0, help="kills of one rank of 2 or 3 at such calls; -1: all")
    parser.add_argument("--images", type=int, default=2000, help="number of images of disks after a power loss")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--accelerator", action="store_true", help="with `gpu:` beside the directories, emulated")
    parser.add_argument("--keep", type=Path, help="where to keep the store that shows a violation")
    return parser.parse_args()


def run(arguments, directory):
    torch.set_num_threads(1)  # the same sums everywhere, and no other threads at a fork
    choose = random.Random(arguments.seed)
    if arguments.accelerator:
        use_accelerator()

    def keep(store):
        if arguments.keep:
            shutil.copytree(store, arguments.keep, dirs_exist_ok=True)

    parts = []
    if arguments.kills:
        kills = RandomKills(choose.randrange(1 << 30), directory, keep)
        with Progress("random kills", arguments.kills) as tick:
            kills.run(arguments.kills, tick)
        where = ", ".join(f"{n} while {phase}" for phase, n in kills.where.items())
        parts.append(f"{arguments.kills} kills at random ({where}; {kills.runs} runs)")
    if arguments.calls:
        at_calls = KillsAtCalls(choose.randrange(1 << 30), directory, keep)
        every = [(call, effect) for call in range(in_child(at_calls.calls)) for effect in KILL_EFFECTS]
        if 0 < arguments.calls < len(every):
            every = sorted(choose.sample(every, arguments.calls))
        struck = 0
        with Progress("kills at calls", len(every)) as tick:
            for call, effect in every:
                struck += at_calls.at(call, effect)
                tick(1)
        parts.append(f"{struck} kills at calls")
    if arguments.rank_calls:
        of_ranks = KillsOfRanks(choose.randrange(1 << 30), directory, keep)
        every = itertools.product(CASES, KILL_EFFECTS)
        kills = [(case, call, effect) for case, effect in every for call in range(of_ranks.calls(case))]
        if 0 < arguments.rank_calls < len(kills):
            kills = choose.sample(kills, arguments.rank_calls)
        struck = 0
        with Progress("kills of a rank", len(kills)) as tick:
            for kill in kills:
                struck += of_ranks.at(*kill)
                tick(1)
        parts.append(f"{struck} kills of a rank at calls")
    if arguments.images:
        # Images are kept in memory if possible: no real disk is tested here.
        images = "/dev/shm" if os.access("/dev/shm", os.W_OK) else directory
        fresh, left, recordings = 0, arguments.images, 0
        n = max(2, arguments.images // SHOTS)
        with TemporaryDirectory(dir=images) as place, Progress("power losses", arguments.images) as tick:
            for i in range(n):
                seed, devices = choose.randrange(1 << 30), 1 + i % (2 if i < 2 else 3)
                recording = Recording(seed, devices, directory, killed=i >= 2 and i % 4 != 3, choose=choose)
                losses = PowerLosses(arguments.seed, recording, place, keep)
                share = left // (n - i)
                losses.run(share, tick)
                left, fresh, recordings = left - share, fresh + losses.fresh, recordings + 1
        parts.append(f"{arguments.images} power losses in {recordings} recordings ({fresh} before the first commit)")
    return ", ".join(parts)


def main():
    arguments = parse()
    if "CSD_RECORD" not in os.environ:  # restart this program with the libraries preloaded
        with TemporaryDirectory() as directory:
            command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--seed", str(arguments.seed)]
            code = os.spawnve(os.P_WAIT, sys.executable, command, preloaded(Path(directory)))
        sys.exit(code)
    began = time.monotonic()
    print(f"seed {arguments.seed}", file=sys.stderr)
    with TemporaryDirectory() as directory:
        try:
            done = run(arguments, directory)
        except (Refused, Violation) as e:
            cause = f"\n{e.__cause__}" if e.__cause__ else ""
            print(f"VIOLATION with --seed {arguments.seed}: {e}{cause}", file=sys.stderr)
            print(f"crash: seed {arguments.seed}: a promise was broken; see above")
            sys.exit(1)
    seconds = time.monotonic() - began
    print(f"crash: seed {arguments.seed}: {done}: each one resumed from a committed step ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
