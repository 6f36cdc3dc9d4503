"""Optimizer ranks (owners) on paced networks and drives, compared with ways without them. From the project's root:

    python -m bench.studies.optimizer_ranks             5 M parameters, 4 trainers: about five minutes
    python -m bench.studies.optimizer_ranks --kills     goodput while trainers are killed
    python -m bench.studies.optimizer_ranks --quick     a few seconds, to see that it works

    adamw     DDP and torch's fused AdamW, states in each trainer's memory
    zero      DDP and ZeroRedundancyOptimizer(AdamW), in memory
    local     DDP and CSDAdam, each trainer has its share on as many drives of its own as an owner has
    kept ...  the routes to owners (csd-optim serve) that --routes names

Trainers and owners are machines of a network of namespaces (bench/studies/paced_network.py). Bytes really move, by TCP,
at the rate of `--trainer-link`, for owners at 1, 2 and 4 times that rate; drives are paced, too (`--drive`). If such a
network cannot be made, everything runs on loopback and only the drives are paced: the output says so, and the times
mean little. All processes share this machine's cores either way.

An iteration is forward and backward (which take no time, or --backward seconds) with DDP's hooks, and step(). All
trainers must end with the same parameters, and with ours they must be those of one process that gets the mean gradient,
to the last bit, or nothing is reported. Bytes are counted by the kernel at the interfaces, and shown beside those of
the formulas. Times are shown beside the prediction of `bench.ranks_plan`, and beside the limit: the time that
the busiest link or drive needs at least. Both take as a link's rate what TCP alone reaches on it, which is measured
first: all trainers exchange the bytes of a step with all owners, in both directions at once.

--json prints schema csd_optim.bench.optimizer_ranks/1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import ranks_model as ranks
from bench.ranks_model import Fleet, parse_link
from bench.step import machine_facts, say, span
from bench.studies import paced_network, ranks_kills
from bench.studies.paced_network import Network
from bench.studies.ranks_training import Trainers, drive_strings, owners, places_of, reference
from bench.studies.tcp_rate import tcp_rate
from csd_optim.devices import machine
from csd_optim.devices.units import parse_rate
from csd_optim.planning.advice import Request
from csd_optim.planning.model import Host
from csd_optim.rates import Rates
from csd_optim.serve import wire

Row = dict[str, Any]
WARM_UP = 2  # iterations: DDP rebuilds its buckets, states are created
NETWORK = f"network namespaces, veth and tbf, frames of {paced_network.MTU} bytes, TCP {paced_network.CONGESTION}"
TCP_RUNS = 3  # the best one counts: a limit measured too low would flatter us
WITHIN = 0.02  # largest relative deviation of bytes from the formula
ROUTES = [route for route in ranks.ROUTES if route in wire.ROUTES]
SAME_BITS = ("local", *ROUTES)  # ways that must have the reference's bits; AdamW in bf16 rounds differently


def main() -> None:
    arguments = parse()
    why_not = "--unpaced" if arguments.unpaced else paced_network.missing()
    if not why_not:
        paced_network.enter("bench.studies.optimizer_ranks")
    arguments.directory.mkdir(parents=True, exist_ok=True)
    facts = {
        **machine_facts(),
        "storage": machine.storage(arguments.directory),
        "network": f"loopback, unpaced: {why_not}" if why_not else NETWORK,
        "load": os.getloadavg()[0],  # load average before, which shows if the machine was busy
        **{k: getattr(arguments, k) for k in ("params", "trainers", "owners", "trainer_link", "drive", "backward")},
    }
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        network = None if why_not else made_network(arguments)
        measure = ranks_kills.measure if arguments.kills else measure_all
        rows = measure(arguments, network, Path(directory).absolute())
    if arguments.json:
        schema = f"csd_optim.bench.optimizer_ranks{'_kills' * arguments.kills}/1"
        json.dump({"schema": schema, "machine": facts, "rows": rows}, sys.stdout, indent=1)
        print()


def machines(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the names of the trainers' machines, and of the owners'."""
    return [f"trainer{k}" for k in range(arguments.trainers)], [f"owner{k}" for k in range(arguments.owners)]


def made_network(arguments: argparse.Namespace) -> Network:
    return Network({name: arguments.trainer_link for names in machines(arguments) for name in names})


# ------------------------------------------------------------------------------------------------------- measuring


def measure_all(arguments: argparse.Namespace, network: Network | None, directory: Path) -> list[Row]:
    """Measure each way in turn, with the same trainer processes. Raises SystemExit if results differ."""
    trainers_at, owners_at = machines(arguments)
    trainers = Trainers(places_of(network, trainers_at), f"file://{directory}/meeting")
    host = network.address(owners_at[0]) if network else "127.0.0.1"
    rows = []
    # With links so wide, owners never slow trainers down: what TCP reaches then is its rate on trainers' links.
    wide = arguments.trainers / arguments.owners
    tcp = paced(network, wide, arguments) / wide
    for way in ("adamw", "zero"):
        rows.append(measured(way, {"devices": None, "tcp": tcp}, trainers, network, arguments))
    for drives in arguments.drives:
        here = [drive_strings(directory / f"local{drives}/{name}", arguments.device, drives) for name in trainers_at]
        rows.append(measured("local", {"devices": here, "drives": drives, "tcp": tcp}, trainers, network, arguments))
        there = directory / f"owners{drives}"
        with owners(there, places_of(network, owners_at), arguments.device, drives, host) as address:
            for times in arguments.owner_link if network else [1]:
                owner_tcp = paced(network, times, arguments)
                for route in arguments.routes:
                    at = {
                        "devices": f"{address}&route={route}" if route != "kept" else address,
                        "drives": drives,
                        "owner_link": times,
                        "tcp": tcp,
                        "owner_tcp": owner_tcp,
                    }
                    rows.append(measured(route, at, trainers, network, arguments))
    trainers.end()
    total = WARM_UP + arguments.runs
    wanted = reference(arguments.params, arguments.trainers, total)
    for row in rows:
        alike = {wanted} if row["way"] in SAME_BITS else {row["checksums"][0]}
        if {*row["checksums"]} != alike:
            raise SystemExit(f"{describe(row)}\n    has wrong parameters: nothing is reported")
        del row["checksums"]
    say(f"verified: {total} steps, the same parameters on all trainers; ours those of one process, to the last bit")
    if not network:
        return rows
    off = [row for row in rows if any(abs(ratio - 1) > WITHIN for ratio in row.get("bytes_ratio", {}).values())]
    say(f"bytes are within {WITHIN:.0%} of the formulas: {'no, see ' + str(len(off)) + ' rows' if off else 'all'}")
    ratios = [statistics.median(row["seconds"]) / row["predicted"] for row in rows if row["predicted"]]
    say(f"measured over predicted: {span(ratios, 2)}")
    return rows


def paced(network: Network | None, times: float, arguments: argparse.Namespace) -> float:
    """Give owners links `times` as fast as a trainer's. Returns TCP's rate on them, in units of a trainer's link."""
    if not network:
        return times
    trainers_at, owners_at = machines(arguments)
    for name in owners_at:
        network.pace(name, times * arguments.trainer_link)
    hosts = [network.address(name) for name in owners_at]
    places = places_of(network, trainers_at), places_of(network, owners_at)
    rate = max(tcp_rate(*places, hosts, 2 * arguments.params) for _ in range(TCP_RUNS))
    pace = min(times, arguments.trainers / arguments.owners) * arguments.trainer_link
    say(f"owners' link {times:g}x: TCP alone moves {rate / 1e6:.1f} MB/s each way, {rate / pace:.2f} of the pace")
    return times * rate / pace


def measured(way: str, at: Row, trainers: Trainers, network: Network | None, arguments: argparse.Namespace) -> Row:
    """Return one row: make an optimizer, warm it up, time it, and close it."""
    devices = at.pop("devices")
    options = {"tile_size": arguments.tile, "overwrite": True} if way in SAME_BITS else {}
    same = {"params": arguments.params, "backward": arguments.backward, "way": way, **options}
    trainers.tell("open", *({**same, "devices": here} for here in (devices if way == "local" else [devices])))
    trainers.tell("steps", WARM_UP)
    before = network.counters() if network else {}
    times = trainers.tell("steps", arguments.runs)
    after = network.counters() if network else {}
    slowest = [[max(step) for step in zip(*of_step, strict=True)] for of_step in zip(*times, strict=True)]
    row: Row = {
        "way": way,
        **at,
        "seconds": [iteration for iteration, _ in slowest],
        "after_backward": [step for _, step in slowest],
        "checksums": trainers.tell("close", None),
        "predicted": None,
        "limit": None,
    }
    if network and way in ranks.WAYS:
        request, fleet = planned(arguments, at.get("drives", 1), at["tcp"], at.get("owner_tcp", 1))
        row["predicted"] = ranks.iteration(way, request, fleet)
        row["limit"] = ranks.at_least(way, request, fleet)
        formula: dict[str, float] = dict.fromkeys(ranks.LINKS, 0.0)
        for stage in ranks.WAYS[way](request, fleet, False):
            for link, n in stage.bytes.items():
                formula[link] += n
        row["bytes_ratio"] = {}
    if network:
        row["bytes"] = {}
        for kind, names in zip(("trainer", "owner"), machines(arguments), strict=True):
            for direction, n in zip(("out", "in"), paced_network.moved(before, after, names), strict=True):
                link = f"{kind} {direction}"
                row["bytes"][link] = n / arguments.runs
                if way in ranks.WAYS and formula[link]:
                    row["bytes_ratio"][link] = n / arguments.runs / formula[link]
    say(describe(row))
    return row


def planned(arguments: argparse.Namespace, drives: int, tcp: float, owner_tcp: float) -> tuple[Request, Fleet]:
    """Return what the model is asked about a row. `tcp`, `owner_tcp`: TCP's rate on the links, in units of the pace."""
    r = Request(
        params=arguments.params,
        devices=drives,
        host=Host(update=math.inf),  # the drives' pace is far below what a CPU updates
        drive=Rates(arguments.drive, arguments.drive, arguments.drive, on_host=True),
        backward=arguments.backward,
    )
    links = (tcp * arguments.trainer_link, owner_tcp * arguments.trainer_link)
    return r, Fleet(arguments.trainers, arguments.owners, *links)


# --------------------------------------------------------------------------------------------------------- showing


def describe(row: Row) -> str:
    at = ", ".join(
        text
        for text, there in (
            (f"{row.get('drives')} drive(s)", "drives" in row),
            (f"owners' link {row.get('owner_link')}x", "owner_link" in row),
        )
        if there
    )
    lines = [f"{row['way']:>7} {at:>30}: {span(row['seconds'], 3)} s, after backward {span(row['after_backward'], 3)}"]
    if row["predicted"]:
        s = statistics.median(row["seconds"])
        lines.append(
            f"predicted {row['predicted']:.3f}, {s / row['predicted']:.2f} of that; "
            f"the limit is {row['limit']:.3f}, {row['limit'] / s:.2f} of its rate"
        )
    if "bytes" in row:
        each = [
            f"{link} {n / 1e6:.2f}"
            + (f" ({row['bytes_ratio'][link]:.3f})" if link in row.get("bytes_ratio", {}) else "")
            for link, n in row["bytes"].items()
        ]
        lines.append(f"MB of a step (of the formula): {', '.join(each)}")
    return "\n            ".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=5e6, help="number of parameters (default 5e6), bf16")
    parser.add_argument("--trainers", type=int, choices=(1, 2, 4, 8), default=4)
    parser.add_argument("--owners", type=int, default=1)
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=ROUTES)
    parser.add_argument("--trainer-link", type=parse_link, default=50e6, help="such as 400Mb/s, the default")
    parser.add_argument("--owner-link", type=float, nargs="+", default=[1, 2, 4], help="as multiples of a trainer's")
    parser.add_argument(
        "--drives", type=int, nargs="+", default=[1, 2, 4], help="of each owner; `local`: of each trainer"
    )
    parser.add_argument("--drive", type=parse_rate, default=300e6, help="read and written together (default 300MB/s)")
    parser.add_argument("--backward", type=float, default=0.0, help="seconds that backward takes")
    parser.add_argument("--runs", type=int, default=5, help="timed iterations, at least 5")
    parser.add_argument("--kills", action="store_true", help="goodput while trainers are killed, instead of the rest")
    parser.add_argument("--mtbf", type=float, default=10, help="--kills: mean number of steps between two")
    parser.add_argument("--steps", type=int, default=40, help="--kills: steps that each way trains")
    parser.add_argument("--every", type=int, nargs="+", default=[5, 20], help="--kills: steps between checkpoints")
    parser.add_argument("--unpaced", action="store_true", help="on loopback, even where a network can be made")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="where the drives are")
    parser.add_argument("--quick", action="store_true", help="few parameters on two trainers, one link and drive")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.params, arguments.trainers, arguments.owner_link, arguments.drives = 4e5, 2, [1], [1]
        arguments.mtbf, arguments.steps, arguments.every = 4, 8, [3]
    arguments.params, arguments.runs = int(arguments.params), max(5, arguments.runs)
    arguments.device = f"file:{{}}?mixed={int(arguments.drive)}B/s&cache=off"
    arguments.tile = max(4096, arguments.params // 64)
    return arguments


if __name__ == "__main__":
    main()
