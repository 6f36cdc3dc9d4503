"""TLS 1.3 on a Tcp connection. Unlike with SSLSocket, a thread may send while another receives."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Sequence

from .frames import CHUNK
from .tcp import ConnectionClosed, Tcp

HANDSHAKE_BYTES = 64 << 10  # the most that an unidentified peer may send


class Tls:
    """A stream within TLS 1.3, once handshake() has returned."""

    def __init__(self, tcp: Tcp, context: ssl.SSLContext, server: bool) -> None:
        self._tcp = tcp
        self._arrived, self._leaves = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaves, server_side=server)
        self._lock = threading.Lock()  # of OpenSSL's objects; not held during system calls
        self._sending = threading.Lock()  # records are sent in the order of their encryption

    def handshake(self) -> bytes:
        """Return the other side's certificate (DER). Raises ConnectionClosed, ssl.SSLError."""
        received = 0
        try:
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    self._flush()
                data = self._tcp.receive_some(4 << 10)
                received += len(data)
                if received > HANDSHAKE_BYTES:
                    raise ConnectionClosed("the TLS handshake is too long")
                self._arrived.write(data)
            self._flush()
            return self._tls.getpeercert(binary_form=True) or b""
        except BaseException:
            self._leave()
            raise

    def send(self, views: Sequence[memoryview], begins: bool = True) -> None:
        with self._sending:
            for view in views:
                for at in range(0, len(view), CHUNK):
                    with self._lock:
                        self._write(view[at : at + CHUNK])
                        data = self._leaves.read()
                    self._tcp.send([memoryview(data)], begins)
                    begins = False

    def receive(self, views: Sequence[memoryview]) -> None:
        for view in views:
            while view:
                with self._lock:
                    n = self._read(view)
                if self._leaves.pending:  # an answer to the other side's new key
                    self._flush()
                if n is None:
                    data = self._tcp.receive_some(CHUNK)
                    with self._lock:
                        self._arrived.write(data)
                    continue
                view = view[n:]

    def wait(self, seconds: float | None) -> None:
        with self._lock:
            arrived = bool(self._tls.pending() or self._arrived.pending)
        self._tcp.wait(seconds, arrived)

    def settimeout(self, seconds: float) -> None:
        self._tcp.settimeout(seconds)

    def shutdown(self) -> None:
        self._tcp.shutdown()

    def _write(self, view: memoryview) -> None:
        try:
            self._tls.write(view)
        except ssl.SSLError as e:
            raise self._broken(e.reason) from None

    def _read(self, view: memoryview) -> int | None:
        """Fill the view with what has arrived, and return the number of bytes; None if nothing can be decrypted yet."""
        try:
            n: int = self._tls.read(len(view), view)  # type: ignore[arg-type, assignment]
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLError as e:
            raise self._broken(e.reason) from None
        if not n:
            raise self._broken("the other side has ended it")
        return n

    def _broken(self, why: str) -> ConnectionClosed:
        self._leave()
        return ConnectionClosed(f"TLS is over: {why}")

    def _leave(self) -> None:
        """Send OpenSSL's alert, if any, and end the connection."""
        try:
            if self._leaves.pending:
                self._tcp.send([memoryview(self._leaves.read())])
        except ConnectionClosed:
            pass
        finally:
            self.shutdown()

    def _flush(self) -> None:
        with self._sending:
            with self._lock:
                data = self._leaves.read()
            if data:
                self._tcp.send([memoryview(data)])
