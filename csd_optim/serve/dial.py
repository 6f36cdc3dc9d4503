"""Connects to an owner: the calling side of the handshake."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import socket
import ssl
import time
import warnings
from collections.abc import Collection, Iterator
from typing import Any

from ..errors import CSDUnavailableError, CSDValueError, CSDWarning, users_stacklevel
from . import handshake, sealed
from .control import ControlConnection
from .frames import DataConnection
from .handshake import BusyError, Refusal, Request
from .keys import Key, fingerprint
from .limits import is_loopback
from .session import Session
from .tcp import ConnectionClosed, Stream, Tcp
from .tls import Tls

CONNECT_SECONDS = 60.0
MOST_DELAY = 2.0  # seconds between attempts
FULL = "it has as many sessions as it may have: more need a higher limit of open files, ulimit -n"
NO = {  # statuses by which an owner refuses
    handshake.REFUSED: "the owner refuses the connection",
    handshake.NEEDS_KEY: "the owner has a key, and this side has none: set CSD_OPTIM_KEY or add ?key=FILE",
    handshake.HAS_NO_KEY: "the owner has no key, and this side insists on one: start it with --key FILE",
}


def connect(
    address: tuple[str, int],
    *,
    key: Key | None,
    owner: str | Collection[str] | None = None,
    timeout: float = 600.0,
    streams: int = 1,
    within: float = CONNECT_SECONDS,
) -> Session:
    """Open a control connection and `streams` data connections (0 to 8) to the owner at (host, port).

    key, owner   see keys.resolve(). Several fingerprints, also with commas between them: any of them. Without a key,
                 only on loopback, nothing is encrypted.
    timeout      seconds for which the owner may later be silent within a message
    within       seconds for which to retry if the owner does not answer, or is busy; 0: a single try. A try may
                 take 10 s more.

    Raises CSDUnavailableError if the owner does not answer or refuses, CSDValueError for another machine's address
    without a key.
    """
    pins = {*(owner.split(",") if isinstance(owner, str) else owner or ())}
    dialler, until, delay, seen = _Dialler(key, pins, streams), time.monotonic() + within, 0.1, ""
    while True:
        try:
            for place in _places(address, key):
                try:
                    return dialler.session(place, until, timeout)
                except ConnectionClosed as e:  # also BusyError
                    seen = str(e)
        except (Refusal, ssl.SSLError) as e:
            why = getattr(e, "reason", None) or e
            raise CSDUnavailableError(errno.EACCES, f"{address[0]}:{address[1]}: {why}") from None
        # Not from `random`, whose state belongs to the program.
        delay = min(1.5 * delay, MOST_DELAY)
        pause = delay * (0.5 + secrets.randbelow(1000) / 1000)
        if time.monotonic() + pause > until:
            raise CSDUnavailableError(
                errno.ECONNREFUSED,
                f"no optimizer rank answers at {address[0]}:{address[1]}: is `csd-optim serve` running there? ({seen})",
            )
        time.sleep(pause)


class _Dialler:
    """Attempts to open a session."""

    def __init__(self, key: Key | None, pins: set[str], streams: int) -> None:
        if not 0 <= streams <= handshake.MOST_STREAMS:
            raise CSDValueError(f"Invalid number of data connections: {streams}; it is 0 to {handshake.MOST_STREAMS}")
        if key is not None and not pins:
            raise CSDValueError("the owner's fingerprint is missing: see keys.resolve()")
        self.key, self.pins = key, pins
        flags = 0 if sealed.AVAILABLE else handshake.NO_FRAMES
        self.request = Request(streams, flags)
        self.plain = handshake.PLAIN if key is None else 0

    def session(self, place: Any, until: float, timeout: float) -> Session:
        """Open a session at a socket address. Raises ConnectionClosed if a retry may help, BusyError, Refusal."""
        with contextlib.ExitStack() as undo:
            control, print_, in_tls, name, ticket = self.control(place)
            undo.callback(control.shutdown)
            data: list[DataConnection] = []
            while len(data) < self.request.streams:
                try:
                    data.append(self.data(place, in_tls, print_, name, ticket))
                    undo.callback(data[-1].shutdown)
                except BusyError:
                    pause = 0.05 + secrets.randbelow(500) / 1000
                    if time.monotonic() + pause > until:
                        raise
                    time.sleep(pause)
            session = Session(ControlConnection(control), data)
            session.settimeout(timeout)
            undo.pop_all()
            return session

    def control(self, place: Any) -> tuple[Stream, str, bool, bytes, bytes]:
        """Return the control connection, the owner's fingerprint, whether data travels in TLS, session and ticket."""
        hello = handshake.preface(handshake.CONTROL | self.plain, self.request.pack())
        with _dialled(place) as tcp:
            stream, print_ = self.greeted(tcp, hello, self.pins)
            try:
                handshake.say(stream, hello)
                answer, name, ticket = (handshake.read(stream, n) for n in handshake.ADMITTED)
            except ConnectionClosed as e:
                # With TLS 1.3 this side finishes before the other side has checked the certificate.
                if self.key is not None and "ALERT" in str(e):
                    raise self.not_accepted() from None
                asked = f": does the owner accept the {self.key}?" if self.key else ""
                raise ConnectionClosed(f"the handshake was cut{asked}") from None
            status = handshake.status_of(answer)
            in_tls = status == handshake.GO_ON_IN_TLS
            if status == handshake.REFUSED and self.key is not None:
                raise self.not_accepted()
            if not (status == handshake.GO_ON or (in_tls and not self.plain)):
                raise _no(status, FULL)
            if not (sealed.AVAILABLE or in_tls or self.plain):
                raise Refusal("the owner does not see that `cryptography` is missing here")
            if in_tls and self.request.streams:
                _warn_of_tls()
            return stream, print_, in_tls, name, ticket

    def data(self, place: Any, in_tls: bool, print_: str, name: bytes, ticket: bytes) -> DataConnection:
        with _dialled(place) as tcp:
            if in_tls:
                stream, _ = self.greeted(tcp, handshake.preface(handshake.DATA_IN_TLS, name), {print_})
                handshake.prove_to_owner(stream, handshake.DATA_IN_TLS, name, ticket)
                return DataConnection(stream)
            said = handshake.prove_to_owner(tcp, handshake.DATA | self.plain, name, ticket)
            up, down = handshake.frame_keys(ticket, said)
            return DataConnection(tcp) if self.plain else sealed.SealedConnection(tcp, sends=up, receives=down)

    def greeted(self, tcp: Tcp, hello: bytes, pins: set[str]) -> tuple[Stream, str]:
        """Send message 1, and change to TLS if there is a key. Returns the stream and the owner's fingerprint."""
        handshake.say(tcp, hello)
        status = handshake.status_of(handshake.read(tcp, handshake.ANSWER.size))
        if status != handshake.GO_ON:
            raise _no(status, handshake.IS_BUSY)
        if self.key is None:
            return tcp, ""
        tls = Tls(tcp, self.key.client, server=False)
        print_ = fingerprint(tls.handshake())
        if print_ not in pins:
            raise Refusal(
                f"the owner has the key {print_}, not {' or '.join(sorted(pins))}: is this the right machine? "
                f"`csd-optim serve` prints there which key it has, for ?owner="
            )
        return tls, print_

    def not_accepted(self) -> Refusal:
        assert self.key
        return Refusal(f"the owner does not accept the key {self.key.fingerprint}")


def _no(status: int, busy: str) -> Exception:
    """Return the error for an answer that ends a handshake."""
    return BusyError(busy) if status == handshake.BUSY else Refusal(NO.get(status, f"status {status}"))


def _places(address: tuple[str, int], key: Key | None) -> list[Any]:
    """Return the socket addresses of (host, port). Raises CSDValueError if an address needs a key and `key` is None."""
    host, port = address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:  # UnicodeError: not a valid host name
        why = getattr(e, "strerror", None) or e
        raise CSDUnavailableError(errno.EHOSTUNREACH, f"the address of {host!r} is not known: {why}") from None
    for *_, place in found:
        if key is None and not is_loopback(str(place[0])):
            raise CSDValueError(
                f"{host}:{port} is another machine, which is reached with a key only: copy the key file of its "
                f"`csd-optim serve --key FILE`, and set CSD_OPTIM_KEY or add ?key=FILE"
            )
    return [(family, place) for family, _, _, _, place in found]


@contextlib.contextmanager
def _dialled(place: Any) -> Iterator[Tcp]:
    """Connect to a socket address; shut the connection down after an error, or if the block takes too long."""
    family, where = place
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(handshake.DEADLINE)
        sock.connect(where)
        if sock.getsockname() == sock.getpeername():  # on loopback without a listener: TCP's simultaneous open
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        tcp = Tcp(sock, handshake.DEADLINE)
    except (OSError, ConnectionClosed) as e:
        sock.close()
        raise ConnectionClosed(getattr(e, "strerror", None) or str(e)) from None
    tcp.finish_by(time.monotonic() + handshake.DEADLINE)
    try:
        yield tcp
    except BaseException:
        tcp.shutdown()
        raise


@functools.cache
def _warn_of_tls() -> None:
    warnings.warn(CSDWarning(sealed.SLOW), stacklevel=users_stacklevel())
