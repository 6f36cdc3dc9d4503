"""Listens at an owner's address, and calls back for each admitted peer."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import secrets
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import CSDError, CSDOSError, CSDRankError, CSDValueError
from .connection import FRAME, Connection, ConnectionClosed, arrives
from .keys import PROTOCOL, Accepted, Role, fingerprint
from .limits import READERS, SESSIONS, QuietLog, has_place, is_loopback, most_connections, network
from .schema import decoded
from .session import ANY_OPENING, OPENING, OPENING_BYTES, VERSION, OpenControl, OpenData, Opened, Peer, Session

FIRST_SECONDS = 2.0  # for the first byte
DEADLINE = 10.0  # seconds for the handshake of a connection, and its first message
JOIN_SECONDS = 60.0  # for all other connections of a session, once the control connection is admitted
BACKLOG = 128
PR_SET_DUMPABLE = 4  # constant of prctl(), which Python does not have
TICK = 0.25  # seconds between checks of deadlines, while there are any
TLS, OURS = b"\x16", FRAME.pack(0, 0)[:1]  # the first byte of a connection


class Refusal(Exception):
    """A connection is not admitted. The text contains nothing that the other side has sent."""


@dataclass(eq=False)
class PendingSession:
    """A session whose control connection is admitted, while its other connections are awaited."""

    session: Session
    streams: int
    until: float  # in time.monotonic()
    joined: dict[tuple[str, int], Connection] = field(default_factory=dict)  # by direction and stream


class Listener:
    """Accepts connections. Each handshake has a thread of its own; that of the last connection runs the session."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        key: Path | None = None,
        accept: Sequence[tuple[Role, Path]] = (),
        on_session: Callable[[Session], None],
        log: Callable[[str], None] = print,
        timeout: float = 600.0,
    ) -> None:
        """Listen at (host, port); port 0: any free one.

        key          key file; None: only on loopback, where everybody on this machine is an admin
        accept       files of certificates, and what their holders may do; holders of `key` are admins
        on_session   called in a thread of its own when all connections of a peer are there. The callee closes the
                     session; after an exception the listener does.
        log          prints a line; any thread calls it
        timeout      seconds for which a peer may later be silent within a message

        Raises CSDOSError, and CSDValueError if the address is not on loopback and there is no key.
        """
        if key is None and accept:
            raise CSDValueError("certificates are accepted, but the owner has no key: add --key FILE")
        if key is not None:
            # Keep this process's memory, which contains keys, out of core dumps and away from others' debuggers.
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        self._files = key, accept
        self._accepted = None if key is None else Accepted(key, accept)
        self._on_session, self._log, self._timeout = on_session, QuietLog(log), timeout
        self._lock = threading.Lock()
        self._joining: dict[str, PendingSession] = {}  # by the session's name
        # The number of connections that each session has, or will have. Sessions may be closed.
        self._sessions: weakref.WeakKeyDictionary[Session, int] = weakref.WeakKeyDictionary()
        # Handshakes under way: by thread, how to end the connection, and its origin. Only _accept() adds entries.
        self._handshakes: dict[threading.Thread, tuple[list[Callable[[], None]], str]] = {}
        self._closed = False
        self._sock = _listening(address, has_key=key is not None)
        self.address: tuple[str, int] = self._sock.getsockname()[:2]
        self._thread = threading.Thread(target=self._listen, name="csd_optim listen", daemon=True)
        self._thread.start()

    @property
    def fingerprint(self) -> str:
        """The fingerprint of this owner; empty without a key."""
        return self._accepted.key.fingerprint if self._accepted else ""

    def reload(self) -> None:
        """Read the key file and the certificates again, and revoke sessions whose key has lost its role.

        If a file is unusable, nothing changes, and the log says so.
        """
        key, accept = self._files
        if key is None:
            return
        try:
            accepted = Accepted(key, accept)
        except CSDError as e:
            self._log.say(f"the accepted keys remain those from before: {e}")
            return
        with self._lock:
            self._accepted = accepted
            for session in self._sessions:
                session.revoked |= not self._stands(session.peer)
        self._tidy()
        self._log.say(f"{len(accepted.roles)} keys are accepted")

    def close(self) -> None:
        """Stop listening, and end handshakes. Sessions continue."""
        self._closed = True
        with contextlib.suppress(OSError):  # closed before
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        while others := {t: end for t, (end, _) in [*self._handshakes.items()] if t is not threading.current_thread()}:
            for thread, end in others.items():
                with contextlib.suppress(OSError):  # its socket has just become a connection: the next turn ends that
                    end[-1]()
                thread.join(TICK)  # the thread may have become a session's
        self._tidy(everything=True)

    # ---- connections arrive ----------------------------------------------------------

    def _listen(self) -> None:
        with self._sock:
            while not self._closed:
                # In this order: a handshake is counted until its session or waiting connection is.
                busy = len(self._handshakes) + self._tidy() + self._log.print_counts()
                if arrives(self._sock, TICK if busy else None) and not self._closed:
                    self._accept()

    def _accept(self) -> None:
        try:
            sock, (host, *_) = self._sock.accept()
        except OSError as e:
            if self._closed or isinstance(e, ConnectionError):
                return
            # No descriptors or no memory: wait for some.
            self._log.refused(f"for lack of resources ({errno.errorcode.get(e.errno or 0)})")
            time.sleep(TICK)
            return
        why = ""
        if self._accepted is None and not is_loopback(host):  # Linux may let neighbours in (route_localnet)
            why = "from elsewhere, without a key"
        elif not has_place(host, [place for _, place in [*self._handshakes.values()]]):
            why = "of too many at once"
        if why:
            self._log.refused(why)
            sock.close()
            return
        thread = threading.Thread(target=self._welcome, args=(sock,), name="csd_optim handshake", daemon=True)
        self._handshakes[thread] = [lambda: sock.shutdown(socket.SHUT_RDWR)], network(host)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as e:  # no thread available
            self._log.refused(f"by {type(e).__name__}")
            del self._handshakes[thread]
            sock.close()

    def _welcome(self, sock: socket.socket) -> None:
        thread, session, why = threading.current_thread(), None, ""
        connection: Connection | None = None
        try:
            connection, accepted = self._connected(sock)
            self._handshakes[thread][0].append(connection.end)
            session = self._admit(connection, accepted)
        except Refusal as e:
            why = str(e)
        except (ConnectionClosed, OSError) as e:
            in_tls = isinstance(e.__cause__, ssl.SSLError) and not isinstance(e.__cause__, ssl.SSLEOFError)
            why = "without an accepted certificate, or TLS 1.3" if in_tls else "that were cut or late"
        except CSDRankError:
            why = "of another protocol"
        except Exception as e:
            why = f"by {type(e).__name__}"
        if why:
            self._log.refused(why)
            sock.close()
            if connection:
                connection.end()
        del self._handshakes[thread]
        if session:
            self._run(session)

    def _connected(self, sock: socket.socket) -> tuple[Connection, Accepted | None]:
        """Return the connection after TLS's handshake, if there is a key. Raises Refusal, ConnectionClosed, OSError."""
        first, accepted = sock.recv(1, socket.MSG_PEEK) if arrives(sock, FIRST_SECONDS) else b"", self._accepted
        if not first:
            raise Refusal("that were cut or late")
        if accepted is None or first == OURS:
            connection = Connection(sock, DEADLINE)
            if accepted is None and first == OURS:
                return connection, None
            if first in (TLS, OURS):
                connection.send(Opened(refused="needs key" if accepted else "has no key"))
            raise Refusal("without a key" if accepted else "with a key, and there is none here")
        if first != TLS:
            raise Refusal("of another protocol")
        inside = accepted.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return Connection(inside, DEADLINE), accepted

    def _run(self, session: Session) -> None:
        threading.current_thread().name = "csd_optim session"
        self._log.say(f"admitted {session.peer}")
        try:
            self._on_session(session)
        except Exception as e:
            session.close()
            self._log.say(f"the session of {session.peer} has ended by {type(e).__name__}")
            if not isinstance(e, CSDError):
                raise

    # ---- who is admitted -------------------------------------------------------------

    def _admit(self, connection: Connection, accepted: Accepted | None) -> Session | None:
        """Return the session if this connection completes one. Raises Refusal, CSDRankError."""
        until, print_ = time.monotonic() + DEADLINE, ""
        if accepted:
            certificate, is_same = connection.handshake(PROTOCOL)
            print_ = fingerprint(certificate)
            if not is_same:
                raise Refusal("of another version")
        left = max(until - time.monotonic(), 0.01)
        connection.settimeout(left)
        opening, nbytes = connection.receive(ANY_OPENING, left, OPENING_BYTES)
        if decoded(VERSION, opening).protocol != PROTOCOL:
            self._refuse(connection, "version")
        said = decoded(OPENING, opening)
        if nbytes:
            raise Refusal("of another protocol")
        with self._lock:
            if isinstance(said, OpenControl):
                opened, session = self._control(connection, print_, said)
            else:
                opened, session = self._join(connection, print_, said)
        if opened.refused:
            self._refuse(connection, opened.refused)
        try:
            connection.settimeout(self._timeout)
            connection.send(opened)
        except BaseException:
            if session:
                session.close()
            raise
        return session

    def _refuse(self, connection: Connection, why: str) -> None:
        connection.send(Opened(refused=why))  # type: ignore[arg-type]
        raise Refusal(REFUSALS[why])

    def _control(self, connection: Connection, print_: str, said: OpenControl) -> tuple[Opened, Session | None]:
        role = Role.ADMIN if self._accepted is None else self._accepted.roles.get(print_)
        if role is None:
            return Opened(refused="key"), None
        live = {session: n for session, n in self._sessions.items() if not session.closed}
        readers = sum(session.peer.role is Role.READER for session in live)
        wanted = 1 + 2 * said.streams
        too_many = len(live) >= SESSIONS or wanted + sum(live.values()) > most_connections()
        if too_many or (role is Role.READER and readers >= READERS):
            return Opened(refused="full"), None
        session, name = Session(connection, Peer(role, print_, connection.address)), secrets.token_hex(16)
        self._sessions[session] = wanted
        if not said.streams:
            return Opened(session=name), session
        self._joining[name] = PendingSession(session, said.streams, time.monotonic() + JOIN_SECONDS)
        return Opened(session=name), None

    def _join(self, connection: Connection, print_: str, said: OpenData) -> tuple[Opened, Session | None]:
        pending, place = self._joining.get(said.session), (said.way, said.stream)
        if pending is None or pending.session.peer.fingerprint != print_ or not self._stands(pending.session.peer):
            return Opened(refused="session"), None
        if said.stream >= pending.streams or place in pending.joined:
            return Opened(refused="request"), None
        pending.joined[place] = connection
        if len(pending.joined) < 2 * pending.streams:
            return Opened(), None
        del self._joining[said.session]
        session = pending.session
        for k in range(pending.streams):
            session.up.append(pending.joined["up", k])
            session.down.append(pending.joined["down", k])
        return Opened(), session

    def _stands(self, peer: Peer) -> bool:
        """Return whether the peer's key still has the role at admission. Called with the lock held."""
        return self._accepted is None or self._accepted.roles.get(peer.fingerprint) is peer.role

    def _tidy(self, everything: bool = False) -> int:
        """End sessions that wait for connections and are over, late or revoked, or all. Returns how many still wait."""
        now = math.inf if everything else time.monotonic()
        with self._lock:
            # A peer sends nothing on the control connection before its other connections have joined.
            ended = [
                name
                for name, pending in self._joining.items()
                if now >= pending.until or pending.session.revoked or pending.session.control.has_news()
            ]
            gone, waiting = [self._joining.pop(name) for name in ended], len(self._joining)
        for pending in gone:
            pending.session.close()
            for connection in pending.joined.values():
                connection.end()
        return waiting


REFUSALS = {  # in the log, by what is told to the other side
    "key": "of a key that is not accepted",
    "full": "of more sessions than the limit of open files (ulimit -n) or of readers allows",
    "request": "of an unknown kind",
    "session": "of an unknown session",
    "version": "of another version",
}


def _listening(address: tuple[str, int], *, has_key: bool) -> socket.socket:
    """Return a socket that listens at (host, port). Raises CSDOSError; CSDValueError if the address needs a key."""
    host, port = address
    try:
        family, *_, place = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
        # The name is looked up once, so that the same address is checked and used.
        if not (has_key or is_loopback(str(place[0]))):
            raise CSDValueError(
                f"{host}:{port} can be reached from other machines, and there is no key. Make one by `csd-optim serve "
                f"--init-key FILE`, start with `--key FILE`, and copy it to the trainers (CSD_OPTIM_KEY); or listen at "
                f"127.0.0.1, where everybody on this machine is let in"
            )
        return socket.create_server((str(place[0]), port), family=family, backlog=BACKLOG)
    except CSDError:
        raise
    except (OSError, UnicodeError) as e:  # UnicodeError: no name of a host can be like that
        number, why = getattr(e, "errno", errno.EINVAL), getattr(e, "strerror", None) or e
        raise CSDOSError(number, f"cannot listen at {host!r}, port {port}: {why}") from None
