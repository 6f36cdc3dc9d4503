"""Admits peers: the owner's side of the handshake, and the joining of data connections to their control connection."""

from __future__ import annotations

import dataclasses
import math
import secrets
import threading
import time
import weakref

from . import handshake, sealed
from .control import MESSAGE_BYTES, ControlConnection
from .frames import DataConnection
from .handshake import Refusal, Request
from .keys import Accepted, fingerprint
from .limits import most_connections
from .session import Peer, Role, Session
from .tcp import Stream, Tcp
from .tls import Tls

JOIN_SECONDS = 60.0  # for all data connections, once the control connection is admitted
REFUSALS = {  # by the status sent to the other side
    handshake.REFUSED: "of a key that is not accepted, or not for this",
    handshake.BUSY: "of more sessions than the limit of open files (ulimit -n) or of readers allows",
}
SESSIONS, READERS = 4096, 64  # open at once: all, and readers'
READER_BYTES = 64 << 10  # maximum length of a reader's message


@dataclasses.dataclass(frozen=True, eq=False)
class PendingSession:
    """A session whose control connection is admitted, while its data connections are awaited."""

    ticket: bytes = dataclasses.field(repr=False)
    session: Session
    tcp: Tcp  # of the control connection
    streams: int
    kind: int  # of its data connections
    until: float  # in time.monotonic()


class Admission:
    """Decides about each connection of an owner."""

    def __init__(self, accepted: Accepted | None, timeout: float) -> None:
        """`accepted`: None, where no keys are needed. `timeout`: of admitted connections."""
        self._accepted, self._timeout = accepted, timeout
        self._lock = threading.Lock()
        self._joining: dict[bytes, PendingSession] = {}  # by the session's name
        # The number of connections that each session has, or will have. Sessions may be closed.
        self._sessions: weakref.WeakKeyDictionary[Session, int] = weakref.WeakKeyDictionary()

    def admit(self, tcp: Tcp) -> Session | None:
        """Do the handshake of a connection. Returns the session if this connection completes it.

        Raises Refusal, ConnectionClosed, ssl.SSLError; the caller then shuts the connection down.
        """
        until = time.monotonic() + handshake.DEADLINE
        first = handshake.read(tcp, handshake.PREFACE.size)
        tcp.finish_by(until)
        magic, version, kind, name = handshake.PREFACE.unpack(first)
        if magic != handshake.MAGIC:
            raise Refusal("of another protocol")
        if version != handshake.VERSION:
            handshake.say(tcp, handshake.answer(handshake.OTHER_VERSION))
            raise Refusal("of another version")
        accepted = self._accepted
        if bool(kind & handshake.PLAIN) is not (accepted is None):
            handshake.say(tcp, handshake.answer(handshake.HAS_NO_KEY if accepted is None else handshake.NEEDS_KEY))
            raise Refusal("with a key, and there is none here" if accepted is None else "without a key")
        kind &= ~handshake.PLAIN
        if kind == handshake.CONTROL:
            return self._control(tcp, first, Request(*handshake.REQUEST.unpack(name)))
        if kind in (handshake.DATA, handshake.DATA_IN_TLS):
            return self._data(tcp, first, kind, name)
        raise Refusal("of an unknown kind")

    def replace(self, accepted: Accepted) -> None:
        """From now on accept these keys; revoke sessions of keys that have lost their role."""
        with self._lock:
            self._accepted = accepted
            for session in self._sessions:
                session.revoked |= not self._stands(session.peer)
        self.tidy()

    def tidy(self, everything: bool = False) -> int:
        """End sessions that wait for data connections and are over, late or revoked, or all.

        Returns how many still wait.
        """
        now = math.inf if everything else time.monotonic()
        with self._lock:
            # A peer sends nothing on the control connection before its data connections have joined.
            ended = {n: j for n, j in self._joining.items() if now >= j.until or j.tcp.has_news() or j.session.revoked}
            self._joining = {n: j for n, j in self._joining.items() if n not in ended}
            waiting = len(self._joining)
        for joining in ended.values():
            joining.session.close()
        return waiting

    # ---- control connections ----------------------------------------------------------------

    def _control(self, tcp: Tcp, first: bytes, request: Request) -> Session | None:
        accepted = self._accepted
        handshake.say(tcp, handshake.answer(handshake.GO_ON))
        stream, print_ = self._in_tls(tcp, accepted, first)
        role = Role.ADMIN if accepted is None else accepted.roles.get(print_)
        name, ticket = secrets.token_bytes(handshake.SESSION), secrets.token_bytes(handshake.TICKET)
        most = READER_BYTES if role is Role.READER else MESSAGE_BYTES
        peer = Peer(role or Role.READER, print_, tcp.address)
        session = Session(ControlConnection(stream, most, is_owner=True), [], peer)
        with self._lock:
            status = self._status(role, peer, request)
            if status not in REFUSALS:
                self._sessions[session] = 1 + request.streams
                kind = handshake.DATA if status == handshake.GO_ON else handshake.DATA_IN_TLS
                if request.streams:  # before message 5, after which data connections may come
                    until = time.monotonic() + JOIN_SECONDS
                    self._joining[name] = PendingSession(ticket, session, tcp, request.streams, kind, until)
        if status in REFUSALS:
            handshake.say(stream, handshake.answer(status), bytes(handshake.SESSION + handshake.TICKET))
            raise Refusal(REFUSALS[status])
        try:
            handshake.say(stream, handshake.answer(status), name, ticket)
        except BaseException:
            with self._lock:
                self._joining.pop(name, None)
            session.close()
            raise
        return None if request.streams else self._whole(session)

    def _status(self, role: Role | None, peer: Peer, request: Request) -> int:
        """Return the status for message 5. Called with the lock held."""
        if role is None or not self._stands(peer):
            return handshake.REFUSED
        if request.streams > handshake.MOST_STREAMS or request.flags & ~handshake.NO_FRAMES:
            return handshake.REFUSED
        live = {session: n for session, n in self._sessions.items() if not session.closed}
        readers = sum(session.peer.role is Role.READER for session in live)
        too_many = len(live) >= SESSIONS or 1 + request.streams + sum(live.values()) > most_connections()
        if too_many or (role is Role.READER and readers >= READERS):
            return handshake.BUSY
        plain = self._accepted is None
        return handshake.GO_ON if plain or (sealed.AVAILABLE and not request.flags) else handshake.GO_ON_IN_TLS

    def _stands(self, peer: Peer) -> bool:
        """Return whether the peer's key still has the role at admission. Called with the lock held."""
        return self._accepted is None or self._accepted.roles.get(peer.fingerprint) is peer.role

    # ---- data connections -------------------------------------------------------------------

    def _data(self, tcp: Tcp, first: bytes, kind: int, name: bytes) -> Session | None:
        with self._lock:
            joining = self._joining.get(name)
        if joining is None or joining.kind != kind:
            raise Refusal("of an unknown session")  # without further work or an answer
        stream: Stream = tcp
        if kind == handshake.DATA_IN_TLS:
            handshake.say(tcp, handshake.answer(handshake.GO_ON))
            stream, print_ = self._in_tls(tcp, self._accepted, first)
            if print_ != joining.session.peer.fingerprint:
                raise Refusal("of another key than its session")
        said = handshake.prove_to_trainer(stream, first, joining.ticket)
        if kind == handshake.DATA_IN_TLS or self._accepted is None:
            connection = DataConnection(stream)
        else:
            up, down = handshake.frame_keys(joining.ticket, said)
            connection = sealed.SealedConnection(tcp, sends=down, receives=up)
        session = joining.session
        with self._lock:
            if self._joining.get(name) is not joining:
                raise Refusal("of an unknown session")
            session.data.append(connection)
            if complete := len(session.data) == joining.streams:
                del self._joining[name]  # with the ticket: nothing can join any more
        try:
            handshake.say(stream, handshake.answer(handshake.GO_ON))
        except BaseException:
            session.close()
            raise
        return self._whole(session) if complete else None

    def _whole(self, session: Session) -> Session:
        """Return the complete session, with the timeout of sessions on its connections."""
        try:
            session.settimeout(self._timeout)
        except BaseException:  # a connection has ended already
            session.close()
            raise
        return session

    def _in_tls(self, tcp: Tcp, accepted: Accepted | None, first: bytes) -> tuple[Stream, str]:
        """Change to TLS if there is a key, and verify message 4.

        Returns the stream, and the other side's fingerprint.
        """
        stream: Stream = tcp
        print_ = ""
        if accepted is not None:
            stream = tls = Tls(tcp, accepted.context, server=True)
            print_ = fingerprint(tls.handshake())
        if handshake.read(stream, handshake.PREFACE.size) != first:
            raise Refusal("with a message that was changed on the way")
        return stream, print_
