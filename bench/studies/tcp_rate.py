"""The rate of TCP alone on the network of bench/studies/optimizer_ranks.py: the limit that owners are compared with."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from bench.studies.ranks_training import processes, settle

PIECE = 1 << 20  # bytes


def _move(connection: socket.socket, nbytes: int) -> None:
    """Send and receive `nbytes` bytes at the same time."""
    sending = threading.Thread(target=connection.sendall, args=(bytes(nbytes),))
    sending.start()
    left, piece = nbytes, bytearray(PIECE)
    while left:
        n = connection.recv_into(piece, min(left, PIECE))
        if not n:
            raise SystemExit("a connection has ended while TCP was measured")
        left -= n
    sending.join()


def _exchange(connections: Sequence[socket.socket], nbytes: int) -> None:
    moving = [threading.Thread(target=_move, args=(connection, nbytes)) for connection in connections]
    for thread in moving:
        thread.start()
    for thread in moving:
        thread.join()


def _answer(place: Callable[[], None], conn: Connection, trainers: int, nbytes: int) -> None:
    """Run an owner: report its port, then the seconds that the exchange took."""
    settle(place)
    with socket.create_server(("", 0)) as server:
        conn.send(server.getsockname()[1])
        connections = [server.accept()[0] for _ in range(trainers)]
    start = time.perf_counter()
    _exchange(connections, nbytes)
    conn.send(time.perf_counter() - start)


def _ask(place: Callable[[], None], at: Sequence[tuple[str, int]], nbytes: int) -> None:
    settle(place)
    _exchange([socket.create_connection(address) for address in at], nbytes)


def tcp_rate(
    trainers: Sequence[Callable[[], None]], owners: Sequence[Callable[[], None]], hosts: Sequence[str], nbytes: int
) -> float:
    """Return the bytes per second on an owner's link, each way, while all trainers exchange `nbytes` with all owners.

    `trainers`, `owners`: functions that move a process to each of their machines. `hosts`: the owners' addresses.
    """
    ends, running = [], []
    for place in owners:
        here, there = processes.Pipe()
        running.append(processes.Process(target=_answer, args=(place, there, len(trainers), nbytes // len(owners))))
        running[-1].start()
        ends.append(here)
    at = [(host, end.recv()) for host, end in zip(hosts, ends, strict=True)]
    for place in trainers:
        running.append(processes.Process(target=_ask, args=(place, at, nbytes // len(owners))))
        running[-1].start()
    seconds = max(end.recv() for end in ends)
    for process in running:
        process.join()
    return len(trainers) * (nbytes // len(owners)) / seconds
