"""What strangers may take from an owner: places for handshakes, time, and lines in its log."""

from __future__ import annotations

import collections
import contextlib
import ipaddress
import resource
import threading
import time
from collections.abc import Callable

from .tcp import Tcp

HANDSHAKES = 64  # at once
PER_ADDRESS = 8  # of them from one address
RESERVED = 256  # descriptors that sessions leave to the engine, which opens files as it works, and to handshakes
LOG_SECONDS = 10.0  # at most one line about refusals in so much time


class Places:
    """Counts handshakes under way, in all and from each address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: collections.Counter[str] = collections.Counter()

    def enter(self, host: str) -> bool:
        """Take a place. Returns whether there was one."""
        host = network(host)
        with self._lock:
            if self._of.total() >= HANDSHAKES or self._of[host] >= PER_ADDRESS:
                return False
            self._of[host] += 1
            return True

    def leave(self, host: str) -> None:
        with self._lock:
            self._of -= collections.Counter([network(host)])  # drops those without any


class Deadlines:
    """Shuts down connections that are not admitted in time. A limit for each read would let slow bytes go on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[Tcp, float] = {}  # in time.monotonic()

    def set(self, tcp: Tcp, until: float) -> None:
        with self._lock:
            self._until[tcp] = until

    def clear(self, tcp: Tcp) -> None:
        with self._lock:
            self._until.pop(tcp, None)

    def expire(self, now: float | None = None) -> None:
        """Shut down what is late; without `now`: everything."""
        with self._lock:
            late = [tcp for tcp, until in self._until.items() if now is None or until <= now]
            for tcp in late:
                del self._until[tcp]
        for tcp in late:
            tcp.shutdown()

    def __len__(self) -> int:
        return len(self._until)


class QuietLog:
    """Counts refusals by reason; prints at most one line about them in LOG_SECONDS."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._next = 0.0  # when a line may be printed, in time.monotonic()

    def say(self, line: str) -> None:
        """Print a line. A log that cannot be written does not end the owner."""
        with contextlib.suppress(Exception):
            self._log(line)

    def refused(self, reason: str) -> None:
        """Count a refusal. `reason`: a text of ours, of which there are few."""
        with self._lock:
            self._counts[reason] += 1
        self.print_counts()

    def print_counts(self) -> None:
        """Print what has been counted, if it is time."""
        with self._lock:
            if not self._counts or time.monotonic() < self._next:
                return
            text = ", ".join(f"{n} {reason}" for reason, n in self._counts.most_common())
            self._counts.clear()
            self._next = time.monotonic() + LOG_SECONDS
        self.say(f"refused connections: {text}")

    def __len__(self) -> int:
        return len(self._counts)


def most_connections() -> int:
    """Return how many connections all sessions together may have: what the limit of open files leaves them."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit - min(RESERVED, limit // 2)


def network(host: str) -> str:
    """Return what counts as one address: for IPv6 the first 64 bits, since a machine has all of the others."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((int(address) >> 64 << 64, 64)))


def is_loopback(host: str) -> bool:
    """Return whether a numeric address is this machine's own, which no packet from outside reaches."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
