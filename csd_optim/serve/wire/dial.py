"""Connects to an owner."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
from collections.abc import Collection
from typing import Any

from ...errors import CSDRankError, CSDUnavailableError, CSDValueError
from .connection import Connection, ConnectionClosed
from .keys import PROTOCOL, Key, fingerprint
from .limits import MOST_STREAMS, is_loopback
from .session import OPENED, OPENING_BYTES, OpenControl, OpenData, Opened, Session

CONNECT_SECONDS = 60.0
DEADLINE = 10.0  # seconds for the handshake of a connection
MOST_DELAY = 2.0  # seconds between attempts
REQUEST_BYTES = 32 << 20  # of the JSON: an owner's answer may have twice as much, to repeat what it was told
VERSIONS = f"the owner speaks another version of the protocol than {PROTOCOL}: install the same csd_optim on both sides"
RETRY = {  # by why an owner refuses: another try may help
    "full": "it has as many sessions as it may have: more need a higher limit of open files, ulimit -n",
    "session": "the owner does not know the session any more",
}
NO = {  # it does not help
    "needs key": "the owner has a key, and this side has none: set CSD_OPTIM_KEY or add ?key=FILE",
    "has no key": "the owner has no key, and this side insists on one: start it with --key FILE",
    "version": VERSIONS,
}


class RefusedError(Exception):
    """The owner refuses, or is another one: trying again does not help."""


def connect(
    address: tuple[str, int],
    *,
    key: Key | None,
    owner: str | Collection[str] | None = None,
    timeout: float = 600.0,
    streams: int = 1,
    within: float = CONNECT_SECONDS,
) -> Session:
    """Open a session with `streams` streams (0 to 8) with the owner at (host, port).

    key, owner   see keys.resolve(). Several fingerprints, also with commas between them: any of them. Without a key,
                 only on loopback, nothing is encrypted.
    timeout      seconds for which the owner may later be silent within a message
    within       seconds for which to retry if the owner does not answer, or is busy; 0: a single try. A try may
                 take 10 s more.

    Raises CSDUnavailableError if the owner does not answer or refuses, CSDValueError for another machine's address
    without a key.
    """
    if not 0 <= streams <= MOST_STREAMS:
        raise CSDValueError(f"Invalid number of streams: {streams}; it is 0 to {MOST_STREAMS}")
    pins = {*(owner.split(",") if isinstance(owner, str) else owner or ())}
    if key is not None and not pins:
        raise CSDValueError("the owner's fingerprint is missing: see keys.resolve()")
    until, delay, seen = time.monotonic() + within, 0.1, ""
    while True:
        try:
            for place in _places(address, key):
                try:
                    return _session(place, key, pins, streams, until, timeout)
                except ConnectionClosed as e:
                    seen = str(e)
        except RefusedError as e:
            raise CSDUnavailableError(errno.EACCES, f"{address[0]}:{address[1]}: {e}") from None
        delay = min(1.5 * delay, MOST_DELAY)
        if not _pause(delay, until):
            raise CSDUnavailableError(
                errno.ECONNREFUSED,
                f"no optimizer rank answers at {address[0]}:{address[1]}: is `csd-optim serve` running there? ({seen})",
            )


def _pause(delay: float, until: float) -> bool:
    """Wait for some time about `delay`; return False, at once, if that would take too long."""
    pause = delay * (0.5 + secrets.randbelow(1000) / 1000)  # not from `random`, whose state belongs to the program
    if time.monotonic() + pause > until:
        return False
    time.sleep(pause)
    return True


def _session(place: Any, key: Key | None, pins: set[str], streams: int, until: float, timeout: float) -> Session:
    """Open a session at a socket address. Raises ConnectionClosed if a retry may help, RefusedError."""
    control, opened = _opened(place, key, pins, OpenControl(protocol=PROTOCOL, streams=streams))
    session = Session(control)
    try:
        for k in range(streams):
            for way, connections in (("up", session.up), ("down", session.down)):
                data = OpenData(protocol=PROTOCOL, session=opened.session, way=way, stream=k)  # type: ignore[arg-type]
                while len(connections) == k:
                    try:
                        connections.append(_opened(place, key, pins, data)[0])
                    except ConnectionClosed:  # the owner is busy with other handshakes, or has ended the session
                        if control.has_news() or not _pause(0.3, until):
                            raise
        session.settimeout(timeout)
    except BaseException:
        session.close()
        raise
    return session


def _opened(place: Any, key: Key | None, pins: set[str], opening: OpenControl | OpenData) -> tuple[Connection, Opened]:
    """Open a connection. Raises ConnectionClosed, RefusedError."""
    connection = _connected(place, key)
    try:
        if key is not None:
            certificate, is_same = connection.handshake(PROTOCOL)
            if (print_ := fingerprint(certificate)) not in pins:
                raise RefusedError(
                    f"the owner has the key {print_}, not {' or '.join(sorted(pins))}: is this the right machine? "
                    f"`csd-optim serve` prints there which key it has, for ?owner="
                )
            if not is_same:
                raise RefusedError(VERSIONS)
        connection.send(opening)
        # With TLS 1.3 this side learns only now whether the other side accepts its certificate.
        opened, nbytes = connection.receive(OPENED, DEADLINE, OPENING_BYTES)
        if nbytes:
            raise RefusedError("no `csd-optim serve` answers there")
    except BaseException as e:
        connection.end()
        raise (_explained(e, key) if isinstance(e, CSDRankError) else e) from None
    if not opened.refused:
        return connection, opened
    connection.end()
    if opened.refused in RETRY:
        raise ConnectionClosed(RETRY[opened.refused])
    raise _not_accepted(key) if opened.refused == "key" else RefusedError(NO.get(opened.refused, "the owner refuses"))


def _explained(e: CSDRankError, key: Key | None) -> Exception:
    """Return the error for a connection that has ended before the owner's answer."""
    reason = getattr(e.__cause__, "reason", None) or ""
    if key is not None and "ALERT" in reason and ("CERT" in reason or "_CA" in reason):
        return _not_accepted(key)
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
        return RefusedError(f"{NO['has no key']}; or it is of another version than this side, {PROTOCOL}")
    asked = f"does the owner accept the {key}, " if key else ""
    return ConnectionClosed(f"{e}: {asked}is it busy, or of another version than this side, {PROTOCOL}?")


def _not_accepted(key: Key | None) -> RefusedError:
    return RefusedError(f"the owner does not accept the key {key.fingerprint if key else ''}")


def _connected(place: Any, key: Key | None) -> Connection:
    """Return a connection to a socket address. Raises ConnectionClosed."""
    family, where = place
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(DEADLINE)
        sock.connect(where)
        if sock.getsockname() == sock.getpeername():  # on loopback without a listener: TCP's simultaneous open
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        if key is not None:
            sock = key.client.wrap_socket(sock, do_handshake_on_connect=False)
        return Connection(sock, DEADLINE, REQUEST_BYTES)
    except (OSError, ConnectionClosed) as e:
        sock.close()
        raise ConnectionClosed(getattr(e, "strerror", None) or str(e)) from None


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
