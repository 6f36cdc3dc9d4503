"""How long it takes to import csd_optim. From the project's root:

    python -m bench.studies.imports
    python -m bench.studies.imports --quick     to see that it works

Seconds of CPU time, in new interpreters by turns; before the first turn each has run once, so that all bytecode is
compiled and cached:

    torch       import torch
    CSDAdam     from csd_optim import CSDAdam, after torch, whose own import is not included
    csd_optim   import csd_optim, which does not import torch before the first optimizer is named
    command     csd-optim --version, the whole process

It reports medians, minima and maxima. --json prints schema csd_optim.bench.imports/1.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys

from bench.step import machine_facts, say

TIMED = """
import json, time
seconds = {}
for name, line in %r.items():
    began = time.process_time()
    exec(line)
    seconds[name] = time.process_time() - began
print(json.dumps(seconds))
"""
AFTER_EACH_OTHER = (
    {"torch": "import torch", "CSDAdam": "from csd_optim import CSDAdam"},
    {"csd_optim": "import csd_optim"},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="one turn, without filling caches first")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    arguments = parser.parse_args()
    facts = machine_facts()
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    if not arguments.quick:
        turn()
    turns = [turn() for _ in range(1 if arguments.quick else arguments.turns)]
    seconds = {name: [t[name] for t in turns] for name in turns[0]}
    for name, values in seconds.items():
        say(f"{name:10} {statistics.median(values):.3f} s ({min(values):.3f} to {max(values):.3f})")
    if arguments.json:
        print(json.dumps({"schema": "csd_optim.bench.imports/1", "machine": facts, "cpu_seconds": seconds}))


def turn() -> dict[str, float]:
    """Run every measurement once. Returns CPU seconds by name."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    seconds: dict[str, float] = {}
    for lines in AFTER_EACH_OTHER:
        done = subprocess.run(
            [sys.executable, "-c", TIMED % lines], env=environment, check=True, stdout=subprocess.PIPE
        )
        seconds |= json.loads(done.stdout)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    version = [sys.executable, "-m", "csd_optim", "--version"]
    subprocess.run(version, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds["command"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds


if __name__ == "__main__":
    main()
