"""Connects to an owner: the handshake of whoever calls."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import socket
import ssl
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

from ..errors import CSDUnavailableError, CSDValueError, CSDWarning, users_stacklevel
from . import handshake, sealed
from .control import ControlConnection
from .frames import DataConnection
from .handshake import BusyError, Refusal, Request
from .keys import Key, fingerprint
from .limits import is_loopback
from .session import Peer, Role, Session
from .tcp import ConnectionClosed, Stream, Tcp
from .tls import Tls

CONNECT_SECONDS = 60.0
MOST_DELAY = 2.0  # seconds between attempts
NO = {  # what an owner may say instead of going on
    handshake.REFUSED: "the owner refuses the connection",
    handshake.NEEDS_KEY: "the owner has a key, and this side has none: set CSD_OPTIM_KEY or add ?key=FILE",
    handshake.HAS_NO_KEY: "the owner has no key, and this side insists on one: start it with --key FILE",
    handshake.OTHER_OWNER: "this is another one of the owners: their addresses are mixed up",
}


def connect(
    address: tuple[str, int],
    *,
    key: Key | None,
    owner: str | Collection[str] | None = None,
    timeout: float = 600.0,
    streams: int = 1,
    within: float = CONNECT_SECONDS,
    wanted: int = 0,
    number: int | None = None,
) -> Session:
    """Open a control connection and `streams` data connections (0 to 8) to the owner at (host, port).

    key, owner   see keys.resolve(). Several fingerprints, also with commas between them: any of them. Without a key,
                 only on loopback, nothing is encrypted.
    timeout      seconds for which the owner may later be silent within a message
    within       seconds for which an owner that does not answer, or is busy, is tried again; 0: only once. A try may
                 take 10 s more.
    wanted       number of the owner that shall answer
    number       of the owner that connects; None: a trainer connects

    Raises CSDUnavailableError if the owner does not answer or refuses, CSDValueError for a stranger's address without
    a key.
    """
    pins = {*(owner.split(",") if isinstance(owner, str) else owner or ())}
    dialler, until, delay, seen = _Dialler(key, pins, wanted, number, streams), time.monotonic() + within, 0.1, ""
    while True:
        try:
            for place in _places(address, key):
                try:
                    return dialler.session(place, until, timeout)
                except (_Again, BusyError) as e:
                    seen = str(e) or "it is busy"
        except (Refusal, ssl.SSLError) as e:
            why = getattr(e, "reason", None) or e
            raise CSDUnavailableError(errno.EACCES, f"{address[0]}:{address[1]}: {why}") from None
        # Not of `random`, whose numbers are the program's.
        delay = min(1.5 * delay, MOST_DELAY)
        pause = delay * (0.5 + secrets.randbelow(1000) / 1000)
        if time.monotonic() + pause > until:
            raise CSDUnavailableError(
                errno.ECONNREFUSED,
                f"no optimizer rank answers at {address[0]}:{address[1]}: is `csd-optim serve` running there? ({seen})",
            )
        time.sleep(pause)


class _Again(Exception):
    """This attempt has failed in a way that may pass."""


class _Dialler:
    """Attempts to open a session."""

    def __init__(self, key: Key | None, pins: set[str], wanted: int, number: int | None, streams: int) -> None:
        if not 0 <= streams <= handshake.MOST_STREAMS:
            raise CSDValueError(f"Invalid number of data connections: {streams}; it is 0 to {handshake.MOST_STREAMS}")
        if key is not None and not pins:
            raise CSDValueError("the owner's fingerprint is missing: see keys.resolve()")
        self.key, self.pins, self.number = key, pins, number
        flags = 0 if sealed.AVAILABLE else handshake.NO_FRAMES
        self.request = Request(number or 0, wanted, streams, flags)
        self.plain = handshake.PLAIN if key is None else 0

    def session(self, place: Any, until: float, timeout: float) -> Session:
        """Open a session at a socket address. Raises _Again, BusyError, Refusal."""
        control: Stream | None = None
        data: list[DataConnection] = []
        try:
            control, print_, in_tls, session, ticket = self.control(place)
            for _ in range(self.request.streams):
                attempt = functools.partial(self.data, place, in_tls, print_, session, ticket)
                data.append(self.retried(attempt, until))
            host, port = place[1][:2]
            peer = Peer(Role.OWNER, print_, f"{host}:{port}", self.request.wanted)
            opened = Session(ControlConnection(control), data, peer)
            opened.settimeout(timeout)
            return opened
        except BaseException as e:
            for connection in data:
                connection.shutdown()
            if control is not None:
                control.shutdown()
            if isinstance(e, ConnectionClosed):
                raise _Again(str(e)) from None
            raise

    def control(self, place: Any) -> tuple[Stream, str, bool, bytes, bytes]:
        kind = handshake.CONTROL if self.number is None else handshake.OWNERS
        hello = handshake.preface(kind | self.plain, self.request.pack())
        with _dialled(place) as tcp:
            stream, print_ = self.greeted(tcp, hello, self.pins)
            try:
                handshake.say(stream, hello)
                status = handshake.status_of(handshake.read(stream, handshake.ANSWER.size))
                session, ticket = (handshake.read(stream, n) for n in (handshake.SESSION, handshake.TICKET))
            except ConnectionClosed as e:
                # With TLS 1.3 this side has finished before the other side has looked at the certificate.
                if self.key is not None and "ALERT" in str(e):
                    raise Refusal(f"the owner does not accept the key {self.key.fingerprint}") from None
                asked = f": does the owner accept the {self.key}?" if self.key else ""
                raise _Again(f"the handshake was cut{asked}") from None
            if status == handshake.BUSY:
                raise BusyError(
                    "it has as many sessions as it may have: more need a higher limit of open files, ulimit -n"
                )
            in_tls = status == handshake.GO_ON_IN_TLS
            if status == handshake.REFUSED and self.key is not None:
                raise Refusal(f"the owner does not accept the key {self.key.fingerprint}")
            if status not in (handshake.GO_ON, handshake.GO_ON_IN_TLS) or (self.plain and in_tls):
                raise Refusal(NO.get(status, f"status {status}"))
            if self.number is not None and session != self.request.answered_by_owner():
                raise Refusal(NO[handshake.OTHER_OWNER])
            if not (sealed.AVAILABLE or in_tls or self.plain):
                raise Refusal("the owner does not see that `cryptography` is missing here")
            if in_tls and self.request.streams:
                _warn_of_tls()
            return stream, print_, in_tls, session, ticket

    def data(self, place: Any, in_tls: bool, print_: str, session: bytes, ticket: bytes) -> DataConnection:
        with _dialled(place) as tcp:
            try:
                if in_tls:
                    kind = handshake.DATA_IN_TLS
                    stream, _ = self.greeted(tcp, handshake.preface(kind, session), {print_})
                    handshake.prove_to_owner(stream, kind, session, ticket)
                    return DataConnection(stream)
                said = handshake.prove_to_owner(tcp, handshake.DATA | self.plain, session, ticket)
            except ConnectionClosed as e:
                raise _Again(str(e)) from None
            up, down = handshake.frame_keys(ticket, said)
            return DataConnection(tcp) if self.plain else sealed.SealedConnection(tcp, sends=up, receives=down)

    def greeted(self, tcp: Tcp, hello: bytes, pins: set[str]) -> tuple[Stream, str]:
        """Say message 1, and change to TLS if there is a key. Returns the stream and the owner's fingerprint."""
        try:
            handshake.say(tcp, hello)
            status = handshake.status_of(handshake.read(tcp, handshake.ANSWER.size))
        except ConnectionClosed as e:  # an owner that has no place may close before it has read
            raise _Again(str(e)) from None
        if status == handshake.BUSY:
            raise BusyError
        if status != handshake.GO_ON:
            raise Refusal(NO.get(status, f"status {status}"))
        if self.key is None:
            return tcp, ""
        tls = Tls(tcp, self.key.client, server=False)
        try:
            print_ = fingerprint(tls.handshake())
        except ConnectionClosed as e:
            raise _Again(str(e)) from None
        if print_ not in pins:
            raise Refusal(
                f"the owner has the key {print_}, not {' or '.join(sorted(pins))}: is this the right machine? "
                f"`csd-optim serve` prints there which key it has, for ?owner="
            )
        return tls, print_

    def retried(self, attempt: Callable[[], DataConnection], until: float) -> DataConnection:
        """Open a data connection; while the owner is busy, try again."""
        while True:
            try:
                return attempt()
            except BusyError:
                pause = 0.05 + secrets.randbelow(500) / 1000
                if time.monotonic() + pause > until:
                    raise
                time.sleep(pause)


def _places(address: tuple[str, int], key: Key | None) -> list[Any]:
    """Return the socket addresses of (host, port). Raises CSDValueError if one needs a key, and there is none."""
    host, port = address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:  # UnicodeError: no name of a host can be like that
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
        if sock.getsockname() == sock.getpeername():  # on loopback, if nobody listens there: TCP's simultaneous open
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        tcp = Tcp(sock, handshake.DEADLINE)
    except (OSError, ConnectionClosed) as e:
        sock.close()
        raise _Again(getattr(e, "strerror", None) or str(e)) from None
    timer = threading.Timer(handshake.DEADLINE, tcp.shutdown)
    timer.daemon = True
    timer.start()
    try:
        yield tcp
    except BaseException:
        tcp.shutdown()
        raise
    finally:
        timer.cancel()


@functools.cache
def _warn_of_tls() -> None:
    warnings.warn(CSDWarning(sealed.SLOW), stacklevel=users_stacklevel())
