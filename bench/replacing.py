"""Parameters that are replaced again and again, as in Gaussian splatting: time, memory and room on drives.

    python -m bench.replacing                    100 rounds, from 2000 Gaussians to 163 000: three minutes
    python -m bench.replacing --quick            seconds, to see that it works

A scene has six tensors, with 59 fp32 parameters for each Gaussian, and a parameter group for each tensor. A round is a
densification as in 3DGS: 10 % of the Gaussians are copied to the end (with moments of 0), and then 5 % of all are
removed, by index. Each time, all tensors and their moments move to new parameters. Then come --steps steps, with random
gradients. Four optimizers do the same, by turns, each in a process of its own:

    AdamW  torch.optim.AdamW
    file   CSDAdam with named directories; a step counts until it is durable
    8bit   the same with 8-bit states
    ram    CSDAdam in memory

First, a small scene of each is compared with AdamW's after eight rounds, and at the end the large one: for each step, a
tensor may be off by 1e-7 of its norm (8-bit states: 2e-4). What is in the directories must be resumed with the same
bits. Of the last --runs rounds, the seconds are reported of the replacing itself, of the step after it, which makes new
states, and of the round's last step, each beside AdamW's of the same round. After the rounds, steps are timed by turns
with AdamW's and with those of a new scene of the same size, in a new store. If other programs use the cores, pass
--threads 1: torch's threads wait for one another.

Memory is what a process has in anonymous pages after a round, beyond what it had before it made its scene. A store's
live bytes are two copies of the states that a step writes. What its files have allocated, and their lengths, are
reported for each round (--json), at the end, and for the new scene, in whose store nothing has been replaced.

--json prints schema csd_optim.bench.replacing/1.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.ranks import Distant
from bench.step import machine_facts, say, span
from csd_optim import CSDAdam
from csd_optim.cli.benchmark import WARM_UP
from csd_optim.devices import machine
from csd_optim.store.format import FILE_NAME

Row = dict[str, Any]
Arrays = dict[str, np.ndarray[Any, Any]]
COLUMNS = {"xyz": 3, "f_dc": 3, "f_rest": 45, "opacity": 1, "scaling": 3, "rotation": 4}
PARAMS = sum(COLUMNS.values())  # of a Gaussian
PEER = "AdamW"
BACKENDS = {"file": "fp32 states, {} file(s)", "8bit": "8-bit states, {} file(s)", "ram": "fp32 states, in memory"}
SIZES = ("gaussians", "rounds", "steps", "grow", "prune", "backends", "devices", "runs", "threads")
TOLERANCE = {"file": 1e-7, "8bit": 2e-4, "ram": 1e-7}  # of a tensor's norm, for each step
PARTS = {  # of a round, that are timed
    "replacing": "replacing all tensors and moments twice",
    "first_step": "the first step with new parameters",
    "step": "a later step",
}
MOVED = [(part, kind) for part in ("first_step", "step") for kind in ("read", "write")]
SMALL, SMALL_ROUNDS = 300, 8  # the scene that is compared first


class Scene:
    """The tensors of a scene and their optimizer. All scenes of one size have the same values and gradients."""

    def __init__(self, what: str, gaussians: int, places: Sequence[Path], arguments: argparse.Namespace) -> None:
        torch.set_num_threads(arguments.threads)
        self.what, self.places, self.grow, self.prune = what, places, arguments.grow, arguments.prune
        self.steps, self.taken, self.before = arguments.steps, 0, anonymous_bytes()
        generator = torch.Generator().manual_seed(0)
        groups = [
            {"params": [torch.nn.Parameter(torch.randn(gaussians, columns, generator=generator))], "name": name}
            for name, columns in COLUMNS.items()
        ]
        self.opt = self._optimizer(groups)

    def _optimizer(self, groups: list[Row], **options: Any) -> Any:
        how: Row = {"lr": 0.01, "eps": 1e-15}
        if self.what == PEER:
            return torch.optim.AdamW(groups, **how)
        states = "8bit" if self.what == "8bit" else "fp32"
        return CSDAdam(groups, devices=self.places or "ram:", state_dtype=states, **how, **options)

    def gaussians(self) -> int:
        return len(self.opt.param_groups[0]["params"][0])

    def round(self, number: int) -> Row:
        """Densify and take steps. Returns the seconds of each part, bytes of both kinds of steps, and use()."""
        generator = torch.Generator().manual_seed(number)
        before = self.gaussians()
        copied = torch.randperm(before, generator=generator)[: round(self.grow * before)]
        kept = torch.ones(before + len(copied), dtype=torch.bool)
        kept[torch.randperm(len(kept), generator=generator)[: round(self.prune * len(kept))]] = False
        began = time.perf_counter()
        self._replace(lambda p: torch.cat((p, p[copied])), lambda m: torch.cat((m, torch.zeros_like(m[copied]))))
        self._replace(lambda p: p[kept], lambda m: m[kept])
        replacing = time.perf_counter() - began
        first, *_, last = [self.step() for _ in range(self.steps)]
        return {"gaussians": self.gaussians(), "replacing": replacing, "first_step": first, "step": last, **self.use()}

    def use(self) -> Row:
        """Return the bytes that are in use in memory, and those of the files, after a step that made no new states."""
        gc.collect()
        memory = anonymous_bytes() - self.before
        if not self.places:
            return {"memory_bytes": memory}
        files = [os.stat(place / FILE_NAME) for place in self.places]
        return {
            "memory_bytes": memory,
            "allocated_bytes": sum(512 * file.st_blocks for file in files),
            "file_bytes": sum(file.st_size for file in files),
            "live_bytes": 2 * self.opt.stats()["flash_write_bytes"],
        }

    def _replace(self, tensor: Callable[..., torch.Tensor], moment: Callable[..., torch.Tensor]) -> None:
        for group in self.opt.param_groups:
            [old] = group["params"]
            new, entry = torch.nn.Parameter(tensor(old.detach())), self.opt.state.pop(old, None)
            if entry is not None:  # None before the first step
                for key in ("exp_avg", "exp_avg_sq"):
                    entry[key] = moment(entry[key])
                self.opt.state[new] = entry
            group["params"] = [new]

    def step(self) -> Row:
        """Take a step. Returns its seconds, until it is durable, and the bytes read from drives and written to them."""
        generator = torch.Generator().manual_seed(self.taken)
        for group in self.opt.param_groups:
            [p] = group["params"]
            p.grad = torch.randn(p.shape, generator=generator)
        self.taken += 1
        began = time.perf_counter()
        self.opt.step()
        if self.places:
            self.opt.synchronize()
        seconds = time.perf_counter() - began
        self.opt.zero_grad()
        if not self.places:
            return {"seconds": seconds}
        stats = self.opt.stats()
        return {"seconds": seconds, **{f"{kind}_bytes": stats[f"flash_{kind}_bytes"] for kind in ("read", "write")}}

    def tensors(self) -> Arrays:
        return {group["name"]: group["params"][0].detach().numpy() for group in self.opt.param_groups}

    def close(self) -> bool:
        """Close the optimizer. Returns whether its directories, if it has any, can be resumed with the same bits."""
        if self.what == PEER:
            return True
        self.opt.close()
        if not self.places:
            return True
        old = self.opt.param_groups
        groups = [{"params": [torch.nn.Parameter(torch.zeros_like(g["params"][0]))], "name": g["name"]} for g in old]
        with self._optimizer(groups, resume=True):
            return all(torch.equal(a["params"][0], b["params"][0]) for a, b in zip(groups, old, strict=True))


def anonymous_bytes() -> int:
    """Return the resident anonymous memory of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def main() -> None:
    arguments = parse()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    facts = {**machine_facts(), "load": os.getloadavg()[0], "storage": machine.storage(arguments.directory)}
    sizes = {key: getattr(arguments, key) for key in SIZES}
    for shown in (sizes, facts):
        say("  ".join(f"{k}: {v}" for k, v in shown.items()))
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # loads torch's compiler once, for all processes
    with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
        verified = verify(Path(place), arguments)
        rows = measure(Path(place), arguments)
    for row in rows:
        say(describe(row, arguments.runs))
    if arguments.json:
        found = {"schema": "csd_optim.bench.replacing/1", "machine": facts, **sizes, "verified": verified, "rows": rows}
        json.dump(found, sys.stdout, indent=1)
        print()


def made(names: Sequence[str], gaussians: int, place: Path, arguments: argparse.Namespace) -> dict[str, Distant]:
    """Return a scene of each of these optimizers, each in a process of its own."""
    place.mkdir(exist_ok=True)
    scenes = {}
    for name in names:
        places = [place / f"{name}-{i}" for i in range(arguments.devices)] if name in ("file", "8bit") else []
        scenes[name] = Distant(Scene, name, gaussians, places, arguments)
    return scenes


def verify(place: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Compare small scenes. Returns the distance of each optimizer's tensors from AdamW's."""
    scenes = made([PEER, *arguments.backends], SMALL, place / "small", arguments)
    for number in range(SMALL_ROUNDS):
        for scene in scenes.values():
            scene.call("round", number)
    return ended(scenes, SMALL_ROUNDS * arguments.steps)


def ended(scenes: dict[str, Distant], steps: int) -> dict[str, float]:
    """Close scenes after so many steps. Returns how far each one's tensors are off AdamW's at most, by their norms.

    Raises SystemExit if that is too far, or if a store is not resumed with the same bits.
    """
    right: Arrays = scenes[PEER].call("tensors")
    off = {}
    for name in [name for name in scenes if name != PEER]:
        tensors: Arrays = scenes[name].call("tensors")
        if any(tensors[key].shape != right[key].shape for key in right):
            raise SystemExit(f"{name}: the tensors have other shapes than AdamW's: nothing is reported")
        off[name] = max(distance(tensors[key], right[key]) for key in right)
        if not off[name] <= TOLERANCE[name] * steps:
            raise SystemExit(
                f"{name}: the tensors are off AdamW's by {off[name]:.1e} of their norm: nothing is reported"
            )
        if not scenes[name].call("close"):
            raise SystemExit(f"{name}: what was resumed differs from what was committed: nothing is reported")
        say(f"verified {name} against torch.optim.AdamW: off by {off[name]:.1e} of a tensor's norm")
    for scene in scenes.values():
        scene.end()
    return off


def distance(ours: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    wide = right.astype(np.float64)
    return float(np.linalg.norm(ours - wide) / np.linalg.norm(wide))


def measure(place: Path, arguments: argparse.Namespace) -> list[Row]:
    """Take the rounds by turns, and then steps by turns with those of new scenes. Returns a row for each back end."""
    scenes = made([PEER, *arguments.backends], arguments.gaussians, place, arguments)
    rounds: dict[str, list[Row]] = {name: [] for name in scenes}
    for number in range(arguments.rounds):
        for name in in_turn(scenes, number):
            rounds[name].append(scenes[name].call("round", number))
        if (number + 1) % 20 == 0:
            say(f"round {number + 1}: {rounds[PEER][-1]['gaussians']} Gaussians")
    fresh = made(arguments.backends, rounds[PEER][-1]["gaussians"], place / "fresh", arguments)
    both = scenes | {f"fresh {name}": scene for name, scene in fresh.items()}
    seconds: dict[str, list[float]] = {name: [] for name in both}
    for i in range(WARM_UP + arguments.runs):
        for name in in_turn(both, i):
            step = both[name].call("step")
            if i >= WARM_UP:
                seconds[name].append(step["seconds"])
    uses = {name: scene.call("use") for name, scene in both.items()}
    for scene in fresh.values():
        scene.call("close")
        scene.end()
    off = ended(scenes, arguments.rounds * arguments.steps + WARM_UP + arguments.runs)
    return [
        {
            "what": f"CSDAdam, {BACKENDS[name].format(arguments.devices)}",
            "off": off[name],
            "rounds": rounds[name],
            "peer_rounds": rounds[PEER],
            "steps_afterwards": seconds[name],
            "fresh_steps": seconds[f"fresh {name}"],
            "peer_steps": seconds[PEER],
            "use": uses[name],
            "fresh_use": uses[f"fresh {name}"],
            "peer_use": uses[PEER],
        }
        for name in arguments.backends
    ]


def in_turn(scenes: dict[str, Distant], i: int) -> list[str]:
    """Return their names in alternating order, because the second may have an advantage."""
    return [*scenes] if i % 2 else [*reversed(scenes)]


def seconds_of(part: str, rounds: Sequence[Row]) -> list[float]:
    return [r[part] if part == "replacing" else r[part]["seconds"] for r in rounds]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def describe(row: Row, runs: int) -> str:
    """Return a row as text: medians (minimum to maximum) of the last `runs` rounds, and of the steps after them."""
    first, *_, last = row["rounds"]
    gaussians = f"{first['gaussians']} to {last['gaussians']} Gaussians"
    lines = [f"{row['what']}: {gaussians}, {PARAMS * last['gaussians'] / 1e6:.2f} M parameters at the end"]
    for part, text in PARTS.items():
        ours, theirs = (seconds_of(part, row[key]) for key in ("rounds", "peer_rounds"))
        beside = span(ratios(ours[-runs:], theirs[-runs:]), 2)
        lines.append(f"{text}: {span([1e3 * s for s in ours[-runs:]], 1)} ms, {beside} of AdamW's")
        whole = sum(ours) / sum(theirs)
        lines[-1] += f"; {sum(ours):.1f} s in all rounds, {whole:.2f} of AdamW's"
    after, fresh, peer = (row[key] for key in ("steps_afterwards", "fresh_steps", "peer_steps"))
    lines.append(
        f"a step after the rounds: {span([1e3 * s for s in after], 1)} ms; {span(ratios(after, fresh), 2)} of one with "
        f"a new store of this size, {span(ratios(after, peer), 2)} of AdamW's"
    )
    use, fresh_use, peer_use = row["use"], row["fresh_use"], row["peer_use"]
    lines.append(
        f"memory: {megabytes(first, 'memory')} after the first round, {megabytes(use, 'memory')} at the end, "
        f"{megabytes(fresh_use, 'memory')} with a new scene; AdamW {megabytes(row['peer_rounds'][0], 'memory')}, "
        f"{megabytes(peer_use, 'memory')}"
    )
    if "live_bytes" in use:
        moved = [last[part][f"{kind}_bytes"] / PARAMS / last["gaussians"] for part, kind in MOVED]
        lines.append(
            "bytes per parameter: {:.1f} read and {:.1f} written in the first step with new parameters, "
            "{:.1f} and {:.1f} in a later one".format(*moved)
        )
        most = max(r["allocated_bytes"] / r["live_bytes"] for r in row["rounds"])
        lines.append(
            f"on the drives: {megabytes(use, 'live')} live, {megabytes(use, 'allocated')} allocated, "
            f"{use['allocated_bytes'] / use['live_bytes']:.2f} times as much (at most {most:.2f} in the rounds, "
            f"{fresh_use['allocated_bytes'] / fresh_use['live_bytes']:.2f} in a new store), files of "
            f"{megabytes(use, 'file')}"
        )
    return "\n    ".join(lines)


def megabytes(use: Row, kind: str) -> str:
    return f"{use[f'{kind}_bytes'] / 1e6:.1f} MB"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gaussians", type=int, default=2000, help="at the beginning (default 2000)")
    parser.add_argument("--rounds", type=int, default=100, help="of densification (default 100)")
    parser.add_argument("--steps", type=int, default=3, help="in each round, at least 2 (default 3)")
    parser.add_argument("--grow", type=float, default=0.1, help="the part that a round copies (default 0.1)")
    parser.add_argument("--prune", type=float, default=0.05, help="the part that it removes after that (default 0.05)")
    parser.add_argument("--backends", nargs="+", choices=[*BACKENDS], default=[*BACKENDS])
    parser.add_argument("--devices", type=int, default=1, help="emulated CSDs of file and 8bit, on one disk")
    parser.add_argument("--runs", type=int, default=7, help="rounds, and steps after them, to report: at least 5")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch in each process")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="on the disk to be measured")
    parser.add_argument("--quick", action="store_true", help="8 rounds of 300 Gaussians")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.gaussians, arguments.rounds = 300, 8
    arguments.steps, arguments.runs = max(2, arguments.steps), max(5, arguments.runs)
    arguments.rounds = max(arguments.rounds, arguments.runs)
    return arguments


if __name__ == "__main__":
    main()
