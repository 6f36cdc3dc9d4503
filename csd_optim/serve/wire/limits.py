"""Limits on what strangers can use of an owner: places for handshakes, and lines in the log."""

from __future__ import annotations

import collections
import contextlib
import ipaddress
import resource
import threading
import time
from collections.abc import Callable, Sequence

HANDSHAKES = 64  # at once
PER_ADDRESS = 8  # from one address
MOST_STREAMS = 8  # of a session
SESSIONS, READERS = 4096, 64  # open at once: all, and readers'
RESERVED = 256  # descriptors left to handshakes, and to the engine for its files
LOG_SECONDS = 10.0  # seconds between lines about refusals


def has_place(host: str, under_way: Sequence[str]) -> bool:
    """Return whether another handshake may begin. `under_way`: network() of each handshake under way."""
    return len(under_way) < HANDSHAKES and under_way.count(network(host)) < PER_ADDRESS


class QuietLog:
    """Counts refusals by reason; prints at most one line about them in LOG_SECONDS."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._next = 0.0  # when a line may be printed, in time.monotonic()

    def say(self, line: str) -> None:
        """Print a line. Ignores errors, which must not end the owner."""
        with contextlib.suppress(Exception):
            self._log(line)

    def refused(self, reason: str) -> None:
        """Count a refusal. `reason`: one of a few fixed texts."""
        with self._lock:
            self._counts[reason] += 1
        self.print_counts()

    def print_counts(self) -> int:
        """Print the counts, if it is time. Returns how many reasons are still to be printed."""
        with self._lock:
            if not self._counts or time.monotonic() < self._next:
                return len(self._counts)
            text = ", ".join(f"{n} {reason}" for reason, n in self._counts.most_common())
            self._counts.clear()
            self._next = time.monotonic() + LOG_SECONDS
        self.say(f"refused connections: {text}")
        return 0


def most_connections() -> int:
    """Return the maximum number of connections of all sessions together, by the limit of open files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit - min(RESERVED, limit // 2)


def network(host: str) -> str:
    """Return what counts as one address: for IPv6 the first 64 bits, since a machine can use all addresses within."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((int(address) >> 64 << 64, 64)))


def is_loopback(host: str) -> bool:
    """Return whether a numeric address is on loopback, out of reach for packets from outside."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
