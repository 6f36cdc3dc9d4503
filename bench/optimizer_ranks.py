"""A step with an optimizer rank (an owner), compared with the same step on directories. From the project's root:

    python -m bench.optimizer_ranks             64 M bf16 parameters, 1 and 2 trainers: about ten minutes
    python -m bench.optimizer_ranks --trainers 1 --owners 1 2    one trainer with one and with two owners
    python -m bench.optimizer_ranks --quick     half a minute, to see that it works

    local       CSDAdam on a directory, on each trainer; on one for each of its owners, if it has several
    plain       CSDAdam on owners (csd-optim serve) that have no key: on loopback nothing is encrypted
    encrypted   the same with a key

All ways step by turns in the same processes, and must end with the same parameters on all trainers, to the last bit, or
nothing is reported.

On loopback, drives and links are as fast as this machine makes them: the difference to `local` is what the wire costs.
CPU seconds are those of all trainers and owners together until the step is durable; per GB, of what crosses the wire
in both directions, they are those beyond `local`. All processes share this machine's cores.

Then trainers and owners are machines of a network of namespaces (bench/paced_network.py), where everything is
encrypted. Bytes really move, by TCP, at the rate of --link, and drives are paced to take --drive times as long. The
limit of a step is the longer of two times that are measured in the same run: what TCP alone needs for the bytes of the
busiest link, in both directions at once, and what a step takes with `local` on drives of that pace.

--json prints schema csd_optim.bench.optimizer_ranks/3.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported here, once: the first optimizer of each process would import it, which takes seconds
import torch.distributed as dist

from bench import paced_network
from bench.paced_network import Network, libc
from bench.ranks_model import parse_link
from bench.step import machine_facts, say, span
from csd_optim import CSDAdam, bindings
from csd_optim.devices import machine
from csd_optim.serve.wire.init_key import init_key

Row = dict[str, Any]
Place = Callable[[], None]  # moves a process to a machine
WARM_UP = 2  # steps: states are created, buffers are made
STATE_BYTES = 24  # that drives read and write per parameter and step
NETWORK = f"network namespaces, veth and tbf, frames of {paced_network.MTU} bytes, TCP {paced_network.CONGESTION}"
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
TICK = os.sysconf("SC_CLK_TCK")
processes = multiprocessing.get_context("fork")  # forked before anything is computed: torch is imported once


def main() -> None:
    arguments = parse()
    why_not = "--unpaced" if arguments.unpaced else paced_network.missing()
    if not why_not:
        paced_network.enter("bench.optimizer_ranks")
    arguments.directory.mkdir(parents=True, exist_ok=True)
    facts = {
        **machine_facts(),
        "storage": machine.storage(arguments.directory),
        "back_end": "file, gloo between trainers",
        "network": f"loopback only: {why_not}" if why_not else NETWORK,
        "load": os.getloadavg()[0],  # load average before, which shows if the machine was busy
        "tls": ssl.OPENSSL_VERSION,
    }
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name).absolute()
        init_key(directory / "key.pem")
        network = None if why_not else made_network(arguments)
        pairs = [(n, m) for n in arguments.trainers for m in arguments.owners]
        for n, m in pairs:
            rows += measured(directory / f"loopback{n}-{m}", n, m, arguments, None, "file:{}")
        for n, m in pairs if network else ():
            rows += paced(directory, n, m, arguments, network)
    if arguments.json:
        json.dump({"schema": "csd_optim.bench.optimizer_ranks/3", "machine": facts, "rows": rows}, sys.stdout, indent=1)
        print()


def made_network(arguments: argparse.Namespace) -> Network:
    machines = names("trainer", max(arguments.trainers)) + names("owner", max(arguments.owners))
    return Network(dict.fromkeys(machines, arguments.link))


def names(kind: str, n: int) -> list[str]:
    return [f"{kind}{k}" for k in range(n)]


# ------------------------------------------------------------------------------------------------------- measuring


def measured(
    directory: Path, n: int, m: int, arguments: argparse.Namespace, network: Network | None, device: str
) -> list[Row]:
    """Time each way by turns, with `n` trainers and `m` owners. `device`: {} is a directory.

    Raises SystemExit if parameters differ.
    """
    directory.mkdir()
    key = directory.parent / "key.pem"
    params = arguments.paced_params if network else arguments.params
    keys = {"encrypted": key} if network else {"plain": None, "encrypted": key}
    with contextlib.ExitStack() as stack:
        at_trainers = places(network, names("trainer", n))
        trainers = stack.enter_context(Trainers(at_trainers, f"file://{directory}/meeting", params))
        owners: dict[str, list[Owner]] = {}
        for way, key_file in keys.items():
            for name, place in zip(names("owner", m), places(network, names("owner", m)), strict=True):
                host = network.address(name) if network else "127.0.0.1"
                owner = Owner(
                    device.format(directory / f"{way}-{name}"), key_file, host, directory / f"{way}-{name}.log", place
                )
                owners.setdefault(way, []).append(stack.enter_context(owner))
        drives = [[device.format(directory / f"local{d}") for d in range(k, max(n, m), n)] for k in range(n)]
        trainers.tell("open", *(("local", own) for own in drives))
        for way, these in owners.items():
            trainers.tell("open", (way, [owner.address for owner in these]))
        rows = {way: new_row(way, n, m, params) for way in ("local", *owners)}
        for run in range(WARM_UP + arguments.runs):
            for way, row in rows.items():
                step_once(row, trainers, owners.get(way, []), network, is_counted=run >= WARM_UP)
            if run == WARM_UP:
                same_bits(trainers, rows)  # verified before it is timed
        same_bits(trainers, rows)
        for way, these in owners.items():
            rows[way]["owner_memory_bytes"] = max(owner.memory() - owner.idle_memory for owner in these)
        trainers.tell("close", *[None] * n)
    for row in rows.values():
        summarize(row, rows["local"])
        say(describe(row))
    return [*rows.values()]


def new_row(way: str, trainers: int, owners: int, params: int) -> Row:
    lists = ("seconds", "durable_seconds", "trainer_cpu_seconds", "owner_cpu_seconds")
    return {"way": way, "trainers": trainers, "owners": owners, "params": params, **{name: [] for name in lists}}


def step_once(row: Row, trainers: Trainers, owners: list[Owner], network: Network | None, *, is_counted: bool) -> None:
    before, cpu = network.counters() if network else {}, sum(owner.cpu() for owner in owners)
    steps = trainers.tell("step", row["way"])
    if not is_counted:
        return
    row["seconds"].append(max(step["seconds"] for step in steps))
    row["durable_seconds"].append(max(step["durable"] for step in steps))
    row["trainer_cpu_seconds"].append(sum(step["cpu"] for step in steps))
    row["owner_cpu_seconds"].append(sum(owner.cpu() for owner in owners) - cpu)
    row["bytes"] = {name: sum(step[name] for step in steps) for name in ("push_bytes", "pull_bytes", "gathered_bytes")}
    if network and owners:
        out, there = paced_network.moved(before, network.counters(), names("owner", len(owners)))
        row["owner_link_bytes"] = {"in": there, "out": out}


def same_bits(trainers: Trainers, rows: dict[str, Row]) -> None:
    found = {way: trainers.tell("checksum", way) for way in rows}
    if any(sums != found["local"] or len({*sums}) > 1 for sums in found.values()):
        raise SystemExit(f"the parameters differ, {found}: nothing is reported")
    say(f"verified: {', '.join(found)} have the same parameters on all trainers, to the last bit")


def summarize(row: Row, local: Row) -> None:
    """Add what is computed from all runs: the ratio to `local`, and CPU seconds per GB."""
    row["ratio_to_local"] = [a / b for a, b in zip(row["seconds"], local["seconds"], strict=True)]
    if row is not local:
        crossed = row["bytes"]["push_bytes"] + row["bytes"]["pull_bytes"]
        spent, spent_here = (sum(r["trainer_cpu_seconds"]) + sum(r["owner_cpu_seconds"]) for r in (row, local))
        row["cpu_seconds_per_gb"] = (spent - spent_here) / len(row["seconds"]) / (crossed / 1e9)
        row["cpu_seconds_per_gb_with_update"] = spent / len(row["seconds"]) / (crossed / 1e9)


def paced(directory: Path, n: int, m: int, arguments: argparse.Namespace, network: Network) -> list[Row]:
    """Measure `local` and owners on the paced network, with drives of several paces."""
    rows = []
    nbytes = 2 * arguments.paced_params
    for factor in arguments.drive:
        link = min(tcp_seconds(network, nbytes) for _ in range(2))  # the best: too low a limit would flatter us
        # Each trainer has a drive of its own at each of its owners. One drive would have its part of the states.
        rate = STATE_BYTES * arguments.paced_params / n / (factor * nbytes / arguments.link)
        where = directory / f"paced{n}-{m}-{factor:g}"
        local, served = measured(where, n, m, arguments, network, f"file:{{}}?mixed={int(rate)}B/s&cache=off")
        limit = max(link, statistics.median(local["seconds"]))
        served["ratio_to_limit"] = [s / limit for s in served["seconds"]]
        for row in (local, served):
            row |= {"drive_over_link": factor, "drive_rate": rate, "link_rate": arguments.link, "tcp_seconds": link}
        say(
            f"    a link needs {link:.3f} s, {nbytes / link / 1e6:.1f} MB/s each way; "
            f"encrypted takes {span(served['ratio_to_limit'], 3)} of the limit"
        )
        rows += [local, served]
    return rows


def describe(row: Row) -> str:
    lines = [
        f"{row['trainers']} trainer(s), {row['owners']} owner(s), {row['way']}: {span(row['seconds'], 3)} s, durable "
        f"after {span(row['durable_seconds'], 3)}; {span(row['ratio_to_local'], 2)} of local"
    ]
    if row["way"] != "local":
        lines.append(
            f"{sum(row['bytes'].values()) / 1e6:.1f} MB moved; {row['cpu_seconds_per_gb']:.2f} CPU seconds per GB "
            f"beyond local, {row['cpu_seconds_per_gb_with_update']:.2f} in all; "
            f"an owner's memory {row['owner_memory_bytes'] / 1e6:.0f} MB"
        )
    return "\n    ".join(lines)


# ------------------------------------------------------------------------------------------------------- trainers


class Trainer:
    """A trainer: for each way, parameters that are alike everywhere, and their optimizer. Gradients are there already.

    They are the same on all trainers, as DDP leaves them.
    """

    def __init__(self, params: int) -> None:
        n = max(16, min(256, params >> 18))
        self._shapes = [(-(-params // n),)] * n
        self._grads = self._made(2)
        self._held: dict[str, tuple[list[torch.nn.Parameter], CSDAdam, int]] = {}

    def _made(self, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in self._shapes]

    def open(self, way: str, devices: list[str]) -> None:
        params = [torch.nn.Parameter(t) for t in self._made(1)]
        self._held[way] = params, CSDAdam(params, lr=0.01, devices=devices, overwrite=True), 0

    def step(self, way: str) -> dict[str, float]:
        params, opt, done = self._held[way]
        for p, g in zip(params, self._grads, strict=True):
            p.grad = g * 2.0 ** (done % 3)  # differs from step to step, so that stale gradients are noticed
        dist.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        opt.step()
        returned = time.perf_counter()
        opt.synchronize()
        durable = time.perf_counter()
        found = {"seconds": returned - start, "durable": durable - start, "cpu": time.process_time() - cpu}
        self._held[way] = params, opt, done + 1
        opt.zero_grad()
        stats = opt.stats()
        return found | {name: stats[name] for name in ("push_bytes", "pull_bytes", "gathered_bytes")}

    def checksum(self, way: str) -> int:
        crc = 0
        for p in self._held[way][0]:
            crc = zlib.crc32(p.detach().view(torch.uint8).numpy(), crc)
        return crc

    def close(self) -> None:
        for _, opt, _ in self._held.values():
            opt.close()


def settle(place: Place) -> None:
    """Prepare a new process: move it to its machine, and make it end with its parent, even if the parent is killed."""
    libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    place()


def train(conn: Connection, rank: int, size: int, meeting: str, place: Place, params: int) -> None:
    """Run a trainer that executes commands from `conn`, methods of Trainer, and answers each."""
    settle(place)
    threads = max(1, len(os.sched_getaffinity(0)) // size)
    torch.set_num_threads(threads)
    bindings.threads_use(threads)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    trainer = Trainer(params)
    while True:
        what, arguments = conn.recv()
        try:
            conn.send((True, getattr(trainer, what)(*arguments)))
        except Exception as e:  # reported to the parent, which then exits
            conn.send((False, f"{type(e).__name__}: {e}"))


class Trainers:
    """All trainer processes. `places`: one for each. `meeting`: torch's init_method."""

    def __init__(self, places: list[Place], meeting: str, params: int) -> None:
        self._ends: list[Connection] = []
        self._running: list[Any] = []
        for rank, place in enumerate(places):
            here, there = processes.Pipe()
            arguments = (there, rank, len(places), meeting, place, params)
            process = processes.Process(target=train, args=arguments, daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._running.append(process)

    def tell(self, what: str, *each: Any) -> list[Any]:
        """Send a command to all trainers and return their answers. `each`: a trainer's arguments, or one's for all.

        Raises SystemExit if a trainer fails.
        """
        for k, end in enumerate(self._ends):
            mine = each[k % len(each)]
            end.send((what, () if mine is None else mine if isinstance(mine, tuple) else (mine,)))
        answers: dict[Any, Any] = {}
        while len(answers) < len(self._ends):  # in the order of their answers: when one fails, others may wait for it
            for end in wait([end for end in self._ends if end not in answers]):
                try:
                    well, answer = end.recv()  # type: ignore[union-attr]
                except EOFError:
                    well, answer = False, "it is gone"
                if not well:
                    raise SystemExit(f"trainer {self._ends.index(end)}: {answer}")  # type: ignore[arg-type]
                answers[end] = answer
        return [answers[end] for end in self._ends]

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.kill()
            process.join()


# -------------------------------------------------------------------------------------------------------- the owner


class Owner:
    """`csd-optim serve` in a process of its own. `key`: its key file, which trainers have, too; None: plain."""

    def __init__(self, device: str, key: Path | None, host: str, log: Path, place: Place) -> None:
        command = [sys.executable, "-m", "csd_optim", "serve", device, "--listen", f"{host}:0"]
        command += ["--key", str(key)] if key else []
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stderr=file, preexec_fn=lambda: settle(place))
        while not (said := re.search(r"at \S+:(\d+)\n", log.read_text())):
            if self._process.poll() is not None:
                raise SystemExit(f"the owner has ended: {log.read_text()}")
            time.sleep(0.02)
        self.address: str = f"serve://{host}:{said[1]}" + (f"?key={key}" if key else "")
        self.idle_memory: int = self.memory()

    def cpu(self) -> float:
        """Return the CPU seconds that it has taken so far."""
        return (
            sum(map(int, Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / TICK
        )

    def memory(self) -> int:
        """Return the most bytes of memory that it has had."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self._process.pid}/status").read_text())
        return int(found[1]) * 1024 if found else 0

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def places(network: Network | None, machines: list[str]) -> list[Place]:
    """Return functions that move a process to each of these machines. Without a network they do nothing: loopback."""

    def place(name: str) -> Place:
        def move() -> None:
            if network:
                network.move_in(name)
            else:
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"

        return move

    return [place(name) for name in machines]


# ------------------------------------------------------------------------------------------------------ TCP alone


def tcp_seconds(network: Network, nbytes: int) -> float:
    """Return the seconds in which a trainer and the owner exchange `nbytes` each way, at once, by TCP alone."""
    here, there = processes.Pipe()
    at = [processes.Process(target=_answer, args=(places(network, ["owner0"])[0], there, nbytes), daemon=True)]
    at[0].start()
    address = network.address("owner0"), here.recv()
    at += [processes.Process(target=_ask, args=(places(network, ["trainer0"])[0], address, nbytes), daemon=True)]
    at[1].start()
    seconds: float = here.recv()
    for process in at:
        process.join()
    return seconds


def _answer(place: Place, conn: Connection, nbytes: int) -> None:
    settle(place)
    with socket.create_server(("", 0)) as server:
        conn.send(server.getsockname()[1])
        connection = server.accept()[0]
    start = time.perf_counter()
    _exchange(connection, nbytes)
    conn.send(time.perf_counter() - start)


def _ask(place: Place, address: tuple[str, int], nbytes: int) -> None:
    settle(place)
    _exchange(socket.create_connection(address), nbytes)


def _exchange(connection: socket.socket, nbytes: int) -> None:
    sending = threading.Thread(target=connection.sendall, args=(bytes(nbytes),))
    sending.start()
    left, piece = nbytes, bytearray(1 << 20)
    while left:
        n = connection.recv_into(piece, min(left, len(piece)))
        if not n:
            raise SystemExit("a connection has ended while TCP was measured")
        left -= n
    sending.join()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1 << 26, help="on loopback: bf16 parameters (default 67e6)")
    parser.add_argument("--paced-params", type=float, default=1 << 26, help="on the paced network (default 67e6)")
    parser.add_argument("--trainers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--owners", type=int, nargs="+", default=[1])
    parser.add_argument("--link", type=parse_link, default=50e6, help="each way, such as 400Mb/s, the default")
    parser.add_argument(
        "--drive", type=float, nargs="+", default=[0.5, 1, 2], help="paces of drives: their time over that of the link"
    )
    parser.add_argument("--runs", type=int, default=5, help="timed steps of each way, at least 5")
    parser.add_argument("--unpaced", action="store_true", help="on loopback only")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="where the drives are")
    parser.add_argument("--quick", action="store_true", help="few parameters, one pace")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.params = arguments.paced_params = 1 << 20
        arguments.drive = [1]
    arguments.params, arguments.paced_params = int(arguments.params), int(arguments.paced_params)
    arguments.runs = max(5, arguments.runs)
    return arguments


if __name__ == "__main__":
    main()
