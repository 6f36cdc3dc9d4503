"""A connection that carries messages: JSON, and buffers after it. Sockets are plain, or within TLS of Python's `ssl`.

A frame consists of a head with two lengths, the JSON, and the buffers, which are sent from and received into memory of
the caller. OpenSSL allows one thread at a time for each connection: so a connection carries data in one direction, or
requests and their answers by turns.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import CSDRankError, CSDRuntimeError, CSDValueError
from .schema import Message, T, decoded, msgspec

Buffer = Any  # an argument of memoryview(), for which typing has no name before Python 3.12
FRAME = struct.Struct("!IQ")  # bytes of the JSON, and of the buffers
MESSAGE_BYTES = 64 << 20  # maximum length of a message that is received as a whole
FRAME_BYTES = 1 << 30  # maximum length of the buffers
MOST_BYTES = 128 << 30  # after which a connection is worn: OpenSSL renews no key, and AES-GCM's limit is 388 GB
SMALL = 16 << 10  # bytes: shorter buffers travel together, as each costs a system call, and in TLS a record
CHUNK = 256 << 10  # bytes discarded at a time
ALIVE_SECONDS = 20  # of silence before the kernel probes the other machine
LINGER_SECONDS = 0.5
SLOWEST = 1e6  # bytes per second: a long message gets time for this rate

_open: weakref.WeakSet[Connection] = weakref.WeakSet()


class ConnectionClosed(CSDRankError):
    """The connection has ended, was ended, or is broken for good."""


class Connection:
    """A connected socket. Any thread may end it; one at a time receives, or sends while nobody receives.

    All methods raise ConnectionClosed after the end or any error, CSDRuntimeError after a fork.
    """

    def __init__(self, sock: socket.socket, timeout: float, most: int = MESSAGE_BYTES) -> None:
        """Take over a connected socket; an SSLSocket needs handshake() first. `timeout`: see settimeout().

        `most`: bytes of the JSON of a message that is sent.
        """
        self._sock, self._most = sock, most
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._users = 0
        self._over = ""  # why the connection is over
        self._process = os.getpid()
        self._due = 0  # bytes of the buffers that come next
        self.sent: int = 0  # bytes
        self.received: int = 0  # bytes
        _open.add(self)
        host, port = sock.getpeername()[:2]
        self.address: str = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else 40 ms of delayed ACK per turn
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.settimeout(timeout)

    def settimeout(self, seconds: float) -> None:
        """Set how long the other side may be silent within a message, or leave data unacknowledged.

        The JSON, and the buffers, may each take this time, plus 1 s for each MB.
        """
        self._timeout = seconds
        every = max(1, min(ALIVE_SECONDS, int(seconds / 3)))
        with self._using() as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(seconds * 1000)))
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                sock.setsockopt(socket.IPPROTO_TCP, option, every)

    def handshake(self, protocol: str) -> tuple[bytes, bool]:
        """Do TLS's handshake, within the timeout as a whole.

        Returns the other side's certificate (DER), and whether its version of our protocol is this one.
        """
        with self._using() as sock:
            assert isinstance(sock, ssl.SSLSocket)
            sock.settimeout(self._timeout)
            try:
                sock.do_handshake()
            except ssl.SSLError:
                _linger(sock)
                raise
            return sock.getpeercert(binary_form=True) or b"", sock.selected_alpn_protocol() == protocol

    # ---- messages ------------------------------------------------------------------

    def send(self, message: msgspec.Struct, *buffers: Buffer) -> None:
        """Send a message, and contiguous buffers without copying them.

        Raises CSDValueError, with nothing sent, if they are too long.
        """
        try:
            text = msgspec.json.encode(message)
        except ValueError as e:  # half of a character
            raise CSDValueError(f"a message cannot be sent: {e}") from None
        views = _bytes_of(buffers)
        nbytes = sum(map(len, views))
        if len(text) > self._most or nbytes > FRAME_BYTES:
            raise CSDValueError(
                f"a message has {len(text)} and {nbytes} bytes: {self._most} and {FRAME_BYTES} are the limits, "
                "enough for some 100,000 parameters: join parameters, give them shorter names"
            )
        head = memoryview(FRAME.pack(len(text), nbytes) + text)
        with self._sending, self._using() as sock:
            until = time.monotonic() + self._timeout + nbytes / SLOWEST
            for run in runs([head, *views]):
                sock.settimeout(max(until - time.monotonic(), 0.001))  # of the call as a whole
                data = run[0] if len(run) == 1 else b"".join(run)
                sock.sendall(data)
                self.sent += len(data)

    def send_arrays(self, message: Message, *arrays: Buffer) -> None:
        """Send a message that names the sizes of its arrays. As send()."""
        self.send(msgspec.structs.replace(message, sizes=[memoryview(a).nbytes for a in arrays]), *arrays)

    def receive(
        self, decoder: msgspec.json.Decoder[T], timeout: float | None = None, most: int = MESSAGE_BYTES
    ) -> tuple[T, int]:
        """Return the next message, and how many bytes of buffers follow: call fill() or discard() next.

        `timeout`: seconds until the message begins, in TLS with a whole record (None: no limit). `most`: bytes of its
        JSON.
        """
        if self._due:
            raise CSDRuntimeError("the buffers of the message before have not been received")
        with self._using() as sock:
            head = memoryview(bytearray(FRAME.size))
            sock.settimeout(timeout)
            begun = self._read(sock, head, timeout)
            self._fill(sock, [head[begun:]])
            length, nbytes = FRAME.unpack(head)
            if length > most or nbytes > FRAME_BYTES:
                raise ConnectionClosed(f"a message of {length} bytes with {nbytes} bytes of buffers was refused")
            text = bytearray(length)
            self._fill(sock, [memoryview(text)])
            try:
                message = decoded(decoder, text)
            except CSDRankError as e:
                raise ConnectionClosed(str(e)) from None
            self._due = nbytes
            return message, nbytes

    def receive_arrays(
        self, decoder: msgspec.json.Decoder[Any], timeout: float | None = None, most: int = MESSAGE_BYTES
    ) -> tuple[Any, list[memoryview]]:
        """Return the next message, and its arrays, in new memory. `most`: bytes of the JSON, and of the arrays."""
        message, nbytes = self.receive(decoder, timeout, most)
        if nbytes != sum(message.sizes) or nbytes > most:
            self.end()
            raise ConnectionClosed(f"a message with {nbytes} bytes of arrays was refused")
        arrays = [memoryview(bytearray(size)) for size in message.sizes]
        self.fill(arrays)
        return message, arrays

    def fill(self, buffers: Sequence[Buffer]) -> None:
        """Receive the buffers of the last message into contiguous buffers.

        Their content is unspecified until this has returned. Raises CSDValueError, with nothing received, if the
        lengths differ.
        """
        views = _bytes_of(buffers)
        if (nbytes := sum(map(len, views))) != self._due:
            raise CSDValueError(f"the buffers have {nbytes} bytes, and {self._due} bytes come")
        self._due = 0
        if views:
            with self._using() as sock:
                self._fill(sock, views)

    def discard(self) -> None:
        """Receive the buffers of the last message, and forget them."""
        scratch, nbytes, self._due = memoryview(bytearray(min(self._due, CHUNK))), self._due, 0
        whole = [scratch] * (nbytes // CHUNK) + [scratch[: nbytes % CHUNK]]
        with self._using() as sock:
            self._fill(sock, [view for view in whole if len(view)])

    def _fill(self, sock: socket.socket, views: Sequence[memoryview]) -> None:
        nbytes = sum(map(len, views))
        until = time.monotonic() + self._timeout + nbytes / SLOWEST
        sock.settimeout(self._timeout)  # once, as it is a system call
        for run in runs(views):
            left = whole = run[0] if len(run) == 1 else memoryview(bytearray(sum(map(len, run))))
            while left:
                left = left[self._read(sock, left, self._timeout) :]
                if time.monotonic() > until:
                    raise ConnectionClosed(f"{self.address} is too slow: {nbytes} bytes take too long")
            for view in run if len(run) > 1 else ():
                view[:], whole = whole[: len(view)], whole[len(view) :]

    def _read(self, sock: socket.socket, view: memoryview, timeout: float | None) -> int:
        try:
            # Not recv_into(), which would read ciphertext from an SSLSocket whose TLS has ended.
            n = sock.read(len(view), view) if isinstance(sock, ssl.SSLSocket) else sock.recv_into(view)  # type: ignore[arg-type]
        except TimeoutError:
            raise ConnectionClosed(f"{self.address} has said nothing, or too little, for {timeout:g} s") from None
        if not n:
            raise ConnectionClosed(self._over or f"{self.address} has closed the connection")
        self.received += int(n)
        return int(n)

    # ---- its end -------------------------------------------------------------------

    @property
    def is_worn(self) -> bool:
        """Whether so much was sent or received that the connection's keys should be replaced."""
        return max(self.sent, self.received) > MOST_BYTES

    def has_news(self) -> bool:
        """Return, without waiting, whether something has arrived or the connection has ended."""
        try:
            with self._using() as sock:
                return arrives(sock, 0)
        except ConnectionClosed:
            return True

    def end(self) -> None:
        """End the connection; threads that wait on it raise ConnectionClosed. A no-op in a forked child."""
        if os.getpid() == self._process:  # in a child, this would end the parent's connection
            self._end(f"the connection to {self.address} is shut down")

    def _end(self, why: str) -> None:
        with self._lock:
            if not self._over:
                self._over = why
                with contextlib.suppress(OSError):
                    # Not SSLSocket.shutdown(), after which others would go on without TLS.
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
            if not self._users:  # so no thread waits on a descriptor that was reused
                self._sock.close()

    @contextlib.contextmanager
    def _using(self) -> Iterator[socket.socket]:
        """Yield the socket. After an error it is unknown how much was sent or received: end the connection."""
        if os.getpid() != self._process:
            raise CSDRuntimeError("this process was forked from the one that has the connection: open another")
        with self._lock:
            if self._over:
                raise ConnectionClosed(self._over)
            self._users += 1
        why = ""
        try:
            yield self._sock
        except TimeoutError as e:  # of sendall(), or of a handshake
            why = f"{self.address} has taken nothing, or too little, for {self._timeout:g} s"
            raise ConnectionClosed(self._over or why) from e
        except OSError as e:
            why = f"the connection to {self.address} has ended: {getattr(e, 'reason', None) or e.strerror or e}"
            raise ConnectionClosed(self._over or why) from e
        except BaseException as e:  # even Ctrl-C
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
    for connection in [*_open]:
        connection._sock.close()


os.register_at_fork(after_in_child=_close_in_child)


def _bytes_of(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Return byte views of contiguous buffers, without empty ones."""
    return [view.cast("B") for view in [memoryview(b) for b in buffers] if view.nbytes]


def arrives(sock: socket.socket, seconds: float | None) -> bool:
    """Wait at most `seconds` for something to receive or accept. Returns whether there is something."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def _linger(sock: socket.socket) -> None:
    """Let the other side read TLS's alert: closing with unread data resets a connection, and may lose the alert."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_WR)
        sock.settimeout(LINGER_SECONDS)
        for _ in range(4):
            if not socket.socket.recv(sock, SMALL):
                break


def runs(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Group the views by SMALL bytes; longer ones are alone."""
    run: list[memoryview] = []
    nbytes = 0
    for view in views:
        if run and nbytes + len(view) > SMALL:
            yield run
            run, nbytes = [], 0
        run.append(view)
        nbytes += len(view)
    if run:
        yield run
