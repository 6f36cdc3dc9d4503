"""A connected TCP socket: sends from, and receives into, memory of the caller. Any thread may shut it down.

The descriptor is closed only after a shutdown, when no thread uses it any more: so no thread waits on a number that was
reused.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ..errors import CSDRankError, CSDRuntimeError

Buffer = Any  # an argument of memoryview(), for which typing has no name before Python 3.12
MOST_VIEWS = 1000  # in one system call: Linux allows 1024
ALIVE_SECONDS = 20  # of silence before the kernel probes the other machine
SLOWEST = 1e6  # bytes per second: a long message gets time for this rate


_open: weakref.WeakSet[Tcp] = weakref.WeakSet()


class ConnectionClosed(CSDRankError):
    """The connection has ended, was shut down, or is broken for good."""


class Stream(Protocol):
    """A connection that carries bytes in both directions: Tcp, or Tls around a Tcp. See Tcp."""

    def send(self, views: Sequence[memoryview], begins: bool = True) -> None: ...
    def receive(self, views: Sequence[memoryview]) -> None: ...
    def wait(self, seconds: float | None) -> None: ...
    def settimeout(self, seconds: float) -> None: ...
    def shutdown(self) -> None: ...


def bytes_of(views: Sequence[Buffer]) -> list[memoryview]:
    """Return byte views of contiguous buffers, without empty ones. Raises TypeError."""
    return [view.cast("B") for view in [memoryview(v) for v in views] if view.nbytes]


class Connection:
    """A stream of units that are sent and received as a whole.

    Several threads may send at the same time; one receives.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._sending = threading.Lock()

    def settimeout(self, seconds: float) -> None:
        """See Tcp.settimeout()."""
        self._stream.settimeout(seconds)

    def shutdown(self) -> None:
        """End the connection. Any thread may call this; threads that wait on the connection raise ConnectionClosed."""
        self._stream.shutdown()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """End the connection after an error, even Ctrl-C, as it is unknown how much was sent or received."""
        try:
            yield
        except BaseException:
            self.shutdown()
            raise

    def _bytes(self, n: int) -> bytearray:
        data = bytearray(n)
        self._stream.receive(bytes_of([data]))
        return data


class _Pace:
    """How long one direction has waited for the other side since a message began, and for how many bytes.

    With a limit for each system call, a peer could hold a thread for ever by a byte now and then.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Note that a message begins."""
        self.seconds, self.nbytes = 0.0, 0

    def count(self, began: float, nbytes: int) -> None:
        """Count a system call. `began`: its start in time.monotonic()."""
        self.seconds += time.monotonic() - began
        self.nbytes += nbytes


class Tcp:
    """A connected socket.

    All methods raise ConnectionClosed after shutdown() or any error, CSDRuntimeError after a fork.
    """

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        """Take over a connected socket. `timeout`: see settimeout()."""
        self._sock = sock
        self._lock = threading.Lock()
        self._users = 0
        self._over = ""  # why the connection is over
        self._process = os.getpid()
        self._sent, self._received = _Pace(), _Pace()
        _open.add(self)
        host, port = sock.getpeername()[:2]
        self.address: str = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else 40 ms of delayed ACK per turn of a handshake
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.settimeout(timeout)

    def settimeout(self, seconds: float) -> None:
        """Set how long the other side may be silent within a message, or leave data unacknowledged.

        The waits within one message may take this time in total, plus 1 s for each MB of the message.
        """
        self._timeout = seconds
        self._until: float | None = None
        every = max(1, min(ALIVE_SECONDS, int(seconds / 3)))
        with self._using() as sock:
            _limit_calls(sock, seconds)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(seconds * 1000)))
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                sock.setsockopt(socket.IPPROTO_TCP, option, every)

    def finish_by(self, until: float) -> None:
        """Set a deadline, in time.monotonic(), for everything sent and received, until settimeout()."""
        self._until = until

    def send(self, views: Sequence[memoryview], begins: bool = True) -> None:
        """Send all bytes of these views, in one system call if possible. `begins`: a message begins."""
        with self._using() as sock:
            if begins:
                self._sent.begin()
            first, left = 0, [*views]
            while first < len(left):
                began = self._patience(self._sent)
                n = sock.sendmsg(left[first : first + MOST_VIEWS])
                self._sent.count(began, n)
                first = _skip(left, first, n)

    def receive(self, views: Sequence[memoryview]) -> None:
        """Fill these views."""
        with self._using() as sock:
            first, left = 0, [*views]
            while first < len(left):
                began = self._patience(self._received)
                n = sock.recvmsg_into(left[first : first + MOST_VIEWS], 0, socket.MSG_WAITALL)[0]
                self._count_received(began, n)
                first = _skip(left, first, n)

    def receive_some(self, most: int) -> bytes:
        """Return at most `most` bytes that have arrived, or arrive next; never none."""
        with self._using() as sock:
            began = self._patience(self._received)
            data = sock.recv(most)
            self._count_received(began, len(data))
            return data

    def _patience(self, pace: _Pace) -> float:
        """Return the start time of a system call, and limit its wait. Raises ConnectionClosed if no time is left."""
        now = time.monotonic()
        if self._until is not None:
            if now >= self._until:
                raise ConnectionClosed(f"{self.address} takes too long")
            _limit_calls(self._sock, self._until - now)
        if pace.seconds > self._timeout + pace.nbytes / SLOWEST:
            raise ConnectionClosed(f"{self.address} is too slow: {pace.nbytes} bytes in {pace.seconds:.3g} s")
        return now

    def _count_received(self, began: float, nbytes: int) -> None:
        if not nbytes:
            raise ConnectionClosed(self._over or f"{self.address} has closed the connection")
        self._received.count(began, nbytes)

    def wait(self, seconds: float | None, arrived: bool = False) -> None:
        """Return when a message begins, or the connection ends. Raises ConnectionClosed after `seconds`.

        `arrived`: a part of the message was received already.
        """
        with self._using() as sock:
            if not (arrived or arrives(sock, seconds)):
                raise ConnectionClosed(f"{self.address} has said nothing for {seconds:g} s")
            self._received.begin()

    def has_news(self) -> bool:
        """Return, without waiting, whether something has arrived or the connection has ended."""
        try:
            with self._using() as sock:
                return arrives(sock, 0)
        except ConnectionClosed:
            return True

    def shutdown(self) -> None:
        """End the connection; threads that wait on it raise ConnectionClosed. A no-op in a forked child."""
        if os.getpid() == self._process:  # in a child, this would shut down the parent's connection
            self._end(f"the connection to {self.address} is shut down")

    def _end(self, why: str) -> None:
        with self._lock:
            if not self._over:
                self._over = why
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            if not self._users:
                self._sock.close()

    @contextlib.contextmanager
    def _using(self) -> Iterator[socket.socket]:
        if os.getpid() != self._process:
            raise CSDRuntimeError("this process was forked from the one that has the connection: open another")
        with self._lock:
            if self._over:
                raise ConnectionClosed(self._over)
            self._users += 1
        why = ""
        try:
            yield self._sock
        except BlockingIOError:
            why = f"{self.address} has said nothing for {self._timeout:g} s"
            raise ConnectionClosed(why) from None
        except OSError as e:
            why = f"the connection to {self.address} has ended: {e.strerror}"
            raise ConnectionClosed(self._over or why) from e
        except BaseException as e:  # even Ctrl-C: it is unknown how much of the message was sent
            why = str(e) or "interrupted"
            raise
        finally:
            with self._lock:
                self._users -= 1
            if why or self._over:
                self._end(why)

    def __del__(self) -> None:
        if hasattr(self, "_sock"):
            self._sock.close()


def _close_in_child() -> None:
    """Close a forked child's descriptors, so that the other side notices the end of the parent."""
    for tcp in [*_open]:
        tcp._sock.close()


os.register_at_fork(after_in_child=_close_in_child)


def _limit_calls(sock: socket.socket, seconds: float) -> None:
    """Limit the wait of each system call that sends or receives to `seconds`."""
    seconds = max(seconds, 0.001)  # 0 would mean for ever
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


def arrives(sock: socket.socket, seconds: float | None) -> bool:
    """Wait at most `seconds` for something to receive or accept. Returns whether there is something."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def _skip(views: list[memoryview], first: int, n: int) -> int:
    """Remove `n` bytes from the views, from index `first` on. Returns the index of the first view left."""
    while first < len(views) and n >= len(views[first]):
        n -= len(views[first])
        first += 1
    if n:
        views[first] = views[first][n:]
    return first
